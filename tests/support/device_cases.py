"""Every rule, attack and method once, as small specifications for the checks of the torch backend."""

from dataclasses import replace
from typing import Any

import numpy as np

from rpel import data
from rpel.attacks import ATTACKS
from rpel.backend.tensors import Torch
from rpel.models import model
from rpel.rules.registry import RULES
from rpel.simulation.build import build_task
from rpel.simulation.inputs import Gathered
from rpel.simulation.methods import METHODS, Resolved, resolve
from rpel.spec import Request
from rpel.tasks import Classification

Fields = dict[str, Any]
BEFORE = ("nnm", "bucketing", "clipping", "arc")
SMALL: Fields = {
    "model": "linear", "dataset": "mnist-sample-8x8", "nodes": 12, "byzantine": 2, "pull": 9, "rounds": 20,
    "eval_every": 100, "eval_size": 50, "batch_size": 5, "threads": 1, "attack": "alie",
}  # fmt: skip
NETWORK = "C(4)-R-B-M-D-L(10)-S"
PRIVATE = "C(4)-R-M-D-L(10)-S"
PARAMETERS = {
    "stale": "(delay=2)", "strongest": "(of=alie+spectral, evaluations=4)", "min_sum": "(direction=unit)",
    "min_max": "(direction=sign, a=0.9)", "alie": "(z=max)",
}  # fmt: skip
"""min_max with a = 1 makes two distances equal, so rounding alone would decide who is a neighbour."""


def cases() -> dict[str, Fields]:
    """By name, what differs from SMALL."""
    rules = [name for name in RULES if name not in BEFORE and not _needs_graph(name)]
    rules = [*rules, *(f"{name}+median" for name in BEFORE), "nnm+krum", "nnm+trimmed_mean"]
    actual: dict[str, Fields] = {f"rule-{name}": {"rule": name} for name in rules}
    actual["rule-bulyan"]["pull"] = 10
    actual |= {f"attack-{name}": {"attack": f"{name}{PARAMETERS.get(name, '')}"} for name in ATTACKS}
    actual |= {f"method-{name}": {"method": name, **_own_pull(name)} for name in METHODS}
    actual |= {
        "wire-int8": {"wire": "int8"}, "no-show": {"no_show": 0.2},
        "consistent": {"attack": "strongest(evaluations=4, consistent=true)"},
        "adamw": {"optimizer": "adamw", "lr": 0.01}, "outer": {"outer": "nesterov"},
        "uniform": {"output": "uniform"}, "local-steps": {"local_steps": 2},
        "exposed": {"attack": "alie(targeting=most-exposed)"}, "network-many": {"model": NETWORK},
        "network-alone": {"model": NETWORK},
        "asynchronous": {"timing": "asynchronous(speeds=lognormal(0.5))"},
        "asynchronous-fang": {
            "timing": "asynchronous(speeds=stragglers(0.3, 3))", "attack": "fang", "outer": "nesterov",
        },
        "asynchronous-adamw": {"timing": "asynchronous(speeds=lognormal(0.5))", "optimizer": "adamw",
            "lr": 0.01},
        "private": {"privacy": "dp(clip=0.5, noise=1, delta=1e-3)"},
        "clipped-alone": {"model": PRIVATE, "privacy": "dp(clip=0.5)"},
    }  # fmt: skip
    return actual


def _needs_graph(name: str) -> bool:
    from rpel.rules import rule

    made = rule(name, **({"f": 1} if name not in ("gossip", "clipped_gossip_oracle") else {}))
    return bool(getattr(made, "on_graph", False))


def _own_pull(name: str) -> Fields:
    return (
        {"pull": None}
        if name in ("all-to-all", "nna")
        else {"nodes": 12, "pull": 6}
        if name == "el-oracle"
        else {}
    )


def resolved(fields: Fields, **more: Any) -> Resolved:
    """The specification of a case."""
    given = {**SMALL, **fields, **more}
    return resolve(Request(**{key: value for key, value in given.items() if value is not None}))


def task_of(run: Resolved, arrays: Torch | None = None) -> Classification:
    """The task of a case, on the host or where these arrays are; cases that train alike share one."""
    spec = run.spec
    shared = spec.attack if run.attack.trains else None
    key = (arrays is None, spec.dataset, spec.model, spec.nodes, shared)
    if key not in _tasks:
        _tasks[key] = _made(run, arrays)
    return _tasks[key]


_tasks: dict[Any, Classification] = {}


def _made(run: Resolved, arrays: Torch | None) -> Classification:
    spec = run.spec
    dataset = data.load(spec.dataset)
    inputs = Gathered(dataset, model(spec.model, dataset.shape, dataset.classes, seed=0), None)
    chosen = spec.replace(backend="torch" if arrays else "numba")
    return build_task(replace(run, spec=chosen), inputs, arrays)


def largest(x: Any) -> float:
    """The largest entry that is finite."""
    values = np.abs(np.asarray(x, np.float64))
    return float(values[np.isfinite(values)].max(initial=0.0))
