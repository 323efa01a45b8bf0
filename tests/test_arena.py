"""The arena: ranks are worst cases, what cannot run says why, and its page, table and JSON say the same."""

import json
import re
from pathlib import Path

import pytest

from rpel import arena
from rpel.arena import Standings
from rpel.runs.certificate import Certificate
from rpel.runs.record import Run
from rpel.runs.table import Table
from rpel.spec import Spec, load, to_toml
from support.browser import in_chromium
from support.commands import rpel

DRIVE = (Path(__file__).parent / "browser" / "arena.js").read_text("utf-8")
TINY = Spec(
    name="tiny", model="linear", nodes=8, byzantine=1, pull=4, b_hat=1, rounds=2, eval_every=2, eval_size=50
)

PROOF = Certificate({}, "plan", True, 0, [], [], 0, 0, {}, 1, {})


def played(rules: dict[str, dict[str, list[float | None]]], attacks: list[str]) -> Standings:
    """Standings made of worst-node accuracies, a number a seed; None: that run failed."""
    seeds = max(len(values) for by_attack in rules.values() for values in by_attack.values())
    numbers = ",".join(map(str, range(seeds)))
    tried = arena.trials(TINY, arena.contestants(list(rules)), arena.opponents(attacks), numbers)
    values = [rules[trial.contestant.rule][trial.opponent.name][trial.seed] for trial in tried]
    ends = [ended(trial.seed, value) for trial, value in zip(tried, values, strict=True)]
    return arena.standings(TINY, tried, ends)


def ended(seed: int, worst: float | None) -> Run | str:
    """A run of two rounds with this accuracy of its worst node, or the sentence in its place."""
    if worst is None:
        return "it broke"
    rows = [
        {"round": t, "accuracy_mean": worst + 0.1, "accuracy_worst": worst, "bytes": 1000} for t in (1, 2)
    ]
    return Run(
        TINY.replace(seed=seed),
        history=Table(rows),
        certificate=PROOF,
    )


def test_arena_ranks_by_worst_case_and_not_by_average() -> None:
    standings = played(
        {
            "mean": {"alie": [0.9, 0.9, 0.9], "foe": [0.1, 0.1, 0.2]},
            "median": {"alie": [0.5, 0.6, 0.5], "foe": [0.7, 0.7, 0.7]},
        },
        ["alie", "foe"],
    )
    first, second = standings.ranking()
    assert (first.contestant.rule, second.contestant.rule) == ("median", "mean")
    assert first.worst_case == pytest.approx((0.5 + 0.6 + 0.5) / 3)
    assert (first.attack, second.attack) == ("alie", "foe")
    assert first.sure.startswith("ahead in 3 of 3 seeds, sure (lead +")
    assert second.sure == ""


def test_arena_names_the_attack_of_the_worst_case_of_each_seed() -> None:
    standings = played({"mean": {"alie": [0.5, 0.9, 0.5], "foe": [0.7, 0.4, 0.9]}}, ["alie", "foe"])
    (rank,) = standings.ranking()
    assert list(rank.cases.values()) == [0.5, 0.4, 0.5]
    assert rank.attack == "alie, foe, alie"


def test_arena_rank_certainty_depends_on_the_seeds() -> None:
    close = played({"mean": {"foe": [0.5, 0.4, 0.6]}, "median": {"foe": [0.6, 0.39, 0.61]}}, ["foe"])
    assert "ahead in 2 of 3 seeds, not sure" in close.ranking()[0].sure
    two = played({"mean": {"foe": [0.5, 0.4]}, "median": {"foe": [0.6, 0.5]}}, ["foe"])
    assert two.ranking()[0].sure == "ahead in 2 of 2 seeds"
    one = played({"mean": {"foe": [0.5]}, "median": {"foe": [0.6]}}, ["foe"])
    assert one.ranking()[0].sure == "one seed: not known"
    uneven = played({"mean": {"foe": [0.5, None]}, "median": {"foe": [0.6, 0.5]}}, ["foe"])
    assert uneven.ranking()[0].sure == "one seed: not known", "only one seed was played by both"


def test_unfinished_rule_ranks_after_all_finished_rules() -> None:
    standings = played(
        {
            "mean": {"alie": [0.9], "foe": [None]},
            "krum": {"alie": [0.2], "foe": [0.3]},
            "median": {"alie": [None], "foe": [None]},
        },
        ["alie", "foe"],
    )
    assert [rank.contestant.rule for rank in standings.ranking()] == ["krum", "mean", "median"]
    text = arena.page(standings)
    assert text.count('class="unable"') == 2 * 3, "three cells of both maps"
    assert "<b>median</b> against all attacks: it broke" in text
    assert "<b>mean</b> against foe: it broke" in text


def test_arena_json_csv_and_latex_hold_the_same_numbers() -> None:
    standings = played({"nnm+trimmed_mean": {"alie": [0.75, 0.25]}, "mean": {"alie": [None, None]}}, ["alie"])
    content = standings.to_dict()
    good, bad = content["cells"]
    assert (good["rule"], good["attack"], good["method"], good["seeds"]) == (
        "nnm+trimmed_mean",
        "alie",
        "rpel",
        [0, 1],
    )
    assert (good["accuracy_worst"], good["accuracy_mean"]) == (0.5, pytest.approx(0.6))
    assert (bad["accuracy_worst"], bad["error"], bad["seeds"]) == (None, "it broke", [])
    assert [(row["rule"], row["method"], row["worst_case"]) for row in content["ranking"]] == [
        ("nnm+trimmed_mean", "rpel", 0.5), ("mean", "rpel", None),
    ]  # fmt: skip
    assert "rpel,nnm+trimmed_mean,alie,1,0.35,0.25,2000," in arena.to_csv(standings)
    assert r"nnm+trimmed\_mean & 0.500 & 0.500 \\" in arena.latex(standings)
    assert r"mean & -- & -- \\" in arena.latex(standings)


def test_impossible_arena_pair_is_named_before_any_run() -> None:
    (trial,) = arena.trials(load("mnist-30"), arena.contestants(["bulyan"]), arena.opponents(["alie"]))
    assert trial.cell.spec is None
    assert "rule 'bulyan' needs 27 models for b_hat 6" in trial.cell.error


def test_arena_without_names_runs_all_rules_and_attacks() -> None:
    rules = [one.rule for one in arena.contestants()]
    assert {"mean", "krum", "bulyan", "nnm+trimmed_mean"} <= set(rules)
    assert not {"nnm", "arc", "gossip", "cs_plus"} & set(rules), (
        "mixing and graph rules make no model of several"
    )
    attacks = [one.label for one in arena.opponents(strongest=True)]
    assert {"none", "alie", "label_flip", "strongest(of=foe)"} <= set(attacks)
    methods = [one.method for one in arena.contestants(methods=["all"])]
    assert (methods[0], len(set(methods))) == ("rpel", len(methods))
    with pytest.raises(ValueError, match=r"'gtz'.*'gts'"):
        arena.contestants(methods=["gtz"])
    with pytest.raises(ValueError, match=r"'ali'.*'alie'"):
        arena.opponents(["ali"])


def test_arena_page_loads_nothing_and_runs_no_hostile_text() -> None:
    standings = played({"mean": {"alie": [None]}}, ["alie"])
    scores = tuple(type(s)(s.contestant, s.opponent, (), "<script>x</script>") for s in standings.scores)
    text = arena.page(Standings(standings.base, standings.contestants, standings.opponents, scores))
    assert text.count("<script") == 2
    assert not re.search(r"https?:|@import|url\(", text)


@pytest.mark.integration
def test_arena_page_sorts_by_heading_and_by_rule_in_a_browser(tmp_path: Path) -> None:
    standings = played(
        {
            "median": {"alie": [0.5], "foe": [0.7], "inf": [0.6]},
            "mean": {"alie": [0.9], "foe": [0.1], "inf": [None]},
            "krum": {"alie": [0.8], "foe": [0.2], "inf": [0.3]},
        },
        ["alie", "foe", "inf"],
    )
    seen = in_chromium(arena.page(standings), DRIVE, tmp_path)
    assert seen["problems"] == []
    assert seen["byColumn"] == ["0.9", "0.8", "0.5"]
    assert seen["byColumnUp"] == ["0.5", "0.8", "0.9"]
    assert seen["byRow"] == {"attacks": ["foe", "inf", "alie"], "values": ["0.7", "0.6", "0.5"]}
    assert "median against foe: seed 0: mean 0.8000, worst 0.7000" in seen["hover"]
    assert seen["width"] <= seen["window"], "the page does not scroll sideways"


@pytest.mark.integration
def test_arena_command_writes_its_files_and_repeats_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(to_toml(TINY))
    words = ["--rules", "median,bulyan,mean", "--attacks", "foe", "--out", "out", "--json"]
    shown = []
    for _ in range(2):
        out, err = rpel("arena", "--preset", "tiny.toml", *words, capsys=capsys)
        shown.append(json.loads(out))
    assert "runs: 2, finished before: 2, cannot run: 1" in err
    assert shown[0] == shown[1]
    assert {cell["rule"] for cell in shown[0]["cells"] if cell["accuracy_worst"] is not None} == {
        "median",
        "mean",
    }
    assert all(
        (tmp_path / "out" / f"arena.{suffix}").stat().st_size > 100 for suffix in ("html", "csv", "tex")
    )
