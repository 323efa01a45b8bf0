"""The command line in this process, and what a command must not load."""

import subprocess
import sys

import pytest

from rpel.cli import main


def rpel(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    """The command in this process: (stdout, stderr)."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    output = capsys.readouterr()
    assert left.value.code == code, output.out + output.err
    return output.out, output.err


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
