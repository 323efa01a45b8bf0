"""A state folder belongs to one network and holds what that network's peer made, nothing else."""

import shutil
import stat
from pathlib import Path

import pytest

from support.process_network import ProcessNetwork, alone

pytestmark = pytest.mark.integration


def test_state_of_another_network_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with ProcessNetwork(tmp_path / "first", alone()) as first:
        first.start(first.members[0])
        first.wait_round(2, first.members[0])
    with ProcessNetwork(tmp_path / "second", alone()) as second:
        peer = second.members[0]
        shutil.copytree(first.members[0].folder / "state", peer.folder / "state")
        second.start(peer)
        second.wait(lambda: bool(peer.lines) or peer.ended, "a round or a refusal")
        assert peer.lines == [], "it plays with the model of the other network"
        assert peer.process.status == 2
        assert str(peer.folder / "state") in peer.errors


def test_files_that_the_peer_did_not_create_keep_their_modes(tmp_path: Path) -> None:
    with ProcessNetwork(tmp_path, alone()) as net:
        peer = net.members[0]
        script = peer.folder / "backup.sh"
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
        settings = peer.config.read_text().replace('state_dir = "state"', 'state_dir = "."')
        peer.config.write_text(settings)
        net.start(peer)
        net.wait(lambda: bool(peer.lines) or peer.ended, "a round")
        assert stat.S_IMODE((peer.folder / "audit.jsonl").stat().st_mode) == 0o600
        assert stat.S_IMODE(script.stat().st_mode) == 0o755
