"""rpel: Robust Pull-based Epidemic Learning.

Machine learning among peers without a server, some of them hostile.

The public names below are loaded when first used, so that ``rpel plan`` answers without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rpel.version import __version__

if TYPE_CHECKING:
    from rpel import attacks as attacks
    from rpel import planning as planning
    from rpel import rules as rules
    from rpel import testing as testing
    from rpel.attacks import Attack, View, attack
    from rpel.peer.api import Peer
    from rpel.planning import Plan, plan
    from rpel.rules import Rule, chain, rule
    from rpel.runs.run import Run, Runs
    from rpel.simulation.api import load, resume, simulate
    from rpel.spec import Spec
    from rpel.studies.arena import arena
    from rpel.studies.study import sweep

_HOMES = {
    "Attack": "rpel.attacks",
    "Peer": "rpel.peer.api",
    "Plan": "rpel.planning",
    "Rule": "rpel.rules",
    "Run": "rpel.runs.run",
    "Runs": "rpel.runs.run",
    "Spec": "rpel.spec",
    "View": "rpel.attacks",
    "arena": "rpel.studies.arena",
    "attack": "rpel.attacks",
    "chain": "rpel.rules",
    "load": "rpel.simulation.api",
    "plan": "rpel.planning",
    "resume": "rpel.simulation.api",
    "rule": "rpel.rules",
    "simulate": "rpel.simulation.api",
    "sweep": "rpel.studies.study",
}

_PARTS = ("attacks", "optim", "planning", "rules", "testing")
"""Packages whose names users reach as ``rpel.testing.check_rule``."""

__all__ = [
    "Attack",
    "Peer",
    "Plan",
    "Rule",
    "Run",
    "Runs",
    "Spec",
    "View",
    "__version__",
    "arena",
    "attack",
    "chain",
    "load",
    "plan",
    "resume",
    "rule",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _PARTS:
        return import_module(f"rpel.{name}")
    raise AttributeError(f"module 'rpel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_PARTS]
