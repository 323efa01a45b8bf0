"""An interrupted run keeps what is done and goes on to the bytes of an undisturbed one."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpel import Run, resume, simulate
from support.own import OWN, blobs, fixed_net
from support.runs import CrashError, checkpoints, crash_after, differences, tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attack": "label_flip"},
        {"attack": "stale"},
        {"attack": "mimic_heuristic(learning_rounds=4)"},
        {"output": "uniform", "no_show": 0.2, "local_steps": 2},
        {"method": "all-to-all", "pull": 7, "model": "C(2)-B-R-M-L(10)-S"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) or "plain",
)
def test_run_that_crashed_goes_on_to_the_same_bytes(fields: dict[str, Any], tmp_path: Path) -> None:
    whole = tiny(tmp_path / "whole", **fields).path
    with pytest.raises(CrashError):
        tiny(tmp_path / "crashed", **fields, progress=crash_after(5))
    assert whole is not None
    path = tmp_path / "crashed" / whole.name
    assert list(checkpoints(path)) == [4]
    ticks: list[Any] = []
    resume(path, progress=ticks.append)
    assert [tick.round for tick in ticks] == [5, 6]
    assert differences(whole, path) == []


@pytest.mark.parametrize("damage", ["no checkpoint", "truncated checkpoint", "short metrics"])
def test_run_without_a_valid_checkpoint_begins_again(
    finished: Run, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert finished.path is not None
    with pytest.raises(CrashError):
        tiny(tmp_path, progress=crash_after(1 if damage == "no checkpoint" else 5))
    path = tmp_path / finished.path.name
    if damage == "truncated checkpoint":
        file = checkpoints(path)[4]
        file.write_bytes(file.read_bytes()[:5000])
    if damage == "short metrics":
        (path / "metrics.jsonl").write_text("")
    tiny(tmp_path)  # running again goes on as well
    assert differences(finished.path, path) == []
    expected = {"no checkpoint": "", "truncated checkpoint": "damaged", "short metrics": "round 0"}
    assert expected[damage] in caplog.text


def test_signal_is_obeyed_between_rounds_after_saving(finished: Run, tmp_path: Path) -> None:
    def interrupt(tick: Any) -> None:
        if tick.round == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"round 3 of 6.*rpel resume"):
        tiny(tmp_path, progress=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    (path,) = tmp_path.iterdir()
    assert list(checkpoints(path)) == [3]
    resume(path)
    assert finished.path is not None
    assert differences(finished.path, path) == []


def test_resuming_a_finished_run_returns_it(finished: Run, caplog: pytest.LogCaptureFixture) -> None:
    assert finished.path is not None
    with caplog.at_level(logging.INFO):
        assert resume(finished.path).reused
    assert "finished" in caplog.text


def test_changed_specification_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        tiny(tmp_path, progress=crash_after(3))
    (path,) = tmp_path.iterdir()
    spec = path / "spec.toml"
    spec.write_text(spec.read_text().replace("lr = 0.1", "lr = 0.3"))
    with pytest.raises(ValueError, match="specification"):
        resume(path)
    renamed = path.rename(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"checkpoint in .*specification"):
        resume(renamed)


def test_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.savez

    def full(file: Any, **arrays: Any) -> None:
        if len(arrays["record.counts"]) == 4:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        real(file, **arrays)

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        tiny(tmp_path)
    (path,) = tmp_path.iterdir()
    assert list(checkpoints(path)) == [2]
    monkeypatch.undo()
    assert len(resume(path).history) == 6


def test_lines_are_durable_before_the_checkpoint_that_relies_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fsync by what is synced: metrics.jsonl with its lines, then the checkpoint's file."""
    seen: list[tuple[str, int]] = []
    real = os.fsync

    def sync(handle: int) -> None:
        here = os.fstat(handle).st_ino
        synced = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_ino == here]
        seen.extend(
            (path.name, path.read_bytes().count(b"\n") * (path.suffix == ".jsonl")) for path in synced
        )
        real(handle)

    monkeypatch.setattr(os, "fsync", sync)
    tiny(tmp_path)
    for t in (2, 4):
        at = seen.index((f".round-{t:08d}.npz.tmp", 0))
        assert ("metrics.jsonl", t) in seen[:at], seen


def test_own_objects_are_needed_again_to_resume(tmp_path: Path) -> None:
    own: dict[str, Any] = {"model": fixed_net(), "train": blobs(0), "test": blobs(1)}
    whole = simulate(**own, **OWN, out=tmp_path / "whole").path
    with pytest.raises(CrashError):
        simulate(**own, **OWN, out=tmp_path / "crashed", progress=crash_after(5))
    (path,) = (tmp_path / "crashed").iterdir()
    with pytest.raises(ValueError, match=r"rpel\.resume"):
        resume(path)
    with pytest.raises(ValueError, match=r"specification.*data.*model"):
        resume(path, fixed_net(1), blobs(0), blobs(1))
    resume(path, **own)
    assert whole is not None
    assert differences(whole, path) == []


def test_ctrl_c_in_the_last_round_of_a_seed_stops_before_the_next(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def interrupt(tick: Any) -> None:
        seen.append((tick.seed, tick.round))
        if tick.round == tick.rounds:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        simulate(
            "linear",
            nodes=6,
            byzantine=1,
            rounds=2,
            eval_size=50,
            seeds="0,1",
            out=tmp_path,
            progress=interrupt,
        )
    assert seen == [(0, 1), (0, 2)]
    assert len(list(tmp_path.glob("*/certificate.json"))) == 1
