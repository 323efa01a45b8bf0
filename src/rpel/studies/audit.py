"""The curious member: what it finds out about a victim's examples from the half-steps that it pulled.

A run is played again from its Spec, which is deterministic, with one change at one node, the victim: each of
its examples is left out by a fair coin, and canaries are put beside them, each there by a fair coin as well.
Rates stay those of the run, as if nothing had changed, so the accountant's ε is the run's.
Who is there is then guessed:

- of examples, by the loss of the model seen last (low: there), or by the ratio of likelihoods of that loss
  under shadow runs with and without the example (Carlini et al. 2022);
- of canaries, by how far the victim's updates point along the canary's gradient, summed over the rounds seen,
  less what ordinary examples explain of it; from that comes a lower bound on ε (`rpel.auditing`).

Two members guess. One sees the victim's half-step in every round, and knows the model it started from and
which of its own examples are there: of somebody who knows all but the canaries, differential privacy says the
same. The other meets it by the plan's draws, and knows its own model and its own examples only.
Invariant: coins are drawn for this and nothing else, and no guess looks at them.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from rpel import auditing
from rpel.backend.threads import one_torch_thread
from rpel.data import Dataset
from rpel.randomness import stream
from rpel.record import OWN
from rpel.simulation.build import build_task
from rpel.simulation.engine import Engine
from rpel.simulation.inputs import Download, Gathered, Inputs, loader
from rpel.simulation.methods import Resolved, build_network
from rpel.simulation.run import prepared
from rpel.simulation.workers import pinned
from rpel.spec import Request
from rpel.studies import plots
from rpel.tasks import Classification
from rpel.tasks.engines.engine import tensor
from rpel.types import Floats, Integers

log = logging.getLogger("rpel")

EVERY, DRAWN = "every round", "by draws"
DELTA = 1e-5
"""Of the audit of a run that states none."""
_USUAL = 500  # examples whose gradients stand for those of all ordinary ones
_RIDGE = 0.1  # of the least squares that tell canaries apart
_AT_ONCE = 1 << 23  # numbers in the gradients of canaries that are there at once

Progress = Callable[[str, int, int], None]
"""progress(what, round, rounds)"""


@dataclass(frozen=True)
class Point:
    """What a member knows after a round.

    met: rounds in which it saw the victim. auc, tpr: of the victim's examples, by their loss. ratio_auc,
    ratio_tpr: by likelihood ratio, with shadow runs. canary_auc, epsilon_low: of the canaries.
    """

    round: int
    met: int
    auc: float = math.nan
    tpr: float = math.nan
    ratio_auc: float | None = None
    ratio_tpr: float | None = None
    canary_auc: float = math.nan
    epsilon_low: float = 0.0


@dataclass(frozen=True)
class Findings:
    """The curves of both members, and what to compare them with."""

    victim: int
    member: int
    examples: int
    """How many of the victim's own were to be guessed."""
    included: int
    canaries: int
    clipped: bool
    shadows: int
    confidence: float
    delta: float
    most: float
    """The largest bound that so many canaries could show."""
    stated: list[float | None]
    """The victim's ε after the rounds of the curves, by the accountant; None where nothing is stated."""
    curves: dict[str, list[Point]]

    @property
    def epsilon_low(self) -> float:
        """The bound of the member that sees every round, after the last one.

        The confidence is that of one bound, so the verdict rests on one, chosen beforehand.
        """
        return self.curves[EVERY][-1].epsilon_low

    @property
    def holds(self) -> bool | None:
        """Whether that bound is at most what is stated; None where nothing is stated."""
        return None if self.stated[-1] is None else self.epsilon_low <= self.stated[-1]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "epsilon_low": self.epsilon_low, "holds": self.holds}


def attack(
    spec: Request,
    own: Inputs | None = None,
    *,
    victim: int | None = None,
    canaries: int = 200,
    shadows: int = 0,
    points: int = 12,
    clipping: bool = True,
    delta: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    download: Download | None = None,
) -> Findings:
    """Play a run again and let the curious member guess.

    victim: its number among the honest nodes; the first if left out. shadows: further runs for the likelihood
    ratio, an even number. points: rounds at which the curves are drawn. clipping=False breaks the mechanism
    on purpose: the bound must then exceed what is stated, or the audit proves nothing. delta: of the audit;
    the run's if left out. seed: of the coins.
    """
    if canaries < 20:
        raise ValueError(f"{canaries} canaries are too few to show anything: use 20 or more, 200 by default")
    if shadows % 2 or shadows < 0:
        raise ValueError(
            f"shadows {shadows} must be even, since they come in pairs: the nearest is {shadows + 1}"
        )
    if delta is not None and not 0 < delta < 1:
        raise ValueError(f"delta {delta:g} is not a probability between 0 and 1")
    if points < 1:
        raise ValueError(f"a curve needs at least 1 point, not {points}")
    resolved, inputs = prepared(spec, own or Inputs(), loader(download))
    if not clipping and resolved.spec.privacy == "none":
        raise ValueError(
            "this run does not clip, so clipping cannot be switched off: leave --without-clipping out"
        )
    with pinned(resolved.spec.threads), one_torch_thread():
        stage = _Stage(resolved, inputs, canaries, seed, victim, clipping)
        return stage.findings(shadows, points, delta, progress or (lambda what, t, rounds: None))


def drawing(findings: Findings) -> Any:
    """Both curves: how well examples are told apart, and the bounds beside what is stated."""
    figure, ((first, second),) = plots.canvas(10.0, 4.2, 1, 2)
    for colour, (name, points) in zip(plots.COLOURS, findings.curves.items(), strict=False):
        rounds = [p.round for p in points]
        first.plot(
            rounds, [p.auc for p in points], color=colour, marker="o", markersize=3.5, label=f"loss, {name}"
        )
        if findings.shadows:
            ratio = [math.nan if p.ratio_auc is None else p.ratio_auc for p in points]
            first.plot(rounds, ratio, color=colour, linestyle="--", label=f"likelihood ratio, {name}")
        first.plot(
            rounds, [p.canary_auc for p in points], color=colour, linestyle=":", label=f"canaries, {name}"
        )
        second.plot(
            rounds, [p.epsilon_low for p in points], color=colour, marker="o", markersize=3.5, label=name
        )
    first.axhline(0.5, color=plots.SOFT, linewidth=0.8)
    first.set(xlabel="round", ylabel="AUC of membership inference", ylim=(0.3, 1.02))
    stated = [
        (t.round, e) for t, e in zip(findings.curves[EVERY], findings.stated, strict=True) if e is not None
    ]
    if stated:
        second.plot(*zip(*stated, strict=True), color=plots.COLOURS[6], label="stated by the accountant")
    second.set(xlabel="round", ylabel=f"ε, at least ({findings.confidence:.0%} sure)", ylim=(0, None))
    for axes in (first, second):
        axes.legend(frameon=False, fontsize="small")
    return figure


# --- what is changed at the victim --------------------------------------------------------------------------


def with_canaries(dataset: Dataset, count: int, seed: int) -> Dataset:
    """Append canaries to the training examples of a data set.

    A canary is noise unlike any example, with a random label.

    Images: single bright pixels, as many as keep the mean. Other numbers: two deviations from the mean,
    up or down.
    """
    coins = stream(seed, "canaries")
    if not isinstance(dataset.train_x, np.ndarray) or dataset.collate is not None or dataset.labels is None:
        raise ValueError(
            f"canaries need examples that are one array with a class each; those of {dataset.name} are not"
        )
    x = dataset.train_x
    if dataset.mean is not None:
        bright = np.broadcast_to(np.array(dataset.mean).reshape(-1, *(1,) * (x.ndim - 2)), x.shape[1:])
        made = (coins.random((count, *x.shape[1:])) < bright) * (255 if x.dtype == np.uint8 else 1)
    else:
        made = x.mean(axis=0) + 2 * x.std(axis=0) * coins.choice([-1, 1], (count, *x.shape[1:]))
    labels = coins.integers(dataset.classes, size=count)
    return replace(
        dataset,
        train_x=np.concatenate([x, made.astype(x.dtype)]),
        train_y=np.concatenate([dataset.train_y, labels.astype(dataset.train_y.dtype)]),
        writers=None,
    )


@dataclass(frozen=True)
class _Play:
    """One playing of the run: who is there of the victim's examples and of the canaries."""

    examples: NDArray[np.bool_]
    canaries: NDArray[np.bool_]
    seed: int


@dataclass
class _Notes:
    """What one member has recorded.

    It holds the rounds in which it met the victim, the canaries' scores so far, and, at each point of the
    curve, the last round seen, the examples' losses in that round, and the scores.
    """

    scores: Floats
    met: int = 0
    last: int = 0
    seen: Floats | None = None
    points: list[tuple[int, int, int, Floats | None, Floats]] = field(default_factory=list)


class _Stage:
    """The run, the victim, and what is put beside its examples."""

    def __init__(
        self, run: Resolved, inputs: Gathered, canaries: int, seed: int, victim: int | None, clipping: bool
    ) -> None:
        spec, task = run.spec, build_task(run, inputs)
        held = task.examples.held
        if not held:
            raise ValueError(
                f"partition {spec.partition!r} shares examples between nodes, so nobody's can be guessed"
            )
        if len(held) < 2:
            raise ValueError("a run with one honest node has no other member that could be curious")
        row = 0 if victim is None else victim
        if not 0 <= row < len(held):
            raise ValueError(
                f"victim {row} is none of the {len(held)} honest nodes: the last is {len(held) - 1}"
            )
        self.run, self.spec, self.inputs, self.clipping, self.seed = run, spec, inputs, clipping, seed
        self.module, self.metric_free = task.module, replace(inputs, metric=None)
        self.nodes, self.shards = list(held), list(held.values())
        self.place, self.row = row, self.nodes[row]
        self.beside = (row + 1) % len(held)
        self.member = self.nodes[self.beside]
        self.own = self.shards[row]
        self.dataset = with_canaries(task.examples.dataset, canaries, seed)
        self.planted = np.arange(task.examples.dataset.size, self.dataset.size)

    def findings(self, shadows: int, points: int, delta: float | None, progress: Progress) -> Findings:
        """Play, guess, and say what was found."""
        coins = stream(self.seed, "curious")
        play = _Play(coins.random(len(self.own)) < 0.5, coins.random(len(self.planted)) < 0.5, self.spec.seed)
        simulation, task = self._simulation(play)
        last = self.spec.rounds if simulation.budget is None else simulation.budget.affordable
        rounds = [-(-last * i // min(points, last)) for i in range(1, min(points, last) + 1)]
        budget = simulation.budget
        delta = delta or (DELTA if budget is None else budget.delta)
        rate = 0.0 if budget is None else float(budget.rates[self.place])
        stated = [None if budget is None else replace(budget, delta=delta).of(rate, t) for t in rounds]
        most = _most(len(self.planted), delta, stated[-1])
        notes = self._watched(simulation, task, play, rounds, progress)
        ratios = self._ratios(notes, shadows, progress)
        curves = {
            name: [self._point(one, play, delta, ratios.get((name, i))) for i, one in enumerate(note.points)]
            for name, note in notes.items()
        }
        ids = simulation.roster.honest_ids(1) if not simulation.everybody else np.arange(self.spec.nodes)
        return Findings(
            victim=int(ids[self.row]), member=int(ids[self.member]), examples=len(self.own),
            included=int(play.examples.sum()), canaries=len(self.planted), clipped=self.clipping,
            shadows=shadows, confidence=auditing.CONFIDENCE, delta=delta,
            most=most, stated=stated, curves=curves,
        )  # fmt: skip

    def _simulation(self, play: _Play) -> tuple[Engine, Classification]:
        there = np.concatenate([self.own[play.examples], self.planted[play.canaries]])
        shards = [there if i == self.place else own for i, own in enumerate(self.shards)]
        spec = self.spec.replace(partition=OWN, seed=play.seed)
        network = build_network(spec, self.run.pull, self.run.attack.flood)
        run = replace(self.run, spec=spec, network=network)
        given = replace(self.metric_free, dataset=self.dataset, shards=shards, module=self.module)
        task = build_task(run, given)
        simulation = Engine(run, task, optimizer=self.inputs.optimizer, sizes={self.row: len(self.own)})
        if not self.clipping:
            _unclipped(simulation)
        return simulation, task

    # --- watching ---

    def _watched(
        self, simulation: Engine, task: Classification, play: _Play, rounds: list[int], progress: Progress
    ) -> dict[str, _Notes]:
        """The notes of both members."""
        notes = {name: _Notes(np.zeros(len(self.planted))) for name in (EVERY, DRAWN)}
        known = {EVERY: self.own[play.examples], DRAWN: self.shards[self.beside]}
        for t in range(1, rounds[-1] + 1):
            starts = {
                EVERY: simulation.state.x[self.row].copy(),
                DRAWN: simulation.state.x[self.member].copy(),
            }
            info = simulation.step()
            seen = np.array(info.received.table[self.row])
            met = {EVERY: True, DRAWN: bool((info.received.index[self.member, 1:] == self.row).any())}
            for name, one in notes.items():
                if met[name]:
                    one.met, one.last, one.seen = one.met + 1, t, seen
                    one.scores += self._along(simulation, task, starts[name], seen, known[name], t)
                if t in rounds:
                    lost = None if one.seen is None else losses(task, one.seen, self.own)
                    one.points.append((t, one.met, one.last, lost, one.scores.copy()))
            progress("watching", t, rounds[-1])
        return notes

    def _along(
        self,
        simulation: Engine,
        task: Classification,
        start: Floats,
        seen: Floats,
        rows: Integers,
        t: int,
    ) -> Floats:
        """Project the victim's update onto each canary's gradient, (m,).

        `start` is the model that the victim started from, as far as it is known; gradients are taken there.
        What ordinary examples (`rows`) and the canary's label explain is subtracted.
        """
        update = (start - seen).astype(np.float64)
        if self.spec.optimizer == "momentum":  # weight decay and the learning rate are known
            update = update / self.spec.rate(t) - self.spec.weight_decay * start
        usual = self._usual(simulation, task, start, rows)
        along = np.nan_to_num(by_example(task, start, self.planted))
        along /= np.maximum(np.linalg.norm(along, axis=1, keepdims=True), 1e-30)
        raw, expected = (along @ np.stack([update, usual], axis=1).astype(along.dtype)).astype(np.float64).T
        labels = task.examples.dataset.train_y[self.planted]
        known = np.column_stack([labels[:, None] == np.unique(labels), expected]).astype(np.float64)
        rest = raw - known @ np.linalg.lstsq(known, raw, rcond=None)[0]
        # canaries are not quite orthogonal: attribute to each its own part
        alike = (along @ along.T).astype(np.float64)
        return np.asarray(np.linalg.solve(alike + _RIDGE * np.eye(len(alike)), rest))

    def _usual(self, simulation: Engine, task: Classification, x: Floats, rows: Integers) -> Floats:
        """(d,) the sum of some examples' gradients at x, clipped as the run clips."""
        rows, out = rows[:_USUAL], torch.empty(1, len(x))
        private: Any = simulation.gradients
        inputs, labels = task.examples.batch(rows[None], None, torch.float32)
        local, norm = tensor(task.local_state(1)), getattr(private, "max_grad_norm", None)
        if norm is None:
            task.engine.gradient(tensor(x[None]), local, inputs, labels, [], out, train=False)
        else:
            there, seeds = torch.ones(1, len(rows), dtype=torch.bool), np.zeros((1, len(rows)), np.int64)
            private.engine.clipped(tensor(x[None]), local, inputs, labels, seeds, there, norm, out)
        return np.asarray(np.nan_to_num(out[0].numpy()))

    # --- guessing ---

    def _point(
        self,
        noted: tuple[int, int, int, Floats | None, Floats],
        play: _Play,
        delta: float,
        ratios: Floats | None,
    ) -> Point:
        t, met, _, lost, scores = noted
        if lost is None:
            return Point(t, met)
        there, away = -lost[play.examples], -lost[~play.examples]
        by_ratio = None if ratios is None else (ratios[play.examples], ratios[~play.examples])
        return Point(
            t,
            met,
            auditing.auc(there, away),
            auditing.true_positives(there, away),
            None if by_ratio is None else auditing.auc(*by_ratio),
            None if by_ratio is None else auditing.true_positives(*by_ratio),
            auditing.auc(scores[play.canaries], scores[~play.canaries]),
            auditing.audit(scores, play.canaries, delta).epsilon,
        )

    def _ratios(
        self, notes: dict[str, _Notes], shadows: int, progress: Progress
    ) -> dict[tuple[str, int], Floats]:
        """Compute log-likelihood ratios (N,) of the examples at each point of each curve.

        Shadow runs come in pairs: each example is present in one run of a pair and absent from the other.
        """
        if not shadows:
            return {}
        wanted = sorted({point[2] for one in notes.values() for point in one.points if point[3] is not None})
        shadow_losses: dict[int, list[Floats]] = {t: [] for t in wanted}
        there = []
        for number in range(shadows):
            coins = stream(self.seed, ("shadow", number // 2))
            first = _Play(coins.random(len(self.own)) < 0.5, coins.random(len(self.planted)) < 0.5, 0)
            flip = bool(number % 2)
            play = _Play(first.examples ^ flip, first.canaries ^ flip, self.spec.seed + 1 + number)
            simulation, task = self._simulation(play)
            there.append(play.examples)
            for t in range(1, max(wanted, default=0) + 1):
                info = simulation.step()
                if t in shadow_losses:
                    shadow_losses[t].append(
                        confidence(losses(task, np.array(info.received.table[self.row]), self.own))
                    )
                progress(f"shadow {number + 1} of {shadows}", t, max(wanted))
        return {
            (name, i): likelihood_ratios(confidence(lost), np.stack(shadow_losses[last]), np.stack(there))
            for name, one in notes.items()
            for i, (_, _, last, lost, _) in enumerate(one.points)
            if lost is not None
        }


def _most(canaries: int, delta: float, stated: float | None) -> float:
    """Return the largest bound that the audit can show, after saying whether that is enough."""
    most, enough = auditing.most(canaries, delta), auditing.canaries_for(stated or 0.0, delta)
    sure = f"at delta {delta:g} ({auditing.CONFIDENCE:.0%} sure)"
    more = f"use {enough}" if enough else "no number of canaries can; audit a run that states less"
    if not most:
        raise ValueError(f"{canaries} canaries show no epsilon {sure}: use a smaller delta, such as 1e-5")
    log.info("%d canaries can show an epsilon of at most %.2f %s", canaries, most, sure)
    if stated is not None and most <= stated:
        log.warning(
            "this run states an epsilon of %.3g: %d canaries cannot show more, whatever is wrong with it: %s",
            stated, canaries, more,
        )  # fmt: skip
    return most


def _unclipped(simulation: Engine) -> None:
    """Break a simulation on purpose: its noise stays, its gradients are not clipped."""
    gradients: Any = simulation.gradients
    clipped = gradients.engine.clipped

    def whole(
        x: Any, local: Any, inputs: Any, labels: Any, seeds: Any, present: Any, norm: float, out: Any
    ) -> None:
        clipped(x, local, inputs, labels, seeds, present, math.inf, out)

    vars(gradients.engine)["clipped"] = whole


def by_example(task: Classification, x: Floats, rows: Integers) -> Floats:
    """(B, d) the gradients at x (d,) of single training examples."""
    size, out = max(1, _AT_ONCE // len(x)), torch.empty(len(rows), len(x))
    for some in (slice(at, at + size) for at in range(0, len(rows), size)):
        inputs, labels = task.examples.batch(rows[some, None], None, torch.float32)
        count = len(labels)
        given = tensor(np.tile(x, (count, 1))), tensor(task.local_state(count))
        task.engine.gradient(*given, inputs, labels, [], out[some], train=False)
    return np.asarray(out.numpy())


def losses(task: Classification, x: Floats, rows: Integers) -> Floats:
    """(N,) the loss of the model x (d,) on each of these training examples."""
    parts, model, local = [], tensor(x[None]), tensor(task.local_state(1))
    for some in (rows[at : at + task.engine.block] for at in range(0, len(rows), task.engine.block)):
        inputs, labels = (part[0] for part in task.examples.batch(some[None], None, torch.float32))
        with torch.no_grad():
            output = task.engine.outputs(model, local, inputs)[0]
            parts.append(F.nll_loss(F.log_softmax(output, dim=1), labels, reduction="none").double().numpy())
    return np.concatenate(parts)


def confidence(lost: Floats) -> Floats:
    """log p/(1 − p) of the true class, from its cross-entropy: nearly normal, which losses are not.

    >>> confidence(np.array([np.log(2), np.log(4 / 3)])).round(3)
    array([0.   , 1.099])
    """
    p = np.clip(np.exp(-lost), 1e-12, 1 - 1e-12)
    return np.asarray(np.log(p) - np.log1p(-p))


def likelihood_ratios(seen: Floats, shadows: Floats, there: NDArray[np.bool_]) -> Floats:
    """Compute log-likelihood ratios (N,) of the observed values (N,).

    Normal distributions are fitted to the shadows (k, N) in which an example was present and to those in
    which it was absent. All examples share their variances, because shadows are few.

    >>> shadows = np.array([[1.0, 5.0], [3.0, 2.0]])
    >>> likelihood_ratios(np.array([3.0, 2.0]), shadows,
    ...     np.array([[False, True], [True, False]])).round(1).tolist()
    [200000000.0, -450000000.0]
    """
    laws = []
    for which in (there, ~there):
        mean = np.where(which, shadows, 0).sum(axis=0) / np.maximum(which.sum(axis=0), 1)
        rest = np.where(which, shadows - mean, 0.0)
        variance = max(float(np.square(rest).sum() / max(which.sum() - which.shape[1], 1)), 1e-8)
        laws.append(-np.square(seen - mean) / (2 * variance) - 0.5 * math.log(variance))
    return np.asarray(laws[0] - laws[1])
