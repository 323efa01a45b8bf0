"""Compute what a run must give: Algorithm 1 in float64, node by node.

Written from the paper and docs/reference/definitions.md alone. Every honest node holds one example, so its
batches are known. Nothing of rpel is used but its random numbers, which are part of what a run promises;
rules and attacks are those of `support.definitions`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

import rpel
from rpel.randomness import draws, sample_without_replacement, stream
from support.definitions import ATTACKS, Place, Victim, balance, gossip, metropolis

Array = NDArray[Any]
FEATURES, CLASSES = 4, 3
PARAMETERS = CLASSES * FEATURES + CLASSES


def examples(count: int, alike: bool = False) -> tuple[Array, Array]:
    """(count, 4) inputs and (count,) labels; ``alike``: all of them the same example."""
    coins = np.random.default_rng(5)
    x, y = coins.normal(size=(count, FEATURES)).astype(np.float32), coins.integers(0, CLASSES, count)
    return (np.repeat(x[:1], count, axis=0), np.repeat(y[:1], count)) if alike else (x, y)


def network() -> nn.Linear:
    """A linear model with values of its own: nothing is symmetric."""
    module = nn.Linear(FEATURES, CLASSES)
    module.load_state_dict(
        {"weight": _tensor(np.linspace(-1, 1, 12).reshape(3, 4)), "bias": _tensor([0.1, -0.2, 0.3])}
    )
    return module


def _tensor(values: Any) -> Any:
    import torch

    return torch.tensor(np.asarray(values), dtype=torch.float32)


def gradient(model: Array, x: Array, y: int) -> Array:
    """Of the cross-entropy of a linear model (weights, then biases) on one example."""
    scores = model[:12].reshape(CLASSES, FEATURES) @ x.astype(np.float64) + model[12:]
    p = np.exp(scores - scores.max())
    off = p / p.sum() - (np.arange(CLASSES) == y)
    return np.concatenate([np.outer(off, x).ravel(), off])


def hostile(seed: int, nodes: int, byzantine: int) -> set[int]:
    """Who is hostile."""
    return {int(i) for i in stream(seed, "placement", 0).choice(nodes, size=byzantine, replace=False)}


def adjacency(run: Any) -> Array | None:
    """Return which nodes are neighbours in a finished run; None where there is no graph."""
    from rpel.simulation.methods import resolve

    _, _, graph = resolve(run.spec).network
    return None if graph is None else graph.adjacency


@dataclass(frozen=True)
class Case:
    """A run and the same run computed plainly; ``fields`` are keywords of ``rpel.simulate``,
    of the twelve nodes."""

    fields: dict[str, Any] = field(default_factory=dict)
    adjacency: Array | None = None

    def __getitem__(self, key: str) -> Any:
        usual = {
            "nodes": 12, "byzantine": 3, "pull": 5, "b_hat": 2, "rounds": 3, "lr": 0.7, "momentum": 0.6,
            "seed": 0, "weight_decay": 0.05, "attack": "foe", "method": "rpel", "rule": None, "no_show": 0.0,
            "silent": False, "local_steps": 1,
        }  # fmt: skip
        if key == "b_hat" and self["method"] in ("all-to-all", "nna"):
            return self["byzantine"]
        return {**usual, **self.fields}[key]

    @property
    def method(self) -> str:
        """The name of its method, without parameters."""
        return str(self["method"]).partition("(")[0]

    def run(self, out: Any = None) -> Any:
        """``rpel.simulate`` of it."""
        x, y = examples(self.honest_count)
        train = [(x[i : i + 1], y[i : i + 1]) for i in range(self.honest_count)]
        keys = (
            "nodes byzantine pull b_hat rounds lr momentum seed weight_decay attack method rule no_show "
            "silent"
        )
        given = {key: self[key] for key in [*keys.split(), "local_steps"]}
        if given["method"] in ("all-to-all", "nna"):  # they hear everybody
            given |= {"pull": None, "b_hat": None}
        more = {key: value for key, value in self.fields.items() if key not in given}
        return rpel.simulate(network(), train, (x, y), batch_size=2, eval_size=9, out=out, **given, **more)

    @property
    def honest_count(self) -> int:
        return int(self["nodes"] - self["byzantine"])

    def hostile(self, t: int) -> set[int]:
        return hostile(self["seed"], self["nodes"], self["byzantine"])

    def honest(self, t: int) -> list[int]:
        """The honest nodes' numbers."""
        return [i for i in range(self["nodes"]) if i not in self.hostile(t)]

    def wanted(self, t: int, node: int) -> list[int]:
        """Whose models a node gets in round t."""
        n, s, seed = self["nodes"], self["pull"], self["seed"]
        if self.method == "rpel":
            return _ints(sample_without_replacement(seed, "pull", t, np.array([node]), n, s)[0])
        if self.method in ("all-to-all", "nna"):
            return [j for j in range(n) if j != node]
        if self.method == "el-local":
            sent = sample_without_replacement(seed, "push", t, np.arange(n), n, s)
            return [j for j in range(n) if node in sent[j]]
        assert self.adjacency is not None
        return _ints(np.flatnonzero(self.adjacency[node]))

    def counts(self) -> Array:
        """(T, h) how many hostile nodes every honest one meets."""
        rounds = range(1, self["rounds"] + 1)
        return np.array(
            [[len(self.hostile(t) & {*self.wanted(t, i)}) for i in self.honest(t)] for t in rounds]
        )

    def models(self) -> Array:
        """(h, d) after the last round."""
        return self.rounds()[-1][1]

    def rounds(self) -> list[tuple[Array, Array]]:
        """Every round's half-steps and what line 9 makes of them, (h, d) each."""
        xs, ys = examples(self.honest_count)
        first = network()
        start = np.concatenate([first.weight.detach().numpy().ravel(), first.bias.detach().numpy()]).astype(
            np.float64
        )
        x, m = np.tile(start, (self.honest_count, 1)), np.zeros((self.honest_count, PARAMETERS))
        played = []
        for t in range(1, self["rounds"] + 1):
            half = x.copy()
            for i in range(self.honest_count):
                for _ in range(self["local_steps"]):
                    m[i] = self["momentum"] * m[i] + (1 - self["momentum"]) * gradient(half[i], xs[i], ys[i])
                    half[i] -= self["lr"] * (m[i] + self["weight_decay"] * half[i])
            x = np.array([self._mixed(t, i, half) for i in range(self.honest_count)])
            played.append((half, x))
        return played

    def _mixed(self, t: int, i: int, half: Array) -> Array:
        """Lines 7 to 9 for the node in row i."""
        bad, honest = self.hostile(t), self.honest(t)
        late = draws(self["seed"], "no_show", t, np.arange(self["nodes"]), 1)[:, 0] < self["no_show"]
        wanted = [j for j in self.wanted(t, honest[i]) if (not self["silent"] if j in bad else not late[j])]
        known = {j: half[honest.index(j)] for j in wanted if j not in bad}
        weights = None if self.adjacency is None else metropolis(self.adjacency)[honest[i]]
        rule = self._rule(t, honest[i])
        if len(known) < len(wanted):
            among = [honest[i], *known] if weights is not None else [*known] or [honest[i]]
            victim = Victim(
                half[i],
                np.array([{**known, honest[i]: half[i]}[j] for j in among]),
                len(wanted) - len(known),
                None if weights is None else weights[among],
                0.0 if weights is None else sum(weights[j] for j in wanted if j in bad),
                rule,
            )
            known |= dict.fromkeys(bad, ATTACKS[self["attack"]](victim))
        models = np.array([half[i], *(known[j] for j in wanted)])
        marks = np.array([False, *(j in bad for j in wanted)])
        if weights is None or self.method == "balance":
            return rule(models)
        return gossip(self.method, models, weights[[honest[i], *wanted]], self["b_hat"], marks)

    def _rule(self, t: int, node: int) -> Callable[[Array], Array]:
        """The rule for one node in one round; it keeps the half-step where too few models came."""
        method, b_hat = self.method, self["b_hat"]
        if method == "balance":
            return lambda x: balance(x, t / self["rounds"])
        usual = {"nna": "monna", "el-local": "mean"}.get(method, "nnm+trimmed_mean")
        name = self["rule"] or usual
        least = 0 if name == "mean" else 4 * b_hat + 3 if name == "bulyan" else 2 * b_hat + 1
        if name.startswith("bucketing"):
            least = 4 * b_hat + 1  # a hostile model spoils a bucket of two
        rule = Place(self["seed"], t, node).rule(name, b_hat)
        return lambda x: rule(x) if len(x) >= least else x[0]


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]
