"""Networks: the notation means what the paper means, and a vector is exactly the parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rpel.models import NETWORKS, build, flatten, model, parameter_count, shapes, unflatten


@pytest.mark.parametrize(
    ("name", "count"), [("mnist", 176_050), ("cifar10", 1_310_922), ("femnist", 2_368_318), ("linear", 7_850)]
)
def test_networks_have_the_papers_parameter_counts(name: str, count: int) -> None:
    assert parameter_count(model(name)) == count


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_give_log_probabilities(name: str) -> None:
    network = model(name).eval()
    x = torch.zeros(2, *NETWORKS[name].input_shape)
    logp = network(x)
    assert logp.shape == (2, 62 if name == "femnist" else 10)
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(2))


def test_notation_is_followed_layer_by_layer() -> None:
    network = model("cifar10", dropout=0.4)
    kinds = "".join(type(layer).__name__[0] for layer in network.children())
    # Convolution, ReLU, BatchNorm, MaxPool, Dropout, Flatten, Linear, LogSoftmax
    assert kinds == "CRBCRBMDCRBCRBMDFLRDLL"
    drops = [layer.p for layer in network.children() if isinstance(layer, nn.Dropout)]
    assert drops == [0.4] * 3


def test_named_network_takes_other_classes_and_images() -> None:
    assert shapes(model("mnist", classes=62))["9.weight"] == (62, 500)
    assert shapes(model("mnist", (3, 32, 32)))["0.weight"] == (20, 3, 5, 5)
    assert shapes(model("L(5)-R-L(2)-S", (7,)))["0.weight"] == (5, 7)


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("C(20)-R-X-L(10)-S", "token 3, 'X', of .*: not a layer"),
        ("C(20)-r-L(10)", "token 2, 'r'"),
        ("C(20)--L(10)", "token 2, ''"),
        ("C-R-L(10)", r"token 1, 'C', .* C\(n\)"),
        ("C(0)-L(10)", "token 1"),
        ("R(5)-L(10)", r"token 1, 'R\(5\)', .* plain R"),
        ("L(10)-S-R", "token 2, 'S', .* at the end"),
        ("L(10)-C(5)-L(2)", r"token 2, 'C\(5\)', .* needs an image"),
        ("L(10)-B-L(2)", "token 2, 'B', .* needs an image"),
        ("M-M-M-M-M-L(2)", "token 5, 'M', .* 1 × 1 is too small"),
        ("C(5)-R", r"must end in L\(n\)"),
    ],
)
def test_wrong_network_notation_names_token_and_position(notation: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(notation, (1, 28, 28), kernel=5, padding=0)


def test_bad_network_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"'mnits'.*'mnist'"):
        model("mnits")
    with pytest.raises(ValueError, match=r"shape.*\(\)"):
        model("L(10)-S")
    with pytest.raises(ValueError, match=r"'L\(10\)-S'.*10 .*62 classes"):
        model("L(10)-S", (1, 28, 28), classes=62)


def test_initialisation_depends_on_the_seed_and_not_on_or_for_others() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = flatten(model("mnist", seed=5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(flatten(model("mnist", seed=5)), one)
    assert not torch.equal(flatten(model("mnist", seed=6)), one)


layers = st.lists(st.sampled_from(["C(3)", "R", "M", "B", "D"]), max_size=5)


@given(layers, st.integers(1, 5), st.integers(0, 2**31))
def test_flatten_and_unflatten_are_inverse(before: list[str], classes: int, seed: int) -> None:
    notation = "-".join([*before, f"L({classes})", "S"])
    network = build(notation, (2, 32, 32), classes, kernel=3, padding=1, seed=seed)
    vector = torch.randn(parameter_count(network), generator=torch.Generator().manual_seed(seed))
    unflatten(network, vector)
    assert torch.equal(flatten(network), vector)
    for layer in network.children():
        if isinstance(layer, nn.Conv2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    assert torch.equal(flatten(network), vector)
    unflatten(network, vector)
    assert torch.equal(flatten(network), vector)


def test_vector_is_the_parameters_in_order_and_a_copy() -> None:
    network = model("mlp")
    vector = flatten(network)
    named = list(network.named_parameters())
    assert [(name, tuple(p.shape)) for name, p in named] == list(shapes(network).items())
    assert torch.equal(vector[: named[0][1].numel()], named[0][1].detach().reshape(-1))
    assert not vector.requires_grad
    vector.zero_()
    assert float(flatten(network).abs().sum()) > 0
    unflatten(network, vector)
    vector += 1
    assert float(flatten(network).abs().sum()) == 0


@pytest.mark.parametrize("shape", [(7849,), (7851,), (1, 7850), ()])
def test_vector_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"7850 trained parameters.*\("):
        unflatten(model("linear"), torch.zeros(shape))
