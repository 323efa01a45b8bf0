"""Differential privacy: what the accountant says, the noise that a target needs, private local steps,
runs."""

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld
from torch import nn

import rpel as package
from rpel import privacy
from rpel.data import Dataset, dirichlet, iid, load, user
from rpel.errors import BudgetSpentError
from rpel.models import model
from rpel.tasks import Classification
from rpel.tasks.engines import ENGINES, PLAIN
from rpel.tasks.private import PrivateGradients
from support.commands import rpel

SETTINGS = [
    (noise, batch, examples, steps, delta)
    for noise, steps in ((1.3, 45), (2.5, 9), (3.0, 200), (4.0, 90), (8.0, 900))
    for batch, examples, delta in ((31, 310, 1e-4), (25, 1400, 1e-5), (8, 800, 1e-6), (20, 40, 1e-3))
]


def direct(noise: float, rate: float, steps: int, delta: float) -> float:
    """ε by a direct call of dp-accounting."""
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


# --- the accountant -----------------------------------------------------------------------------------------


def test_epsilon_is_the_published_value_of_the_reference() -> None:
    assert round(privacy.epsilon(1.3, privacy.rate(31, 310), steps=45, delta=1e-4), 3) == 2.518


@pytest.mark.parametrize(
    ("noise", "batch", "examples", "steps", "delta"),
    [*SETTINGS[:4], *(pytest.param(*setting, marks=pytest.mark.full) for setting in SETTINGS[4:])],
)
def test_epsilon_equals_a_direct_call_of_the_library(
    noise: float, batch: int, examples: int, steps: int, delta: float
) -> None:
    rate = privacy.rate(batch, examples)
    expected = direct(noise, rate, steps, delta)
    assert privacy.epsilon(noise, rate, steps, delta) == expected
    quickly = privacy.epsilon_quickly(noise, rate, steps, delta)
    assert expected - 1e-9 <= quickly <= 1.01 * expected + 0.01


def test_no_steps_cost_nothing_and_no_noise_protects_nothing() -> None:
    assert privacy.epsilon(1.0, 0.1, 0, 1e-5) == 0
    assert privacy.epsilon(0.0, 0.1, 1, 1e-5) == math.inf


@pytest.mark.parametrize(("target", "rate", "steps"), [(3.0, 25 / 1400, 200), (1.0, 0.1, 60)])
def test_planned_noise_keeps_the_target_and_a_little_less_does_not(
    target: float, rate: float, steps: int
) -> None:
    noise = privacy.noise_for(target, rate, steps, 1e-5)
    assert direct(noise, rate, steps, 1e-5) <= target < direct(noise * 0.997, rate, steps, 1e-5)


def test_steps_within_target_epsilon_are_maximal() -> None:
    allowed = privacy.steps_within(0.5, 4.0, 0.1, 45, 1e-4)
    assert 1 < allowed < 45
    assert direct(4.0, 0.1, allowed, 1e-4) <= 0.5 < direct(4.0, 0.1, allowed + 1, 1e-4)
    assert privacy.steps_within(3.0, 4.0, 0.1, 45, 1e-4) == 45
    assert privacy.steps_within(0.001, 4.0, 0.1, 45, 1e-4) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: privacy.noise_for(0, 0.1, 10, 1e-5), "epsilon must be a positive number, not 0"),
        (lambda: privacy.noise_for(-1, 0.1, 10, 1e-5), "epsilon must be a positive number, not -1"),
        (lambda: privacy.epsilon(1, 0.1, 10, 1.0), "delta must be above 0 and below 1, not 1"),
        (lambda: privacy.epsilon(1, 1.5, 10, 1e-5), "a sampling rate must be above 0 and at most 1, not 1.5"),
        (lambda: privacy.epsilon(-1, 0.5, 10, 1e-5), "noise_multiplier must be 0 or more, not -1"),
        (lambda: privacy.epsilon(0.01, 0.5, 10, 1e-5), "the nearest is 0.1, or 0"),
        (
            lambda: privacy.rate(50, 31),
            "batch 50 is larger than the 31 examples of a node: the nearest is 31",
        ),
    ],
)
def test_bad_privacy_numbers_are_refused(call: "object", words: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_delta_that_lets_a_whole_example_go_is_warned_of() -> None:
    assert privacy.weak_delta(1e-5, 1400) is None
    assert "1/1400" in (privacy.weak_delta(1e-3, 1400) or "")


def test_missing_accountant_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'rpel\[privacy\]'"):
        privacy.epsilon(1.234, 0.1, 7, 1e-5)


# --- private gradients --------------------------------------------------------------------------------------

NODES, BATCH = 4, 12
GROUPED = nn.Sequential(
    nn.Conv2d(1, 4, 5, stride=3),
    nn.GroupNorm(2, 4),
    nn.Tanh(),
    nn.Dropout(0.0),
    nn.Flatten(),
    nn.Linear(256, 10),
)

# nodes one by one, examples not
WIDE = nn.Sequential(nn.Flatten(), nn.Linear(784, 80), nn.Tanh(), nn.Linear(80, 10))


def task(
    network: "str | nn.Module" = "linear",
    dataset: Dataset | None = None,
    engines: "tuple[str, ...]" = ENGINES,
) -> Classification:
    data = dataset or load()
    module = model(network) if isinstance(network, str) else network
    return Classification(
        data,
        iid(np.zeros(data.size, np.int64), NODES, BATCH, seed=0),
        module,
        batch_size=BATCH,
        seed=0,
        engines=engines,
    )


def at(made: Classification) -> np.ndarray:
    """Models that differ from node to node."""
    x = np.tile(made.initial(), (NODES, 1))
    return x + np.random.default_rng(0).normal(0, 0.02, x.shape).astype(x.dtype)


def looped(
    private: PrivateGradients, x: np.ndarray, node: int, norm: float
) -> tuple[np.ndarray, list[float]]:
    """The sum of clipped gradients by autograd, one example after the other,
    and the norms before clipping."""
    made, total, norms = private.task, np.zeros(x.shape[1]), []
    rows, present = private.batches(np.array([node]), 3, 0)
    for row in rows[present]:
        inputs, labels = made.examples.batch(np.array([[row]]), np.array([node]), torch.float32)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(x[node]), made.module.parameters())
        made.module.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(made.module(inputs[0]), labels[0]))
        g = np.concatenate([p.grad.numpy().ravel() for p in made.module.parameters() if p.grad is not None])
        norms.append(float(np.linalg.norm(g.astype(np.float64))))
        total += g * min(1, norm / norms[-1])
    return total, norms


@pytest.mark.parametrize("network", ["linear", "mlp", "mnist", GROUPED, WIDE])
@pytest.mark.parametrize("share", [0.5, pytest.param(1e9, marks=pytest.mark.full)])
def test_sums_of_clipped_gradients_equal_a_plain_loop_over_examples(
    network: "str | nn.Module", share: float
) -> None:
    made = task(network)
    x, (_, norms) = at(made), looped(PrivateGradients(made, 1.0), at(made), 0, 1.0)
    norm = share * float(np.median(norms))
    private = PrivateGradients(made, norm)
    g, _ = private.gradient(x, made.local_state(NODES), np.arange(NODES), 3, 0)
    for node in (0, NODES - 1):
        expected, _ = looped(private, x, node, norm)
        assert np.abs(g[node] - expected / BATCH).max() <= 1e-4 * np.abs(expected / BATCH).max()


def test_examples_at_once_equal_one_by_one_with_frozen_layers_and_dropout() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.Dropout(0.4), nn.Tanh(), nn.Linear(20, 10))
    module[1].bias.requires_grad_(False)
    made = task(module)
    at_once, one_by_one = (
        PrivateGradients(task(module, engines=engines), 0.7) for engines in (ENGINES, PLAIN)
    )
    one_by_one.engine = one_by_one.task.engine
    x, local = at(made), made.local_state(NODES)
    actual, expected = (one.gradient(x, local, np.arange(NODES), 3, 0)[0] for one in (at_once, one_by_one))
    assert type(at_once.engine) is not type(one_by_one.engine)
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("network", ["mlp", "mnist", GROUPED])
def test_no_example_adds_more_than_the_clipping_norm_even_where_gradients_explode(
    network: "str | nn.Module",
) -> None:
    made = task(network)
    x = 1e4 * at(made)
    x[1, 0] = np.nan
    g, _ = PrivateGradients(made, 0.01).gradient(x, made.local_state(NODES), np.arange(NODES), 1, 0)
    counts = PrivateGradients(made, 0.01).batches(np.arange(NODES), 1, 0)[1].sum(axis=1)
    assert np.isfinite(g).all()
    assert (np.linalg.norm(g, axis=1) <= 1.0001 * 0.01 * counts / BATCH).all()


def test_poisson_batches_draw_each_example_independently() -> None:
    made = task()
    sizes = made.examples.size[:NODES]
    private, rounds = PrivateGradients(made, 1.0), 400
    counts, seen = np.zeros((rounds, NODES)), np.zeros(made.examples.dataset.size)
    for t in range(rounds):
        rows, present = private.batches(np.arange(NODES), t, 0)
        counts[t] = present.sum(axis=1)
        for node in range(NODES):
            own = rows[node][present[node]]
            assert len(np.unique(own)) == len(own)
            assert np.isin(own, made.examples.held[node]).all()
            seen[own] += 1
    rate = BATCH / sizes
    deviation = np.sqrt(BATCH * (1 - rate))
    assert np.abs(counts.mean(axis=0) - BATCH).max() < 5 * deviation.max() / math.sqrt(rounds)
    assert counts.std(axis=0) == pytest.approx(deviation, rel=0.2)  # a batch of a fixed size would have none
    held = seen[np.concatenate(list(made.examples.held.values()))]
    assert held.mean() == pytest.approx(rounds * rate.mean(), rel=0.02)
    assert held.var() == pytest.approx(rounds * rate.mean() * (1 - rate.mean()), rel=0.15)


def test_noise_is_gaussian_with_the_multiplier_times_the_norm_over_the_nominal_batch() -> None:
    made, norm, sigma = task(), 0.7, 1.5
    x, local, ids = at(made), made.local_state(NODES), np.arange(NODES)
    clean, _ = PrivateGradients(made, norm).gradient(x, local, ids, 2, 0)
    noisy, _ = PrivateGradients(made, norm, sigma).gradient(x, local, ids, 2, 0)
    z = (noisy - clean).astype(np.float64) / (sigma * norm / BATCH)
    assert abs(z.mean()) < 5 / math.sqrt(z.size)
    assert z.std() == pytest.approx(1, abs=5 / math.sqrt(2 * z.size))
    assert (np.abs(z) > 1.96).mean() == pytest.approx(0.05, abs=5 * math.sqrt(0.05 * 0.95 / z.size))
    assert np.abs(np.corrcoef(z) - np.eye(NODES)).max() < 0.06  # each node has noise of its own
    for t, k in ((3, 0), (2, 1)):  # so has each round, and each local step of a round
        other_clean, _ = PrivateGradients(made, norm).gradient(x, local, ids, t, k)
        other_noisy, _ = PrivateGradients(made, norm, sigma).gradient(x, local, ids, t, k)
        other = (other_noisy - other_clean).astype(np.float64) / (sigma * norm / BATCH)
        assert np.abs([np.corrcoef(a, b)[0, 1] for a, b in zip(z, other, strict=True)]).max() < 0.06


def test_empty_batch_gives_noise_all_the_same() -> None:
    made = task()

    def draw(purpose: str, t: int, k: int, node: int) -> np.random.Generator:
        class Nobody(np.random.Generator):
            def random(self, *shape: object, **options: object) -> np.ndarray:  # type: ignore[override]
                return np.ones(*shape)  # type: ignore[call-overload,no-any-return]

        return Nobody(np.random.Philox(5)) if purpose == "private-batch" else np.random.default_rng(node)

    x, local, ids = at(made), made.local_state(NODES), np.arange(NODES)
    assert not PrivateGradients(made, 1.0, 0.0, draw).gradient(x, local, ids, 1, 0)[0].any()
    assert PrivateGradients(made, 1.0, 1.0, draw).gradient(x, local, ids, 1, 0)[0].std() > 0.9 / BATCH


def test_examples_that_are_not_alike_are_clipped_one_by_one() -> None:
    coins = np.random.default_rng(1)
    texts = [(coins.normal(size=(int(coins.integers(1, 6)), 3)).astype(np.float32), i % 2) for i in range(60)]

    def collate(some: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        widest = max(len(x) for x, _ in some)
        padded = [np.pad(x, ((0, widest - len(x)), (0, 0))).sum(axis=0, keepdims=True) for x, _ in some]
        return torch.from_numpy(np.concatenate(padded)), torch.tensor([y for _, y in some])

    made = task(nn.Linear(3, 2), user.dataset(texts, texts[:10], collate=collate))
    x = at(made)
    g, _ = PrivateGradients(made, 0.3).gradient(x, made.local_state(NODES), np.arange(NODES), 3, 0)
    counts = PrivateGradients(made, 0.3).batches(np.arange(NODES), 3, 0)[1].sum(axis=1)
    assert (np.linalg.norm(g, axis=1) <= 1.0001 * 0.3 * counts / BATCH).all()
    assert np.abs(g).max(axis=1).min() > 0


class Writing(nn.Module):
    """A network that writes to its own state in its forward pass."""

    seen: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(784, 10)
        self.register_buffer("seen", torch.zeros(784))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if self.training and self.how == "added":
            self.seen += x.detach().mean(dim=0)
        if self.training and self.how == "replaced":
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(dim=0)
        if self.training and self.how == "parameter":
            with torch.no_grad():
                self.linear.bias.mul_(0.5)
        return torch.as_tensor(self.linear(x - self.seen))


@pytest.mark.parametrize(
    ("network", "noise", "norm", "words"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)),
            1.0,
            1.0,
            "GroupNorm",
        ),
        ("linear", 1.0, math.inf, "noise_multiplier 1 needs a max_grad_norm"),
        (Writing("added"), 1.0, 1.0, "forward pass writes to its buffer 'seen'"),
        (Writing("replaced"), 1.0, 1.0, "forward pass writes to its buffer 'seen'"),
        (Writing("parameter"), 1.0, 1.0, "forward pass writes to its parameter 'linear.bias'"),
    ],
)
def test_tasks_that_cannot_be_private_are_refused(
    network: "str | nn.Module", noise: float, norm: float, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        PrivateGradients(task(network), norm, noise)
    assert "\n" not in str(caught.value)


# --- runs ---------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "model": "linear", "nodes": 6, "byzantine": 1, "rounds": 4, "local_steps": 2, "batch_size": 20,
    "eval_every": 2, "eval_size": 50, "privacy": "dp(clip=1, noise=4, delta=1e-5)",
}  # fmt: skip


def test_private_run_certifies_the_epsilon_that_a_direct_call_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = package.simulate(**RUN, out=tmp_path)
    stated = json.loads((run.path / "certificate.json").read_text())["privacy"]
    held = dirichlet(load().train_y, 5, 1.0, 20, seed=0)
    each = [direct(4.0, 20 / len(part), 8, 1e-5) for part in held]
    assert (stated["epsilon"], stated["epsilon_median"]) == (max(each), float(np.median(each)))
    assert (stated["delta"], stated["relation"]) == (1e-5, "add or remove one example")
    assert (stated["accountant"], stated["version"]) == ("dp-accounting PLD", "0.6.0")
    column = [row["epsilon"] for row in run.rows]
    assert column[-1] == stated["epsilon"]
    assert column == sorted(column)
    rate = 20 / min(map(len, held))
    assert all(direct(4.0, rate, 2 * t, 1e-5) <= epsilon + 1e-9 for t, epsilon in enumerate(column, 1))
    rpel("report", str(run.path), "-o", str(tmp_path / "page.html"), capsys=capsys)
    assert f"ε is at most {stated['epsilon']:.4g} at any honest node" in (tmp_path / "page.html").read_text(
        "utf-8"
    )
    shown, _ = rpel("resume", str(run.path), capsys=capsys)
    assert f"epsilon            at most {stated['epsilon']:.4g} at any honest node" in shown


def test_run_stops_before_exceeding_target_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    column = [row["epsilon"] for row in package.simulate(**RUN).rows]
    privacy = f"dp(clip=1, noise=4, epsilon={column[1]}, delta=1e-5)"
    with pytest.raises(BudgetSpentError, match=r"round 3 of 4.*target_epsilon"):
        package.simulate(**{**RUN, "privacy": privacy}, out=tmp_path)
    (folder,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == column[:2]
    assert "stopped before round 3" in rpel("resume", str(folder), capsys=capsys, code=1)[1]


X = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
OTHERS = (X[:9] + 1, Y[:9])
NORMED = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
UNEQUAL = [(X[:20], Y[:20])] * 4 + [(X[:9], Y[:9])]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": "dp(noise=4, delta=1e-5)"}, "dp needs its parameter 'clip'"),
        ({"privacy": "dp(clip=1, noise=4)"}, "dp needs a delta"),
        ({"privacy": "dp(clip=1, delta=1e-5)"}, "delta 1e-05 needs epsilon or noise"),
        ({"privacy": "dp(clip=1, noise=0, epsilon=1, delta=1e-5)"}, "noise 0 keeps no epsilon"),
        ({"privacy": "dp(clip=1, noise=-1, delta=1e-5)"}, "noise -1"),
        ({"privacy": "dp(clip=1, epsilon=0, delta=1e-5)"}, "epsilon 0"),
        ({"privacy": "dp(clip=1, noise=4, epsilon=1e-4, delta=1e-5)"}, "stopped before round 1 of 4"),
        ({"partition": "virtual"}, "partition 'virtual' shares examples between nodes.*'iid'"),
        ({"problem": lambda problem: problem}, "problem= may change the local step"),
        ({"model": NORMED, "train": (X, Y), "test": OTHERS}, "layer '1' is BatchNorm1d.*GroupNorm"),
        (
            {"model": nn.Linear(3, 2), "train": (X, Y), "test": (X, Y)},
            "the test examples are the training examples",
        ),
        (
            {"model": nn.Linear(3, 2), "train": UNEQUAL, "test": OTHERS},
            "a node holds 9 examples, .* batch_size 9",
        ),
    ],
)
def test_options_incompatible_with_privacy_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, BudgetSpentError), match=words) as caught:
        package.simulate(**{**RUN, **changes}, out=tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_optimisers_outer_steps_and_codes_see_only_noisy_gradients() -> None:
    fields = {**RUN, "rounds": 2, "partition": "iid", "optimizer": "adamw", "lr": 0.01}
    run = package.simulate(**fields, outer="nesterov", wire="int8")
    examples = [len(part) for part in iid(np.zeros(load().size, np.int64), 5, 20, seed=0)]
    assert run.certificate["privacy"]["epsilon"] == direct(4.0, 20 / min(examples), 4, 1e-5)
