"""Whether a network, a loss, metrics and data belong together,
tried on two examples before anything is trained.

Whatever the user's code raises becomes a ValueError of one sentence that says which of them does not fit, and
what would.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rpel.data import Dataset, trees
from rpel.models import Factory, flatten, trained
from rpel.tasks.autograd import AutogradEngine
from rpel.tasks.task import Metric

_IGNORED = -100  # the target that cross-entropy leaves out


def check_model(model: Any) -> nn.Module | Factory:
    """The module itself, if it can be trained, or the class or function that is to make one."""
    if isinstance(model, nn.Module):
        return check_module(model)
    if not callable(model):
        raise ValueError(
            f"model is a {type(model).__name__}: give a torch.nn.Module, such as nn.Linear(4, 2), or a class "
            "or function that makes one"
        )
    factory: Factory = model
    return factory


def check_module(module: nn.Module) -> nn.Module:
    """The module itself, if it has something to train."""
    if not trained(module):
        raise ValueError(
            "the model has no parameters that are trained: requires_grad is False for all it has"
        )
    lazy = [name for name, value in module.named_parameters() if isinstance(value, nn.UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"parameter {lazy[0]!r} of the model has no shape yet: call the model once on an example"
        )
    return module


def check_loss(loss: Any) -> Any:
    """The loss itself, if it can be called; None is cross-entropy."""
    if loss is not None and not callable(loss):
        raise ValueError(f"loss is a {type(loss).__name__}: give a function loss(output, target)")
    return loss


def described(tree: Any) -> str:
    """Shapes and kinds of examples (N, …).

    >>> described(torch.zeros(2, 7)), described({"ids": torch.zeros(2, 3, dtype=torch.int64)})
    ('examples of the shape (7,) and float32', "examples of ['ids'] (3,) int64")
    """
    leaves = [
        (name, tuple(value.shape[1:]), str(value.dtype).removeprefix("torch."))
        for name, value in _tensors(tree)
    ]
    if len(leaves) == 1 and not leaves[0][0]:
        return f"examples of the shape {leaves[0][1]} and {leaves[0][2]}"
    return "examples of " + ", ".join(f"{name} {shape} {kind}" for name, shape, kind in leaves)


def _tensors(tree: Any) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in trees.leaves(tree) if isinstance(value, Tensor)]


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def refusal(error: Exception, probe: Any) -> ValueError:
    """What to tell about a model that raised this on these examples."""
    whole = any(not value.is_floating_point() for _, value in _tensors(probe))
    advice = " (whole numbers stay what they are: if they are not ids, give them as float32)" if whole else ""
    return ValueError(f"the model does not take {described(probe)}: {first_line(error)}{advice}")


def check_classes(outputs: int, dataset: Dataset) -> None:
    """ValueError for labels that a network with so many outputs does not have."""
    for part, targets in (("train", dataset.train_y), ("test", dataset.test_y)):
        if (
            dataset.collate is not None
            or not isinstance(targets, np.ndarray)
            or targets.dtype.kind not in "iu"
        ):
            continue
        low, high = int(targets.min()), int(targets.max())
        if high >= outputs:
            raise ValueError(
                f"the {part} labels go up to {high}, but the model has {outputs} outputs: give it {high + 1}"
            )
        if low < 0 and low != _IGNORED:
            raise ValueError(f"the {part} labels begin at {low}: classes are whole numbers from 0 on")


def check_fit(
    engine: AutogradEngine,
    module: nn.Module,
    metrics: Mapping[str, Metric],
    dataset: Dataset,
    probe: Any,
    targets: Any,
) -> bool:
    """Whether outputs and targets are classes; ValueError where the model,
    the loss or a metric does not fit."""
    x = flatten(module)[None]
    local = torch.cat([*(value.detach().reshape(-1).float() for value in module.buffers()), torch.empty(0)])[
        None
    ]
    output = _outputs(engine, x, local, probe)
    classes = _classes(output, targets)
    if classes and engine.loss is F.cross_entropy:
        check_classes(output.shape[1], dataset)
    _check_loss(engine, output, targets, _outputs(engine, x, local, _twice(probe)))
    for name, metric in metrics.items():
        _check_metric(name, metric, output, targets)
    _check_gradient(engine, x, local, probe, targets)
    return classes


def _outputs(engine: AutogradEngine, x: Tensor, local: Tensor, probe: Any) -> Any:
    try:
        return engine.outputs(x, local, probe)[0]
    except Exception as error:  # the module's code may be anything
        raise refusal(error, probe) from error


def _twice(tree: Any) -> Any:
    return trees.mapped(lambda value: torch.cat([value, value]), tree)


def _classes(output: Any, targets: Any) -> bool:
    """Whether output (N, C, …) are scores of the classes that targets (N, …) are."""
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        return False
    whole = not targets.is_floating_point() and targets.dtype is not torch.bool
    fits = output.dim() == targets.dim() + 1 and output.shape[:1] == targets.shape[:1]
    return whole and fits and output.shape[1] > 1 and output.shape[2:] == targets.shape[1:]


def _shown(value: Any) -> str:
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _check_loss(engine: AutogradEngine, output: Any, targets: Any, again: Any) -> None:
    """A loss is one finite number, the mean over the batch: the same examples twice give the same."""
    what = f"an output {_shown(output)} and targets {_shown(targets)}"
    if isinstance(targets, Tensor):
        what += f" of {str(targets.dtype).removeprefix('torch.')}"
    try:
        value = engine.loss(output, targets)
    except Exception as error:  # the loss's code may be anything
        raise ValueError(f"the loss does not take {what}: {first_line(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(
            f"the loss gives {_shown(value)} for {what}, not one number: it must be the mean of the batch"
        )
    if not torch.isfinite(value):
        raise ValueError(
            f"the loss of the initial model is {float(value)} on two of the examples: it must be a number"
        )
    doubled = float(engine.loss(again, _twice(targets)))
    if abs(doubled - 2 * float(value)) <= 1e-3 * abs(doubled) and abs(doubled - float(value)) > 1e-6:
        raise ValueError(
            f"the loss is a sum and not a mean over the batch: {float(value):g} became {doubled:g} with each "
            "example twice, so the nearest is reduction='mean'"
        )


def _check_metric(name: str, metric: Metric, output: Any, targets: Any) -> None:
    try:
        float(metric.function(output, targets))
    except Exception as error:  # the metric's code may be anything
        raise ValueError(
            f"metric {name!r} gives no number for an output {_shown(output)} and targets {_shown(targets)}: "
            f"{first_line(error)}"
        ) from error


def _check_gradient(engine: AutogradEngine, x: Tensor, local: Tensor, probe: Any, targets: Any) -> None:
    alone = [trees.mapped(lambda value: value[None], tree) for tree in (probe, targets)]
    try:
        engine.gradient(x, local.clone(), alone[0], alone[1], [0], torch.empty_like(x), train=True)
    except Exception as error:  # of the module or the loss
        raise ValueError(
            f"the loss has no gradient for the model's parameters: {first_line(error)}"
        ) from error
