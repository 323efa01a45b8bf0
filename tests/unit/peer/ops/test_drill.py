"""The hostile member does what it is told: each attack and misbehaviour reaches its victims,
and they go on."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from rpel import attack, rule
from rpel.peer.core import wire
from rpel.peer.core.evidence import of_member, sign
from rpel.peer.net.tls import read_key
from rpel.peer.ops.drill import HostileMember, drill
from rpel.types import Models
from support.loopback import Ends, MemoryStore, model
from support.thread_network import LAYOUT, NetworkFiles, found
from support.waiting import until

pytestmark = pytest.mark.integration

HONEST = 4
MODELS = np.stack([model(LAYOUT, seed) for seed in range(HONEST)])


class Drill:
    """Four honest members that have published round 1, which lasts ten minutes, and a hostile fifth."""

    def __init__(self, net: NetworkFiles, transports: list[Ends], stores: list[MemoryStore]) -> None:
        self.net, self.transports, self.stores = net, transports, stores

    async def pull(self, victim: int, round: int = 1, within: float = 60.0) -> tuple[str, Models]:
        row = np.zeros(LAYOUT.d, LAYOUT.dtype)
        answer = await self.transports[victim].pull(
            HONEST, round, row, asyncio.get_running_loop().time() + within
        )
        return answer.result, row

    async def pulls(self, within: float = 60.0) -> tuple[set[str], Models]:
        """What all victims get in round 1; connections stand already,
        so that no answer is not "unreachable"."""
        assert {(await self.pull(victim, round=0))[0] for victim in range(HONEST)} == {"ok"}
        answers = await asyncio.gather(*(self.pull(victim, within=within) for victim in range(HONEST)))
        return {result for result, _ in answers}, np.stack([row for _, row in answers])


@asynccontextmanager
async def drilled(folder: Path, attack: str) -> AsyncIterator[Drill]:
    net = found(folder, HONEST + 1, rounds=2, period=600.0, soon=0.0, byzantine=1)
    stores = [MemoryStore(LAYOUT) for _ in range(HONEST)]
    transports = []
    for number, (own, store, x) in enumerate(zip(net.configs, stores, MODELS, strict=False)):
        store.ahead = time.time() - net.membership.epoch - asyncio.get_running_loop().time()
        store.put(1, x)
        digest = bytes.fromhex(wire.digest(LAYOUT, x))
        store.signatures[1] = sign(read_key(own.key), of_member(net.membership, number), 1, digest)
        transports.append(Ends(net.membership, own.certificate, own.key, own.listen, LAYOUT, store))
        await transports[-1].start()
    red = asyncio.create_task(HostileMember(net.configs[HONEST], attack).run())
    try:
        yield Drill(net, transports, stores)
    finally:
        red.cancel()
        await asyncio.gather(red, return_exceptions=True)
        for transport in transports:
            await transport.stop()
        for store in stores:
            store.close()


@pytest.mark.parametrize("name", ["alie", "foe", "sf", "mimic", "none", "dissensus", "strongest", "fang"])
async def test_all_victims_get_the_same_forgery_of_the_library(tmp_path: Path, name: str) -> None:
    async with drilled(tmp_path, name) as drill:
        results, rows = await drill.pulls()
        m = drill.net.membership
    assert results == {"ok"}
    since = MODELS.mean(axis=0)  # from the common initial model, which is zero here
    chosen = rule(m.rule, f=m.b_hat)
    twin = attack(name).forge(MODELS[1:], MODELS[0], byzantine=1, rule=chosen, change=since, round=1)
    np.testing.assert_allclose(rows, np.tile(twin, (HONEST, 1)), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "result", "within"),
    [
        *((name, "malformed", 60.0) for name in ("old_round", "garbage", "wrong_size")),
        *((f"wrong_size(extra={extra})", "malformed", 60.0) for extra in (-1, -(10**6), 1, 10**12)),
        *((name, "late", 1.0) for name in ("silence", "slow")),
        ("nan", "ok", 60.0),
        ("equivocate", "ok", 60.0),
        ("slow(rate=1e6)", "ok", 60.0),
    ],
)
async def test_misbehaviour_reaches_its_victims(
    tmp_path: Path, name: str, result: str, within: float
) -> None:
    async with drilled(tmp_path, name) as drill:
        results, rows = await drill.pulls(within=within)
    assert results == {result}
    if name == "nan":
        assert np.isnan(rows).all()
    if name == "equivocate":
        assert len(np.unique(rows, axis=0)) == HONEST
    if name == "slow(rate=1e6)":
        np.testing.assert_allclose(rows[0], MODELS[1:].mean(axis=0))


async def test_flood_meets_the_limits_and_others_are_served(tmp_path: Path) -> None:
    async with drilled(tmp_path, "flood(rate=1000)") as drill:
        results, rows = await drill.pulls()
        assert results == {"ok"}
        np.testing.assert_allclose(rows[0], MODELS[1:].mean(axis=0))
        await until(lambda: all(store.codes()[429] for store in drill.stores))
        row = np.zeros(LAYOUT.d)
        answer = await drill.transports[0].pull(1, 1, row, asyncio.get_running_loop().time() + 60)
        assert answer.result == "ok"
        bodies = [
            sum(member == HONEST and code == 200 for member, code, _ in store.answered)
            for store in drill.stores
        ]
        assert max(bodies) <= 2 + 1  # two of round 1, and a word about the clock


def test_attack_on_the_honest_change_takes_the_half_steps_of_the_round_before(tmp_path: Path) -> None:
    """Round 1 rose from the common initial model in every coordinate; round 2 fell:
    the forgery changes sides."""
    team = HostileMember(found(tmp_path, HONEST + 1, byzantine=1).configs[HONEST], "fang")
    senders, first = list(range(HONEST)), np.abs(MODELS) + 1
    rose = team.forge(first, senders, 1)
    fell = team.forge(first - 0.5, senders, 2)
    assert (rose < first[1:].min(axis=0)).all()
    assert (fell > first[1:].max(axis=0) - 0.5).all()


# --- against whole peers ------------------------------------------------------------------------------------


# --- what is refused ----------------------------------------------------------------------------------------


def test_hostile_member_without_key_is_refused(tmp_path: Path) -> None:
    net = found(tmp_path, 4)
    net.configs[3].certificate.write_text(net.configs[2].certificate.read_text())
    with pytest.raises(ValueError, match="fingerprint"):
        HostileMember(net.configs[3], "alie")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("alei", "'alie'"),
        ("label_flip", "data of its own"),
        ("spectral", "draw in secret"),
        ("strongest(of=alie+spectral)", "draw in secret"),
        ("alie(y=1)", "'y'"),
        ("slow(speed=1)", "slow has no parameter 'speed': it takes rate"),
        ("flood(rate=1e9)", "from 1 to 1000"),
        ("slow(rate=fast)", "rate 'fast' is not valid"),
        ("alie(z", "too early"),
    ],
)
def test_impossible_drill_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        drill(text)
