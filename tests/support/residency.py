"""Whole rounds under FakeTensorMode on a stand-in device: python residency.py [CASE…].

Local steps, forging, aggregation, measuring and evaluation of every case. Mixing devices or reading a value
raises there. A dispatch mode sees the shapes of all copies to the host: nothing with d in its shape may go.
At the end each check is broken on purpose, and has to notice.
"""

import copy
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).parents[1]))
if __name__ == "__main__":  # whoever collects doctests imports this file, and must not get the device
    _setup_privateuseone_for_python_backend("dev")

from rpel.attacks import forgeries
from rpel.backend import arrays as array_functions
from rpel.backend.tensors import Torch
from rpel.rules import linear
from rpel.simulation.engine import Engine
from rpel.tasks import objective, private
from rpel.tasks.engines import PLAIN, choose, portable
from rpel.tasks.engines.autograd import AutogradEngine
from rpel.tasks.engines.vmap import VmapEngine
from rpel.tasks.examples import Examples
from support.device_cases import cases, resolved, task_of


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the shapes of copies between devices, and the kinds of tensors that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied: list[tuple[int, ...]] = []
        self.kinds = set[tuple[str, Any]]()  # (type of device, dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for made in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            self.kinds.add((made.device.type, made.dtype))
            sources = [one for one in given if one.dim() or "_to_copy" in str(func)]
            if any(one.device != made.device for one in sources):
                self.copied.append(tuple(made.shape))
        return result


class Standing(Torch):
    """Torch on the stand-in device: what is read comes out as zeros, and flags as true."""

    sent: list[tuple[int, ...]] = []  # noqa: RUF012

    def lend(self, values: Any) -> torch.Tensor:
        if isinstance(values, torch.Tensor) and values.device.type == "dev":
            return values
        given = self.narrowed(values if isinstance(values, torch.Tensor) else np.array(values))
        self.sent.append(tuple(given.shape))
        # fake copies of one number fail there
        return torch.empty(given.shape, dtype=given.dtype, device="dev")

    def array(self, values: Any) -> Any:
        return self.lend(values)

    def host(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.device.type == "cpu" and not x.dim():
            return 1.0  # the count of steps that torch's optimisers keep there
        return super().host(x)

    def read(self, x: torch.Tensor) -> Any:
        self.sent.append(tuple(x.shape))
        kind = str(x.dtype).removeprefix("torch.")
        return np.ones(tuple(x.shape), kind) if kind == "bool" else np.zeros(tuple(x.shape), kind)


def _on_host(function: Any) -> Any:
    """What is computed on the host, of real numbers: of the honest graph (h × h),
    or drawn (masks of dropout)."""

    def computed(*given: Any) -> Any:
        with unset_fake_temporarily():
            return function(*given)

    return computed


def _lend(values: Any, like: Any) -> Any:
    return Standing("dev").lend(values) if isinstance(like, torch.Tensor) else np.asarray(values)


def use_stand_in() -> None:
    """Teach this process the stand-in device: collecting doctests imports this module and must not."""
    array_functions.device_generator = lambda rng, like: None  # torch has none for the stand-in device
    forgeries.second_eigenvector = _on_host(forgeries.second_eigenvector)
    VmapEngine._masks = _on_host(VmapEngine._masks)  # type: ignore[method-assign]
    private.check_forward = _on_host(private.check_forward)
    objective.on_host = Standing("dev").read  # type: ignore[assignment]
    for module in (array_functions, forgeries, linear):
        module.lend = _lend  # type: ignore[attr-defined]


class Narrow(Standing):
    """A device without float64, as mps is."""

    wide = torch.float32


def play(name: str, broken: str | None, kind: type[Standing] = Standing) -> None:
    """Two rounds of a case and their evaluation; raises where something leaves the device,
    or is of numbers that it does not have."""
    array_functions.WITHOUT_FLOAT64 = {"dev"} if kind is Narrow else set()
    made, arrays, mode = resolved(cases()[name]), kind("dev"), FakeTensorMode(allow_non_fake_inputs=False)
    task = copy.copy(task_of(made, Torch()))
    given, initial, stored = task.examples, task.initial(), task.local_state(1)
    task.initial = lambda: initial  # type: ignore[method-assign]
    task.local_state = lambda h: np.tile(stored, (h, 1))  # type: ignore[method-assign]
    table = PLAIN if name.endswith("alone") else portable()
    task.engine = choose(task.module, task.loss, replace(task.probe, device=torch.device("dev")), table)
    task.nodes_per_call = task.engine.nodes_per_call(task.batch_size)
    task.engine_by_example = lambda: task.engine  # type: ignore[method-assign]
    make_copies(task.engine, mode)
    with mode:
        task.examples = Examples(
            given.dataset, given.virtual or given.held, given.batch_size, given.seed, given.flipped.tolist(),
            given.trigger, "dev",
        )  # fmt: skip
        run = Engine(made, task, arrays=arrays)
        break_on_purpose(run, broken)
        arrays.sent.clear()
        with Watch() as seen:
            for _ in range(2):  # what is remembered is met in the second
                run.step()
                run.measure(contraction=True)
            run.evaluate(np.arange(5))
        assert torch.as_tensor(run.state.x).device.type == "dev"
    gone = [shape for shape in [*seen.copied, *arrays.sent] if task.d in shape]
    if kind is Narrow:
        assert ("dev", torch.float64) not in seen.kinds, "float64 was made"
    else:
        assert not gone, f"copied between devices: {gone}"


def make_copies(engine: Any, mode: FakeTensorMode) -> None:
    """Make the copies of the network that an engine works with, of real parameters, beforehand."""
    if isinstance(engine, VmapEngine):
        engine._copy(train=True)
    if isinstance(engine, AutogradEngine):
        engine.device = torch.device("cpu")
        made = engine._copy(torch.float32)
        with mode:
            made.module._apply(lambda value: torch.empty(value.shape, dtype=value.dtype, device="dev"))  # type: ignore[no-untyped-call]
        made.parameters, made.buffers = list(made.module.parameters()), list(made.module.buffers())
        engine.device = torch.device("dev")


def break_on_purpose(run: Engine, how: str | None) -> None:
    """Each of the ways in which something could leave the device."""
    rule, d = run.network.rule.rule, run.task.d
    ways: dict[str, Callable[..., Any]] = {
        "mixed": lambda group, out=None: group.table[:10] + torch.ones(10, d),
        "read": lambda group, out=None: group.table[:10] * group.table.sum().item(),
        "models": lambda group, out=None: group.table.cpu()[:10].to("dev"),
        "float64": lambda group, out=None: group.table[:10].double().float(),
    }
    if how in ways:
        type(rule).run = lambda self, group, out=None: ways[how](group)  # type: ignore[method-assign]


def broken() -> Iterator[str]:
    """Yield each break that the checks do not notice."""
    for how in ("mixed", "read", "models", "float64"):
        try:
            play("rule-median", how, Narrow if how == "float64" else Standing)
        except Exception as error:
            print(f"{how} on purpose: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            yield how


def main() -> int:
    use_stand_in()
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or sorted(cases())
    failed = 0
    for kind in (Standing, Narrow):
        stayed = 0
        for name in names:
            try:
                play(name, None, kind)
                stayed += 1
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}")
                if "-v" in sys.argv:
                    traceback.print_exc()
        failed += len(names) - stayed
        print(f"{stayed} rounds stayed" if kind is Standing else f"{stayed} rounds without float64")
    missed = list(broken())
    print(f"not noticed: {', '.join(missed) or 'nothing'}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
