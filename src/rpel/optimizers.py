"""Local steps by other optimisers than the paper's: torch's, for many nodes at once where the form is known.

Invariants:
- what an optimiser remembers is one row for each node, beside the node's other local state: it is
  checkpointed and never exchanged, and a resumed run goes on with the same bits;
- SGD, Adam and AdamW work on each number by itself, so many nodes step at once, as one tensor; with any other
  class every node has an optimiser of its own over the parameters of its model;
- nothing depends on which nodes stand beside a node, nor on the number of threads or workers.

Plain twin: the torch optimiser itself, in a plain loop.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rpel.backend.arrays import empty, zeros
from rpel.backend.base import Backend, backend
from rpel.errors import nearest
from rpel.learning import Gradients, LocalSteps
from rpel.types import Arrays, Floats, Integers, Models, Schedule

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimiser of some parameters."""
BY_NAME = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
"""Those that a Spec can name, beside the paper's "momentum"."""
_AT_ONCE = 1 << 22  # numbers of nodes that step as one tensor
_EACH_NUMBER = tuple(BY_NAME.values())
"""They treat every number alike and by itself."""


def factory(optimizer: Any, lr: float, weight_decay: float, parameters: Mapping[str, Any]) -> Factory:
    """The maker of optimisers that a name, a class or a maker stands for;
    ValueError if its parameters do not fit.

    A class gets lr and, if it takes one and none is among the parameters, weight_decay. A maker is called
    with the parameters of a model, and with those given here.

    >>> made = factory("adamw", 0.1, 0.01, {"betas": (0.9, 0.95)})([nn.Parameter(torch.zeros(2))])
    >>> type(made).__name__, made.defaults["weight_decay"], made.defaults["betas"]
    ('AdamW', 0.01, (0.9, 0.95))
    """
    kind = BY_NAME.get(optimizer, optimizer)
    if isinstance(kind, str):
        raise ValueError(f"there is no optimizer {optimizer!r}: {nearest(kind, ['momentum', *BY_NAME])}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()}
    if isinstance(kind, type):
        known = inspect.signature(kind).parameters
        given = {"lr": lr} | ({"weight_decay": weight_decay} if "weight_decay" in known else {}) | given
        wrong = next((key for key in given if key not in known), None)
        if wrong is not None:
            raise ValueError(
                f"optimizer {kind.__name__} has no parameter {wrong!r}: {nearest(wrong, list(known)[1:])}"
            )

    def make(some: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(some, **given)
        return optimizer

    _check(make)
    return make


def _check(make: Factory) -> None:
    """ValueError, one sentence, where it cannot make an optimiser."""
    try:
        optimizer = make([nn.Parameter(torch.zeros(2))])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"the optimizer cannot be made: {str(error).splitlines()[0]}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer makes a {type(optimizer).__name__}: it needs a torch.optim class, or what makes one"
        )


@dataclass(frozen=True)
class Place:
    """Where one tensor of an optimiser's state lies in a node's row: of which parameter, its name,
    its numbers."""

    parameter: int
    name: str
    columns: slice
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def alone(self) -> bool:
        """Whether it is a number, such as a count of steps: those stay on the host, in a row of their own."""
        return not self.shape


@lru_cache(maxsize=4)
def _places(make: Factory, shapes: tuple[tuple[int, ...], ...]) -> tuple[Place, ...]:
    """What an optimiser remembers of parameters of these shapes after a step, found by taking one."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    made = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    places, at = [], {False: 0, True: 0}
    for number, parameter in enumerate(parameters):
        for name, value in made.state.get(parameter, {}).items():
            if not isinstance(value, Tensor | int | float) or value is None:
                continue
            tensor = torch.as_tensor(value)
            if not tensor.is_floating_point() and tensor.dtype != torch.int64:
                raise ValueError(f"optimizer {type(made).__name__} remembers {name} as {tensor.dtype}")
            alone = not tensor.dim()
            begin = at[alone]
            at[alone] += tensor.numel()
            places.append(Place(number, name, slice(begin, at[alone]), tuple(tensor.shape), tensor.dtype))
    return tuple(places)


@dataclass(frozen=True)
class TorchSteps(LocalSteps):
    """Lines 3-6 with a torch optimiser in the place of lines 5 and 6, ``steps`` times a round.

    make: of :func:`factory`. lr(t): the rate of round t; a maker's own rates are multiplied by lr(t)/lr(1), a
    class has lr(t). shapes: of the model's parameters, in the order of its vector.
    """

    task: Gradients
    make: Factory
    lr: Schedule
    shapes: Sequence[tuple[int, ...]]
    steps: int = 1
    nodes: int = 1
    scratch: Models | None = None
    backend: Backend = field(default_factory=lambda: backend("numba"))

    def _zeros(self, x: Models) -> Arrays:
        width, numbers = (
            max((place.columns.stop for place in self.places if place.alone == alone), default=0)
            for alone in (False, True)
        )
        counted = {"steps": np.zeros((len(x), 1), np.int64), "numbers": np.zeros((len(x), numbers))}
        return {"optimizer": zeros((len(x), width), x), **counted}

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
            for some in self._alike(state["steps"][:, 0]):
                kept, taken = (
                    (state["optimizer"][some], state["numbers"][some]),
                    int(state["steps"][some][0, 0]),
                )
                self._step(half[some], g[some], *kept, taken, t)
            state["steps"] += 1
        return half, state

    @cached_property
    def together(self) -> bool:
        """Whether many nodes may step as one tensor."""
        return type(self.make([nn.Parameter(torch.zeros(1))])) in _EACH_NUMBER

    @property
    def places(self) -> tuple[Place, ...]:
        """What the optimiser of one node remembers after a step."""
        together = (sum(int(np.prod(shape)) for shape in self.shapes),)
        return _places(self.make, (together,) if self.together else tuple(self.shapes))

    def _alike(self, taken: Integers) -> Iterable[Any]:
        """Nodes that step as one tensor: those that have taken as many steps; else each by itself."""
        if not self.together:
            return (slice(i, i + 1) for i in range(len(taken)))
        if (taken == taken[0]).all():  # some at a time: an optimiser makes several arrays of their size
            step = max(1, _AT_ONCE // max(1, sum(int(np.prod(shape)) for shape in self.shapes)))
            return (slice(i, i + step) for i in range(0, len(taken), step))
        raise ValueError("nodes that have taken different numbers of steps cannot step together")

    def _step(self, x: Models, g: Models, kept: Models, numbers: Floats, taken: int, t: int) -> None:
        """One step of some nodes, x (c, d) and what they remember written to; numbers are on the host."""
        whole, gradient, kept_ = _tensor(x), _tensor(g).contiguous(), _tensor(kept)
        parameters = self._cut(whole)
        for parameter, part in zip(parameters, self._cut(gradient), strict=True):
            parameter.grad = part.detach()
        made = self.make(parameters)
        self._rate(made, t)
        if taken:
            for place in self.places:
                made.state[parameters[place.parameter]][place.name] = self._restored(kept, numbers, place)
        made.step()
        for place in self.places:
            value = torch.as_tensor(made.state[parameters[place.parameter]][place.name])
            if place.alone:
                numbers[:, place.columns] = float(self.backend.host(value))
                continue
            rows = len(x) if value.dim() and self.together else 1
            kept_[:, place.columns] = value.detach().to(kept_.dtype).reshape(rows, -1)

    def _cut(self, rows: Tensor) -> list[nn.Parameter]:
        """The parameters of these nodes, as views: of many nodes their rows,
        of one the tensors of its model."""
        if self.together:
            return [nn.Parameter(rows)]
        parts = torch.split(rows[0], [int(np.prod(shape)) for shape in self.shapes])
        return [nn.Parameter(part.view(shape)) for part, shape in zip(parts, self.shapes, strict=True)]

    def _restored(self, kept: Models, numbers: Floats, place: Place) -> Any:
        """A tensor of the state, as the optimiser left it;
        counts of steps are common to nodes that step together."""
        if place.alone:
            return torch.tensor(numbers[0, place.columns.start], dtype=place.dtype)
        values = _tensor(kept)[:, place.columns]
        kind = values.dtype if place.dtype.is_floating_point else place.dtype
        return (values if self.together else values[0].view(place.shape)).to(kind).clone()

    def _rate(self, made: torch.optim.Optimizer, t: int) -> None:
        factor = self.lr(t) / self.lr(1)
        for group in made.param_groups:
            group["lr"] = group["lr"] * factor


def _tensor(x: Any) -> Tensor:
    """The same memory as a tensor, wherever it is."""
    return x if isinstance(x, Tensor) else torch.from_numpy(x)
