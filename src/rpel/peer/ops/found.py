"""Founding a network: a stall-proof plan, the common initial model,
and a members.toml that waits for its members."""

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpel.files import atomic
from rpel.peer.config.membership import INIT_FILE, Founding, Membership
from rpel.peer.config.settings import BUILT_IN_TASKS, check_task
from rpel.peer.core import wire
from rpel.peer.io import model_files
from rpel.peer.io.learner import training
from rpel.peer.io.private import ASKED, asked_of
from rpel.planning import Plan
from rpel.planning.traffic import shortest_period

_TABLE = ("lr", "momentum", "weight_decay", "batch_size", "model", "partition", "alpha")
"""What members.toml says of a built-in task, even where it is the default: a default may change one day."""


NO_TASK = "none"
"""The task of a network whose members train in loops of their own."""


@dataclass(frozen=True)
class Founded:
    """A new network: what its founder decided, what followed, the size of its models,
    and the two files to hand out."""

    founding: Founding
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

    def shortest_period(self, upstream: str | None) -> float | None:
        """The shortest period if members can send at this rate, such as "20Mbit";
        None where it is not given."""
        if upstream is None:
            return None
        return shortest_period(self.membership.nodes, self.membership.pull, self.layout.size, upstream)

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain JSON values."""
        m, plan = self.membership, self.plan
        shared = ("run", "byzantine", "rounds", "pull", "b_hat", "confidence", "rule", "local_steps")
        return {
            "peers": m.nodes,
            **{key: getattr(m, key) for key in shared},
            "no_shows": self.founding.late,
            "strong_catch_up": self.founding.strong_catch_up,
            **{key: getattr(plan, key) for key in ("probability", "messages_per_round")},
            "bytes_per_round": self.bytes_per_round,
            "parameters": self.layout.d,
            "wire": m.wire,
            "bytes_per_message": self.layout.size,
            "task": self.task,
            **{key: getattr(m, key) for key in ("epoch", "period", "deadline")},
            "hyperparameters": dict(m.hyperparameters),
            "members": str(self.members),
            "init": str(self.init),
        }


def new(
    founding: Founding,
    *,
    task: str = "mnist-sample",
    model: Path | None = None,
    seed: int = 0,
    out: Path = Path(),
) -> Founded:
    """Write members.toml (no members yet) and init.safetensors into ``out``,
    where nothing is ever overwritten.

    The run is called as the founding says, or as the task, with 128 random bits behind it, so that what was
    signed in one network proves nothing in another, founded again under the same name.
    """
    if task != NO_TASK:
        check_task(task)
    if model is not None and not model.is_file():
        raise ValueError(f"there is no file {model}: --model takes a safetensors file")
    members, init = out / "members.toml", out / INIT_FILE
    name = founding.run or ("network" if task == NO_TASK else task.partition(":")[0])
    run = f"{name}-{secrets.token_hex(16)}"
    planned = founding.plan  # what cannot be planned is said before a model is made
    founding = founding.replace(run=run, hyperparameters=_table(task, founding))
    layout, body = _initial(task, model, founding.hyperparameters, seed)
    membership = founding.membership(layout.sha256, hashlib.sha256(body).hexdigest())
    for path in (members, init):
        if path.exists() and (path == members or path.read_bytes() != body):
            raise ValueError(
                f"{path} exists already and is not overwritten: choose another folder with --out"
            )
    with atomic(init) as file:
        file.write(body)
    membership.save(members)
    return Founded(founding, planned, membership, replace(layout, wire=membership.wire), task, members, init)


def notes(founding: Founding) -> list[str]:
    """Sentences on what few peers cannot have."""
    few = f"{founding.nodes} peers, {founding.byzantine} of them hostile"
    sentences = []
    if founding.no_shows is None and founding.late < 2:
        sentences.append(f"--no-shows is {founding.late} instead of the usual 2: more does not fit {few}")
    if not founding.strong_catch_up:
        sentences.append(
            f"{few}, cannot each pull 3 b_hat + 1 + {founding.late} others: a peer that missed rounds may "
            "have to count its own old model among the answers, and hostile members can hold it back while "
            "they are silent"
        )
    if founding.plan.pull == founding.nodes - 1:
        sentences.append(
            f"pulling saves nothing among {few}: s = {founding.plan.pull} is all the others; with as many "
            f"hostile ones it does from n = {_worth(founding)} on"
        )
    return sentences


def _worth(founding: Founding) -> int:
    """The number of peers from which on each pulls fewer than all others."""
    nodes = founding.nodes + 1
    while founding.replace(nodes=nodes).plan.pull == nodes - 1:
        nodes += 1
    return nodes


def _initial(task: str, model: Path | None, table: Mapping[str, Any], seed: int) -> tuple[wire.Layout, bytes]:
    """The common initial model: the user's file as it is,
    or for a built-in task in the order of its module."""
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


def _table(task: str, founding: Founding) -> dict[str, Any]:
    """The table [hyperparameters]: for a built-in task checked and complete, for the user's own as given."""
    given, own = founding.hyperparameters, task not in BUILT_IN_TASKS
    checked = training(given, own, founding.rounds)
    if own:
        return dict(given)
    known = [key for key in dict.fromkeys((*_TABLE, *given)) if key not in ASKED]
    table = {key: getattr(checked, key) for key in known} | asked_of(given)
    return {key: [list(piece) for piece in v] if isinstance(v, tuple) else v for key, v in table.items()}


# --- what people write --------------------------------------------------------------------------------------


def parse_epoch(text: str | None, now: datetime) -> float:
    """When round 1 begins, in seconds since 1970: a time with its zone, +seconds from now,
    or the next full hour.

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
            f"epoch {text!r} is not a time to come: the nearest is +0, and +600 leaves ten minutes"
        )
    return epoch


def _moment(text: str) -> float:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("no time zone")
    return moment.timestamp()
