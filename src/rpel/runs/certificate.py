"""Write and read the certificate of a run.

It says what the run proves about its sampling, what is known about its rule, and which software made it.

"The sampling stayed within the plan" and "the rule survives that many" are two statements;
neither replaces the other.
"""

import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
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
"""The maximum number of violations that are listed."""


@dataclass(frozen=True)
class Certificate:
    """What certificate.json holds.

    A violation is {round, node, count}; at most 1,000 are listed, all are counted. histogram[k] says how many
    aggregations had k hostile models. metrics says for each of the task's whether more is better.
    """

    plan: dict[str, Any]
    guarantee: str
    held: bool
    max_observed: int
    histogram: list[int]
    violations: list[dict[str, int]]
    violations_total: int
    seed: int
    versions: dict[str, str]
    threads: int
    data: dict[str, str]
    rule: dict[str, str] = field(default_factory=dict)
    aggregations: int = 0
    objects: dict[str, str] = field(default_factory=dict)
    privacy: dict[str, float] | None = None
    metrics: dict[str, bool] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key of :meth:`to_dict`."""
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, Any]:
        """Return it as certificate.json has it."""
        keys = list(_ORDER) if self.metrics else [key for key in _ORDER if key != "metrics"]
        return {key: getattr(self, key) for key in keys}

    def verdict(self) -> dict[str, Any]:
        """Return the part that a run's summary shows."""
        keys = ["guarantee", "held", "max_observed", "violations_total", *["privacy"] * bool(self.privacy)]
        return {key: getattr(self, key) for key in keys}

    @property
    def pull(self) -> int:
        return int(self.plan["pull"])

    @property
    def b_hat(self) -> int:
        return int(self.plan["b_hat"])

    @property
    def meaning(self) -> str:
        """What the guarantee says, in words."""
        return Guarantee(self.guarantee).meaning

    @property
    def guaranteed(self) -> bool:
        """Whether the plan's probability was promised for this run; on fixed graphs it is not."""
        return Guarantee(self.guarantee) is Guarantee.PLAN


_ORDER = (
    "plan", "guarantee", "held", "rule", "aggregations", "max_observed", "histogram", "violations",
    "violations_total", "seed", "versions", "threads", "data", "objects", "privacy", "metrics",
)  # fmt: skip
"""The keys of certificate.json."""


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
    """Return what a run proves about its sampling, each violation by node and round.

    Args:
        plan: the plan as a dict.
        counts: hostile peers met (T, h); where nodes do not aggregate once a round, (T, k, h) with −1 where
            there was no aggregation.
        b_hat: what the counts are held against.
        honest: honest(t) gives the honest nodes' numbers in round t, in the order of the columns.
        seed, versions, threads, data, rule, guarantee: what the run was made with.
        objects: digests of what the user supplied as objects.
        metrics: names of the task's, with whether more is better.
        privacy: what :mod:`rpel.privacy` says of all that others saw; None if nothing was noisy.

    >>> counts, honest = np.array([[1, 0], [3, 1]]), np.array([4, 9])
    >>> proof = certificate({}, counts, 2, lambda t: honest, seed=0, versions={}, threads=1, data={})
    >>> proof.held, proof.violations, proof.histogram
    (False, [{'round': 2, 'node': 4, 'count': 3}], [1, 2, 0, 1])
    """
    places = np.argwhere(counts > b_hat)
    violations = [
        {"round": t + 1, "node": int(honest(t + 1)[at[-1]]), "count": int(counts[(t, *at)])}
        for t, *at in places[:_LISTED].tolist()
    ]
    return Certificate(
        plan=dict(plan),
        guarantee=guarantee.value,
        held=not len(places),
        rule={"name": rule, **asdict(survival(rule, int(plan.get("pull", 0)), b_hat))},
        aggregations=int((counts >= 0).sum()),
        max_observed=int(counts.max(initial=0)),
        histogram=np.bincount(counts[counts >= 0]).tolist() if counts.size else [],
        violations=violations,
        violations_total=len(places),
        seed=seed,
        versions=dict(versions),
        threads=threads,
        data=dict(data),
        objects=dict(objects or {}),
        privacy=None if privacy is None else dict(privacy),
        metrics=dict(metrics or {}),
    )


BESIDE = ("cli", "peer", "studies", "integrations", "doctor.py", "testing.py", "runs")
"""The modules that compute nothing of a run: a change of theirs leaves finished runs as they are."""


@cache
def source_digest(root: Path = Path(__file__).parents[1]) -> str:
    """Return a digest of rpel's source files that compute."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] not in BESIDE:
            digest.update(name.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def versions(device: str = "cpu", modules: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a result depends on beside its specification and data.

    ``code`` is one digest of all that decides it: rpel's modules that compute, torch, numpy and numba, the
    class of the device, and ``modules``, digests of what runs by ``module:name``. What cannot be seen is not
    in it: other packages, environment variables, files that such a module reads.

    >>> versions()["code"] == versions()["code"], versions()["code"] == versions("cuda")["code"]
    (True, False)
    """
    decides = {"source": source_digest()[:12]}
    decides |= {name: importlib.metadata.version(name) for name in ("torch", "numpy", "numba")}
    decides |= {"device": device.partition(":")[0], **(modules or {})}
    code = hashlib.sha256(json.dumps([source_digest(), sorted(decides.items())]).encode()).hexdigest()
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
    """Name the parts of the code in which two runs differ; empty if there are none.

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
    """Judge a rule by its name alone, so that code named in a file is never imported.

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
