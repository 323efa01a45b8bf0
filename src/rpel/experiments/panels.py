"""Panels as data: those of the paper's figures, and some beyond it; which curves,
and which runs behind each of them.

Invariants: a panel says what is run, never how; its runs are a preset's, changed only where the figure's
caption says so, so a curve's run is the one that ``rpel run`` makes; panels that show the same runs (mean and
worst) name them alike, so nothing is run twice. The paper prints no grid for its comparisons;
ours is in docs/results/paper.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import product
from typing import Any, Literal

from rpel.errors import nearest
from rpel.spec import Spec, load

Kind = Literal["accuracy", "fraction", "final", "bytes"]
Measure = Literal["mean", "worst"]


class Scale(StrEnum):
    """The size of a run beside the paper's: smoke shows that it works, short has fewer rounds,
    full is the paper's."""

    SMOKE = "smoke"
    SHORT = "short"
    FULL = "full"

    @property
    def stamp(self) -> str:
        """What is written on a figure: SMOKE, SHORT, or nothing."""
        return "" if self is Scale.FULL else self.value.upper()


SIMULATED_ROUNDS = 200
SIMULATIONS = 5
SHARES = (2, 4, 6, 8, 10)
"""Hostile nodes in percent of all, the curves of Figure 3."""
PULLS = tuple(range(5, 51, 5))


@dataclass(frozen=True)
class Curve:
    """One line of a panel, or one point of it: a label, a preset, what differs from it,
    and where the point stands."""

    label: str
    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    x: float | None = None

    def spec(self) -> Spec:
        """The run behind it, with a name that says what it is; curves with equal runs have equal names.

        >>> Curve("ALIE", "mnist-30", {"byzantine": 5}).spec().name
        'mnist-n30-b5-s15-rpel-alie'
        """
        spec = load(self.preset).replace(**self.changes)
        size = f"n{spec.nodes}-b{spec.byzantine}-s{spec.pull}"
        return spec.replace(name=f"{spec.dataset}-{size}-{spec.method}-{spec.attack}")


@dataclass(frozen=True)
class Panel:
    """One panel.

    kind      accuracy against rounds or bytes, final accuracy against a swept value, or Figure 3's fraction
    measure   mean of the honest nodes, or the node that ends lowest (the paper's "worst")
    seeds     the paper's, "0-1"; nodes: n of a fraction panel; xlabel: what a final panel sweeps
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


COLUMNS = {1: 2, 2: 2, 3: 3, 4: 3, 5: 3, 6: 3, 7: 3, 8: 2, 9: 2, 10: 2}
"""Panels side by side in the paper's figures that have several."""


# --- the parts ----------------------------------------------------------------------------------------------

ATTACKS = {"SF": "sf", "FOE": "foe", "ALIE": "alie"}
RIVALS = {"RPEL": "rpel", "CS+": "cs-plus", "GTS": "gts", "ClippedGossip": "clipped-gossip"}
_THREE = "3 local steps"
_SEEDS = {"mnist-100": "0-1", "mnist-30": "0-1", "cifar10-20": "0-2", "femnist-30": "0-1"}


def attacks(preset: str, **changes: Any) -> tuple[Curve, ...]:
    """RPEL under each of the paper's three attacks; a single curve where nobody attacks."""
    if changes.get("byzantine") == 0:
        return (Curve("no attack", preset, {**changes, "attack": "none"}),)
    return tuple(Curve(label, preset, {**changes, "attack": name}) for label, name in ATTACKS.items())


def rivals(preset: str, attack: str, **changes: Any) -> tuple[Curve, ...]:
    """RPEL and the fixed-graph methods at equal budget; without hostile nodes the attack is none,
    whatever its name."""
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
    """Figures 4 to 7; the paper's bottom-left picture, where RPEL gains most,
    is the sparsest with an attacker."""
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
            f"cifar10-alpha{a}-s{s}", eight, f"n = 20, b = 3, s = {s}, α = {a}", "cifar10-20", pull=s, alpha=a
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
                "dissensus", pull=s, alpha=1.0, local_steps=steps,
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
            f"strongest {label}": {"attack": "strongest", "attack_params": {"of": name}}
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


def find(name: str) -> Panel:
    """The panel of that name.

    >>> find("mnist-lef")
    Traceback (most recent call last):
    ValueError: there is no panel 'mnist-lef'; the nearest is 'mnist-left' (rpel reproduce --list shows all)
    """
    known = {panel.name: panel for panel in everything()}
    if name not in known:
        raise ValueError(
            f"there is no panel {name!r}; {nearest(name, [*known, 'all', 'extra'])} (rpel reproduce --list "
            "shows all)"
        )
    return known[name]


def chosen(names: Iterable[str]) -> list[Panel]:
    """The panels of these names, each once; "all" is the paper, "extra" what goes beyond it.

    >>> len(chosen(["all", "mnist-left"]))
    60
    """
    groups = {"all": PANELS, "extra": EXTRAS}
    panels = [panel for name in names for panel in (groups[name] if name in groups else (find(name),))]
    return list({panel.name: panel for panel in panels}.values())


def everything() -> tuple[Panel, ...]:
    """The paper's panels, then those beyond it."""
    return PANELS + EXTRAS


@cache
def _rounds() -> dict[tuple[int, int, int | None], dict[str, int]]:
    """The rounds of the panels' runs by (nodes, byzantine, pull) and data set."""
    rounds: dict[tuple[int, int, int | None], dict[str, int]] = {}
    for spec in (curve.spec() for panel in everything() for curve in panel.curves):
        rounds.setdefault((spec.nodes, spec.byzantine, spec.pull), {})[spec.dataset] = spec.rounds
    return rounds


def scale_of(spec: Spec) -> Scale:
    """Compare a run with the panels' runs of the same nodes, byzantine and pull.

    >>> spec = load("mnist-30")
    >>> [scale_of(run).value for run in (spec, spec.replace(rounds=60), spec.replace(dataset="mnist-sample"))]
    ['full', 'short', 'smoke']
    """
    rounds = _rounds().get((spec.nodes, spec.byzantine, spec.pull), {})
    if rounds and spec.dataset == "mnist-sample":
        return Scale.SMOKE
    return Scale.SHORT if spec.rounds < rounds.get(spec.dataset, 0) else Scale.FULL
