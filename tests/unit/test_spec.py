"""What a run is: fields and their errors, presets, TOML, planning, and the hash that names the folder."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpel.data import DataError
from rpel.data.formats import IDX_FILES
from rpel.simulation.inputs import available
from rpel.simulation.methods import resolve
from rpel.spec import Execution, Rate, Request, Spec, load, presets, spec_hash, to_toml

BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"nods": 5}, ["'nods'", "'nodes'"]),
    ({"bhat": 5}, ["'bhat'", "'b_hat'"]),
    ({"nodes": "abc"}, ["nodes", "'abc'", "20"]),
    ({"nodes": 1}, ["nodes 1", "the nearest is 2"]),
    ({"nodes": 2.5}, ["nodes", "2.5", "whole number"]),
    ({"nodes": 10, "byzantine": 5}, ["byzantine 5", "most is 4"]),
    ({"method": "rpl"}, ["method 'rpl'", "'rpel'"]),
    ({"dataset": "cifar"}, ["'cifar'", "'cifar10'"]),
    ({"partition": "by-hand"}, ["'by-hand'", "choose one of dirichlet, iid, writer, owner, virtual"]),
    ({"partition": "dirichlett"}, ["'dirichlett'", "'dirichlet'"]),
    ({"timing": "asynchronus"}, ["'asynchronus'", "'asynchronous'"]),
    ({"timing": "asynchronous(latency=0)"}, ["latency 0", "more than 0"]),
    ({"method": "gts(graph=star)"}, ["graph 'star'"]),
    ({"method": "rpel(graph=random)"}, ["rpel has no parameter 'graph'"]),
    ({"privacy": "dp(noise=1)"}, ["dp needs its parameter 'clip'"]),
    ({"outer": "nesterov(0.5, momentum=1)"}, ["momentum 1", "less than 1"]),
    ({"output": "lst"}, ["'lst'", "'last'"]),
    ({"device": "gpu"}, ["'gpu'", "cuda"]),
    ({"confidence": 2}, ["confidence 2", "less than 1"]),
    ({"no_show": -0.1}, ["no_show -0.1", "the nearest is 0"]),
    ({"partition": "dirichlet(nan)"}, ["alpha nan"]),
    ({"partition": "dirichlet(-1)"}, ["alpha -1", "more than 0"]),
    ({"lr": "fast"}, ["lr is a rate", "'fast'"]),
    ({"lr": 0}, ["peak 0", "more than 0"]),
    ({"lr": "steps(500:0.5, 400:0.1)"}, ["rounds rise"]),
    ({"lr": [1, 2]}, ["lr is a rate", "pairs"]),
    ({"seeds": "4-0"}, ["'4-0'", "0-4"]),
    ({"seeds": "0-999999999999999"}, ["'0-999999999999999'", "0-4"]),
    ({"attack": "alie(z=1"}, ["'alie(z=1'", "')'"]),
    ({"silent": "perhaps"}, ["'perhaps'", "true or false"]),
    ({"pull": "many"}, ["'many'", "plan"]),
    ({"name": "../x"}, ["'../x'", "letters"]),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=lambda value: str(value)[:40])
def test_wrong_spec_field_names_value_and_nearest(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        Request(**fields)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attack": "alei"}, ["'alei'", "'alie'"]),
        ({"attack": "alie(zeta=3)"}, ["'zeta'", "z"]),
        ({"rule": "nnm+trimed_mean"}, ["'trimed_mean'", "'trimmed_mean'"]),
        ({"rule": "gts"}, ["'gts'", "fixed graphs"]),
        ({"rule": "nnm"}, ["'nnm'", "nnm+trimmed_mean"]),
        ({"rule": "bulyan", "pull": 12}, ["bulyan", "19 models", "18"]),
        ({"pull": 20}, ["pull 20", "19"]),
        (
            {"nodes": 100, "byzantine": 10, "rounds": 200, "pull": 15},
            ["b_hat 8", "best_below_half is b_hat 7", "0.9739"],
        ),
        ({"pull": 6, "b_hat": 4}, ["b_hat 4", "best_below_half is b_hat 3"]),
    ],
)
def test_unknown_or_unfit_spec_parts_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        resolve(Spec(**fields))
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_numpy_numbers_and_lists_of_seeds_are_taken_as_they_are_meant() -> None:
    given = Request(nodes=np.int64(30), lr=np.float32(0.5), seeds=range(3))
    assert given == Request(nodes=30, lr=0.5, seeds="0,1,2")


def test_omitted_pull_and_b_hat_are_planned() -> None:
    resolved = resolve(Spec(nodes=100, byzantine=10, rounds=200))
    assert (resolved.pull, resolved.b_hat) == (26, 9)
    assert resolve(Spec(nodes=30, byzantine=6, rounds=200, pull=15)).b_hat == 6
    assert resolve(Spec(nodes=30, byzantine=6, b_hat="plan", pull="plan")).pull == 17


def test_chosen_b_hat_is_certified_with_its_probability() -> None:
    plan = resolve(load("mnist-100")).plan
    assert (plan.pull, plan.b_hat) == (15, 7)
    assert plan.probability == pytest.approx(0.973938, abs=1e-6)


def test_presets_hold_the_paper_s_settings() -> None:
    assert presets() == [
        "cifar10-100", "cifar10-20", "femnist-30", "femnist-writers", "heart-4", "mnist-100", "mnist-30",
        "quickstart", "resnet18-cifar10", "reviews-16", "scale-100k", "scale-1m", "shakespeare",
    ]  # fmt: skip
    keys = (
        "nodes",
        "byzantine",
        "partition",
        "weight_decay",
        "batch_size",
        "momentum",
        "rounds",
        "pull",
        "b_hat",
    )
    rows = {name: tuple(getattr(load(name), key) for key in keys) for name in presets()}
    assert rows["mnist-100"] == (100, 10, "dirichlet", 1e-4, 25, 0.9, 200, 15, 7)
    assert rows["mnist-30"] == (30, 6, "dirichlet", 1e-4, 25, 0.9, 200, 15, None)
    assert rows["cifar10-20"] == (20, 3, "dirichlet(10)", 1e-2, 50, 0.99, 2000, 6, None)
    assert rows["femnist-30"] == (30, 3, "dirichlet(10)", 1e-4, 50, 0.99, 500, 6, None)
    cifar = load("cifar10-20")
    rates = [cifar.rate(t) for t in (1, 500, 501, 1000, 1001, 1501, 2000)]
    assert rates == [0.5, 0.5, 0.1, 0.1, 0.02, 0.004, 0.004]
    assert all(load(name).rule is None for name in presets())


def test_quickstart_is_what_one_gets_without_saying_anything() -> None:
    assert load("quickstart").replace(name="run", eval_every=20) == Request()


@pytest.mark.parametrize("name", presets())
def test_toml_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    spec = load(name).replace(
        attack="alie(z=1.25, targeting=most-exposed)", seeds="0-2", data_dir='a "b"\\c ü'
    )
    (tmp_path / "mine.toml").write_text(to_toml(spec), "utf-8")
    assert load(tmp_path / "mine.toml") == spec


def test_file_may_begin_with_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "mnist-30"\nattack = "foe"\n')
    assert load(file) == load("mnist-30").replace(name="mine", attack="foe")
    file.write_text('preset = "mnist-3"\n')
    with pytest.raises(ValueError, match=r"mine\.toml.*'mnist-3'.*'mnist-30'"):
        load(file)


def test_misspelt_key_or_broken_file_names_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("nods = 5\n")
    with pytest.raises(ValueError, match=r"'nods'.*'nodes'"):
        load(file)
    file.write_text("nodes = \n")
    with pytest.raises(ValueError, match=r"mine\.toml.*TOML"):
        load(file)
    with pytest.raises(ValueError, match=r"spec\.toml"):
        load(tmp_path)


MEANT: dict[str, Any] = {
    "nodes": 21, "byzantine": 3, "pull": 12, "b_hat": 5, "confidence": 0.999, "rounds": 61,
    "method": "all-to-all", "optimizer": "adamw(eps=1e-6)", "outer": "nesterov(0.5)", "rule": "mean",
    "attack": "foe(zeta=2)", "partition": "dirichlet(2)", "lr": 0.1, "momentum": 0.8, "weight_decay": 0.0,
    "batch_size": 24, "local_steps": 2, "output": "uniform", "no_show": 0.1, "silent": True, "seed": 1,
    "eval_every": 10, "eval_size": 10, "model": "mlp", "dataset": "mnist", "device": "cuda",
    "privacy": "dp(clip=1)", "wire": "int8", "backend": "torch", "native": False,
    "timing": "asynchronous(speeds=lognormal(0.3), jitter=0.1)",
}  # fmt: skip
NOT_MEANT = {"name": "x", "data_dir": "here", "threads": 1, "out": "there", "checkpoint_every": 1,
    "workers": 2, "track": "wandb",
}  # fmt: skip


def hashed(spec: Spec) -> str:
    return spec_hash(resolve(spec).spec)


def test_fields_are_either_the_meaning_of_a_run_or_its_execution() -> None:
    assert MEANT.keys() | {"weights"} == Spec.model_fields.keys()
    assert NOT_MEANT.keys() | {"seeds"} == Execution.model_fields.keys()


@given(st.sampled_from(sorted(MEANT)), st.dictionaries(st.sampled_from(sorted(NOT_MEANT)), st.none()))
def test_hash_differs_exactly_when_the_meaning_does(changed: str, others: dict[str, None]) -> None:
    base = Request(pull=13, b_hat=4)
    elsewhere = {key: NOT_MEANT[key] for key in others}
    assert hashed(base) == hashed(base.replace(**elsewhere))
    assert hashed(base) != hashed(base.replace(**elsewhere, **{changed: MEANT[changed]}))


def test_hash_covers_data_and_user_objects_not_spelling() -> None:
    base = Spec(attack="sf", lr=0.5)
    assert spec_hash(base, {"a": "1"}) != spec_hash(base, {"a": "2"})
    assert spec_hash(base, {}) != spec_hash(base, {}, {"model": "1"})
    assert hashed(base) == hashed(resolve(base).spec) == hashed(base.replace(attack=" sign_flipping ( ) "))


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ({"lr": "0.5"}, 0.5),
        ({"lr": [(500, 0.5), (1000, 0.1)]}, "steps(500:0.5, 1000:0.1)"),
        ({"partition": "dirichlet( alpha = .5 )"}, "dirichlet(alpha=0.5)"),
        ({"rule": "nnm + krum(neighbours=m-f-2)"}, "nnm+krum(neighbours=m-f-2)"),
        ({"pull": "plan"}, None),
    ],
)
def test_field_is_kept_in_one_spelling(written: dict[str, Any], kept: Any) -> None:
    (key,) = written
    assert getattr(Spec(**written), key) == kept


def test_hostile_nodes_can_be_listed() -> None:
    by_text = Spec(byzantine="[3, 0]", nodes=8)
    assert (by_text.byzantine, by_text.hostile_count) == ((3, 0), 2)
    resolved = resolve(by_text.replace(method="cs-plus", pull=4, b_hat=1))
    assert np.flatnonzero(resolved.network.roster.hostile(1)).tolist() == [0, 3]
    assert load_text(to_toml(Request(byzantine=[3, 0], nodes=8))).byzantine == (3, 0)
    for wrong, said in (
        ([0, 0], "0 is twice there"),
        ([8], "8 is twice there or no node"),
        ("many", "list of"),
    ):
        with pytest.raises(ValueError, match=said):
            Spec(byzantine=wrong, nodes=8)


def load_text(text: str) -> Request:
    return Request(**tomllib.loads(text))


def test_steps_hold_their_last_rate() -> None:
    rate = Rate.of("steps(500:0.5, 1000:0.1)")
    assert [rate.at(t, 1000) for t in (1, 500, 501, 2000)] == [0.5, 0.5, 0.1, 0.1]


def test_large_presets_use_the_planned_pull() -> None:
    for name, pull, b_hat in (("scale-100k", 34, 17), ("scale-1m", 36, 18)):
        plan = resolve(load(name)).plan
        assert (plan.pull, plan.b_hat, plan.feasible) == (pull, b_hat, True)


def test_small_mnist_falls_back_to_the_sample_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RPEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RPEL_DATA_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("RPEL_DATA", raising=False)
    assert available(load("scale-100k")).dataset == "mnist-sample-8x8"
    assert "mnist could not be downloaded" in caplog.text
    assert "mnist-sample-8x8, takes its place" in caplog.text
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in IDX_FILES:
        (raw / name).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"train-images.*published.*MD5"):  # what is there must be right
        available(load("scale-100k").replace(data_dir=str(tmp_path / "data")))


def test_evaluation_takes_250_examples_and_the_paper_s_presets_1000() -> None:
    assert Spec().eval_size == 250
    paper = {name: load(name).eval_size for name in ("mnist-100", "mnist-30", "cifar10-20", "femnist-30")}
    assert set(paper.values()) == {1000}
