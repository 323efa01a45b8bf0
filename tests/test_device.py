"""The torch backend: equal to numba's results, and nothing with d in its shape leaves the device."""

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import rpel
from rpel import spec
from rpel.backend import arrays as array_functions
from rpel.backend.base import backend
from rpel.backend.chunks import local_device
from rpel.backend.tensors import Torch, operate
from rpel.randomness import stream
from rpel.simulation import build, communicator
from rpel.simulation import workers as launch
from rpel.simulation.build import build_backend, build_task
from rpel.simulation.engine import Engine
from rpel.simulation.inputs import Inputs, gather
from rpel.simulation.methods import resolve
from support import device_cases
from support.device_cases import cases, largest, resolved, task_of
from support.simulations import play
from support.waiting import PATIENCE

NAMES = sorted(cases())
QUICK = {
    "attack-alie", "attack-backdoor", "attack-dissensus", "attack-fang", "attack-foe", "attack-gaussian",
    "attack-inf", "attack-inner_product_manipulation", "attack-label_flip", "attack-mimic",
    "attack-mimic_heuristic", "attack-spectral", "rule-arc+median", "rule-bucketing+median",
    "rule-clipping+median", "rule-dnc", "rule-geometric_median", "rule-krum", "rule-median",
    "rule-multi_krum", "rule-nnm+krum", "rule-nnm+median", "wire-int8",
    "asynchronous", "private", "clipped-alone",
}  # fmt: skip


def marked(quick: set[str]) -> list[Any]:
    """All names; those that are not quick are for `make test-all`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in NAMES]


HERE = Path(__file__).parent


def two_runs(name: str, wide: bool = False, **more: Any) -> tuple[Engine, Engine]:
    """A case by numba and by torch, from equal states after a round. wide: in float64, from the start."""
    spec, arrays = resolved(cases()[name], **more), Torch()
    tasks = [task_of(spec), task_of(spec, arrays)]
    if wide:
        tasks = [copy.copy(task) for task in tasks]
        for task in tasks:
            setattr(task, "initial", partial(np.asarray, task.initial().astype(np.float64)))  # noqa: B010
    numba = Engine(spec, tasks[0], arrays=backend("numba"))
    torchs = Engine(spec, tasks[1], arrays=arrays)
    if not wide:
        numba.step()
        torchs.load(numba.arrays())
    return numba, torchs


def differing(numba: Engine, torchs: Engine) -> float:
    """The share of nodes whose models differ by more than 1e-5 of the largest entry."""
    off = np.abs(torchs.models() - numba.models()).max(axis=1) > 1e-5 * largest(numba.models())
    return float(off.mean())


@pytest.mark.parametrize("name", marked(QUICK))
def test_torch_round_equals_numba_round_up_to_rounding(name: str) -> None:
    numba, torchs = two_runs(name)
    expected, actual = (play(run, contraction=True) for run in (numba, torchs))
    assert isinstance(torchs.state.x, torch.Tensor)
    assert (actual.hostile == expected.hostile).all()
    assert (actual.degraded, actual.diverged) == (expected.degraded, expected.diverged)
    assert actual.consensus == pytest.approx(expected.consensus, rel=1e-3, nan_ok=True)
    losses = [run.evaluate(np.arange(20)).loss for run in (torchs, numba)]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert differing(numba, torchs) <= 0.01


@pytest.mark.parametrize("name", marked({"rule-nnm+trimmed_mean"}))
def test_twenty_rounds_in_float64_end_where_numba_ends(name: str) -> None:
    runs = two_runs(name, wide=True)
    for run in runs:
        for _ in range(20):
            run.step()
    numba, torchs = (run.models() for run in runs)
    assert np.abs(numba).max() > 0.1  # it has learnt something
    np.testing.assert_allclose(torchs, numba, rtol=0, atol=1e-9)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore")  # those of torch about itself
def test_sorting_network_is_one_graph_that_torch_can_compile(compiler: str) -> None:
    x = torch.randn(3, 9, 50, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(operate, backend=compiler, fullgraph=True)
    for operation in ("trimmed_mean", "median", "meamed"):
        expected = operate(x.clone(), operation, 3)
        assert torch.allclose(compiled(x.clone(), operation, 3), expected, rtol=1e-6)


def test_compensated_float32_orders_near_equal_models_as_float64() -> None:
    class Narrow(Torch):
        wide = torch.float32

    coins = np.random.default_rng(0)
    base = coins.normal(size=5000)
    table = (base + 1e-3 * coins.normal(size=(9, 5000)) * np.arange(1, 10)[:, None]).astype(np.float32)
    index = np.arange(9)[None]
    exact = backend("plain").squared_distances(table, index)
    actual = Narrow(budget=40_000).squared_distances(torch.from_numpy(table), index)
    np.testing.assert_allclose(actual, exact, rtol=2e-6)
    assert (np.argsort(actual, axis=2) == np.argsort(exact, axis=2)).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_normal_numbers_of_a_device_follow_from_seed_round_and_node_alone(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_functions, "on_host", lambda like: False)

    def draw(round: int) -> torch.Tensor:
        like: Any = torch.empty(0, dtype=kind)
        return cast(
            torch.Tensor, array_functions.standard_normal(stream(1, "noise", round, node=5), (9_000,), like)
        )

    first, again, later = draw(2), draw(2), draw(3)
    assert first.dtype == kind
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert abs(first.mean()) < 0.05
    assert first.std().item() == pytest.approx(1, abs=0.05)


def test_rules_and_attacks_of_numpy_arrays_run_on_a_device() -> None:
    def minus(view: Any) -> Any:
        assert isinstance(view.honest, np.ndarray)
        return -view.honest.mean(axis=0)

    def middle(x: Any, f: int) -> Any:
        assert isinstance(x, np.ndarray)
        return np.sort(x, axis=0)[f:-f].mean(axis=0)

    given: dict[str, Any] = {**device_cases.SMALL, "rounds": 2, "eval_size": 10, "threads": 1}
    result = rpel.simulate(**{**given, "attack": minus, "rule": middle}, backend="torch")
    expected = rpel.simulate(**{**given, "attack": minus, "rule": middle})
    np.testing.assert_allclose(result.models, expected.models, rtol=0, atol=1e-5 * largest(expected.models))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"backend": "numba", "device": "cuda"}, "device 'cuda' goes with backend 'torch'"),
        ({"device": "gpu"}, "cpu, cuda, cuda:1"),
    ],
)
def test_unsupported_torch_backend_options_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolved({"backend": "torch", **fields})


def test_run_too_large_for_the_device_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_device_memory", lambda device: 10_000)
    with pytest.raises(ValueError, match=r"need \S+ kB, and 10 kB are free"):
        rpel.simulate(**device_cases.SMALL, backend="torch", out=None)


@pytest.mark.full
@pytest.mark.parametrize(("preset", "d"), [("cifar10-100", 1_310_922), ("resnet18-cifar10", 11_173_962)])
def test_presets_for_a_gpu_take_two_rounds_here(preset: str, d: int, shared_data: Path) -> None:
    wanted = resolve(spec.load(preset).replace(backend="torch", batch_size=2, data_dir=str(shared_data)))
    arrays = build_backend(wanted.spec)
    run = Engine(wanted, build_task(wanted, gather(wanted, Inputs()), arrays), arrays=arrays)
    for _ in range(2):
        assert np.isfinite(play(run).consensus)
    assert run.state.x.shape == (wanted.spec.nodes - wanted.spec.hostile_count, d)


@pytest.mark.integration
@pytest.mark.parametrize(
    "model", ["mlp", pytest.param(device_cases.NETWORK, marks=pytest.mark.full)], ids=["mlp", "network"]
)
def test_two_workers_end_where_one_does_through_buffers_too(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {**device_cases.SMALL, "rounds": 3, "backend": "torch", "model": model}
    one = rpel.simulate(**given, out=tmp_path / "1")
    # worker 0 treats its tensors as those of a device that gloo does not reach; worker 1 does not
    monkeypatch.setattr(communicator, "reachable", lambda part: False)
    two = rpel.simulate(**given, workers=2, out=tmp_path / "2")
    np.testing.assert_allclose(two.models, one.models, rtol=0, atol=1e-6 * largest(one.models))


@pytest.mark.parametrize(
    ("device", "here", "gpus", "nccl", "expected"),
    [
        ("cuda", 2, 2, True, launch.NCCL),
        ("cuda", 2, 2, False, "gloo"),
        ("cuda", 3, 2, True, "gloo"),  # NCCL refuses two workers on one device
        ("cuda:1", 1, 2, True, launch.NCCL),
        ("cuda:1", 2, 2, True, "gloo"),
        ("cpu", 2, 2, True, "gloo"),
        ("mps", 2, 0, True, "gloo"),
    ],
)
def test_nccl_moves_arrays_if_each_worker_has_a_cuda_device_of_its_own(
    device: str, here: int, gpus: int, nccl: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "missing", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    assert launch.carrier(device, here) == expected
    if device == "cuda":
        assert [local_device(device, rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.integration
def test_benchmark_of_a_device_prints_rivals_and_ratios_of_every_part() -> None:
    command = [sys.executable, str(HERE.parent / "benchmarks" / "device.py"), "--json"]
    done = subprocess.run(
        [*command, "--nodes", "9", "--models", "4", "--parameters", "500"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len({row["work"] for row in rows}) == 8
    assert {row["rival"] for row in rows} == {"copy", "product", "numba"}
    for row in rows:
        assert row["ratio"] == pytest.approx(row["rival_seconds"] / row["seconds"])
        assert (row["device"], row["bytes"] > 0) == ("cpu", True)


FEW = (
    "rule-nnm+trimmed_mean",
    "attack-label_flip",
    "method-cs-plus",
    "network-alone",
    "wire-int8",
    "asynchronous-adamw",
)


def residency(*only: str) -> subprocess.CompletedProcess[str]:
    """The round of these cases on the stand-in device, in a process of its own:
    its registration is for good."""
    command = [sys.executable, str(HERE / "support" / "residency.py"), *only]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=HERE)


PARTS = [pytest.param(tuple(NAMES[part::8]), marks=pytest.mark.full, id=f"part{part}") for part in range(8)]
"""All cases, in parts that end in time on a busy machine, too."""


@pytest.mark.parametrize("some", [pytest.param(FEW, id="some"), *PARTS])
def test_whole_rounds_stay_on_the_stand_in_device(some: tuple[str, ...]) -> None:
    done = residency(*some)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(some)} rounds stayed" in done.stdout
    assert f"{len(some)} rounds without float64" in done.stdout
    for noticed in (
        "mixed on purpose: FakeTensorDeviceMismatchError",
        "read on purpose: DataDependentOutputException",
        "models on purpose: AssertionError: copied between devices",
        "float64 on purpose: AssertionError: float64 was made",
    ):
        assert noticed in done.stdout
