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
import torch
from torch import nn

import rpel as package
from rpel.runs.certificate import versions
from rpel.runs.folder import RunFolder
from rpel.runs.run import Run
from rpel.simulation.api import resume, simulate
from support.commands import rpel
from support.runs import CrashError, crash_after, tiny


def place(result: Run) -> Path:
    assert result.path is not None
    return result.path


def of_other_code(path: Path) -> None:
    """Make a finished run look as if another release of torch had made it."""
    file = path / "certificate.json"
    content = json.loads(file.read_text())
    content["versions"] |= {"code": "0" * 64, "torch": "0.0"}
    file.write_text(json.dumps(content))


# --- by other code ------------------------------------------------------------------------------------------


def test_finished_run_of_other_code_is_run_again_in_a_new_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = place(tiny(tmp_path))
    of_other_code(first)
    before = (first / "certificate.json").read_bytes()
    again = tiny(tmp_path)
    assert not again.reused
    assert place(again).name == f"{first.name}-{again.certificate['versions']['code'][:8]}"
    (line,) = [record.message for record in caplog.records]
    assert (
        f"{first} not reused (made by other code: torch 0.0, now {torch.__version__.partition('+')[0]}"
        in line
    )
    assert (first / "certificate.json").read_bytes() == before
    once_more = tiny(tmp_path)
    assert (once_more.reused, once_more.path) == (True, again.path)


def test_reuse_takes_the_finished_run_of_other_code_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = place(tiny(tmp_path))
    of_other_code(first)
    again = tiny(tmp_path, reuse=True)
    assert (again.reused, again.path) == (True, first)
    assert "it was made by other code (torch 0.0" in caplog.text


def test_versions_code_is_a_whole_digest_that_depends_on_libraries_and_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = versions()["code"]
    assert len(ours) == 64
    assert len({ours, versions("cuda")["code"], versions(modules={"a:b": "1"})["code"]}) == 3
    assert versions("cuda:1")["code"] == versions("cuda")["code"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    assert versions()["code"] != ours


def test_run_on_cuda_never_returns_the_result_of_the_cpu(tmp_path: Path) -> None:
    tiny(tmp_path)
    if torch.cuda.is_available():
        assert not tiny(tmp_path, device="cuda").reused
    else:
        with pytest.raises(ValueError, match=r"'cuda'.*CPU-only.*'cpu'"):
            tiny(tmp_path, device="cuda")
    assert len(list(tmp_path.iterdir())) == 1 + torch.cuda.is_available()


def begun_by_other_code(out: Path) -> Path:
    """A run stopped after four of its six rounds, its checkpoint by another code."""
    with pytest.raises(CrashError):
        tiny(out, progress=crash_after(5))
    (path,) = out.iterdir()
    folder = RunFolder(path)
    state = folder.restore()
    assert state is not None
    folder.save(4, {**state, "run.code": np.array("0" * 64)})
    return path


def test_unfinished_run_of_other_code_goes_on_only_if_forced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = begun_by_other_code(tmp_path)
    with pytest.raises(ValueError, match=r"other code.*--force"):
        resume(path)
    rounds: list[int] = []
    other = tiny(tmp_path, progress=lambda tick: rounds.append(tick.round))
    assert rounds == [1, 2, 3, 4, 5, 6]
    assert place(other) != path
    assert f"rpel resume --force {path} goes on with it" in caplog.text
    rounds.clear()
    resume(path, force=True, progress=lambda tick: rounds.append(tick.round))
    assert rounds == [5, 6]


def test_resume_takes_the_run_of_the_running_code_and_else_names_all(tmp_path: Path) -> None:
    first = place(tiny(tmp_path))
    of_other_code(first)
    assert resume(first).path == first, "the only one there is"
    mine = place(tiny(tmp_path))
    assert resume(first).path == mine
    of_other_code(mine)
    with pytest.raises(ValueError, match=f"{first.name}, {mine.name}"):
        resume(first)
    assert resume(mine).path == mine, "named in full"


def test_report_shows_the_run_of_the_running_code_and_else_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = place(tiny(tmp_path / "runs"))
    of_other_code(first)
    mine = place(tiny(tmp_path / "runs", lr=0.1))
    page = str(tmp_path / "page.html")

    def shown() -> tuple[int, str]:
        out, err = rpel("report", str(tmp_path / "runs"), "-o", page, "--json", capsys=capsys)
        return json.loads(out)["runs"], err

    runs, said = shown()
    assert runs == 1
    assert "only what this code has made is shown" in said
    assert said.rstrip().endswith(mine.name)
    of_other_code(mine)
    runs, said = shown()
    assert runs == 2
    assert "by several other codes, all shown" in said


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


def test_runs_with_user_objects_are_repeated_unless_reuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = [own(tmp_path) for _ in range(3)]
    assert len({result.path for result in results}) == 3
    assert not any(result.reused for result in results)
    assert "cannot be known" in caplog.text
    stored = own(tmp_path, reuse=True)
    assert (stored.reused, stored.path) == (True, results[0].path)
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
    assert place(again).name.startswith(f"{place(first).name}-")
    assert not np.array_equal(again.models, first.models)


def test_user_file_edited_after_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "loadedrule.py"
    file.write_text("def agg(x, f=0):\n    return x.mean(axis=0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = tiny(tmp_path / "runs", rule="loadedrule:agg")
    file.write_text("def agg(x, f=0):\n    return 0 * x.mean(axis=0)\n")
    again = tiny(tmp_path / "runs", rule="loadedrule:agg")
    assert (again.reused, again.path) == (True, first.path)


def test_code_that_a_certificate_names_covers_files_in_every_folder(tmp_path: Path) -> None:
    """A copy of the package is the same code; with a comment more in one file deep inside it is another."""
    source = Path(str(package.__file__)).parent
    copied = Path(shutil.copytree(source, tmp_path / "rpel", ignore=shutil.ignore_patterns("__pycache__")))
    nested = sorted(path for path in copied.rglob("*.py") if len(path.relative_to(copied).parts) > 1)
    ours = versions()["code"]
    assert code_of(tmp_path) == ours
    changed = nested[len(nested) // 2]
    changed.write_bytes(changed.read_bytes() + b"# changed\n")
    assert code_of(tmp_path) != ours


def code_of(top: Path) -> str:
    """What the rpel in a folder says of itself, in a process of its own."""
    script = "import rpel.runs.certificate as found; print(found.__file__, found.versions()['code'])"
    environment = {**os.environ, "PYTHONPATH": str(top), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=top, capture_output=True, text=True, check=True
    )
    file, code = done.stdout.split()
    assert Path(file).is_relative_to(top)
    return code
