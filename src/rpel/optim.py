"""Local steps (lines 3-6) with any optimiser, and the paper's step as a torch optimiser.

`OPTIMIZERS` is the table of those that a run can name beside the paper's "momentum": a function that steps
rows of models at once, and the names of the rows it remembers. To add one, write such a function and its row.
Any other torch optimiser, by class or by a function that makes one, steps one node after the other.

Invariants:
- what an optimiser remembers is one row for each node, beside the node's other local state: it is
  checkpointed and never exchanged, and a resumed run goes on with the same bits;
- nothing depends on which nodes stand beside a node, nor on the number of threads or workers.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rpel.backend.arrays import empty, namespace, zeros
from rpel.backend.base import Backend, backend
from rpel.component import parse
from rpel.errors import nearest, unknown
from rpel.learning import Gradients, LocalSteps, MomentumSGD
from rpel.types import Arrays, Floats, Integers, Models, Schedule

Factory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the optimiser of some parameters."""
State = dict[str, Tensor]
NUMBERS_AT_ONCE = 1 << 22  # of rows that step together: a step makes several arrays of their size


# --- rows of models at once ---------------------------------------------------------------------------------


def sgd(
    x: Tensor,
    g: Tensor,
    state: State,
    step: int,
    lr: float,
    *,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Stochastic gradient descent as `torch.optim.SGD` has it: m ← μm + (1 − τ)g, x ← x − ηm.

    Args:
        x: (c, d) models, changed in place.
        g: (c, d) their gradients.
        state: Named rows (c, d) that are remembered, zero at first, changed in place.
        step: The number of this step, from 1.
        lr: η.
        weight_decay: λ; λx is added to the gradient.
        momentum: μ.
        dampening: τ.
        nesterov: Step along g + μm.
    """
    if weight_decay:
        g = g.add(x, alpha=weight_decay)
    if momentum:
        m = state["momentum"]
        m.copy_(g) if step == 1 else m.mul_(momentum).add_(g, alpha=1 - dampening)
        g = g.add(m, alpha=momentum) if nesterov else m
    x.add_(g, alpha=-lr)


def adam(
    x: Tensor,
    g: Tensor,
    state: State,
    step: int,
    lr: float,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> None:
    """Adam (Kingma and Ba, 2015), as `torch.optim.Adam` has it; the arguments are those of :func:`sgd`."""
    if weight_decay:
        g = g.add(x, alpha=weight_decay)
    mean, square = state["mean"].lerp_(g, 1 - betas[0]), state["square"]
    square.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    scale = square.sqrt().div_(math.sqrt(1 - betas[1] ** step)).add_(eps)
    x.addcdiv_(mean, scale, value=-lr / (1 - betas[0] ** step))


def adamw(
    x: Tensor, g: Tensor, state: State, step: int, lr: float, *, weight_decay: float = 0.01, **others: Any
) -> None:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as `torch.optim.AdamW` has it."""
    x.mul_(1 - lr * weight_decay)
    adam(x, g, state, step, lr, **others)


@dataclass(frozen=True)
class RowOptimizer:
    """A function that steps rows of models, torch's class of the same, and the rows that are remembered."""

    function: Callable[..., None]
    torch: type[Optimizer]
    state: tuple[str, ...]

    def check(self, weight_decay: float, parameters: Mapping[str, Any]) -> None:
        """ValueError for a parameter that it does not take, or a value that makes no sense."""
        factory(self.torch, 0.1, weight_decay, parameters)
        known = [*inspect.signature(sgd).parameters, *inspect.signature(adam).parameters]
        if further := [key for key in parameters if key not in known]:
            raise ValueError(
                f"optimizer {self.torch.__name__} by name has no parameter {further[0]!r}: in Python, give "
                f"optimizer=torch.optim.{self.torch.__name__} itself"
            )


OPTIMIZERS = {
    "sgd": RowOptimizer(sgd, torch.optim.SGD, ("momentum",)),
    "adam": RowOptimizer(adam, torch.optim.Adam, ("mean", "square")),
    "adamw": RowOptimizer(adamw, torch.optim.AdamW, ("mean", "square")),
}


def read(text: str) -> tuple[str, dict[str, Any]]:
    """Return an optimiser's name and its parameters.

    >>> read("adam(betas=[0.8, 0.99])")
    ('adam', {'betas': (0.8, 0.99)})
    """
    part = parse(text)
    given = part.bind([], anything=True)
    return part.name, {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }


def local_steps(
    task: Gradients,
    optimizer: Any,
    lr: Schedule,
    shapes: Sequence[tuple[int, ...]],
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    parameters: Mapping[str, Any] | None = None,
    **common: Any,
) -> "MomentumSGD | RowSteps | TorchSteps":
    """Lines 3-6 with an optimiser; ValueError if its parameters do not fit.

    Args:
        task: Where gradients come from.
        optimizer: "momentum", one of `OPTIMIZERS` as in "adamw(eps=1e-6)", a torch optimiser class, or a
            function that makes one for a model's parameters. A class gets lr and
            weight_decay, if it takes one.
        lr: The rate of each round; rates that a function sets itself are multiplied by lr(t)/lr(1).
        shapes: Those of the model's parameters, in the order of its vector.
        momentum: β of "momentum".
        weight_decay: λ.
        parameters: More of the optimiser's own.
        common: steps, nodes, scratch and backend, as :class:`MomentumSGD` takes them.
    """
    given = dict(parameters or {})
    if isinstance(optimizer, str):
        optimizer, own = read(optimizer)
        given = own | given
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if optimizer == "momentum":
        return MomentumSGD(task, lr, momentum, weight_decay, **common)
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise ValueError(unknown("optimizer", optimizer, ["momentum", *OPTIMIZERS]))
        OPTIMIZERS[optimizer].check(weight_decay, given)
        return RowSteps(task, optimizer, lr, {"weight_decay": weight_decay} | given, **common)
    return TorchSteps(task, factory(optimizer, lr(1), weight_decay, given), lr, shapes, **common)


class OptimizerSteps(LocalSteps):
    """Local steps of nodes that count their steps."""

    steps: int
    scratch: Models | None

    def __call__(
        self, x: Models, state: Arrays, nodes: Integers, t: int, out: Models | None = None
    ) -> tuple[Models, Arrays]:
        """The half-step models, written to ``out`` if given; the arrays of the state are written to."""
        half = empty(len(x), x) if out is None else out
        half[:] = x
        scratch = None if self.scratch is None else self.scratch[: len(x)]
        for k in range(self.steps if len(nodes) else 0):
            # lines 3-4
            g, state["buffers"][:] = self.task.gradient(half, state["buffers"], nodes, t, k, out=scratch)
            for some in self._groups(state["steps"][:, 0], x.shape[1]):
                self._step(half[some], g[some], {key: value[some] for key, value in state.items()}, t)
            state["steps"] += 1
        return half, state

    def _groups(self, taken: Integers, d: int) -> Iterator[slice]:
        """Nodes that step at once."""
        raise NotImplementedError

    def _step(self, x: Models, g: Models, state: Arrays, t: int) -> None:
        """One step of some nodes; models and state are written to."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowSteps(OptimizerSteps):
    """Lines 3-6 with an optimiser of the table in the place of lines 5 and 6, ``steps`` times a round."""

    task: Gradients
    name: str
    lr: Schedule
    parameters: Mapping[str, Any]
    steps: int = 1
    nodes: int = 1
    scratch: Models | None = None
    backend: Backend = field(default_factory=lambda: backend("numba"))

    def _zeros(self, x: Models) -> Arrays:
        remembered = {key: namespace(x).zeros_like(x) for key in OPTIMIZERS[self.name].state}
        return {**remembered, "steps": np.zeros((len(x), 1), np.int64)}

    def _groups(self, taken: Integers, d: int) -> Iterator[slice]:
        """Neighbours that have taken equally many steps, not too many numbers at once."""
        edges = [0, *(1 + np.flatnonzero(np.diff(taken))).tolist(), len(taken)]
        size = max(1, NUMBERS_AT_ONCE // max(1, d))
        for first, last in pairwise(edges):
            yield from (slice(at, min(last, at + size)) for at in range(first, last, size))

    def _step(self, x: Models, g: Models, state: Arrays, t: int) -> None:
        kind, step = OPTIMIZERS[self.name], int(state["steps"][0, 0]) + 1
        rows = {key: _tensor(state[key]) for key in kind.state}
        kind.function(_tensor(x), _tensor(g), rows, step, self.lr(t), **self.parameters)


# --- any torch optimiser, one node after the other ----------------------------------------------------------


def factory(optimizer: Any, lr: float, weight_decay: float, parameters: Mapping[str, Any]) -> Factory:
    """The maker of optimisers that a class or a maker stands for; ValueError if its parameters do not fit.

    >>> made = factory(torch.optim.RMSprop, 0.1, 0.01, {"alpha": 0.9})([nn.Parameter(torch.zeros(2))])
    >>> made.defaults["weight_decay"], made.defaults["alpha"]
    (0.01, 0.9)
    """
    given = dict(parameters)
    if isinstance(optimizer, type):
        known = inspect.signature(optimizer).parameters
        given = {"lr": lr} | ({"weight_decay": weight_decay} if "weight_decay" in known else {}) | given
        wrong = next((key for key in given if key not in known), None)
        if wrong is not None:
            raise ValueError(
                f"optimizer {optimizer.__name__} has no parameter {wrong!r}: "
                f"{nearest(wrong, list(known)[1:])}"
            )

    def make(some: list[nn.Parameter]) -> Optimizer:
        made: Optimizer = optimizer(some, **given)
        return made

    try:
        made = make([nn.Parameter(torch.zeros(2))])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"the optimizer cannot be made: {str(error).splitlines()[0]}") from None
    if not isinstance(made, Optimizer):
        raise ValueError(
            f"optimizer makes a {type(made).__name__}: it needs a torch.optim class, or what makes one"
        )
    return make


@dataclass(frozen=True)
class Place:
    """The place of a tensor of an optimiser's state in a node's row: its parameter, name and columns."""

    parameter: int
    name: str
    columns: slice
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_number(self) -> bool:
        """Such as a count of steps: those stay on the host, in a row of their own."""
        return not self.shape


@lru_cache(maxsize=4)
def _places(make: Factory, shapes: tuple[tuple[int, ...], ...]) -> tuple[Place, ...]:
    """What an optimiser remembers of parameters of these shapes after a step, learnt by taking one."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    made = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    places, at = [], {False: 0, True: 0}
    for number, parameter in enumerate(parameters):
        for name, value in made.state.get(parameter, {}).items():
            if not isinstance(value, Tensor | int | float):
                continue
            tensor = torch.as_tensor(value)
            if not tensor.is_floating_point() and tensor.dtype != torch.int64:
                raise ValueError(f"optimizer {type(made).__name__} remembers {name} as {tensor.dtype}")
            is_number = not tensor.dim()
            begin = at[is_number]
            at[is_number] += tensor.numel()
            places.append(Place(number, name, slice(begin, at[is_number]), tuple(tensor.shape), tensor.dtype))
    return tuple(places)


@dataclass(frozen=True)
class TorchSteps(OptimizerSteps):
    """Lines 3-6 with a torch optimiser of each node, made anew for a step with what it remembered."""

    task: Gradients
    make: Factory
    lr: Schedule
    shapes: Sequence[tuple[int, ...]]
    steps: int = 1
    nodes: int = 1
    scratch: Models | None = None
    backend: Backend = field(default_factory=lambda: backend("numba"))

    @property
    def places(self) -> tuple[Place, ...]:
        """What the optimiser of one node remembers after a step."""
        return _places(self.make, tuple(self.shapes))

    def _zeros(self, x: Models) -> Arrays:
        width, numbers = (
            max((place.columns.stop for place in self.places if place.is_number == is_number), default=0)
            for is_number in (False, True)
        )
        counted = {"steps": np.zeros((len(x), 1), np.int64), "numbers": np.zeros((len(x), numbers))}
        return {"optimizer": zeros((len(x), width), x), **counted}

    def _groups(self, taken: Integers, d: int) -> Iterator[slice]:
        return (slice(i, i + 1) for i in range(len(taken)))

    def _step(self, x: Models, g: Models, state: Arrays, t: int) -> None:
        parameters = [nn.Parameter(part) for part in self._cut(_tensor(x)[0])]
        for parameter, part in zip(parameters, self._cut(_tensor(g)[0]), strict=True):
            parameter.grad = part.detach()
        made, kept, numbers = self.make(parameters), _tensor(state["optimizer"])[0], state["numbers"][0]
        for group in made.param_groups:
            group["lr"] = group["lr"] * (self.lr(t) / self.lr(1))
        for place in self.places if state["steps"][0, 0] else ():
            made.state[parameters[place.parameter]][place.name] = _remembered(kept, numbers, place)
        made.step()
        for place in self.places:
            value = torch.as_tensor(made.state[parameters[place.parameter]][place.name])
            if place.is_number:
                numbers[place.columns] = float(self.backend.host(value))
            else:
                kept[place.columns] = value.detach().to(kept.dtype).reshape(-1)

    def _cut(self, row: Tensor) -> list[Tensor]:
        """The parameters of one node, as views of its row."""
        parts = torch.split(row, [math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def _remembered(kept: Tensor, numbers: Floats, place: Place) -> Tensor:
    """A tensor of the state, as the optimiser left it."""
    if place.is_number:
        return torch.tensor(numbers[place.columns.start], dtype=place.dtype)
    values = kept[place.columns].view(place.shape)
    return values.to(values.dtype if place.dtype.is_floating_point else place.dtype).clone()


def _tensor(x: Any) -> Tensor:
    """The same memory as a tensor, wherever it is."""
    return x if isinstance(x, Tensor) else torch.from_numpy(x)


# --- the paper's step as a torch optimiser ------------------------------------------------------------------


class LocalMomentum(Optimizer):
    """Algorithm 1, lines 5 and 6: m ← βm + (1 − β)g from m = 0, then x ← x − η(m + λx).

    `torch.optim.SGD` has m ← βm + g, with λx inside g; here the decay acts after the momentum, so it is never
    averaged into m.

    A new gradient enters m with weight 1 − β, and with weight 1 in `torch.optim.SGD`. So a learning rate that
    works there is too small here: divide it by 1 − β. With momentum 0.9, lr=1.0 takes steps as large as
    lr=0.1 does with SGD.

    >>> x = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimiser = LocalMomentum([x], lr=0.5, momentum=0.9, weight_decay=0.1)
    >>> for gradient in (2.0, 4.0):
    ...     x.grad = torch.tensor([gradient])
    ...     optimiser.step()
    >>> round(float(x.detach()), 6)  # m = 0.2, x = 0.85; then m = 0.58, x = 0.85 - 0.5 (0.58 + 0.085)
    0.5175
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be 0 or more, not {lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, not {momentum}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be 0 or more, not {weight_decay}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One half-step x → x^{t+1/2} for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, x: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[x]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(x)
        m = state["momentum"].mul_(group["momentum"]).add_(g, alpha=1 - group["momentum"])
        x.sub_(m.add(x, alpha=group["weight_decay"]), alpha=group["lr"])
