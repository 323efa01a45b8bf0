"""The paper's sixty panels, and eight of our own, as data; and how they are made at any scale.

A panel says what is run, never how: its runs are a preset's, changed only where the figure's caption says so,
so a curve's run is the one that ``rpel run`` makes. The paper prints no grid for its comparisons; ours is in
docs/results/paper.md. A panel's picture is drawn from the rows of its CSV alone.

Scales: full is the paper's sizes and seeds; short has fewer rounds, with the schedule shortened alike; smoke
keeps who talks to whom and replaces what is learned, so it shows that everything works and nothing else.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rpel.component import parse
from rpel.errors import unknown
from rpel.files import write_text
from rpel.planning import quantiles
from rpel.planning.paper import simulate_max
from rpel.record import parse_seeds
from rpel.runs.run import spread
from rpel.spec import Rate, Request, load
from rpel.studies import plots
from rpel.studies.study import Cell, Results, Study, seeded
from rpel.text import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

Kind = Literal["accuracy", "fraction", "final", "bytes"]
Measure = Literal["mean", "worst"]
SIMULATED_ROUNDS = 200
SIMULATIONS = 5
SHARES = (2, 4, 6, 8, 10)
"""Hostile nodes in percent of all, the curves of Figure 3."""
PULLS = tuple(range(5, 51, 5))
SMOKE: dict[str, Any] = {
    "dataset": "mnist-sample", "model": "mlp", "rounds": 10, "batch_size": 10, "eval_every": 2,
    "eval_size": 200, "checkpoint_every": 0,
}  # fmt: skip
SHORTER = {"mnist": 0.3, "cifar10": 0.1, "femnist": 0.1}
"""The part of the paper's rounds that a short run makes."""
EVALUATIONS = 6
"""Evaluations of a short run; on CIFAR-10 each costs as much as ten rounds."""


class Scale(StrEnum):
    """The size of a run beside the paper's."""

    SMOKE = "smoke"
    SHORT = "short"
    FULL = "full"


@dataclass(frozen=True)
class Curve:
    """One line of a panel, or one point of it: a label, a preset, what differs from it, and the point's x."""

    label: str
    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    x: float | None = None

    def spec(self) -> Request:
        """Return the run behind it, named after what it is; curves with equal runs have equal names.

        >>> Curve("ALIE", "mnist-30", {"byzantine": 5}).spec().name
        'mnist-n30-b5-s15-rpel-alie'
        """
        spec = load(self.preset).replace(**self.changes)
        size = f"n{spec.nodes}-b{spec.hostile_count}-s{spec.pull}"
        method, attack = (parse(text).name for text in (spec.method, spec.attack))
        return spec.replace(name=f"{spec.dataset}-{size}-{method}-{attack}")


@dataclass(frozen=True)
class Panel:
    """One panel.

    kind: accuracy against rounds or bytes, final accuracy against a swept value, or Figure 3's fraction.
    measure: mean of the honest nodes, or the node that ends lowest (the paper's "worst"). seeds: the paper's.
    nodes: n of a fraction panel. xlabel: what a final panel sweeps.
    """

    name: str
    figure: str
    title: str
    kind: Kind = "accuracy"
    curves: tuple[Curve, ...] = ()
    measure: Measure = "mean"
    seeds: str = "0-1"
    nodes: int = 0
    xlabel: str = ""

    @property
    def number(self) -> str:
        """The figure's number as a file's name has it.

        >>> find("cifar10-left").number
        'figure-2'
        """
        return self.figure.partition(" (")[0].lower().replace(" ", "-")

    @property
    def column(self) -> str:
        """The column that is drawn."""
        return "accuracy_mean" if self.measure == "mean" else "accuracy_lowest"


COLUMNS = {1: 2, 2: 2, 3: 3, 4: 3, 5: 3, 6: 3, 7: 3, 8: 2, 9: 2, 10: 2}
"""Panels side by side in the paper's figures that have several."""


# --- the parts ----------------------------------------------------------------------------------------------

ATTACKS = {"SF": "sf", "FOE": "foe", "ALIE": "alie"}
RIVALS = {"RPEL": "rpel", "CS+": "cs-plus", "GTS": "gts", "ClippedGossip": "clipped-gossip"}
_THREE = "3 local steps"
_SEEDS = {"mnist-100": "0-1", "mnist-30": "0-1", "cifar10-20": "0-2", "femnist-30": "0-1"}


def attacks(preset: str, **changes: Any) -> tuple[Curve, ...]:
    """Return RPEL under each of the paper's three attacks, or one curve without attackers."""
    if changes.get("byzantine") == 0:
        return (Curve("no attack", preset, {**changes, "attack": "none"}),)
    return tuple(Curve(label, preset, {**changes, "attack": name}) for label, name in ATTACKS.items())


def rivals(preset: str, attack: str, **changes: Any) -> tuple[Curve, ...]:
    """List RPEL and the fixed-graph methods at equal budget.

    Without hostile nodes the attack is "none", whatever name is given.
    """
    attack = "none" if changes.get("byzantine") == 0 else attack
    return tuple(
        Curve(label, preset, {**changes, "attack": attack, "method": method})
        for label, method in RIVALS.items()
    )


def _panel(
    name: str,
    figure: str,
    title: str,
    preset: str,
    measure: Measure = "mean",
    attack: str = "",
    **changes: Any,
) -> Panel:
    """RPEL under the paper's attacks, or, under one attack, beside its rivals."""
    curves = rivals(preset, attack, **changes) if attack else attacks(preset, **changes)
    return Panel(name, figure, title, curves=curves, measure=measure, seeds=_SEEDS[preset])


def _mnist_comparison(
    attack: str, number: int, measure: Measure, cells: Iterable[tuple[int, int]]
) -> list[Panel]:
    """One of Figures 4 to 7: n = 30, a panel for each (s, b)."""
    words = {"mean": "average", "worst": "worst"}[measure]
    figure = f"Figure {number} (MNIST, {'ALIE' if attack == 'alie' else 'Dissensus'}, {words} accuracy)"
    return [
        _panel(
            f"{attack}-{measure}-s{s}-b{b}", figure, f"n = 30, s = {s}, b = {b}", "mnist-30", measure, attack,
            pull=s, byzantine=b,
        )
        for s, b in cells
    ]  # fmt: skip


# --- the sixty panels ---------------------------------------------------------------------------------------


def _main() -> list[Panel]:
    """Figures 1 to 3."""
    one, two, three = "Figure 1 (MNIST)", "Figure 2 (CIFAR-10)", "Figure 3 (effective adversarial fraction)"
    return [
        _panel("mnist-left", one, "MNIST, n = 100, b = 10, s = 15", "mnist-100"),
        _panel("mnist-right", one, "MNIST, n = 30, b = 6, s = 15", "mnist-30"),
        _panel("cifar10-left", two, "CIFAR-10, n = 20, b = 3, s = 6", "cifar10-20"),
        _panel("cifar10-right", two, "CIFAR-10, n = 20, b = 3, s = 19", "cifar10-20", pull=19),
        *(Panel(f"fraction-{n}", three, f"n = {n:,}", "fraction", nodes=n) for n in (1000, 10_000, 100_000)),
    ]


def _comparisons() -> list[Panel]:
    """List Figures 4 to 7.

    The paper's bottom-left picture, where RPEL gains most, is the sparsest setting with an attacker.
    """
    sparse = [(s, b) for b, s in product((0, 1), (3, 4, 5))]
    dense = [(15, b) for b in (0, 3, 6)]
    return [
        *_mnist_comparison("alie", 4, "mean", dense + sparse),
        *_mnist_comparison("alie", 5, "worst", dense + sparse),
        *_mnist_comparison("dissensus", 6, "mean", sparse),
        *_mnist_comparison("dissensus", 7, "worst", sparse),
    ]


def _cifar10() -> list[Panel]:
    """Figures 8 to 10: higher heterogeneity, Dissensus."""
    eight = "Figure 8 (CIFAR-10, higher heterogeneity)"
    panels = [
        _panel(
            f"cifar10-alpha{a}-s{s}",
            eight,
            f"n = 20, b = 3, s = {s}, α = {a}",
            "cifar10-20",
            pull=s,
            partition=f"dirichlet({a})",
        )
        for a, s in product((0.5, 1), (6, 19))
    ]
    both: tuple[Measure, ...] = ("mean", "worst")
    for (steps, number), measure, s in product(((1, 9), (3, 10)), both, (6, 10)):
        figure = f"Figure {number} (CIFAR-10, Dissensus, {steps} local step{'s' * (steps > 1)})"
        title = f"{'average' if measure == 'mean' else 'worst'}, n = 20, b = 3, s = {s}"
        title += f", {_THREE}" * (steps == 3)
        panels.append(
            _panel(
                f"cifar10-dissensus-local{steps}-{measure}-s{s}", figure, title, "cifar10-20", measure,
                "dissensus", pull=s, partition="dirichlet(1)", local_steps=steps,
            )
        )  # fmt: skip
    return panels


def _others() -> list[Panel]:
    """Figures 11 to 21, one panel each."""
    cifar, femnist = "CIFAR-10, n = 20", "FEMNIST, n = 30"
    rows: list[tuple[str, str, str, dict[str, Any]]] = [
        ("mnist-100-b8", "MNIST, n = 100, b = 8, s = 15", "mnist-100", {"byzantine": 8, "b_hat": None}),
        ("mnist-30-b5", "MNIST, n = 30, b = 5, s = 15", "mnist-30", {"byzantine": 5}),
        ("cifar10-b2-s6", f"{cifar}, b = 2, s = 6", "cifar10-20", {"byzantine": 2}),
        ("cifar10-b2-s19", f"{cifar}, b = 2, s = 19", "cifar10-20", {"byzantine": 2, "pull": 19}),
    ]
    for s in (6, 10, 19):
        changes = {"pull": s, "local_steps": 3}
        rows.append((f"cifar10-local3-s{s}", f"{cifar}, b = 3, s = {s}, {_THREE}", "cifar10-20", changes))
    for b, steps in product((0, 3), (1, 3)):
        title = f"{femnist}, b = {b}, s = 6" + (f", {_THREE}" if steps == 3 else "")
        rows.append(
            (f"femnist-b{b}-local{steps}", title, "femnist-30", {"byzantine": b, "local_steps": steps})
        )
    return [
        _panel(name, f"Figure {number} ({title.partition(',')[0]})", title, preset, **changes)
        for number, (name, title, preset, changes) in enumerate(rows, 11)
    ]


PANELS: tuple[Panel, ...] = (*_main(), *_comparisons(), *_cifar10(), *_others())
"""The paper's sixty panels in its order."""


# --- beyond the paper ---------------------------------------------------------------------------------------

_QUIET = {"byzantine": 0, "attack": "none"}
_GRAPHS = {**{label: name for label, name in RIVALS.items() if name != "rpel"}, "RTC": "rtc"}
_WARM_UP = {"": {}, ", warm-up": {"lr": ((10, 0.1), (200, 0.5))}}


def _beyond(name: str, title: str, curves: Mapping[str, Mapping[str, Any]], kind: Kind = "accuracy") -> Panel:
    """A curve for each label: mnist-30, and what differs from it."""
    made = tuple(Curve(label, "mnist-30", changes) for label, changes in curves.items())
    return Panel(f"extra-{name}", "Beyond the paper", title, kind, made)


def _swept(name: str, title: str, xlabel: str, points: Mapping[int, Mapping[str, Any]]) -> Panel:
    """A line under ALIE and one under FOE, a point for each value."""
    curves = tuple(
        Curve(
            label, "mnist-30", {**changes, "attack": "none" if changes.get("byzantine") == 0 else attack}, x=x
        )
        for label, attack in (("ALIE", "alie"), ("FOE", "foe"))
        for x, changes in points.items()
    )
    return Panel(f"extra-{name}", "Beyond the paper", title, "final", curves, xlabel=xlabel)


EXTRAS: tuple[Panel, ...] = (
    _swept(
        "pull", "sensitivity to s: n = 30, b = 6, b̂ = min(6, ⌊s/2⌋)", "pulled peers s",
        # below s = 12 the plan's b_hat = 6 is no minority: the largest that is one is taken
        {s: {"pull": s, "b_hat": min(6, s // 2)} for s in (4, 6, 8, 10, 12, 15, 20, 29)},
    ),
    _swept(
        "b-hat", "a wrong b̂: n = 30, b = 6, s = 15", "b̂ that the nodes assume",
        {k: {"b_hat": k} for k in range(8)},
    ),
    _swept(
        "breakdown", "breakdown: n = 30, plan fixed at s = 15, b̂ = 6", "nodes that are really hostile",
        {b: {"byzantine": b, "b_hat": 6} for b in range(0, 15, 2)},
    ),
    _beyond(
        "cost", "cost of robustness: n = 30, s = 15, nobody attacks",
        {f"RPEL, b̂ = {k}": {**_QUIET, "b_hat": k} for k in (0, 3, 6)}
        | {"push, plain mean": {**_QUIET, "method": "el-local", "b_hat": 0}},
    ),
    _beyond(
        "strongest", "adaptive attacks: n = 30, b = 6, s = 15",
        {"ALIE, z = 1.5": {"attack": "alie"}}
        | {
            f"strongest {label}": {"attack": f"strongest(of={name})"}
            for label, name in (("ALIE", "alie"), ("FOE", "foe"), ("IPM", "ipm"), ("Dissensus", "dissensus"))
        },
    ),
    _beyond(
        "stragglers", "stragglers and silent adversaries: n = 30, b = 6, s = 18",
        # s = 18 = 3 b_hat: a round still aggregates when every hostile peer stays silent
        {
            "all answer, ALIE": {"pull": 18},
            "10 % late, ALIE": {"pull": 18, "no_show": 0.1},
            "20 % late, ALIE": {"pull": 18, "no_show": 0.2},
            "hostile silent": {"pull": 18, "silent": True},
            "hostile silent, 10 % late": {"pull": 18, "silent": True, "no_show": 0.1},
        },
    ),
    _beyond(
        "bytes", "accuracy against bytes: n = 30, b = 6, ALIE",
        {f"RPEL, s = {s}": {"pull": s} for s in (12, 15)}
        | {"all-to-all": {"method": "all-to-all", "pull": 29}}
        | {f"{label}, s = 15": {"method": name} for label, name in _GRAPHS.items()},
        "bytes",
    ),
    _beyond(
        "everybody", "pulling everybody: n = 30, b = 6, ALIE, with and without a warm-up",
        # is pulling some as good as pulling everybody? at this rate a start with too large steps hides the
        # answer
        {
            f"s = {s}{words}": {"pull": s, "attack": "alie", **rate}
            for (words, rate), s in product(_WARM_UP.items(), (15, 29))
        },
    ),
)  # fmt: skip
"""Sensitivity to s and b_hat, breakdown, the cost of robustness, adaptive attacks, stragglers, bytes,
all-to-all."""


# --- by name ------------------------------------------------------------------------------------------------


def everything() -> tuple[Panel, ...]:
    """Return the paper's panels, then those beyond it."""
    return PANELS + EXTRAS


def find(name: str) -> Panel:
    """Return the panel of that name.

    >>> find("mnist-lef")
    Traceback (most recent call last):
    ValueError: unknown panel 'mnist-lef'; did you mean 'mnist-left'? (rpel reproduce --list shows all)
    """
    known = {panel.name: panel for panel in everything()}
    if name not in known:
        words = unknown("panel", name, [*known, "all", "extra"])
        raise ValueError(f"{words} (rpel reproduce --list shows all)")
    return known[name]


def chosen(names: Iterable[str]) -> list[Panel]:
    """Return the panels of these names, each once; "all" is the paper, "extra" what goes beyond it.

    >>> len(chosen(["all", "mnist-left"]))
    60
    """
    groups = {"all": PANELS, "extra": EXTRAS}
    panels = [panel for name in names for panel in (groups[name] if name in groups else (find(name),))]
    return list({panel.name: panel for panel in panels}.values())


@cache
def _rounds() -> dict[tuple[int, int, int | None], dict[str, int]]:
    """Return the rounds of the panels' runs by (nodes, byzantine, pull) and data set."""
    rounds: dict[tuple[int, int, int | None], dict[str, int]] = {}
    for spec in (curve.spec() for panel in everything() for curve in panel.curves):
        rounds.setdefault((spec.nodes, spec.hostile_count, spec.pull), {})[spec.dataset] = spec.rounds
    return rounds


def stamp(spec: Request) -> str:
    """Compare a run's rounds with those of the paper's runs of the same nodes, byzantine and pull.

    >>> spec = load("mnist-30")
    >>> [stamp(run) for run in (spec, spec.replace(rounds=60), spec.replace(dataset="mnist-sample"))]
    ['', '30 % of the rounds', 'SMOKE']
    """
    rounds = _rounds().get((spec.nodes, spec.hostile_count, spec.pull), {})
    if rounds and spec.dataset == "mnist-sample":
        return "SMOKE"
    whole = rounds.get(spec.dataset, 0)
    return f"{100 * spec.rounds / whole:.3g} % of the rounds" if spec.rounds < whole else ""


# --- at a scale ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """The part of a panel to make: curves under these attacks and methods, these seeds, evaluated this often.

    What is left out is the panel's own. part: how much of the paper's rounds a short run makes.
    """

    attacks: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: str | None = None
    eval_every: int | None = None
    part: float | None = None

    def curves(self, panel: Panel) -> tuple[Curve, ...]:
        """Return the panel's curves that are wanted; ValueError if it has none of them.

        >>> [curve.label for curve in Selection(attacks=["alie", "sf"]).curves(find("cifar10-left"))]
        ['SF', 'ALIE']
        >>> Selection(attacks=["dissensus"]).curves(find("cifar10-left"))
        Traceback (most recent call last):
        ValueError: cifar10-left has no curve under 'dissensus': it has alie, foe, sf
        """
        from rpel.attacks import attack

        wanted = {attack(name).name for name in self.attacks}
        curves = []
        for curve in panel.curves:
            spec = curve.spec()
            under = not wanted or attack(spec.attack).name in wanted
            if under and (not self.methods or spec.method in self.methods):
                curves.append(curve)
        if panel.curves and not curves:
            asked, key = (self.methods, "method") if self.methods else (self.attacks, "attack")
            has = sorted({str(getattr(curve.spec(), key)) for curve in panel.curves})
            raise ValueError(
                f"{panel.name} has no curve under {', '.join(map(repr, asked))}: it has {', '.join(has)}"
            )
        return tuple(curves)


@dataclass(frozen=True)
class Sized:
    """A panel at some scale: the cells of its curves, one a seed, and what the figure says about it."""

    panel: Panel
    scale: Scale
    cells: tuple[Cell, ...]
    note: str

    @property
    def stamp(self) -> str:
        """What is written over the curves."""
        if self.panel.kind == "fraction":
            return "SMOKE" if self.scale is Scale.SMOKE else ""
        return next((stamp(cell.spec) for cell in self.cells if cell.spec), "")


def sized(panel: Panel, scale: Scale, selection: Selection | None = None, **where: Any) -> Sized:
    """Return the panel's runs at this scale; ``where`` are fields without meaning: data_dir, threads."""
    selection = selection or Selection()
    part = selection.part
    if part is not None and (scale is not Scale.SHORT or not 0 < part <= 1):
        raise ValueError(
            f"part {part:g} is not valid: it takes a share of the rounds such as 0.1, with scale short"
        )
    curves = selection.curves(panel)
    seeds = selection.seeds or (panel.seeds if scale is Scale.FULL else "0")
    often = {} if selection.eval_every is None else {"eval_every": selection.eval_every}
    cells: list[Cell] = []
    for curve in curves:
        spec = resized(curve.spec(), scale, part).replace(**where, **often, seeds=seeds)
        cells += seeded(Cell({"panel": panel.name, "curve": curve.label, "x": curve.x}, spec))
    note = _note(panel, scale, cells, len(curves)) if curves else FRACTION_NOTE
    only = f"; {', '.join(curve.label for curve in curves)} only" if len(curves) < len(panel.curves) else ""
    only += f"; seed {', '.join(map(str, parse_seeds(seeds)))}" if selection.seeds else ""
    return Sized(panel, scale, tuple(cells), note + only)


FRACTION_NOTE = "5 simulations a point (lowest to highest), dots: the exact median"


def resized(spec: Request, scale: Scale, part: float | None = None) -> Request:
    """Return the same run at another scale."""
    if scale is Scale.SMOKE:
        name = spec.name.replace(spec.dataset, "smoke", 1)
        return spec.replace(**SMOKE, lr=spec.rate(1), name=name, data_dir=None)
    if scale is Scale.SHORT:
        return shortened(spec, part or SHORTER[spec.dataset]).replace(name=f"short-{spec.name}")
    return spec


def shortened(spec: Request, part: float) -> Request:
    """Return the same run with a part of its rounds: b_hat as planned for all, the schedule shortened alike.

    >>> short = shortened(load("cifar10-20"), 0.1)
    >>> short.rounds, short.lr, short.b_hat, short.eval_every
    (200, 'steps(50:0.5, 100:0.1, 150:0.02, 200:0.004)', 3, 34)
    """
    from rpel.simulation.methods import resolve

    rounds, pieces = max(1, round(part * spec.rounds)), Rate.of(spec.lr).pieces
    lr = [(round(part * last), rate) for last, rate in pieces] or spec.lr
    return resolve(spec).spec.replace(rounds=rounds, lr=lr, eval_every=-(-rounds // EVALUATIONS))


def _note(panel: Panel, scale: Scale, cells: Sequence[Cell], curves: int) -> str:
    """Return one line for the figure."""
    made, paper = cells[0].spec, panel.curves[0].spec()
    assert made is not None
    seeds, all_seeds = len(cells) // curves, len(parse_seeds(panel.seeds))
    shown = f"{seeds} of {all_seeds} seeds" if seeds < all_seeds else f"{seeds} seeds"
    if scale is Scale.SMOKE:
        data = {"mnist": "all of MNIST", "cifar10": "CIFAR-10", "femnist": "FEMNIST"}[paper.dataset]
        size = f"{made.rounds} rounds, {count(seeds, 'seed')}"
        return f"SMOKE: a sample of MNIST instead of {data}, a small network, {size}"
    if scale is Scale.SHORT:
        return f"SHORT: {made.rounds} of {paper.rounds} rounds, {shown}"
    return f"{paper.rounds} rounds, {shown}, bands from lowest to highest"


# --- made ---------------------------------------------------------------------------------------------------


class Reproduction:
    """Panels at one scale: their study, and the files of those whose runs are done."""

    def __init__(
        self, names: Sequence[str], scale: str, out: str | Path, jobs: int | None = None, *,
        selection: Selection | None = None, data_dir: str | None = None, threads: int | None = None,
        style: plots.Style = "screen", **options: Any,
    ) -> None:  # fmt: skip
        """Find the panels and check their runs; ValueError if none of them can be made.

        Args:
            names: panels; "all": the paper's sixty; "extra": those beyond it.
            scale: smoke, short or full.
            out: the folder for figures, numbers and runs.
            jobs, options: as for `Study`.
            selection: the part of the panels to make.
            data_dir, threads: as for a run.
            style: the look of figures.
        """
        scales = [one.value for one in Scale]
        if scale not in scales:
            raise ValueError(unknown("scale", scale, scales))
        if not names:
            raise ValueError("name a panel, or all: rpel reproduce --list shows the names")
        self.out, self.scale, self.style = Path(out), Scale(scale), style
        self.panels: dict[str, Sized] = {}
        self.missing: dict[str, str] = {}
        for panel in chosen(names):
            try:
                where = {"data_dir": data_dir, "threads": threads}
                self.panels[panel.name] = sized(panel, self.scale, selection, **where)
            except ValueError as error:
                self.missing[panel.name] = str(error)
        if not self.panels:
            raise ValueError(next(iter(self.missing.values())))
        cells = [cell for one in self.panels.values() for cell in one.cells]
        fractions = any(one.panel.kind == "fraction" for one in self.panels.values())
        self.study = Study(cells, out, jobs, together=not fractions, **options)
        self.made: dict[str, dict[str, Any]] = {}

    def run(self, watch: Callable[[Study], None] = lambda study: None) -> list[dict[str, Any]]:
        """Run what is missing, write each panel when its runs are there; return the entries of the index."""

        def write(study: Study) -> None:
            watch(study)
            for name in [*self.panels.keys() - self.made.keys() - self.missing.keys()]:
                jobs = [job for cell, job in study.cells if cell.labels["panel"] == name]
                if all(job.status == "done" for job in jobs):
                    self.made[name] = self._write(self.panels[name])
                elif failed := [job.error for job in jobs if job.status == "failed"]:
                    self.missing[name] = failed[0]

        self.study.run(write)
        numbers = {one.panel.number for one in self.panels.values()}
        for number in sorted(numbers, key=[panel.number for panel in everything()].index):
            self._write_together(number)
        return [self.made[name] for name in self.panels if name in self.made]

    def _write(self, one: Sized) -> dict[str, Any]:
        """Write NAME.csv, NAME.svg, NAME.png (NAME.pdf for a paper) and the entry of the index."""
        panel, results = one.panel, self.study.results.where(panel=one.panel.name)
        table = fractions(panel) if panel.kind == "fraction" else curve_table(panel, results)
        write_text(self.out / f"{panel.name}.csv", table.to_csv(index=False))
        save(panel, self._read(panel.name), one.note, self.out / panel.name, one.stamp, self.style)
        runs = dict.fromkeys(result.run.path for result in results if result.run and result.run.path)
        entry = {
            **{key: getattr(panel, key) for key in ("name", "figure", "title")},
            "scale": one.scale.value, "note": one.note, "stamp": one.stamp,
            "files": [f"{panel.name}.{suffix}" for suffix in ("csv", "svg", "png")],
            "runs": [path.relative_to(self.out).as_posix() for path in runs],
        }  # fmt: skip
        entries = {old["name"]: old for old in self._index()} | {panel.name: entry}
        text = json.dumps(list(entries.values()), indent=2, ensure_ascii=False)
        write_text(self.out / "index.json", text + "\n")
        return entry

    def _index(self) -> list[dict[str, Any]]:
        path = self.out / "index.json"
        entries: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.is_file() else []
        return entries

    def _read(self, name: str) -> "DataFrame":
        import pandas

        return pandas.read_csv(self.out / f"{name}.csv")

    def _write_together(self, number: str) -> None:
        """Write the paper's figure with several panels, from those of this scale that are there."""
        together = [panel for panel in PANELS if panel.number == number]
        there = {entry["name"]: entry for entry in self._index() if entry["scale"] == self.scale}
        tables = {p.name: self._read(p.name) for p in together if p.name in there}
        if len(together) > 1 and tables:
            notes, stamps = ({name: there[name][key] for name in tables} for key in ("note", "stamp"))
            note = "; ".join(dict.fromkeys(notes.values()))
            save_together(together, tables, note, self.out / number, stamps, self.style)


def curve_table(panel: Panel, results: Results) -> "DataFrame":
    """Return the evaluated rounds of a panel's runs; of a final panel the last ones."""
    import pandas

    columns = ("round", "accuracy_mean", "accuracy_worst", "accuracy_lowest", "bytes")
    tables = []
    for result in results:
        assert result.run is not None
        table = result.run.curve[[*columns]]
        table = table[-1:] if panel.kind == "final" else table
        name = result.run.path.name if result.run.path else ""
        labels = {key: result.labels[key] for key in ("curve", "x", "seed")}
        tables.append(table.assign(**labels, run=name)[[*labels, *columns, "run"]])
    return pandas.concat(tables, ignore_index=True).astype({"bytes": int})


def fractions(panel: Panel) -> "DataFrame":
    """Return Figure 3: the largest hostile count of five simulations (Algorithm 2), beside the exact law."""
    import pandas

    rows = []
    for share in SHARES:
        b = panel.nodes * share // 100
        exact = quantiles(panel.nodes, b, SIMULATED_ROUNDS, PULLS, [0.5, 0.99])
        for s, median, high in zip(PULLS, *exact.tolist(), strict=True):
            seen = simulate_max(panel.nodes, b, s, SIMULATED_ROUNDS, simulations=SIMULATIONS, seed=b)
            ends = dict(zip(("mean", "low", "high"), spread([k / (s + 1) for k in seen]), strict=True))
            row = {"curve": f"{share} % hostile", "nodes": panel.nodes, "byzantine": b, "pull": s, **ends}
            row |= {"exact_median": median / (s + 1), "b_hat_median": median, "b_hat_99": high}
            rows.append(row | {f"simulation_{i}": k for i, k in enumerate(seen, 1)})
    return pandas.DataFrame(rows)


# --- pictures -----------------------------------------------------------------------------------------------


def save(
    panel: Panel, table: "DataFrame", note: str, stem: Path, stamp: str = "", style: plots.Style = "screen"
) -> None:
    """Draw one panel to STEM.svg and STEM.png, for a paper also to STEM.pdf."""
    figure, ((axes,),) = plots.canvas(6.4, 4.4)
    _draw(axes, panel, table, stamp)
    figure_number = "" if panel.name.startswith("extra-") else panel.figure.partition(" (")[0] + ": "
    axes.set_title(figure_number + panel.title, fontsize=11)
    axes.legend(frameon=False, fontsize=9, ncols=2 if panel.kind == "fraction" else 1)
    figure.supxlabel(note, fontsize=8, color=plots.SOFT)
    plots.save_all(figure, stem, style)


def save_together(
    panels: Sequence[Panel], tables: "Mapping[str, DataFrame]", note: str, stem: Path,
    stamps: Mapping[str, str], style: plots.Style = "screen",
) -> None:  # fmt: skip
    """Draw a figure in the paper's arrangement; a panel without numbers stays empty and says so."""
    columns = COLUMNS[int(panels[0].number.rpartition("-")[2])]
    lines = -(-len(panels) // columns)
    figure, grid = plots.canvas(3.9 * columns, 3.1 * lines + 0.8, lines, columns, sharey=True)
    labelled: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=True):
        axes.set_title(panel.title, fontsize=10)
        if panel.name not in tables:
            axes.set_axis_off()
            place: dict[str, Any] = {"ha": "center", "va": "center", "transform": axes.transAxes}
            axes.text(0.5, 0.5, "not run yet", color=plots.SOFT, **place)
            continue
        _draw(axes, panel, tables[panel.name], stamps[panel.name])
        axes.label_outer()
        labelled |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.suptitle(panels[0].figure)
    place = {"loc": "outside lower center", "ncols": len(labelled), "frameon": False, "title": note}
    key = figure.legend(labelled.values(), labelled, **place)
    key.get_title().set(fontsize=8, color=plots.SOFT)
    plots.save_all(figure, stem, style)


def _draw(axes: "Axes", panel: Panel, table: "DataFrame", stamp: str) -> None:
    plots.stamp(axes, stamp)
    if panel.kind == "fraction":
        _draw_fractions(axes, table)
    elif panel.kind == "final":
        plots.curves(axes, table.assign(round=table["x"]), ("accuracy_mean", "accuracy_worst"))
        plots.explain(axes, ("mean of the honest nodes", "worst node"))
        axes.set(xlabel=panel.xlabel, ylabel="test accuracy after the last round", ylim=(0, 1.02))
    else:
        against_bytes = panel.kind == "bytes"
        plots.curves(
            axes, table, [panel.column], "bytes" if against_bytes else "round", 1e9 if against_bytes else 1
        )
        who = "mean of honest nodes" if panel.measure == "mean" else "node that ends lowest"
        xlabel = "gigabytes sent by all nodes" if against_bytes else "round"
        axes.set(xlabel=xlabel, ylabel=f"test accuracy, {who}", ylim=(0, 1.02))


def _draw_fractions(axes: "Axes", table: "DataFrame") -> None:
    for colour, (label, mine) in zip(plots.COLOURS, table.groupby("curve", sort=False), strict=False):
        axes.plot(mine["pull"], mine["mean"], color=colour, label=label)
        axes.fill_between(mine["pull"], mine["low"], mine["high"], color=colour, alpha=0.2, linewidth=0)
        axes.plot(mine["pull"], mine["exact_median"], "o", color=colour, markersize=3)
    axes.axhline(0.5, color=plots.INK, linestyle="--", linewidth=1, label="one half")
    axes.set(xlabel="pulled peers s", ylabel="effective adversarial fraction b̂ / (s+1)", ylim=(0, 1))
