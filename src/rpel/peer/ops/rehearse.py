"""A rehearsal: the network's plan and rule on one's own data, split among simulated members,
before anything is real.

What it shows depends on the data being like those of the other members: they are not here to be asked.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rpel import data, models
from rpel.peer.config.membership import INIT_FILE, OUTER, Membership
from rpel.peer.config.settings import BUILT_IN_TASKS, Config
from rpel.peer.core import wire
from rpel.peer.learn.learner import own_task, seed_of, training
from rpel.peer.state.models import load
from rpel.runs.columns import ends
from rpel.runs.run import Run
from rpel.simulation.api import simulate
from rpel.spec import Training
from rpel.tasks import Task


@dataclass(frozen=True)
class Rehearsal:
    """The same training twice: by the network's rule, and by plain averaging."""

    membership: Membership
    attack: str
    batch_size: int
    robust: Run
    averaging: Run

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        m = self.membership
        facts: dict[str, Any] = {"nodes": m.nodes, "byzantine": m.byzantine, "pull": m.pull, "b_hat": m.b_hat}
        facts |= {"rounds": len(self.robust.rows), "rule": m.rule, "attack": self.attack}
        facts |= {"batch_size": self.batch_size, "measure": self.robust.measure}
        for after, result in (("", self.robust), ("_averaging", self.averaging)):
            mean, worst = ends(result.rows)
            facts |= {f"mean{after}": mean, f"worst{after}": worst}
        return facts


def rehearse(
    config: Path,
    attack: str = "alie",
    attack_params: Mapping[str, Any] | None = None,
    *,
    rounds: int | None = None,
    seed: int = 0,
    progress: Callable[[Any], None] | None = None,
) -> Rehearsal:
    """Split this member's data among the network's honest members and train, with the hostile ones attacking.

    config: peer.toml; members.toml may still lack members. rounds: fewer than the network's,
    for a quick look.
    """
    peer = Config.load(config)
    m = Membership.load(peer.members, draft=True)
    hyper = training(m.hyperparameters, peer.task not in BUILT_IN_TASKS, m.rounds)
    given, examples = _given(peer, m, hyper)
    honest = m.nodes - m.byzantine
    batch = min(hyper.batch_size, examples // honest)
    if not batch:
        raise ValueError(f"{examples} training examples cannot be split among {honest} honest members")
    fields: dict[str, Any] = {
        "nodes": m.nodes, "byzantine": m.byzantine, "pull": m.pull, "b_hat": m.b_hat,
        "rounds": rounds or m.rounds, "local_steps": m.local_steps, "lr": hyper.lr,
        "momentum": hyper.momentum, "weight_decay": hyper.weight_decay, "optimizer": hyper.optimizer,
        "optimizer_params": hyper.optimizer_params,
        **{key: getattr(m, key) for key in (*OUTER, "wire")}, "batch_size": batch,
        "eval_every": hyper.eval_every, "eval_size": hyper.eval_size, "attack": attack,
        "attack_params": dict(attack_params or {}), "partition": "iid", "seed": seed, "out": None,
        "progress": progress,
    }  # fmt: skip
    robust, averaging = (simulate(**given, **fields, rule=rule) for rule in (m.rule, "mean"))
    return Rehearsal(m, attack, batch, robust, averaging)


def _given(peer: Config, m: Membership, hyper: Training) -> tuple[dict[str, Any], int]:
    """Network and data for a simulation, the network with the values that all members begin with;
    and their number."""
    first = peer.members.parent / INIT_FILE
    if peer.task in BUILT_IN_TASKS:
        dataset = data.load(peer.task, peer.data)
        module = models.model(hyper.model, dataset.shape, dataset.classes)
        return {"model": _begun(module, first), "dataset": peer.task, "data_dir": peer.data}, dataset.size
    ids = [member.id for member in m.members]
    index = ids.index(peer.id) if peer.id in ids else 0
    arguments: dict[str, Any] = {"index": index, "nodes": m.nodes, "seed": seed_of(m.run), "data": peer.data}
    arguments["hyperparameters"] = dict(m.hyperparameters)
    task = own_task(peer.task, peer.task_dir.absolute(), arguments)
    if not isinstance(task, Task):
        raise ValueError(
            f"task {peer.task!r} is a {type(task).__name__}, whose data cannot be split: a rehearsal needs "
            "a rpel.tasks.Task(model, train, test)"
        )
    task = copy.copy(task)
    task.module, task.shards = _begun(models.initialised(task.module, seed_of(m.run)), first), None
    return {"task": task}, task.dataset.size


def _begun(module: nn.Module, path: Path) -> nn.Module:
    """The module with the values of the network's first model, by name."""
    layout, values = load(path)
    wire.check_layout(layout, models.shapes(module), "the task's model")
    begun = copy.deepcopy(module)
    parameters = dict(begun.named_parameters())
    with torch.no_grad():
        for name, value in wire.split(layout, values).items():
            parameters[name].copy_(torch.from_numpy(value.copy()))
    return begun
