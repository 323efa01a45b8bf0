"""A disk that is too small or fills during a run costs no checkpoint, and the message names it."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import rpel
from support.commands import rpel as command
from support.runs import differences

FIELDS: dict[str, Any] = {
    "dataset": "mnist-sample-8x8", "model": "linear", "nodes": 6, "byzantine": 1, "pull": 4, "rounds": 6,
    "checkpoint_every": 2, "eval_every": 3, "eval_size": 20, "batch_size": 8, "lr": 0.1,
}  # fmt: skip
SIZE = re.compile(r"\d [kMG]?B\b")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 512 kB: enough for small runs, too little for the checkpoint of a larger one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "rpel-test", str(place)], check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk takes the right to mount")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> None:
    """Write until there is no room left."""
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_disk_that_fills_during_a_run_is_named_and_no_checkpoint_is_lost(disk: Path, tmp_path: Path) -> None:
    whole = rpel.simulate(**FIELDS, out=tmp_path / "whole")
    out = disk / "runs"

    def progress(tick: Any) -> None:
        if tick.round == 5:
            fill(disk)

    with pytest.raises((OSError, ValueError)) as stopped:
        rpel.simulate(**FIELDS, out=out, progress=progress)
    (path,) = out.iterdir()
    (disk / "filler").unlink()
    rounds: list[int] = []
    rpel.resume(path, progress=lambda tick: rounds.append(tick.round))
    assert rounds in ([5, 6], [6])
    assert differences(Path(str(whole.path)), path) == []
    assert str(out) in str(stopped.value)
    assert SIZE.search(str(stopped.value))


def test_read_only_disk_is_named(disk: Path) -> None:
    path = rpel.simulate(**{**FIELDS, "rounds": 1}, out=disk / "runs").path
    assert path is not None
    (path / "certificate.json").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for begin in (lambda: rpel.resume(path), lambda: rpel.simulate(**FIELDS, out=disk / "other")):
        with pytest.raises((OSError, ValueError), match=f"{disk}.*[Rr]ead-only file system"):
            begin()


def test_run_that_does_not_fit_on_the_disk_is_refused_before_its_first_round(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--model", "linear", "--rounds", "2", "--nodes", "24", "--byzantine", "1", "--pull", "6")
    _, said = command("run", "quickstart", *size, "--out", str(disk / "runs"), code=2, capsys=capsys)
    sentence = said.strip().splitlines()[-1]
    assert str(disk) in sentence
    assert SIZE.search(sentence)
    assert sum(file.read_bytes().count(b"\n") for file in disk.rglob("metrics.jsonl")) == 0
