"""Records and enumerations that cross packages.

Records are frozen: state is what the next step needs, info what a reader wants.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]
"""float32 in training; float64 works too and serves the tests."""

Out = Floats | None
"""Where a result goes; None: into a new array."""

Mix = NDArray[Any] | int | None
"""Of which rows others are made before an operation, as `rpel.backend.plain.coordinatewise` takes it."""

Models = Floats
"""(rows, d) models, float32 (or float64 in tests), one per row."""

Arrays = dict[str, Any]
"""What a part of Algorithm 1 remembers from round to round: arrays by name, checkpointed with the run."""

CONFIDENCE = 0.99
"""How sure a plan is, over all nodes and rounds, unless another probability is asked for."""

ROBUST_RULE = "nnm+trimmed_mean"
"""The paper's rule, the default."""

WireName = Literal["float32", "int8"]
"""What a pulled model is made of."""

Integers = NDArray[np.int64]
Schedule = Callable[[int], float]
"""The learning rate η of round t = 1, 2, …"""


class Outcome(StrEnum):
    """The outcome of a peer's round: aggregated, too few answers, or caught up from the others' models."""

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
class Measured:
    """What a model is worth on test data; None where it was not measured."""

    accuracy: float | None = None
    loss: float | None = None


class Guarantee(StrEnum):
    """What the plan's probability is worth for a way of choosing peers."""

    PLAN = "plan"
    NONE = "none"
    VOID = "void"

    @property
    def meaning(self) -> str:
        """The word as a sentence."""
        return {
            Guarantee.PLAN: "the plan's probability",
            Guarantee.NONE: "none: neighbours are fixed, so the plan's probability does not apply; counts "
            "are as met",
            Guarantee.VOID: "void: whoever pushes chooses whom it reaches",
        }[self]


@dataclass(frozen=True)
class Received:
    """A table of models and, for each node, the rows it has received (h, m), own first, −1 absent.

    ``weights`` (h, m) are gossip weights on a fixed graph; ``hostile`` (h, m) marks hostile neighbours, for
    the one baseline that is told; ``met`` (h,) counts the hostile peers that each node asked. ``finite`` (k,)
    says of the first k rows of the table which hold nothing but finite numbers,
    if that is known already.
    """

    table: Models
    index: Integers
    weights: Floats | None = None
    hostile: NDArray[np.bool_] | None = None
    met: Integers | None = None
    finite: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Aggregated:
    """What line 9 did.

    ``degraded`` (h,) marks nodes that could not aggregate and kept their half-step; ``trimmed`` (h,) counts
    the hostile vectors that the rule still allowed for after leaving out those with non-finite entries.
    """

    degraded: NDArray[np.bool_]
    trimmed: Integers


@dataclass(frozen=True)
class RoundInfo:
    """What a reader wants to know of one round.

    ``hostile`` (h,) counts hostile peers pulled by each honest node; ``degraded`` nodes kept their half-step,
    and the models of ``diverged`` ones are not finite.
    """

    round: int
    hostile: Integers
    degraded: int
    messages: int
    consensus: float
    diverged: int = 0
    alpha_realised: float | None = None
    lambda_realised: float | None = None


class Topology(Protocol):
    """Who talks to whom: a pull, a push, a fixed graph, everybody."""

    @property
    def widest(self) -> int:
        """How many peers a node may hear in a round."""

    def sample(self, t: int, ids: Integers) -> Integers:
        """(h, s) the peers that each node hears in round t, −1 where there are fewer."""

    def weights(self, ids: Integers) -> Floats | None:
        """(h, 1 + s) gossip weights, self first; None where all models count alike."""
