"""Panels beyond the paper, on its MNIST setting with n = 30 and b = 6: what its readers asked for.

How much do s and a wrong b_hat matter, when does it break, what does robustness cost when nobody attacks, what do
attackers reach that search for their best factor, what if peers are late or silent, and what does a byte buy?
"""

from collections.abc import Iterable
from typing import Any

from rpel.experiments.panels import RIVALS, Curve, Kind, Panel

_PRESET = "mnist-30"


def _panel(name: str, title: str, curves: Iterable[Curve], kind: Kind = "accuracy", xlabel: str = "") -> Panel:
    return Panel(f"extra-{name}", "Beyond the paper", title, kind, tuple(curves), xlabel=xlabel)


def _swept(points: Iterable[tuple[float, dict[str, Any]]]) -> list[Curve]:
    """A line under ALIE and one under FOE, a point for each value."""
    return [
        Curve(label, _PRESET, {**changes, "attack": "none" if changes.get("byzantine") == 0 else attack}, x=x)
        for label, attack in (("ALIE", "alie"), ("FOE", "foe"))
        for x, changes in points
    ]


def _pull() -> Panel:
    """Below s = 12 the plan's b_hat = 6 is no minority: the largest that is one is taken."""
    points = [(s, {"pull": s, "b_hat": min(6, s // 2)}) for s in (4, 6, 8, 10, 12, 15, 20, 29)]
    title = "sensitivity to s: n = 30, b = 6, b̂ = min(6, ⌊s/2⌋)"
    return _panel("pull", title, _swept(points), "final", "pulled peers s")


def _b_hat() -> Panel:
    points = [(k, {"b_hat": k}) for k in range(8)]
    return _panel("b-hat", "a wrong b̂: n = 30, b = 6, s = 15", _swept(points), "final", "b̂ that the nodes assume")


def _breakdown() -> Panel:
    points = [(b, {"byzantine": b, "b_hat": 6}) for b in range(0, 15, 2)]
    title = "breakdown: n = 30, plan fixed at s = 15, b̂ = 6"
    return _panel("breakdown", title, _swept(points), "final", "nodes that are really hostile")


def _cost() -> Panel:
    quiet = {"byzantine": 0, "attack": "none"}
    curves = [Curve(f"RPEL, b̂ = {k}", _PRESET, {**quiet, "b_hat": k}) for k in (0, 3, 6)]
    curves.append(Curve("push, plain mean", _PRESET, {**quiet, "method": "el-local", "b_hat": 0}))
    return _panel("cost", "cost of robustness: n = 30, s = 15, nobody attacks", curves)


def _strongest() -> Panel:
    fixed = [Curve("ALIE, z = 1.5", _PRESET, {"attack": "alie"})]
    searched = [
        Curve(f"strongest {label}", _PRESET, {"attack": "strongest", "attack_params": {"of": name}})
        for label, name in (("ALIE", "alie"), ("FOE", "foe"), ("IPM", "ipm"), ("Dissensus", "dissensus"))
    ]
    return _panel("strongest", "adaptive attacks: n = 30, b = 6, s = 15", fixed + searched)


def _stragglers() -> Panel:
    """s = 18 = 3 b_hat: a round still aggregates when every hostile peer stays silent."""
    settings: dict[str, dict[str, Any]] = {
        "all answer, ALIE": {},
        "10 % late, ALIE": {"no_show": 0.1},
        "20 % late, ALIE": {"no_show": 0.2},
        "hostile silent": {"silent": True},
        "hostile silent, 10 % late": {"silent": True, "no_show": 0.1},
    }
    curves = [Curve(label, _PRESET, {"pull": 18, **changes}) for label, changes in settings.items()]
    return _panel("stragglers", "stragglers and silent adversaries: n = 30, b = 6, s = 18", curves)


def _bytes() -> Panel:
    sizes = [Curve(f"RPEL, s = {s}", _PRESET, {"pull": s}) for s in (12, 15)]
    everybody = [Curve("all-to-all", _PRESET, {"method": "all-to-all", "pull": 29})]
    graphs = {**{label: name for label, name in RIVALS.items() if name != "rpel"}, "RTC": "rtc"}
    fixed = [Curve(f"{label}, s = 15", _PRESET, {"method": name}) for label, name in graphs.items()]
    return _panel("bytes", "accuracy against bytes: n = 30, b = 6, ALIE", sizes + everybody + fixed, "bytes")


EXTRAS: tuple[Panel, ...] = (_pull(), _b_hat(), _breakdown(), _cost(), _strongest(), _stragglers(), _bytes())
