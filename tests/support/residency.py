"""Whole rounds under FakeTensorMode on a stand-in device: python residency.py [--broken=HOW] [CASE…].

Local steps, forging, aggregation, measuring and evaluation of every case. Mixing devices or reading a value raises
there; a copy to the host is counted by a dispatch mode, which sees shapes: nothing with d in its shape may go.
"""

import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).parents[1]))
if __name__ == "__main__":  # whoever collects doctests imports this file, and must not get the device
    _setup_privateuseone_for_python_backend("dev")

from rpel.attacks import forgeries
from rpel.backend.torch import Torch
from rpel.simulation.engine import Simulation
from rpel.tasks.device import DeviceExamples, DeviceTask
from support.device_cases import cases, resolved, task_of


class Standing(Torch):
    """Torch on the stand-in device: what is read comes out as zeros, and flags as true."""

    sent: list[tuple[int, ...]] = []  # noqa: RUF012

    def lend(self, values: Any) -> torch.Tensor:
        if isinstance(values, torch.Tensor) and values.device.type == "dev":
            return values
        given = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
        self.sent.append(tuple(given.shape))
        return torch.empty(given.shape, dtype=given.dtype, device="dev")  # fake copies of one number fail there

    def array(self, values: Any) -> Any:
        return self.lend(values)

    def read(self, x: torch.Tensor) -> Any:
        kind = str(x.dtype).removeprefix("torch.")
        return np.ones(tuple(x.shape), kind) if kind == "bool" else np.zeros(tuple(x.shape), kind)


_eigenvector = forgeries.second_eigenvector


def _on_host(*given: Any) -> Any:
    """Of the honest graph (h × h), on the host: of real numbers."""
    with unset_fake_temporarily():
        return _eigenvector(*given)


forgeries.second_eigenvector = _on_host  # type: ignore[assignment]


class Leaks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is copied between devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            given = [a for a in args if isinstance(a, torch.Tensor)]
            if given and any(a.device != result.device for a in given) and "_to_copy" in str(func) + str(func.name()):
                self.shapes.append(tuple(result.shape))
        return result


def play(name: str, broken: str | None) -> None:
    """One round of a case and its evaluation; raises where something leaves the device."""
    spec = resolved(cases()[name])
    task = task_of(spec, Torch())
    assert isinstance(task, DeviceTask)
    for train in (True, False):
        task.engine._copy(train)
    if "initial" not in vars(task):
        initial, kept = task.initial(), task.local_state(1)
        task.initial = lambda: initial  # type: ignore[method-assign]
        task.local_state = lambda h: np.tile(kept, (h, 1))  # type: ignore[method-assign]
    with FakeTensorMode(allow_non_fake_inputs=False):
        arrays = Standing("dev")
        task.arrays = task.engine.arrays = arrays
        task.data = DeviceExamples(task.examples, arrays)
        run = Simulation(spec, task, arrays=arrays)
        break_on_purpose(run, broken)
        arrays.sent.clear()
        with Leaks() as leaks:
            run.step(measured=True)
            run.evaluate(np.arange(5))
        assert torch.as_tensor(run.state.x).device.type == "dev"
    uploads = spec.attack in ("gaussian", "mimic_heuristic")  # noise, and one first direction, drawn on the host
    gone = [shape for shape in [*leaks.shapes, *arrays.sent] if task.d in shape]
    assert uploads or not gone, f"copied between devices: {gone}"


def break_on_purpose(run: Simulation, how: str | None) -> None:
    """Each of the ways in which something could leave the device."""
    if how == "mixed":
        run.network.rule.rule.__dict__["run"] = lambda group, out=None: group.table[:10] + torch.ones(10, run.task.d)
    elif how == "read":
        run.network.rule.rule.__dict__["run"] = lambda group, out=None: group.table[:10] * group.table.sum().item()
    elif how == "models":
        run.network.rule.rule.__dict__["run"] = lambda group, out=None: group.table.cpu()[:10].to("dev")


def main() -> int:
    broken = next((a.partition("=")[2] for a in sys.argv[1:] if a.startswith("--broken")), None)
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or sorted(cases())
    failed = 0
    for name in names:
        try:
            play(name, broken)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}")
            if "-v" in sys.argv:
                traceback.print_exc()
    print(f"{len(names) - failed} rounds stayed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
