"""On a slow line models come one after the other, as many as fit; slow senders in front hold nobody up."""

from collections.abc import Callable, Sequence

import pytest

from rpel.peer.net.intake import FIRST, Intake, Place


class Sender:
    """A member that sends one body, at most so fast, once it has begun; ``start`` seconds into the round."""

    def __init__(
        self, fastest: float = 1e9, start: float = 0.0, size: float = 1.0, way: float = 0.02
    ) -> None:
        """``way``: what lies on its way while it is not read."""
        self.fastest, self.start, self.left, self.way = fastest, start, size, way
        self.held = False
        self.waiting = 0.0  # on its way

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False


def received(
    senders: Sequence[Sender], line: float, seconds: float = 3.0, width: int = FIRST
) -> tuple[list[int], int]:
    """Whose models came in time over a line that carries so many models a second, shared alike by all that
    send; and how many were read at once at the end."""
    intake, step = Intake(size=1_000_000, seconds=seconds, width=width), 0.005
    places: dict[int, Place] = {}
    came: list[int] = []
    for tick in range(int(seconds / step)):
        for number, sender in enumerate(senders):
            if number not in places and sender.start <= tick * step:
                places[number] = intake.place(number)
                intake.begin(places[number], sender)
        send([senders[number] for number in places], line * step, step)
        for number, sender in enumerate(senders):
            if number in places and sender.waiting and not sender.held:
                intake.took(places[number], int(sender.waiting * 1e6))
                sender.waiting = 0.0
                if sender.left <= 1e-9:
                    intake.end(places[number])
                    came.append(number)
        if tick % round(intake.tick / step) == 0:
            intake.measure()
    return sorted(came), intake.width


def send(senders: Sequence[Sender], room: float, step: float) -> None:
    """All that may send have equal shares of the line; what one does not need the others take."""
    active = [one for one in senders if one.left > 1e-9 and not (one.held and one.waiting >= one.way)]
    for place, one in enumerate(sorted(active, key=lambda one: one.fastest)):
        sent = min(room / (len(active) - place), one.fastest * step, one.left)
        room -= sent
        one.left -= sent
        one.waiting += sent


def in_the_third_round(make: Callable[[], Sequence[Sender]], line: float) -> list[int]:
    width = FIRST
    for _ in range(3):
        found, width = received(make(), line, width=width)
    return found


@pytest.mark.parametrize(("models", "fit"), [(12.0, 6), (6.6, 6), (4.4, 4), (3.4, 3), (2.4, 2)])
def test_as_many_models_come_in_time_as_the_line_carries(models: float, fit: int) -> None:
    found = in_the_third_round(lambda: [Sender() for _ in range(6)], line=models / 3.0)
    assert found[:fit] == list(range(fit))  # in the order drawn


def test_senders_that_trickle_from_the_start_cost_the_others_next_to_nothing() -> None:
    def senders() -> list[Sender]:
        return [*(Sender(fastest=0.001) for _ in range(4)), *(Sender() for _ in range(5))]

    assert received(senders(), line=6 / 3.0)[0] == [4, 5, 6, 7, 8]


def test_senders_that_stop_at_their_last_bytes_cost_the_others_next_to_nothing() -> None:
    class Stopping(Sender):
        @property
        def fastest(self) -> float:
            return 1e9 if self.left > 0.1 else 0.0

        @fastest.setter
        def fastest(self, value: float) -> None: ...

    assert len(received([Stopping(), Stopping(), *(Sender() for _ in range(4))], line=7 / 3.0)[0]) == 4


def test_line_that_one_connection_does_not_fill_is_filled_by_several() -> None:
    # four fill the line
    far = in_the_third_round(lambda: [Sender(fastest=1.2) for _ in range(12)], line=13.2 / 3.0)
    assert len(far) >= 10


def test_late_publisher_is_read_in_turn() -> None:
    late = in_the_third_round(lambda: [Sender(start=1.5), Sender(), Sender(), Sender()], line=4.6 / 3.0)
    assert late == [0, 1, 2, 3]
