"""The same panels at the size of one's machine: smoke, short, full.

Invariants: full is the paper's sizes and seeds, unchanged; short keeps data, network and plan and shortens the
schedule; smoke keeps who talks to whom and replaces what is learned, so it shows that everything works and nothing
else. What was changed is said on the figure, and a run carries its scale: wherever it goes, nobody takes it for the
paper's.
"""

from dataclasses import dataclass
from typing import Any

from rpel.config.spec import Spec
from rpel.config.values import parse_seeds
from rpel.errors import nearest
from rpel.experiments.panels import Panel
from rpel.simulation.methods import settle
from rpel.types import Scale

_SMOKE: dict[str, Any] = {
    "dataset": "mnist-sample", "model": "mlp", "rounds": 10, "batch_size": 10, "eval_every": 2, "eval_size": 200,
    "checkpoint_every": 0,
}  # fmt: skip
_SHORTER = {"mnist": 0.3, "cifar10": 0.1, "femnist": 0.1}
"""The part of the paper's rounds that a short run makes."""
_POINTS = 6
"""Evaluations of a short run, the last on all test images; on CIFAR-10 each of the others costs ten rounds."""


@dataclass(frozen=True)
class Sized:
    """A panel at some scale: for each of its curves the runs, one a seed; and what the figure says about it."""

    panel: Panel
    scale: Scale
    runs: tuple[tuple[Spec, ...], ...]
    note: str


def scale_named(name: str) -> Scale:
    """The scale of that name.

    >>> scale_named("smok")
    Traceback (most recent call last):
    ValueError: scale 'smok' is unknown: the nearest is 'smoke' (of smoke, short, full)
    """
    names = [scale.value for scale in Scale]
    if name not in names:
        raise ValueError(f"scale {name!r} is unknown: {nearest(name, names)}")
    return Scale(name)


def sized(panel: Panel, scale: Scale, part: float | None = None, **where: Any) -> Sized:
    """The panel's runs at this scale; ``where`` are fields without meaning: out, data_dir, threads, device.

    part: how much of the paper's rounds a short run makes; without it .3 for MNIST and .1 for the larger data sets.
    """
    if part is not None and (scale is not Scale.SHORT or not 0 < part <= 1):
        raise ValueError(f"part {part:g} is not valid: it takes a share of the rounds such as 0.1, with scale short")
    specs = [curve.spec() for curve in panel.curves]
    seeds = parse_seeds(panel.seeds) if scale is Scale.FULL else [0]
    resized = [_resized(spec, scale, part).but(**where) for spec in specs]
    runs = tuple(tuple(spec.but(seed=seed, seeds=None) for seed in seeds) for spec in resized)
    return Sized(panel, scale, runs, _note(panel, scale, specs, resized))


def _resized(spec: Spec, scale: Scale, part: float | None) -> Spec:
    if scale is Scale.SMOKE:
        rate = spec.rate(1)
        return spec.but(**_SMOKE, lr=rate, scale=scale, name=spec.name.replace(spec.dataset, "smoke", 1), data_dir=None)
    if scale is Scale.SHORT:
        return shortened(spec, part or _SHORTER[spec.dataset]).but(name=f"short-{spec.name}", scale=scale)
    return spec


def shortened(spec: Spec, part: float) -> Spec:
    """The same run with a part of its rounds: b_hat as planned for all of them, the steps of the schedule moved along.

    >>> from rpel.config.spec import load
    >>> short = shortened(load("cifar10-20"), 0.1)
    >>> short.rounds, short.lr, short.b_hat, short.eval_every
    (200, ((50, 0.5), (100, 0.1), (150, 0.02), (200, 0.004)), 3, 34)
    """
    planned = settle(spec)
    rounds = max(1, round(part * spec.rounds))
    lr = spec.lr if isinstance(spec.lr, float) else tuple((round(part * last), rate) for last, rate in spec.lr)
    return planned.but(rounds=rounds, lr=lr, eval_every=-(-rounds // _POINTS))


def _note(panel: Panel, scale: Scale, specs: list[Spec], resized: list[Spec]) -> str:
    """One line for the figure."""
    if panel.kind == "fraction":
        text = "5 simulations a point, bands: 95 %, dots: the exact median"
        return f"SMOKE (here as at full size): {text}" if scale is Scale.SMOKE else text
    meant, made, seeds = specs[0], resized[0], len(parse_seeds(panel.seeds))
    if scale is Scale.SMOKE:
        full = {"mnist": "all of MNIST", "cifar10": "CIFAR-10", "femnist": "FEMNIST"}[meant.dataset]
        return f"SMOKE: a sample of MNIST instead of {full}, a small network, {made.rounds} rounds, 1 seed"
    if scale is Scale.SHORT:
        return f"SHORT: {made.rounds} of {meant.rounds} rounds, 1 of {seeds} seeds"
    return f"{meant.rounds} rounds, {seeds} seeds, bands from lowest to highest"
