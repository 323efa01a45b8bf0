"""The library's attacks on what a hostile member could pull: one forged model for each victim.

In the simulator the adversary knows whom each victim pulls from. Here nobody does: all honest models that were pulled
stand for the victim's honest peers, less its own.
"""

from collections.abc import Sequence

import numpy as np

from rpel.aggregation import Rule
from rpel.attacks import Attack, View
from rpel.attacks.forgeries import State
from rpel.kernels.compiled import finite_rows
from rpel.types import Integers, Models


def forge(
    attack: Attack,
    pulled: Models,
    senders: Sequence[int],
    victims: Sequence[int],
    *,
    hostile: int,
    rule: Rule | None = None,
    round: int = 0,
    state: State | None = None,
) -> tuple[Models, State]:
    """(forged (v, d), new state) from the models (k, d) of the senders; ``hostile``: answers of ours a victim may meet.

    Models that are not finite are left out. A victim whose own model did not come is taken to have the first one.

    >>> from rpel.attacks import attack
    >>> forge(attack("sf"), np.array([[1.0], [3.0], [5.0]]), senders=[0, 1, 2], victims=[0, 7], hostile=1)[0]
    array([[-4.], [-3.]])
    """
    usable = finite_rows(pulled)
    if not usable.any():
        raise ValueError("an attack needs at least one honest model")
    models = pulled[usable]
    row = {sender: place for place, sender in enumerate(np.asarray(senders)[usable].tolist())}
    table = np.concatenate([models, np.zeros((len(victims), models.shape[1]), models.dtype)])
    own = np.array([row.get(victim, 0) for victim in victims], dtype=np.int64)
    known = np.array([victim in row for victim in victims])
    view = View(
        table,
        own=own,
        peers=_others(len(models), np.where(known, own, -1)),
        hostile=np.full(len(victims), hostile, dtype=np.int64),
        rule=rule,
        round=round,
    )
    return attack(view, state)


def _others(count: int, own: Integers) -> Integers:
    """(v, count) the rows 0 … count − 1 of each victim without its own one, −1 at the tail.

    >>> _others(3, np.array([1, -1]))
    array([[ 0,  2, -1], [ 0,  1,  2]])
    """
    rows = np.broadcast_to(np.arange(count), (len(own), count))
    order = np.argsort(rows == own[:, None], axis=1, kind="stable")
    moved = np.take_along_axis(rows, order, axis=1)
    return np.where(moved == own[:, None], -1, moved)
