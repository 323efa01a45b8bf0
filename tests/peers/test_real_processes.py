"""What a network of real processes survives whatever the timing: n = 12, b = 2, s = 9, b_hat = 2,
real TLS on loopback.

Nothing here asserts a time. How long things take is measured by benchmarks/reliability.py; that rounds keep
their time is asserted under the virtual clock (test_protocol.py).
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from support.observer import Observer
from support.process_faults import POINTS
from support.process_network import Member, Plan, ProcessNetwork, check_invariants

pytestmark = pytest.mark.integration

ROOT_NEEDED = "needs root to mount a small disk"


# --- 1: kill -9 ---------------------------------------------------------------------------------------------


def records(member: Member) -> dict[int, str]:
    """The hash of each half-step on disk, by round."""
    found = {}
    for path in (member.folder / "state").glob("half-*.json"):
        body = path.with_suffix(".safetensors").read_bytes()
        found[int(path.stem.partition("-")[2])] = hashlib.sha256(body).hexdigest()
    return found


def test_killed_real_peer_never_serves_two_versions_of_a_round(tmp_path: Path) -> None:
    with ProcessNetwork(tmp_path) as net, Observer(net, net.members[11]) as observer:
        victims = dict(zip(net.members, POINTS, strict=False))
        for place, (victim, point) in enumerate(victims.items()):
            net.start(victim, environment={"RPEL_TEST_DIE": f"{point}:{3 + place}"})
        net.start(*net.members[8:11])
        died = {}
        for victim in victims:
            net.wait(lambda victim=victim: not victim.running, f"the death of {victim.id}")  # type: ignore[misc]
            died[victim] = records(victim)
            net.start(victim)
        net.wait_aggregated(*net.members[:11], times=2)
        net.wait(lambda: observer.looked_twice() > 20, "the observer to look twice")
        check_invariants(net)

    for victim, on_disk in died.items():
        assert [process.status for process in victim.processes] == [-signal.SIGKILL, -signal.SIGKILL]
        assert "aggregated" in {line["outcome"] for line in victim.process.lines}
        for round, digest in on_disk.items():
            assert observer.seen[victim.number, round] <= {digest}, (victim.id, round)
    for member in net.members:
        for line in member.lines:
            seen = observer.seen[member.number, line["round"]]
            assert len(seen) <= 1
            assert seen <= {line["digest"]} or not line["digest"], (member.id, line)


@pytest.mark.full
def test_spy_sees_a_peer_that_serves_two_versions(tmp_path: Path) -> None:
    with (
        ProcessNetwork(tmp_path, Plan(peers=4, byzantine=0)) as net,
        Observer(net, net.members[3]) as observer,
    ):
        liar = net.members[0]
        net.start(*net.members[:3])
        while not observer.caught(liar):
            assert liar.last < 50, "the observer is blind"
            net.wait_round(liar.last + 1, liar)
            # what is published changes under the server
            for path in (liar.folder / "state").glob("half-*.safetensors"):
                with path.open("r+b") as file:
                    file.seek(net.layout.size - 8)
                    file.write(os.urandom(4))


# --- 5: credentials -----------------------------------------------------------------------------------------


def test_real_peer_without_key_refuses_to_start(tmp_path: Path) -> None:
    net = ProcessNetwork(tmp_path)
    peer = net.members[3]
    (peer.folder / "peer.key").unlink()
    command = [sys.executable, "-m", "rpel", "peer", "run", "--config", str(peer.config)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("rpel: there is no key ")
    assert ended.stderr.count("\n") == 1
    assert not (peer.folder / "state").exists()


# --- 7: disks and clocks ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    tried = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "rpel-test", str(place)], capture_output=True
    )
    if tried.returncode:
        pytest.skip(ROOT_NEEDED)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> Path:
    """A file that takes all the room there is."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 512):
                pass
        except OSError:
            pass
    return filler


@pytest.mark.full
def test_full_disk_serves_and_loses_nothing_and_the_peer_resumes(tmp_path: Path, small_disk: Path) -> None:
    home = tmp_path / "net"
    home.mkdir()
    with ProcessNetwork(home) as net, Observer(net, net.members[11]) as observer:
        peer, others = net.members[0], net.members[1:11]
        (peer.folder / "state").symlink_to(small_disk)
        net.start(peer, *others)
        net.wait_aggregated(peer, times=2)
        filler = fill(small_disk)
        net.wait(lambda: "could not write" in peer.errors, "the disk to be full")
        kept = {path.name: path.read_bytes() for path in small_disk.glob("checkpoint-*")}
        begin = peer.last
        net.wait_round(begin + 3, peer)
        net.kill(peer)
        assert {path.name: path.read_bytes() for path in small_disk.glob("checkpoint-*")} == kept != {}
        played = {line["round"] for line in peer.lines if begin < line["round"]}
        assert {line["outcome"] for line in peer.lines if line["round"] in played} == {"local_only"}
        net.start(peer)
        net.wait(lambda: bool(peer.process.lines), "the first round after the restart, the disk still full")
        filler.unlink()
        net.wait_aggregated(*net.members[:11], times=2)
        check_invariants(net, *others)
    assert not any(observer.seen[0, round] for round in played), "a half-step that is not on disk was served"


@pytest.mark.full
def test_setting_the_wall_clock_by_an_hour_repeats_no_round_and_skips_none(tmp_path: Path) -> None:
    with ProcessNetwork(tmp_path) as net:
        forward, back = net.members[:2]
        net.start()
        net.wait_aggregated(times=2)
        before = max(member.last for member in net.members)
        net.signal(signal.SIGUSR1, forward)
        net.signal(signal.SIGUSR2, back)
        net.wait_aggregated(times=4)
        check_invariants(net)
        now = time.time()
        for member, hour in ((forward, 3600), (back, -3600)):
            stamp = member.lines[-1]["time"]
            assert abs(_seconds(stamp) - hour - now) < 600, "the clock was not set"
            later = [round for round in member.rounds if round > before]
            running = (time.time() - net.membership.epoch) / net.membership.period + 1
            assert all(round <= running for round in later), "an hour of rounds was skipped"

        net.kill(forward)
        net.start(forward, environment={"RPEL_TEST_WALL": "3600"})
        net.wait(lambda: not forward.running, "a refusal")
        assert forward.process.status == 1, "the service manager tries again when the clock is right"
        assert "this machine's clock is" in forward.process.errors[-1]
        assert forward.process.lines == []
        net.wait_aggregated(*net.members[1:])


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


# --- 10: a new membership -----------------------------------------------------------------------------------
