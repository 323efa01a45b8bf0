"""The certificate of a run: what it proves about its sampling, and with what it was made."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rpel.types import Guarantee, Integers
from rpel.version import __version__

_LISTED = 1000
"""So many violations are listed; all are counted."""


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
    guarantee: Guarantee = Guarantee.PLAN,
) -> dict[str, Any]:
    """What a run proves about its sampling: counts (T, h) of hostile peers against b̂, each violation by node and round.

    ``honest(t)`` gives the honest nodes' numbers in round t, in the order of the columns.

    >>> counts, honest = np.array([[1, 0], [3, 1]]), np.array([4, 9])
    >>> found = certificate({}, counts, 2, lambda t: honest, seed=0, versions={}, threads=1, data={})
    >>> found["held"], found["violations"], found["histogram"]
    (False, [{'round': 2, 'node': 4, 'count': 3}], [1, 2, 0, 1])
    """
    rounds, nodes = np.nonzero(counts > b_hat)
    listed = [
        {"round": t + 1, "node": int(honest(t + 1)[i]), "count": int(counts[t, i])}
        for t, i in zip(rounds[:_LISTED].tolist(), nodes[:_LISTED].tolist(), strict=True)
    ]
    return {
        "plan": dict(plan),
        "guarantee": guarantee.value,
        "held": not len(rounds),
        "max_observed": int(counts.max(initial=0)),
        "histogram": np.bincount(counts.ravel()).tolist() if counts.size else [],
        "violations": listed,
        "violations_total": len(rounds),
        "seed": seed,
        "versions": dict(versions),
        "threads": threads,
        "data": dict(data),
    }


@cache
def versions() -> dict[str, str]:
    """What the result depends on beside the specification; ``code`` is a digest of rpel's own source files."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "numba", "scipy")}
    own = {"rpel": __version__, "code": digest.hexdigest()[:12], "python": platform.python_version()}
    return own | packages
