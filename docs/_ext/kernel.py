"""Run when a notebook's kernel starts: commands write plain text, in one piece,
and one that fails fails the page."""

import os
import re
import subprocess
import sys

from IPython import get_ipython

for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # a kernel asks for colours, as a terminal does
    os.environ.pop(name, None)
os.environ["COLUMNS"] = "100"


def bash(line: str, cell: str) -> None:
    """IPython's own magic breaks lines of output. Real peers get up to four times the time where others
    compute."""
    busy = min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 4.0)
    cell = re.sub(r"(--period |--epoch \+)(\d+)", lambda told: f"{told[1]}{int(told[2]) * busy:.0f}", cell)
    done = subprocess.run(["bash", "-e", "-c", cell], capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    done.check_returncode()


get_ipython().register_magic_function(bash, "cell", "bash")
