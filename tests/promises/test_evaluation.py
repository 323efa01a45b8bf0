"""What a run says of its models is what the models show to anybody who looks at them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rpel
from support.data_files import sample_of_tests
from support.plain import PARAMETERS, examples, gradient, network

SHOWN = 3
"""The gradient norm is that of the first, the middle and the last honest node."""


class Normalised(nn.Module):
    """A network whose BatchNorm statistics differ from node to node although all nodes see the same
    example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.first(x)
        out: Tensor = self.last(inside + self.norm(inside))
        return out


@pytest.fixture(scope="module")
def flipped() -> rpel.Run:
    """Six honest nodes with the same example, two hostile ones that train on its flipped label,
    one of them node 0."""
    x, y = examples(60)
    one = np.repeat(x[:1], 4, axis=0), np.full(4, 2)
    result = rpel.simulate(
        Normalised(), [one] * 6, (x, y), nodes=8, byzantine=2, pull=4, b_hat=1, rounds=4, attack="label_flip",
        rule="mean", batch_size=4, lr=0.5, momentum=0.5, eval_every=2, eval_size=30, seed=1, out=None,
    )  # fmt: skip
    assert result.tensors["ids"].tolist() == [1, 2, 3, 4, 6, 7]
    return result


def outputs(result: rpel.Run, inputs: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [result.model(i)(inputs) for i in range(len(result.models))]


def test_nodes_that_flip_labels_change_no_label_of_the_test_set(flipped: rpel.Run) -> None:
    x, y = (torch.from_numpy(part) for part in examples(60))
    shown = outputs(flipped, x)
    right = [float((one.argmax(dim=1) == y).double().mean()) for one in shown]
    assert len(set(right)) > 1
    np.testing.assert_allclose(flipped.nodes["accuracy"][-1], right)
    losses = [float(cross_entropy(one, y)) for one in shown]
    assert flipped.final["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    accuracies = [flipped.final[key] for key in ("accuracy_mean", "accuracy_worst", "accuracy_median")]
    assert accuracies == pytest.approx([np.mean(right), min(right), np.median(right)])


def test_each_honest_node_keeps_separate_batchnorm_statistics(flipped: rpel.Run) -> None:
    """The loss is right only if every node is evaluated, and exported, with its own and nobody else's."""
    statistics = np.array([flipped.state_dict(i)["norm.running_mean"].numpy() for i in range(6)])
    assert len(np.unique(statistics.round(6), axis=0)) == 6
    x, y = (torch.from_numpy(part) for part in examples(60))
    losses = [float(cross_entropy(one, y)) for one in outputs(flipped, x)]
    assert flipped.final["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_gradient_norm_uses_each_honest_nodes_statistics(flipped: rpel.Run) -> None:
    x, _ = examples(60)
    norms = []
    for i in np.linspace(0, 5, SHOWN).astype(int):
        model = flipped.model(int(i))
        lost = cross_entropy(model(torch.from_numpy(x[:1])), torch.tensor([2]))
        parts = torch.autograd.grad(lost, list(model.parameters()))
        norms.append(sum(float(part.square().sum()) for part in parts))
    assert flipped.final["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)


def test_gradient_norm_of_virtual_shares_leaves_out_what_hostile_nodes_hold() -> None:
    """With this seed the three honest nodes hold class 0 alone, and the two hostile ones the two others."""
    x, _ = examples(3)
    y = np.repeat([0, 1, 2], 5)
    result = rpel.simulate(
        network(), (np.repeat(x, 5, axis=0), y), (x, np.arange(3)), nodes=5, byzantine=2, pull=4, b_hat=2,
        rounds=2, attack="label_flip", partition="virtual(1e-3)", batch_size=3, eval_size=3, seed=22,
        out=None,
    )  # fmt: skip
    assert result.models.shape == (3, PARAMETERS)
    norms = [np.square(gradient(model.astype(np.float64), x[0], 0)).sum() for model in result.models]
    assert result.final["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)


def test_backdoors_success_is_counted_on_the_images_that_are_evaluated() -> None:
    """Fifty images between, all of them at the end; those of the target's own class do not count."""
    result = rpel.simulate(
        "linear", nodes=8, byzantine=2, pull=6, b_hat=2, rounds=4, 
        attack="backdoor(target=3)", rule="mean", eval_every=2, eval_size=50, lr=0.3, out=None,
    )  # fmt: skip
    between, last = result.rows[1], result.final
    for key, nodes in (("attack_success_mean", 6), ("attack_success_worst", 1)):
        images = between[key] * 45 * nodes
        assert images == pytest.approx(round(images), abs=1e-6), key
    assert 0 < between["attack_success_mean"] < between["attack_success_worst"]
    images, digits = sample_of_tests()
    images, labels = images[digits != 3].copy(), torch.tensor(3)
    images[..., -4:, -4:] = 255
    inputs = torch.from_numpy(((images / 255 - 0.1307) / 0.3081).astype(np.float32)).reshape(-1, 1, 28, 28)
    shares = [float((one.argmax(dim=1) == labels).double().mean()) for one in outputs(result, inputs)]
    assert last["attack_success_mean"] == pytest.approx(np.mean(shares), abs=1e-3)
    assert last["attack_success_worst"] == pytest.approx(max(shares), abs=1e-3)


def test_run_that_overflows_counts_the_nodes_and_writes_null(tmp_path: Path) -> None:
    """Two nodes hold an example of very large numbers: their models are infinite after one step."""
    x, y = examples(6)
    x[[1, 4]] = 3e38
    train = [(x[i : i + 1], y[i : i + 1]) for i in range(6)]
    result = rpel.simulate(
        network(), train, examples(6), nodes=6, byzantine=0, pull=5, b_hat=0, rounds=3, method="d-psgd",
        lr=100.0, batch_size=1, eval_every=1, eval_size=6, out=tmp_path,
    )  # fmt: skip
    assert (~np.isfinite(result.models).all(axis=1)).tolist() == [False, True, False, False, True, False]
    assert result.path is not None

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    text = (result.path / "metrics.jsonl").read_text("utf-8")
    rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [row["diverged"] for row in rows] == [2, 2, 2]
    for row in rows:
        assert (row["consensus"], row["loss"]) == (None, None)
        assert row["accuracy_worst"] is not None
