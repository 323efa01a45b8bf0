"""Rehearse a network on one's own data, split among simulated members, before anything is real.

What it shows depends on the data being like those of the other members: they are not here to be asked.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rpel import data, models
from rpel.peer.config.membership import INIT_FILE, Membership
from rpel.peer.config.settings import BUILT_IN_TASKS, Config
from rpel.peer.core import wire
from rpel.peer.learn.learner import own_task, seed_of, training
from rpel.peer.state.models import load
from rpel.runs.columns import ends
from rpel.simulation.api import simulate
from rpel.spec import Training
from rpel.tasks import Task


def rehearse(
    config: Path,
    attack: str = "alie",
    *,
    rounds: int | None = None,
    seed: int = 0,
    progress: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Split this member's data among the honest members and train, by the network's rule and by the mean.

    Returns the results as plain JSON values.

    Args:
        config: A peer.toml; its members.toml may still lack members.
        attack: What the hostile members send.
        rounds: Fewer rounds than the network's, for a quick look.
        seed: Where all randomness comes from.
        progress: Called with each round.
    """
    peer = Config.load(config)
    m = Membership.load(peer.members, draft=True)
    hyper = training(m.hyperparameters, peer.task not in BUILT_IN_TASKS, m.rounds)
    given, examples = _given(peer, m, hyper)
    honest = m.nodes - m.byzantine
    batch = min(hyper.batch_size, examples // honest)
    if not batch:
        raise ValueError(f"{examples} training examples cannot be split among {honest} honest members")
    nesterov = f"nesterov({m.outer_lr}, momentum={m.outer_momentum})"
    outer = "none" if m.outer == "none" else nesterov
    fields: dict[str, Any] = {
        "nodes": m.nodes, "byzantine": m.byzantine, "pull": m.pull, "b_hat": m.b_hat,
        "rounds": rounds or m.rounds, "local_steps": m.local_steps, "lr": hyper.lr,
        "momentum": hyper.momentum, "weight_decay": hyper.weight_decay, "optimizer": hyper.optimizer,
        "outer": outer, "wire": m.wire, "batch_size": batch, "eval_every": hyper.eval_every,
        "eval_size": hyper.eval_size, "attack": attack, "partition": "iid", "seed": seed, "out": None,
        "progress": progress,
    }  # fmt: skip
    robust, averaging = (simulate(**given, **fields, rule=rule) for rule in (m.rule, "mean"))
    facts: dict[str, Any] = {"nodes": m.nodes, "byzantine": m.byzantine, "pull": m.pull, "b_hat": m.b_hat}
    facts |= {"rounds": len(robust.rows), "rule": m.rule, "attack": attack}
    facts |= {"batch_size": batch, "measure": robust.measure}
    for after, result in (("", robust), ("_averaging", averaging)):
        mean, worst = ends(result.rows)
        facts |= {f"mean{after}": mean, f"worst{after}": worst}
    return facts


def _given(peer: Config, m: Membership, hyper: Training) -> tuple[dict[str, Any], int]:
    """Return what a simulation takes, model and data, and the number of examples."""
    first = peer.members.parent / INIT_FILE
    if peer.task in BUILT_IN_TASKS:
        dataset = data.load(peer.task, peer.data)
        module = models.model(hyper.model, dataset.shape, dataset.classes)
        return {
            "model": _load_initial(module, first),
            "dataset": peer.task,
            "data_dir": peer.data,
        }, dataset.size
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
    task.module, task.shards = _load_initial(models.initialised(task.module, seed_of(m.run)), first), None
    return {"task": task}, task.dataset.size


def _load_initial(module: nn.Module, path: Path) -> nn.Module:
    """Return a copy of the module with the values of the network's first model, by name."""
    layout, values = load(path)
    wire.check_layout(layout, models.shapes(module), "the task's model")
    copied = copy.deepcopy(module)
    parameters = dict(copied.named_parameters())
    with torch.no_grad():
        for name, value in wire.split(layout, values).items():
            parameters[name].copy_(torch.from_numpy(value.copy()))
    return copied
