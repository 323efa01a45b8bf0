"""A hostile member for drills on one's own network: the library's attacks on real peers, and misbehaviour.

drill (what it does: forgeries and deliveries by name) · server (answers requests without limits) · member (its rounds)
"""

from rpel.operations.redteam.drill import MISBEHAVIOURS
from rpel.operations.redteam.member import Deed, RedTeam

__all__ = ["MISBEHAVIOURS", "Deed", "RedTeam"]
