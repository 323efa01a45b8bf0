"""Run what a peer does between two exchanges.

This is the local step of a task on the member's own data, or the user's own loop.

Invariants:
- a Learner never writes into the model it is given and writes its half-step straight into the row it is told;
- its local state (momentum, BatchNorm's statistics) never leaves the machine; it is kept with the half-step
  it belongs to, so that a restart continues as if nothing had happened;
- what all members of a built-in task must agree on, they agree on without talking: the data set is shared out
  among all members by a seed that is a hash of the run's name, and member i trains on part i;
- no pickled code is read back: the state of a user's loop is loaded by torch with weights_only.
"""

import hashlib
import importlib
import inspect
import io
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from rpel import component, data, models
from rpel.backend.base import backend
from rpel.errors import nearest
from rpel.learning import Gradients, MomentumSGD
from rpel.optim import OPTIMIZERS, RowSteps, TorchSteps, local_steps, read
from rpel.peer.config.settings import BUILT_IN_TASKS, TASKS, check_task
from rpel.peer.core.wire import Layout, Reordering, check_layout, split
from rpel.peer.learn.privacy import ASKED, Private, asked_of
from rpel.spec import Partition, Training
from rpel.tasks import Classification, Objective, Task
from rpel.tasks.engines.engine import tensor
from rpel.text import shortened
from rpel.types import Arrays, Integers, Measured, Models

Blob = bytes | memoryview
"""Local state as it lies on disk."""


class Learner(Protocol):
    """Takes the local step of one peer."""

    def load(self, round: int, x: Models, fresh: bool) -> None:
        """Begin round ``round`` from the common model x (d,); fresh: forget the momentum first."""

    def prepare(self, x: Models, scratch: Models) -> None:
        """Compile and load what a step will need, before the first round; scratch (d,) may be overwritten."""

    def half(self, out: Models, scratch: Models) -> None:
        """Write x^{t+1/2} (d,) into ``out``, which may be the memory of the x that was loaded."""

    def state(self) -> Blob:
        """The local state after the step; valid until the next :meth:`load`."""

    def restore(self, blob: Blob) -> None:
        """Continue from a :meth:`state`."""

    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """Return what belongs to the model but is never exchanged, named as in its state_dict.

        An example is BatchNorm's statistics.
        """

    def measure(self, x: Models, round: int, last: bool) -> Measured:
        """Return accuracy and loss of x (d,) after this round, where they are measured.

        ``last``: measure on the whole test set.
        """


_HYPERPARAMETERS = (
    "model", "partition", "lr", "momentum", "weight_decay", "batch_size", "optimizer", "eval_every",
    "eval_size",
)  # fmt: skip
"""The fields of a Training that members.toml keeps in its table [hyperparameters];
the others are keys of the file."""

_EVAL_EVERY = 5  # rounds between two measurements of a peer's accuracy, unless members.toml says otherwise


class PeerTraining(Training):
    """How a peer trains; a rate by name needs to know how many rounds there are."""

    rounds: int = Field(ge=1)


def training(table: Mapping[str, Any], own: bool = False, rounds: int = 1) -> Training:
    """Parse the table [hyperparameters] of members.toml, which is the same for all members.

    ``rounds``: the number of rounds. Unknown keys are an error, unless a task of the user's ``own`` may know
    them.

    >>> training({"lr": [[500, 0.5], [1000, 0.1]]}).rate(501)
    0.1
    >>> training({"lr": "cosine(0.1)", "optimizer": "adamw"}, rounds=100).rate(51)
    0.05
    >>> training({"momentun": 0.9})
    Traceback (most recent call last):
    ValueError: there is no hyper-parameter 'momentun'; the nearest is 'momentum'
    """
    asked_of(table)
    known = (*_HYPERPARAMETERS, *ASKED)
    unknown = [name for name in table if name not in known]
    if unknown and not own:
        raise ValueError(f"there is no hyper-parameter {unknown[0]!r}; {nearest(unknown[0], known)}")
    given = {name: value for name, value in table.items() if name not in (*unknown, *ASKED)}
    try:
        settings = PeerTraining(**{"eval_every": _EVAL_EVERY, **given}, rounds=rounds)
        if settings.optimizer != "momentum":
            name, parameters = read(settings.optimizer)
            OPTIMIZERS[name].check(settings.weight_decay, parameters)
    except ValueError as error:
        raise ValueError(f"hyper-parameter {error}") from None
    if Partition.of(settings.partition).name not in ("dirichlet", "iid"):
        raise ValueError(
            f"hyper-parameter partition {settings.partition!r} is unknown: choose one of dirichlet, iid"
        )
    return settings


class TaskLearner:
    """Take a task's local steps: Algorithm 1, lines 3 to 6, for a cohort of one.

    The steps are those of `rpel.learning.MomentumSGD` or `rpel.optim`.
    """

    def __init__(
        self,
        task: Objective,
        index: int,
        hyper: Training,
        *,
        local_steps: int = 1,
        layout: Layout | None = None,
        subset: Integers | None = None,
        name: str = "",
        private: Private | None = None,
    ) -> None:
        """Set up the local steps of a task.

        index: the member's number among all. layout: the network's models, in the order in which they travel
        (None: as the task has them). subset: test examples for the rounds before the last. name: of the task,
        for errors. private: gradients that replace the task's, with a budget that no step exceeds.
        """
        self._task, self._ids, self._hyper = task, np.array([index], np.int64), hyper
        self._gradients: Gradients = task if private is None else private.gradients
        self.budget = None if private is None else private.budget
        self._steps, self._subset = local_steps, subset
        layout = layout or Layout(tuple(task.layout), tuple(task.layout.values()), np.dtype(np.float32))
        self._order = Reordering(layout, task.layout, f"task {name!r}")
        # The task gets a vector of its own only if its parameters have another order than the network's.
        self._own: Models | None = None if self._order.same else np.empty(layout.d, layout.dtype)
        self._all_steps = self._local_steps()
        self._mark = np.frombuffer(_mark(task, hyper), np.uint8)
        # One piece of memory holds mark and local state, so a record is written without copying them.
        self._kept, self._state = _side_by_side(
            self._mark, self._all_steps.remembers(np.empty((1, layout.d), layout.dtype))
        )
        self._local: Models = self._state["buffers"]
        self._x: Models = np.empty(0)
        self._round = 0

    def _local_steps(self) -> MomentumSGD | RowSteps | TorchSteps:
        """The local steps of a round, without memory for gradients."""
        hyper = self._hyper
        return local_steps(
            self._gradients, hyper.optimizer, hyper.rate, list(self._task.layout.values()),
            momentum=hyper.momentum, weight_decay=hyper.weight_decay, steps=self._steps,
        )  # fmt: skip

    def prepare(self, x: Models, scratch: Models) -> None:
        """One gradient at x and one tiny step, both thrown away: after that everything is compiled."""
        self._gradients.gradient(
            self._inwards(x)[None], self._local.copy(), self._ids, 1, 0, out=scratch[None]
        )
        tiny = np.zeros((1, 1), x.dtype)
        backend("numba").momentum_step(tiny, tiny.copy(), tiny, 0.0, 1.0, 0.0)

    def load(self, round: int, x: Models, fresh: bool) -> None:
        """Remember where the step begins."""
        self._round, self._x = round, self._inwards(x)
        for name in self._state if fresh else ():
            if name != "buffers":
                self._state[name].fill(0)

    def _inwards(self, x: Models) -> Models:
        """A model of the network in the task's order: x itself where that is the same."""
        return x if self._own is None else self._order.inwards(x, self._own)

    def half(self, out: Models, scratch: Models) -> None:
        """All local steps of the round, each written to ``out``; gradients go to ``scratch``.

        BudgetSpentError, before anything is computed, where they would pass a target of privacy.
        """
        if self.budget is not None:
            self.budget.check(self._round)
        work = out if self._own is None else self._own
        steps = replace(self._all_steps, scratch=scratch[None])
        steps(self._x[None], self._state, self._ids, self._round, out=work[None])
        if self._own is not None:
            self._order.outwards(self._own, out)

    def state(self) -> Blob:
        """Return the local state as it lies in memory.

        A mark says whose state it is; momentum or moments and the task's local state follow.
        """
        return self._kept.data

    def restore(self, blob: Blob) -> None:
        """Take over momentum or moments, and the task's local state."""
        saved = np.frombuffer(blob, np.uint8)
        if len(saved) != len(self._kept) or not np.array_equal(saved[: len(self._mark)], self._mark):
            raise ValueError(
                f"the saved round holds {len(saved)} bytes of local state of a task with other parameters or "
                f"buffers, or of another optimiser: "
                f"this task has {len(self._kept)} bytes, for {shortened(list(self._task.layout), most=40)}"
            )
        self._kept[:] = saved

    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """Return what the task's module holds besides the trained parameters.

        These are buffers, with the values in the local state, and frozen parameters; nothing where the task
        has no module.
        """
        module, begin, values_by_name = self._task.module, 0, dict[str, NDArray[Any]]()
        if module is None:
            return values_by_name
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                values_by_name[name] = _array(parameter)
        for name, buffer in module.named_buffers():
            values = torch.from_numpy(self._local[0, begin : begin + buffer.numel()])
            values_by_name[name] = _array(values.reshape(buffer.shape).to(buffer.dtype))
            begin += buffer.numel()
        return _persistent(module, values_by_name)

    def measure(self, x: Models, round: int, last: bool) -> Measured:
        """Measure on the subset every few rounds, and on all test examples after the last."""
        if not last and round % self._hyper.eval_every:
            return Measured()
        scores = self._task.evaluate(self._inwards(x)[None], self._local, None if last else self._subset)
        accuracy, loss = (float(values[0]) for values in scores)
        # without classes there is no accuracy
        return Measured(None if np.isnan(accuracy) else accuracy, loss)


# --- tasks by name ------------------------------------------------------------------------------------------


def seed_of(run: str) -> int:
    """Derive the seed of everything that all members must agree on without talking.

    It is a hash of the run's name without the random bits at its end, so that a network founded again divides
    its data in the same way.

    >>> seed_of("ward-7") == seed_of("ward-7-" + 32 * "0") != seed_of("ward-8")
    True
    """
    return int.from_bytes(hashlib.sha256(re.sub("-[0-9a-f]{32}$", "", run).encode()).digest()[:6])


def task_learner(
    name: str,
    *,
    index: int,
    nodes: int,
    run: str,
    hyperparameters: Mapping[str, Any],
    local_steps: int,
    layout: Layout,
    rounds: int = 1,
    data: Path | None = None,
    folder: Path = Path(),
    make_private: Callable[[Objective], Private | None] = lambda task: None,
) -> TaskLearner:
    """Build the learner of member ``index`` of ``nodes`` for a task.

    The task is built in, registered by a package, or the user's "module:task", which is looked for in
    ``folder``. make_private: what peer.toml says about privacy, for this task.
    """
    own = name not in BUILT_IN_TASKS
    hyper = training(hyperparameters, own=own, rounds=rounds)
    subset = None
    if own:
        arguments = {"index": index, "nodes": nodes, "seed": seed_of(run), "data": data}
        supplied = own_task(name, folder.absolute(), arguments | {"hyperparameters": dict(hyperparameters)})
        if isinstance(supplied, Task):
            subset = supplied.subset(hyper.eval_size, seed_of(run))
            supplied = supplied.of_member(index, batch_size=hyper.batch_size, seed=seed_of(run))
        task: Objective = supplied
    else:
        task = known = built_in(name, hyper, nodes, run, data)
        subset = _subset(known, hyper, run)
    return TaskLearner(
        task, index, hyper, local_steps=local_steps, layout=layout, subset=subset, name=name,
        private=make_private(task),
    )  # fmt: skip


def built_in(name: str, hyper: Training, nodes: int, run: str, folder: Path | None = None) -> Classification:
    """A built-in task; node i holds part i of the partition of the data set over all members.

    >>> built_in("mnist-sample", Training(), nodes=12, run="ward-7").d
    176050
    """
    if check_task(name) not in BUILT_IN_TASKS:
        raise ValueError(f"task {name!r} is not a built-in one: those are {' and '.join(BUILT_IN_TASKS)}")
    dataset, seed = data.load(name, folder), seed_of(run)
    sharing = Partition.of(hyper.partition)
    if sharing.name == "iid" or sharing.alpha == float("inf"):
        shards = data.iid(dataset.train_y, nodes, hyper.batch_size, seed)
    else:
        shards = data.dirichlet(dataset.train_y, nodes, sharing.alpha, hyper.batch_size, seed)
    module = models.model(hyper.model, dataset.shape, dataset.classes, seed=seed)
    return Classification(dataset, shards, module, batch_size=hyper.batch_size, seed=seed)


def _subset(task: Classification, hyper: Training, run: str) -> Integers:
    return data.balanced_subset(task.examples.dataset.test_y, hyper.eval_size, seed_of(run))


def _side_by_side(mark: NDArray[np.uint8], arrays: Arrays) -> tuple[NDArray[np.uint8], Arrays]:
    """Put the mark and copies of the arrays into one piece of memory, and return it and views of them.

    The widest types come first, so that every array is aligned.
    """
    first = sorted(arrays, key=lambda name: -arrays[name].itemsize)
    memory, views, at = np.zeros(len(mark) + sum(a.nbytes for a in arrays.values()), np.uint8), {}, len(mark)
    memory[:at] = mark
    for name in first:
        array = np.ascontiguousarray(arrays[name])
        views[name] = memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        views[name][:] = array
        at += array.nbytes
    return memory, views


def _mark(task: Objective, hyper: Training) -> bytes:
    """Hash the names and shapes, in order, of a task's parameters and of its module's buffers.

    The optimiser is included if it is not the paper's.
    """
    buffers = () if task.module is None else task.module.named_buffers()
    named = [*task.layout.items(), ("", ()), *((name, tuple(buffer.shape)) for name, buffer in buffers)]
    text = repr([(name, tuple(map(int, shape))) for name, shape in named])
    if hyper.optimizer != "momentum":
        text += f" {hyper.optimizer}"
    return hashlib.sha256(text.encode()).digest()


def own_task(name: str, folder: Path, arguments: Mapping[str, Any]) -> Task | Objective:
    """Load the task of that name.

    A function is called with those of index, nodes, seed, data and hyperparameters that it has parameters
    for, and returns the task.
    """
    if component.is_own(name):
        _look_in(folder, name)
    supplied: Any = component.find(TASKS, name, BUILT_IN_TASKS, folder)
    if not isinstance(supplied, Task) and (not hasattr(supplied, "gradient") or isinstance(supplied, type)):
        known = inspect.signature(supplied).parameters
        supplied = supplied(**{key: value for key, value in arguments.items() if key in known})
    if isinstance(supplied, Task):
        return supplied
    if not isinstance(supplied, Objective):
        raise ValueError(
            f"task {name!r} is a {type(supplied).__name__}: give an rpel.tasks.Task, or derive its class "
            "from rpel.tasks.Objective"
        )
    missing = [key for key in ("d", "layout") if not hasattr(supplied, key)]
    if missing:
        raise ValueError(f"task {name!r} is a {type(supplied).__name__} without {missing[0]}")
    task = supplied
    if sum(math.prod(shape) for shape in task.layout.values()) != task.d:
        raise ValueError(f"task {name!r} says d = {task.d}, but its layout is {dict(task.layout)}")
    return task


def _look_in(folder: Path, name: str) -> None:
    """Make sure that the module of a task is imported from its folder, if it lies there.

    A module of the same name from elsewhere would be another one.
    """
    module = name.partition(":")[0]
    top = module.partition(".")[0]
    here = [path for path in (folder / f"{top}.py", folder / top) if path.exists()]
    if not here:
        return
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    already = getattr(sys.modules.get(top), "__file__", None)
    if already is not None and folder.resolve() not in Path(already).resolve().parents:
        raise ValueError(
            f"task {name!r} lies at {here[0]}, but {already} was imported under this name before"
        )


# --- the user's own loop ------------------------------------------------------------------------------------


class TorchLearner:
    """The user's model, stepped by the user between :meth:`load` and :meth:`half`.

    The network exchanges the trained parameters, which ``layout`` names. Frozen parameters, buffers and the
    ``state`` objects stay here.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Any], layout: Layout) -> None:
        _check_state(state)
        self._own = dict(state)
        self._model, self._layout = model, layout
        self._parameters = _matched(model, layout)

    def prepare(self, x: Models, scratch: Models) -> None:
        """The user's step is the user's."""

    def load(self, round: int, x: Models, fresh: bool) -> None:
        """Copy x into the model; fresh: empty the state of every optimiser, keeping its settings."""
        self._exchange(x, lambda parameter, values: parameter.copy_(values))
        if fresh:
            for thing in self._own.values():
                if isinstance(thing, torch.optim.Optimizer):
                    thing.state.clear()

    def half(self, out: Models, scratch: Models) -> None:
        """Copy the model's parameters into ``out``."""
        self._exchange(out, lambda parameter, values: values.copy_(parameter))

    def _exchange(self, flat: Models, copy: Any) -> None:
        with torch.no_grad():
            for name, values in split(self._layout, flat).items():
                copy(self._parameters[name], tensor(values))

    def state(self) -> Blob:
        """Buffers and state_dicts, by torch.save."""
        file = io.BytesIO()
        buffers = dict(self._model.named_buffers())
        own = {name: own.state_dict() for name, own in self._own.items()}
        torch.save({"buffers": buffers, "own": own, "stepped": self._stepped()}, file)
        return file.getbuffer()

    def _stepped(self) -> dict[str, list[str]]:
        """Return the names of each optimiser's parameters, in its order.

        The state_dict of an optimiser knows its parameters only by number.
        """
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return {
            key: [names.get(id(parameter), "") for group in own.param_groups for parameter in group["params"]]
            for key, own in self._own.items()
            if isinstance(own, torch.optim.Optimizer)
        }

    def restore(self, blob: Blob) -> None:
        """Load buffers and state_dicts back."""
        saved = torch.load(io.BytesIO(blob), weights_only=True, map_location="cpu")
        buffers = dict(self._model.named_buffers())
        if set(saved["own"]) != set(self._own) or set(saved["buffers"]) != set(buffers):
            raise ValueError(
                f"the saved round holds the state of {sorted(saved['own'])}, but the loop gives "
                f"{sorted(self._own)}: give the same names and the same model as before"
            )
        for name, stepped in self._stepped().items():
            if saved["stepped"].get(name) != stepped:
                raise ValueError(
                    f"state[{name!r}] was saved for the parameters {saved['stepped'].get(name)} in this "
                    f"order, but now has {stepped}: give the optimiser the same ones as before"
                )
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(saved["buffers"][name])
        for name, own in self._own.items():
            own.load_state_dict(saved["own"][name])

    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """The model's own."""
        return _persistent(
            self._model, {name: _array(buffer) for name, buffer in self._model.named_buffers()}
        )

    def measure(self, x: Models, round: int, last: bool) -> Measured:
        """The user's loop measures what it likes, and may say so (:meth:`rpel.Peer.measured`)."""
        return Measured()


def _array(buffer: torch.Tensor) -> NDArray[Any]:
    """A buffer as NumPy has it; kinds of numbers that it does not know, such as float8, as float32."""
    try:
        return buffer.detach().cpu().numpy()
    except TypeError:
        return buffer.detach().cpu().float().numpy()


def _persistent(module: nn.Module | None, named: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """Those that a state_dict holds."""
    names = set() if module is None else set(module.state_dict())
    return {name: buffer for name, buffer in named.items() if name in names}


def _check_state(state: Mapping[str, Any]) -> None:
    for name, thing in state.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ValueError(
                f"state[{name!r}] is a {type(thing).__name__}, which has no state_dict and load_state_dict: "
                "give an optimiser, a schedule or another object that has them"
            )


def _matched(model: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
    """The parameters the network exchanges, by name; refused unless names and shapes are the network's."""
    own = models.trained(model)
    frozen = [name for name, _ in model.named_parameters() if name not in own and name in layout.names]
    if frozen:
        raise ValueError(
            f"the model's parameter {frozen[0]} is frozen (requires_grad=False), but this network exchanges "
            "it: train it, or start the network from a model without it"
        )
    check_layout(layout, models.shapes(model), "the model")
    return {name: own[name] for name in layout.names}
