"""Make a new network: a plan that does not stall, the initial model, and a members.toml without members."""

import hashlib
import math
import secrets
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpel import planning
from rpel.files import atomic
from rpel.peer.config.membership import INIT_FILE, Membership, content_hash
from rpel.peer.config.settings import BUILT_IN_TASKS, check_task
from rpel.peer.core import wire
from rpel.peer.learn.learner import training
from rpel.peer.learn.privacy import ASKED, asked_of
from rpel.peer.state import models as model_files
from rpel.planning import Plan
from rpel.planning.traffic import bits_per_second, pullers
from rpel.types import CONFIDENCE, ROBUST_RULE

NO_TASK = "none"
"""The task of a network whose members train in loops of their own."""

MARGIN = 2.0
"""A round is planned to take this many times what a line needs for it: other hours are busier."""

USUAL_LATE = 2
"""How many honest peers may be late in a round, unless few peers allow fewer only."""

_TABLE = ("lr", "momentum", "weight_decay", "batch_size", "model", "partition")
"""Keys of a built-in task that members.toml has even for default values: a default may change one day."""


# --- plan ---------------------------------------------------------------------------------------------------


def stall_proof(
    nodes: int, byzantine: int, rounds: int, confidence: float = CONFIDENCE, no_shows: int | None = None
) -> Plan:
    """Plan how many peers each one pulls from, so that hostile and late peers cannot stall a round.

    A round asks s peers and aggregates with 2 b̂ answers. All b̂ hostile ones may be silent and F honest ones
    late, so s ≥ 3 b̂ + F. The plan has one more where it fits (:func:`strong_catch_up`).

    Args:
        nodes: Number of peers, n.
        byzantine: Number of hostile peers, b.
        rounds: Rounds of the whole training, T.
        confidence: Probability that no honest peer ever pulls more than b̂ hostile models.
        no_shows: Number of honest peers that may be late, F; by default 2, or fewer if they do not fit.

    >>> plan = stall_proof(nodes=12, byzantine=2, rounds=200)
    >>> plan.pull, plan.b_hat, plan.no_shows, strong_catch_up(plan)
    (9, 2, 2, True)
    """
    terms: dict[str, Any] = {"nodes": nodes, "byzantine": byzantine, "rounds": rounds}
    terms["confidence"] = confidence

    def planned(late: int) -> Plan:
        return planning.comfortable(**terms, silent=True, no_shows=late)

    def fits(late: int) -> bool:
        try:
            return bool(planned(late))
        except ValueError:
            return False

    planned(0 if no_shows is None else min(no_shows, 0))  # raises if the sizes or a negative F are impossible
    if no_shows is not None and not fits(no_shows):
        most = bisect_left(range(nodes), True, key=lambda late: not fits(late)) - 1
        raise ValueError(
            f"no_shows {no_shows} does not fit {nodes} peers with {byzantine} hostile: the most is {most}"
        )
    late = next(filter(fits, (USUAL_LATE, 1, 0))) if no_shows is None else no_shows
    pull = planned(late + fits(late + 1)).pull
    return planning.plan(**terms, pull=pull, silent=True, no_shows=late)


def strong_catch_up(plan: Plan) -> bool:
    """Return whether a peer that missed rounds gets the 2 b̂ + 1 answers that replace its own model."""
    return plan.pull > 3 * plan.b_hat + plan.no_shows


def notes(plan: Plan, no_shows: int | None = None) -> list[str]:
    """Return sentences on what few peers cannot have; ``no_shows`` is the number that was asked for."""
    few = f"{plan.nodes} peers with {plan.byzantine} hostile ones"
    sentences = []
    if no_shows is None and plan.no_shows < USUAL_LATE:
        sentences.append(
            f"--no-shows is {plan.no_shows} instead of the usual {USUAL_LATE}: more does not fit {few}"
        )
    if not strong_catch_up(plan):
        sentences.append(
            f"{few} cannot each pull 3 b_hat + 1 + {plan.no_shows} others: a peer that missed rounds may "
            "have to count its own old model among the answers, and silent hostile members can hold it back"
        )
    if plan.pull == plan.nodes - 1:
        first = plan.nodes + 1
        while stall_proof(first, plan.byzantine, plan.rounds, plan.confidence, no_shows).pull == first - 1:
            first += 1
        sentences.append(
            f"pulling saves no messages among {few}: s = {plan.pull} is all the others; it does from n = "
            f"{first} on"
        )
    return sentences


def draft(
    plan: Plan,
    *,
    period: float = 60.0,
    deadline: float | None = None,
    rule: str = ROBUST_RULE,
    hyperparameters: Mapping[str, Any] | None = None,
    **others: Any,
) -> Membership:
    """Return a membership without members.

    Args:
        plan: A plan of :func:`stall_proof`.
        period: Length of a round in seconds.
        deadline: Seconds into a round at which pulls end; 0.6 of the period by default.
        rule: How answers are aggregated.
        hyperparameters: What all members train with.
        others: The other fields of the membership.
    """
    table = dict(hyperparameters or {})
    planned = ("nodes", "byzantine", "rounds", "pull", "b_hat", "confidence")
    membership = Membership(
        **{key: getattr(plan, key) for key in planned},
        **{"local_steps": 1, **others},
        period=period,
        deadline=0.6 * period if deadline is None else deadline,
        rule=rule,
        hyperparameters=table,
        hyperparameters_sha256=content_hash(table),
    ).check(draft=True)
    sure = plan.pull - plan.b_hat - plan.no_shows
    if membership.enough > sure:
        raise ValueError(
            f"rule {rule!r} needs {membership.enough} answers a round, but only {sure} come if hostile peers "
            f"are silent and {plan.no_shows} honest ones late: choose for example {ROBUST_RULE!r}"
        )
    return membership


# --- write --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewNetwork:
    """A new network: its plan, its membership, the layout of its models, and the two files to hand out."""

    plan: Plan
    membership: Membership
    layout: wire.Layout
    task: str
    members: Path
    init: Path

    @property
    def bytes_per_round(self) -> int:
        """What all peers together pull in a round."""
        return self.plan.messages_per_round * self.layout.size

    def shortest_period(self, upstream: str) -> float:
        """Return the shortest period if members can send at this rate, such as "20Mbit".

        It is what `rpel network status` suggests for such lines.
        """
        m = self.membership
        seconds = 8 * pullers(m.nodes, m.pull) * self.layout.size / bits_per_second(upstream)
        return MARGIN * seconds * m.period / m.deadline

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        of_plan = ("byzantine", "rounds", "pull", "b_hat", "confidence", "no_shows", "probability")
        of_membership = ("run", "rule", "local_steps", "wire", "epoch", "period", "deadline")
        return {
            "peers": self.plan.nodes,
            **{key: getattr(self.plan, key) for key in (*of_plan, "messages_per_round")},
            "strong_catch_up": strong_catch_up(self.plan),
            "bytes_per_round": self.bytes_per_round,
            "parameters": self.layout.d,
            "bytes_per_message": self.layout.size,
            "task": self.task,
            **{key: getattr(self.membership, key) for key in of_membership},
            "hyperparameters": dict(self.membership.hyperparameters),
            "members": str(self.members),
            "init": str(self.init),
        }


def new(
    plan: Plan,
    *,
    run: str = "",
    task: str = "mnist-sample",
    model: Path | None = None,
    seed: int = 0,
    out: Path = Path(),
    hyperparameters: Mapping[str, Any] | None = None,
    **terms: Any,
) -> NewNetwork:
    """Write members.toml (no members yet) and init.safetensors, and overwrite nothing.

    128 random bits follow the network's name, so that signatures of one network prove nothing in another of
    the same name.

    Args:
        plan: A plan of :func:`stall_proof`.
        run: The network's name, by default the task's.
        task: What is trained: a built-in task, module:task, or ``none`` for loops of the members' own.
        model: The initial model; a built-in task draws one from ``seed`` if it is left out.
        seed: Where a built-in task's initial model comes from.
        out: The folder to write to.
        hyperparameters: What all members train with.
        terms: Further keywords of :func:`draft`.
    """
    if task != NO_TASK:
        check_task(task)
    if model is not None and not model.is_file():
        raise ValueError(f"there is no file {model}: --model takes a safetensors file")
    members, init = out / "members.toml", out / INIT_FILE
    table = _complete(task, hyperparameters or {}, plan.rounds)
    layout, body = _initial(task, model, table, seed)
    name = run or ("network" if task == NO_TASK else task.partition(":")[0])
    membership = draft(
        plan,
        run=f"{name}-{secrets.token_hex(16)}",
        model_header_sha256=layout.sha256,
        init_sha256=hashlib.sha256(body).hexdigest(),
        hyperparameters=table,
        **terms,
    )
    for path in (members, init):
        if path.exists() and (path == members or path.read_bytes() != body):
            raise ValueError(
                f"{path} exists already and is not overwritten: choose another folder with --out"
            )
    with atomic(init) as file:
        file.write(body)
    membership.save(members)
    return NewNetwork(plan, membership, replace(layout, wire=membership.wire), task, members, init)


def _initial(task: str, model: Path | None, table: Mapping[str, Any], seed: int) -> tuple[wire.Layout, bytes]:
    """Return the initial model: the user's file as it is, or a built-in task's in the order of its module."""
    if task not in BUILT_IN_TASKS:
        if model is None:
            what = "a network without a task" if task == NO_TASK else f"task {task!r}"
            raise ValueError(f"{what} needs --model FILE.safetensors, the model that all members begin with")
        return model_files.read_layout(model), model.read_bytes()
    from rpel import models

    module = models.model(table["model"], (1, 28, 28), 10, seed=seed)
    layout = wire.Layout.of(module.named_parameters())
    named: Mapping[str, Any] = dict(module.named_parameters())
    if model is not None:
        named = wire.split(*model_files.load(model))
    try:
        return layout, layout.header + bytes(wire.raw(layout, wire.flatten(layout, named)))
    except ValueError as error:
        raise ValueError(f"{model} is not a model of task {task!r} ({table['model']}): {error}") from None


def _complete(task: str, given: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return the table [hyperparameters], checked, and complete for a built-in task."""
    own = task not in BUILT_IN_TASKS
    checked = training(given, own, rounds)
    if own:
        return dict(given)
    known = [key for key in dict.fromkeys((*_TABLE, *given)) if key not in ASKED]
    return {key: getattr(checked, key) for key in known} | asked_of(given)


def parse_epoch(text: str | None, now: datetime) -> float:
    """Return when round 1 begins, in seconds since 1970.

    The text is a time with its zone or +seconds from now; without one it is the next full hour.

    >>> now = datetime(2030, 1, 1, 11, 59, 30, tzinfo=UTC)
    >>> parse_epoch(None, now) == parse_epoch("+30", now) == parse_epoch("2030-01-01T13:00+01:00", now)
    True
    """
    if text is None:
        return math.floor(now.timestamp() / 3600 + 1) * 3600.0
    try:
        epoch = now.timestamp() + float(text) if text.startswith("+") else _moment(text)
    except ValueError:
        example = f"{datetime.fromtimestamp(parse_epoch(None, now), UTC):%Y-%m-%dT%H:%MZ}"
        raise ValueError(
            f"epoch {text!r} is not valid: write a time with its zone such as {example}, or +600"
        ) from None
    if not now.timestamp() <= epoch < 1e11:
        raise ValueError(
            f"epoch {text!r} is not in the future: give a later time, or +600 for ten minutes from now"
        )
    return epoch


def _moment(text: str) -> float:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("no time zone")
    return moment.timestamp()
