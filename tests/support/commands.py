"""The command line in this process, what a command must not load or leave running, and a full disk."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from rpel.cli import main


class Printed(NamedTuple):
    """What a command printed to stdout and stderr."""

    out: str
    err: str


def rpel(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Printed:
    """Run the command in this process, and check its exit status."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    output = capsys.readouterr()
    assert left.value.code == code, output.out + output.err
    return Printed(output.out, output.err)


def loads_none_of(modules: set[str], *arguments: str) -> None:
    """Run the command in a process of its own, and see what it has loaded at its end."""
    script = (
        "import sys, contextlib, rpel.cli\n"
        f"with contextlib.suppress(SystemExit): rpel.cli.main({list(arguments)!r})\n"
        f"loaded = {modules!r} & sys.modules.keys()\n"
        "sys.exit(f'it loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def left_running(folder: Path) -> list[str]:
    """Command lines of processes that were started for this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if str(folder) in text and entry.parent.name != str(os.getpid()):
            found.append(text)
    return found


@contextmanager
def no_more_than(size: int) -> Iterator[None]:
    """As on a full disk: a write beyond this size of a file ends in the middle, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
