"""The public functions of the simulator: simulate, resume, load."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

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
from rpel.spec import DatasetName, MethodName, Spec
from rpel.tasks import Task
from rpel.tasks.checks import check_model
from rpel.tasks.engines import Loss
from rpel.types import WireName

__all__ = ["Interrupted", "Tick", "load", "resume", "simulate"]


class Fields(TypedDict, total=False):
    """The fields of a Spec as people write them in Python; defaults are the Spec's."""

    dataset: DatasetName | str
    data_dir: str | Path | None
    nodes: int
    byzantine: int
    pull: int | Literal["plan"] | None
    b_hat: int | Literal["plan"] | None
    confidence: float
    rounds: int
    method: MethodName
    rule: str | Rule | Callable[..., Any] | None
    graph: Literal["random", "honest-first"]
    placement: Literal["random", "adversarial"]
    attack: str | Attack | Callable[..., Any]
    attack_params: Mapping[str, Any] | str
    partition: Literal["dirichlet", "iid", "writer", "owner", "virtual", "own"]
    alpha: float | Literal["inf"]
    lr: float | str | Sequence[tuple[int, float]]
    momentum: float
    weight_decay: float
    batch_size: int
    local_steps: int
    optimizer: Any
    optimizer_params: Mapping[str, Any] | str
    outer: Literal["none", "nesterov"]
    outer_lr: float
    outer_momentum: float
    output: Literal["last", "uniform"]
    no_show: float
    silent: bool
    consistent: bool
    wire: WireName
    asynchronous: bool
    speeds: str | Sequence[float]
    jitter: float
    latency: float
    max_grad_norm: float | None
    noise_multiplier: float | None
    target_epsilon: float | None
    target_delta: float | None
    seed: int
    eval_every: int
    eval_size: int
    checkpoint_every: int
    backend: Literal["auto", "numba", "torch"]
    device: str
    threads: int | None
    workers: int
    name: str


class Options(Fields, total=False):
    """What a Spec does not hold: objects of Python, and what is done with the run."""

    metric: Any
    collate: Any
    target: str | None
    task: Task | None
    callbacks: Sequence[Callback]
    problem: Callable[[Problem], Problem] | None
    out: str | Path | None
    progress: bool | Progress | None
    force: bool
    reuse: bool
    tensorboard: bool


_OPTIONS: dict[str, Any] = {
    "metric": None, "collate": None, "target": None, "task": None, "callbacks": (), "problem": None,
    "out": None, "progress": None, "force": False, "reuse": False, "tensorboard": False,
}  # fmt: skip
"""The defaults of the options; those of the fields are the Spec's."""
_Model = str | nn.Module | Factory | None


@overload
def simulate(
    model: _Model = None, train: Any = None, test: Any = None, loss: Loss | None = None,
    *, seeds: None = None, **others: Unpack[Options],
) -> Run: ...  # fmt: skip


@overload
def simulate(
    model: _Model = None, train: Any = None, test: Any = None, loss: Loss | None = None,
    *, seeds: str | Sequence[int], **others: Unpack[Options],
) -> Runs: ...  # fmt: skip


def simulate(
    model: _Model = None, train: Any = None, test: Any = None, loss: Loss | None = None,
    *, seeds: str | Sequence[int] | None = None, **others: Unpack[Options],
) -> Run | Runs:  # fmt: skip
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
        partition, alpha: how the training examples are shared out among the nodes.
    Who takes part:
        nodes, byzantine: n and b. pull, b_hat: peers pulled a round and hostile answers survived; planned if
        left out so that the plan holds with ``confidence`` over all nodes and ``rounds``.
        method, rule, graph, placement: how models are exchanged and aggregated. A rule is a name,
        module:object, a Rule, or a function f(x (m, d), f=…) -> (d,); an attack likewise,
        or a function f(view, …) -> rows.
        attack, attack_params, consistent, silent: what hostile nodes do. no_show:
        how often others are late.
        wire: what a pulled model is made of: float32 or int8 (a quarter of the bytes).
        asynchronous, speeds, jitter, latency: nodes that do not wait for each other; a row of the history
        is then a unit of virtual time (column time).
    How it is trained:
        lr: a rate, pairs (up to round, rate), or "cosine(0.1, warmup=10)".
        momentum, weight_decay, batch_size, local_steps, output: as in a Spec.
        optimizer: "momentum", the paper's; "sgd", "adam", "adamw", torch's, with optimizer_params; or a
        torch.optim class, or a function that makes an optimiser of some parameters.
        What it remembers stays with its node.
        outer, outer_lr, outer_momentum: "nesterov" takes a step after the aggregation, for many local steps.
        max_grad_norm, noise_multiplier, target_epsilon, target_delta: differential privacy (rpel.privacy).
        Gradients are clipped example by example, noise is added to their sum, batches are Poisson samples; a
        target_epsilon alone plans the noise. The certificate has the final epsilon, metrics.jsonl that of
        each round.
    How it is run:
        seed: where all randomness comes from. seeds: several runs, such as "0-4";
        the result is then a Runs.
        eval_every, eval_size: rounds between evaluations and their test examples (the last round takes all).
        out, name: the folder for run folders, such as "runs" (left out: nothing is kept), and the first part
        of the run folder's name.
        checkpoint_every, force: rounds between checkpoints; force=True begins anew a run that is there.
        reuse: a run that is finished in ``out`` is returned if specification, data and code are the same.
        With a model, loss, metric, rule or attack that is an object, nobody can know, and it runs again, in a
        folder of its own; reuse=True takes the finished one all the same, also one that other code has made.
        device, threads, workers: where it runs; workers are processes on this machine that share it.
        progress: True prints it to stderr; a function is called with a Tick after every round, and in a long
        last evaluation.
        tensorboard: copy the metrics for TensorBoard.
        callbacks: callables (state, info, row), called after every round in their order. What one puts into
        the row, a number under a name of its own, is a column of the history and of metrics.jsonl; state.x
        (h, d) are the models.
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
    given: dict[str, Any] = {**_OPTIONS, **others, "seeds": seeds}
    options = {key: given.pop(key) for key in _OPTIONS}
    rule, attack, out = given.get("rule"), given.get("attack", "alie"), options["out"]
    objects = {key: options[key] for key in ("metric", "collate", "target")}
    if options["task"] is not None:
        own = _of_task(options["task"], model=model, train=train, test=test, loss=loss, **objects)
        model = options["task"].module
    else:
        own = Inputs(None if isinstance(model, str) else model, train, test, loss, **objects)
    own = replace(own, callbacks=tuple(options["callbacks"]), problem=options["problem"])
    if not isinstance(given.get("optimizer", ""), str):
        own = replace(own, optimizer=given.pop("optimizer"))
    if isinstance(model, str):
        given["model"] = model
    elif model is not None:
        check_model(model)
    if rule is not None and not isinstance(rule, str):
        check_callable(rule, "rule")
        own = replace(own, rule=given.pop("rule"))
    if _is_ours(attack):
        given |= _as_text(attack)
    elif not isinstance(attack, str):
        check_callable(attack, "attack")
        own = replace(own, attack=make_attack(given.pop("attack"), **given.pop("attack_params", {})))
    if given.get("data_dir") is not None:
        given["data_dir"] = str(given["data_dir"])
    if out is not None:
        given["out"] = str(out)
    if options["tensorboard"] and out is None:
        raise ValueError("tensorboard=True needs a run folder to write to: give out='runs'")
    told = _printed if options["progress"] is True else options["progress"] or None
    done = {key: options[key] for key in ("force", "reuse", "tensorboard")}
    return _run(Spec(**given), own, keep=out is not None, progress=told, **done)


def _signature() -> inspect.Signature:
    """What help() shows: every option and field with its default."""
    own = list(inspect.signature(simulate).parameters.values())[:-1]
    defaults = {key: field.default for key, field in Spec.model_fields.items()} | _OPTIONS
    kinds = Options.__annotations__
    others = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=defaults[key], annotation=kinds[key])
        for key in (*_OPTIONS, *Fields.__annotations__)
    ]
    return inspect.Signature([*own, *others], return_annotation=Run | Runs)


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


def _as_text(attack: Attack) -> dict[str, Any]:
    """One of the library's attacks as the two fields of a Spec."""
    whole = attack.parameters | {key: True for key in ("consistent", "flood") if getattr(attack, key)}
    whole |= {} if attack.targeting == "all" else {"targeting": attack.targeting}
    return {"attack": attack.name, "attack_params": whole}


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
    tensorboard: bool = False,
) -> Run:
    """Go on with a run from its last checkpoint, bit by bit as if it had not stopped;
    a finished one is returned.

    path: the run folder. model, train, test, loss, metric: what the run was given from Python, which it needs
    again; rule, attack, collate, target, optimizer, callbacks and problem, too.
    force: also if other code has begun it, so that the rest may differ.
    progress, tensorboard: as in :func:`simulate`. download(name, done, total) is told of bytes that arrive.

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
    return _resume(_kept(path), own, force=force, progress=told, download=download, tensorboard=tensorboard)


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
