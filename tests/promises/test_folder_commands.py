"""Commands about many runs: their tables, their JSON and what they refuse."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rpel import simulate
from support.commands import loads_none_of, rpel
from support.runs import CrashError, crash_after, tiny

TINY: dict[str, Any] = {
    "model": "linear", "nodes": 6, "byzantine": 1, "pull": 4, "rounds": 2, "eval_every": 1, "eval_size": 50,
    "lr": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("words", [[], ["network"], ["peer"]])
def test_bare_command_prints_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, err = rpel(*words, capsys=capsys)
    assert out.startswith("Usage: rpel")
    assert "Commands:" in out
    assert err == ""


@pytest.mark.parametrize("words", [[], ["network"], ["peer"]])
def test_help_cuts_no_sentence_at_80_columns(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = rpel(*words, "--help", capsys=capsys)
    listed = out.partition("Commands:")[2]
    assert listed
    assert "..." not in listed
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("typed", "at", "answer"), [("rpel pla", 1, "plan"), ("rpel plan --byz", 2, "--byzantine")]
)
def test_shell_completion_knows_commands_and_their_options(typed: str, at: int, answer: str) -> None:
    asked = {**os.environ, "_RPEL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(at)}
    done = subprocess.run(
        [sys.executable, "-m", "rpel"], env=asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [answer]


def test_help_names_rules_and_attacks(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "arena"):
        out, _ = rpel(command, "--help", capsys=capsys)
        assert all(name in out for name in ("trimmed_mean", "krum", "dissensus", "label_flip"))


def test_unknown_list_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        "there is no list of 'rulez'; the nearest is 'rules'"
        in rpel("list", "rulez", capsys=capsys, code=2)[1]
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``finished`` with a run, and ``unfinished`` with one that was killed after four of six
    rounds."""
    top = tmp_path_factory.mktemp("kept")
    simulate(**TINY, out=top / "finished")
    with pytest.raises(CrashError):
        tiny(top / "unfinished", progress=crash_after(4))
    return top


def test_runs_tells_finished_unfinished_and_broken_runs(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(kept, tmp_path / "runs")
    shutil.copytree(tmp_path / "runs" / "finished", tmp_path / "runs" / "spoilt")
    for path in (tmp_path / "runs" / "spoilt").rglob("spec.toml"):
        path.write_text("= 1")
    rows = json.loads(rpel("runs", str(tmp_path / "runs"), "--json", capsys=capsys)[0])
    states = {row["path"].split("/")[-2]: row["state"] for row in rows}
    assert states == {"finished": "finished", "unfinished": "unfinished", "spoilt": "broken"}
    (half,) = (row for row in rows if row["state"] == "unfinished")
    assert (half["done"], half["rounds"], half["attack"]) == (4, 6, "alie")
    text, _ = rpel("runs", str(tmp_path / "runs"), capsys=capsys)
    assert text.splitlines()[-1] == "1 finished, 1 unfinished, 1 broken"
    assert max(map(len, text.splitlines())) <= 80


def test_foreign_run_is_listed_without_terminal_commands(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(next((kept / "finished").iterdir()), tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b\x1b[2J")
    spec = tmp_path / "b\x1b[2J" / "spec.toml"
    spec.write_text(re.sub("(?m)^model = .*", lambda _: 'model = "foe\\u001b[2K\\n"', spec.read_text()))
    shutil.copytree(tmp_path / "a", tmp_path / "c\x1b[2J")
    (tmp_path / "c\x1b[2J" / "certificate.json").unlink()
    runs, page = [str(path) for path in sorted(tmp_path.iterdir())], str(tmp_path / "page.html")
    for words in (["runs", str(tmp_path)], ["compare", *runs[:2]], ["report", *runs, "-o", page]):
        assert "\x1b" not in "".join(rpel(*words, capsys=capsys))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "quickstart", "--rounds", "1", "--out", "{file}"], "{file} is a file"),
        (["report", "{runs}", "-o", "{page}", "--csv", "{folder}"], "{folder} is a folder"),
        (["report", "{runs}", "-o", "{page}", "--figures", "{file}"], "{file} is a file"),
        (["run", "quickstart", "--rounds", "1", "--out", "/proc/x"], "/proc/x cannot be created"),
        (["new", "/proc/x"], "/proc/x can be neither opened nor created"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_path_that_cannot_be_used_is_refused(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    names = {name: str(tmp_path / name) for name in ("file", "folder", "page")} | {
        "runs": str(kept / "finished")
    }
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    _, err = rpel(*(word.format(**names) for word in words), capsys=capsys, code=2)
    assert err.splitlines()[-1].startswith(f"rpel: {said.format(**names)}")


def test_ls_does_not_import_torch(kept: Path) -> None:
    loads_none_of({"torch", "numba", "matplotlib"}, "runs", str(kept))


def test_compare_names_what_differs_and_pairs_the_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rule in ("median", "mean"):
        simulate(**TINY, rule=rule, seeds="0-2", out=tmp_path / rule)
    content = json.loads(
        rpel("compare", *(str(tmp_path / r) for r in ("median", "mean")), "--json", capsys=capsys)[0]
    )
    assert content["differences"] == {"rule": ["median", "mean"]}
    assert content["seeds"] == [0, 1, 2]
    worst = content["final"]["accuracy_worst"]
    assert worst["difference"] == pytest.approx(worst["b"] - worst["a"])
    assert worst["low"] <= worst["difference"] <= worst["high"]
    assert {1, 2} <= {row["round"] for row in content["curve"]}
    text, _ = rpel("compare", *(str(tmp_path / r) for r in ("median", "mean")), capsys=capsys)
    assert "rule: median | mean" in text
    assert "95 % t-interval" in text
    assert "holds 2 settings" in rpel("compare", str(tmp_path), str(tmp_path), capsys=capsys, code=2)[1]


def test_compare_of_two_seeds_leaves_paired_differences_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(simulate(**TINY, seed=seed, out=tmp_path).path) for seed in (0, 1)]
    text, _ = rpel("compare", *folders, capsys=capsys)
    assert "overflowed" not in text
    assert text.splitlines()[-1] == (
        "no differences: they are paired by seed, and A and B have no seed in common"
    )
    row = next(line for line in text.splitlines() if "accuracy worst" in line)
    assert len(re.findall(r"0\.\d+", row)) == 2, "A and B, and nothing between them"


def test_resume_of_a_folder_finishes_all_runs_below(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b/c"):
        shutil.copytree(kept / "unfinished", tmp_path / name)
    content = json.loads(rpel("resume", str(tmp_path), "--json", capsys=capsys)[0])
    assert len(content) == 2
    assert all((Path(one["path"]) / "certificate.json").is_file() for one in content)
    assert content[0]["accuracy_mean"] == content[1]["accuracy_mean"]
    out, err = rpel("resume", str(tmp_path), capsys=capsys)
    assert (out, "0 unfinished runs" in err) == ("", True)


@pytest.mark.xfail(strict=True, reason="show takes no folder of runs, and runs breaks hashes [issue 51]")
def test_table_of_runs_at_80_columns_shows_folder_names_that_can_be_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        simulate(**TINY, name="geometric_median-inner_product_manipulation", seed=seed, out="runs")
    lines = rpel("show", "runs", capsys=capsys)[0].splitlines()
    for folder in Path("runs").iterdir():
        assert any(folder.name in line.split() or f"{folder}" in line.split() for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.xfail(strict=True, reason="broken runs are left out without a word [issue 51]")
def test_resume_of_a_folder_with_a_broken_run_says_which_and_why(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whole", "broken"):
        shutil.copytree(next((kept / "unfinished").iterdir()), tmp_path / name)
    spec = tmp_path / "broken" / "spec.toml"
    spec.write_text(spec.read_text("utf-8") + "\nrounds = many\n", "utf-8")
    _, err = rpel("resume", str(tmp_path), code=1, capsys=capsys)
    (sentence,) = [line for line in err.splitlines() if str(tmp_path / "broken") in line]
    assert "line" in sentence, "of the TOML file"
    assert (tmp_path / "whole" / "certificate.json").is_file(), "the others are finished"


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--nodes", "10", "--byzantine", "1", "--rounds", "5", "--nodes", "20"],
        ["run", "quickstart", "--model", "linear", "--rounds", "1", "--attack", "foe", "--attack", "alie"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.xfail(strict=True, reason="the last one is taken without a word [issue 51]")
def test_option_with_one_value_that_is_given_twice_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = rpel(*words, code=2, capsys=capsys)
    assert out == ""
    assert len(err.splitlines()) == 1
    assert words[-2] in err
    assert words[-1] in err
