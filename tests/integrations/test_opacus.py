"""Opacus counts the same steps by Rényi divergences: never less than what rpel states.
Run by `make test-all`."""

import pytest

from rpel import privacy

pytestmark = pytest.mark.full

SETTINGS = [
    (noise, batch, examples, steps, delta)
    for noise, steps in ((1.3, 45), (2.5, 9), (3.0, 200), (4.0, 90), (8.0, 900))
    for batch, examples, delta in ((31, 310, 1e-4), (25, 1400, 1e-5), (8, 800, 1e-6), (20, 40, 1e-3))
]


@pytest.mark.filterwarnings("ignore")  # Opacus suggests more orders
@pytest.mark.parametrize(("noise", "batch", "examples", "steps", "delta"), SETTINGS)
def test_epsilon_of_opacus_is_never_below_ours(
    noise: float, batch: int, examples: int, steps: int, delta: float
) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    rate = privacy.rate(batch, examples)
    theirs = accountants.RDPAccountant()
    theirs.history = [(noise, rate, steps)]
    ours = privacy.epsilon(noise, rate, steps, delta)
    assert ours <= theirs.get_epsilon(delta) <= 2 * ours + 0.5
