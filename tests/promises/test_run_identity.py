"""A finished run is returned only where specification, data and code are known to be the same."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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


def test_runs_with_user_objects_are_never_reused(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"nodes": 8, "byzantine": 1, "pull": 4, "rounds": 1, "batch_size": 5}
    model = nn.Linear(5, 3)
    results = [simulate(model, (X, Y), (X, Y), **fields, out=tmp_path) for _ in range(3)]
    assert len({result.path for result in results}) == 3
    assert not any(result.reused for result in results)
    forced = simulate(model, (X, Y), (X, Y), **fields, out=tmp_path, force=True)
    assert (forced.reused, forced.path) == (False, results[0].path)


def test_data_from_python_are_known_by_their_content(tmp_path: Path) -> None:
    def run(y: Any) -> Run:
        return simulate(
            "linear", (X, y), (X, y), nodes=8, byzantine=1, pull=4, rounds=1, batch_size=5, out=tmp_path
        )

    assert not run(Y).reused
    assert run(Y.copy()).reused
    assert not run((Y + 1) % 3).reused


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
