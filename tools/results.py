"""The tables of the results pages, from archives of runs.

    python tools/results.py                      write every table anew
    python tools/results.py exchange=RUNS …      first take finished runs into docs/results/exchange
    python tools/results.py --check              only say which pages would change
    python tools/results.py --figures            also draw the figures that are made of single runs

A table stands in a page between <!-- NAME ARGUMENTS --> and <!-- end -->, and is made from docs/results/*/
and from nothing else, so that the first command leaves the pages as they are. Of paper also what
`rpel reproduce` wrote is taken.
"""

import io
import json
import math
import re
import shutil
import sys
import tarfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rpel.runs.run import Run
from rpel.simulation.methods import schedule
from rpel.spec import Privacy, Rate, Request, Timing
from rpel.studies import plots
from rpel.studies.arena import MEASURES, Standings
from rpel.studies.paper import ATTACKS, SHARES, everything, find
from rpel.studies.study import Result, Results
from rpel.theory import reduction

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "results"
PAGES = ("results/paper", "results/arena", "results/studies", "scale")
MARK = re.compile(r"(<!-- ([\w-]+)((?: \S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
SMALL = ("spec.toml", "metrics.jsonl", "certificate.json")
ALSO = ("nodes.npz", "curious.json")
NONE = "–"
Row = dict[str, Any]
Lines = Iterable[Sequence[str]]


# --- archives -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A finished run of an archive: its specification, rounds, certificate, and other small files."""

    name: str
    spec: Row
    rows: list[Row]
    proof: Row
    more: dict[str, bytes]

    @property
    def attack(self) -> str:
        return str(self.spec["attack"])

    @property
    def asynchronous(self) -> bool:
        return Timing.of(self.spec.get("timing", "synchronous")).asynchronous

    @property
    def epsilon(self) -> float | None:
        """The ε that its noise was planned for."""
        return Privacy.of(self.spec.get("privacy", "none")).epsilon

    @property
    def seed(self) -> int:
        return int(self.spec.get("seed", 0))

    @property
    def b_hat(self) -> int:
        return int(self.proof["plan"]["b_hat"])

    @property
    def evaluated(self) -> list[Row]:
        return [row for row in self.rows if row["accuracy_mean"] is not None]

    def end(self, column: str) -> Any:
        return self.rows[-1].get(column)

    def nodes(self, name: str) -> Any:
        """What the honest nodes reached, (evaluations, nodes)."""
        with np.load(io.BytesIO(self.more["nodes.npz"])) as arrays:
            return arrays[name]

    def has(self, **fields: Any) -> bool:
        """Whether it has these fields; a tuple holds allowed values."""
        mine = {key: self.spec.get(key, Request.model_fields[key].default) for key in fields}
        pairs = ((mine[key], value) for key, value in fields.items())
        return all(one in value if isinstance(value, tuple) else one == value for one, value in pairs)


def files(page: str) -> dict[str, bytes]:
    """Return the files of a page's archive."""
    path = KEPT / page / "runs.tar.xz"
    if not path.is_file():
        return {}
    with tarfile.open(path, "r:xz") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


@cache
def archive(page: str) -> list[Kept]:
    """Return the runs of a page's archive."""
    folders: dict[str, dict[str, bytes]] = defaultdict(dict)
    for name, content in files(page).items():
        run, _, file = name.partition("/")
        folders[run][file] = content
    runs = []
    for name, inside in sorted(folders.items()):
        spec, metrics, proof = (inside[file].decode() for file in SMALL)
        rows = [json.loads(line) for line in metrics.splitlines()]
        runs.append(Kept(name, tomllib.loads(spec), rows, json.loads(proof), inside))
    return runs


def take(page: str, folder: Path) -> None:
    """Add the small files of every finished run below the folder; equal runs give equal bytes."""
    kept = files(page)
    for proof in sorted(folder.rglob("certificate.json")):
        for path in (proof.with_name(name) for name in (*SMALL, *ALSO)):
            if path.is_file():
                content = re.sub(rb"(?m)^(data_dir|out) = .*\n", b"", path.read_bytes())
                kept[f"{proof.parent.name}/{path.name}"] = content
    with tarfile.open(KEPT / page / "runs.tar.xz", "w:xz") as tar:
        for name, content in sorted(kept.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def take_panels(folder: Path, kept: Path) -> None:
    """Copy numbers and pictures of a reproduction, and add its panels to the kept index."""
    index = {entry["name"]: entry for entry in _index(kept)}
    for entry in _index(folder):
        shutil.copyfile(folder / f"{entry['name']}.csv", kept / f"{entry['name']}.csv")
        runs = {}
        for run in map(Path, entry["runs"]):
            proof = json.loads((folder / run / "certificate.json").read_text("utf-8"))
            runs[run.name] = {key: proof[key] for key in ("max_observed", "held")}
            runs[run.name] |= {"b_hat": proof["plan"]["b_hat"], "code": proof["versions"]["code"]}
        about = {key: entry[key] for key in ("name", "figure", "title", "scale", "note")}
        index[entry["name"]] = about | {"runs": runs}
    for picture in folder.glob("figure-*.svg"):
        shutil.copyfile(picture, kept / picture.name)
    order = [panel.name for panel in everything()]
    ordered = sorted(index.values(), key=lambda entry: order.index(entry["name"]))
    (kept / "index.json").write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _index(folder: Path) -> list[Row]:
    path = folder / "index.json"
    rows: list[Row] = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return rows


def _by(runs: Iterable[Kept], key: Callable[[Kept], Any]) -> dict[Any, list[Kept]]:
    """Group runs, each group in the order of its seeds."""
    groups: dict[Any, list[Kept]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.seed):
        groups[key(run)].append(run)
    return groups


# --- numbers ------------------------------------------------------------------------------------------------


def markdown(head: Sequence[str], lines: Lines) -> str:
    """Return a table in Markdown.

    >>> print(markdown(["s", "b"], [["3", "1"]]))
    | s | b |
    |---|---|
    | 3 | 1 |
    """
    rows = [f"| {' | '.join(line)} |" for line in (head, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]])


def varying(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table without the columns that say the same in every line.

    >>> print(varying(["s", "b"], [["3", "1"], ["4", "1"]]))
    | s |
    |---|
    | 3 |
    | 4 |
    """
    lines = list(lines)
    shown = [i for i in range(len(head)) if len({line[i] for line in lines}) > 1]
    return markdown([head[i] for i in shown], ([line[i] for i in shown] for line in lines))


def each(values: Iterable[float], digits: int = 3) -> str:
    """One number a seed."""
    return ", ".join(f"{value:.{digits}f}" for value in values)


def about(values: Sequence[float | None]) -> str:
    """The mean, and half of the range over the seeds.

    >>> about([0.5, 0.7]), about([None, 0.5]), about([0.25]), about([])
    ('.600±.100', 'overflowed', '.250', '–')
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values) or not values:
        return "overflowed" if values else NONE
    both = [fmean(known)] + ([(max(known) - min(known)) / 2] if len(known) > 1 else [])
    return "±".join(f"{number:.3f}".removeprefix("0") for number in both)


def three(number: float) -> str:
    """Three digits, without an exponent.

    >>> three(2629.2), three(0.1649), three(1.234e-5)
    ('2,629', '0.165', '0.0000123')
    """
    return f"{number:,.{max(0, 2 - math.floor(math.log10(number)))}f}" if number > 0 else "0"


# --- the paper's panels -------------------------------------------------------------------------------------


def panel_rows(name: str) -> Any:
    """Return the rows of a panel's CSV."""
    import pandas

    return pandas.read_csv(KEPT / "paper" / f"{name}.csv")


def ends(name: str) -> dict[tuple[str, Any], Any]:
    """Return by curve and place on the axis the last row of each seed."""
    table = panel_rows(name).groupby(["curve", "x", "seed"], sort=False, dropna=False, as_index=False).last()
    groups = table.groupby(["curve", "x"], sort=False, dropna=False)
    return {key: rows for key, rows in groups}  # noqa: C416 (a GroupBy is no mapping)


def panels(*names: str) -> str:
    """A row a curve: what each seed ends with, and the most hostile peers a node met.

    Of a single panel also what all sent.
    """
    lines, proofs = [], {entry["name"]: entry["runs"] for entry in _index(KEPT / "paper")}
    for name in names:
        for place, ((curve, _), rows) in enumerate(ends(name).items()):
            mine = [proofs[name][run] for run in rows["run"]]
            met = ", ".join(str(proof["max_observed"]) for proof in mine) + f" of {mine[0]['b_hat']}"
            sent = f"{rows['bytes'].iloc[0] / 1e9:.1f}" if len(names) == 1 else ""
            accuracies = [each(rows[f"accuracy_{end}"]) for end in ("mean", "worst")]
            title = "" if place or len(names) == 1 else find(name).title
            lines.append([title, curve, str(rows["round"].iloc[0]), *accuracies, met, sent])
    head = ["panel", "curve", "rounds", "mean accuracy", "worst node", "hostile met, b_hat", "GB sent"]
    return varying(head, lines)


def rivals(*names: str) -> str:
    """A row a panel, a column a method: the panel's measure, seed by seed; RPEL's lead over the best."""
    lines, labels = [], [curve.label for curve in find(names[0]).curves]
    for panel in map(find, names):
        final = {curve: rows[panel.column].tolist() for (curve, _), rows in ends(panel.name).items()}
        average = {curve: fmean(values) for curve, values in final.items()}
        lead = average.pop("RPEL") - max(average.values())
        lines.append([panel.title, *(each(final[label]) for label in labels), f"{lead:+.3f}"])
    return markdown(["panel", *labels, "RPEL's lead"], lines)


def sweep(name: str) -> str:
    """A row for each value of the axis; mean and worst of every curve, seed by seed."""
    final = ends(name)
    curves, values = (list(dict.fromkeys(key[i] for key in final)) for i in (0, 1))
    head = [find(name).xlabel, *(f"{curve}, {word}" for curve in curves for word in ("mean", "worst node"))]
    columns = ("accuracy_mean", "accuracy_worst")
    lines = [[f"{x:g}", *(each(final[c, x][column]) for c in curves for column in columns)] for x in values]
    return markdown(head, lines)


def fractions(*names: str) -> str:
    """For a tenth of the nodes hostile: b̂ in each simulation and exactly; from which s it is a minority."""
    lines, pulls = [], (10, 20, 30, 40, 50)
    for name in names:
        table = panel_rows(name)
        tenth = table[table["byzantine"] * 100 == max(SHARES) * table["nodes"]]
        seen = {
            row["pull"]: [int(row[f"simulation_{i}"]) for i in range(1, 6)] for _, row in tenth.iterrows()
        }
        exact = {
            row["pull"]: f"({row['b_hat_median']:.0f}, {row['b_hat_99']:.0f})" for _, row in tenth.iterrows()
        }
        cells = [
            f"{'–'.join(dict.fromkeys(map(str, (min(seen[s]), max(seen[s])))))} {exact[s]}" for s in pulls
        ]
        within = [s for s, counts in seen.items() if 2 * max(counts) < s + 1]
        lines.append([find(name).title, *cells, str(min(within, default="none"))])
    return markdown(["", *(f"s = {s}" for s in pulls), "minority in all 5 from s ="], lines)


def figures() -> str:
    """How many panels of which figures were run at each size."""
    entries = {entry["name"]: entry for entry in _index(KEPT / "paper")}
    inside = defaultdict[str, list[str]](list)
    for panel in everything():
        inside[panel.figure.partition(" (")[0].removeprefix("Figure ")].append(panel.name)
    sizes = defaultdict[str, list[str]](list)
    for figure, names in inside.items():
        notes = dict.fromkeys(entries[name]["note"] for name in names if name in entries)
        there = sum(name in entries for name in names)
        some = "" if there == len(names) else f" ({there} of {len(names)} panels)"
        sizes["; ".join(notes) or "not run"].append(figure + some)
    proofs = {name: proof for entry in entries.values() for name, proof in entry["runs"].items()}
    held = f"Runs: {len(proofs)}; the plan held in {sum(proof['held'] for proof in proofs.values())}."
    table = markdown(["figures", "size"], ([", ".join(some), size] for size, some in sizes.items()))
    return f"{table}\n\n{held}"


# --- single runs of the paper's settings --------------------------------------------------------------------

ATTACK_LABELS = {"sign_flipping": "SF", "none": "nobody"} | {name: label for label, name in ATTACKS.items()}
LENGTH, STEPS, CLAIM = 2000, (500, 1000, 1500), 0.75
"""The paper's rounds on CIFAR-10, the last ones before the rate falls, and the accuracy it reports."""
CHANGES: dict[str, tuple[str, Any]] = {
    "byzantine": ("b", 3), "partition": ("α", "dirichlet(10)"), "local_steps": ("local steps", 1),
    "rule": ("rule", "nnm+trimmed_mean"), "nodes": ("n", 20),
}  # fmt: skip
"""What a row of CIFAR-10 may differ in from Figure 2."""


def long() -> str:
    """A row for each run of CIFAR-10 on the paper's schedule; a beginning says how far it goes."""
    lines = []
    for run in archive("paper"):
        spec = run.spec
        if spec["name"] != "cifar10-20" or Rate.of(spec["lr"]).pieces[-1][0] != LENGTH:
            continue
        pairs = ((words, spec.get(key, usual), usual) for key, (words, usual) in CHANGES.items())
        changed = ", ".join(f"{words} = {_short(value)}" for words, value, usual in pairs if value != usual)
        means = {row["round"]: row["accuracy_mean"] for row in run.evaluated}
        below = max((t for t, mean in means.items() if mean < CLAIM), default=0)
        rounds = f"{len(run.rows):,}" if len(run.rows) == LENGTH else f"the first {len(run.rows):,}"
        attack, seed = ATTACK_LABELS.get(run.attack, run.attack), str(run.seed)
        then = [f"{means[t]:.3f}" if t in means else "" for t in STEPS]
        end = [f"{run.end('accuracy_mean'):.3f}", f"{run.end('accuracy_worst'):.3f}"]
        end += [
            next((f"{t:,}" for t in means if t > below), "never"),
            f"{run.proof['max_observed']} of {run.b_hat}",
        ]
        line = [str(spec["pull"]), attack, changed or "as in Figure 2", seed, rounds, *then, *end]
        lines.append(((changed, spec["pull"], spec["attack"], run.seed), line))
    head = ["s", "attack", "setting", "seed", "rounds", *(f"mean at {t:,}" for t in STEPS), "mean at the end"]
    head += ["worst node", "75 % for good from", "hostile met, b_hat"]
    return varying(head, [line for _, line in sorted(lines)])


def _short(value: Any) -> str:
    """Return a value without the name of its component: the alpha of a partition."""
    return str(value).removeprefix("dirichlet(").removesuffix(")")


def reductions() -> str:
    """A row a setting: what an exchange leaves of the spread (α) and moves the mean (λ), beside the lemma."""
    robust = [run for run in archive("paper") if run.has(method="rpel", rule="nnm+trimmed_mean")]
    sizes = ("dataset", "nodes", "byzantine", "pull")
    groups = _by(robust, lambda run: (*map(run.spec.get, sizes), run.b_hat))
    lines = []
    for (data, n, b, s, b_hat), runs in sorted(groups.items()):
        promised = reduction(n, b, s, b_hat)
        assert promised is not None, "a plan's b_hat is a minority"
        line = [data, *map(str, (n, b, s, b_hat))]
        for bound, key in ((promised.alpha, "alpha_realised"), (promised.lambda_, "lambda_realised")):
            values = [row[key] for run in runs for row in run.rows if row[key] is not None]
            line += map(three, (bound, max(values)))
        lines.append(line)
    words = ("promised", "largest seen")
    return markdown(["data", "n", "b", "s", "b_hat", *(f"{a}, {w}" for a in "αλ" for w in words)], lines)


SETTINGS: dict[str, Row] = {
    "mnist": {
        "method": ("rpel",), "attack": ("foe", "sign_flipping"), "rule": ("nnm+trimmed_mean", "mean"),
        "sizes": ((100, 10, 15), (30, 6, 15)),
    },
    "baselines": {
        "method": ("rpel", "cs-plus", "gts", "clipped-gossip", "rtc"), "attack": ("alie", "dissensus"),
        "rule": ("nnm+trimmed_mean", "cs_plus", "gts", "clipped_gossip_adaptive", "rtc"),
        "sizes": ((30, 6, 15), (30, 1, 3)),
    },
}  # fmt: skip


def settings(name: str) -> str:
    """A row for each setting and attack, a column for each method: mean accuracy (worst node)."""
    wanted = SETTINGS[name] | {"dataset": "mnist", "rounds": 200}
    sizes_of = wanted.pop("sizes")
    cells: dict[Any, dict[str, dict[int, Kept]]] = defaultdict(lambda: defaultdict(dict))
    for run in archive("paper"):
        sizes = tuple(run.spec.get(key) for key in ("nodes", "byzantine", "pull"))
        if sizes in sizes_of and run.has(**wanted):
            column = "averaging" if run.spec["rule"] == "mean" else run.spec["method"]
            cells[sizes, run.attack][column][run.seed] = run
    columns = sorted(
        {column for row in cells.values() for column in row}, key=lambda name: (name != "rpel", name)
    )
    lines = []
    for (sizes, attack), row in sorted(cells.items()):
        mean, worst = (
            [
                each(row[column][seed].end(f"accuracy_{end}") for seed in sorted(row[column]))
                for column in columns
            ]
            for end in ("mean", "worst")
        )
        both = (f"{m} ({w})" if m else NONE for m, w in zip(mean, worst, strict=True))
        lines.append([*map(str, sizes), attack, *both])
    return markdown(["n", "b", "s", "attack", *columns], lines)


# --- the arena ----------------------------------------------------------------------------------------------


@cache
def standings(hostile: int) -> Standings:
    """Return the standings of the arena's runs with that b, which tells its two settings apart."""
    mine = [run for run in archive("arena") if run.spec["byzantine"] == hostile]
    who = [(run.spec["method"], run.spec["rule"]) for run in mine]
    order = {one: who.index(one) for one in who}
    mine.sort(
        key=lambda run: (
            order[run.spec["method"], run.spec["rule"]],
            run.attack.startswith("strongest"),
            run.attack,
        )
    )
    results = []
    for run in mine:
        labels = {
            "method": run.spec["method"],
            "rule": run.spec["rule"],
            "attack": run.attack,
            "seed": run.seed,
        }
        results.append(Result(labels, Run(Request(rounds=len(run.rows), seed=run.seed), rows=run.rows)))
    if hostile > 1:  # asked for, but it needs 19 models for b_hat = 4 and has 16
        unable = {"method": "rpel", "rule": "bulyan", "seed": 0}
        results += [Result(unable | {"attack": name}, None) for name in {run.attack: 0 for run in mine}]
    return Standings(Request(), Results(results))


def arena(kind: str, hostile: str) -> str:
    """By rank: the worst case, under which attacks, and by seed where there are several."""
    lines = []
    for rank in standings(int(hostile)).ranking:
        if rank.cases:
            seeds = each(rank.cases.values()) if len(rank.cases) > 1 else ""
            lines.append([getattr(rank, kind), f"{rank.worst_case or 0:.3f}", rank.attack, seeds])
    return varying([kind, "worst case", "under", "by seed"], lines)


def matrix(kind: str, hostile: str) -> str:
    """The worst node: contestants by rank, a column an attack."""
    played = standings(int(hostile))
    lines = [
        [getattr(rank, kind), *(f"{value:.2f}".removeprefix("0") for value in row)]
        for rank, row in zip(played.ranking, played.matrix("accuracy_worst").to_numpy(), strict=True)
        if rank.cases
    ]
    return markdown([kind, *played.attacks], lines)


# --- the exchange -------------------------------------------------------------------------------------------

SPEEDS = "lognormal(0.3)+stragglers(0.1, 10)"
TIMED = ("none", "alie", "foe", "strongest(of=alie)")
SIZES: dict[int, Row] = {
    30: {"nodes": 30, "byzantine": 6, "rounds": (60, 100)},
    100: {"nodes": 100, "byzantine": 10, "rounds": (40, 70)},
}


def exchanged(n: int, attack: str, wire: str = "float32", asynchronous: bool = False) -> list[Kept]:
    """Return the runs of the exchange page in one setting, by seed."""
    wanted = SIZES[n] | {"attack": attack, "wire": wire}
    found = [r for r in archive("exchange") if r.has(**wanted) and r.asynchronous == asynchronous]
    return sorted(found, key=lambda run: run.seed)


def two(runs: Sequence[Kept]) -> str:
    """Mean and worst accuracy over the seeds."""
    if not runs:
        return NONE
    numbers = (f"{fmean(run.end(f'accuracy_{end}') for run in runs):.3f}" for end in ("mean", "worst"))
    return ", ".join(numbers)


def _schedule(run: Kept) -> Any:
    """Return when the nodes of a run act, if their speeds are those of the asynchronous runs."""
    sizes = {key: run.spec[key] for key in ("nodes", "byzantine", "rounds")}
    return schedule(Request(**sizes, seed=run.seed, timing=f"asynchronous(speeds={SPEEDS})"))


def asynchrony() -> str:
    """Both ways at their ends, and when the asynchronous one was as good."""
    lines = []
    for n, attack in ((n, attack) for n in SIZES for attack in TIMED):
        still, moving = exchanged(n, attack), exchanged(n, attack, asynchronous=True)
        if still and moving:
            times = [float(_schedule(still[0]).charged(len(still[0].rows))), float(moving[0].end("time"))]
            goal = fmean(run.end("accuracy_mean") for run in still) - 0.005
            means = np.mean([[row["accuracy_mean"] for row in run.evaluated] for run in moving], axis=0)
            when = float(moving[0].evaluated[int(np.flatnonzero(means >= goal)[0])]["time"])
            seeds = " and ".join(dict.fromkeys(str(len(runs)) for runs in (still, moving)))
            line = [two(still), f"{times[0]:,.0f}", two(moving), f"{times[1]:,.0f}", f"{when:,.0f}"]
            lines.append([str(n), attack.replace("of=", ""), seeds, *line, f"{when / times[0]:.2f}"])
    head = ["n", "attack", "seeds", "synchronous", "its time", "asynchronous", "its time"]
    return varying([*head, "as good as synchronous from", "share"], lines)


def wire(n: str, *attacks: str) -> str:
    """A line for each attack, a column for each code; then what the columns cost."""
    cells = {code: {a: exchanged(int(n), a, code) for a in attacks} for code in ("float32", "int8")}
    lines = [[a.replace("of=", ""), *(two(column[a]) for column in cells.values())] for a in attacks]
    there = [[runs for runs in column.values() if runs] for column in cells.values()]
    seeds = (sorted({len(runs) for runs in column}) for column in there)
    lines.append(["seeds", *(" to ".join(map(str, dict.fromkeys((s[0], s[-1])))) for s in seeds)])
    lines.append(["MB sent", *(f"{sum(r['bytes'] for r in runs[0][0].rows) / 1e6:,.0f}" for runs in there)])
    return markdown(["attack", *cells], lines)


# --- federations and privacy --------------------------------------------------------------------------------

ATTACKED = ("none", "alie", "strongest(of=alie)", "foe")
WAYS = {"rpel": "", "plain averaging": "mean", "alone": "alone:keep"}
COLUMNS = {
    "all, mean": "accuracy_mean", "all, worst": "accuracy_worst", "own, mean": "metric.own_accuracy_mean",
    "own, worst": "metric.own_accuracy_worst", "loss": "loss",
}  # fmt: skip


def federation(name: str, model: str) -> str:
    """A line for each way and attack; how many honest nodes would be better off alone."""
    mine = [run for run in archive("federations") if run.has(name=name, model=model)]
    ways = {rule: way for way, rule in WAYS.items()}
    groups = _by(mine, lambda run: (ways.get(run.spec["rule"], "rpel"), run.attack))
    alone = {run.seed: run for run in groups["alone", "none"]}
    lines = []
    for way, attack in ((way, attack) for way in WAYS for attack in ATTACKED):
        if runs := groups.get((way, attack)):
            cells = [about([run.end(key) for run in runs]) for key in COLUMNS.values()]
            shown = NONE if way == "alone" else "no attack" if attack == "none" else attack
            better = NONE if way == "alone" else _better_alone(runs, alone)
            lines.append([way, shown, str(len(runs)), *cells, better])
    head = ["way", "attack", "seeds", *COLUMNS, "better alone"]
    return varying(head, lines)


def _better_alone(runs: Sequence[Kept], alone: dict[int, Kept]) -> str:
    both = [
        [one.nodes("metric.own_accuracy")[-1] for one in (r, alone[r.seed])] for r in runs if r.seed in alone
    ]
    # a model that overflowed has no accuracy: its node is better off alone
    better = sum(int((~(shared >= single)).sum()) for shared, single in both)
    return f"{better} of {sum(len(one) for one, _ in both)}"


EPSILONS = (1.0, 3.0, 8.0, None)
RULES = ("nnm+trimmed_mean", "monna", "mean")
NOISY = ("none", "alie", "foe", "strongest(of=alie)")


def private(name: str, steps: str = "") -> str:
    """The worst node's accuracy: a line for each rule and attack, a column for each ε."""
    runs, lines = [run for run in archive("privacy") if run.spec["name"] == name], []
    settings = [(rule, attack, 1) for rule in RULES for attack in NOISY]
    for rule, attack, k in settings + [
        (RULES[0], attack, int(steps)) for attack in ("none", "alie") if steps
    ]:
        fields = {"rule": rule, "attack": attack, "local_steps": k}
        by_epsilon = [[run for run in runs if run.has(**fields) and run.epsilon == e] for e in EPSILONS]
        more = "" if k == 1 else f", {k} local steps"
        lines.append(
            [rule + more, attack, *(about([run.end("accuracy_worst") for run in r]) for r in by_epsilon)]
        )
    return markdown(["rule", "attack", *(f"ε = {_epsilon(epsilon)}" for epsilon in EPSILONS)], lines)


def _epsilon(epsilon: float | None) -> str:
    return "∞" if epsilon is None else f"{epsilon:g}"


def guessed(name: str) -> str:
    """What the curious member finds out: a line for each ε."""
    usual = {"name": name, "rule": RULES[0], "attack": "none", "seed": 0, "local_steps": 1}
    lines = []
    for epsilon in EPSILONS:
        run = next(r for r in archive("privacy") if r.has(**usual) and r.epsilon == epsilon)
        curves = json.loads(run.more["curious.json"])["curves"]
        every, drawn = (curves[member][-1] for member in ("every round", "by draws"))
        numbers = (every["auc"], every["tpr"], drawn["auc"], drawn["tpr"], every["canary_auc"])
        noise = (run.proof["privacy"] or {}).get("noise_multiplier", 0.0)
        cells = [_epsilon(epsilon), f"{noise:.3g}", *(f"{number:.3f}" for number in numbers)]
        lines.append([*cells, f"{every['epsilon_low']:.2f}"])
    head = ["ε", "noise multiplier", "AUC, sees every round", "TPR at 1 %", "AUC, by draws", "TPR at 1 %"]
    return markdown([*head, "canaries, AUC", "ε at least"], lines)


# --- scale --------------------------------------------------------------------------------------------------


def _scaled() -> dict[str, Kept]:
    """Return the runs of a hundred thousand nodes and a million, by what a table calls them."""
    runs = {}
    for run in archive("scale"):
        rule = "averaging" if run.spec.get("rule") == "mean" else "rpel"
        runs[rule, run.spec["nodes"], run.attack] = run
    return {
        f"{nodes:,} nodes, {rule} under {attack.upper()}": run
        for (rule, nodes, attack), run in sorted(runs.items(), key=lambda one: (one[0][0] != "rpel", one[0]))
    }


def scale() -> str:
    """A row a run."""
    lines = []
    for name, run in _scaled().items():
        seconds = [row["seconds"] for row in run.rows]
        middle = sorted(seconds)[len(seconds) // 2]
        accuracies = [f"{run.end(f'accuracy_{end}'):.4f}" for end in ("mean", "worst")]
        times = [f"{middle:.1f}", f"{sum(seconds) / 60:.0f} min"]
        met = [str(run.proof["max_observed"]), str(run.b_hat)]
        lines.append([name, str(len(run.rows)), *accuracies, *met, *times])
    head = ["run", "rounds", "mean accuracy", "worst node", "most hostile answers met", "planned for"]
    return markdown([*head, "s a round", "in all"], lines)


def cost() -> str:
    """A row a size: what benchmarks/scale.py --json measured, beside what the machine's rates allow."""
    parts, lines = ("local step", "draw", "forge", "aggregate", "evaluate"), []
    for size in json.loads((KEPT / "scale" / "cost.json").read_text("utf-8")):
        far = (f"{seconds / least:.1f}" for seconds, least in (size["parts"][name] for name in parts))
        each_node = f"{size['seconds'] / size['honest'] * 1e3:.3f}"
        memory = [f"{size['bytes'] / 1e9:.1f} GB", f"{size['bytes'] / size['model_bytes']:.1f}"]
        lines.append([f"{size['nodes']:,}", f"{size['seconds']:.2f}", each_node, *memory, *far])
    return markdown(["nodes", "s a round", "ms a node", "memory", "× the models", *parts], lines)


# --- figures ------------------------------------------------------------------------------------------------


def draw(path: Path, runs: dict[str, list[Kept]], title: str, x: str = "round") -> None:
    """Draw mean and worst accuracy of labelled runs against the rounds, or another column."""
    import pandas

    columns = ["accuracy_mean", "accuracy_worst"]
    rows = [
        {"curve": label, "seed": run.seed, "round": row["round"], x: row.get(x) or charged(run, row)}
        | {key: row[key] for key in columns}
        for label, seeds in runs.items() for run in seeds for row in run.evaluated
    ]  # fmt: skip
    figure, ((axes,),) = plots.canvas(7.4, 4.4)
    plots.curves(axes, pandas.DataFrame(rows), columns, x)
    plots.explain(axes, ("mean of the honest nodes", "worst node"))
    axes.set(xlabel="virtual time" if x == "time" else x, ylabel="test accuracy", ylim=(0, 1.02))
    axes.set_title(title, fontsize=10.5)
    axes.legend(frameon=False, fontsize=8.5)
    plots.save(figure, path)


def charged(run: Kept, row: Row) -> float:
    """Return the virtual time of a synchronous run's round."""
    return float(_schedule(run).charged(row["round"]))


def draw_all() -> None:
    """Draw the figures that are made of single runs."""
    for kind, hostile in (("rule", 4), ("method", 1)):
        maps = {title: standings(hostile).matrix(column) for title, column in MEASURES.items()}
        plots.save(plots.heat_maps(maps), DOCS / "images" / f"arena-{kind}s.svg")
    timed = {"asynchronous": True, "synchronous": False}
    both = {f"{a}, {way}": exchanged(30, a, asynchronous=on) for a in TIMED[:3] for way, on in timed.items()}
    draw(KEPT / "exchange" / "asynchrony.svg", both, "n = 30, with and without a barrier", "time")
    million = {label: [run] for label, run in _scaled().items()}
    title = "A tenth of the nodes hostile, each node pulls about 35 others"
    draw(DOCS / "images" / "scale-learning.svg", million, title)


TABLES: dict[str, Callable[..., str]] = {
    "panels": panels, "rivals": rivals, "sweep": sweep, "fractions": fractions, "figures": figures,
    "long": long, "reductions": reductions, "settings": settings, "arena": arena, "matrix": matrix,
    "asynchrony": asynchrony, "wire": wire, "federation": federation, "private": private,
    "guessed": guessed, "scale": scale, "cost": cost,
}  # fmt: skip


def written(name: str) -> str:
    """Return the text of a page with its tables made anew."""
    text = (DOCS / f"{name}.md").read_text("utf-8")
    return MARK.sub(lambda m: f"{m[1]}{TABLES[m[2]](*m[3].split())}\n{m[4]}", text)


def main() -> int:
    check = "--check" in sys.argv
    for page, _, folder in (word.partition("=") for word in sys.argv[1:] if "=" in word):
        take(page, Path(folder))
        if page == "paper":
            take_panels(Path(folder), KEPT / page)
    if "--figures" in sys.argv:
        draw_all()
    changed = False
    for name in PAGES:
        path, text = DOCS / f"{name}.md", written(name)
        if text != path.read_text("utf-8"):
            changed = True
            print(path.relative_to(DOCS.parent))
            if not check:
                path.write_text(text, "utf-8")
    return int(check and changed)


if __name__ == "__main__":
    sys.exit(main())
