"""The page of a peer: what it says of a running network, in a browser;
hostile names among its members run nothing."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rpel.peer.node.node import Node, Round
from rpel.peer.node.page import drawn
from rpel.peer.state.journal import history
from rpel.types import Outcome
from rpel.version import __version__
from support.browser import in_chromium
from support.thread_network import Measuring, Running, ended, found

DRIVE = (Path(__file__).parents[1] / "browser" / "peer.js").read_text("utf-8")
HOSTILE = (
    "</style><script>problems.push('ran')</script>",
    '"><img src=x onerror="problems.push(\'ran\')">',
    "{{ 7 * 7 }} <b>\u202e\x1b[2J",
)


def test_peer_page_of_a_running_network_in_a_browser(tmp_path: Path) -> None:
    net = found(tmp_path, 5, rounds=10_000, byzantine=1)
    members = [
        m.replace(organisation=text) for m, text in zip(net.membership.members[1:4], HOSTILE, strict=True)
    ]
    net.membership = net.membership.replace(
        members=(net.membership.members[0], *members, net.membership.members[4])
    )
    net.membership.save(tmp_path / "members.toml")
    peers = [Running(Node(config), Measuring(number)) for number, config in enumerate(net.configs[:4])]
    seen: dict[str, str] = {}

    def look(peer: Running, round: Round) -> bool:
        """The first peer's page after three rounds in which all that run answered; then all leave."""
        node, points = peer.node, list(peer.node.metrics.history)
        if peer is peers[0] and [p.received for p in points if p.outcome is Outcome.AGGREGATED][-3:] == [
            3,
            3,
            3,
        ]:
            host, port = node.pages.address
            with urllib.request.urlopen(f"http://{host}:{port}/", timeout=20) as reply:
                seen.update(
                    {"page": reply.read().decode(), "policy": reply.headers["Content-Security-Policy"]}
                )
            other = urllib.request.Request(f"http://{host}:{port}/", headers={"Host": "rebound.example"})
            with pytest.raises(urllib.error.HTTPError, match="HTTP Error 403"):
                urllib.request.urlopen(other, timeout=20)
        return bool(seen)

    with ended([peer.start(look) for peer in peers]):
        for peer in peers:
            peer.join()
    assert seen["policy"].startswith("default-src 'none'; script-src 'none'; style-src 'sha256-")
    let_in = seen["page"].replace("script-src &#39;none&#39;", "script-src ")  # nobody but the test
    there = in_chromium(let_in, DRIVE, tmp_path)
    assert there["problems"] == []
    assert (there["foreign"], there["scripts"]) == (0, 2)  # the two that the test put in
    assert there["state"] == ["taking part"]
    assert there["tiles"][:4] == ["round", "next round", "accuracy", "loss"]
    assert (there["lines"], there["strip"] >= 3) == (2, True)
    assert "<script>problems.push('ran')</script>" in there["members"][0]
    assert "{{ 7 * 7 }} <b>" in there["members"][2]
    assert there["states"] == ["answered"] * 3 + ["not reached"]
    assert there["versions"] == [__version__] * 3 + [""]
    assert there["width"] <= there["window"]
    log = [json.loads(line) for line in net.configs[0].log.read_text().splitlines()]  # type: ignore[union-attr]
    assert all(
        (row["accuracy"], row["loss"]) == (1 - 1 / (1 + row["round"]), 1 / row["round"]) for row in log
    )
    assert [p.round for p in history(net.configs[0].state_dir / "audit.jsonl")] == [
        row["round"] for row in log
    ]


def test_curve_of_one_or_equal_values_is_drawn() -> None:
    assert drawn([]) is None
    for values in ([(7, 0.0)], [(1, 2.5), (9, 2.5)]):
        curve = drawn(values)
        assert curve is not None
        assert "nan" not in curve["points"]


def test_damaged_log_loses_only_its_damaged_lines(tmp_path: Path) -> None:
    good = {"round": 3, "outcome": "aggregated", "asked": 4, "received": 3, "loss": 0.5}
    path = tmp_path / "rounds.jsonl"
    path.write_text(f'{{"round": \n[]\n{json.dumps(good)}\n{{"round": "x"}}\n')
    assert [(p.round, p.loss, p.accuracy) for p in history(path)] == [(3, 0.5, None)]
    assert history(tmp_path / "none") == []
