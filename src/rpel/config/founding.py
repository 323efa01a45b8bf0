"""The plan of a network of real peers: hostile ones may also keep silent, and honest ones come late.

Asked are s; all b̂ hostile ones among them may not answer, and F honest ones not in time; a round aggregates when 2 b̂
answers come. So s ≥ 3 b̂ + F keeps every round going.
"""

from bisect import bisect_left

from rpel import planning


def stall_proof(
    nodes: int, byzantine: int, rounds: int, confidence: float = 0.99, no_shows: int | None = None
) -> planning.Plan:
    """The plan whose rounds go on when all hostile peers stay silent and ``no_shows`` honest ones are late.

    Without ``no_shows``: 2, or as many as fit among few peers (``Plan.no_shows`` tells).

    >>> [(p.pull, p.b_hat, p.no_shows) for p in (stall_proof(12, 2, 200), stall_proof(8, 2, 30))]
    [(8, 2, 2), (7, 2, 1)]
    >>> stall_proof(12, 2, 200, no_shows=6)
    Traceback (most recent call last):
    ValueError: no_shows 6 does not fit 12 peers, 2 of them hostile: the most is 5
    """

    def plan(late: int) -> planning.Plan:
        return planning.plan(
            nodes=nodes, byzantine=byzantine, rounds=rounds, confidence=confidence, silent=True, no_shows=late
        )

    def fits(late: int) -> bool:
        try:
            return bool(plan(late))
        except ValueError:
            return False

    least = plan(0)  # says what is wrong, if not even this fits
    if no_shows is None:
        return next((plan(late) for late in (2, 1) if fits(late)), least)
    if no_shows < 0:
        raise ValueError(f"no_shows {no_shows} is impossible: the least is 0")
    if not fits(no_shows):
        most = bisect_left(range(nodes), True, key=lambda late: not fits(late)) - 1
        raise ValueError(
            f"no_shows {no_shows} does not fit {nodes} peers, {byzantine} of them hostile: the most is {most}"
        )
    return plan(no_shows)
