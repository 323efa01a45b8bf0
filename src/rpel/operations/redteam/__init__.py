"""A hostile member for drills on one's own network: the attacks of the library on a real peer's wire, and bad manners.

deliveries (what a hostile member does with a request) · forging (the library's attacks on what was pulled) · door (a
server that keeps no rules) · member (its rounds)
"""

from rpel.operations.redteam.deliveries import MISBEHAVIOURS
from rpel.operations.redteam.member import Deed, RedTeam

__all__ = ["MISBEHAVIOURS", "Deed", "RedTeam"]
