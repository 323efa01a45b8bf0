"""A finished run is returned only where specification, data and code are known to be the same."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rpel as package
from rpel.runs.certificate import BESIDE, source_digest, versions
from rpel.runs.folder import RunFolder
from rpel.runs.run import Run
from rpel.simulation.api import resume, simulate
from support.runs import CrashError, crash_after, tiny


def place(result: Run) -> Path:
    assert result.path is not None
    return result.path


# --- the code -----------------------------------------------------------------------------------------------


def copied(tmp_path: Path) -> Path:
    """The package in a folder of its own."""
    source = Path(str(package.__file__)).parent
    return Path(shutil.copytree(source, tmp_path / "rpel", ignore=shutil.ignore_patterns("__pycache__")))


def test_code_of_a_run_is_every_module_but_those_that_compute_nothing(tmp_path: Path) -> None:
    root = copied(tmp_path)
    ours = source_digest.__wrapped__(root)
    assert ours == source_digest()
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        path.write_bytes(text + b"# one line more\n")
        computes = path.relative_to(root).parts[0] not in BESIDE
        assert (source_digest.__wrapped__(root) != ours) == computes, path
        path.write_bytes(text)


SMALL = "model=linear nodes=6 byzantine=1 pull=4 rounds=1 eval_size=20 batch_size=5 partition=iid threads=1"


def in_a_process(top: Path, *more: str) -> dict[str, Any]:
    """``rpel run`` with the package in that folder."""
    flags = [part for field in (*SMALL.split(), *more) for part in ("-s", field)]
    command = [sys.executable, "-m", "rpel", "run", "quickstart", *flags, "--out", "runs", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(top), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd=top, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.integration
def test_edited_module_that_computes_makes_another_folder_and_others_do_not(tmp_path: Path) -> None:
    root = copied(tmp_path)
    first = in_a_process(tmp_path)
    with (root / "cli" / "terminal.py").open("a") as file:
        file.write("# one line more\n")
    again = in_a_process(tmp_path)
    assert (again["reused"], again["path"]) == (True, first["path"])
    with (root / "learning.py").open("a") as file:
        file.write("# one line more\n")
    other = in_a_process(tmp_path)
    assert (other["reused"], other["path"] != first["path"]) == (False, True)


@pytest.mark.integration
def test_new_field_needs_a_line_in_spec_and_the_place_where_it_takes_effect(tmp_path: Path) -> None:
    """As a contributor adds one: option, TOML, hash and the list of fields follow."""
    root = copied(tmp_path)
    spec, place = root / "spec.py", root / "simulation" / "methods.py"
    field = '    patience: int = Field(3, description="rounds of patience", ge=1)\n'
    above, last, below = spec.read_text().partition("    native: bool = Field(")
    spec.write_text(above + field + last + below)
    text = place.read_text()
    body = "    method = METHODS[choice.name]\n"
    assert body in text
    place.write_text(
        text.replace(body, body + '    if spec.patience > 8:\n        raise ValueError("impatient")\n')
    )
    usual, patient = in_a_process(tmp_path), in_a_process(tmp_path, "patience=5")
    assert usual["path"] != patient["path"]
    assert tomllib.loads((tmp_path / patient["path"] / "spec.toml").read_text())["patience"] == 5
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "rpel"]
    listed = subprocess.run([*command, "list", "fields"], env=environment, capture_output=True, text=True)
    assert "rounds of patience [3]" in listed.stdout
    refused = [*command, "run", "quickstart", "-s", "patience=9"]
    assert "impatient" in subprocess.run(refused, env=environment, capture_output=True, text=True).stderr


def test_versions_code_is_a_whole_digest_that_depends_on_libraries_and_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = versions()["code"]
    assert len(ours) == 64
    assert len({ours, versions("cuda")["code"], versions(modules={"a:b": "1"})["code"]}) == 3
    assert versions("cuda:1")["code"] == versions("cuda")["code"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    assert versions()["code"] != ours


def test_unfinished_run_of_other_code_is_refused_and_starts_again_if_forced(tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        tiny(tmp_path, progress=crash_after(5))
    (path,) = tmp_path.iterdir()
    folder = RunFolder(path)
    state = folder.restore()
    assert state is not None
    folder.save(4, {**state, "run.code": np.array("0" * 64)})
    with pytest.raises(ValueError, match=r"^[^\n]*other code[^\n]*--force starts it again$"):
        resume(path)
    rounds: list[int] = []
    resume(path, force=True, progress=lambda tick: rounds.append(tick.round))
    assert rounds == [1, 2, 3, 4, 5, 6]


# --- objects from Python ------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
Y = np.arange(60) % 3
FACTOR = 1.0


class Base(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)  # type: ignore[operator]
        return result


class Net(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        with torch.no_grad():
            for value in self.parameters():
                value.fill_(0.1)


def scaled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return FACTOR * nn.functional.cross_entropy(output, target)


def own(out: Path, model: nn.Module | None = None, **more: Any) -> Run:
    fields: dict[str, Any] = {
        "nodes": 8,
        "byzantine": 1,
        "pull": 4,
        "rounds": 2,
        "eval_size": 30,
        "batch_size": 5,
    }
    result: Run = simulate(model or Net(), (X, Y), (X, Y), **fields, **more, out=out)
    return result


def from_text(factor: float) -> Any:
    return eval(f"lambda o, t: {factor} * torch.nn.functional.cross_entropy(o, t)", {"torch": torch})


def test_loss_without_source_and_another_constant_is_another_run(tmp_path: Path) -> None:
    a, b = (own(tmp_path, loss=from_text(factor)) for factor in (1.0, 0.0))
    assert not b.reused
    assert not np.array_equal(a.models, b.models)


def test_loss_that_reads_a_changed_global_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = own(tmp_path, loss=scaled)
    monkeypatch.setitem(globals(), "FACTOR", 0.0)
    assert not np.array_equal(a.models, own(tmp_path, loss=scaled).models)


def test_model_whose_base_class_changed_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = own(tmp_path)
    monkeypatch.setattr(Base, "forward", lambda self, x: self.layer(x) * 0.0)
    assert not np.array_equal(a.models, own(tmp_path).models)


def test_runs_with_user_objects_are_never_reused(tmp_path: Path) -> None:
    results = [own(tmp_path) for _ in range(3)]
    assert len({result.path for result in results}) == 3
    assert not any(result.reused for result in results)
    forced = own(tmp_path, force=True)
    assert (forced.reused, forced.path) == (False, results[0].path)


def test_data_from_python_are_known_by_their_content(tmp_path: Path) -> None:
    def run(y: Any) -> Run:
        return simulate(
            "linear", (X, y), (X, y), nodes=8, byzantine=1, pull=4, rounds=1, batch_size=5, out=tmp_path
        )

    assert not run(Y).reused
    assert run(Y.copy()).reused
    assert not run((Y + 1) % 3).reused


def test_rule_and_an_attack_that_are_both_lambdas_stay_apart(tmp_path: Path) -> None:
    seen: list[str] = []

    def rule(x: Any, f: int = 0) -> Any:
        seen.append("rule")
        return x.mean(axis=0)

    def attack(view: Any) -> Any:
        seen.append("attack")
        return view.moments(0.0)

    rule.__qualname__ = attack.__qualname__ = "<lambda>"
    result = tiny(None, rule=rule, attack=attack)
    assert {"rule", "attack"} <= set(seen)
    assert (result.spec.rule, result.spec.attack) == ("own", "own")


# --- code by module:name ------------------------------------------------------------------------------------

MEAN = "from helper import weight\n\n\ndef agg(x, f=0):\n    return weight() * x.mean(axis=0)\n"


@pytest.mark.parametrize("edited", ["helper.py", "ruleofmine.py"])
def test_edited_user_module_or_import_makes_another_run(
    edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"ruleofmine.py": MEAN, "helper.py": "def weight():\n    return 1.0\n", "bystander.py": "x = 1\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run() -> Run:
        """As a new process does."""
        for name in ("ruleofmine", "helper"):
            sys.modules.pop(name, None)
        return tiny(tmp_path / "runs", rule="ruleofmine:agg")

    first = run()
    (tmp_path / "bystander.py").write_text("x = 2\n")
    assert run().reused, "what is not imported does not count"
    (tmp_path / edited).write_text(
        files[edited].replace("1.0", "0.5").replace("weight() *", "weight() * 0.25 *")
    )
    again = run()
    assert not again.reused
    assert place(again) != place(first)
    assert not np.array_equal(again.models, first.models)


def test_user_file_edited_after_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "loadedrule.py"
    file.write_text("def agg(x, f=0):\n    return x.mean(axis=0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = tiny(tmp_path / "runs", rule="loadedrule:agg")
    file.write_text("def agg(x, f=0):\n    return 0 * x.mean(axis=0)\n")
    again = tiny(tmp_path / "runs", rule="loadedrule:agg")
    assert (again.reused, again.path) == (True, first.path)
