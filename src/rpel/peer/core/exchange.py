"""The pulls of one round: who is asked, which replies count, when they are over, which signatures are told.

A driver carries bytes and feeds what comes of them into an :class:`Exchange`; it decides nothing itself.
Invariants:

- A member whose key signed two half-steps of one round is not asked; it counts as a no-show.
- "Not yet" (425), another membership (409) and "too many" (429) are asked again until the deadline.
- "Nothing of this round" (410) is asked again only while fewer answers came than the round needs: members
  that were all down together begin to serve after each other. A peer without a half-step stops pulling when
  so many of its draw say so that the answers it needs cannot come, and becomes one of those that begin.
- With each model come the signatures that its sender saw in the round before, and the proofs that it holds.
"""

from collections.abc import Mapping
from typing import Any

from rpel.peer.core.evidence import Proof, Roster, Signed, Witness
from rpel.peer.core.protocol import Pull, Pulled
from rpel.peer.core.serve_policy import EARLY, GONE, OTHER_MEMBERSHIP, TOO_MANY
from rpel.types import Models, PullResult

PAUSES = (0.05, 1.0)
"""Seconds before a member is asked again: the first time, and at most, doubling in between."""
_AGAIN = (EARLY, OTHER_MEMBERSHIP, TOO_MANY)


def refusal(status: int) -> tuple[PullResult, bool]:
    """What a status other than 200 comes to, and whether the member is worth asking again.

    >>> refusal(425)
    (<PullResult.LATE: 'late'>, True)
    >>> refusal(500)
    (<PullResult.MALFORMED: 'malformed'>, False)
    """
    if status == EARLY:
        return PullResult.LATE, True
    return PullResult.REFUSED if 400 <= status < 500 else PullResult.MALFORMED, status in _AGAIN


class SecondInstanceError(OSError):
    """This peer's key signed what this peer did not."""


class Exchange:
    """What one pull has come to so far."""

    def __init__(self, pull: Pull, roster: Roster, witness: Witness) -> None:
        self.pull, self._roster, self._witness = pull, roster, witness
        excluded = witness.excluded(roster)
        self.excluded = tuple(member for member in pull.members if roster.pins[member] in excluded)
        self._results = dict.fromkeys(self.excluded, PullResult.REFUSED)
        self._offsets: list[float] = []
        self._empty: set[int] = set()

    @property
    def members(self) -> list[int]:
        """Those that are asked, in the order of the draw."""
        return [member for member in self.pull.members if member not in self.excluded]

    @property
    def tells(self) -> int:
        """The round whose signatures are asked for with each answer; 0: none."""
        return self.pull.round - 1

    def refused(self, member: int, status: int) -> bool:
        """A member answered with another status than 200; returns whether to ask it again."""
        if status == GONE:
            self._empty.add(member)
            return True  # until this exchange is over
        return refusal(status)[1]

    def failed(self, member: int, result: PullResult) -> None:
        """A member will not answer any more."""
        self._results.setdefault(member, result)

    def answered(self, member: int, signed: Signed | None, offset: float | None) -> list[Proof]:
        """A member's model is in its row: what its signature proves. ``offset``: see ``clock.ahead``."""
        self._results[member] = PullResult.OK
        self._empty.discard(member)
        if offset is not None:
            self._offsets.append(offset)
        if signed is None:
            return []
        proof = self._witness.saw(self._roster, member, self.pull.round, signed)
        return [] if proof is None else [proof]

    def told(self, message: Mapping[str, Any]) -> list[Proof]:
        """What a member that answered saw signed in the round before; returns what that proves.

        SecondInstanceError must end this peer at once, whatever it is waiting for.
        """
        proofs = self._witness.hear(self._roster, self.tells, message)
        if round := self._witness.duplicate_key:
            raise SecondInstanceError(
                f"somebody else signed a half-step of round {round} with this peer's key: a second peer runs "
                "with it, or its state folder was set back or emptied"
            )
        return proofs

    @property
    def over(self) -> bool:
        """Whether nothing more can come that matters."""
        pull, came = self.pull, sum(result is PullResult.OK for result in self._results.values())
        if pull.half is None and self._nobody_serves:
            return True
        waiting = [member for member in pull.members if member not in self._results]
        return all(member in self._empty for member in waiting) and (came >= pull.needed or not waiting)

    @property
    def _nobody_serves(self) -> bool:
        return len(self._empty) > len(self.pull.members) - self.pull.needed

    def pulled(self, table: Models) -> Pulled:
        """What came, by now, into the rows of the table."""
        late = dict.fromkeys(self._empty, PullResult.REFUSED)
        results = (
            self._results.get(member, late.get(member, PullResult.LATE)) for member in self.pull.members
        )
        return Pulled(table, tuple(results), tuple(self._offsets), len(self._empty))
