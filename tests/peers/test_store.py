"""What a peer keeps on disk survives kills, full disks and damage, and a round never has two versions."""

import contextlib
import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rpel import files
from rpel.peer.core.protocol import Checkpoint, LentRow, Record
from rpel.peer.core.wire import Layout
from rpel.peer.state import store as store_module
from rpel.peer.state.store import Store, rounds_kept
from support.commands import no_more_than
from support.virtual_network import Disk

LAYOUT = Layout(("w", "b"), ((5, 3), (5,)), np.dtype("float32"))


def model(seed: int, layout: Layout = LAYOUT) -> LentRow:
    return LentRow(np.random.default_rng(seed).standard_normal(layout.d).astype(layout.dtype))


def record(t: int, seed: int | None = None) -> Record:
    return Record(t, (t % 3, 5), model(t if seed is None else seed))


def served(store: Store, t: int) -> bytes | None:
    body = store.open_body(t)
    if body is None:
        return None
    with contextlib.closing(body):
        return b"".join(body.read(begin, 7) for begin in range(0, body.size, 7))


def wire(t: int) -> bytes:
    return LAYOUT.header + model(t).tobytes()


def fill(path: Path, rounds: range) -> None:
    with Store(path, LAYOUT) as store:
        for t in rounds:
            assert store.persist(record(t), b"state %d" % t)
            assert store.save(Checkpoint(t, model(100 + t), fresh=t == 2, degraded=t, outcome="aggregated"))


def test_coded_half_steps_are_served_as_they_travel_and_come_back_exact(tmp_path: Path) -> None:
    layout = replace(LAYOUT, wire="int8")
    half, before = model(1), model(2)
    with Store(tmp_path / "state", layout) as store:
        assert store.persist(Record(4, (1,), half, before=before), b"momentum")
    with Store(tmp_path / "state", layout) as store:
        kept = store.memory().record
        assert kept is not None
        assert kept.half is not None
        assert kept.before is not None
        assert (kept.half.tobytes(), kept.before.tobytes()) == (half.tobytes(), before.tobytes())
        assert store.state(4) == b"momentum"
        assert served(store, 4) == b"".join(layout.body(half))
    with Store(tmp_path / "state", LAYOUT) as other:  # what travels as int8 is no body of a float32 network
        assert other.memory().published == ()


def test_stored_record_is_read_back(tmp_path: Path) -> None:
    fill(tmp_path / "state", range(1, 6))
    with Store(tmp_path / "state", LAYOUT) as store:
        memory = store.memory()
        assert memory.last_round == 5
        assert memory.published == (3, 4, 5)
        assert memory.record is not None
        assert memory.record.asked == (2, 5)
        assert memory.record.half is not None
        np.testing.assert_array_equal(memory.record.half, model(5))
        assert memory.checkpoint is not None
        assert (memory.checkpoint.round, memory.checkpoint.degraded) == (5, 5)
        np.testing.assert_array_equal(memory.checkpoint.x, model(105))
        assert store.state(5) == b"state 5"
        assert store.state(1) is None
        assert [served(store, t) for t in (2, 3, 4, 5, 6)] == [None, wire(3), wire(4), wire(5), None]
    kept = sorted(path.name for path in (tmp_path / "state").iterdir())
    names = ("checkpoint-4", "checkpoint-5", "half-3", "half-4", "half-5")
    assert kept == [
        *(f"{name}.{part}" for name in names for part in ("json", "safetensors", "state")),
        "lock",
    ]
    whole = safetensors.numpy.load_file(tmp_path / "state" / "half-5.safetensors")
    np.testing.assert_array_equal(np.concatenate([whole["w"].ravel(), whole["b"]]), model(5))


def test_outer_velocity_is_stored_with_half_step_and_round_end(tmp_path: Path) -> None:
    first = replace(record(1), before=model(7))  # no v yet
    second = replace(record(2), before=model(8), v=model(9))
    with Store(tmp_path, LAYOUT) as store:
        assert store.persist(first, b"state")
        assert store.save(Checkpoint(1, model(3), v=model(4)), {"mean": np.arange(3.0)})
        found = store.memory()
        assert (found.record.before, found.record.v) == (pytest.approx(model(7)), None)  # type: ignore[union-attr]
        assert found.checkpoint is not None
        np.testing.assert_array_equal(found.checkpoint.v, model(4))
        assert store.persist(second, b"moments")
        kept = store.memory().record
        assert kept is not None
        for value, right in ((kept.half, 2), (kept.before, 8), (kept.v, 9)):
            np.testing.assert_array_equal(value, model(right))
        assert store.state(2) == b"moments"
        assert served(store, 2) == wire(2), "neither is ever served"


def test_empty_folder_remembers_nothing(tmp_path: Path) -> None:
    with Store(tmp_path, LAYOUT) as store:
        memory = store.memory()
        assert (memory.checkpoint, memory.record, memory.last_round, memory.published) == (None, None, 0, ())


def test_catch_up_round_is_remembered_and_never_served(tmp_path: Path) -> None:
    with Store(tmp_path, LAYOUT) as store:
        assert store.persist(Record(4, (1, 2), None), b"momentum")
        assert store.open_body(4) is None
        memory = store.memory()
        assert memory.record == Record(4, (1, 2), None)
        assert (memory.last_round, memory.published, store.state(4)) == (4, (), b"momentum")


def test_no_round_is_recorded_twice(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 3))
    with Store(tmp_path, LAYOUT) as store:
        for t in (1, 2):
            with pytest.raises(ValueError, match=r"round 2 already"):
                store.persist(record(t, seed=9))
        store.memory()
        assert served(store, 2) == wire(2)


def test_evicted_body_in_transfer_is_served_completely(tmp_path: Path) -> None:
    with Store(tmp_path, LAYOUT) as store:
        store.persist(record(1))
        body = store.open_body(1)
        assert body is not None
        for t in range(2, 6):
            store.persist(record(t))
        assert store.open_body(1) is None
        assert body.read(0, body.size) == wire(1)
        body.close()


# --- damage -------------------------------------------------------------------------------------------------


def damages(path: Path) -> Iterator[bytes]:
    """The file cut at every length, and with each byte changed."""
    whole = path.read_bytes()
    yield from (whole[:length] for length in range(0, len(whole), 3))
    yield from (whole[:i] + bytes([whole[i] ^ 0x41]) + whole[i + 1 :] for i in range(len(whole)))
    yield whole + b"\0"


@pytest.mark.parametrize("part", ["json", "safetensors", "state"])
def test_damaged_record_counts_and_is_never_served(tmp_path: Path, part: str) -> None:
    fill(tmp_path, range(1, 5))
    path = tmp_path / f"half-4.{part}"
    with Store(tmp_path, LAYOUT) as store:
        for damaged in list(damages(path)):
            path.write_bytes(damaged)
            memory = store.memory()
            assert memory.last_round == 4
            assert memory.published == (2, 3)
            assert store.open_body(4) is None
            assert store.state(4) is None
            assert memory.record is not None
            assert memory.record.round == 3
            with pytest.raises(ValueError, match="round 4 already"):
                store.persist(record(4, seed=9))


def test_checkpoint_of_the_same_size_under_other_names_is_not_taken(tmp_path: Path) -> None:
    ours = Layout(("w", "b"), ((2,), (2,)), np.dtype("float32"))
    with Store(tmp_path, ours) as store:
        assert store.save(Checkpoint(1, np.arange(4, dtype=np.float32)))
    with Store(tmp_path, replace(ours, names=("b", "w"))) as store:
        assert store.memory().checkpoint is None


@pytest.mark.parametrize("part", ["json", "safetensors"])
def test_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, part: str) -> None:
    fill(tmp_path, range(1, 5))
    path = tmp_path / f"checkpoint-4.{part}"
    with Store(tmp_path, LAYOUT) as store:
        for damaged in list(damages(path)):
            path.write_bytes(damaged)
            kept = store.memory().checkpoint
            assert kept is not None
            assert kept.round == 3
            np.testing.assert_array_equal(kept.x, model(103))


def test_record_under_another_rounds_name_is_not_served(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 3))
    (tmp_path / "half-2.json").rename(tmp_path / "half-7.json")
    with Store(tmp_path, LAYOUT) as store:
        assert (store.memory().last_round, store.memory().published) == (7, (1,))


def test_model_of_another_layout_is_not_served(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 3))
    with Store(tmp_path, Layout(("v", "b"), ((5, 3), (5,)), np.dtype("float32"))) as store:
        memory = store.memory()
        assert (memory.last_round, memory.published, memory.record) == (2, (), None)


# --- kills --------------------------------------------------------------------------------------------------


def killed_at(line: int, work: Callable[[], None]) -> bool:
    """Run work in a child that dies, without clean-up, before that line of the store; False:
    it came through."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal line
        if frame.f_code.co_filename not in (store_module.__file__, files.__file__):
            return None
        if event == "line":
            line -= 1
            if line == 0:
                os._exit(9)
        return trace

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the parent's threads are not used by the child
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            sys.settrace(trace)
            work()
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.integration
def test_kill_anywhere_leaves_one_version_of_every_round(tmp_path: Path) -> None:
    fill(tmp_path / "start", range(1, 5))
    line, died, seen = 0, True, set()
    while died:
        line += 1
        folder = tmp_path / str(line)
        subprocess.run(["cp", "-r", tmp_path / "start", folder], check=True)
        died = killed_at(line, lambda folder=folder: fill(folder, range(5, 6)))  # type: ignore[misc]
        with Store(folder, LAYOUT) as store:
            memory = store.memory()
            assert memory.last_round in (4, 5)
            assert memory.record is not None
            assert memory.record.round == memory.last_round
            assert len(memory.published) <= 3
            assert all(served(store, t) == wire(t) for t in memory.published)
            assert store.state(memory.last_round) == b"state %d" % memory.last_round
            assert memory.checkpoint is not None
            np.testing.assert_array_equal(memory.checkpoint.x, model(100 + memory.checkpoint.round))
            seen.add((memory.last_round, memory.checkpoint.round))
            if memory.last_round == 4:
                assert store.persist(record(5, seed=77))
            else:
                with pytest.raises(ValueError, match="round 5 already"):
                    store.persist(record(5, seed=77))
        assert not list(folder.glob(".*"))
    assert seen == {(4, 4), (5, 4), (5, 5)}
    assert line > 30  # the injector did inject


# --- a disk that is full ------------------------------------------------------------------------------------


def test_limit_on_file_sizes_leaves_what_was_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, range(1, 3))
    large = Layout(("w",), ((1_000_000,),), np.dtype("float32"))
    with no_more_than(1 << 20), Store(tmp_path, large) as store, caplog.at_level(logging.ERROR, "rpel"):
        assert not store.persist(Record(3, (1,), model(3, large)))
        assert not store.save(Checkpoint(3, model(3, large)))
        assert not store.persist(Record(4, (1,), model(4, large)))
        assert store.open_body(3) is None
    assert sum(r.levelno == logging.ERROR for r in caplog.records) == 1
    with Store(tmp_path, LAYOUT) as store:
        memory = store.memory()
        assert (memory.last_round, memory.published) == (2, (1, 2))
        assert served(store, 2) == wire(2)
        assert memory.checkpoint is not None
        np.testing.assert_array_equal(memory.checkpoint.x, model(102))
        assert store.persist(record(3))
    assert not list(tmp_path.glob(".*"))


# --- one process --------------------------------------------------------------------------------------------


def test_two_peers_never_share_a_folder(tmp_path: Path) -> None:
    with Store(tmp_path, LAYOUT):
        with pytest.raises(ValueError, match="another peer"):
            Store(tmp_path, LAYOUT)
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = subprocess.run([sys.executable, "-c", code, tmp_path / "lock"], capture_output=True)
        assert b"BlockingIOError" in other.stderr
    Store(tmp_path, LAYOUT).close()


def test_models_are_for_the_owner_alone(tmp_path: Path) -> None:
    fill(tmp_path / "state", range(1, 2))
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in [tmp_path / "state", *(tmp_path / "state").iterdir()]
    }
    assert modes["state"] == 0o700
    assert modes["half-1.json"] == modes["half-1.state"] == modes["checkpoint-1.safetensors"] == 0o600


# --- what the disk refuses, and a folder that goes away -----------------------------------------------------


@contextlib.contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Every write fails with this error."""

    def atomic(path: Path, mode: int = 0o666) -> contextlib.AbstractContextManager[Any]:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "atomic", atomic)
        yield


def test_failed_write_keeps_older_records_and_retires_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "state", range(1, 4))
    with Store(tmp_path / "state", LAYOUT) as store:
        store.memory()
        with refusing(monkeypatch, errno.ENOSPC):
            assert not store.persist(record(4))
        assert [served(store, t) for t in (1, 2, 3)] == [wire(1), wire(2), wire(3)]
        with pytest.raises(ValueError, match="round 4 already"):
            store.persist(record(4, seed=9))
        assert store.persist(record(5))
        assert store.memory().published == (2, 3, 5)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "the disk is read-only"),
        (errno.EMFILE, "no file descriptors are left"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_failed_write_reports_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    with Store(tmp_path / "state", LAYOUT) as store:
        with refusing(monkeypatch, number):
            assert not store.save(Checkpoint(1, model(1)))
        assert store.trouble == reason
        assert store.save(Checkpoint(1, model(1)))
        assert store.trouble == ""


def test_deleted_state_folder_is_recreated_private_and_locked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "state", range(1, 4))
    with Store(tmp_path / "state", LAYOUT) as store:
        store.memory()
        shutil.rmtree(tmp_path / "state")
        assert store.persist(record(4))
        assert served(store, 4) == wire(4)
        assert served(store, 3) is None
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
        assert "was deleted or replaced" in caplog.text
        with pytest.raises(ValueError, match="another peer"):
            Store(tmp_path / "state", LAYOUT)


def test_folder_that_another_peer_took_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with Store(tmp_path / "state", LAYOUT) as store:
        shutil.rmtree(tmp_path / "state")
        with Store(tmp_path / "state", LAYOUT) as other:
            assert not store.persist(record(1))
            assert "in use by another peer" in store.trouble
            assert other.memory().last_round == 0


# --- the disk of networks under the virtual clock -----------------------------------------------------------


def cut(path: Path) -> None:
    """The file loses its last byte."""
    os.truncate(path, path.stat().st_size - 1)


def befall(coins: random.Random, disk: Disk, folder: Path) -> None:
    """Something happens to both while no peer runs."""
    copy = folder.with_name("copy")
    match coins.randrange(6):
        case 0 if disk.records:
            newest = max(disk.records)
            if newest not in disk.damaged:
                cut(folder / f"half-{newest}.json")
            disk.damaged.add(newest)
        case 1 if len(disk.checkpoints.keys() - disk.truncated) > 1:
            cut(folder / f"checkpoint-{disk.last_checkpoint}.json")
            disk.truncate_newest()
        case 2:
            disk.snapshot()
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
        case 3 if copy.exists():
            disk.set_back()
            shutil.rmtree(folder)
            shutil.copytree(copy, folder)
        case 4:
            disk.empty()
            shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(8))
def test_virtual_networks_disk_remembers_what_a_store_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever is written, refused, damaged, copied, put back and deleted between starts."""
    coins, disk, folder, atomic = random.Random(seed), Disk(), tmp_path / "state", files.atomic

    def limited(path: Path, mode: int) -> Any:
        if disk.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return atomic(path, mode)

    def some() -> Any:
        return model(coins.randrange(99)) if coins.random() < 0.7 else None

    monkeypatch.setattr(store_module, "atomic", limited)
    for _ in range(25):
        with Store(folder, LAYOUT) as store:
            assert repr(asdict(store.memory())) == repr(asdict(disk.memory()))
            assert rounds_kept(folder, "half") == sorted(disk.records)
            assert rounds_kept(folder, "checkpoint") == sorted(disk.checkpoints)
            t = store.last_round
            for _ in range(coins.randrange(4)):
                t, disk.full = t + coins.randint(1, 2), coins.random() < 0.2
                drawn = Record(t, (1, 2), some(), some(), some(), "a membership")
                assert store.persist(drawn, b"state") == disk.persist(drawn, model(0))
                ended = Checkpoint(t, model(t), True, 2, "aggregated", coins.random() < 0.5, some())
                if coins.random() < 0.7:
                    assert store.save(ended) == disk.save(ended)
        befall(coins, disk, folder)
