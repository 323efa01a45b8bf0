"""Check that a network, a loss, metrics and data fit together, on two examples before training.

Whatever the user's code raises becomes a ValueError of one sentence that says which of them does not fit, and
what would.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rpel.data import Dataset, trees
from rpel.models import Factory, flatten, trained
from rpel.tasks.engines.autograd import AutogradEngine
from rpel.tasks.engines.engine import Probe
from rpel.tasks.metrics import Metric

_IGNORED = -100  # the target that cross-entropy leaves out


def check_model(model: Any) -> nn.Module | Factory:
    """Return the module if it can be trained, or the class or function that makes one."""
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
    """Raise ValueError for labels beyond the number of the network's outputs."""
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


def check_fit(engine: AutogradEngine, metrics: Mapping[str, Metric], dataset: Dataset, given: Probe) -> bool:
    """Whether outputs and targets are classes; ValueError where model, loss or a metric does not fit."""
    probe, targets, module = given.inputs, given.targets, engine.module
    x = flatten(module)[None]
    state = [value.detach().reshape(-1).float() for value in module.buffers()]
    local = torch.cat([*state, torch.empty(0)])[None]
    output = _outputs(engine, x, local, probe)
    classes = _classes(output, targets)
    if classes and engine.loss is F.cross_entropy:
        check_classes(output.shape[1], dataset)
    again = _outputs(engine, x, local, _twice(probe))
    _check_loss(engine, output, targets, again)
    for name, metric in metrics.items():
        _check_pairings(f"metric {name!r}", metric.function, [(output, targets), (again, _twice(targets))])
        _check_metric(name, metric, output, targets)
    _check_gradient(engine, x, local, probe, targets)
    if given.batch_size == 1:
        _check_single(engine, x, local, probe, targets)
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


class _Pairings(TorchFunctionMode):
    """Notes where outputs (B, 1) meet targets (B,), or the other way round, and become (B, B).

    Outputs are what requires a gradient, targets what does not. Losses that compare examples on purpose
    (contrastive ones, rankings, Cox's) pair outputs with outputs and targets with targets, or say (1, B).
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.pairs = batch, set[tuple[str, str]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for output, target in product(tensors, tensors):
            if output.requires_grad and not target.requires_grad and self._pairs(output, target):
                shape = np.broadcast_shapes(tuple(output.shape), tuple(target.shape))
                if _shape_by_example(func, args, kwargs, result) == shape:
                    self.pairs.add((_of_batch(output), _of_batch(target)))
        return result

    def _pairs(self, output: Tensor, target: Tensor) -> bool:
        low, high = sorted((tuple(output.shape), tuple(target.shape)), key=len)
        if not low or len(low) == len(high) or {low[0], high[0]} != {self.batch} or high[-len(low)] != 1:
            return False
        return all(
            1 in (a, b) or a == b for a, b in zip(low[1:], high[len(high) - len(low) + 1 :], strict=True)
        )


def _of_batch(value: Tensor) -> str:
    """A shape, with N for the number of examples."""
    return f"(N, {', '.join(map(str, value.shape[1:]))})" if value.dim() > 1 else "(N,)"


def _shape_by_example(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...] | None:
    """The shape of what a function gives, for a loss before it takes the mean."""
    if isinstance(result, Tensor) and not result.dim():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = func(*args, **{**kwargs, "reduction": "none"})
        except TypeError:  # it is no loss of torch's
            return None
    return tuple(result.shape) if isinstance(result, Tensor) else None


def _pairings(function: Any, output: Any, targets: Any) -> set[tuple[str, str]]:
    """The shapes of outputs and targets that a function of a batch broadcasts."""

    def differentiable(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().requires_grad_().clone() if floats else value

    if type(output) in (Tensor, tuple, dict):
        output = trees.mapped(differentiable, output)
    mode = _Pairings(len(trees.first(targets)))
    with mode, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            function(output, targets)
        except Exception:  # code that takes no outputs with a gradient, such as a metric by NumPy
            return set()
    unequal = isinstance(output, Tensor) and isinstance(targets, Tensor) and output.shape != targets.shape
    if unequal and any("Using a target size" in str(warning.message) for warning in said):
        mode.pairs.add((_of_batch(output), _of_batch(targets)))
    return mode.pairs


def _check_pairings(what: str, function: Any, batches: Sequence[tuple[Any, Any]]) -> None:
    """ValueError for a loss or a metric that broadcasts outputs and targets against each other.

    batches: of different sizes, as a constant may be as long as one of them by chance.
    """
    pairs = set.intersection(*(_pairings(function, *batch) for batch in batches))
    for output, target in sorted(pairs):
        advice = {"(N,)": ", such as y.reshape(-1, 1) for the targets y", "(N, 1)": ", such as y.flatten()"}
        raise ValueError(
            f"{what} broadcasts outputs of the shape {output} against targets of the shape {target}, so it "
            f"does not compare each output with its own target: give both one shape{advice.get(target, '')}"
        )


def _check_loss(engine: AutogradEngine, output: Any, targets: Any, again: Any) -> None:
    """A loss is one finite number, the mean over the batch: the same examples twice give the same."""
    what = f"an output {_shown(output)} and targets {_shown(targets)}"
    if isinstance(targets, Tensor):
        what += f" of {str(targets.dtype).removeprefix('torch.')}"
    twice = _twice(targets)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using a target size")
            value = engine.loss(output, targets)
            second = engine.loss(again, twice)
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
    _check_pairings("the loss", engine.loss, [(output, targets), (again, twice)])
    doubled = float(second)
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


def _check_single(engine: AutogradEngine, x: Tensor, local: Tensor, probe: Any, targets: Any) -> None:
    """ValueError for a model that cannot train on one example, as with BatchNorm."""
    alone = [trees.mapped(lambda value: value[None, :1], tree) for tree in (probe, targets)]
    try:
        engine.gradient(x, local.clone(), alone[0], alone[1], [0], torch.empty_like(x), train=True)
    except Exception as error:  # of the module or the loss
        raise ValueError(
            f"batch_size 1 is too small for this model ({first_line(error)}): BatchNorm needs a batch of at "
            "least 2; or replace it by GroupNorm"
        ) from error
