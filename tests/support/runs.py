"""A run that takes a second, its interruption, and the comparison of two run folders."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import rpel

TINY: dict[str, Any] = {
    "model": "linear", "nodes": 8, "byzantine": 1, "pull": 4, "rounds": 6, "eval_every": 2, "eval_size": 50,
    "checkpoint_every": 2, "lr": 0.1,
}  # fmt: skip


def tiny(out: Path | None, **fields: Any) -> rpel.Run:
    result: rpel.Run = rpel.simulate(out=out, **{**TINY, **fields})
    return result


def without_seconds(path: Path) -> list[dict[str, Any]]:
    return [{**json.loads(line), "seconds": 0} for line in (path / "metrics.jsonl").read_text().splitlines()]


FILES = "models.safetensors", "counts.npz", "nodes.npz", "spec.toml", "certificate.json"


def differences(a: Path, b: Path) -> list[str]:
    """The files of two runs that are not equal to the last byte; only times may differ."""
    found = [name for name in FILES if (a / name).read_bytes() != (b / name).read_bytes()]
    return found if without_seconds(a) == without_seconds(b) else [*found, "metrics.jsonl"]


def rounds_written(path: Path) -> int:
    """Return the number of rounds in the metrics of a run folder."""
    return (path / "metrics.jsonl").read_bytes().count(b"\n")


def checkpoints(path: Path) -> dict[int, Path]:
    """Return the checkpoint files of a run folder by their rounds, the newest first."""
    files = [(re.fullmatch(r"round-(\d+)\.npz", file.name), file) for file in (path / "checkpoint").glob("*")]
    return dict(sorted(((int(match[1]), file) for match, file in files if match), reverse=True))


class CrashError(Exception):
    pass


def crash_after(round_: int) -> Any:
    def progress(tick: Any) -> None:
        if tick.round == round_:
            raise CrashError

    return progress


def reached(out: Path, round_: int, process: "subprocess.Popen[str]") -> Path:
    """The folder of the run below ``out`` that a process has brought so far."""
    while process.poll() is None:
        for path in out.glob("*/metrics.jsonl"):
            if path.read_bytes().count(b"\n") >= round_:
                return path.parent
        time.sleep(0.01)
    raise AssertionError(f"round {round_} was not reached: {process.communicate()}")
