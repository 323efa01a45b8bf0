"""Thousands of networks under the virtual clock, each with faults drawn from its seed: no invariant ever breaks."""

import hashlib

import pytest

from support.virtual_faults import healed, scheduled

BLOCKS = [pytest.param(i, marks=pytest.mark.integration if i < 1 else pytest.mark.full) for i in range(100)]
"""Of a hundred blocks of seeds one is part of ``make test``, all of ``make test-all``."""


def broken(seed: int) -> list[str]:
    return [f"seed {seed}: {invariant}" for invariant in scheduled(seed).run().broken]


@pytest.mark.parametrize("block", BLOCKS)
def test_no_invariant_breaks_in_a_hundred_fault_schedules(block: int) -> None:
    """100 schedules by default, 10,000 in ``make test-all``."""
    assert [invariant for seed in range(100 * block, 100 * block + 100) for invariant in broken(seed)] == []


def fingerprint(seed: int) -> str:
    return hashlib.sha256(repr(scheduled(seed).run().trace).encode()).hexdigest()


def test_any_seed_replays_identically() -> None:
    first, second = ([fingerprint(seed) for seed in range(8)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 8


def stuck(seed: int) -> list[str]:
    net, found = healed(seed)
    return [f"seed {seed}, {net.n} peers: {what}" for what in (*found, *net.broken)]


@pytest.mark.parametrize("block", BLOCKS)
def test_once_faults_end_every_honest_peer_aggregates_within_10_rounds(block: int) -> None:
    """With F honest peers down and the hostile silent, n from 4; beside it no other invariant breaks.

    25 networks by default, 2,500 in ``make test-all``.
    """
    assert [line for seed in range(25 * block, 25 * block + 25) for line in stuck(seed)] == []


def test_one_liar_and_a_wrong_clock_do_not_end_a_peer_before_the_last_round() -> None:
    """n = 4: a clock far ahead and one liar's outvote the one honest member that answers; the peer refuses to start."""
    net, waiting = healed(396)
    assert waiting == []
    assert any("is over" in (peer.refused or "") for peer in net.peers)


def test_a_peer_that_was_told_the_run_is_over_takes_part_once_its_clock_is_right() -> None:
    assert stuck(1648) == []
