"""A member in a container, as far as that goes without an engine: what the Dockerfile of `rpel new` does,
done by hand.

The wheel is installed into an empty environment (its dependencies come from this one, so that no network is
needed) and two members run from it as nobody, on a tree that cannot be written, to their last round.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from rpel.cli import app
from rpel.peer.ops.project import create
from support import namespaces
from support.paths import ROOT, TESTS
from support.waiting import PATIENCE

PYTHON = Path("/usr/bin/python3")
DEPENDENCIES = sysconfig.get_paths()["purelib"]


def unfit() -> str:
    """Why it cannot be tried here."""
    needed = [tool for tool in ("unshare", "setpriv", "ip") if not shutil.which(tool)]
    if needed:
        return f"needs {needed[0]}"
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if (
        not PYTHON.exists()
        or ours not in subprocess.run([PYTHON, "--version"], capture_output=True, text=True).stdout
    ):
        return f"needs {PYTHON} {ours}, which nobody can run"
    return namespaces.possible()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can look into."""
    folder = Path(tempfile.mkdtemp(prefix="rpel-container-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def install(folder: Path) -> None:
    """rpel's wheel, and where its dependencies are."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder / "wheels"), str(ROOT)]
    subprocess.run([*pip, *build], check=True, timeout=PATIENCE)
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder / "env"], check=True)
    inside = [*pip, "--python", str(folder / "env" / "bin" / "python"), "install", "-q", "--no-deps"]
    wheels, alone = map(str, (folder / "wheels").glob("*.whl")), {**os.environ, "PYTHONPATH": ""}
    # else it is thought to be there
    subprocess.run([*inside, *wheels], env=alone, check=True, timeout=PATIENCE)
    (position,) = (folder / "env" / "lib").glob("python*/site-packages")
    (position / "dependencies.pth").write_text(f"{DEPENDENCIES}\n{folder / 'dependencies'}\n")


@pytest.mark.full
def test_two_members_run_as_nobody_on_a_tree_that_cannot_be_written(open_folder: Path) -> None:
    if why := unfit():
        pytest.skip(why)
    folder = open_folder
    install(folder)
    create(folder / "clinic")
    health = re.search(
        r"HEALTHCHECK.*?CMD (\[.*?\])\n", (folder / "clinic" / "Dockerfile").read_text(), re.DOTALL
    )
    assert health is not None
    (folder / "health.py").write_text(json.loads(health[1])[2])
    found(folder)
    script = ["unshare", "--mount", "--net", "sh", str(TESTS / "support" / "container.sh"), str(folder)]
    script.append(DEPENDENCIES)
    done = subprocess.run(script, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "healthy" in done.stdout
    assert done.stdout.count("finished with round 3 of 3") == 2, done.stdout + done.stderr
    assert '{"time"' not in done.stdout  # JSON lines are in the log
    for member in ("member-1", "member-2"):
        state = folder / member / "state"
        assert (state / "model.safetensors").stat().st_uid == 65534
        assert len((state / "audit.jsonl").read_text().splitlines()) >= 1


def found(folder: Path) -> None:
    """Two members of a network of three rounds, whose files belong to nobody."""

    def rpel(*arguments: str) -> str:
        environment = {
            **os.environ,
            "PYTHONPATH": "",
            "PATH": f"{folder / 'env' / 'bin'}:{os.environ['PATH']}",
        }
        command = [str(folder / "env" / "bin" / arguments[0]), *arguments[1:]]
        where = folder / "clinic"
        return subprocess.run(
            command, cwd=where, env=environment, check=True, capture_output=True, text=True
        ).stdout

    rpel("python", "training.py", "first.safetensors")
    for i in (1, 2):
        address = ("--url", f"https://127.0.0.1:744{i}", "--metrics-listen", f"127.0.0.1:946{i + 3}")
        files = f"--members ../member-{i}/members.toml --dir ../member-{i} --task training:task --data data"
        entry = rpel("rpel", "peer", "init", "--id", f"member-{i}", *address, *files.split())
        (folder / f"member-{i}.toml").write_text(entry)
        shutil.copy(folder / "clinic" / "training.py", folder / f"member-{i}")
    plan = "--peers 2 --byzantine 0 --rounds 3 --period 15 --epoch +60 --allow-private"
    model = "--task training:task --model first.safetensors --out .."
    rpel("rpel", "network", "new", *plan.split(), *model.split())
    entries = [str(folder / f"member-{i}.toml") for i in (1, 2)]
    rpel("rpel", "network", "add", *entries, "--members", "../members.toml")
    for i in (1, 2):
        for name in ("members.toml", "init.safetensors"):
            shutil.copy(folder / name, folder / f"member-{i}")
        for path in (folder / f"member-{i}", *(folder / f"member-{i}").iterdir()):
            os.chown(path, 65534, 65534)


def test_container_is_unprivileged_read_only_and_checked(tmp_path: Path) -> None:
    create(tmp_path / "clinic")
    dockerfile = (tmp_path / "clinic" / "Dockerfile").read_text()
    compose = (tmp_path / "clinic" / "compose.yaml").read_text()
    assert "\nUSER rpel\n" in dockerfile
    assert "\nHEALTHCHECK" in dockerfile
    for line in ("read_only: true", "cap_drop: [ALL]", "no-new-privileges:true"):
        assert line in compose
    assert (tmp_path / "clinic" / ".dockerignore").read_text().splitlines()[1:] == ["*", "!wheels/"]
    command = json.loads(re.search(r"ENTRYPOINT (\[.*\])", dockerfile)[1])[1:]  # type: ignore[index]
    command += json.loads(re.search(r"command: (\[.*\])", compose)[1])  # type: ignore[index]
    function = typer.main.get_command(app).commands["peer"].commands["run"]  # type: ignore[attr-defined]
    assert command[:2] == ["peer", "run"]
    assert function.make_context("run", command[2:]).params["metrics_listen"] == "0.0.0.0:9464"
