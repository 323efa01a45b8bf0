# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy"]
# ///
"""RPEL in one file, on NumPy alone: read it from top to bottom.

A hundred nodes learn to tell ten classes apart without a server. Ten of them are Byzantine: they see every
honest model and may answer anything. In each round an honest node takes a training step, pulls the models of
s random peers, and aggregates them in a way that tolerates b_hat hostile models.

Run it with `python examples/nano_rpel.py` or `uv run examples/nano_rpel.py`; it takes a few seconds. The
package adds speed, real data, PyTorch models, more rules and attacks, and peers that talk over a network.
The algorithm is this one.
"""

from collections.abc import Callable
from math import comb

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Attack = Callable[[Array], Array]  # honest models (k, d) -> one forged model (d,)
Rule = Callable[[Array], Array]  # models (m, d) -> one model (d,)

NODES, BYZANTINE, ROUNDS = 100, 10, 100
HONEST = NODES - BYZANTINE  # nodes 0 to 89 are honest, 90 to 99 are not

# --- Plan: how many peers must a node pull? ---


def probability(pull: int, b_hat: int) -> float:
    """Return the exact probability that no honest node ever meets more than b_hat hostile peers in a round.

    A pull draws without replacement, so the number of hostile peers in it is hypergeometric. All pulls are
    independent: take the probability for one of them to the power of honest nodes times rounds.
    """
    safe = sum(comb(BYZANTINE, k) * comb(HONEST - 1, pull - k) for k in range(b_hat + 1))
    return float((safe / comb(NODES - 1, pull)) ** (HONEST * ROUNDS))


def plan(confidence: float = 0.99) -> tuple[int, int]:
    """Return the smallest pull s, with its b_hat, that keeps hostile models a minority of the s + 1."""
    for pull in range(1, NODES):
        b_hat = min(k for k in range(pull + 1) if probability(pull, k) >= confidence)
        if 2 * b_hat < pull + 1:
            return pull, b_hat
    raise ValueError(f"{BYZANTINE} hostile nodes of {NODES} are too many for any number of peers")


# --- Attack: what a hostile peer answers ---


def alie(honest: Array) -> Array:
    """Return "A Little Is Enough": 1.5 standard deviations away from the honest mean, in every coordinate.

    It looks like one more honest model, so it is hard to filter out.
    """
    deviation = honest.std(axis=0, ddof=1) if len(honest) > 1 else np.zeros(honest.shape[1])
    return np.asarray(honest.mean(axis=0) + 1.5 * deviation)


def foe(honest: Array) -> Array:
    """Return "Fall of Empires": minus two times the honest mean."""
    return np.asarray(-2 * honest.mean(axis=0))


# --- Line 9: aggregate what was pulled ---


def nnm_trimmed_mean(models: Array, f: int) -> Array:
    """Mix each model with its nearest neighbours, then drop the f lowest and f highest values per coordinate.

    Mixing brings the honest models closer together, which leaves a hostile one less room to hide.
    """
    m = len(models)
    distances = np.square(models[:, None] - models[None]).sum(axis=2)
    nearest = np.argsort(distances, axis=1, kind="stable")[:, : m - f]
    mixed = models[nearest].mean(axis=1)
    return np.asarray(np.sort(mixed, axis=0)[f : m - f].mean(axis=0))


def average(models: Array) -> Array:
    """Return the plain mean, which a single hostile model can move anywhere."""
    return np.asarray(models.mean(axis=0))


# --- The problem: ten clouds of points; each node has its own mix of them ---

CLASSES, FEATURES = 10, 20


def make_data(seed: int) -> tuple[list[tuple[Array, Array]], tuple[Array, Array]]:
    """Return a training set for each honest node, and one test set, as points and one-hot labels."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, FEATURES))

    def draw(size: int, share: Array) -> tuple[Array, Array]:
        labels = rng.choice(CLASSES, size, p=share)
        points = centres[labels] + rng.normal(scale=1.5, size=(size, FEATURES))
        return points, np.eye(CLASSES)[labels]

    shares = rng.dirichlet(np.ones(CLASSES), HONEST)
    return [draw(200, share) for share in shares], draw(2000, np.full(CLASSES, 1 / CLASSES))


def gradient(model: Array, x: Array, y: Array) -> Array:
    """Return the gradient of the cross-entropy of a softmax regression."""
    scores = x @ model.reshape(FEATURES, CLASSES)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray((x.T @ (p / p.sum(axis=1, keepdims=True) - y) / len(x)).ravel())


def accuracy(model: Array, x: Array, y: Array) -> float:
    """Return the fraction of points whose class the model guesses."""
    return float(((x @ model.reshape(FEATURES, CLASSES)).argmax(axis=1) == y.argmax(axis=1)).mean())


# --- Algorithm 1 ---


def local_step(
    x: Array, momentum: Array, g: Array, lr: float, beta: float, decay: float
) -> tuple[Array, Array]:
    """Take one momentum-SGD step (lines 3-6); weight decay acts after momentum."""
    momentum = beta * momentum + (1 - beta) * g
    return x - lr * (momentum + decay * x), momentum


def exchange(half: Array, peers: NDArray[np.int64], i: int, attack: Attack, rule: Rule) -> tuple[Array, int]:
    """Pull the half-step models of the peers and aggregate them with node i's own (lines 7-9).

    Returns:
        The new model of node i, and the number of hostile peers among those pulled.
    """
    honest = half[peers[peers < HONEST]]
    hostile = len(peers) - len(honest)
    forged = attack(honest) if len(honest) else half[i]
    return rule(np.vstack([half[i], honest, *[forged] * hostile])), hostile


def train(pull: int, attack: Attack, rule: Rule, seed: int = 0) -> tuple[Array, int]:
    """Run Algorithm 1.

    Returns:
        The final models of the honest nodes, and the most hostile peers that one of them met in a round.
    """
    shards, _ = make_data(seed)
    rng = np.random.default_rng([seed, 1])
    x = np.zeros((HONEST, FEATURES * CLASSES))  # lines 1-2: all nodes start from the same model
    momentum, half, worst = np.zeros_like(x), np.zeros_like(x), 0
    for _ in range(ROUNDS):
        for i, (points, labels) in enumerate(shards):
            batch = rng.integers(len(points), size=25)
            g = gradient(x[i], points[batch], labels[batch])
            half[i], momentum[i] = local_step(x[i], momentum[i], g, lr=1.0, beta=0.9, decay=1e-4)
        for i in range(HONEST):
            others = np.delete(np.arange(NODES), i)
            x[i], hostile = exchange(half, rng.choice(others, pull, replace=False), i, attack, rule)
            worst = max(worst, hostile)
    return x, worst


def main() -> None:
    """Plan, train under two attacks with two rules, and check the draws against the plan."""
    pull, b_hat = plan()
    print(f"plan: each node pulls {pull} peers a round and tolerates {b_hat} hostile ones among them")
    print(f"      no node ever meets more, with probability {probability(pull, b_hat):.4f}")
    print("accuracy on average and at the worst node:")
    _, test = make_data(0)
    met = []
    rules: dict[str, Rule] = {"rpel": lambda models: nnm_trimmed_mean(models, b_hat), "averaging": average}
    for attack in (alie, foe):
        for name, rule in rules.items():
            models, worst = train(pull, attack, rule)
            scores = [accuracy(model, *test) for model in models]
            print(f"  {attack.__name__:5s} {name:10s} {np.mean(scores):.3f}  {min(scores):.3f}")
            met.append(worst)
    # The certificate: what happened, compared with what was planned.
    print(f"certificate: no node met more than {max(met)} hostile peers in a round; the plan allows {b_hat}")


if __name__ == "__main__":
    main()
