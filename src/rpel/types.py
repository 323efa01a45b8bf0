"""Records that cross packages, all frozen: state is what the next step needs, info what a reader wants."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]
"""float32 in training; float64 works too and serves the tests."""

Models = Floats
"""(rows, d) models, float32 (or float64 in tests), one per row."""

Integers = NDArray[np.int64]
Schedule = Callable[[int], float]
"""The learning rate η of round t = 1, 2, …"""


class Outcome(StrEnum):
    """What a peer's round came to: aggregated; too few answers; a robust aggregate of the others instead of its own."""

    AGGREGATED = "aggregated"
    LOCAL_ONLY = "local_only"
    CAUGHT_UP = "caught_up"


class PullResult(StrEnum):
    """What came of asking one member for its model."""

    OK = "ok"
    LATE = "late"
    REFUSED = "refused"
    MALFORMED = "malformed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class Cohort:
    """h nodes that step together: all honest nodes in the simulator, a shard on a cluster, one on a real peer.

    ids (h,) node numbers · x (h, d) models · m (h, d) momenta · local (h, q) what is never exchanged (BatchNorm's)
    """

    ids: Integers
    x: Models
    m: Models
    local: Models

    def with_x(self, x: Models) -> Self:
        """The same nodes with other models."""
        return replace(self, x=x)


@dataclass(frozen=True)
class Exchange:
    """What a cohort asks of the network: round t, its half-step models, and for each node the peers it wants (h, s).

    On a fixed graph ``weights`` (h, 1 + s) are the gossip weights of the node itself and of those peers.
    """

    round: int
    ids: Integers
    wanted: Integers
    half: Models
    weights: Floats | None = None


@dataclass(frozen=True)
class Inbox:
    """What the network returned: a table of models and, for each node, the rows it has (h, m), own first, −1 absent.

    ``weights`` (h, m) are gossip weights on a fixed graph; ``hostile`` (h, m) marks hostile neighbours, for the one
    baseline that is told.
    """

    table: Models
    index: Integers
    weights: Floats | None = None
    hostile: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class MixInfo:
    """What line 9 did: ``degraded`` (h,) nodes that could not aggregate and kept their half-step, ``trimmed`` (h,) how
    many more hostile vectors the rule allowed for after leaving out those with non-finite entries."""

    degraded: NDArray[np.bool_]
    trimmed: Integers


@dataclass(frozen=True)
class RoundInfo:
    """What a reader wants to know of one round; ``hostile`` (h,) counts hostile answers pulled by each honest node."""

    round: int
    hostile: Integers
    degraded: int
    messages: int
    consensus: float
    alpha_realised: float | None = None
    lambda_realised: float | None = None


class Topology(Protocol):
    """Who talks to whom: a pull, a push, a fixed graph, everybody."""

    def sample(self, t: int, ids: Integers) -> Integers:
        """(h, s) the peers that each node hears in round t, −1 where there are fewer."""

    def weights(self, ids: Integers) -> Floats | None:
        """(h, 1 + s) gossip weights, self first; None where all models count alike."""
