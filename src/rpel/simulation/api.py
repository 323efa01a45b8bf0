"""The public functions of the simulator: simulate, resume, load."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from torch import nn

from rpel.algorithm import Problem
from rpel.attacks import Attack
from rpel.attacks import attack as make_attack
from rpel.component import check_callable
from rpel.models import Factory
from rpel.rules import Rule
from rpel.runs.run import Run, Runs
from rpel.simulation.inputs import Download, Inputs
from rpel.simulation.loop import Callback, Interrupted, Progress, Tick
from rpel.simulation.run import resume as _resume
from rpel.simulation.run import run as _run
from rpel.spec import Request, ordered_fields
from rpel.tasks import Task
from rpel.tasks.checks import check_model
from rpel.tasks.engines import Loss

__all__ = ["Interrupted", "Tick", "load", "resume", "simulate"]


_Model = str | nn.Module | Factory | None


@overload
def simulate(
    model: _Model = None, train: Any = None, test: Any = None, loss: Loss | None = None,
    *, seeds: None = None, **fields: Any,
) -> Run: ...  # fmt: skip


@overload
def simulate(
    model: _Model = None, train: Any = None, test: Any = None, loss: Loss | None = None,
    *, seeds: str | Sequence[int], **fields: Any,
) -> Runs: ...  # fmt: skip


def simulate(
    model: _Model = None,
    train: Any = None,
    test: Any = None,
    loss: Loss | None = None,
    *,
    metric: Any = None,
    collate: Any = None,
    target: str | None = None,
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
    problem: Callable[[Problem], Problem] | None = None,
    out: str | Path | None = None,
    progress: bool | Progress | None = None,
    force: bool = False,
    seeds: str | Sequence[int] | None = None,
    **fields: Any,
) -> Run | Runs:
    """Run Algorithm 1 among simulated nodes, some of them hostile, and return what it shows.

    What is trained:
        model: a name, the paper's notation, or any torch.nn.Module,
        whose values are the common initial model of all seeds; a class or function without arguments that
        makes one is called under each run's seed. Parameters with requires_grad=False keep their values: they
        are neither trained nor exchanged.
        train, test: pairs (x, y) of arrays, tensors or DataFrames, of which x and y may be tuples or dicts;
        torch data sets or loaders (whose batches are drawn anew); DataFrames or Hugging Face data sets, whose
        column of targets is ``target``; train may also be a list with one of these per honest node. All are
        used as they are: whole numbers such as token ids stay whole, nothing is normalised.
        collate: collate(examples) -> (inputs, targets) makes a batch of examples that are not alike, by
        padding. Left out: ``dataset`` from ``data_dir``.
        task: all of these in one rpel.tasks.Task, which a peer of a network takes as well.
        loss: loss(output, target), a mean over the batch; cross-entropy if left out. Float targets need one.
        metric: a function metric(output, target), or a dict of named ones; columns metric.<name>_mean and
        _worst. More is better, unless it is a rpel.tasks.Metric(function, higher_is_better=False). Where
        targets are no classes there is no accuracy, and without a metric the loss is shown.
        partition: how the training examples are divided among the nodes: "dirichlet(0.5)", "iid",
        "writer", "owner" or "virtual(1)".
    Who takes part:
        nodes, byzantine: n and b. pull, b_hat: peers pulled a round and hostile answers survived; planned if
        left out so that the plan holds with ``confidence`` over all nodes and ``rounds``.
        method, rule: how models are exchanged and aggregated. A rule is a name, module:object, a Rule, or a
        function f(x (m, d), f=…) -> (d,); an attack likewise, or a function f(view, …) -> rows.
        attack, silent: what hostile nodes do, such as "alie(z=1.5, targeting=most-exposed, consistent=true)".
        no_show: how often others are late.
        wire: what a pulled model is made of: float32 or int8 (a quarter of the bytes).
        timing: "asynchronous(speeds=lognormal(0.5), latency=0.1, jitter=0.2)" for nodes that do not wait for
        each other; a row of the history is then a unit of virtual time (column time).
    How it is trained:
        lr: a rate, "steps(500:0.5, 1000:0.1)" or such pairs in a list, or "cosine(0.1, warmup=10)".
        momentum, weight_decay, batch_size, local_steps, output: as in a Spec.
        optimizer: "momentum", the paper's; "sgd", "adam", "adamw(eps=1e-6)", torch's; or a torch.optim class,
        or a function that makes an optimiser of some parameters. What it remembers stays with its node.
        outer: "nesterov(0.7, momentum=0.9)" takes a step after the aggregation, for many local steps.
        privacy: differential privacy (rpel.privacy): "dp(clip=1, noise=1.1, delta=1e-5)", or an epsilon in
        the place of the noise, which is then planned. Each example's gradient is clipped, noise is added to
        their sum, batches are Poisson samples. The certificate has the final epsilon, metrics.jsonl that of
        each round.
    How it is run:
        seed: where all randomness comes from. seeds: several runs, such as "0-4";
        the result is then a Runs.
        eval_every, eval_size: rounds between evaluations and their test examples (the last round takes all).
        out, name: the folder for run folders, such as "runs" (left out: nothing is kept), and the first part
        of the run folder's name.
        checkpoint_every, force: rounds between checkpoints; force=True begins anew a run that is there.
        A run that is finished in ``out`` is returned if specification, data and code are the same; with
        objects from Python nobody can know, and it runs again, in a folder of its own.
        device, threads, workers: where it runs; workers are processes on this machine that share it.
        progress: True prints it to stderr; a function is called with a Tick after every round.
        track: "tensorboard", "mlflow" or "wandb" copies the metrics there as the run goes on.
        callbacks: callables (state, row), called after every round in their order. What one returns, a dict
        of numbers by name, becomes columns of the history and of metrics.jsonl; state.x (h, d) are the
        models. A rpel.simulation.loop.Tracker is also opened before the first round, and closed.
        problem: a function from the run's :class:`rpel.algorithm.Problem` to another one, to plug in local
        steps, a delivery, an aggregation or an outer step of your own.

    Fields left out have the defaults of a :class:`rpel.Spec`, which this signature shows.

    Returns a :class:`rpel.Run`: history (a DataFrame with a row a round), models (h, d), certificate, path,
    plot(). Raises ValueError, one sentence that names the value and what would be right,
    for anything that does not fit.

    >>> result = simulate("linear", nodes=6, byzantine=1, rounds=2, eval_size=100)
    >>> len(result.history), result.certificate["held"], result.models.shape
    (2, True, (5, 7850))
    """
    if task is not None:
        own = _of_task(
            task,
            model=model,
            train=train,
            test=test,
            loss=loss,
            metric=metric,
            collate=collate,
            target=target,
        )
        model = task.module
    else:
        own = Inputs(
            None if isinstance(model, str) else model,
            train,
            test,
            loss,
            metric,
            collate=collate,
            target=target,
        )
    own = replace(own, callbacks=tuple(callbacks), problem=problem)
    if isinstance(model, str):
        fields["model"] = model
    elif model is not None:
        check_model(model)
    rule, attack = fields.get("rule"), fields.get("attack", "alie")
    if rule is not None and not isinstance(rule, str):
        check_callable(rule, "rule")
        own = replace(own, rule=fields.pop("rule"))
    if _is_ours(attack):
        fields["attack"] = str(attack)
    elif not isinstance(attack, str):
        check_callable(attack, "attack")
        own = replace(own, attack=make_attack(fields.pop("attack")))
    if not isinstance(fields.get("optimizer", ""), str):
        own = replace(own, optimizer=fields.pop("optimizer"))
    paths = {"data_dir": fields.pop("data_dir", None), "out": out}
    fields |= {key: str(path) for key, path in paths.items() if path is not None}
    if fields.get("track") == "tensorboard" and out is None:
        raise ValueError("track='tensorboard' needs a run folder to write to: give out='runs'")
    told = _printed if progress is True else progress or None
    job = Request(**fields, seeds=seeds)
    return _run(job, own, keep=out is not None, progress=told, force=force)


def _signature() -> inspect.Signature:
    """What help() shows: every option, and every field with its default."""
    *own, _ = inspect.signature(simulate).parameters.values()
    there = {parameter.name for parameter in own}
    fields = [
        inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation
        )
        for key, field in ordered_fields().items()
        if key not in there
    ]
    return inspect.Signature([*own, *fields], return_annotation=Run | Runs)


simulate.__signature__ = _signature()  # type: ignore[attr-defined]


def _is_ours(attack: Any) -> bool:
    return isinstance(attack, Attack) and attack.built_in


def _of_task(task: Task, **others: Any) -> Inputs:
    """What a task holds; ValueError where something stands beside it."""
    if not isinstance(task, Task):
        raise ValueError(f"task is a {type(task).__name__}: give a rpel.tasks.Task(model, train, test)")
    twice = [key for key, value in others.items() if value is not None]
    if twice:
        raise ValueError(f"task= brings its own {twice[0]}: leave {twice[0]}= out, or task=")
    return Inputs(task.module, task.dataset, None, task.loss, task.metric, shards=task.shards)


def resume(
    path: str | Path | None,
    model: nn.Module | Factory | None = None,
    train: Any = None,
    test: Any = None,
    loss: Loss | None = None,
    metric: Any = None,
    *,
    rule: Rule | Callable[..., Any] | None = None,
    attack: Attack | Callable[..., Any] | None = None,
    collate: Any = None,
    target: str | None = None,
    optimizer: Any = None,
    callbacks: Sequence[Callback] = (),
    problem: Callable[[Problem], Problem] | None = None,
    progress: bool | Progress | None = None,
    download: Download | None = None,
    force: bool = False,
) -> Run:
    """Continue a run from its last checkpoint; the result is the same to the last bit.

    A finished run is returned as it is.

    path: the run folder. model, train, test, loss, metric: what the run was given from Python, which it needs
    again; rule, attack, collate, target, optimizer, callbacks and problem, too.
    force: start it again, also if other code has begun it.
    progress: as in :func:`simulate`. download(name, done, total) is told of bytes that arrive.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = simulate("linear", nodes=6, byzantine=1, rounds=2, eval_size=100, out=folder)
    ...     resume(first.path).reused
    True
    """
    own = Inputs(
        model, train, test, loss, metric, rule, attack, optimizer, tuple(callbacks), problem, collate, target
    )
    told = _printed if progress is True else progress or None
    return _resume(_kept(path), own, force=force, progress=told, download=download)


def load(path: str | Path | None, model: nn.Module | Factory | None = None) -> Run:
    """The result of a finished run, from its folder.

    path: the run folder. model: the network, where it came from Python and :meth:`rpel.Run.model` is to be
    called.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = simulate("linear", nodes=6, byzantine=1, rounds=2, eval_size=100, out=folder)
    ...     load(first.path).model(0)[1].weight.shape
    torch.Size([10, 784])
    """
    return Run.load(_kept(path), module=model)


def _kept(path: str | Path | None) -> Path:
    if path is None:
        raise ValueError("nothing was kept of this run: rpel.simulate(…, out='runs') keeps a folder")
    return Path(path)


def _printed(tick: Tick) -> None:
    """A line on stderr for every tenth of the rounds."""
    if tick.tenth:
        print(tick.sentence, file=sys.stderr, flush=True)
