"""The pages of a peer answer its operator, refuse websites, and never hang."""

import ctypes
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import rpel
from support.process_network import ProcessNetwork, alone

pytestmark = pytest.mark.integration

PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4


class Point(nn.Module):
    """A model of four numbers, as the networks of these tests have."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(4))


class Unprintable(float):
    """A number that a page cannot format."""

    def __format__(self, spec: str) -> str:
        raise RuntimeError("this number cannot be formatted")


@pytest.fixture
def net(tmp_path: Path) -> ProcessNetwork:
    return ProcessNetwork(tmp_path, alone(hyperparameters={"d": 4}))


@pytest.mark.parametrize("path", ["/", "/metrics", "/readyz"])
def test_website_whose_name_leads_here_is_refused(net: ProcessNetwork, path: str) -> None:
    with rpel.Peer(net.members[0].config):
        assert net.page(net.members[0], path)[0] in (200, 503)
        assert net.page(net.members[0], path, host="website.example")[0] == 403


def test_page_that_fails_is_answered(net: ProcessNetwork) -> None:
    with rpel.Peer(net.members[0].config) as peer:
        for round in peer.rounds(Point()):
            if round.outcome is not None:  # of the first round, which has been measured
                break
            peer.measured(accuracy=Unprintable(0.5))
        status, _ = net.page(net.members[0], "/", patience=5.0)
    assert status in (200, 500)


def test_peer_leaves_the_settings_of_its_process_as_they_were(net: ProcessNetwork) -> None:
    limits = [resource.RLIMIT_CORE, resource.RLIMIT_NOFILE]
    prctl = ctypes.CDLL(None).prctl
    usual, dumpable = resource.getrlimit(resource.RLIMIT_CORE), prctl(PR_GET_DUMPABLE)
    resource.setrlimit(resource.RLIMIT_CORE, (usual[1], usual[1]))
    prctl(PR_SET_DUMPABLE, 1)
    try:
        before = [prctl(PR_GET_DUMPABLE), *map(resource.getrlimit, limits)]
        with rpel.Peer(net.members[0].config):
            pass
        assert [prctl(PR_GET_DUMPABLE), *map(resource.getrlimit, limits)] == before
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, usual)
        prctl(PR_SET_DUMPABLE, dumpable)
