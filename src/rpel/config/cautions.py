"""What a membership may say and its members should yet know; each caution is one sentence."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rpel import planning
from rpel.certificates import read_certificate

if TYPE_CHECKING:
    from rpel.config.membership import Membership


def cautions(m: "Membership") -> Iterator[str]:
    """Members of one organisation, a plan that promises more than it holds, certificates that end too early."""
    homes = Counter(member.organisation for member in m.members if member.organisation)
    for organisation, count in homes.items():
        if count > 1:
            yield (
                f"{count} members are of {organisation!r}: byzantine {m.byzantine} counts members, so if that "
                f"organisation turns hostile it takes up {count} of them"
            )
    cdf = planning.max_byzantine_cdf(m.nodes, m.byzantine, m.pull, m.rounds)
    holds = 1.0 if m.b_hat >= len(cdf) else float(cdf[m.b_hat])
    if holds < m.confidence:
        yield f"b_hat {m.b_hat} holds with probability {holds:.6g}, below the confidence {m.confidence:g}"
    for member in m.members:
        until = read_certificate(member.certificate).not_after
        if until.timestamp() < m.epoch + m.rounds * m.period:
            yield f"the certificate of {member.id!r} ends at {until:%Y-%m-%d %H:%M} UTC, before the last round"
