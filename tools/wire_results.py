"""Accuracy against bytes: python tools/wire_results.py --data-dir DATA --out RUNS [--screen | --n100] [--page FILE].

Runs of the MNIST network in every code of rpel, and in four bits, which rpel does not offer: rounded to nearest,
rounded at random, with the sender's error fed back, and modulo theta, decoded beside the receiver's own model (Lu and
De Sa, "Moniqua", ICML 2020). Runs are kept in RUNS, so that the command goes on where it stopped. --screen: one seed
and three attacks, which is enough to see what fails. --page writes the tables between <!-- tables --> and <!-- end of
tables -->.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rpel import simulate
from rpel.algorithm import Problem
from rpel.types import Arrays, Floats, Integers, Models, Received
from rpel.wire import BLOCK

N30 = {"dataset": "mnist", "model": "mnist", "nodes": 30, "byzantine": 6, "pull": 15, "rounds": 100, "alpha": 1.0}
N100 = {**N30, "nodes": 100, "byzantine": 10, "pull": 16}
TRAINING = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 25, "eval_every": 50, "eval_size": 250}
FIXED = (
    "sign_flipping", "foe", "inner_product_manipulation", "alie", "dissensus", "mimic", "gaussian", "min_max",
    "min_sum", "fang",
)  # fmt: skip
SEARCHED = ("alie", "min_max")
CODES = ("float32", "bfloat16", "int8")
THETAS = (0.02, 0.05, 0.2)
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


# --- four bits -------------------------------------------------------------------------------------------------------


def nibbles(x: Models, dither: Floats | float = 0.5) -> Models:
    """Blocks of 256 in codes −7 … 7 with a scale each: floor(x / scale + dither).

    >>> nibbles(np.array([[7.0, 3.2, -0.4]]))
    array([[ 7.,  3.,  0.]])
    """
    n, d = x.shape
    padded = np.zeros((n, -(-d // BLOCK) * BLOCK), x.dtype)
    padded[:, :d] = x
    blocks = padded.reshape(n, -1, BLOCK)
    with np.errstate(all="ignore"):
        scale = np.abs(blocks).max(axis=2, keepdims=True) / 7
        codes = np.floor(blocks / np.where(scale == 0, 1, scale) + np.reshape(dither, np.shape(dither) or (1, 1, 1)))
        return np.asarray((np.clip(codes, -7, 7) * scale + 0.0).reshape(n, -1)[:, :d], x.dtype)


@dataclass
class Nibbles:
    """Four bits a number, in place of the code of a run: `through` as of :class:`rpel.wire.Wire`.

    The first call of a round codes the honest half-steps, which may be dithered or have their error fed back; later
    calls code what hostile nodes say, to the nearest.
    """

    honest: int
    dithered: bool = False
    feedback: bool = False
    name: str = "int4"
    error: Models | None = None
    coins: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def through(self, x: Models, out: Models) -> None:
        if len(x) != self.honest or x is out:
            out[:] = nibbles(x)
            return
        said = x if self.error is None else x + self.error
        dither = 0.5
        if self.dithered:
            shape = len(x), -(-x.shape[1] // BLOCK), BLOCK
            dither = self.coins.random(shape, np.float32)  # type: ignore[assignment]
        out[:] = nibbles(said, dither)
        if self.feedback:
            self.error = np.where(np.isfinite(said - out), said - out, 0)


@dataclass
class Modulo:
    """Four bits of x mod theta, decoded next to the receiver's own model; counts how often an honest value wraps."""

    network: Any
    theta: float
    wrapped: int = 0
    total: int = 0

    def init(self) -> Arrays:
        return dict(self.network.init())

    def nodes(self, t: int) -> Integers:
        return np.asarray(self.network.nodes(t))

    def __call__(self, half: Models, state: Arrays, nodes: Integers, t: int, before: Models) -> tuple[Received, Arrays]:
        received, state = self.network(half, state, nodes, t, before)
        step, (h, m) = self.theta / 16, received.index.shape
        table = np.empty((h * m, half.shape[1]), half.dtype)
        index = np.where(received.index >= 0, np.arange(h * m).reshape(h, m), -1)
        for i, rows in enumerate(received.index):
            own = received.table[rows[0]]
            table[i * m] = own
            for k, row in enumerate(rows[1:], 1):
                if row >= 0:
                    said = received.table[row]
                    code = np.floor(said / step + 0.5) * step
                    off = (code - own + self.theta / 2) % self.theta - self.theta / 2
                    table[i * m + k] = own + off
                    if row < self.network.models:
                        self.wrapped += int((np.abs(said - own) > self.theta / 2).sum())
                        self.total += said.size
        return replace(received, table=table, index=index), state


def four_bits(name: str, honest: int) -> Callable[[Problem], Problem]:
    """The problem of a run of wire = "int8" with another code in its place."""

    def change(problem: Problem) -> Problem:
        coded: Any = problem.deliver
        if name.startswith("mod"):
            plain = replace(coded.network, table=coded.half.base, wire=replace(coded.network.wire, name="float32"))
            return replace(problem, deliver=Modulo(plain, float(name.split()[1])))
        code = Nibbles(honest, dithered="random" in name, feedback="feedback" in name)
        return replace(problem, deliver=replace(coded, network=replace(coded.network, wire=code)))

    return change


def bytes_of(name: str, d: int) -> float:
    """Bytes of a message of d numbers."""
    known = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / BLOCK}
    return d * known.get(name, 0.5 if name.startswith("mod") else 0.5 + 4 / BLOCK)


# --- runs ------------------------------------------------------------------------------------------------------------


def attacks() -> dict[str, dict[str, Any]]:
    fixed: dict[str, dict[str, Any]] = {name: {"attack": name} for name in FIXED}
    return fixed | {f"strongest({of})": {"attack": "strongest", "attack_params": {"of": of}} for of in SEARCHED}


def end(code: str, fields: dict[str, Any], kept: Path) -> dict[str, Any]:
    """The last row of a run, from its file if there is one."""
    name = "-".join([code, str(fields["nodes"]), fields["attack"], *fields.get("attack_params", {}).values()])
    path = kept / f"{name}-{fields['seed']}-{fields['rounds']}.json".replace(" ", "_")
    if path.is_file():
        return dict(json.loads(path.read_text("utf-8")))
    print(f"{code}: {fields['attack']} {fields.get('attack_params', '')} n={fields['nodes']}, seed {fields['seed']}",
          file=sys.stderr, flush=True)  # fmt: skip
    changed: list[Problem] = []

    def change(problem: Problem) -> Problem:
        changed.append(four_bits(code, fields["nodes"] - fields["byzantine"])(problem))
        return changed[-1]

    own: dict[str, Any] = {"wire": code} if code in CODES else {"wire": "int8", "problem": change}
    result = simulate(**fields, **own)
    row = {key: result.final[key] for key in ("accuracy_mean", "accuracy_worst", "loss", "byzantine_max")}
    row |= {"bytes": bytes_of(code, result.models.shape[1])}
    if changed and isinstance(changed[0].deliver, Modulo):
        row["wrapped"] = changed[0].deliver.wrapped / max(1, changed[0].deliver.total)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row), "utf-8")
    return row


def table(codes: Sequence[str], against: Sequence[str], seeds: int, fields: dict[str, Any], kept: Path) -> str:
    """A line for each code: mean and worst node under each attack (over the seeds), and the lowest worst node."""
    lines = ["| code | bytes | " + " | ".join(against) + " | lowest |", "|---" * (len(against) + 3) + "|"]
    for code in codes:
        found = {
            name: [end(code, {**fields, **attacks()[name], "seed": s}, kept) for s in range(seeds)] for name in against
        }
        ends = {name: [mean([r[key] for r in rows]) for key in ("accuracy_mean", "accuracy_worst")]
                for name, rows in found.items()}  # fmt: skip
        size = next(iter(found.values()))[0]["bytes"]
        wrapped = [r["wrapped"] for rows in found.values() for r in rows if "wrapped" in r]
        label = code + (f" (wrapped {max(wrapped):.1e})" if wrapped else "")
        cells = [f"{a:.3f}, {b:.3f}" for a, b in ends.values()]
        lowest = min(b for _, b in ends.values())
        lines.append(f"| {label} | {size:,.0f} | " + " | ".join(cells) + f" | {lowest:.3f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def mean(values: Sequence[float | None]) -> float:
    return float(np.mean([0.0 if value is None else value for value in values]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--screen", action="store_true")
    parser.add_argument("--n100", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--codes", nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    four = ["int4", "int4 random", "int4 feedback", *(f"mod {theta}" for theta in THETAS)]
    fields: dict[str, Any] = {**(N100 if given.n100 else N30), **TRAINING, "data_dir": given.data_dir}
    fields |= {key: getattr(given, key) for key in ("rounds", "threads") if getattr(given, key)}
    few = ("alie", "foe", "strongest(alie)")
    if given.screen or given.n100:
        text = table(given.codes or ([*CODES, *four] if given.screen else CODES), few, 1, fields, given.out)
    else:
        text = table(given.codes or CODES, list(attacks()), given.seeds, fields, given.out)
    print(text)
    if given.page:
        before, rest = given.page.read_text("utf-8").split(BEGIN)
        given.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
