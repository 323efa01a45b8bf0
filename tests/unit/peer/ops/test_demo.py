"""A demonstration is real from the command line to its last process, and leaves nothing running."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rpel import cli
from rpel.peer.ops import demo
from rpel.peer.ops.demo import Demonstration, Frame
from rpel.processes import ChildError, Children, Stop
from rpel.types import ROBUST_RULE
from support.commands import left_running
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

TRAINS = "nnm+trimmed_mean: round"
"""Said when all peers are up."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rpel", "network", "demo", *arguments]


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "when", "peers"),
    [(signal.SIGTERM, "measuring", 0), (signal.SIGINT, TRAINS, 4), (signal.SIGTERM, TRAINS, 4)],
)
def test_ctrl_c_and_sigterm_end_all_processes_and_leave_130(
    tmp_path: Path, number: signal.Signals, when: str, peers: int
) -> None:
    out = tmp_path / "demo"
    running = subprocess.Popen(
        command("--peers", "4", "--byzantine", "0", "--rounds", "4", "--out", str(out)),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stderr is not None
        assert any(when in line for line in running.stderr), "it ended before it could be told to"
        assert len([text for text in left_running(out) if "peer\0run" in text]) == peers
        running.send_signal(number)
        _, said = running.communicate(timeout=PATIENCE)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "all peers have been ended" in said
    assert "Traceback" not in said
    assert left_running(out) == []


def test_dead_demo_peer_is_named_with_its_last_output(tmp_path: Path) -> None:
    with Children(Stop()) as children:
        children.start("peer-1", ["peer", "run", "--config", str(tmp_path / "none.toml")], tmp_path)
        children.all[0].wait(PATIENCE)
        with pytest.raises(ChildError, match=r"peer-1.* 2;.*\n.*no file"):
            children.check()


def test_late_demo_peers_are_restarted_with_a_longer_lead(tmp_path: Path) -> None:
    shown: list[Frame] = []
    said: list[str] = []
    stage = demo._Stage(Demonstration(4, 0, 2), shown.append, said.append, Stop())
    # doubled twice it is below .2 s, before which nobody is asked: too short on the fastest machine
    with pytest.raises(ChildError, match=r"4 peers.*0\.16 s"):
        demo._run_network(stage, ROBUST_RULE, tmp_path / "robust", period=1.0, lead=0.04)
    assert len(said) == 3
    assert shown == []
    assert left_running(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--peers", "5", "--byzantine", "3"], "byzantine"),
        (["--attack", "alei"], "the nearest is 'alie'"),
        (["--period", "soon"], "period 'soon' is not valid"),
        (["--no-shows", "9"], "no_shows 9 does not fit 12 peers"),
    ],
)
def test_bad_demo_options_are_refused_before_start(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["network", "demo", *arguments])
    assert sentence in capsys.readouterr().err


def test_demo_leaves_a_nonempty_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["network", "demo", "--out", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_demo_ports_are_outside_the_ephemeral_range() -> None:
    ports = demo.free_ports(20)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20
    assert max(ports) < lowest
