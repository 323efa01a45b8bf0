"""ByzFL configurations become sweeps that mean the same, and what has no counterpart is said."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rpel.experiments.byzfl import convert
from rpel.experiments.sweep import Cell, cells, read
from support.commands import rpel

CONFIG: dict[str, Any] = {
    "benchmark_config": {
        "device": "cuda", "training_seed": 3, "nb_training_seeds": 2, "nb_honest_clients": 10, "f": [1, 2],
        "tolerated_f": [1, 2], "size_train_set": 0.8, "data_distribution_seed": 0,
        "nb_data_distribution_seeds": 1,
        "data_distribution": [{"name": "dirichlet_niid", "distribution_parameter": [1.0, 0.5]}],
        "training_algorithm": {"name": "DSGD", "parameters": {}}, "nb_steps": 800,
    },
    "model": {
        "name": "cnn_mnist", "dataset_name": "mnist", "nb_labels": 10, "loss": "NLLLoss",
        "learning_rate": 0.1, "learning_rate_decay": 0.5, "milestones": [],
    },
    "aggregator": [{"name": "GeometricMedian", "parameters": {"nu": 0.1, "T": 3}}, {"name": "TrMean"}],
    "pre_aggregators": [{"name": "Clipping", "parameters": {}}, {"name": "NNM", "parameters": {}}],
    "honest_clients": {"momentum": 0.9, "weight_decay": 0.0001, "batch_size": 25},
    "attack": [
        {"name": "SignFlipping", "parameters": {}},
        {"name": "ALittleIsEnough", "parameters": {"tau": 1.2}},
        {"name": "Optimal_InnerProductManipulation", "parameters": {}},
    ],
    "evaluation_and_results": {"evaluation_delta": 50, "store_models": True},
}  # fmt: skip


def swept(config: dict[str, Any]) -> list[Cell]:
    return cells(tomllib.loads(convert(config).to_toml()))


def test_byzfl_lists_become_the_grid_of_all_combinations() -> None:
    actual = swept(CONFIG)
    assert len(actual) == 2 * 2 * 2 * 3, "alphas, sizes, rules, attacks"
    specs = [cell.spec for cell in actual]
    assert {(s.nodes, s.byzantine) for s in specs if s} == {(11, 1), (12, 2)}
    assert {s.rule for s in specs if s} == {"clipping+nnm+geometric_median", "clipping+nnm+trimmed_mean"}
    assert {(s.attack, tuple(s.attack_params.items())) for s in specs if s} == {
        ("sign_flipping", ()), ("alie", (("tau", 1.2),)),
        ("strongest", (("of", "inner_product_manipulation"),)),
    }  # fmt: skip
    for s in specs:
        assert s is not None
        assert (s.method, s.dataset, s.model, s.rounds, s.lr, s.seeds) == (
            "all-to-all",
            "mnist",
            "mnist",
            800,
            0.1,
            "3-4",
        )
        assert (s.momentum, s.weight_decay, s.batch_size, s.eval_every) == (0.9, 1e-4, 25, 50)


def test_byzfl_settings_without_counterpart_are_named() -> None:
    said = " | ".join(convert(CONFIG).remarks)
    for words in (
        "there is no server",
        "size_train_set",
        "learning_rate_decay",
        "GeometricMedian",
        "store_models",
    ):
        assert words in said
    plain = {
        **CONFIG,
        "benchmark_config": {**CONFIG["benchmark_config"], "data_distribution": [{"name": "gamma"}]},
    }
    assert "data_distribution 'gamma' has no counterpart" in " | ".join(convert(plain).remarks)


def test_byzfl_remarks_stay_comments() -> None:
    lines = {'x\nout = "elsewhere"\n#': 1, "y": "\rout = 1"}
    hostile = {
        **CONFIG,
        "aggregator": {"name": "Krum", "parameters": lines},
        "attack": {"name": "Inf", "parameters": lines},
    }
    actual = convert(hostile)
    assert tomllib.loads(actual.to_toml()) == tomllib.loads(replace(actual, remarks=[]).to_toml())


def test_byzfl_keys_of_older_versions_are_understood() -> None:
    bench = {"nb_workers": 10, "nb_byz": 2, "training_seed": 0, "nb_training_seeds": 1}
    old = {
        "benchmark_config": bench,
        "aggregator": {"name": "Krum"},
        "server": {"learning_rate": 0.2, "nb_steps": 30},
        "honest_nodes": {"momentum": 0.5},
        "attack": {"name": "Inf"},
    }
    base = convert(old).base
    assert (base["nodes"], base["byzantine"], base["rounds"], base["momentum"]) == (10, 2, 30, 0.5)
    fedavg = {**old, "benchmark_config": {**bench, "training_algorithm": {"name": "FedAvg", "parameters": {
        "local_steps_per_client": 5, "proportion_selected_clients": 0.6}}}}  # fmt: skip
    assert convert(fedavg).base["local_steps"] == 5
    assert any("proportion_selected_clients" in line for line in convert(fedavg).remarks)


def test_attacks_with_parameters_are_combined_with_the_rest_of_the_grid() -> None:
    one_size = {**CONFIG, "benchmark_config": {**CONFIG["benchmark_config"], "f": 1}}
    assert len(swept(one_size)) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"aggregator": {"name": "TrMeen"}},
            "aggregator 'TrMeen' has no counterpart here; the nearest is 'TrMean'",
        ),
        ({"attack": {"name": "Labelflipping"}}, "the nearest is 'LabelFlipping'"),
        ({"pre_aggregators": [{"name": "NMM"}]}, "pre_aggregator 'NMM'"),
    ],
)
def test_unknown_byzfl_name_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as told:
        convert({**CONFIG, **change})
    assert sentence in str(told.value)


def test_byzfl_import_writes_a_file_that_sweep_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = ["import", "byzfl", str(tmp_path / "config.json")]
    out, err = rpel(*command, "-o", str(tmp_path / "sweep.toml"), capsys=capsys)
    assert ("24 runs to sweep" in out, "note: size_train_set" in err) == (True, True)
    assert len(read(tmp_path / "sweep.toml")) == 24
    for text, words in (("{", "is not JSON"), ("[]", "no ByzFL configuration")):
        (tmp_path / "config.json").write_text(text)
        assert words in rpel(*command, capsys=capsys, code=2)[1]
