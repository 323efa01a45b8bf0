"""Any network that PyTorch can train, on data as they are, and one sentence for what does not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rpel import load, resume, simulate
from rpel.tasks import Dataset as Own
from rpel.tasks import Metric, Task
from support.commands import rpel
from support.text_model import Meaning, made, texts

FEW: dict[str, Any] = {
    "nodes": 5, "byzantine": 1, "rounds": 12, "eval_every": 4, "batch_size": 8, "lr": 0.3, "partition": "iid",
    "out": None, "attack": "sf", "pull": 4, "b_hat": 1,
}  # fmt: skip


class Recurrent(nn.Module):
    """The class of a sequence of numbers, by its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.lstm(x)[0][:, -1])
        return result


def test_lstm_learns_sequences() -> None:
    x = np.random.default_rng(0).normal(size=(200, 6, 1)).astype(np.float32)
    y = (x.sum(axis=(1, 2)) > 0).astype(np.int64)
    result = simulate(made(Recurrent), (x, y), (x[:50], y[:50]), **{**FEW, "rounds": 40, "lr": 1.0})
    assert result.accuracy_mean > 0.8


class Transformer(nn.Module):
    """The next of each of some tokens: scores (N, tokens, length), as cross-entropy wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(5, 16), nn.Embedding(6, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.layer(self.tokens(text) + self.places.weight, src_mask=mask, is_causal=True)
        result: Tensor = self.out(x).mT
        return result


def test_transformer_learns_the_next_token_of_a_text() -> None:
    text = np.cumsum(np.ones((120, 7), np.int64), axis=1) + np.arange(120)[:, None]
    x, y = text[:, :-1] % 5, text[:, 1:] % 5  # whole numbers, targets of two dimensions
    result = simulate(made(Transformer), (x, y), (x[:20], y[:20]), **{**FEW, "lr": 0.2})
    assert result.accuracy_mean > 0.9
    assert result.measure == "accuracy"


def test_embedding_model_learns_from_ids_and_masks_in_a_dict() -> None:
    x, y = texts()
    result = simulate(made(Meaning), (x, y), (x, y), **{**FEW, "lr": 1.0})
    assert result.accuracy_mean > 0.9


class Unet(nn.Module):
    """Scores (N, 2, H, W) of a class for each pixel: down, up, and the image joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.out = nn.Conv2d(5, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        small = F.max_pool2d(F.relu(self.down(x)), 2)
        result: Tensor = self.out(torch.cat([x, self.up(small)], dim=1))
        return result


def test_unet_learns_a_class_for_each_pixel() -> None:
    x = np.random.default_rng(0).normal(size=(80, 1, 8, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    metric = {"foreground": lambda output, target: (output.argmax(1) == target)[target == 1].float().mean()}
    result = simulate(made(Unet), (x, y), (x[:20], y[:20]), metric=metric, **FEW)
    assert result.accuracy_mean > 0.9
    assert result.final["metric.foreground_mean"] > 0.8


def test_accuracy_of_masks_is_the_share_of_all_pixels_that_are_right() -> None:
    x = np.random.default_rng(0).normal(size=(40, 1, 8, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    result = simulate(made(Unet), (x, y), (x, y), **{**FEW, "rounds": 1})
    with torch.no_grad():
        shares = [
            (result.model(i)(torch.from_numpy(x)).argmax(1) == torch.from_numpy(y)).double().mean().item()
            for i in range(len(result.models))
        ]
    assert result.nodes["accuracy"][-1] == pytest.approx(shares)


def test_regression_reports_metrics_and_no_accuracy() -> None:
    x = np.random.default_rng(0).normal(size=(200, 3))
    y = x @ [1.0, -2.0, 0.5]
    named = {
        "mae": Metric(F.l1_loss, higher_is_better=False),
        "close": lambda a, b: ((a - b).abs() < 0.5).float().mean(),
    }
    net = nn.Sequential(made(nn.Linear, 3, 1), nn.Flatten(0))
    result = simulate(net, (x, y), (x[:50], y[:50]), F.mse_loss, metric=named, **{**FEW, "lr": 0.1})
    assert result.final["metric.mae_mean"] < 0.5 < result.nodes["metric.mae"][0, 0]
    assert result.final["metric.mae_worst"] == result.nodes["metric.mae"][-1].max()
    assert result.final["metric.close_worst"] == result.nodes["metric.close"][-1].min()
    assert (result.measure, result.more_is_better) == ("mae", False)
    assert result.final["accuracy_mean"] is None
    (axes,) = result.plot().axes
    assert axes.get_ylabel() == "mae on test data (less is better)"


def test_reports_name_a_metric_and_its_direction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(size=(100, 3))
    given: dict[str, Any] = {
        **FEW,
        "rounds": 4,
        "eval_every": 2,
        "loss": F.mse_loss,
        "out": tmp_path / "runs",
    }
    mae = {"mae": Metric(F.l1_loss, higher_is_better=False)}
    for attack in ("sf", "foe"):
        simulate(
            made(nn.Linear, 3, 1), (x, x[:, :1]), (x, x[:, :1]), metric=mae, **{**given, "attack": attack}
        )
    page = tmp_path / "page.html"
    rpel(
        "report",
        str(tmp_path / "runs"),
        "-o",
        str(page),
        "--latex",
        str(tmp_path / "table.tex"),
        capsys=capsys,
    )
    assert "mae on test data (less is better)" in page.read_text("utf-8")
    assert "the node that ends highest" in page.read_text("utf-8")
    assert "measure & mean & worst node" in (tmp_path / "table.tex").read_text("utf-8")
    content = json.loads(rpel("runs", str(tmp_path / "runs"), "--json", capsys=capsys)[0])
    assert all(row["state"] == "finished" and row["measure"] == "mae" for row in content)
    assert all(
        "accuracy_mean" not in row and row["metric.mae_worst"] >= row["metric.mae_mean"] for row in content
    )
    folders = [str(path) for path in (tmp_path / "runs").iterdir()]
    assert "mean mae by round: 0: " in rpel("compare", *folders, capsys=capsys)[0]


class Lines(Dataset[tuple[Tensor, int]]):
    """Texts of unequal length, and what they begin with."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((3 + i % 4,), 1 + i % 2), i % 2


def padded(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in examples], batch_first=True)
    return ids, torch.tensor([y for _, y in examples])


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(3, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.words(ids).sum(1))
        return result


def test_examples_of_unequal_length_are_padded_by_a_collate_or_by_their_loader() -> None:
    pairs = ([Lines()[i][0] for i in range(60)], [i % 2 for i in range(60)])
    given: list[dict[str, Any]] = [
        {"train": Lines(), "test": Lines(), "collate": padded},
        {"train": pairs, "test": pairs, "collate": padded},
        {"train": DataLoader(Lines(), collate_fn=padded), "test": Lines()},
    ]
    results = [simulate(made(Padded), **{**FEW, **one, "partition": "dirichlet"}) for one in given]
    assert results[0].accuracy_mean > 0.9
    assert all(np.array_equal(results[0].models, other.models) for other in results[1:])


def test_data_sets_of_nodes_may_have_any_sizes_and_several_inputs() -> None:
    x, y = texts()
    parts = [
        ({key: value[a:b] for key, value in x.items()}, y[a:b])
        for a, b in ((0, 3), (3, 40), (40, 42), (42, 160))
    ]
    result = simulate(
        made(Meaning), parts, (x, y), **{key: value for key, value in FEW.items() if key != "partition"}
    )
    assert result.spec.partition == "own"
    assert result.accuracy_mean > 0.7


class Pairs(nn.Module):
    """Two inputs, and a dict as output, as libraries of language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(3, 3, 2)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(a, b)}


def test_tuple_inputs_are_passed_as_arguments_and_outputs_to_the_loss() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 120, 3))
    y = (a[:, 0] * b[:, 0] > 0).astype(np.int64)

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target)

    def right(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return (output["logits"].argmax(1) == target).float().mean()

    result = simulate(made(Pairs), ((a, b), y), ((a, b), y), loss, metric=right, **{**FEW, "rounds": 25})
    assert result.measure == "right"
    assert result.final["metric.right_worst"] > 0.85


X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 3


def with_value(value: float) -> NDArray[np.float32]:
    x = X.copy()
    x[[5, 7], 1] = value
    return x


@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate], ids=["at once", "one by one"])
def test_frozen_parameters_are_neither_trained_nor_exchanged_nor_lost(collate: Any) -> None:
    whole = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    module = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 3))
    data: Any = list(zip(X, Y, strict=True)) if collate else (X, Y)
    given = {**FEW, "weight_decay": 0.1, "collate": collate}
    frozen, trained = (simulate(one, data, data, **given) for one in (module, whole))
    assert frozen.models.shape == (4, 8 * 3 + 3)
    assert frozen.total("messages") * 4 * 27 <= frozen.total("bytes") < trained.total("bytes")
    model = frozen.model(0)
    kept, before = frozen.state_dict(0), module.state_dict()
    assert [torch.equal(kept[name], before[name]) for name in before] == [True, True, False, False]
    outputs, scores = model(torch.from_numpy(X)).argmax(dim=1).numpy(), frozen.nodes["accuracy"][-1]
    assert scores[0] == pytest.approx(np.mean(outputs == Y))
    nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).load_state_dict(kept)


def test_run_with_a_frozen_layer_has_a_folder_of_its_own(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    given = {**FEW, "out": tmp_path, "rounds": 2}
    whole = simulate(module, (X, Y), (X, Y), **given)
    module[0].requires_grad_(False)
    frozen = simulate(module, (X, Y), (X, Y), **given)
    assert whole.path != frozen.path
    assert load(frozen.path, model=module).model(1)[0].weight.equal(module[0].weight)  # type: ignore[index]


class Small(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


@pytest.mark.parametrize("make", [Small, lambda: Small()], ids=["class", "function"])
def test_each_seed_has_its_own_initial_model_of_a_factory(make: Any, tmp_path: Path) -> None:
    given = {**FEW, "rounds": 1, "lr": 1e-30}  # so that the models are the initial ones
    before = torch.get_rng_state()
    first, second = simulate(make, (X, Y), (X, Y), **given, seeds=[0, 1])
    assert torch.equal(before, torch.get_rng_state())
    assert not np.array_equal(first.models[0], second.models[0])
    torch.rand(3)
    again = simulate(make, (X, Y), (X, Y), **{**given, "out": tmp_path}, seed=1)
    np.testing.assert_array_equal(again.models, second.models)
    weights = [run.state_dict(0)["weight"] for run in (again, load(again.path, model=make))]
    assert torch.equal(*weights)
    assert resume(again.path, make, (X, Y), (X, Y)).reused
    by_task = simulate(task=Task(make, (X, Y), (X, Y)), **given, seed=1)
    np.testing.assert_array_equal(by_task.models, second.models)


def test_seeds_that_share_a_passed_model_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    given = {**FEW, "rounds": 1, "seeds": [0, 1]}
    simulate(Small, (X, Y), (X, Y), **given)
    assert "initial model" not in caplog.text
    simulate(Small(), (X, Y), (X, Y), **given)
    assert caplog.text.count("all 2 seeds start from the same initial model") == 1


def of_regression(model: nn.Module, y: NDArray[Any], loss: Any, metric: Any = None) -> Task:
    return Task(model, (X, y), (X, y), loss, metric=metric)


BROADCASTING: dict[str, Any] = {
    "mse": nn.MSELoss(), "l1": F.l1_loss, "huber": nn.HuberLoss(), "poisson": nn.PoissonNLLLoss(),
    "mse by hand": lambda output, y: ((output - y) ** 2).mean(),
    "in place": lambda output, y: output.mul_(2).sub(y).square().mean(),
    "with target first": lambda output, y: torch.maximum(0.9 * (y - output), 0.1 * (output - y)).mean(),
}  # fmt: skip


@pytest.mark.parametrize("loss", BROADCASTING)
def test_loss_of_all_pairs_by_broadcasting_is_refused(loss: str) -> None:
    column, flat = made(nn.Linear, 4, 1), nn.Sequential(made(nn.Linear, 4, 1), nn.Flatten(0))
    y, function = X[:, 0], BROADCASTING[loss]
    words = r"outputs of the shape \(N, 1\) against targets of the shape \(N,\).*y\.reshape\(-1, 1\)"
    with pytest.raises(ValueError, match=words):
        of_regression(column, y, function)
    with pytest.raises(
        ValueError, match=r"shape \(N,\) against targets of the shape \(N, 1\).*y\.flatten\(\)"
    ):
        of_regression(flat, y[:, None], function)
    with pytest.raises(ValueError, match="metric 'mine' broadcasts outputs"):
        of_regression(column, y[:, None], nn.MSELoss(), {"mine": lambda a, b: function(a, b[:, 0])})
    for model, targets in ((column, y[:, None]), (flat, y)):
        assert of_regression(model, targets, function).d == 5


def test_loss_that_torch_warns_of_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(N, 1\) against targets of the shape \(N, 3\)"):
        of_regression(made(nn.Linear, 4, 1), X[:, :3], nn.MSELoss())


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    likeness = F.normalize(output) @ F.normalize(output).T
    return F.binary_cross_entropy_with_logits(likeness, (y[:, None] == y).float())


def cox(output: Tensor, times: Tensor) -> Tensor:
    at_risk = times >= times[:, None]
    return (torch.log((torch.exp(output[:, 0]) * at_risk).sum(dim=1)) - output[:, 0]).mean()


def ranking(output: Tensor, y: Tensor) -> Tensor:
    return F.softplus(-(output - output[:, 0]) * torch.sign(y[:, None] - y)).mean()


def ordinal(output: Tensor, y: Tensor) -> Tensor:
    cuts = torch.tensor([-1.0, 1.0])  # as many as examples in a trial batch
    return F.binary_cross_entropy_with_logits(output - cuts, (y[:, None] > cuts).float())


def weighted(output: Tensor, y: Tensor) -> Tensor:
    return (torch.where(y > 0, 2.0, 1.0) * (output.squeeze(1) - y) ** 2).mean()


@pytest.mark.parametrize("loss", [contrastive, cox, ranking, ordinal, weighted])
def test_losses_that_compare_examples_on_purpose_are_taken(loss: Any) -> None:
    assert of_regression(made(nn.Linear, 4, 1), X[:, 0], loss).d == 5


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int32])
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_labels_of_any_whole_kind_train_as_int64_does(kind: Any, partition: str) -> None:
    y = np.arange(60) % 2
    given = {**FEW, "partition": partition, "rounds": 4}
    runs = []
    for labels in (y, y.astype(kind)):
        data = Own("mine", X, labels, X, labels, 0 if kind is np.bool_ and labels is not y else 2)
        runs += [simulate(made(nn.Linear, 4, 2), data, **given)]
        runs += [simulate(made(nn.Linear, 4, 2), (X, labels), (X, labels), **given)]
        runs += [simulate(task=Task(made(nn.Linear, 4, 2), (X, labels), (X, labels)), **given)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run.models, runs[0].models)


def test_masks_of_bools_and_bytes_are_classes_of_pixels() -> None:
    x = np.random.default_rng(0).normal(size=(40, 1, 4, 4)).astype(np.float32)
    runs = [
        simulate(made(nn.Conv2d, 1, 2, 1), (x, y), (x, y), **{**FEW, "rounds": 2})
        for y in ((x[:, 0] > 0).astype(kind) for kind in (np.int64, np.bool_, np.uint8))
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run.models, runs[0].models)


def test_losses_of_ones_own_get_the_targets_as_they_are() -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        assert y.dtype == torch.bool
        return torch.where(y, -output[:, 0], output[:, 0]).mean()

    assert of_regression(made(nn.Linear, 4, 1), X[:, 0] > 0, loss).d == 5


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Silent(nn.Module):
    """Without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x).detach()
        return result


RAGGED = [[1.0, 2.0], [3.0]] * 30
WHOLE = (np.ones((60, 4), np.int64), Y)
NARROW = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
NORMED = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
TWO = ((X, X), Y)
NUMBERS: dict[str, Any] = {
    "train": (X, X[:, :1]), "test": (X, X[:, :1]), "loss": F.mse_loss, "model": nn.Linear(4, 1),
}  # fmt: skip
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "model class with arguments": ({"model": nn.Linear}, r"Linear.*arguments.*'in_features'"),
    "model that is no network": ({"model": 3}, r"model is a int.*nn\.Linear"),
    "model function that makes none": ({"model": lambda: 3}, "makes a int"),
    "model name": ({"model": "mpl"}, r"'mpl'.*'mlp'"),
    "model without parameters": ({"model": nn.Flatten()}, "parameters"),
    "model frozen": ({"model": nn.Linear(4, 3).requires_grad_(False)}, "parameters"),
    "model of double precision": ({"model": nn.Linear(4, 3).double()}, r"float64.*model\.float\(\)"),
    "model without a gradient": ({"model": Silent()}, "gradient"),
    "wrong width": ({"model": nn.Linear(5, 3)}, r"\(4,\).*float32.*5x3"),
    "whole numbers to a network of floats": ({"train": WHOLE, "test": WHOLE}, r"int64.*float32"),
    "too few outputs": ({"model": nn.Linear(4, 2)}, r"2.* 2 outputs.* 3"),
    "too few outputs of an unknown network": ({"model": NARROW}, r"2.* 2 outputs"),
    "negative labels": ({"train": (X, Y - 1), "test": (X, Y - 1)}, "-1"),
    "labels as text": ({"train": (X, ["a", "b", "c"] * 20)}, r"train targets.*text"),
    "labels as floats": ({"train": (X, Y * 1.0), "test": (X, Y * 1.0)}, r"model=.*loss="),
    "labels in a column": ({"train": (X, Y[:, None]), "test": (X, Y[:, None])}, r"targets \(2, 1\) of int64"),
    "examples without labels": ({"train": X}, r"train.*ndarray"),
    "fewer labels": ({"train": (X, Y[:-1])}, r"60 examples.*59 targets"),
    "nothing": ({"train": (X[:0], Y[:0])}, "train examples"),
    "BatchNorm with one example": ({"model": NORMED, "batch_size": 1},
        r"batch_size 1 .*Expected more than 1 value per channel.*BatchNorm needs .* 2"),
    "no test data": ({"test": None}, r"train.*test"),
    "other test data": ({"test": (X[:, :3], Y)}, r"train.*\(4,\).*test.*\(3,\)"),
    "NaN": ({"train": (with_value(np.nan), Y)}, r"train.* 2 of 60 .*5, 7"),
    "infinity": ({"test": (with_value(np.inf), Y)}, r"test.* 2 of 60 .*5, 7"),
    "NaN in a Dataset": ({"train": Own("mine", with_value(np.nan), Y, X, Y, 3), "test": None},
        r"2 of 60 .*5, 7"),
    "a Dataset of lists": ({"train": Own("mine", X.tolist(), Y, X, Y, 3), "test": None}, r"list.*array"),
    "text": ({"train": ([["a"] * 4] * 60, Y)}, r"train examples.*text"),
    "ragged": ({"train": (RAGGED, Y)}, "collate="),
    "ragged tensors": ({"train": ([torch.ones(1 + i % 2) for i in range(60)], Y)}, "collate="),
    "endless": ({"train": Endless()}, r"train.*Endless"),
    "a path": ({"train": "data.csv"}, r"train.* str\b"),
    "wrong number of nodes": ({"train": [(X, Y)] * 3}, r"3 data sets.* 4 "),
    "an empty node": ({"train": [(X, Y)] * 3 + [(X[:0], Y[:0])]}, r"train\[3\]"),
    "loss that is no function": ({"loss": 3}, r"loss.* int\b.*loss\(output, target\)"),
    "loss that is a sum": ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "reduction='mean'"),
    "loss of each example": ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"loss.*\(2,\)"),
    "loss that does not fit": ({"loss": F.mse_loss}, r"loss.*\(2, 3\).*\(2,\)"),
    "loss that is not a number": ({"loss": lambda a, b: a.sum() * np.nan}, r"loss.*nan"),
    "metric that is no function": ({"metric": {"f1": 3}}, r"'f1'.* int\b"),
    "metric without a name": ({"metric": {}}, r"metric.*empty"),
    "metric with a wrong name": ({"metric": {"f 1": F.mse_loss}}, "'f 1'"),
    "metric of many numbers": ({"metric": {"each": lambda a, b: a}}, "'each'"),
    "collate that is no function": ({"collate": 3}, r"collate.* int\b"),
    "collate that makes no batch": ({"collate": lambda examples: 3}, "collate"),
    "partition by classes": ({**NUMBERS, "partition": "dirichlet"}, "partition='iid'"),
    "partition by writers": ({"partition": "writer"}, "'writer'"),
    "partition by owners": ({"partition": "owner"}, "'owner'"),
    "too large a batch": ({"batch_size": 100}, r"4 .*100 .*400"),
    "flipped labels of a regression": ({**NUMBERS, "attack": "label_flip"}, "classes"),
    "backdoor without images": ({"attack": "backdoor"}, r"backdoor.*images"),
    "network by name for two inputs": ({"model": "mlp", "train": TWO, "test": TWO}, "network"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_task_objects_are_refused_before_the_first_round(wrong: str) -> None:
    given, words = WRONG[wrong]
    defaults: dict[str, Any] = {"model": nn.Linear(4, 3), "train": (X, Y), "test": (X, Y)}
    with pytest.raises(ValueError, match=words) as caught:
        simulate(**{**FEW, **defaults, **given}, progress=lambda tick: pytest.fail("a round was played"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
