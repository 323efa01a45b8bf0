"""A new network: a plan with which no round stalls, and the times at which it begins."""

from datetime import UTC, datetime
from typing import Any

import pytest

from rpel import planning
from rpel.peer.ops.create import draft, parse_epoch, stall_proof, strong_catch_up
from rpel.rules import rule

HASHES: dict[str, Any] = {"model_header_sha256": "0" * 64, "init_sha256": "0" * 64}


@pytest.mark.parametrize(
    ("sizes", "expected"), [((12, 2, 200), (9, 2)), ((100, 10, 200), (33, 10)), ((4, 1, 50), (3, 1))]
)
def test_new_network_survives_silence_and_late_peers(
    sizes: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    plan = stall_proof(*sizes)
    m = draft(plan, run="x", epoch=1e9, **HASHES)
    assert (m.pull, m.b_hat) == (plan.pull, plan.b_hat) == expected
    assert plan.no_shows == (2 if m.nodes > 4 else 0)
    assert m.pull - m.b_hat - plan.no_shows >= m.enough >= 2 * m.b_hat


@pytest.mark.parametrize("nodes", [4, 5, 6, 8, 10, 12, 40])
def test_strong_catch_up_is_planned_where_one_more_late_peer_would_fit(nodes: int) -> None:
    plan = stall_proof(nodes, byzantine=1, rounds=100)
    one_more: dict[str, Any] = {"nodes": nodes, "byzantine": 1, "rounds": 100, "silent": True}
    one_more["no_shows"] = plan.no_shows + 1
    if strong_catch_up(plan):
        assert planning.comfortable(**one_more).pull == plan.pull
    else:
        with pytest.raises(ValueError, match="late"):
            planning.comfortable(**one_more)


def test_late_peers_that_do_not_fit_are_refused_with_the_largest_number() -> None:
    with pytest.raises(ValueError, match=r"no_shows 6 .* 12 .* 2 .* 5$"):
        stall_proof(nodes=12, byzantine=2, rounds=200, no_shows=6)
    assert stall_proof(nodes=12, byzantine=2, rounds=200, no_shows=5).pull == 11
    with pytest.raises(ValueError, match="no_shows -1"):
        stall_proof(nodes=12, byzantine=2, rounds=200, no_shows=-1)


def test_rule_that_would_stall_is_refused() -> None:
    assert rule("bulyan", f=2).min_vectors(2) > 5
    with pytest.raises(ValueError, match=r"'bulyan'.*10"):
        draft(stall_proof(nodes=40, byzantine=2, rounds=9), run="x", epoch=1e9, rule="bulyan", **HASHES)


def test_epoch_is_a_time_seconds_from_now_or_the_next_full_hour() -> None:
    now = datetime(2030, 5, 1, 10, 20, tzinfo=UTC)
    assert parse_epoch(None, now) == datetime(2030, 5, 1, 11, tzinfo=UTC).timestamp()
    assert parse_epoch("+90.5", now) == now.timestamp() + 90.5
    assert parse_epoch("2030-05-01T13:00+02:00", now) == parse_epoch(None, now)
    for text in ("+nan", "+inf", "+1e30", "+-5"):
        with pytest.raises(ValueError, match=r"^epoch '\+.*\+600"):
            parse_epoch(text, now)
