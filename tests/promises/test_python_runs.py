"""What `rpel.simulate` returns, prints and refuses."""

import json
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest

import rpel
from rpel import Run, Runs, simulate
from support.runs import TINY, tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seeds": 3}, r"seeds 3 is one number.*seed=3.*seeds=\[3\].*seeds=range\(3\)"),
        ({"attack": None}, "attack None is not possible.*'none': no attack"),
        ({"attack": 3}, "attack 3 is of type int"),
        ({"rule": 3}, "rule 3 is of type int.*'nnm.trimmed_mean'"),
        ({"out": Path("/proc/x")}, "/proc/x cannot be created"),
    ],
)
def test_wrong_argument_is_refused_in_one_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        tiny(fields.pop("out", None), **fields)


def test_seed_gives_a_run_and_seeds_a_run_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = simulate("linear", nodes=6, byzantine=1, rounds=1, eval_size=50)
    both = simulate("linear", nodes=6, byzantine=1, rounds=1, eval_size=50, seeds="0,1")
    assert_type(one, rpel.Run)
    assert_type(both, rpel.Runs)
    assert (type(one), type(both)) == (rpel.Run, rpel.Runs)
    assert list(tmp_path.iterdir()) == [], "nothing is kept unless told"
    assert (len(both), both[0].spec.seed, both[1].spec.seed) == (2, 0, 1)
    assert (one.certificate["held"], one.certificate.held, one.certificate.b_hat) == (
        True,
        True,
        one.spec.b_hat,
    )
    assert json.loads(json.dumps(one.certificate.to_dict())) == one.certificate.to_dict()
    with pytest.raises(ValueError, match="out='runs'"):
        rpel.load(one.path)


def test_progress_is_printed_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    tiny(None, progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1].startswith("run, seed 0: round 6 of 6; accuracy in round 6: mean 0.")
    tiny(None, progress=False)
    assert capsys.readouterr().err == ""


def test_pandas_gets_all_rounds_of_all_seeds(finished: Run) -> None:
    both = rpel.Runs([finished, rpel.Run(finished.spec.replace(seed=1), rows=finished.rows)])
    frame = both.frame
    assert list(frame.columns) == ["seed", *finished.history.columns]
    assert frame["seed"].tolist() == [0] * TINY["rounds"] + [1] * TINY["rounds"]
    np.testing.assert_array_equal(frame["loss"], np.tile(finished.history["loss"], 2))
    assert frame.groupby("seed")["accuracy_mean"].count().tolist() == [finished.history["loss"].count()] * 2


def test_several_seeds_are_several_runs_with_intervals(tmp_path: Path) -> None:
    result = tiny(tmp_path, seeds="0-2")
    assert isinstance(result, Runs)
    assert [run.spec.seed for run in result.runs] == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 3
    mean, low, high = result.interval("accuracy_mean")
    assert low < mean < high
    assert mean == pytest.approx(np.mean([run.accuracy_mean for run in result.runs]))
    assert result.history["accuracy_mean"].iloc[-1] == pytest.approx(mean)
    assert result.accuracy_mean == pytest.approx(mean)
    assert result.models.shape == (3, 7, 7850)
    assert result.certificate["held"]
    assert len(result.plot().axes[0].collections) == 2, "bands"
    assert result.summary()["intervals"]["accuracy_mean"] == {"mean": mean, "low": low, "high": high}
    alone = tiny(tmp_path, seed=1)
    assert alone.reused


def test_violation_is_reported_with_node_and_round(tmp_path: Path) -> None:
    result = tiny(tmp_path, nodes=20, byzantine=6, pull=6, b_hat=1, confidence=0.01, rounds=3)
    proof = result.certificate
    assert not proof["held"]
    assert proof["max_observed"] > 1
    assert proof["plan"]["probability"] < 0.01
    assert result.path is not None
    arrays = np.load(result.path / "counts.npz")
    listed = {(v["round"], v["node"], v["count"]) for v in proof["violations"]}
    rows, columns = np.nonzero(arrays["counts"] > 1)
    met = arrays["counts"][rows, columns]
    assert listed == set(zip((rows + 1).tolist(), arrays["ids"][columns].tolist(), met.tolist(), strict=True))
    assert proof["violations_total"] == len(listed)


def test_huge_numbers_are_written_as_they_are_while_they_are_finite(tmp_path: Path) -> None:
    result = tiny(tmp_path, rule="mean", attack="foe(zeta=1e30)", rounds=4)
    assert result.path is not None

    def refuse(word: str) -> None:
        raise AssertionError(word)

    rows = [
        json.loads(line, parse_constant=refuse)
        for line in (result.path / "metrics.jsonl").read_text().splitlines()
    ]
    missing = {key for key, value in rows[-1].items() if value is None}
    outputs = {"output_accuracy_mean", "output_accuracy_worst"}  # the models kept are those of the last round
    # there is no backdoor and no privacy here
    others = {"attack_success_mean", "attack_success_worst", "epsilon"}
    assert missing == {*others, *outputs}


def test_backdoor_succeeds_less_with_a_robust_rule_than_with_averaging() -> None:
    shared: dict[str, Any] = {
        "dataset": "mnist-sample-8x8", "nodes": 12, "byzantine": 3, "pull": 8, "b_hat": 3, "rounds": 30,
        "lr": 0.5, "partition": "iid", "attack": "backdoor(target=7)", "eval_every": 30,
        "out": None,
    }  # fmt: skip
    mean, robust, clean = (
        simulate("linear", **{**shared, **other}) for other in ({"rule": "mean"}, {}, {"attack": "alie"})
    )
    worst, least = mean.final["attack_success_worst"], robust.final["attack_success_mean"]
    assert 0 <= robust.final["attack_success_mean"] <= robust.final["attack_success_worst"] <= 1
    assert worst > 0.5 > least
    assert mean.rows[0]["attack_success_mean"] is None
    assert clean.final["attack_success_worst"] is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("share=0", "a share above 0"),
        ("target=-1", "the number of a class"),
        ("size=3", "has no parameter"),
    ],
)
def test_parameters_that_no_backdoor_has_are_refused(wrong: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        simulate("linear", attack=f"backdoor({wrong})", out=None)
