"""What a peer does between two exchanges, when the training loop is the user's own.

Laws: the model holds what the network says at the top of the loop, and what the step made of it at its end; optimiser,
schedule and buffers never leave the machine and are kept with the half-step they belong to; no pickled code is read
back: torch.load with weights_only.
"""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rpel.peer.learner import Blob
from rpel.peer.wire import Signature, split
from rpel.tasks.task import tensor
from rpel.types import Models


class TorchLearner:
    """The user's model, stepped by the user between :meth:`load` and :meth:`half`.

    The network exchanges the parameters that ``signature`` names: all that are trained, and possibly frozen ones. The
    model's buffers and the ``state`` objects stay here.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Any], signature: Signature) -> None:
        _check_state(state)
        self._own = dict(state)
        self._model, self._signature = model, signature
        self._parameters = _matched(model, signature)

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
            for name, values in split(self._signature, flat).items():
                copy(self._parameters[name], tensor(values))

    def state(self) -> Blob:
        """Buffers and state_dicts, by torch.save."""
        file = io.BytesIO()
        buffers = dict(self._model.named_buffers())
        torch.save({"buffers": buffers, "own": {name: own.state_dict() for name, own in self._own.items()}}, file)
        return file.getbuffer()

    def restore(self, blob: Blob) -> None:
        """Load buffers and state_dicts back."""
        found = torch.load(io.BytesIO(blob), weights_only=True, map_location="cpu")
        buffers = dict(self._model.named_buffers())
        if set(found["own"]) != set(self._own) or set(found["buffers"]) != set(buffers):
            raise ValueError(
                f"the saved round holds the state of {sorted(found['own'])}, but the loop gives {sorted(self._own)}: "
                "give the same names and the same model as before"
            )
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(found["buffers"][name])
        for name, own in self._own.items():
            own.load_state_dict(found["own"][name])

    def accuracy(self, x: Models, round: int, last: bool) -> float | None:
        """The user's loop measures what it likes."""
        return None


def _check_state(state: Mapping[str, Any]) -> None:
    for name, thing in state.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ValueError(
                f"state[{name!r}] is a {type(thing).__name__}, which has no state_dict and load_state_dict: "
                "give an optimiser, a schedule or another object that has them"
            )


def _matched(model: nn.Module, signature: Signature) -> dict[str, nn.Parameter]:
    """The parameters the network exchanges, by name; refused unless names and shapes are the network's."""
    own = dict(model.named_parameters())
    expected = dict(zip(signature.names, signature.shapes, strict=True))
    for name, shape in expected.items():
        if name not in own or tuple(own[name].shape) != shape:
            has = f"of shape {tuple(own[name].shape)}" if name in own else "missing"
            raise ValueError(f"this network's models have a parameter {name!r} of shape {shape}, but here it is {has}")
    for name, parameter in own.items():
        if parameter.requires_grad and name not in expected:
            raise ValueError(f"parameter {name!r} is trained here, but this network's models do not have it")
    return {name: own[name] for name in expected}
