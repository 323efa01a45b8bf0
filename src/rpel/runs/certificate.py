"""The certificate of a run: what it proves about its sampling, what is known of its rule,
and with what it was made.

"The sampling stayed within the plan" and "the rule survives that many" are two statements;
neither replaces the other.
"""

import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rpel import theory
from rpel.text import count
from rpel.types import Guarantee, Integers
from rpel.version import __version__

_LISTED = 1000
"""So many violations are listed; all are counted."""


class Certificate(dict[str, Any]):
    """What certificate.json holds, as the table it is and, typed, by attributes.

    >>> found = Certificate(held=True, guarantee="plan", plan={"pull": 15, "b_hat": 6}, max_observed=4)
    >>> found["held"], found.held, found.b_hat, found.guaranteed
    (True, True, 6, True)
    """

    @property
    def plan(self) -> dict[str, Any]:
        return dict(self["plan"])

    @property
    def pull(self) -> int:
        return int(self["plan"]["pull"])

    @property
    def b_hat(self) -> int:
        return int(self["plan"]["b_hat"])

    @property
    def fraction(self) -> float:
        return float(self["plan"]["fraction"])

    @property
    def probability(self) -> float:
        return float(self["plan"]["probability"])

    @property
    def confidence(self) -> float:
        return float(self["plan"]["confidence"])

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(self["guarantee"])

    @property
    def guaranteed(self) -> bool:
        """Whether the plan's probability was promised for this run at all; on fixed graphs, for one,
        it is not."""
        return self.guarantee is Guarantee.PLAN

    @property
    def held(self) -> bool:
        return self["held"] is True

    @property
    def max_observed(self) -> int:
        return int(self["max_observed"])

    @property
    def histogram(self) -> tuple[int, ...]:
        return tuple(int(times) for times in self["histogram"])

    @property
    def violations(self) -> tuple[tuple[int, int, int], ...]:
        """(round, node, hostile peers met) of those that are listed."""
        return tuple((int(v["round"]), int(v["node"]), int(v["count"])) for v in self["violations"])

    @property
    def violations_total(self) -> int:
        return int(self["violations_total"])

    @property
    def threads(self) -> int:
        return int(self["threads"])

    @property
    def versions(self) -> dict[str, str]:
        return {str(key): str(value) for key, value in self["versions"].items()}

    @property
    def data(self) -> dict[str, str]:
        return {str(key): str(value) for key, value in self["data"].items()}

    @property
    def privacy(self) -> dict[str, float] | None:
        """ε, its median over nodes, δ and the noise; None where nothing was noisy."""
        spent = self.get("privacy")
        keys = ("epsilon", "epsilon_median", "delta", "noise_multiplier")
        return None if spent is None else {key: float(spent[key]) for key in keys}


def certificate(
    plan: Mapping[str, Any],
    counts: Integers,
    b_hat: int,
    honest: Callable[[int], Integers],
    *,
    seed: int,
    versions: Mapping[str, str],
    threads: int,
    data: Mapping[str, str],
    rule: str = "mean",
    guarantee: Guarantee = Guarantee.PLAN,
    objects: Mapping[str, str] | None = None,
    metrics: Mapping[str, bool] | None = None,
    privacy: Mapping[str, Any] | None = None,
) -> Certificate:
    """What a run proves about its sampling: counts (T, h) of hostile peers against b̂,
    each violation by node and round.

    Where nodes do not aggregate once a round, counts are (T, k, h), −1 where there was no aggregation.

    ``honest(t)`` gives the honest nodes' numbers in round t, in the order of the columns; ``objects`` are
    digests of what the user supplied as objects; ``metrics``, names of the task's, with whether more is
    better; ``privacy`` is what :mod:`rpel.privacy` says of all that others saw, None where nothing was noisy.

    >>> counts, honest = np.array([[1, 0], [3, 1]]), np.array([4, 9])
    >>> found = certificate({}, counts, 2, lambda t: honest, seed=0, versions={}, threads=1, data={})
    >>> found["held"], found["violations"], found["histogram"]
    (False, [{'round': 2, 'node': 4, 'count': 3}], [1, 2, 0, 1])
    """
    places = np.argwhere(counts > b_hat)
    rounds = places[:, 0]
    listed = [
        {"round": t + 1, "node": int(honest(t + 1)[at[-1]]), "count": int(counts[(t, *at)])}
        for t, *at in places[:_LISTED].tolist()
    ]
    return Certificate({
        "plan": dict(plan),
        "guarantee": guarantee.value,
        "held": not len(rounds),
        "rule": {"name": rule, **asdict(survival(rule, int(plan.get("pull", 0)), b_hat))},
        "aggregations": int((counts >= 0).sum()),
        "max_observed": int(counts.max(initial=0)),
        "histogram": np.bincount(counts[counts >= 0]).tolist() if counts.size else [],
        "violations": listed,
        "violations_total": len(rounds),
        "seed": seed,
        "versions": dict(versions),
        "threads": threads,
        "data": dict(data),
        "objects": dict(objects or {}),
        "privacy": None if privacy is None else dict(privacy),
        **({"metrics": dict(metrics)} if metrics else {}),
    })  # fmt: skip


@cache
def _sources() -> str:
    """A digest of rpel's own source files."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def versions(device: str = "cpu", modules: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a result depends on beside its specification and data.

    ``code`` is one digest of all that decides it: rpel's sources, torch, numpy and numba, the class of the
    device, and ``modules``, digests of what runs by ``module:name``. What cannot be seen is not in it: other
    packages, environment variables, files that such a module reads.

    >>> versions()["code"] == versions()["code"], versions()["code"] == versions("cuda")["code"]
    (True, False)
    """
    decides = {"source": _sources()[:12]}
    decides |= {name: importlib.metadata.version(name) for name in ("torch", "numpy", "numba")}
    decides |= {"device": device.partition(":")[0], **(modules or {})}
    code = hashlib.sha256(json.dumps([_sources(), sorted(decides.items())]).encode()).hexdigest()
    others = {"python": platform.python_version(), "scipy": importlib.metadata.version("scipy")}
    return {"rpel": __version__, "code": code, **decides, **others, "processor": _processor()}


_DO_NOT_DECIDE = ("rpel", "code", "python", "scipy", "processor")


@cache
def _processor() -> str:
    """Vendor, family and model of the processor: equal runs have equal bytes on equal ones only."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    known = [facts[key] for key in ("vendor_id", "cpu family", "model") if key in facts]
    return " ".join(known or [platform.machine()])


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """In which parts of the code two runs differ, in a few words; empty if in none.

    >>> differences({"code": "a", "torch": "2.6"}, {"code": "b", "torch": "2.7", "device": "cpu"})
    'torch 2.6, now 2.7'
    """
    if theirs.get("code") == ours["code"]:
        return ""
    keys = [key for key in ours if key not in _DO_NOT_DECIDE and key in theirs and theirs[key] != ours[key]]
    return (
        ", ".join(f"{key} {theirs[key]}, now {ours[key]}" for key in keys)
        or f"code {theirs.get('code', '?')[:8]}"
    )


def made_here(theirs: Mapping[str, str]) -> bool:
    """Whether a run was made by the running rpel and its libraries;
    devices and user's modules are not looked at."""
    ours = versions()
    return all(theirs.get(key) == ours[key] for key in ("source", "torch", "numpy", "numba"))


# --- the rule -----------------------------------------------------------------------------------------------


class Robustness(StrEnum):
    """What is known of a rule among m models, f of them hostile."""

    PROVEN = "proven"
    UNKNOWN = "unknown"
    NONE = "none"


@dataclass(frozen=True)
class Survival:
    """Whether a rule survives b_hat hostile models, and the sentence that says so."""

    robustness: Robustness
    sentence: str


_KAPPA: dict[str, Callable[[int, int], float]] = {
    "trimmed_mean": theory.kappa_trimmed_mean,
    "median": theory.kappa_median,
    "krum": theory.kappa_krum,
}
_FRAGILE = ("mean", "gossip")


def survival(rule: str, pull: int, b_hat: int) -> Survival:
    """From the rule's name alone, so that no code that a file names is ever imported.

    >>> survival("nnm+trimmed_mean", 15, 6).sentence
    'nnm+trimmed_mean survives 6 hostile models of 16 (kappa 112.8)'
    >>> survival("mean", 15, 6).robustness
    <Robustness.NONE: 'none'>
    """
    *before, last = rule.split("+")
    m, models = pull + 1, count(b_hat, "hostile model")
    if b_hat == 0:
        return Survival(Robustness.UNKNOWN, f"{rule} has nothing to survive: b_hat is 0")
    if last in _FRAGILE and not before:
        return Survival(Robustness.NONE, f"{rule} survives no hostile model: a single one moves it anywhere")
    if last in _KAPPA and set(before) <= {"nnm"}:
        kappa = _KAPPA[last](m, b_hat)
        for _ in before:
            kappa = theory.kappa_nnm(m, b_hat, kappa)
        if math.isfinite(kappa):
            return Survival(Robustness.PROVEN, f"{rule} survives {models} of {m} (kappa {kappa:.4g})")
    return Survival(Robustness.UNKNOWN, f"no bound is known here for {rule} with {models} of {m}")
