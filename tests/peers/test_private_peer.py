"""Private local steps of real peers: coins of the system, a budget that survives everything,
what members.toml asks."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpel import privacy
from rpel.errors import BudgetSpentError
from rpel.models import model
from rpel.peer.api import learner_of
from rpel.peer.config.settings import Config
from rpel.peer.core.wire import Layout
from rpel.peer.learn.learner import TaskLearner, built_in, task_learner, training
from rpel.peer.learn.privacy import private
from rpel.peer.node.node import Node
from rpel.peer.ops.create import new, stall_proof
from support.thread_network import Running, ended, found

TABLE: dict[str, Any] = {"model": "linear", "partition": "iid", "batch_size": 50, "lr": 0.5, "momentum": 0.9}
LAYOUT = Layout.of(model("linear").named_parameters())
NODES, ROUNDS, BATCH = 4, 6, 50
RATE = privacy.rate(BATCH, 1250)


def config(folder: Path, **said: Any) -> Config:
    file = folder / "peer.toml"
    file.write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in {"id": "clinic", **said}.items())
    )
    return Config.load(file)


def learner(settings: Config, table: dict[str, Any] = TABLE, rounds: int = ROUNDS) -> TaskLearner:
    return task_learner(
        "mnist-sample", index=1, nodes=NODES, run="r", hyperparameters=table, local_steps=1, layout=LAYOUT,
        make_private=lambda task: private(settings, table, task, 1, rounds, 1),
    )  # fmt: skip


def half(of: TaskLearner, round: int = 1) -> np.ndarray:
    x = built_in("mnist-sample", training(TABLE), NODES, run="r").initial()
    out, scratch = np.empty((2, len(x)), x.dtype)
    of.load(round, x, fresh=True)
    of.half(out, scratch)
    return np.asarray(out - x)


def test_private_peer_draws_planned_noise_and_batches_from_the_system(tmp_path: Path) -> None:
    settings = config(tmp_path, max_grad_norm=0.8, noise_multiplier=3.0, target_delta=1e-5)
    first, second = (half(learner(settings)) for _ in range(2))
    # lr, 1 - momentum, noise, norm, two of them
    z = (first - second) / (0.5 * 0.1 * 3.0 * 0.8 / BATCH * math.sqrt(2))
    assert z.std() == pytest.approx(1, abs=0.05)
    assert abs(z.mean()) < 5 / math.sqrt(len(z))
    public = config(tmp_path)
    assert np.array_equal(half(learner(public)), half(learner(public)))


def test_private_peer_stops_before_exceeding_its_target_epsilon(tmp_path: Path) -> None:
    target = privacy.epsilon(3.0, RATE, 3, 1e-5) + 1e-6
    said = {"max_grad_norm": 1.0, "noise_multiplier": 3.0, "target_delta": 1e-5, "target_epsilon": target}
    half(learner(config(tmp_path, **said)), round=3)
    # a restart, or an emptied state folder, gives nothing back: the round counts, not the steps
    for _ in range(2):
        with pytest.raises(BudgetSpentError, match=r"round 4 of 6.*target_epsilon"):
            half(learner(config(tmp_path, **said)), round=4)
    half(learner(config(tmp_path, **said, unspent_rounds=3)), round=6)


def test_target_epsilon_alone_plans_the_noise_for_all_rounds(tmp_path: Path) -> None:
    budget = learner(config(tmp_path, max_grad_norm=1, target_epsilon=0.5, target_delta=1e-5)).budget
    assert budget is not None
    assert 0.99 * 0.5 < budget.whole[0] <= 0.5
    assert budget.whole[0] == privacy.epsilon(budget.noise_multiplier, RATE, ROUNDS, 1e-5)
    assert budget.after(3) < budget.after(ROUNDS) == budget.whole[0]


@pytest.mark.parametrize(
    ("said", "asked", "words"),
    [
        ({"noise_multiplier": 1.0}, {}, "noise without max_grad_norm"),
        ({"noise_multiplier": 1.0, "max_grad_norm": 1.0}, {}, "noise without target_delta"),
        ({"max_grad_norm": 1.0}, {}, "peer.toml has max_grad_norm, which goes with noise_multiplier"),
        (
            {},
            {"target_epsilon": 8, "target_delta": 1e-5},
            "asks every member for an epsilon of at most 8: put",
        ),
        ({}, {"target_epsilon": 8}, "target_epsilon and target_delta go together"),
        (
            {"noise_multiplier": 0.5, "max_grad_norm": 1.0},
            {"target_epsilon": 0.5, "target_delta": 1e-5},
            "which noise_multiplier 0.5 does not keep over 6 rounds: the nearest is ",
        ),
    ],
)
def test_incomplete_or_too_little_noise_is_refused(
    said: dict[str, Any], asked: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        learner(config(tmp_path, **said), TABLE | asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("noise_multiplier", 0), ("target_delta", 1), ("target_epsilon", -1.0)]
)
def test_bad_privacy_numbers_in_peer_toml_are_refused_by_key(key: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=key):
        config(tmp_path, **{key: value})


def test_peer_toml_with_privacy_is_read_back_as_written(tmp_path: Path) -> None:
    settings = config(tmp_path, max_grad_norm=1, target_epsilon=8.0, target_delta=1e-5, unspent_rounds=3)
    settings.save(tmp_path / "peer.toml")
    assert Config.load(tmp_path / "peer.toml") == settings


def test_membership_keeps_the_privacy_it_requires(tmp_path: Path) -> None:
    plan = stall_proof(nodes=12, byzantine=2, rounds=200)
    asked = {"target_epsilon": 8, "target_delta": 1e-5}
    network = new(plan, epoch=1.8e9, hyperparameters={"lr": 0.1, **asked}, out=tmp_path)
    assert asked.items() <= network.membership.hyperparameters.items()
    with pytest.raises(ValueError, match=r"target_delta 2.*below 1"):
        new(plan, epoch=1.8e9, hyperparameters={"target_epsilon": 8, "target_delta": 2}, out=tmp_path)


@pytest.mark.integration
def test_private_peer_logs_epsilon_and_stops_while_others_continue(tmp_path: Path) -> None:
    initial = built_in("mnist-sample", training(TABLE), NODES, run="consortium").initial()
    files = found(
        tmp_path, NODES, rounds=4, period=1.5, soon=3.0, layout=LAYOUT, initial=initial, hyperparameters=TABLE
    )
    target = privacy.epsilon(3.0, RATE, 3, 1e-5) + 1e-6
    home = tmp_path / "peer-0"
    with (home / "peer.toml").open("a") as file:
        file.write(
            f"max_grad_norm = 1.0\nnoise_multiplier = 3.0\ntarget_delta = 1e-5\ntarget_epsilon = {target}\n"
        )
    running = []
    for settings in files.configs:
        node = Node(Config.load(settings.key.parent / "peer.toml"))
        made = learner_of(node.config, node.now, node.layout)
        node.service.budget = made.budget
        running.append(Running(node, made).start())
    with ended(running) as (own, *others):
        with pytest.raises(BudgetSpentError, match="round 4 of 4"):
            own.join()
        for peer in others:
            peer.join()
    rows = [json.loads(text) for text in (home / "rounds.jsonl").read_text().splitlines()]
    assert rows[-1]["round"] == 3
    assert rows[-1]["epsilon"] == pytest.approx(target, rel=0.02)
    stated = json.loads((home / "state" / "privacy.json").read_text())
    assert (stated["round"], stated["epsilon_so_far"]) == (3, rows[-1]["epsilon"])
    assert stated["accountant"] == "dp-accounting PLD"
    assert "epsilon" not in json.loads((tmp_path / "peer-1" / "rounds.jsonl").read_text().splitlines()[0])
