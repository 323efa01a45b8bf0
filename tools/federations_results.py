"""The runs and the tables of docs/results/federations.md, in two steps.

    python tools/federations_results.py run --data-dir DATA --out RUNS \
        [--only NAME …] [--seeds 0 1 2] [--threads N]
    python tools/federations_results.py [RUNS …]

The first trains each real federation (a preset with partition = "owner") by rpel, by averaging, and every
node alone; without attack and under two attacks; one seed after the other. Finished runs are kept in RUNS, so
that the command goes on where it stopped. The second keeps the small files of finished runs in
docs/results/federations/runs.tar.xz, for others to check, and writes the page's tables from what is kept and
from nothing else, so that without arguments the page stays as it is.
A table stands between <!-- NAME --> and <!-- end -->.
"""

import io
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kept_runs import Archive, KeptRun, two_steps
from rpel import simulate
from rpel.spec import Spec, load

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "results" / "federations"
MARK = re.compile(r"(<!-- ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
ALONE, AVERAGING = "alone", "plain averaging"
WAYS: dict[str, dict[str, Any]] = {
    "rpel": {},
    AVERAGING: {"rule": "mean"},
    ALONE: {"rule": "federations_results:keep"},
}
ATTACKS: dict[str, dict[str, Any]] = {
    "no attack": {"attack": "none"},
    "alie": {"attack": "alie"},
    "strongest(of=alie)": {"attack": "strongest", "attack_params": {"of": "alie"}},
    "foe": {"attack": "foe"},
}
COLUMNS = {
    "all, mean": "accuracy_mean",
    "all, worst": "accuracy_worst",
    "own, mean": "metric.own_accuracy_mean",
    "own, worst": "metric.own_accuracy_worst",
    "loss": "loss",
}


@dataclass(frozen=True)
class Federation:
    """A preset, what is changed of it, the attacks it is put under,
    and whether its loss is one of characters."""

    preset: str
    changes: dict[str, Any] = field(default_factory=dict)
    attacks: tuple[str, ...] = ("no attack", "strongest(of=alie)", "foe")
    perplexity: bool = False

    @property
    def model(self) -> str:
        return str(self.changes.get("model", load(self.preset).model))

    def cells(self) -> list[tuple[str, str]]:
        """(way, attack): whoever trains alone hears no attacker, so that once is enough."""
        return [(way, attack) for way in WAYS for attack in self.attacks if way != ALONE] + [
            (ALONE, "no attack")
        ]

    def fields(self, way: str, attack: str) -> dict[str, Any]:
        """The keywords of the run."""
        spec = load(self.preset)
        known = {key: value for key in Spec.model_fields if (value := getattr(spec, key)) is not None}
        del known["out"]
        return {**known, **self.changes, **ATTACKS[attack], **WAYS[way], "name": self.preset}

    def holds(self, run: KeptRun) -> bool:
        return (run.spec["name"], run.spec["model"]) == (self.preset, self.model)


FEDERATIONS = {
    "heart": Federation("heart-4"),
    "heart-net": Federation("heart-4", {"model": "L(16)-R-L(2)-S"}),
    "reviews": Federation("reviews-16"),
    "femnist": Federation("femnist-writers"),
    "femnist-paper": Federation(
        "femnist-writers", {"model": "femnist", "nodes": 30, "byzantine": 3, "pull": 9, "b_hat": 3}, ("alie",)
    ),
    "shakespeare": Federation("shakespeare", perplexity=True),
}
"""By the name of its table."""


def keep(x: Any, f: int = 0) -> Any:
    """A rule that keeps the node's own model, row 0: training alone."""
    return x[0]


# --- the runs -----------------------------------------------------------------------------------------------


def train(names: Iterable[str], seeds: Sequence[int], given: dict[str, Any]) -> None:
    """Every run that is not finished yet, one seed after the other."""
    sys.path.insert(0, str(Path(__file__).parent))  # for the rule `keep`, by its name
    for seed in seeds:
        for name in names:
            for cell in FEDERATIONS[name].cells():
                print(f"{name}: {', '.join(cell)}, seed {seed}", file=sys.stderr, flush=True)
                simulate(**{**FEDERATIONS[name].fields(*cell), **given, "seed": seed, "reuse": True})


# --- the tables ---------------------------------------------------------------------------------------------


def cell(run: KeptRun) -> tuple[str, str]:
    """(way, attack) of a run."""
    rule, attack = (
        run.spec["rule"],
        {key: run.spec[key] for key in ("attack", "attack_params") if run.spec[key]},
    )
    way = AVERAGING if rule == "mean" else ALONE if rule.endswith(":keep") else "rpel"
    return way, next(label for label, known in ATTACKS.items() if known == attack)


def shown(values: Sequence[float | None]) -> str:
    """Mean and half of the range over the seeds.

    >>> shown([0.5, 0.7]), shown([None, 0.5]), shown([0.25]), shown([2.0])
    ('.600\\xa0±\\xa0.100', 'overflowed', '.250', '2.000')
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values):
        return "overflowed"
    numbers = [statistics.fmean(known)] + ([(max(known) - min(known)) / 2] if len(known) > 1 else [])
    return "\u00a0±\u00a0".join(f"{number:.3f}".removeprefix("0") for number in numbers)


def better_alone(archive: Archive, runs: dict[int, KeptRun], alone: dict[int, KeptRun]) -> str:
    """How many honest nodes have a higher own accuracy if they train alone,
    over the seeds of which both are there."""
    both = [[own_accuracy(archive, ways[seed]) for ways in (runs, alone)] for seed in runs if seed in alone]
    if not both:
        return "–"
    # a model that overflowed has no accuracy, and whoever holds it would be better off alone
    better = sum(int((~(shared >= single)).sum()) for shared, single in both)
    return f"{better} of {sum(len(one) for one, _ in both)}"


def own_accuracy(archive: Archive, run: KeptRun) -> NDArray[np.float64]:
    """Of each honest node at the end."""
    with np.load(io.BytesIO(archive.files[f"{run.name}/nodes.npz"])) as nodes:
        accuracy: NDArray[np.float64] = nodes["metric.own_accuracy"][-1]
        return accuracy


def table(federation: Federation, archive: Archive) -> list[str]:
    """A line for each (way, attack) of which there is a run."""
    by_method: dict[tuple[str, str], dict[int, KeptRun]] = {}
    for run in archive.runs():
        if federation.holds(run):
            by_method.setdefault(cell(run), {})[run.spec["seed"]] = run
    more = ["perplexity"] if federation.perplexity else []
    head = ["way", "attack", "seeds", *COLUMNS, *more, "better alone"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for way, attack in federation.cells():
        runs = by_method.get((way, attack), {})
        if not runs:
            continue
        rows = [run.rows[-1] for run in runs.values()]
        values = [str(len(rows)), *(shown([row.get(key) for row in rows]) for key in COLUMNS.values())]
        if federation.perplexity:
            values.append(
                shown([None if row["loss"] is None else math.exp(min(row["loss"], 700)) for row in rows])
            )
        values.append(
            "–" if way == ALONE else better_alone(archive, runs, by_method.get((ALONE, "no attack"), {}))
        )
        lines.append("| " + " | ".join([way, attack if way != ALONE else "–", *values]) + " |")
    return lines if by_method else ["(Not run yet.)"]


def write(folders: Sequence[Path]) -> None:
    """Keep the runs below these folders, and put the tables into the page."""
    archive = Archive(KEPT / "runs.tar.xz")
    for folder in folders:
        archive.take(folder, also=("nodes.npz",))
    archive.write()
    page = DOCS / "results" / "federations.md"
    tables = {name: "\n".join(table(federation, archive)) for name, federation in FEDERATIONS.items()}
    text = MARK.sub(lambda m: f"{m[1]}{tables[m[2]]}\n{m[3]}", page.read_text("utf-8"))
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    two_steps(__doc__ or "", FEDERATIONS, train, write)
