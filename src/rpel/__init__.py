"""rpel: Robust Pull-based Epidemic Learning. Machine learning among peers, some of them hostile, with no server.

The public names below are loaded when first used, so that ``rpel plan`` answers without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpel.aggregation import Rule, chain, rule
    from rpel.attacks import Attack, View, attack
    from rpel.experiments.result import Result, Results
    from rpel.experiments.run import resume, simulate
    from rpel.experiments.spec import Spec
    from rpel.peer.api import Peer
    from rpel.planning import Plan, plan

__version__ = "0.1.0"

_HOMES = {
    "Attack": "rpel.attacks",
    "Peer": "rpel.peer.api",
    "Plan": "rpel.planning",
    "Result": "rpel.experiments.result",
    "Results": "rpel.experiments.result",
    "Rule": "rpel.aggregation",
    "Spec": "rpel.experiments.spec",
    "View": "rpel.attacks",
    "attack": "rpel.attacks",
    "chain": "rpel.aggregation",
    "plan": "rpel.planning",
    "resume": "rpel.experiments.run",
    "rule": "rpel.aggregation",
    "simulate": "rpel.experiments.run",
}

__all__ = [
    "Attack",
    "Peer",
    "Plan",
    "Result",
    "Results",
    "Rule",
    "Spec",
    "View",
    "__version__",
    "attack",
    "chain",
    "plan",
    "resume",
    "rule",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rpel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
