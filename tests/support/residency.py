"""Whole rounds under FakeTensorMode on a stand-in device: python residency.py [CASE…].

Local steps, forging, aggregation, measuring and evaluation of every case. Mixing devices or reading a value
raises there; a copy to the host is counted by a dispatch mode, which sees shapes: nothing with d in its shape
may go. The same mode counts kernels and bytes. At the end each check is broken on purpose, and has to notice.
"""

import copy
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).parents[1]))
if __name__ == "__main__":  # whoever collects doctests imports this file, and must not get the device
    _setup_privateuseone_for_python_backend("dev")

from rpel.attacks import forgeries
from rpel.backend.sorting import network
from rpel.backend.torch import Torch
from rpel.simulation.engine import Simulation
from rpel.tasks.device import DeviceExamples, DeviceTask, NodeByNode
from rpel.tasks.vmap import VmapEngine
from support.counting import Counter
from support.device_cases import cases, resolved, task_of


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
        kind = str(x.dtype).removeprefix("torch.")
        return np.ones(tuple(x.shape), kind) if kind == "bool" else np.zeros(tuple(x.shape), kind)


def _on_host(function: Any) -> Any:
    """What is computed on the host, of real numbers: of the honest graph (h × h),
    or drawn (masks of dropout)."""

    def computed(*given: Any) -> Any:
        with unset_fake_temporarily():
            return function(*given)

    return computed


forgeries.second_eigenvector = _on_host(forgeries.second_eigenvector)
VmapEngine._masks = _on_host(VmapEngine._masks)  # type: ignore[method-assign]


class Narrow(Standing):
    """A device without float64, as mps is."""

    wide = torch.float32


def play(name: str, broken: str | None, kind: type[Standing] = Standing) -> None:
    """Two rounds of a case and their evaluation; raises where something leaves the device,
    or is of numbers that it does not have."""
    spec, arrays, mode = resolved(cases()[name]), kind("dev"), FakeTensorMode(allow_non_fake_inputs=False)
    task = copy.copy(task_of(spec, Torch()))
    assert isinstance(task, DeviceTask)
    initial, stored = task.initial(), task.local_state(1)
    task.initial = lambda: initial  # type: ignore[method-assign]
    task.local_state = lambda h: np.tile(stored, (h, 1))  # type: ignore[method-assign]
    task.arrays = arrays
    task.use("alone" if name.endswith("alone") else "unfold")
    task.engine_by_example = lambda: task.engine  # type: ignore[method-assign]
    if spec.max_grad_norm is not None:  # masks of dropout are of batches of one
        example = task.examples.batch(np.zeros((1, 1), np.int64), None, torch.float32)[0][0]
        many: Any = getattr(task.engine, "many", task.engine)
        many.prepare(example, torch.float32)
    made_beforehand(task.engine, mode)
    with mode:
        task.data = DeviceExamples(task.examples, arrays)
        run = Simulation(spec, task, arrays=arrays)
        break_on_purpose(run, broken)
        arrays.sent.clear()
        with Counter() as counted:
            for _ in range(2):  # what is remembered is met in the second
                run.step(measured=True)
            run.evaluate(np.arange(5))
        assert torch.as_tensor(run.state.x).device.type == "dev"
    gone = [shape for shape in [*counted.copied, *arrays.sent] if task.d in shape]
    if kind is Narrow:
        assert ("dev", torch.float64) not in counted.kinds, "float64 was made"
    else:
        assert not gone, f"copied between devices: {gone}"


def made_beforehand(engine: Any, mode: FakeTensorMode) -> None:
    """The copies of the network that an engine works with: of real parameters,
    which a round does not meet."""
    if not isinstance(engine, NodeByNode):
        for train in (True, False):
            engine._copy(train)
        return
    engine.device = torch.device("cpu")
    for engine.lane in range(4):
        made = engine._copy(torch.float32)
        with mode:
            made.module._apply(lambda value: torch.empty(value.shape, dtype=value.dtype, device="dev"))  # type: ignore[no-untyped-call]
        made.device = torch.device("dev")
        made.parameters, made.buffers = list(made.module.parameters()), list(made.module.buffers())
    engine.device, engine.lane = made.device, 0


class Calm(Standing):
    """Standing where every model is finite and no distance is doubtful."""

    def read(self, x: torch.Tensor) -> Any:
        return super().read(x) if x.dim() else np.zeros_like(super().read(x))


def count(broken: str | None) -> None:
    """Kernels and bytes of the parts of a round against the formulas of docs/scale.md;
    raises beyond 1.1 times."""
    budget, h, m, f, d = 1 << 20, 30, 16, 7, 2000
    arrays = Calm("dev", budget=budget)
    index, ones = (np.arange(h)[:, None] + np.arange(m)) % h, np.ones(h)
    comparisons = len(network(m, f, "trimmed_mean"))

    def pieces(values: int) -> int:
        """Of h victims, with so many values for each coordinate: as many as fit the budget at once."""
        return -(-h // (budget // (4 * d * values)))

    with FakeTensorMode(allow_non_fake_inputs=False):
        table, out = (
            arrays.repeated(np.zeros(d, np.float32), 2 * h),
            arrays.repeated(np.zeros(d, np.float32), h),
        )
        parts: dict[str, tuple[Callable[[], Any], float, float]] = {
            "momentum": (lambda: arrays.momentum_step(table[:h], table[h:], out, 0.9, 0.1, 0.0, out=out), 4,
                0),
            "alie": (
                lambda: arrays.moments(table, index, ones, ones, out=out), 9 * pieces(m + 2) + 4, budget,
            ),
            "nnm+trimmed_mean": (
                lambda: arrays.coordinatewise(table, index, "trimmed_mean", f, m - f, out=out),
                pieces(2 * m + 1) * (2 * comparisons + m - 2 * f + 3) + 40, budget,
            ),
        }  # fmt: skip
        for name, (work, kernels, nbytes) in parts.items():
            with Counter() as counted:
                work()
                if broken == "memory":
                    table.new_empty((h * m, d))  # every victim's rows at once
                elif broken == "kernels":
                    for i in range(500):
                        out[i % h] += 1
            print(f"{name}: {counted.kernels} kernels of {kernels}, {counted.peak:,} bytes of {nbytes:,}")
            assert 0.9 * kernels <= counted.kernels <= 1.1 * kernels, f"{name}: {counted.kernels} kernels"
            assert 0.5 * nbytes <= counted.peak <= 1.1 * nbytes, f"{name}: {counted.peak:,} bytes"


class Still:
    """A task whose gradients are the models: what is counted beside it is the exchange and the momentum
    step."""

    def __init__(self, d: int) -> None:
        self.d, self.layout = d, {"w": (d,)}

    def initial(self) -> Any:
        return np.zeros(self.d, np.float32)

    def local_state(self, h: int) -> Any:
        return np.zeros((h, 0), np.float32)

    def gradient(self, x: Any, local: Any, ids: Any, t: int, k: int, out: Any = None) -> Any:
        return out.copy_(x), local


def cost(name: str) -> tuple[int, float]:
    """Kernels of a round, and the most memory that a run of two has taken at once, beside the budget,
    in honest models.

    30 honest nodes of 5,000 parameters that pull 9, and a budget as large as their models.
    """
    d, h = 5000, 30
    spec = resolved({**({"rule": "mean"} if name.startswith("attack") else {}), **cases()[name]}, nodes=h + 2)
    # else it is drawn in many pieces
    arrays = Calm("dev", budget=4 * h * d * (16 if spec.attack == "gaussian" else 1))
    with FakeTensorMode(allow_non_fake_inputs=False), Counter() as counted:
        run = Simulation(spec, Still(d), arrays=arrays)  # type: ignore[arg-type]
        run.advance()
        before = counted.kernels
        arrays.sent.clear()
        run.advance()
    gone = [shape for shape in [*counted.copied, *arrays.sent] if d in shape]
    assert not gone, f"{name}: copied between devices: {gone}"
    return counted.kernels - before, (counted.peak - arrays.budget) / (4 * h * d)


def stated() -> dict[str, tuple[int, float]]:
    """What docs/scale.md says of them."""
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z_+ -]+)` \| ([\d,]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    return {name: (int(kernels.replace(",", "")), float(models)) for name, kernels, models in rows}


def counted(names: list[str]) -> int:
    """How many of the cases cost another thing than docs/scale.md says: a tenth more or less in kernels, or
    more memory."""
    wrong, known = 0, stated()
    for name in names:
        kernels, models = cost(name)
        print(f"| `{name}` | {kernels:,} | {models:.2f} |")
        right, most = known.get(name, (0, 0.0))
        if not 0.9 * right <= kernels <= 1.1 * right or models > max(1.1 * most, most + 0.1):
            wrong += 1
            print(f"{name} costs {kernels} kernels and {models:.2f} models, not {right} and {most}")
    return wrong


def break_on_purpose(run: Simulation, how: str | None) -> None:
    """Each of the ways in which something could leave the device."""
    rule, d = run.network.rule.rule, run.task.d
    ways: dict[str, Callable[..., Any]] = {
        "mixed": lambda group, out=None: group.table[:10] + torch.ones(10, d),
        "read": lambda group, out=None: group.table[:10] * group.table.sum().item(),
        "models": lambda group, out=None: group.table.cpu()[:10].to("dev"),
        "float64": lambda group, out=None: group.table[:10].double().float(),
    }
    if how in ways:
        rule.__dict__["run"] = ways[how]


def broken() -> Iterator[str]:
    """Each break that the checks do not notice."""
    for how in ("mixed", "read", "models", "float64", "memory", "kernels"):
        try:
            if how in ("memory", "kernels"):
                count(how)
            else:
                play("rule-median", how, Narrow if how == "float64" else Standing)
        except Exception as error:
            print(f"{how} on purpose: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            yield how


def main() -> int:
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or sorted(cases())
    priced = [name for name in names if name.startswith(("rule", "attack"))]
    if "--costs" in sys.argv:
        return counted(priced)
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
    count(None)
    failed += counted(priced)
    missed = list(broken())
    print(f"not noticed: {', '.join(missed) or 'nothing'}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
