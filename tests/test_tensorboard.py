"""Event files of TensorBoard: every round once, however often a run was stopped; never in the hash."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from rpel.runs import journal
from rpel.runs.folder import RunFolder
from rpel.simulation.api import Tick, resume, simulate
from rpel.studies.study import Study, read
from support.commands import rpel
from support.runs import TINY, CrashError, crash_after, differences, tiny

pytestmark = pytest.mark.integration

Scalars = dict[str, list[tuple[int, Any]]]
TAGS = {
    "accuracy/mean": "accuracy_mean", "accuracy/worst": "accuracy_worst",
    "accuracy/median": "accuracy_median", "loss": "loss", "grad_norm": "grad_norm",
    "realised/alpha": "alpha_realised", "realised/lambda": "lambda_realised", "consensus": "consensus",
    "diverged": "diverged", "hostile/byzantine_max": "byzantine_max", "hostile/degraded": "degraded",
    "hostile/attack_success_mean": "attack_success_mean",
    "hostile/attack_success_worst": "attack_success_worst",
}  # fmt: skip
"""What people have on their screens, and the column of metrics.jsonl that it must show."""


def accumulator(path: Path) -> Any:
    """TensorBoard's own reader of a run folder."""
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped, unused-ignore]

    return event_accumulator.EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0})


def scalars(reader: Any) -> Scalars:
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def expected(path: Path) -> Scalars:
    """What metrics.jsonl says, as event files hold it: a metric that no round has is not there."""
    rows = RunFolder(path).metrics()
    series = {
        tag: [(row["round"], pytest.approx(row[key])) for row in rows if row[key] is not None]
        for tag, key in TAGS.items()
    }
    return {tag: points for tag, points in series.items() if points}


def crashed(out: Path, **more: Any) -> Path:
    """A run that died in round 5 and was saved in round 4."""
    with pytest.raises(CrashError):
        tiny(out, progress=crash_after(5), **more)
    (path,) = out.iterdir()
    return path


def test_every_metric_of_every_round_is_there_once(tmp_path: Path) -> None:
    with_events, without = tiny(tmp_path / "a", track="tensorboard").path, tiny(tmp_path / "b").path
    assert with_events is not None
    assert without is not None
    assert with_events.name == without.name, "it is not part of the run's meaning"
    assert differences(with_events, without) == ["spec.toml"], "nothing that is computed differs"
    assert not (without / "tensorboard").exists()
    points = scalars(accumulator(with_events))
    assert points == expected(with_events)
    assert [step for step, _ in points["consensus"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in points["accuracy/worst"]] == [2, 4, 6]


def test_every_tensorboard_tag_shows_its_column(tmp_path: Path) -> None:
    """In a run in which no two columns are equal: a backdoor,
    and so many late nodes that some keep their half-step."""
    path = tiny(
        tmp_path, track="tensorboard", attack="backdoor", rule="median", no_show=0.5, byzantine=2, rounds=2
    ).path
    assert path is not None
    values_by_tag = scalars(accumulator(path))
    assert values_by_tag == expected(path)
    last = {tag: points[-1][1] for tag, points in values_by_tag.items()}
    assert last.keys() == TAGS.keys()
    assert len({value for tag, value in last.items() if tag != "diverged"}) == len(TAGS) - 1


def test_resumed_run_has_each_round_once(tmp_path: Path) -> None:
    path = crashed(
        tmp_path, track="tensorboard"
    )  # and at once again: names of event files have whole seconds
    looking_on = accumulator(path)
    assert [step for step, _ in scalars(looking_on)["consensus"]] == [1, 2, 3, 4, 5]
    resume(path)
    assert scalars(accumulator(path)) == expected(path)
    assert scalars(looking_on) == expected(path), "who looks on is told to forget what is run again"


def test_rounds_can_be_watched_as_they_pass(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(tick: Tick) -> None:
        if tick.round == 4:
            (path,) = tmp_path.iterdir()
            seen.append(len(scalars(accumulator(path))["consensus"]))

    tiny(tmp_path, track="tensorboard", progress=look)
    assert seen == [4]


def test_finished_run_is_copied_and_a_forced_one_cleared(tmp_path: Path) -> None:
    path = tiny(tmp_path).path
    assert path is not None
    assert tiny(tmp_path, track="tensorboard").reused
    assert scalars(accumulator(path)) == expected(path)
    assert len(list((path / "tensorboard").iterdir())) == 1
    tiny(tmp_path, force=True)
    assert list((path / "tensorboard").iterdir()) == []


def test_overflowed_metrics_are_infinite_in_tensorboard(tmp_path: Path) -> None:
    row = {"round": 1, "loss": sys.float_info.max, "consensus": 1.0, "seconds": 0.1}
    journal.Events(tmp_path / "tensorboard", [row]).close()
    assert scalars(accumulator(tmp_path)) == {"loss": [(1, math.inf)], "consensus": [(1, 1.0)]}


def test_sweep_writes_them_if_its_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    fields = "".join(f"{key} = {json.dumps(value)}\n" for key, value in TINY.items() if key != "byzantine")
    for track, reused in (("", False), ('track = "tensorboard"\n', True)):
        file.write_text(fields + track + "[grid]\nbyzantine = [1]\n", "utf-8")
        (result,) = Study(read(file), tmp_path / "sweep").run()
        assert result.run is not None
        assert result.run.reused == reused
        path = Path(result.row()["path"])
        assert (path / "tensorboard").exists() == reused
    assert scalars(accumulator(path)) == expected(path)
    (result,) = Study(read(file), tmp_path / "other").run()
    path = Path(result.row()["path"])
    assert scalars(accumulator(path)) == expected(path)


def test_tracker_without_its_package_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journal, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    for track in ("tensorboard", "wandb"):
        _, said = rpel("run", "quickstart", "--track", track, capsys=capsys, code=2)
        assert "is not installed: pip install" in said
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="out='runs'"):
        simulate(out=None, track="tensorboard")
