"""Compute what a run must give: Algorithm 1 in float64, node by node.

Written from docs/reference/definitions.md alone. Every honest node holds one example, so its batches are
known. Nothing of rpel is used but its random numbers, which are part of what a run promises, and the rule and
the searching attack by name where a case is not about them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

import rpel
from rpel.randomness import draws, sample_without_replacement, stream

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
            "silent": False, "local_steps": 1, "attack_params": {},
        }  # fmt: skip
        if key == "b_hat" and self["method"] in ("all-to-all", "nna"):
            return self["byzantine"]
        return {**usual, **self.fields}[key]

    def run(self, out: Any = None) -> Any:
        """``rpel.simulate`` of it."""
        x, y = examples(self.honest_count)
        train = [(x[i : i + 1], y[i : i + 1]) for i in range(self.honest_count)]
        keys = (
            "nodes byzantine pull b_hat rounds lr momentum seed weight_decay attack method rule no_show "
            "silent"
        )
        given = {key: self[key] for key in [*keys.split(), "local_steps", "attack_params"]}
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
        if self["method"] == "rpel":
            return _ints(sample_without_replacement(seed, "pull", t, np.array([node]), n, s)[0])
        if self["method"] in ("all-to-all", "nna"):
            return [j for j in range(n) if j != node]
        if self["method"] == "el-local":
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
        received = [half[honest.index(j)] for j in wanted if j not in bad]
        models, marks = [half[i]], [j in bad for j in wanted]
        if any(marks):
            forged = self._forged(t, honest[i], half[i], received, sum(marks))
            models += [
                forged if mark else half[honest.index(j)] for j, mark in zip(wanted, marks, strict=True)
            ]
        else:
            models += received
        return self._aggregated(t, honest[i], np.array(models), wanted, [False, *marks])

    def _forged(self, t: int, node: int, own: Array, received: list[Array], count: int) -> Array:
        seen = [own, *received] if self.adjacency is not None else received or [own]
        if self["attack"] == "foe":
            return np.asarray(-2 * np.mean(seen, axis=0))
        attack = rpel.attack(self["attack"], **self["attack_params"])
        return np.asarray(
            attack.forge(np.array(received or [own]), own, byzantine=count, rule=self._rule(t, node))
        )

    def _rule(self, t: int, node: int) -> Any:
        """The rule as it runs for one node in one round."""
        name = {"cs-plus": "cs_plus", "clipped-gossip-oracle": "clipped_gossip_oracle", "balance": "balance"}
        named = self["rule"] or name.get(self["method"], "nnm+trimmed_mean")
        made = rpel.rule(named) if named == "mean" else rpel.rule(named, f=self["b_hat"])
        return made.at(round=t, rounds=self["rounds"], seed=self["seed"], ids=np.array([node]))

    def _aggregated(self, t: int, node: int, models: Array, wanted: list[int], marks: list[bool]) -> Array:
        if self["method"] == "el-local" or self["rule"] == "mean":
            return np.asarray(models.mean(axis=0))
        if self["method"] == "balance":
            return balanced(models, t / self["rounds"])
        if self.adjacency is None:
            # hostile ones may be in as many buckets of two
            each = 4 if "bucketing" in (self["rule"] or "") else 2
            enough = len(models) > each * self["b_hat"]
            return np.asarray(self._rule(t, node)(models)) if enough else models[0]
        weights = metropolis(self.adjacency)[node, [node, *wanted]]
        if self["method"] == "clipped-gossip-oracle":
            return clipped(models, weights, marks)
        return np.asarray(self._rule(t, node)(models, weights=weights))


def metropolis(adjacency: Array) -> Array:
    """W_ij = 1/(1 + max(deg_i, deg_j)), W_ii what is missing to 1."""
    degree = adjacency.sum(axis=1)
    w = adjacency / (1 + np.maximum(degree[:, None], degree))
    return np.asarray(w + np.diag(1 - w.sum(axis=1)))


def clipped(models: Array, weights: Array, marks: Sequence[bool]) -> Array:
    """ClippedGossip, told who is hostile: τ² = (1/δ) Σ_honest W_j‖d_j‖², δ the hostile weight; δ = 0:
    plain gossip."""
    apart, bad = models - models[0], np.array(marks)
    length = np.sqrt(np.square(apart).sum(axis=1))
    delta = weights[bad].sum()
    tau = np.sqrt((weights * length**2)[~bad].sum() / delta) if delta else np.inf
    scale = np.minimum(1, tau / np.maximum(length, 1e-300))
    return np.asarray(models[0] + ((weights * scale)[:, None] * apart).sum(axis=0))


def balanced(models: Array, share: float) -> Array:
    """BALANCE: those within .3·exp(−t/T)·‖own‖, averaged, and that with one's own; nobody near: one's own."""
    length = np.sqrt(np.square(models[1:] - models[0]).sum(axis=1))
    near = models[1:][length <= 0.3 * np.exp(-share) * np.sqrt(np.square(models[0]).sum())]
    return np.asarray((models[0] + near.mean(axis=0)) / 2 if len(near) else models[0])


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]
