"""What an operator sees: the names dashboards rely on, health pages that tell the truth,
lines without weights."""

import asyncio
import gc
import io
import json
import logging
import socket
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rpel.peer.core.protocol import Report
from rpel.peer.io.metrics import Metrics, Pages
from rpel.peer.state.journal import Repeats, RoundLog, round_line
from rpel.types import Measured

NAMES = ("ada", "bob", "cyd")


def a_report(round: int = 3, **changes: object) -> Report:
    fields: dict[str, object] = {
        "round": round,
        "outcome": "aggregated",
        "asked": 2,
        "received": 1,
        "trim": 1,
        "results": {1: "ok", 2: "late"},
        "degraded": 0,
        "frozen": False,
        "saved": True,
        "seconds": 0.2,
        "offset": 0.01,
    }
    return Report(**fields | changes)  # type: ignore[arg-type]


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_every_metric_has_the_name_that_dashboards_rely_on() -> None:
    metrics = Metrics()
    metrics.identity("abc", 2e9, ["bob", "cyd", "dan"])
    assert value(metrics, "rpel_pull_total", peer="dan", result="malformed") == 0
    assert value(metrics, "rpel_asked_total", peer="dan") == 0
    metrics.ended(a_report(), NAMES)
    metrics.pulled(0.1, 400)
    metrics.served("bob", 200, 400)
    metrics.saved()
    assert value(metrics, "rpel_round") == 3
    assert value(metrics, "rpel_rounds_total", outcome="aggregated") == 1
    assert value(metrics, "rpel_rounds_total", outcome="local_only") == 0
    assert value(metrics, "rpel_round_duration_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "rpel_pull_total", peer="bob", result="ok") == 1
    assert value(metrics, "rpel_pull_total", peer="cyd", result="late") == 1
    assert value(metrics, "rpel_pull_duration_seconds_count") == 1
    assert value(metrics, "rpel_received_models") == 1
    assert value(metrics, "rpel_trim_count") == 1
    assert value(metrics, "rpel_serve_total", peer="bob", code="200") == 1
    assert value(metrics, "rpel_bytes_total", direction="sent") == 400
    assert value(metrics, "rpel_bytes_total", direction="received") == 400
    assert value(metrics, "rpel_model_age_rounds") == 0
    metrics.scored(Measured(0.5, 1.5))
    assert (value(metrics, "rpel_accuracy"), value(metrics, "rpel_loss")) == (0.5, 1.5)
    metrics.ended(a_report(4, outcome="local_only", degraded=1), NAMES)
    assert value(metrics, "rpel_model_age_rounds") == 1
    metrics.asked("bob")
    assert value(metrics, "rpel_asked_total", peer="bob") == 1
    assert value(metrics, "rpel_clock_offset_seconds") == pytest.approx(0.01)
    assert value(metrics, "rpel_cert_expiry_timestamp_seconds") == 2e9
    assert b'rpel_build_info{membership="abc",version="' in metrics.text()


def test_age_of_the_checkpoint_grows_until_the_next_is_saved() -> None:
    now = [100.0]
    metrics = Metrics(clock=lambda: now[0])
    assert b"rpel_checkpoint_age_seconds NaN" in metrics.text()
    metrics.saved()
    now[0] = 107.0
    assert value(metrics, "rpel_checkpoint_age_seconds") == 7
    metrics.saved()
    assert value(metrics, "rpel_checkpoint_age_seconds") == 0


def test_two_peers_in_one_process_do_not_mix_their_numbers() -> None:
    one, other = Metrics(), Metrics()
    one.ended(a_report(), NAMES)
    assert value(other, "rpel_rounds_total", outcome="aggregated") == 0


def test_summary_counts_outcomes_and_pulls_since_the_start() -> None:
    metrics = Metrics()
    assert metrics.summary()["round"] == 0
    metrics.ended(a_report(3), NAMES)
    metrics.ended(
        a_report(4, outcome="local_only", results={0: "late", 1: "refused"}, degraded=1, frozen=True), NAMES
    )
    metrics.scored(Measured(0.5, 1.5))
    metrics.scored(Measured())
    assert metrics.summary() == {
        "round": 4,
        "outcomes": {"aggregated": 1, "local_only": 1, "caught_up": 0},
        "pulls": {"ok": 1, "late": 2, "refused": 1, "malformed": 0, "unreachable": 0},
        "degraded": 1,
        "frozen": True,
        "accuracy": 0.5,
        "loss": 1.5,
    }


def test_round_log_line_has_exactly_the_documented_keys(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "rounds.jsonl")
    log.write(json.dumps(round_line(a_report(3), NAMES, "d1", now=1.5)))
    log.write(json.dumps(round_line(a_report(4), NAMES, "d2", now=2.5)))
    first, second = (json.loads(text) for text in (tmp_path / "rounds.jsonl").read_text().splitlines())
    assert list(first) == [
        "time", "round", "outcome", "asked", "received", "trim", "results", "digest", "seconds", "frozen",
        "model_age",
    ]  # fmt: skip
    assert first["results"] == {"bob": "ok", "cyd": "late"}
    assert round_line(a_report(5, degraded=3), NAMES, "d3", now=3.5)["model_age"] == 3
    assert (first["time"], second["round"]) == ("1970-01-01T00:00:01.500+00:00", 4)


def test_lines_go_to_stdout_when_the_log_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    RoundLog("-").write("{}")
    assert capsys.readouterr().out == "{}\n"


def test_unwritable_log_is_reported_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RoundLog(tmp_path / "missing" / "rounds.jsonl")
    with caplog.at_level(logging.WARNING, "rpel"):
        log.write("{}")
        log.write("{}")
    assert len(caplog.records) == 1
    assert "rounds go on without it" in caplog.text


async def _get(address: tuple[str, int], path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(*address)
    return await _asked(reader, writer, path)


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> tuple[int, str]:
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head[9:12]), body.decode()


@asynccontextmanager
async def shown(at: str = "127.0.0.1:0", **more: Any) -> AsyncIterator[Pages]:
    """A peer's pages while they are served."""
    pages = Pages(Metrics(), **{"unready": lambda: ""} | more)
    await pages.start(at)
    try:
        yield pages
    finally:
        await pages.stop()


async def test_readyz_is_false_with_a_reason_until_ready() -> None:
    why = ["starting"]
    async with shown(unready=lambda: why[0]) as pages:
        assert await _get(pages.address, "/healthz") == (200, "ok\n")
        assert await _get(pages.address, "/readyz") == (503, "starting\n")
        why[0] = ""
        assert await _get(pages.address, "/readyz") == (200, "ready\n")
        status, metrics = await _get(pages.address, "/metrics")
        assert status == 200
        assert "rpel_round " in metrics


async def test_address_in_use_is_named() -> None:
    async with shown() as first:
        with pytest.raises(OSError, match=r"metrics_listen 127\.0\.0\.1:\d+"):
            await Pages(Metrics(), lambda: "").start(f"127.0.0.1:{first.address[1]}")


async def test_idle_connections_to_the_metrics_port_give_way_and_the_page_is_still_served() -> None:
    async with shown(seconds=3600.0) as pages:
        held = [await asyncio.open_connection(*pages.address) for _ in range(200)]
        assert await _get(pages.address, "/readyz") == (200, "ready\n")
        assert await held[0][0].read() == b""  # the oldest was closed
        assert pages.connections == 15
        for _, writer in held:
            writer.transport.abort()


@pytest.mark.parametrize("turns", range(5))
def test_connections_that_come_while_the_pages_end_are_closed(turns: int) -> None:
    """In every turn of the loop in which the end can come."""

    async def end() -> int:
        pages = Pages(Metrics(), lambda: "")
        await pages.start("127.0.0.1:0")
        held = [socket.create_connection(pages.address) for _ in range(8)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await pages.stop()
        for one in held:
            one.close()
        return pages.connections

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert asyncio.run(end()) == 0
        gc.collect()
    assert [str(one.message) for one in said] == []


async def test_request_that_never_ends_is_closed() -> None:
    async with shown(seconds=0.05) as pages:
        reader, writer = await asyncio.open_connection(*pages.address)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost:")
        assert await reader.read() == b""
        writer.transport.abort()


async def test_pages_can_listen_at_a_unix_socket_that_only_the_owner_may_use(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    async with shown(f"unix:{path}"), shown(f"unix:{path}"):  # a killed peer's socket is in nobody's way
        assert path.stat().st_mode & 0o777 == 0o600
        assert await _asked(*await asyncio.open_unix_connection(path), path="/healthz") == (200, "ok\n")


def test_full_or_closed_standard_output_ends_no_peer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RoundLog("-")
    with caplog.at_level(logging.WARNING, "rpel"):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            log.write("{}")
            with suppress(OSError):
                full.close()
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stdout", closed)
        log.write("{}")
    assert len(caplog.records) == 1
    assert "standard output cannot be written" in caplog.text


def test_same_line_again_and_again_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logger, repeats = logging.getLogger("rpel"), Repeats(most=20)
    logger.addFilter(repeats)
    try:
        with caplog.at_level(logging.WARNING, "rpel"):
            for i in range(10_000):
                logger.warning("round %d: asking %s failed", i, "bob")
            logger.warning("something else")
    finally:
        logger.removeFilter(repeats)
    assert len(caplog.records) == 21


def test_percent_sign_in_a_repeated_line_stays_as_it_is() -> None:
    repeats = Repeats(most=1, clock=iter([0.0, 1.0, 70.0]).__next__)
    lines = [logging.LogRecord("rpel", logging.INFO, "", 0, "%d %% of disk", (5,), None) for _ in range(3)]
    assert [repeats.filter(one) for one in lines] == [True, False, True]
    assert lines[2].getMessage() == "5 % of disk (and 1 lines like this before)"
