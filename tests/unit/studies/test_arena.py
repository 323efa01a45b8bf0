"""The arena: ranks are worst cases, what cannot run says why, and page, table and JSON say the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import rpel as package
from rpel.runs.certificate import Certificate
from rpel.runs.run import Run
from rpel.spec import Request, load, to_toml
from rpel.studies import arena
from rpel.studies.arena import Standings
from rpel.studies.study import Result, Results, Study
from support.commands import rpel

TINY = Request(
    name="tiny", model="linear", nodes=8, byzantine=1, pull=4, b_hat=1, rounds=2, eval_every=2, eval_size=50
)
PROOF = Certificate({}, "plan", True, 0, [], [], 0, 0, {}, 1, {})


def played(rules: dict[str, dict[str, list[float | None]]], error: str = "it broke") -> Standings:
    """Standings made of worst-node accuracies, a number a seed; None: that run failed."""
    results = []
    for rule, by_attack in rules.items():
        for attack, values in by_attack.items():
            for seed, worst in enumerate(values):
                labels = {"method": "rpel", "rule": rule, "attack": attack, "seed": seed}
                if worst is None:
                    results.append(Result(labels, None, error, "failed"))
                else:
                    results.append(Result(labels, ended(seed, worst)))
    return Standings(TINY, Results(results))


def ended(seed: int, worst: float) -> Run:
    """A run of two rounds with this accuracy of its worst node."""
    row: dict[str, Any] = dict.fromkeys(("loss", "consensus"), 0.1) | {"messages": 1, "seconds": 0.1}
    row |= {"accuracy_mean": worst + 0.1, "accuracy_worst": worst, "accuracy_median": worst, "bytes": 1000}
    return Run(TINY.replace(seed=seed), rows=[{"round": t, **row} for t in (1, 2)], certificate=PROOF)


def test_arena_ranks_by_worst_case_and_not_by_average() -> None:
    first, second = played(
        {
            "mean": {"alie": [0.9, 0.9, 0.9], "foe": [0.1, 0.1, 0.2]},
            "median": {"alie": [0.5, 0.6, 0.5], "foe": [0.7, 0.7, 0.7]},
        }
    ).ranking
    assert (first.rule, second.rule) == ("median", "mean")
    assert first.worst_case == pytest.approx((0.5 + 0.6 + 0.5) / 3)
    assert (first.attack, second.attack) == ("alie", "foe")
    assert first.ahead == "in 3 of 3 seeds (+0.300 to +0.500)"
    assert second.ahead == ""


def test_arena_names_the_attack_of_the_worst_case_of_each_seed() -> None:
    (rank,) = played({"mean": {"alie": [0.5, 0.9, 0.5], "foe": [0.7, 0.4, 0.9]}}).ranking
    assert list(rank.cases.values()) == [0.5, 0.4, 0.5]
    assert rank.attack == "alie, foe, alie"


def test_leads_are_paired_by_the_seeds_that_both_played() -> None:
    uneven = played({"mean": {"foe": [0.5, None]}, "median": {"foe": [0.6, 0.5]}})
    assert uneven.ranking[0].ahead == "in 1 of 1 seed (+0.100)"


def test_unfinished_rule_ranks_after_all_finished_rules() -> None:
    standings = played(
        {
            "mean": {"alie": [0.9], "foe": [None]},
            "krum": {"alie": [0.2], "foe": [0.3]},
            "median": {"alie": [None], "foe": [None]},
        }
    )
    assert [rank.rule for rank in standings.ranking] == ["krum", "mean", "median"]
    text = standings.page()
    assert text.count("it broke") == 1, "an error that cells share is shown once"
    assert "rule median, attack alie" in text


def test_arena_json_csv_and_latex_hold_the_same_numbers(tmp_path: Path) -> None:
    standings = played(
        {"nnm+trimmed_mean": {"alie": [0.75, 0.25]}, "krum": {"alie": [0.25]}, "mean": {"alie": [None]}}
    )
    content = standings.to_dict()
    good, _, bad = content["cells"]
    expected = {"rule": "nnm+trimmed_mean", "attack": "alie", "method": "rpel", "seeds": [0, 1]}
    assert good | expected == good
    assert (good["accuracy_worst"], good["accuracy_mean"]) == (0.5, pytest.approx(0.6))
    assert (bad["accuracy_worst"], bad["error"], bad["seeds"]) == (None, "it broke", [])
    assert [(row["rule"], row["method"], row["worst_case"]) for row in content["ranking"]] == [
        ("nnm+trimmed_mean", "rpel", 0.5), ("krum", "rpel", 0.25), ("mean", "rpel", None),
    ]  # fmt: skip
    files = {path.name: path.read_text("utf-8") for path in standings.write(tmp_path)}
    assert "rpel,nnm+trimmed_mean,alie,1,done,0.35,0.25," in files["arena.csv"]
    best, *others = (line for line in files["arena.tex"].splitlines() if "&" in line and "alie" not in line)
    assert best == r"nnm+trimmed\_mean & \textbf{0.500} & \textbf{0.500} \\"
    assert others == [r"krum & 0.250 & 0.250 \\", r"mean & -- & -- \\"]


def test_impossible_arena_pair_is_named_before_any_run(tmp_path: Path) -> None:
    cells = arena.cells(load("mnist-30").replace(dataset="mnist-sample"), [("rpel", "bulyan")], ["alie"])
    (job,) = Study(cells, tmp_path, together=False).states
    assert (job.status, "rule 'bulyan' needs 27 models for b_hat 6" in job.error) == ("failed", True)


def test_arena_without_names_runs_all_rules_and_attacks() -> None:
    rules = {rule for _, rule in arena.contestants()}
    assert {"mean", "krum", "bulyan", "nnm+trimmed_mean"} <= rules
    assert not {"nnm", "arc", "gossip", "cs_plus"} & rules, "they make no model of several"
    assert {"none", "alie", "label_flip", "strongest(of=foe)"} <= set(arena.opponents(strongest=True))
    methods = [method for method, _ in arena.contestants(methods=["all"])]
    assert (methods[0], len(set(methods))) == ("rpel", len(methods))
    with pytest.raises(ValueError, match=r"'gtz'.*'gts'"):
        arena.contestants(methods=["gtz"])
    with pytest.raises(ValueError, match=r"'ali'.*'alie'"):
        arena.opponents(["ali"])


def test_arena_page_loads_nothing_and_runs_no_hostile_text() -> None:
    text = played({"mean": {"alie": [None]}}, "<script>x</script>").page()
    assert text.count("<script") == 1
    assert not re.search(r"https?:|@import|url\(", text)


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
    done = {cell["rule"] for cell in shown[0]["cells"] if cell["accuracy_worst"] is not None}
    assert done == {"median", "mean"}
    assert all(Path(f"out/arena.{suffix}").stat().st_size > 100 for suffix in ("html", "csv", "tex"))


@pytest.mark.integration
def test_arena_takes_objects_from_python(tmp_path: Path) -> None:
    def middle(x: Any) -> Any:
        return (x.min(0) + x.max(0)) / 2

    fields = {key: getattr(TINY, key) for key in ("model", "nodes", "byzantine", "pull", "rounds")}
    standings = package.arena(rules=["median", middle], attacks=["foe"], out=tmp_path, **fields)
    assert {rank.rule for rank in standings.ranking if rank.cases} == {"median", "middle"}
    assert (tmp_path / "arena.html").is_file()
