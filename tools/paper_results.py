"""The numbers of docs/results/paper.md and baselines.md:
python tools/paper_results.py [FOLDER…].

A FOLDER is one that rpel reproduce wrote, or one with run folders of a preset. Takes CSVs, pictures and what
the runs' certificates say into docs/results/paper/, and the runs' small files into the archive runs.tar.xz
there; then writes the pages' tables anew from there and nowhere else, so that without a FOLDER the pages stay
as they are. A table stands between <!-- KIND NAME… --> and <!-- end -->; a panel that was not run has a row
that says so.
"""

import json
import math
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from kept_runs import Archive, KeptRun
from rpel import plots
from rpel.attacks import ALIASES
from rpel.experiments.drawings import read_rows
from rpel.experiments.panels import ATTACKS, PANELS, SHARES, everything, find
from rpel.files import atomic
from rpel.text import count
from rpel.theory import reduction

PAGE = Path(__file__).parents[1] / "docs" / "results" / "paper.md"
PAGES = (PAGE, *(PAGE.with_stem(name) for name in ("baselines",)))
MARK = re.compile(r"(<!-- (\w+)((?: [\w.-]+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN_PULLS = (10, 20, 30, 40, 50)
Row = dict[str, Any]


# --- taking in ----------------------------------------------------------------------------------------------


def take(folder: Path, target: Path) -> None:
    """Copy CSVs and pictures of a reproduction, and add its panels to the kept's index."""
    target.mkdir(parents=True, exist_ok=True)
    index = {entry["name"]: entry for entry in entries(target)}
    for entry in entries(folder):
        shutil.copyfile(folder / f"{entry['name']}.csv", target / f"{entry['name']}.csv")
        proofs = [json.loads((folder / run / "certificate.json").read_text("utf-8")) for run in entry["runs"]]
        names = (Path(run).name for run in entry["runs"])
        index[entry["name"]] = {key: entry[key] for key in ("name", "figure", "title", "scale", "note")} | {
            "runs": {name: proved(proof) for name, proof in zip(names, proofs, strict=True)}
        }
    alone = {panel.name for panel in everything() if [p.number for p in PANELS].count(panel.number) < 2}
    for picture in folder.glob("*.svg"):
        if picture.stem in alone or picture.stem.startswith("figure-"):
            shutil.copyfile(picture, target / picture.name)
    order = [panel.name for panel in everything()]
    ordered = sorted(index.values(), key=lambda entry: order.index(entry["name"]))
    with atomic(target / "index.json") as file:
        file.write((json.dumps(ordered, indent=1, ensure_ascii=False) + "\n").encode())


def proved(proof: Row) -> Row:
    """What a table says of a certificate."""
    return {
        "b_hat": proof["plan"]["b_hat"],
        "max_observed": proof["max_observed"],
        "held": proof["held"],
        "code": proof["versions"]["code"],
    }


def entries(folder: Path) -> list[Row]:
    path = folder / "index.json"
    rows: list[Row] = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return rows


# --- tables -------------------------------------------------------------------------------------------------


class Panels:
    """The panels that are there: their entries, and the last round of every curve and seed;
    and runs of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.archive = Archive(folder / "runs.tar.xz")
        self.entries = {entry["name"]: entry for entry in entries(folder)}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def rows(self, name: str) -> list[Row]:
        return read_rows(self.folder / f"{name}.csv")

    def last(self, name: str) -> dict[tuple[str, Any], list[Row]]:
        """By curve and place on the axis, the last row of each seed."""
        ends: dict[tuple[str, Any, int], Row] = {}
        for row in self.rows(name):
            ends[row["curve"], row["x"], row["seed"]] = row
        rows: dict[tuple[str, Any], list[Row]] = defaultdict(list)
        for (curve, x, _), row in ends.items():
            rows[curve, x].append(row)
        return rows


def numbers(rows: Iterable[Row], column: str) -> str:
    """One number a seed.

    >>> numbers([{"a": 0.98125}, {"a": 1.0}], "a")
    '0.981, 1.000'
    """
    return ", ".join(f"{row[column]:.3f}" for row in rows)


def table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown.

    >>> print(table(["s", "b"], [["3", "1"]]), end="")
    | s | b |
    |---|---|
    | 3 | 1 |
    """
    first, *others = ("| " + " | ".join(line) + " |\n" for line in [head, *rows])
    return first + "|---" * len(head) + "|\n" + "".join(others)


def of_runs(panels: Panels, names: list[str]) -> str:
    """A row a curve: what each seed ends with, the most hostile peers a node met, and what all nodes sent."""
    rows = []
    for name in names:
        title = find(name).title
        if name not in panels:
            rows.append([title, "not run", "", "", "", "", ""])
            continue
        for (curve, _), ends in panels.last(name).items():
            proofs = [panels.entries[name]["runs"][row["run"]] for row in ends]
            met = ", ".join(str(proof["max_observed"]) for proof in proofs)
            planned = f"{met} of {proofs[0]['b_hat']}"
            means, worst = numbers(ends, "accuracy_mean"), numbers(ends, "accuracy_worst")
            sent = f"{ends[0]['bytes'] / 1e9:.1f}"
            rows.append([title, curve, str(ends[0]["round"]), means, worst, planned, sent])
    return table(
        ["panel", "curve", "rounds", "mean accuracy", "worst node", "hostile met, b_hat", "GB sent"], rows
    )


def of_methods(panels: Panels, names: list[str]) -> str:
    """A row a panel, a column a method: the panel's measure, seed by seed;
    and RPEL's lead over the best rival."""
    labels = [curve.label for curve in find(names[0]).curves]
    rows = []
    for name in names:
        panel = find(name)
        if name not in panels:
            rows.append([panel.title, *["not run"] * len(labels), ""])
            continue
        column = "accuracy_mean" if panel.measure == "mean" else "accuracy_lowest"
        ends = {curve: seeds for (curve, _), seeds in panels.last(name).items()}
        average = {curve: sum(row[column] for row in seeds) / len(seeds) for curve, seeds in ends.items()}
        lead = average.pop("RPEL") - max(average.values())
        rows.append([panel.title, *(numbers(ends[label], column) for label in labels), f"{lead:+.3f}"])
    return table(["panel", *labels, "RPEL's lead"], rows)


def of_sweep(panels: Panels, names: list[str]) -> str:
    """A row for each value of the axis; mean and worst of every curve, averaged over the seeds."""
    (name,) = names
    if name not in panels:
        return f"{find(name).title}: not run.\n"
    ends = panels.last(name)
    curves, values = (list(dict.fromkeys(key[i] for key in ends)) for i in (0, 1))
    head = [find(name).xlabel, *(f"{curve}, {word}" for curve in curves for word in ("mean", "worst node"))]
    columns = ("accuracy_mean", "accuracy_worst")
    rows = [
        [f"{x:g}", *(numbers(ends[curve, x], column) for curve in curves for column in columns)]
        for x in values
    ]
    return table(head, rows)


def of_fractions(panels: Panels, names: list[str]) -> str:
    """For a tenth of the nodes hostile: b̂ in each simulation, exactly,
    and from which s on it is a minority."""
    rows = []
    for name in names:
        if name not in panels:
            rows.append([find(name).title, *["not run"] * (len(SHOWN_PULLS) + 1)])
            continue
        tenth = [row for row in panels.rows(name) if row["byzantine"] * 100 == max(SHARES) * row["nodes"]]
        cells = [_simulated(row) for row in tenth if row["pull"] in SHOWN_PULLS]
        within = [row["pull"] for row in tenth if 2 * max(_counts(row)) < row["pull"] + 1]
        rows.append([find(name).title, *cells, str(min(within, default="none"))])
    return table(["", *(f"s = {s}" for s in SHOWN_PULLS), "minority in all 5 from s ="], rows)


def _counts(row: Row) -> list[int]:
    return [row[key] for key in row if key.startswith("simulation_")]


def _simulated(row: Row) -> str:
    low, high = min(_counts(row)), max(_counts(row))
    seen = str(low) if low == high else f"{low}–{high}"
    return f"{seen} ({row['b_hat_median']}, {row['b_hat_99']})"


def of_figures(panels: Panels, names: list[str]) -> str:
    """Figure by figure: how many of its panels were run, and at which size."""
    figures: dict[str, list[str]] = defaultdict(list)
    for panel in everything():
        figures[panel.figure.partition(" (")[0]].append(panel.name)
    rows = []
    for figure, inside in figures.items():
        there = [name for name in inside if name in panels]
        notes = dict.fromkeys(panels.entries[name]["note"] for name in there)
        rows.append([figure, f"{len(there)} of {len(inside)}", "; ".join(notes) or "not run"])
    proofs = {name: proof for entry in panels.entries.values() for name, proof in entry["runs"].items()}
    held = sum(proof["held"] for proof in proofs.values())
    codes = Counter(proof["code"] for proof in proofs.values()).most_common()
    versions = ", ".join(f"{code} ({count})" for code, count in codes)
    closing = f"Runs: {len(proofs)}; the plan held in {held}. Code versions (runs): {versions}.\n"
    return table(["figure", "panels", "size"], rows) + "\n" + closing


_ATTACKS = {ALIASES.get(name, name): label for label, name in ATTACKS.items()} | {"none": "nobody"}


# The paper's schedule on CIFAR-10: its rounds, the last ones before the rate falls,
# and the accuracy it reports.
LENGTH, STEPS, CLAIM = 2000, (500, 1000, 1500), 0.75


def long_runs(panels: Panels) -> list[KeptRun]:
    """The runs of cifar10-20 on the paper's schedule, to its end or only its beginning,
    in the order of the page."""
    runs = [
        run
        for run in panels.archive.runs()
        if run.spec["name"] == "cifar10-20" and run.spec["lr"][-1][0] == LENGTH
    ]
    return sorted(
        runs, key=lambda run: (_changed(run), run.spec["pull"], run.spec["attack"], run.spec.get("seed", 0))
    )


def _changed(run: KeptRun) -> str:
    """What differs from the setting of Figure 2.

    >>> _changed(KeptRun("", {"alpha": 0.5, "byzantine": 3, "local_steps": 1}, [], {}))
    'α = 0.5'
    """
    usual: dict[str, tuple[str, Any]] = {
        "byzantine": ("b", 3), "alpha": ("α", 10.0), "local_steps": ("local steps", 1),
        "rule": ("rule", None), "nodes": ("n", 20),
    }  # fmt: skip
    changes = {
        words: run.spec.get(key, value)
        for key, (words, value) in usual.items()
        if run.spec.get(key, value) != value
    }
    return ", ".join(f"{words} = {value}" for words, value in changes.items() if value != "nnm+trimmed_mean")


def of_long_runs(panels: Panels, names: list[str]) -> str:
    """A row for each run on the paper's schedule; a beginning says how far it goes."""
    rows = []
    for run in long_runs(panels):
        last, spec, means = (
            run.rows[-1],
            run.spec,
            {row["round"]: row["accuracy_mean"] for row in run.evaluated},
        )
        attack = _ATTACKS.get(spec["attack"], spec["attack"])
        setting = [
            str(spec["pull"]),
            attack,
            _changed(run) or "as in Figure 2",
            str(spec.get("seed", 0)),
            _rounds(run),
        ]
        then = [f"{means[t]:.3f}" if t in means else "" for t in STEPS]
        end = [f"{last['accuracy_mean']:.3f}", f"{last['accuracy_worst']:.3f}", _reached(means)]
        rows.append([*setting, *then, *end, f"{run.proof['max_observed']} of {run.proof['plan']['b_hat']}"])
    head = ["s", "attack", "setting", "seed", "rounds", *(f"mean at {t:,}" for t in STEPS), "mean at the end"]
    return table([*head, "worst node", "75 % for good from", "hostile met, b_hat"], rows)


def _rounds(run: KeptRun) -> str:
    """How much of the schedule was run."""
    return f"{len(run.rows):,}" if len(run.rows) == LENGTH else f"the first {len(run.rows):,}"


def _reached(means: dict[int, float]) -> str:
    """The evaluated round from which on the paper's 75 % are kept.

    >>> _reached({100: 0.8, 200: 0.7, 300: 0.75}), _reached({100: 0.8, 200: 0.7})
    ('300', 'never')
    """
    below = max((t for t, mean in means.items() if mean < CLAIM), default=0)
    return next((f"{t:,}" for t in means if t > below), "never")


def draw_long_runs(panels: Panels) -> None:
    """Mean (solid) and worst accuracy (dotted) of the runs on the paper's schedule."""
    runs = long_runs(panels)
    if not runs:
        return
    figure, axes = plots.canvas(7.4, 4.2)
    for colour, run in zip(plots.COLOURS, runs, strict=False):
        label = f"s = {run.spec['pull']}, {_ATTACKS.get(run.spec['attack'], run.spec['attack'])}"
        rounds = [row["round"] for row in run.evaluated]
        label += f", {_changed(run)}" * bool(_changed(run))
        axes.plot(rounds, [row["accuracy_mean"] for row in run.evaluated], color=colour, label=label)
        axes.plot(rounds, [row["accuracy_worst"] for row in run.evaluated], color=colour, linestyle=":")
    axes.axhline(CLAIM, color=plots.SOFT, linewidth=0.8, linestyle="--", label="the paper's 75 %")
    axes.set(
        xlabel="round",
        ylabel="test accuracy",
        ylim=(0, 1),
        title="CIFAR-10, n = 20, 2,000 rounds; dotted: worst node",
    )
    axes.legend(frameon=False, fontsize=8.5)
    plots.save(figure, panels.folder / "cifar10.svg")


def of_reductions(panels: Panels, names: list[str]) -> str:
    """A row a setting: what one exchange leaves of the spread (α) and moves the mean (λ),
    as promised and as it was."""
    groups: dict[tuple[Any, ...], list[KeptRun]] = defaultdict(list)
    for run in panels.archive.runs():
        spec = run.spec
        if spec["method"] == "rpel" and spec["rule"] == "nnm+trimmed_mean":
            sizes = spec["nodes"], spec["byzantine"], spec["pull"], run.proof["plan"]["b_hat"]
            groups[spec["dataset"], *sizes, _ATTACKS.get(spec["attack"], spec["attack"])].append(run)
    rows = []
    for (data, n, b, s, b_hat, attack), runs in sorted(groups.items()):
        promised = reduction(n, b, s, b_hat)
        assert promised is not None, "a plan's b_hat is a minority"
        seen = [row for run in runs for row in run.rows if row["alpha_realised"] is not None]
        alphas, lambdas = ([row[key] for row in seen] for key in ("alpha_realised", "lambda_realised"))
        cells = [data, *map(str, (n, b, s, b_hat)), attack, f"{len(seen)} of {count(len(runs), 'run')}"]
        for bound, values in ((promised.alpha, alphas), (promised.lambda_, lambdas)):
            cells += [_three(bound), _three(fmean(values)), _three(max(values))]
        rows.append(cells)
    head = ["data", "n", "b", "s", "b_hat", "attack", "rounds measured"]
    return table(
        [*head, *(f"{name}, {word}" for name in "αλ" for word in ("promised", "mean", "largest"))], rows
    )


# The runs of a page of its own, by what their specifications must be one of.
PAPER_ATTACKS, GRAPH_METHODS = ("alie", "foe", "sign_flipping"), ("cs-plus", "gts", "clipped-gossip", "rtc")
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "mnist": {
        "method": ("rpel",), "attack": PAPER_ATTACKS, "rule": ("nnm+trimmed_mean", "mean"),
        "sizes": ((100, 10, 15), (30, 6, 15)),
    },
    "baselines": {
        "method": ("rpel", *GRAPH_METHODS), "attack": ("alie", "dissensus"),
        "rule": ("nnm+trimmed_mean", "cs_plus", "gts", "clipped_gossip_adaptive", "rtc"),
        "sizes": ((30, 6, 15), (30, 1, 3)),
    },
}  # fmt: skip


def of_settings(panels: Panels, names: list[str]) -> str:
    """A row for each setting of a page (all fields alike but the seed): what its seeds ended with."""
    wanted = SETTINGS[names[0]] | {"dataset": ("mnist",), "rounds": (200,)}
    groups: dict[tuple[Any, ...], dict[int, KeptRun]] = defaultdict(dict)
    for run in panels.archive.runs():
        sizes = tuple(run.spec.get(key) for key in ("nodes", "byzantine", "pull"))
        spec = {**run.spec, "sizes": sizes}
        if all(spec.get(key) in allowed for key, allowed in wanted.items()):
            key = sizes, spec["attack"], spec["method"] != "rpel", spec["method"], spec["rule"]
            groups[key][spec.get("seed", 0)] = run
    rows = []
    for key in sorted(groups):
        sizes, attack, _, method, rule = key
        seeds = [run for _, run in sorted(groups[key].items())]
        ends = [run.rows[-1] for run in seeds]
        means, worst = (
            ", ".join(f"{end[column]:.4f}" for end in ends) for column in ("accuracy_mean", "accuracy_worst")
        )
        met = ", ".join(str(run.proof["max_observed"]) for run in seeds)
        b_hat = str(seeds[0].proof["plan"]["b_hat"])
        cells = [method, rule, *map(str, sizes), b_hat, attack, ", ".join(map(str, sorted(groups[key])))]
        rows.append([*cells, means, worst, met])
    head = ["method", "rule", "n", "b", "s", "b_hat", "attack", "seeds", "mean accuracy", "worst node"]
    return table([*head, "most hostile met"], rows)


def _three(number: float) -> str:
    """Three digits, without an exponent.

    >>> _three(2629.2), _three(0.1649), _three(1.234e-5)
    ('2,629', '0.165', '0.0000123')
    """
    return f"{number:,.{max(0, 2 - math.floor(math.log10(number)))}f}" if number > 0 else "0"


KINDS: dict[str, Callable[[Panels, list[str]], str]] = {
    "runs": of_runs,
    "long": of_long_runs,
    "reductions": of_reductions,
    "methods": of_methods,
    "sweep": of_sweep,
    "fractions": of_fractions,
    "figures": of_figures,
    "settings": of_settings,
}


def written(page: str, panels: Panels) -> str:
    """The page with its tables made anew."""

    def fill(match: re.Match[str]) -> str:
        return match[1] + KINDS[match[2]](panels, match[3].split()) + match[4]

    return MARK.sub(fill, page)


def main() -> None:
    folder = PAGE.with_suffix("")
    archive = Archive(folder / "runs.tar.xz")
    for new in map(Path, sys.argv[1:]):
        take(new, folder)
        archive.take(new, also=("nodes.npz",))
    archive.write()
    panels = Panels(folder)
    draw_long_runs(panels)
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8"), panels), "utf-8")


if __name__ == "__main__":
    main()
