"""The step between two exchanges: Algorithm 1's for tasks, the user's own in a loop,
both continued after a restart."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rpel import models
from rpel.data import Dataset
from rpel.learning import MomentumSGD
from rpel.models import flatten, model
from rpel.optim import LocalMomentum
from rpel.peer.config.settings import Config
from rpel.peer.core import wire
from rpel.peer.core.wire import Layout, split
from rpel.peer.learn.learner import TaskLearner, TorchLearner, built_in, seed_of, task_learner, training
from rpel.spec import Training
from rpel.tasks import Classification, Task
from rpel.types import Measured, Models

SAMPLE = Training(model="linear", batch_size=5, eval_every=2, eval_size=100)


def a_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def train(network: nn.Module, optimiser: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    optimiser.zero_grad()
    network(inputs).square().mean().backward()
    optimiser.step()


def half_step(learner: TaskLearner, t: int, x: Models, fresh: bool = False) -> Models:
    """A member's half-step from x."""
    out = np.empty_like(x)
    learner.load(t, x, fresh=fresh)
    learner.half(out, np.empty_like(out))
    return out


def run_loop(
    learner: TorchLearner, network: nn.Module, optimiser: torch.optim.Optimizer, x: Models, seed: int
) -> Models:
    out = np.empty_like(x)
    learner.load(seed, x, fresh=False)
    train(network, optimiser, seed)
    learner.half(out, np.empty_like(out))
    return out


# --- the user's loop ----------------------------------------------------------------------------------------


def test_restored_training_loop_continues_bit_by_bit() -> None:
    network = a_network()
    layout = Layout.of(network.named_parameters())
    optimiser = LocalMomentum(network.parameters(), lr=0.1)
    learner = TorchLearner(network, {"optimizer": optimiser}, layout)
    x = run_loop(learner, network, optimiser, flatten(network).numpy(), seed=1)
    kept = bytes(learner.state())
    expected = run_loop(learner, network, optimiser, x, seed=2)

    again = a_network()
    optimiser = LocalMomentum(again.parameters(), lr=0.1)
    learner = TorchLearner(again, {"optimizer": optimiser}, layout)
    learner.restore(kept)
    assert np.array_equal(run_loop(learner, again, optimiser, x, seed=2), expected)
    assert torch.equal(again[1].running_mean, network[1].running_mean)  # type: ignore[index]


def test_schedules_and_other_optimisers_are_saved_too() -> None:
    def parts(network: nn.Module) -> dict[str, Any]:
        optimiser = torch.optim.AdamW(network.parameters(), lr=0.1)
        slower = partial(lambda step, over: 1 / (1 + step / over), over=4)  # as in transformers' schedules
        return {"optimizer": optimiser, "schedule": torch.optim.lr_scheduler.LambdaLR(optimiser, slower)}

    network, again = a_network(), a_network()
    layout = Layout.of(network.named_parameters())
    state, other = parts(network), parts(again)
    train(network, state["optimizer"], 1)
    state["schedule"].step()
    TorchLearner(again, other, layout).restore(TorchLearner(network, state, layout).state())
    assert other["schedule"].get_last_lr() == state["schedule"].get_last_lr() == [pytest.approx(0.08)]
    moments = [values["exp_avg"] for values in other["optimizer"].state.values()]
    assert len(moments) == 6
    assert all(
        torch.equal(a, b["exp_avg"]) for a, b in zip(moments, state["optimizer"].state.values(), strict=True)
    )


def test_fresh_forgets_the_momentum_and_keeps_the_settings() -> None:
    network = a_network()
    optimiser = LocalMomentum(network.parameters(), lr=0.1)
    learner = TorchLearner(network, {"optimizer": optimiser}, Layout.of(network.named_parameters()))
    train(network, optimiser, 1)
    assert optimiser.state
    learner.load(2, flatten(network).numpy(), fresh=True)
    assert not optimiser.state
    assert optimiser.param_groups[0]["lr"] == 0.1


def test_model_that_is_not_the_networks_is_refused_by_name() -> None:
    network = a_network()
    shapes = {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}
    with pytest.raises(ValueError, match=r"0.weight \(4, 3\), 0.bias .*0.weight \(4, 2\), 0.bias"):
        TorchLearner(network, {}, Layout.of(shapes | {"0.weight": np.zeros((4, 2), np.float32)}))
    with pytest.raises(ValueError, match=r"extra \(1,\), 0.weight"):
        TorchLearner(network, {}, Layout.of(shapes | {"extra": np.zeros(1, np.float32)}))
    shapes.pop("2.bias")
    with pytest.raises(ValueError, match=r"2.bias \(1,\), 0.weight"):
        TorchLearner(network, {}, Layout.of(shapes))


def test_frozen_parameters_do_not_travel() -> None:
    network = a_network()
    network[0].requires_grad_(False)  # type: ignore[index]
    learner = TorchLearner(
        network, {}, Layout.of((n, p) for n, p in network.named_parameters() if p.requires_grad)
    )
    out = np.zeros(4 + 4 + 4 + 1, np.float32)
    learner.half(out, np.empty_like(out))
    assert np.array_equal(out, np.concatenate([p.detach().ravel() for p in list(network.parameters())[2:]]))
    with pytest.raises(ValueError, match=r"0\.weight is frozen .* this network exchanges it"):
        TorchLearner(network, {}, Layout.of(network.named_parameters()))


def test_tasks_frozen_parameters_do_not_travel_but_lie_in_its_model_file() -> None:
    network = a_network()
    network[0].requires_grad_(False)  # type: ignore[index]
    x, y = torch.randn(20, 3), torch.rand(20, 1)
    task = Task(network, (x, y), (x, y), torch.nn.functional.mse_loss)
    learner = TaskLearner(task.of_member(0, batch_size=4, seed=0), 0, training({"weight_decay": 0.1}))
    assert list(task.layout) == ["1.weight", "1.bias", "2.weight", "2.bias"]
    start = flatten(network).numpy()
    out = half_step(learner, 1, start)
    assert not np.array_equal(out, start)
    file = {**split(Layout.of(models.trained(network).items()), out), **learner.buffers()}
    a_network().load_state_dict({name: torch.tensor(value) for name, value in file.items()}, strict=True)
    assert np.array_equal(file["0.weight"], network[0].weight.detach())  # type: ignore[index]


def test_state_that_cannot_be_saved_is_refused() -> None:
    network = a_network()
    with pytest.raises(ValueError, match=r"state\['epoch'\].* int"):
        TorchLearner(network, {"epoch": 3}, Layout.of(network.named_parameters()))


def test_state_of_other_objects_is_not_restored() -> None:
    network = a_network()
    layout = Layout.of(network.named_parameters())
    kept = bytes(TorchLearner(network, {}, layout).state())
    with pytest.raises(ValueError, match=r"\[\].*\['optimizer'\]"):
        TorchLearner(network, {"optimizer": LocalMomentum(network.parameters(), lr=0.1)}, layout).restore(
            kept
        )


# --- tasks --------------------------------------------------------------------------------------------------


def test_task_learner_takes_the_steps_of_algorithm_1() -> None:
    task = built_in("mnist-sample", SAMPLE, nodes=3, run="r")
    learner = TaskLearner(task, 1, SAMPLE, local_steps=2)
    x = task.initial()
    local = MomentumSGD(task, lambda t: 0.5, beta=0.9, decay=1e-4, steps=2)
    (at, state), node = local.init(), np.array([1])
    for t in (1, 2):
        x = half_step(learner, t, x)
        at, state = local(at, state, node, t)
        assert np.array_equal(x, at[0])


def test_statistics_of_batch_normalisation_stay_from_round_to_round() -> None:
    hyper = Training(model="C(2)-B-R-M-L(10)-S", batch_size=5)
    task = built_in("mnist-sample", hyper, nodes=3, run="r")
    learner = TaskLearner(task, 1, hyper)
    x, scratch = task.initial(), np.empty(task.d, np.float32)
    local = MomentumSGD(task, lambda t: 0.5, beta=0.9, decay=1e-4, steps=1)
    (at, state), node = local.init(), np.array([1])
    for t in (1, 2):
        learner.load(t, x, fresh=False)
        learner.half(x, scratch)
        at, state = local(at, state, node, t)
    mean = learner.buffers()["1.running_mean"]
    assert np.array_equal(
        np.concatenate([value.ravel() for value in learner.buffers().values()]), state["buffers"][0]
    )
    assert np.abs(mean).max() > 0
    again = TaskLearner(task, 1, hyper)
    again.restore(bytes(learner.state()))
    assert np.array_equal(again.buffers()["1.running_mean"], mean)


ADAMW = training({"model": "linear", "optimizer": "adamw", "lr": "cosine(0.01, warmup=2)"}, rounds=9)


@pytest.mark.parametrize("hyper", [SAMPLE, ADAMW], ids=["momentum", "adamw"])
def test_restored_task_continues_bit_by_bit_even_in_place(hyper: Training) -> None:
    task = built_in("mnist-sample", hyper, nodes=3, run="r")
    learner = TaskLearner(task, 2, hyper)
    row = task.initial()
    learner.load(1, row, fresh=False)
    learner.half(row, np.empty_like(row))
    kept, x = bytes(learner.state()), row.copy()
    learner.load(2, row, fresh=False)
    learner.half(row, np.empty_like(row))

    again = TaskLearner(task, 2, hyper)
    again.restore(kept)
    assert np.array_equal(half_step(again, 2, x), row)


@pytest.mark.parametrize("hyper", [SAMPLE, ADAMW], ids=["momentum", "adamw"])
def test_fresh_zeroes_a_tasks_momentum_or_moments(hyper: Training) -> None:
    task = built_in("mnist-sample", hyper, nodes=3, run="r")
    used, new = TaskLearner(task, 0, hyper), TaskLearner(task, 0, hyper)
    x = task.initial()
    half_step(used, 1, x)
    assert np.array_equal(half_step(used, 2, x, fresh=True), half_step(new, 2, x))


def test_moments_of_another_optimiser_are_not_restored() -> None:
    task = built_in("mnist-sample", ADAMW, nodes=3, run="r")
    kept = bytes(TaskLearner(task, 0, ADAMW).state())
    adam = training({"model": "linear", "optimizer": "adam"}, rounds=9)
    with pytest.raises(ValueError, match=r"62840 bytes.*another optimiser.*1\.bias"):
        TaskLearner(task, 0, adam).restore(kept)


def test_state_of_another_size_is_refused() -> None:
    task = built_in("mnist-sample", SAMPLE, nodes=3, run="r")
    with pytest.raises(ValueError, match="parameters"):
        TaskLearner(task, 0, SAMPLE).restore(b"short")


def a_task(module: nn.Module) -> Classification:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int64)
    data = Dataset("points", x[:40], y[:40], x[40:], y[40:], classes=2, mean=(0.0,), std=(1.0,))
    return Classification(data, [np.arange(40)], module, batch_size=10, seed=0)


def test_values_are_matched_by_name_when_the_network_has_another_order() -> None:
    torch.manual_seed(0)
    task = a_task(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    ours = Layout(tuple(task.layout), tuple(task.layout.values()), np.dtype("float32"))
    theirs = Layout.of(sorted(split(ours, task.initial()).items()))  # biases before weights
    assert theirs.names != ours.names
    halves = []
    for layout in (ours, theirs):
        learner = TaskLearner(task, 0, SAMPLE, local_steps=3, layout=layout)
        x, scratch = wire.flatten(layout, split(ours, task.initial())), np.empty(ours.d, np.float32)
        learner.prepare(x, scratch)
        for t in (1, 2):
            learner.load(t, x, fresh=False)
            learner.half(x, scratch)
        halves.append(split(layout, x))
        assert (
            learner.measure(x, 2, last=True).accuracy
            == task.evaluate(flatten_as(ours, halves[-1]), task.local_state(1))[0]
        )
    assert all(np.array_equal(halves[0][name], halves[1][name]) for name in ours.names)


def flatten_as(layout: Layout, named: dict[str, Models]) -> Models:
    return wire.flatten(layout, named)[None]


def test_momentum_of_another_parameter_order_is_not_restored() -> None:
    class Swapped(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            for name in (first, second):
                self.register_parameter(name, nn.Parameter(torch.zeros(3, 2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.get_parameter("a") + self.get_parameter("b"))

    kept = bytes(TaskLearner(a_task(Swapped("a", "b")), 0, SAMPLE).state())
    with pytest.raises(ValueError, match="parameters"):
        TaskLearner(a_task(Swapped("b", "a")), 0, SAMPLE).restore(kept)


def test_optimiser_state_of_another_parameter_order_is_not_restored() -> None:
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    layout = Layout.of(network.named_parameters())
    parameters = list(network.parameters())
    kept = bytes(TorchLearner(network, {"optimizer": LocalMomentum(parameters, lr=0.1)}, layout).state())
    again = LocalMomentum(list(reversed(parameters)), lr=0.1)
    with pytest.raises(ValueError, match=r"\['0.weight', '1.weight'\]"):
        TorchLearner(network, {"optimizer": again}, layout).restore(kept)


def test_accuracy_is_measured_every_few_rounds_and_on_everything_at_the_end() -> None:
    layout = Layout.of(model("linear").named_parameters())
    table = {"model": "linear", "batch_size": 5, "eval_every": 2, "eval_size": 100}
    learner = task_learner(
        "mnist-sample", index=0, nodes=3, run="r", hyperparameters=table, local_steps=1, layout=layout
    )
    x = built_in("mnist-sample", SAMPLE, nodes=3, run="r").initial()
    assert learner.measure(x, 1, last=False) == Measured()
    few, all_ = learner.measure(x, 2, last=False).accuracy, learner.measure(x, 3, last=True).accuracy
    assert few is not None
    assert all_ is not None
    assert few * 100 == pytest.approx(round(few * 100))
    assert all_ * 1000 == pytest.approx(round(all_ * 1000))


def test_all_members_agree_on_the_partition_and_share_nothing() -> None:
    parts = built_in("mnist-sample", SAMPLE, nodes=12, run="r").examples.held
    again = built_in("mnist-sample", SAMPLE, nodes=12, run="r").examples.held
    assert all(np.array_equal(parts[i], again[i]) for i in range(12))
    assert len(np.unique(np.concatenate(list(parts.values())))) == sum(map(len, parts.values())) == 5000
    assert seed_of("r") != seed_of("s")


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'mnist_sample'.*'mnist-sample'"):
        built_in("mnist_sample", SAMPLE, nodes=3, run="r")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"lr": 0}, "peak 0 is impossible"),
        ({"lr": [[10, -1.0]]}, "lr"),
        ({"momentum": 1.0}, "momentum 1 is impossible"),
        ({"partition": "writer"}, "partition 'writer'"),
        ({"batch_size": "many"}, "batch_size 'many'"),
        ({"eval_every": 0}, "eval_every 0"),
    ],
)
def test_wrong_hyperparameter_is_refused(table: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        training(table)


OWN = """
import numpy as np
from rpel.tasks import Objective

class QuadraticLearner(Objective):
    d, layout = 3, {"w": (3,)}
    def __init__(self, index, hyperparameters):
        self.index, self.pull = index, hyperparameters["pull"]
    def local_state(self, h):
        return np.zeros((h, 0), np.float32)
    def gradient(self, x, local, ids, t, k, out=None):
        return x - self.index * self.pull, local
    def evaluate(self, x, local, subset=None):
        return np.full(len(x), 0.25), np.zeros(len(x))

def make(index, hyperparameters):
    return QuadraticLearner(index, hyperparameters)

ready = QuadraticLearner(2, {"pull": 10.0})
number = 3
"""


@pytest.fixture
def bowls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's module in the current folder."""
    home = tmp_path / "here"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "bowls", raising=False)
    (home / "bowls.py").write_text(OWN)
    return home / "bowls.py"


def bowl(task: str, d: int = 3, lr: float = 0.5, folder: Path = Path()) -> TaskLearner:
    """The learner of member 2, for models of one vector w."""
    table = {"lr": lr, "momentum": 0.0, "weight_decay": 0, "pull": 10.0}
    layout = Layout(("w",), ((d,),), np.dtype("float64"))
    return task_learner(
        task, index=2, nodes=4, run="r", hyperparameters=table, local_steps=1, layout=layout, folder=folder
    )


@pytest.mark.parametrize("attribute", ["QuadraticLearner", "make", "ready"])
@pytest.mark.usefixtures("bowls")
def test_users_task_is_an_object_a_class_or_a_function(attribute: str) -> None:
    learner = bowl(f"bowls:{attribute}")
    out = half_step(learner, 1, np.zeros(3))
    assert out.tolist() == [10.0, 10.0, 10.0]
    assert learner.measure(out, 1, last=True).accuracy == 0.25


def test_incomplete_user_task_names_what_it_lacks(bowls: Path) -> None:
    bowls.write_text(OWN + "\ndef empty():\n    return 3\n")
    for name, words in {
        "bowls:nothing": "module bowls has no 'nothing'",
        "bowl:ready": "cannot be imported",
        "bowls:empty": "is a int: give an rpel.tasks.Task",
    }.items():
        with pytest.raises(ValueError, match=words):
            bowl(name)
    with pytest.raises(ValueError, match=r"w \(3,\).* w \(4,\)"):
        bowl("bowls:ready", d=4)


def test_task_is_looked_for_beside_peer_toml_before_the_current_folder(bowls: Path) -> None:
    beside = bowls.parents[1] / "beside"
    beside.mkdir()
    (beside / "bowls.py").write_text(OWN)
    bowls.write_text(OWN.replace('"pull": 10.0', '"pull": 1.0'))
    (beside / "peer.toml").write_text('id = "a"\ntask = "bowls:ready"\n')
    config = Config.load("../beside/peer.toml")
    learner = bowl(config.task, lr=1.0, folder=config.task_dir)
    assert half_step(learner, 1, np.zeros(3)).tolist() == [20.0, 20.0, 20.0]
    with pytest.raises(ValueError, match=r"beside/bowls\.py"):
        bowl(config.task, folder=bowls.parent)


def test_buffers_are_those_of_a_state_dict_whatever_kind_of_number_they_are() -> None:
    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("scale", torch.tensor([1.5], dtype=torch.float8_e5m2))
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    network = Model()
    found = TorchLearner(network, {}, Layout.of(network.named_parameters())).buffers()
    assert {name: value.tolist() for name, value in found.items()} == {"scale": [1.5], "count": 3}
    state = {**network.state_dict(), **{name: torch.from_numpy(value) for name, value in found.items()}}
    Model().load_state_dict(state, strict=True)
