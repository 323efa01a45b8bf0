"""``rpel new``: a project that runs as it is."""

import os
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from rpel.peer.config.settings import Config
from rpel.peer.ops.demo import free_ports
from rpel.peer.ops.project import FILES, create
from support.commands import rpel
from support.waiting import PATIENCE


def run(folder: Path, *command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """A command as a stranger types it, with this environment's python and rpel first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": "", **extra}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.integration
def test_new_project_passes_its_generated_test(tmp_path: Path) -> None:
    create(tmp_path / "clinic")
    tested = run(tmp_path / "clinic", "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout


@pytest.mark.full
def test_new_project_rehearses_by_its_readme(tmp_path: Path) -> None:
    assert run(tmp_path, "rpel", "new", "clinic").returncode == 0
    clinic = tmp_path / "clinic"
    blocks = (clinic / "README.md").read_text("utf-8").split("## 2.")[1].split("## 3.")[0]
    lines = [line.removeprefix("    ") for line in blocks.splitlines() if line.startswith("    ")]
    founded, rehearsed = run(clinic, "sh", "-ec", "\n".join(lines[:-1])), run(clinic, "sh", "-ec", lines[-1])
    assert founded.returncode == 0, founded.stderr
    assert rehearsed.returncode == 0, rehearsed.stderr
    assert "plain averaging" in rehearsed.stdout


@pytest.mark.full
def test_four_members_of_a_new_project_learn_on_this_machine(tmp_path: Path) -> None:
    """As the guide says, from `rpel new` to a page to look at: ten minutes at most,
    also on a busy machine."""
    began, path = time.monotonic(), f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert run(tmp_path, "rpel", "new", "clinic").returncode == 0
    extra = {"START": "120", "PERIOD": "6", "ROUNDS": "5", "PORT": str(free_ports(1)[0])[:-1]}
    environment = {**os.environ, "PATH": path, **extra}
    with subprocess.Popen(
        ["sh", "local.sh"], cwd=tmp_path / "clinic", env=environment, stdout=subprocess.PIPE, text=True
    ) as local:
        assert local.stdout is not None
        address = next(line.strip() for line in local.stdout if line.startswith("  http://127.0.0.1:"))
        seen = ""
        while "accuracy over rounds" not in seen or ">not measured yet" in seen:
            assert time.monotonic() - began < 600, "a page to look at took more than ten minutes"
            assert local.poll() is None
            time.sleep(2)
            with suppress(OSError), urllib.request.urlopen(address, timeout=20) as page:
                seen = page.read().decode()
        assert seen.count("answered</td>") == 3
        rest = local.stdout.read()
    assert local.returncode == 0
    assert rest.count("5 aggregated") == 4, rest


def test_member_of_a_new_project_needs_its_url_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create(tmp_path / "clinic-3")
    settings = (tmp_path / "clinic-3" / "peer.toml").read_text()
    init = ("peer", "init", "--dir", str(tmp_path / "clinic-3"), "--url", "https://clinic.example:7443")
    _, err = rpel(*init, "--task", "mnist", capsys=capsys, code=2)
    assert "task = 'training:task', not 'mnist'" in err
    out, _ = rpel(*init, capsys=capsys)
    assert 'id = "clinic-3"' in out
    assert (tmp_path / "clinic-3" / "peer.toml").read_text() == settings
    own = Config.load(tmp_path / "clinic-3" / "peer.toml")
    assert (own.task, own.data, own.key.exists()) == ("training:task", tmp_path / "clinic-3" / "data", True)
    _, err = rpel(
        "peer", "init", "--dir", str(tmp_path), "--url", "https://clinic.example:7443", capsys=capsys, code=2
    )
    assert "--id is missing" in err


def test_new_project_overwrites_nothing_and_needs_a_members_name(tmp_path: Path) -> None:
    made = {path.name for path in create(tmp_path / "clinic")}
    assert {name.removeprefix(".") for name in made} == {*FILES, "patients.csv", "peer.toml"}
    with pytest.raises(ValueError, match=r"/clinic is not empty"):
        create(tmp_path / "clinic")
    with pytest.raises(ValueError, match=r"'a clinic'.*clinic-3"):
        create(tmp_path / "a clinic")
