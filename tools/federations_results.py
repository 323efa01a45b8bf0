"""Make the tables of docs/results/federations.md: python tools/federations_results.py --data-dir DATA --out RUNS.

Each real federation (a preset with partition = "owner") is trained by rpel, by averaging, and by every node alone;
without attack and under two attacks; with several seeds. Runs are kept in RUNS, so that the command goes on where it
stopped. Prints the tables; --page FILE writes them between its lines <!-- tables --> and <!-- end of tables -->.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rpel import simulate
from rpel.config.spec import Spec, load, presets

FEDERATIONS = ("heart-4", "reviews-16", "femnist-writers", "shakespeare")
ATTACKS: dict[str, dict[str, Any]] = {
    "no attack": {"attack": "none"},
    "strongest(of=alie)": {"attack": "strongest", "attack_params": {"of": "alie"}},
    "foe": {"attack": "foe"},
}
ALONE = "alone"
WAYS: dict[str, dict[str, Any]] = {
    "rpel": {},
    "plain averaging": {"rule": "mean"},
    ALONE: {"rule": "federations_results:keep"},
}
COLUMNS = {
    "all, mean": "accuracy_mean",
    "all, worst": "accuracy_worst",
    "own, mean": "metric.own_accuracy_mean",
    "own, worst": "metric.own_accuracy_worst",
    "loss": "loss",
}
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def keep(x: Any, f: int = 0) -> Any:
    """A rule that keeps the node's own model, row 0: training alone."""
    return x[0]


def cells() -> Iterator[tuple[str, str]]:
    """(way, attack): whoever trains alone hears no attacker, so that once is enough."""
    for way in WAYS:
        for attack in ATTACKS:
            if way != ALONE or attack == "no attack":
                yield way, attack


def ends(preset: str, way: str, attack: str, seeds: Sequence[int], given: dict[str, Any]) -> list[dict[str, Any]]:
    """The last row of each seed."""
    spec = load(preset)
    fields = {key: value for key in Spec.model_fields if (value := getattr(spec, key)) is not None and key != "out"}
    fields |= {**ATTACKS[attack], **WAYS[way], **given, "name": preset}
    found = []
    for seed in seeds:
        print(f"{preset}: {way}, {attack}, seed {seed}", file=sys.stderr, flush=True)
        found.append(simulate(**{**fields, "seed": seed}).final)
    return found


def shown(values: Sequence[float | None]) -> str:
    """Mean and half of the range over the seeds.

    >>> shown([0.5, 0.7]), shown([None, 0.5]), shown([0.25])
    ('.600 ± .100', 'overflowed', '.250')
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values):
        return "overflowed"
    around = (max(known) - min(known)) / 2
    text = f"{statistics.fmean(known):.3f}" + (f" ± {around:.3f}" if len(known) > 1 else "")
    return text.replace("0.", ".") if statistics.fmean(known) < 1 else text


def table(results: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """A line for each (way, attack)."""
    head = ["way", "attack", *COLUMNS, "perplexity"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (way, attack), rows in results.items():
        values = [shown([row.get(key) for row in rows]) for key in COLUMNS.values()]
        values.append(shown([None if (loss := row["loss"]) is None else math.exp(min(loss, 700)) for row in rows]))
        lines.append("| " + " | ".join([way, attack, *values]) + " |")
    return "\n".join(lines)


def main() -> None:
    known = [name for name in FEDERATIONS if name in presets()]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="fewer rounds than the preset's, for a first look")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # for the rule `keep`, by its name
    fields: dict[str, Any] = {"data_dir": given.data_dir, "out": given.out, "reuse": True}
    fields |= {key: getattr(given, key) for key in ("rounds", "threads") if getattr(given, key)}
    parts = []
    for preset in given.only:
        results = {cell: ends(preset, *cell, range(given.seeds), fields) for cell in cells()}
        parts.append(f"## {preset}\n\n{table(results)}\n")
        print(parts[-1], flush=True)
    if given.page:
        before, rest = given.page.read_text("utf-8").split(BEGIN)
        given.page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
