"""Memory and asynchrony: python tools/time_results.py memory --data-dir DATA --out RUNS [--small] [--page FILE].

The first word says which page: memory or asynchrony.

Each run leaves one file in RUNS, so that the command goes on where it stopped, and several machines may share a folder.
--small: the table that answers first: one seed, three attacks, 60 rounds, the smaller network of nodes. --n100: the
larger one alone. --tiny: the same questions with a linear model on the embedded sample, in minutes. --page writes the
tables between <!-- tables --> and <!-- end of tables -->.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rpel import simulate

Fields = dict[str, Any]
TRAINING: Fields = {
    "dataset": "mnist", "model": "mnist", "lr": 0.5, "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 25,
    "alpha": 1.0, "eval_every": 20, "eval_size": 250,
}  # fmt: skip
N30: Fields = TRAINING | {"nodes": 30, "byzantine": 6, "b_hat": 6, "rounds": 100}
N100: Fields = TRAINING | {"nodes": 100, "byzantine": 10, "b_hat": 8, "rounds": 60}
FIXED = (
    "sign_flipping", "foe", "inner_product_manipulation", "alie", "dissensus", "mimic", "gaussian", "min_max",
    "min_sum", "fang",
)  # fmt: skip
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
Row = tuple[str, list[list[Fields]]]
"""What a row is about, and for each column the runs whose mean it is, one a seed."""


TINY: Fields = {"dataset": "mnist-sample", "model": "linear", "lr": 0.1, "batch_size": 10, "rounds": 60}


def attacks(names: Iterable[str]) -> dict[str, Fields]:
    """Fields by what a table calls the attack: a name, or strongest(of)."""
    found: dict[str, Fields] = {name: {"attack": name} for name in names}
    for name in found:
        if name.startswith("strongest("):
            found[name] = {"attack": "strongest", "attack_params": {"of": name[len("strongest(") : -1]}}
    return found


def memory(small: bool, n100: bool) -> Iterator[tuple[str, list[str], list[Row]]]:
    """(title, columns, rows) of the tables of docs/results/memory.md."""
    if not n100:
        names = ("alie", "foe", "sign_flipping") if small else (*FIXED, "strongest(alie)", "strongest(min_max)")
        choices = {"c = 1, s = 14": (1, 14), "c = 2, s = 7": (2, 7), "c = 3, s = 5": (3, 5)}
        base = N30 | ({"rounds": 60} if small else {})
        yield _memory("n = 30, b = 6, b_hat = 6", base, names, choices, (0,) if small else (0, 1, 2))
    if n100 or not small:
        choices = {"c = 1, s = 16": (1, 16), "c = 2, s = 8": (2, 8), "c = 3, s = 6": (3, 6)}
        yield _memory("n = 100, b = 10, b_hat = 8", N100, ("alie", "foe", "strongest(alie)"), choices, (0,))


def _memory(
    title: str, base: Fields, names: Iterable[str], choices: dict[str, tuple[int, int]], seeds: Iterable[int]
) -> tuple[str, list[str], list[Row]]:
    rows = []
    for name, attack in attacks(names).items():
        cells = [[base | attack | {"memory": c, "pull": s, "seed": q} for q in seeds] for c, s in choices.values()]
        rows.append((name, cells))
    return f"{title}, {base['rounds']} rounds", list(choices), rows


def asynchrony(small: bool, n100: bool) -> Iterator[tuple[str, list[str], list[Row]]]:
    """(title, columns, rows) of the tables of docs/results/asynchrony.md."""
    speeds = "lognormal:0.3+stragglers:0.1,10"
    sizes = N30 | {"pull": 15, "rounds": 60 if small else 100}
    if n100 or not small:
        sizes = N100 | {"pull": 16, "rounds": 100}
    ways: dict[str, Fields] = {
        "synchronous": {"speeds": speeds},
        "asynchronous": {"asynchronous": True, "speeds": speeds},
        "max_age 3": {"asynchronous": True, "speeds": speeds, "max_age": 3.0},
    }
    names = ["none", "alie", "foe", "oldest"] if small else ["none", "alie", "foe", "oldest", "strongest(alie)"]
    seeds = (0,) if small else (0, 1, 2)
    rows = [
        (name, [[sizes | attack | way | {"seed": q} for q in seeds] for way in ways.values()])
        for name, attack in attacks(names).items()
    ]
    yield f"n = {sizes['nodes']}, speeds {speeds}, {sizes['rounds']} units of virtual time", list(ways), rows


def tiny(title: str, columns: list[str], rows: list[Row]) -> tuple[str, list[str], list[Row]]:
    """The same table with a linear model on the embedded sample, seed 0 alone."""
    small = [(name, [[fields | TINY for fields in cell[:1]] for cell in cells]) for name, cells in rows]
    return f"linear model, sample of MNIST, 60 rounds, seed 0: {title.rpartition(',')[0]}", columns, small


def ended(fields: Fields, data: str | None, kept: Path) -> Fields | None:
    """The last row of a run and what its certificate says, from the file if there is one; without data none is made."""
    name = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
    file = kept / f"{name}.json"
    if not file.is_file() and data is None:
        return None
    if not file.is_file():
        run = simulate(data_dir=data, threads=1, **fields)
        last = {key: value for key, value in run.history.rows()[-1].items() if not isinstance(value, list)}
        evaluated = [row for row in run.history.rows() if row["alpha_realised"] is not None]
        found = {
            "fields": fields, "last": last, "held": run.certificate["held"],
            "aggregations": run.certificate["aggregations"],
            "bytes": float(np.sum(run.history["bytes"])), "time": float(last.get("time") or fields["rounds"] * 1.2),
            "alpha": float(np.mean([row["alpha_realised"] for row in evaluated])),
            "lambda": float(np.mean([row["lambda_realised"] for row in evaluated])),
        }  # fmt: skip
        file.write_text(json.dumps(found, indent=1))
        print(f"{file.name}: {fields['attack']} {last['accuracy_mean']:.4f} {last['accuracy_worst']:.4f}", flush=True)
    return dict(json.loads(file.read_text()))


def cell(runs: list[Fields]) -> str:
    if not runs:
        return "not run"
    mean = np.mean([run["last"]["accuracy_mean"] for run in runs])
    worst = np.min([run["last"]["accuracy_worst"] for run in runs])
    return f"{mean:.3f}, {worst:.3f}" + ("" if all(run["held"] for run in runs) else " (b_hat was exceeded)")


def table(title: str, columns: list[str], rows: list[Row], data: str | None, kept: Path) -> str:
    """A table in Markdown: mean accuracy and that of the worst node, and below it bytes and realised constants."""
    lines = [f"### {title}", "", f"| attack | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    known: dict[str, list[Fields]] = {name: [] for name in columns}
    for name, cells in rows:
        found = [[one for fields in runs if (one := ended(fields, data, kept)) is not None] for runs in cells]
        if not any(found):
            continue
        for column, runs in zip(columns, found, strict=True):
            known[column] += runs
        lines.append(f"| {name} | {' | '.join(map(cell, found))} |")
    if not any(known.values()):
        return ""
    for key, form in (
        ("time", "{:,.0f}"),
        ("bytes", "{:.3g}"),
        ("aggregations", "{:,.0f}"),
        ("alpha", "{:.3f}"),
        ("lambda", "{:.4f}"),
    ):
        each = [[run[key] for run in known[column] if key in run] for column in columns]
        values = [form.format(np.mean(numbers)) if numbers else "" for numbers in each]
        lines.append(f"| {key} | {' | '.join(values)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page_of", choices=("memory", "asynchrony"))
    parser.add_argument("--data-dir", help="without it nothing is run: the tables of what is there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--n100", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--page", type=Path)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    made = {"memory": memory, "asynchrony": asynchrony}[given.page_of](given.small, given.n100)
    tables = [tiny(*one) if given.tiny else one for one in made]
    text = "\n\n".join(filter(None, (table(*one, given.data_dir, given.out) for one in tables)))
    print(text)
    if given.page is not None:
        page = given.page.read_text()
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        given.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
