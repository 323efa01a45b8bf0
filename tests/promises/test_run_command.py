"""What the commands run and show print, and their exit statuses."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.commands import loads_none_of, rpel
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration
SMALL = {
    "model": "linear", "nodes": "8", "byzantine": "1", "pull": "4", "eval_every": "100", "eval_size": "50",
    "lr": "0.1", "threads": "1",
}  # fmt: skip
FLAGS = [part for key, value in SMALL.items() for part in ("-s", f"{key}={value}")]


def test_run_ends_with_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "quickstart", *FLAGS, "--rounds", "10", "--out", str(tmp_path)]
    out, err = rpel(*arguments, capsys=capsys)
    labels = (
        "accuracy mean",
        "accuracy worst",
        "accuracy median",
        "loss",
        "consensus",
        "hostile peers met",
        "messages",
    )
    assert all(label in out for label in (*labels, "seconds", "kept in", str(tmp_path)))
    assert err.count(": round ") == 10
    assert "planned for 1" in err
    out, err = rpel(*arguments, "--json", capsys=capsys)
    content = json.loads(out)
    assert "finished and not repeated" in err
    proof = content["certificate"]
    assert proof == {"guarantee": "plan", "held": True, "max_observed": 1, "violations_total": 0}
    assert (content["reused"], content["pull"], content["b_hat"], content["rounds"]) == (True, 4, 1, 10)
    assert Path(content["path"]).is_dir()
    out, _ = rpel("resume", content["path"], "--json", capsys=capsys)
    assert json.loads(out) == content


def test_several_seeds_are_shown_with_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "quickstart", *FLAGS, "--rounds", "2", "--out", str(tmp_path), "--seeds", "0,1"]
    out, _ = rpel(*arguments, capsys=capsys)
    assert "2 seeds" in out
    assert " to " in out
    assert out.count(str(tmp_path)) == 2
    content = json.loads(rpel(*arguments, "--json", capsys=capsys)[0])
    assert [run["seed"] for run in content["runs"]] == [0, 1]
    low, high = sorted(run["accuracy_mean"] for run in content["runs"])
    assert (content["intervals"]["accuracy_mean"]["low"], content["intervals"]["accuracy_mean"]["high"]) == (
        low,
        high,
    )


def test_show_prints_toml_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = rpel("show", "mnist-100", capsys=capsys)
    fields = tomllib.loads(out)
    assert (fields["nodes"], fields["b_hat"], fields["lr"]) == (100, 7, 0.5)
    assert "rule" not in fields
    mine = tmp_path / "mine.toml"
    mine.write_text(rpel("show", "quickstart", capsys=capsys)[0])
    changed = [*FLAGS, "--rounds", "2", "--out", str(tmp_path / "runs"), "--attack", "alie(z=1)"]
    changed += ["-s", "silent=true"]
    path = json.loads(rpel("run", str(mine), *changed, "--json", capsys=capsys)[0])["path"]
    stored = tomllib.loads(rpel("show", path, capsys=capsys)[0])
    assert (stored["rounds"], stored["pull"], stored["b_hat"], stored["silent"]) == (2, 4, 1, True)
    assert stored["attack"] == "alie(z=1)"
    assert json.loads(rpel("show", path, "--json", capsys=capsys)[0])["threads"] == 1
    assert json.loads(rpel("run", path, "--out", str(tmp_path / "runs"), "--json", capsys=capsys)[0])[
        "reused"
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "mnist-10"], ["'mnist-10'", "'mnist-100'"]),
        (["run", "quickstart", "--node", "5"], ["--node", "--nodes"]),
        (["run", "quickstart", "--nodes", "many"], ["nodes", "'many'", "20"]),
        (["run", "quickstart", "--method", "rpell"], ["'rpell'", "'rpel'"]),
        (["run", "quickstart", "--attack", "ali"], ["'ali'", "'alie'"]),
        (
            ["run", "mnist-100", "--b-hat", "plan"],
            ["pull 15", "b_hat 8", "best_below_half is b_hat 7", "0.9739"],
        ),
        (["run", "quickstart", "--model", "mnst"], ["'mnst'", "'mnist'"]),
        (["run", "quickstart", "-s", "batch_size=5000"], ["5000", "80000 examples"]),
        (["run", "mnist-30", "--data-dir", "nowhere"], ["nowhere"]),
        (["run", "femnist-30"], ["femnist", "--data-dir", "LEAF"]),
        (["show", "quickstrat"], ["'quickstrat'", "'quickstart'"]),
        (["resume", "nowhere"], ["'nowhere'", "run folder"]),
        (["run"], ["PRESET"]),
        (["run", "quickstart", "-s", "partition=own"], ["partition of its own", "from Python"]),
    ],
)
def test_bad_run_options_exit_with_2_and_name_the_value(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RPEL_CACHE", str(tmp_path))
    monkeypatch.delenv("RPEL_DATA", raising=False)
    out, err = rpel(*arguments, capsys=capsys, code=2)
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert all(word in err for word in words), err
    assert set(os.listdir(tmp_path)) <= {"kernels"}  # which a process makes that is the first to load them


def test_show_does_not_import_torch() -> None:
    loads_none_of({"torch", "numba", "matplotlib"}, "show", "quickstart")


def test_fixed_graphs_have_no_guarantee_and_pushing_voids_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("run", "quickstart", *FLAGS, "--rounds", "2", "--out", str(tmp_path), "--json")
    on_graph = json.loads(rpel(*base, "--method", "gts", capsys=capsys)[0])
    assert on_graph["certificate"]["guarantee"] == "none"
    flood = ("--method", "el-local", "--attack", "foe(flood=true)")
    pushed = json.loads(rpel(*base, *flood, capsys=capsys)[0])
    assert pushed["certificate"]["guarantee"] == "void"


def test_rule_and_an_attack_in_the_working_directory_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def middle(x, f=0):\n    return (x.min(0) + x.max(0)) / 2\n\n\n"
        "def copies(view):\n    return view.table[view.own]\n"
    )
    own = ["--rule", "mine:middle", "--attack", "mine:copies"]
    command = [
        str(Path(sys.executable).with_name("rpel")),
        "run",
        "quickstart",
        *own,
        *FLAGS,
        "--rounds",
        "1",
        "--json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    spec = tomllib.loads((tmp_path / json.loads(done.stdout)["path"] / "spec.toml").read_text())
    assert (spec["rule"], spec["attack"]) == ("mine:middle", "mine:copies")


@pytest.mark.parametrize("name", [":x", ".a:x", "a b:c", "mine:"])
def test_name_that_is_no_module_and_object_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = rpel("run", "quickstart", "--attack", name, code=2, capsys=capsys)
    assert repr(name) in err
    assert err.count("\n") == 1
