"""A model, data and a loss from Python are trained as they are, or refused in one sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rpel
from rpel import simulate
from support.own import OWN, blobs, fixed_net
from support.runs import CrashError, crash_after


def test_simulate_takes_any_module_data_and_loss(tmp_path: Path) -> None:
    def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - nn.functional.one_hot(target, 3)) ** 2).mean()

    train = torch.utils.data.TensorDataset(*(torch.from_numpy(a) for a in blobs(0)))
    a = simulate(fixed_net(), train, blobs(1), **OWN, out=tmp_path)
    b = simulate(
        fixed_net(), [(x, int(y)) for x, y in zip(*blobs(0), strict=True)], blobs(1), **OWN, out=tmp_path
    )
    assert a.path is not None
    assert b.path is not None
    assert a.certificate["data"] == b.certificate["data"], "equal data, however they came"
    assert np.array_equal(a.models, b.models)
    assert a.accuracy_mean > 0.7
    others = [
        simulate(fixed_net(1), blobs(0), blobs(1), **OWN, out=tmp_path),
        simulate(fixed_net(), blobs(2), blobs(1), **OWN, out=tmp_path),
        simulate(fixed_net(), blobs(0), blobs(1), squared, **OWN, out=tmp_path),
    ]
    assert len({result.path for result in (a, *others)}) == 4


class Line(nn.Module):
    """One number from five, with a BatchNorm whose statistics stay with the node."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.norm(x))
        return result


def numbers(seed: int, count: int = 240) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 5)).astype(np.float32)
    return x, (x @ np.arange(5.0))[:, None].astype(np.float64)


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


REGRESSION: dict[str, Any] = {**OWN, "partition": "iid", "lr": 0.1, "rounds": 40, "eval_every": 10}


def test_float_targets_are_learned_with_user_loss_and_metric(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = simulate(Line(), numbers(0), numbers(1), squared_error, **REGRESSION, out=tmp_path)
    losses = plain.history["loss"].dropna().to_numpy()
    assert losses[-1] < 0.2 * plain.nodes["metric.loss"][0, 0], "the loss of the initial model"
    assert (plain.measure, plain.more_is_better) == ("loss", False)
    assert plain.final["metric.loss_mean"] == pytest.approx(losses[-1])
    assert plain.final["metric.loss_worst"] == pytest.approx(plain.nodes["metric.loss"][-1].max())
    assert plain.final["accuracy_mean"] is None, "a regression has no accuracy"
    assert repr(plain).startswith("<Run of run: loss ")

    def close(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target).abs() < 1.0).float().mean()

    torch.manual_seed(0)
    ours = simulate(Line(), numbers(0), numbers(1), squared_error, metric=close, **REGRESSION, out=tmp_path)
    assert ours.path != plain.path, "the metric is in the hash"
    assert ours.measure == "close"
    assert ours.final["metric.close_mean"] > ours.nodes["metric.close"][0, 0] + 0.1
    assert ours.certificate["metrics"] == {"close": True}
    assert np.array_equal(ours.models, plain.models)


def test_result_gives_node_models_with_buffers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Line()
    result = simulate(net, numbers(0), numbers(1), squared_error, **REGRESSION, out=tmp_path)
    x, y = (torch.from_numpy(a).float() for a in numbers(1))
    for node in range(7):
        model = result.model(node)
        assert not model.training
        assert squared_error(model(x), y).item() == pytest.approx(
            result.nodes["metric.loss"][-1, node], rel=1e-4
        )
    state = result.state_dict(3)
    assert state.keys() == net.state_dict().keys()
    assert not torch.equal(state["norm.running_mean"], net.state_dict()["norm.running_mean"])
    assert result.path is not None
    loaded = rpel.load(result.path, model=Line())
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict(3).items())
    with pytest.raises(ValueError, match=r"rpel\.load"):
        rpel.load(result.path).model(0)
    with pytest.raises(ValueError, match=r"7.* 0 to 6"):
        result.model(7)


def test_uniform_output_keeps_local_state_and_reports_both_accuracies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    fields = OWN | {"output": "uniform", "checkpoint_every": 3, "lr": 0.02, "rounds": 40, "eval_every": 10}
    result = simulate(net, blobs(0), blobs(1), **fields, out=tmp_path)
    x, y = (torch.from_numpy(a) for a in blobs(1))
    stored = [(result.model(node)(x).argmax(1) == y).double().mean().item() for node in range(7)]
    assert result.final["output_accuracy_mean"] == pytest.approx(np.mean(stored), rel=1e-4)
    assert result.final["output_accuracy_worst"] == pytest.approx(min(stored), rel=1e-4)
    assert result.final["accuracy_mean"] == pytest.approx(result.nodes["accuracy"][-1].mean())
    assert result.final["accuracy_mean"] != pytest.approx(np.mean(stored), rel=1e-4)
    assert all(row["output_accuracy_mean"] is None for row in result.rows[:-1])
    crashed = tmp_path / "crashed"
    with pytest.raises(CrashError):
        simulate(net, blobs(0), blobs(1), **fields, out=crashed, progress=crash_after(5))
    again = simulate(net, blobs(0), blobs(1), **fields, out=crashed)
    assert again.final["output_accuracy_worst"] == result.final["output_accuracy_worst"]
    assert result.state_dict(3).keys() == again.state_dict(3).keys()
    assert all(torch.equal(value, again.state_dict(3)[key]) for key, value in result.state_dict(3).items())


def test_every_honest_node_may_bring_separate_data(tmp_path: Path) -> None:
    x, y = blobs(0, 210)
    parts = [(x[i::7], y[i::7]) for i in range(7)]
    dataset_of = [torch.utils.data.TensorDataset(torch.from_numpy(a), torch.from_numpy(b)) for a, b in parts]
    loaders = [torch.utils.data.DataLoader(one, batch_size=3) for one in dataset_of]
    results = [
        simulate(fixed_net(), train, blobs(1), **OWN, out=tmp_path) for train in (parts, dataset_of, loaders)
    ]
    assert all(np.array_equal(result.models, results[0].models) for result in results)
    assert results[0].accuracy_mean > 0.7
    assert results[0].spec.partition == "own"
    other = simulate(fixed_net(), [parts[6], *parts[:6]], blobs(1), **OWN, out=tmp_path)
    assert other.path != results[0].path
    # one class each: nobody learns all three alone
    alone = [(x[y == i % 3], y[y == i % 3]) for i in range(7)]
    apart = simulate(fixed_net(), alone, blobs(1), **{**OWN, "rounds": 1, "lr": 0.01}, out=None)
    gradients = apart.models - np.concatenate([p.detach().numpy().ravel() for p in fixed_net().parameters()])
    assert np.abs(gradients).max() > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train": [blobs(0)] * 3}, "3 data sets, but there are 7 honest nodes"),
        ({"train": iter([1, 2])}, "train is a .* cannot be read"),
        ({"train": numbers(0), "test": numbers(1)}, "float targets need a model= and a loss="),
        (
            {"train": numbers(0), "test": numbers(1), "loss": squared_error},
            "partition 'dirichlet'.*partition='iid'",
        ),
        (
            {
                "train": numbers(0),
                "test": numbers(1),
                "loss": squared_error,
                "partition": "iid",
                "attack": "label_flip",
            },
            "works on classes",
        ),
        (
            {"train": numbers(0), "test": blobs(1), "loss": squared_error, "partition": "iid"},
            r"train targets have the shape \(1,\) and test targets \(\)",
        ),
    ],
)
def test_user_data_that_do_not_fit_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        simulate(fixed_net(), **{"test": blobs(1), **OWN, **arguments}, out=None)
    assert "\n" not in str(caught.value)


def _pixels(part: tuple[Any, Any], kind: type) -> tuple[Any, Any]:
    return np.clip(40 * np.asarray(part[0]) + 100, 0, 255).astype(kind), part[1]


def _broken(part: tuple[Any, Any], value: float) -> tuple[Any, Any]:
    x = np.array(part[0])
    x[[3, 7], 1] = value
    return x, part[1]


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (
            _pixels(blobs(0), np.uint8),
            blobs(1),
            r"train examples are uint8 from \d+ to \d+, the test .* float32 from",
        ),
        (blobs(0), _pixels(blobs(1), np.uint8), r"train examples are float32 .* test examples are uint8"),
        (
            [blobs(0)] * 6 + [_pixels(blobs(0), np.uint8)],
            blobs(1),
            r"train\[0\] .* float32 .* train\[6\] .* uint8",
        ),
        (_broken(blobs(0), np.nan), blobs(1), r"train examples have NaN or infinity in 2 of \d+ rows: 3, 7"),
        (blobs(0), _broken(blobs(1), np.inf), r"test examples have NaN or infinity in 2 of \d+ rows: 3, 7"),
        (blobs(0), (np.asarray(blobs(1)[0])[:, :1], blobs(1)[1]), "train examples have the shape"),
    ],
    ids=["pixels and numbers", "numbers and pixels", "a node with pixels", "nan", "infinity", "shape"],
)
def test_data_on_two_scales_or_with_broken_numbers_are_refused_with_ranges_and_rows(
    train: Any, test: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        simulate(fixed_net(), train, test, **OWN, out=None)
    assert "\n" not in str(caught.value)


def test_half_a_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train.*test"):
        simulate(train=blobs(0), out=None)


def test_frame_with_a_target_column_trains_as_its_arrays() -> None:
    pandas = pytest.importorskip("pandas")

    def frame(seed: int) -> Any:
        x, y = blobs(seed)
        return pandas.DataFrame(x, columns=list("abcde")).assign(kind=y)

    more: dict[str, Any] = {"target": "kind"}
    ours = simulate(fixed_net(), frame(0), frame(1), **more, **OWN, out=None)
    assert np.array_equal(ours.models, simulate(fixed_net(), blobs(0), blobs(1), **OWN, out=None).models)
