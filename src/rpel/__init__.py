"""rpel: Robust Pull-based Epidemic Learning. Machine learning among peers, some of them hostile, with no server.

The public names below are loaded when first used, so that ``rpel plan`` answers without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpel.planning import Plan, plan

__version__ = "0.1.0"

_HOMES = {
    "Plan": "rpel.planning",
    "plan": "rpel.planning",
}

__all__ = ["Plan", "__version__", "plan"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rpel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
