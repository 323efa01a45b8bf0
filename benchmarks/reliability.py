"""What faults cost a network of real processes, measured: n = 12, b = 2, s = 9, b_hat = 2,
real TLS on this machine.

Run `python benchmarks/reliability.py [--quick] [faults] [flood] [wire] [exchange] [large]`; all of them if
none is named. It prints Markdown tables; `--quick` makes everything smaller, for a look. That rounds keep
their time is asserted under the virtual clock, in tests/peers; here are the figures of one machine on one
day, described at the top.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import flood as flooding
import machine
import plain_exchange
from rpel.peer.ops.create import stall_proof
from support import namespaces
from support.loopback import credentials
from support.process_network import PORT, Plan, ProcessNetwork, half_step, loopback
from support.proxy import Proxies, Proxy

Row = tuple[object, ...]


def table(title: str, heads: Row, rows: list[Row]) -> None:
    print(f"\n### {title}\n")
    for row in (heads, tuple("---" for _ in heads), *rows):
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    sys.stdout.flush()


# --- faults -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faulted:
    """One fault: what does it to the net, for how many rounds, and whose rounds it may rightly cost."""

    name: str
    begin: Callable[[], AbstractContextManager[None]]
    rounds: int
    victims: tuple[int, ...] = ()


class Course:
    """The course of faults over one net; honest members are 0 … 9, the last two may turn hostile."""

    def __init__(self, net: ProcessNetwork, network: namespaces.Namespaces | None) -> None:
        self.net, self.network = net, network
        self.honest = net.members[:10]

    def faults(self) -> Iterator[Faulted]:
        yield Faulted("none", nullcontext, 10)
        yield Faulted("kill -9 and restart of one", self._killed, 3, victims=(0,))
        yield Faulted(
            "SIGSTOP of one for 3 rounds", lambda: self.net.stopped(self.net.members[1]), 3, victims=(1,)
        )
        if self.network is not None:
            split, alone, one_way = self.network.split, self.network.isolated, self.network.one_way
            yield Faulted("cut in halves for 10 rounds", split, 10, victims=tuple(range(12)))
            yield Faulted("one cut off for 10 rounds", lambda: alone(2), 10, victims=(2,))
            deaf = [6, 7, 8, 9, 10, 11]
            yield Faulted("one-way links to 6 for 10 rounds", lambda: one_way(3, deaf), 10, victims=(3,))
        for attack in ("silence", "slow", "alie"):
            yield Faulted(f"2 hostile: {attack}", lambda attack=attack: self._hostile(attack), 10)  # type: ignore[misc]

    @contextmanager
    def _killed(self) -> Iterator[None]:
        victim = self.net.members[0]
        self.net.kill(victim)
        self.net.start(victim)
        yield

    @contextmanager
    def _hostile(self, attack: str) -> Iterator[None]:
        hostile = self.net.members[10:]
        self.net.kill(*hostile)
        for member in hostile:
            self.net.start(member, arguments=["red-team", "--config", str(member.config), "--attack", attack])
        try:
            yield
        finally:
            self.net.kill(*hostile)
            self.net.start(*hostile)

    def measure(self, fault: Faulted, after: int) -> Row:
        """Spread before, then the fault, then ``after`` rounds;
        the figures are those of all honest rounds since."""
        before = self._spread(10)
        begin = self.now() + 1
        with fault.begin():
            self.net.wait(lambda: min(self._others(fault)) >= begin + fault.rounds, fault.name)
        healed = self.now()
        self.net.wait(lambda: min(self._others(fault)) >= healed + after - 5, "healing")
        later = self._spread(10)
        return (fault.name, *self._figures(fault, begin, healed + after), f"{later / before:.2f}")

    def now(self) -> int:
        return max(member.last for member in self.honest)

    def _others(self, fault: Faulted) -> list[int]:
        """The last rounds of those who are not themselves broken; of all if all are."""
        rest = [member for member in self.honest if member.number not in fault.victims] or self.honest
        return [member.last for member in rest]

    def _figures(self, fault: Faulted, begin: int, end: int) -> Row:
        terms = self.net.membership
        lines = [
            line
            for member in self.honest
            if member.number not in fault.victims or len(fault.victims) == 12
            for line in member.lines
            if begin <= line["round"] <= end
        ]
        took = [ended_at(line["time"]) - terms.epoch - (line["round"] - 1) * terms.period for line in lines]
        over = [max(0.0, seconds - terms.deadline) for seconds in took]
        aggregated = [line["outcome"] == "aggregated" for line in lines]
        return (
            len(lines),
            f"{np.mean(aggregated):.1%}",
            f"{np.mean([seconds <= terms.period for seconds in took]):.1%}",
            f"{np.percentile(over, 99):.2f} s",
            f"{max(over):.2f} s",
        )

    def _spread(self, rounds: int) -> float:
        """Mean squared distance of honest half-steps to their mean, over the next few rounds."""
        values = []
        for t in range(self.now() + 1, self.now() + 1 + rounds):
            self.net.wait(lambda t=t: min(member.last for member in self.honest) >= t, f"round {t}")  # type: ignore[misc]
            rows = [half_step(self.net, member, t) for member in self.honest]
            models = np.array([row for row in rows if row is not None])
            values.append(float(np.square(models - models.mean(axis=0)).mean()))
        return float(np.mean(values))


def ended_at(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def faults(quick: bool) -> None:
    period, deadline, after = (1.5, 0.9, 6) if quick else (2.0, 1.2, 20)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        network = None
        plan = Plan(
            period=period,
            deadline=deadline,
            hyperparameters={"lr": 0.1, "momentum": 0.5, "d": 1024},
            stretched=False,
        )
        if why := namespaces.possible():
            print(f"no partitions: {why}", file=sys.stderr)
        else:
            network = namespaces.Namespaces(12)
            opened.callback(network.remove)
            network.make()
            plan = replace(plan, urls=namespaces.url, namespace=network.namespace)
        net = opened.enter_context(ProcessNetwork(folder, plan))
        net.start()
        net.wait_aggregated(times=5)
        course = Course(net, network)
        rows = [course.measure(fault, after) for fault in course.faults()]
    heads = (
        "fault",
        "honest rounds",
        "aggregated",
        "within the period",
        "p99 past the deadline",
        "worst",
        "spread",
    )
    title = (
        f"Faults: rounds of {period:g} s, pulls end after {deadline:g} s; spread {after} rounds later / "
        "before"
    )
    table(title, heads, rows)


# --- a flood ------------------------------------------------------------------------------------------------


def flood(quick: bool) -> None:
    """What benchmarks/flood.py measures, as a row."""
    stretches, each = (1, 60) if quick else (4, 150)
    with tempfile.TemporaryDirectory() as folder:
        for name in flooding.NAMES:
            credentials(Path(folder), name)
        with flooding.running("serve", folder) as (_, port):
            quiet, flooded, sent = asyncio.run(flooding.measure(Path(folder), int(port), stretches, each))
    rows: list[Row] = []
    for q in (50, 99):
        before, after = (1e3 * float(np.percentile(seconds, q)) for seconds in (quiet, flooded))
        rise = f"{after - before:+.1f} ms", f"{after / before:.2f}"
        rows.append((f"p{q}", f"{before:.1f} ms", f"{after:.1f} ms", *rise))
    title = (
        f"1,000 pulls a second and 300 stalled handshakes ({sent:,} requests sent); promised +20 % or +50 ms"
    )
    table(title, ("pulls of the others", "quiet", "flooded", "rise", "ratio"), rows)


# --- large models -------------------------------------------------------------------------------------------


def wire(quick: bool) -> None:
    """Bytes that really travelled, TLS, signatures and all requests included."""
    d, rounds = (50_000, 3) if quick else (1_000_000, 3)
    heads = ("parameters", "models pulled", "bytes", "bytes / (models · 4d)", "promised")
    table("Bytes on the wire", heads, [carried(d, rounds)])


def carried(d: int, rounds: int) -> tuple[object, ...]:
    """The row of one size."""
    address = loopback()
    plan = Plan(
        period=12.0,
        deadline=11.0,
        stretched=False,
        hyperparameters={"lr": 0.1, "momentum": 0.5, "d": d},
        urls=lambda i: f"https://{address}.{i + 101}:{PORT}",
        listen=lambda i: f"{address}.{i + 1}:{PORT}",
    )
    proxies = Proxies(
        [Proxy((f"{address}.{i + 101}", PORT), (f"{address}.{i + 1}", PORT)) for i in range(12)]
    )
    with tempfile.TemporaryDirectory() as folder, ProcessNetwork(Path(folder), plan) as net, proxies:
        net.start()
        net.wait_aggregated(times=1)
        first, before = resolved(net, proxies)
        net.wait_round(first + rounds)
        last, after = resolved(net, proxies)
        pulled = sum(
            line["received"] for m in net.members for line in m.lines if first < line["round"] <= last
        )
    ratio = (after - before) / (pulled * 4 * d)
    return f"{d:,}", pulled, f"{after - before:,}", f"{ratio:.4f}", "≤ 1.01"


def resolved(net: ProcessNetwork, proxies: Proxies) -> tuple[int, int]:
    """A round that all have ended while the next has not begun, and the bytes carried until then."""
    while True:
        t = max(member.last for member in net.members) + 1
        net.wait_round(t)
        carried = sum(wire.carried for wire in proxies.proxies)
        position = datetime.now().timestamp() - net.membership.epoch
        if position < t * net.membership.period:
            return t, carried


def exchange(quick: bool) -> None:
    """A round's exchange of 12 processes against plain aiohttp moving the same bytes,
    and the memory of one of them."""
    d, period, rounds = (1_000_000, 12.0, 2) if quick else (10_000_000, 75.0, 3)
    address = loopback()
    plan = Plan(
        period=period,
        deadline=0.9 * period,
        start=20.0,
        stretched=False,
        hyperparameters={"lr": 0.1, "momentum": 0.5, "d": d, "noise": 0.0},
        urls=lambda i: f"https://{address}.{i + 1}:{PORT}",
    )
    imported = after_import()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ProcessNetwork(Path(folder), plan) as net:
        alone = net.members[0]  # a process of its own making, whose memory is its own
        command = [sys.executable, "-m", "rpel", "peer", "run", "--config", str(alone.config)]
        path = str(Path(__file__).parents[1] / "tests")
        cold = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            net.start(*net.members[1:], environment={"RPEL_TEST_TIMES": "1"})
            net.wait(
                lambda: all(m.last >= rounds for m in net.members[1:]), "large rounds", 600 + rounds * period
            )
            peak = status(cold.pid, "VmHWM")
            ours = min(spans(net))
            size, membership = net.layout.size, net.membership
            draws = [drawn(i, membership.nodes, membership.pull) for i in range(membership.nodes)]
        finally:
            cold.kill()
            cold.wait()
            net.kill(*net.members)
        theirs = min(plain_exchange.measure(Path(folder), address, size, draws) for _ in range(rounds))
    used, one, most = peak - imported, 4 * d, f"≤ s + 6 = {membership.pull + 6}"
    rows: list[Row] = [
        (
            "a round's exchange",
            f"{ours:.2f} s",
            f"plain aiohttp {theirs:.2f} s",
            f"{ours / theirs:.2f}",
            "≤ 2",
        ),
        (
            "memory above the import",
            f"{used / 1e6:.0f} MB",
            f"a model {one / 1e6:.0f} MB",
            f"{used / one:.1f}",
            most,
        ),
    ]
    table(f"Models of {d:,} parameters", ("measured", "rpel", "beside", "ratio", "promised"), rows)


# --- models of 100 MB over ordinary lines -------------------------------------------------------------------

MBIT = 100


def large(quick: bool) -> None:
    """Eight peers, each behind a line of 100 Mbit/s, with models of 25 million parameters,
    as float32 and as int8."""
    if why := namespaces.possible():
        print(f"large: {why}")
        return
    d, rounds = (1_000_000, 2) if quick else (25_000_000, 3)
    rows = [lined(d, rounds, wire) for wire in ("float32", "int8")]
    heads = (
        "wire",
        "period",
        "answers",
        "aggregated",
        "slowest round",
        "sent by a peer a round",
        "memory",
        "models",
    )
    table(f"Eight peers, {d:,} parameters, lines of {MBIT} Mbit/s", heads, rows)


def lined(d: int, rounds: int, wire: str) -> Row:
    """A network of eight whose members send 100 Mbit/s at most;
    its period leaves each line 2.5 times what it needs."""
    network = namespaces.Namespaces(8)
    network.make()
    asked = stall_proof(nodes=8, byzantine=1, rounds=100_000).pull
    needed = asked * 8 * (4 * d if wire == "float32" else d + d // 64) / (MBIT * 1e6)
    plan = Plan(
        peers=8,
        byzantine=1,
        period=10 + 2.5 * needed,
        deadline=5 + 2.5 * needed,
        start=30.0 + 6e-6 * d,
        stretched=False,
        hyperparameters={"lr": 0.1, "momentum": 0.5, "d": d, "noise": 0.0},
        urls=namespaces.url,
        namespace=network.namespace,
        terms={"wire": wire},
    )
    try:
        for number in range(8):
            held = f"tc qdisc add dev net root tbf rate {MBIT}mbit burst 256kb latency 50ms"
            subprocess.run(["ip", "netns", "exec", network.namespace(number), *held.split()], check=True)
        with tempfile.TemporaryDirectory() as folder, ProcessNetwork(Path(folder), plan) as net:
            net.start()
            patience = 600 + 2 * rounds * plan.period
            net.wait(lambda: min(len(m.lines) for m in net.members) > rounds, "large rounds", patience)
            # the first compiles
            lines = [line for member in net.members for line in member.lines[1 : rounds + 1]]
            peaks = [status(member.process.pid, "VmHWM") for member in net.members]
            terms = net.membership
            sent = [_sent(network.namespace(i)) / max(m.last for m in net.members) for i in range(8)]
    finally:
        network.remove()
    ended = [ended_at(line["time"]) - terms.epoch - (line["round"] - 1) * terms.period for line in lines]
    answers = sum(line["received"] for line in lines), sum(line["asked"] for line in lines)
    used = max(peaks) - after_import()
    return (
        wire, f"{terms.period:.0f} s", f"{answers[0]} of {answers[1]}",
        f"{sum(line['outcome'] == 'aggregated' for line in lines)} of {len(lines)}", f"{max(ended):.0f} s",
        f"{max(sent) / 1e6:.0f} MB", f"{used / 1e6:.0f} MB",
        f"{used / (4 * d):.1f} (≤ s + 6 = {terms.pull + 6})",
    )  # fmt: skip


def _sent(namespace: str) -> int:
    path = "/sys/class/net/net/statistics/tx_bytes"
    return int(
        subprocess.run(
            ["ip", "netns", "exec", namespace, "cat", path], capture_output=True, check=True
        ).stdout
    )


def spans(net: ProcessNetwork) -> list[float]:
    """Seconds of each round from its first publication until the last pull has ended,
    where all pulls came."""
    values = []
    for t in {line["round"] for line in net.members[1].lines}:
        times = [deed for m in net.members[1:] for deed in m.process.deeds if deed["round"] == t]
        whole = all(
            line["received"] == net.membership.pull
            for m in net.members[1:]
            for line in m.lines
            if line["round"] == t
        )
        if whole and len(times) == len(net.members) - 1:
            values.append(max(x["pulled"] for x in times) - min(x["published"] for x in times))
    return values


def drawn(me: int, nodes: int, s: int) -> list[int]:
    """s others, at random."""
    return sorted(
        int(i) for i in np.random.default_rng(me).permutation([i for i in range(nodes) if i != me])[:s]
    )


def status(pid: int | str, entry: str) -> int:
    """An entry of a process's status, in bytes."""
    match = re.search(rf"{entry}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def after_import() -> int:
    """Resident bytes of a process that has imported what `rpel peer run` imports, and done nothing."""
    script = "import rpel.cli, rpel.peer.api; print(open('/proc/self/status').read())"
    text = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    match = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert match is not None
    return 1024 * int(match[1])


MEASUREMENTS: dict[str, Callable[[bool], None]] = {
    "faults": faults, "flood": flood, "wire": wire, "exchange": exchange, "large": large,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", choices=[*MEASUREMENTS, []], help="what to measure; all if none is named"
    )
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    power = machine.measure()
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores, {power.bandwidth / 1e9:.1f} GB/s, {power.flops32 / 1e9:.0f} GFlop/s "
        f"float32, load {load:.1f} before the start, {datetime.now():%Y-%m-%d}"
    )
    for name in given.names or MEASUREMENTS:
        MEASUREMENTS[name](given.quick)
        print(f"\nload {os.getloadavg()[0]:.1f} at the end of {name}", flush=True)


if __name__ == "__main__":
    main()
