"""What an adversary loses when each hostile node must send all its victims the same vector, attack by attack.

Run `python benchmarks/consistent.py RUNS --data-dir DATA [--out docs/results]`. MNIST in 8 × 8 pixels, n =
30, b = 6, s = 15, T = 60, the paper's rule; every attack with and without `consistent`, on the same seeds
(same data, draws and first model). Finished runs in RUNS are not repeated and a stopped one is resumed, so
the command can be interrupted. It writes consistent.csv, and from that file it draws consistent.svg and
prints the table of the page. Without RUNS it trains nothing and draws what the file holds.
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rpel
from rpel.studies import plots

ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "sign_flipping": ("sign_flipping", {}),
    "foe": ("foe", {}),
    "alie": ("alie", {}),
    "dissensus": ("dissensus", {}),
    "mimic": ("mimic", {}),
    "min_max": ("min_max", {}),
    "min_sum": ("min_sum", {}),
    "fang": ("fang", {}),
    "spectral": ("spectral", {}),
    "strongest of alie": ("strongest", {"of": "alie"}),
    "strongest of dissensus": ("strongest", {"of": "dissensus"}),
    "strongest of spectral": ("strongest", {"of": "spectral"}),
}
"""The attacks whose vector depends on the victim; the others send everybody the same already."""

NUMBERS = ("accuracy_mean", "accuracy_worst", "consensus")
SETTING: dict[str, Any] = {
    "dataset": "mnist-8x8",
    "nodes": 30,
    "byzantine": 6,
    "pull": 15,
    "rounds": 60,
    "alpha": 0.1,
    "lr": 0.5,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "batch_size": 25,
    "eval_every": 60,
}


@dataclass(frozen=True)
class Cell:
    """One attack, free or consistent: the last row's numbers (seeds, 3)."""

    attack: str
    consistent: bool
    values: NDArray[np.float64]


def run(label: str, consistent: bool, seeds: Sequence[int], runs: Path, data: Path, model: str) -> Cell:
    name, parameters = ATTACKS.get(label, (label, {}))
    values = []
    for seed in seeds:
        result = rpel.simulate(
            model,
            attack=name,
            attack_params=parameters,
            consistent=consistent,
            seed=seed,
            data_dir=str(data),
            out=str(runs),
            **SETTING,
        )
        last = {key: result.history[key].iloc[-1] for key in NUMBERS}
        values.append([float(last[key]) for key in NUMBERS])
    print(
        f"{label}{', consistent' if consistent else ''}: {np.mean(values, axis=0).round(4).tolist()}",
        flush=True,
    )
    return Cell(label, consistent, np.array(values))


def write(cells: list[Cell], seeds: Sequence[int], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["attack", "consistent", "seed", *NUMBERS])
        for cell in cells:
            for seed, row in zip(seeds, cell.values, strict=True):
                table.writerow([cell.attack, int(cell.consistent), seed, *(f"{value:.6g}" for value in row)])


def read(path: Path) -> dict[tuple[str, bool], Cell]:
    """What :func:`write` wrote, by attack and whether it was consistent."""
    values: dict[tuple[str, bool], list[list[float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["attack"], row["consistent"] == "1"
            values.setdefault(key, []).append([float(row[number]) for number in NUMBERS])
    return {key: Cell(*key, np.array(rows)) for key, rows in values.items()}


def table(pairs: dict[str, tuple[Cell, Cell]], calm: Cell) -> None:
    """Means over the seeds; the loss is what the adversary gives up,
    with the range of the paired differences."""
    print("\n| attack | mean accuracy | consistent | worst node | consistent | disagreement | consistent |")
    print("|---|---|---|---|---|---|---|")
    mean, worst, apart = calm.values.mean(axis=0)
    print(f"| none | {mean:.4f} | | {worst:.4f} | | {apart:.3g} | |")
    for label, (free, bound) in pairs.items():
        cells = []
        for column, text in enumerate(("{:.4f}", "{:.4f}", "{:.3g}")):
            cells += [text.format(part.values[:, column].mean()) for part in (free, bound)]
        print(f"| {label} | " + " | ".join(cells) + " |")


def draw(pairs: dict[str, tuple[Cell, Cell]], calm: Cell, path: Path) -> None:
    """Two panels: what the worst node loses against no attack, and how far the honest models end apart."""
    figure, ((lost, apart),) = plots.canvas(9.0, 0.38 * len(pairs) + 1.6, 1, 2, sharey=True)
    places = np.arange(len(pairs))[::-1]
    kinds = (("each victim its own vector", plots.COLOURS[1]), ("one vector for all", plots.COLOURS[0]))
    for k, (name, colour) in enumerate(kinds):
        for position, pair in zip(places + (0.17 if k == 0 else -0.17), pairs.values(), strict=True):
            points = 100 * (calm.values[:, 1] - pair[k].values[:, 1])
            ratios = pair[k].values[:, 2] / calm.values[:, 2]
            for axes, values in ((lost, points), (apart, ratios)):
                axes.plot(
                    [values.min(), values.max()], [position, position], color=colour, linewidth=1.5, alpha=0.6
                )
                axes.plot([values.mean()], [position], "o", color=colour, markersize=6, label=name)
                name = "_"  # one entry of the legend
    lost.set_yticks(places, list(pairs))
    lost.set_xlabel("accuracy that the worst node loses (points)")
    apart.set_xlabel("disagreement against no attack")
    apart.set_xscale("log")
    apart.set_xticks([0.5, 1, 2, 5, 10], ["0.5×", "1×", "2×", "5×", "10×"])
    apart.minorticks_off()
    apart.axvline(1.0, color=plots.INK, linewidth=0.8)
    lost.set_xlim(left=0.0)
    figure.legend(*lost.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="linear")
    given = parser.parse_args()
    path = given.out / "consistent.csv"
    if given.runs is not None:
        seeds, kinds = (
            range(given.seeds),
            [("none", False), *((name, k) for name in ATTACKS for k in (False, True))],
        )
        write([run(*kind, seeds, given.runs, given.data_dir, given.model) for kind in kinds], seeds, path)
    cells = read(path)
    pairs = {name: (cells[name, False], cells[name, True]) for name in ATTACKS}
    draw(pairs, cells["none", False], given.out / "consistent.svg")
    table(pairs, cells["none", False])


if __name__ == "__main__":
    main()
