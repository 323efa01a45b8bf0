"""The paper's panels: all sixty, valid, sharing their runs; Figure 3's numbers;
and smoke figures from end to end."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpel.experiments import reproduce
from rpel.experiments.drawings import fraction_rows, read_rows, save
from rpel.experiments.panels import COLUMNS, EXTRAS, PANELS, Scale, chosen, find, scale_of
from rpel.experiments.reproduce import Selection, shortened, sized
from rpel.runs.folder import RunFolder
from rpel.simulation.loop import Tick
from rpel.simulation.methods import resolve
from rpel.spec import load, spec_hash
from support.commands import rpel
from support.data_files import femnist, leaf_file

pytestmark = pytest.mark.integration


def listed() -> list[str]:
    """The sixty names, spelled out."""
    sparse = [f"s{s}-b{b}" for s in (3, 4, 5) for b in (0, 1)]
    both = ("mean", "worst")
    names = ["mnist-left", "mnist-right", "cifar10-left", "cifar10-right"]
    names += [f"fraction-{n}" for n in (1000, 10000, 100000)]
    names += [f"alie-{m}-{cell}" for m in both for cell in ["s15-b0", "s15-b3", "s15-b6", *sparse]]
    names += [f"dissensus-{m}-{cell}" for m in both for cell in sparse]
    names += [f"cifar10-alpha{a}-s{s}" for a in ("0.5", "1") for s in (6, 19)]
    names += [f"cifar10-dissensus-local{k}-{m}-s{s}" for k in (1, 3) for m in both for s in (6, 10)]
    names += ["mnist-100-b8", "mnist-30-b5", "cifar10-b2-s6", "cifar10-b2-s19"]
    names += [f"cifar10-local3-s{s}" for s in (6, 10, 19)]
    return names + [f"femnist-b{b}-local{k}" for b in (0, 3) for k in (1, 3)]


# --- the panels ---------------------------------------------------------------------------------------------


def test_sixty_names_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(rpel("reproduce", "--list", "--json", capsys=capsys)[0])
    assert sorted(row["name"] for row in shown) == sorted(listed())
    assert len(shown) == 60
    assert all(set(row) == {"name", "figure", "title"} for row in shown)
    beyond = json.loads(rpel("reproduce", "--list", "--extra", "--json", capsys=capsys)[0])
    assert {row["name"] for row in beyond} == {panel.name for panel in EXTRAS}
    assert all(row["name"].startswith("extra-") for row in beyond)
    assert rpel("reproduce", "--list", capsys=capsys)[0].count("\n") == 60


def test_every_run_is_valid_at_every_size() -> None:
    for panel in (*PANELS, *EXTRAS):
        for curve in panel.curves:
            spec = curve.spec()
            assert resolve(spec).pull == spec.pull, (panel.name, curve.label)
    for scale in (Scale.SMOKE, Scale.SHORT):
        for name in ("mnist-left", "cifar10-alpha0.5-s6", "femnist-b3-local3", "extra-stragglers"):
            for runs in sized(find(name), scale).runs:
                assert resolve(runs[0]).plan.feasible, (scale, name)


def test_full_scale_panels_have_the_papers_sizes() -> None:
    """Sizes, seeds and schedules of docs/reference/definitions.md, section 6, and the runs of the presets."""
    seeds = {"mnist": 2, "cifar10": 3, "femnist": 2}
    sizes = {
        "mnist": (200, 25, 0.9, 1e-4),
        "cifar10": (2000, 50, 0.99, 1e-2),
        "femnist": (500, 50, 0.99, 1e-4),
    }
    for panel in PANELS:
        for runs in sized(panel, Scale.FULL).runs:
            s = runs[0]
            assert len(runs) == seeds[s.dataset]
            assert (s.rounds, s.batch_size, s.momentum, s.weight_decay) == sizes[s.dataset]
    for name, preset in (
        ("mnist-left", "mnist-100"),
        ("cifar10-left", "cifar10-20"),
        ("femnist-b3-local1", "femnist-30"),
    ):
        alie = sized(find(name), Scale.FULL).runs[2][0]
        assert spec_hash(resolve(alie).spec, {}) == spec_hash(resolve(load(preset)).spec, {})


def test_mean_and_worst_show_the_same_runs() -> None:
    pairs = [panel for panel in PANELS if "-worst-" in panel.name]
    assert len(pairs) == 19
    for worst in pairs:
        mean = find(worst.name.replace("-worst-", "-mean-"))
        assert (worst.measure, mean.measure) == ("worst", "mean")
        assert sized(worst, Scale.FULL).runs == sized(mean, Scale.FULL).runs
    assert (
        sized(find("alie-mean-s3-b0"), Scale.FULL).runs
        == sized(find("dissensus-mean-s3-b0"), Scale.FULL).runs
    )


def test_short_keeps_the_plan() -> None:
    spec = load("mnist-30")
    short = shortened(spec, 0.3)
    assert short.rounds == 60
    assert short.b_hat == resolve(spec).b_hat
    left = sized(find("cifar10-left"), Scale.SHORT, Selection(part=0.05))
    assert [len(runs) for runs in left.runs] == [1, 1, 1]
    assert left.runs[0][0].rounds == 100
    assert left.note == "SHORT: 100 of 2000 rounds, 1 of 3 seeds"
    assert left.runs[0][0].name == "short-cifar10-n20-b3-s6-rpel-sf"
    with pytest.raises(ValueError, match=r"^part 2 .* 0\.1"):
        sized(find("cifar10-left"), Scale.SHORT, Selection(part=2))


def test_partial_panel_is_stamped_with_its_share() -> None:
    part = Selection(attacks=["alie"], seeds="0", eval_every=50, part=0.25)
    made = sized(find("cifar10-alpha1-s6"), Scale.SHORT, part)
    assert [[spec.attack for spec in runs] for runs in made.runs] == [["alie"]]
    assert made.runs[0][0].eval_every == 50
    assert made.note == "SHORT: 500 of 2000 rounds, 1 of 3 seeds; ALIE only; seed 0"
    rivals = sized(find("alie-mean-s3-b1"), Scale.FULL, Selection(methods=["rpel", "cs-plus"], seeds="1"))
    assert [[(spec.method, spec.seed) for spec in runs] for runs in rivals.runs] == [
        [("rpel", 1)],
        [("cs-plus", 1)],
    ]
    assert rivals.note.endswith("1 of 2 seeds, bands from lowest to highest; RPEL, CS+ only; seed 1")
    whole = sized(find("mnist-left"), Scale.FULL)
    assert "only" not in whole.note
    assert "of 2 seeds" not in whole.note
    with pytest.raises(ValueError, match="'gaussian'"):
        sized(find("mnist-left"), Scale.FULL, Selection(attacks=["gaussian"]))
    with pytest.raises(ValueError, match=r"seeds '0,x'.*0-4"):
        sized(find("mnist-left"), Scale.FULL, Selection(seeds="0,x"))


@pytest.mark.parametrize("scale", Scale)
def test_runs_of_a_panel_are_recognised_by_their_sizes_and_rounds(scale: Scale) -> None:
    for panel in (*PANELS, *EXTRAS):
        assert {scale_of(run) for runs in sized(panel, scale).runs for run in runs} <= {scale}, panel.name


def test_run_that_no_panel_has_is_at_full_size() -> None:
    assert scale_of(load("quickstart")) is Scale.FULL
    assert scale_of(load("mnist-30").replace(nodes=31, rounds=5)) is Scale.FULL


def test_figures_have_their_places() -> None:
    for number, columns in COLUMNS.items():
        together = [panel for panel in PANELS if panel.number == f"figure-{number}"]
        assert len(together) % columns == 0, number
        assert len({panel.figure for panel in together}) == 1


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (1000, [(7, 8), (10, 11), (12, 14), (14, 16), (16, 18)]),
        (10_000, [(7, 9), (11, 12), (13, 15), (16, 18), (18, 20)]),
        (100_000, [(8, 9), (12, 13), (14, 16), (17, 19), (19, 21)]),
    ],
)
def test_figure_3_agrees_with_the_reference(nodes: int, expected: list[tuple[int, int]]) -> None:
    rows = fraction_rows(find(f"fraction-{nodes}"))
    tenth = {row["pull"]: row for row in rows if row["byzantine"] == nodes // 10}
    assert [(tenth[s]["b_hat_median"], tenth[s]["b_hat_99"]) for s in (10, 20, 30, 40, 50)] == expected
    assert {row["byzantine"] * 100 // nodes for row in rows} == {2, 4, 6, 8, 10}
    for row in rows:
        seen = [row[f"simulation_{i}"] for i in range(1, 6)]
        assert row["mean"] == pytest.approx(sum(seen) / 5 / (row["pull"] + 1))
        assert row["low"] <= row["mean"] <= row["high"]
        assert abs(sum(seen) / 5 - row["b_hat_median"]) <= 1.5


def test_unknown_panel_or_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'mnist-rigth'.*'mnist-right'"):
        chosen(["mnist-rigth"])
    with pytest.raises(ValueError, match=r"'ful'.*'full'"):
        reproduce.prepare(["mnist-right"], "ful", tmp_path)
    with pytest.raises(ValueError, match=r"panel.*all"):
        reproduce.prepare([], "smoke", tmp_path)


# --- made ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Mean and worst of one comparison, and a panel of Figure 3, by smoke."""
    out = tmp_path_factory.mktemp("made")
    work = reproduce.prepare(
        ["alie-worst-s3-b1", "alie-mean-s3-b1", "fraction-1000"], "smoke", out, threads=1
    )
    assert len(work.specs) == 4, "mean and worst are run once"
    needed = reproduce.seconds_needed(work)
    assert set(needed) == set(work.specs)
    assert all(seconds > 0 for seconds in needed.values())
    return out, reproduce.make(work, needed)


def test_files_are_there_and_stamped(made: tuple[Path, list[dict[str, Any]]]) -> None:
    out, entries = made
    assert [entry["name"] for entry in entries] == ["alie-worst-s3-b1", "alie-mean-s3-b1", "fraction-1000"]
    assert json.loads((out / "index.json").read_text("utf-8")) == entries
    for entry in entries:
        for file in entry["files"]:
            assert (out / file).stat().st_size > 500
        assert "SMOKE" in (out / f"{entry['name']}.svg").read_text("utf-8")
        assert entry["note"].startswith("SMOKE")
        assert (out / f"{entry['name']}.png").read_bytes().startswith(b"\x89PNG")
    for number in (3, 4, 5):
        assert "SMOKE" in (out / f"figure-{number}.svg").read_text("utf-8")


def test_csv_holds_the_runs_numbers(made: tuple[Path, list[dict[str, Any]]]) -> None:
    out, entries = made
    rows = read_rows(out / "alie-worst-s3-b1.csv")
    assert {row["curve"] for row in rows} == {"RPEL", "CS+", "GTS", "ClippedGossip"}
    assert {f"runs/{row['run']}" for row in rows} == set(entries[0]["runs"])
    assert {row["round"] for row in rows} == {0, 2, 4, 6, 8, 10}
    assert all(row["bytes"] == 0 and 0 <= row["accuracy_worst"] <= 0.3 for row in rows if row["round"] == 0)
    for row in rows:
        if row["round"] == 0:
            continue
        metrics = RunFolder(out / "runs" / row["run"]).metrics()
        told = metrics[row["round"] - 1]
        for key in ("accuracy_mean", "accuracy_worst"):
            assert row[key] == told[key]
        assert row["bytes"] == sum(line["bytes"] for line in metrics[: row["round"]])
        assert row["accuracy_lowest"] >= row["accuracy_worst"]
    assert all(row["accuracy_lowest"] == row["accuracy_worst"] for row in rows if row["round"] == 10)


def test_short_figures_are_stamped_too(made: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    rows = read_rows(made[0] / "alie-mean-s3-b1.csv")
    save(find("alie-mean-s3-b1"), rows, "60 of 200 rounds", tmp_path / "short", Scale.SHORT)
    save(find("alie-mean-s3-b1"), rows, "200 rounds, 2 seeds", tmp_path / "full")
    assert ">SHORT</text>" in (tmp_path / "short.svg").read_text("utf-8")
    assert 'class="stamp"' not in (tmp_path / "full.svg").read_text("utf-8")


def test_paper_style_adds_a_pdf_one_column_wide(
    made: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    save(
        find("alie-mean-s3-b1"),
        read_rows(made[0] / "alie-mean-s3-b1.csv"),
        "a note",
        tmp_path / "p",
        style="paper",
    )
    width = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", (tmp_path / "p.pdf").read_bytes())
    assert width is not None
    assert float(width[1]) == pytest.approx(3.4 * 72, abs=0.1)
    assert "prefers-color-scheme" in (tmp_path / "p.svg").read_text("utf-8"), (
        "beside it the figures for screens"
    )


def test_second_call_repeats_nothing(
    made: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, entries = made
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}
    csv = (out / "alie-mean-s3-b1.csv").read_bytes()
    picture = (out / "alie-mean-s3-b1.svg").read_bytes()
    shown, _ = rpel(
        "reproduce", "alie-mean-s3-b1", "--scale", "smoke", "--out", str(out), "--json", capsys=capsys
    )
    assert json.loads(shown)["panels"] == [entries[1]]
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")} == before
    assert (out / "alie-mean-s3-b1.csv").read_bytes() == csv
    assert (out / "alie-mean-s3-b1.svg").read_bytes() == picture
    assert len(json.loads((out / "index.json").read_text("utf-8"))) == 3


@pytest.mark.parametrize("seconds", [1000.0, 1.0], ids=["long", "short"])
def test_log_is_told_of_the_tenths_of_long_runs_alone(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "seconds_needed", lambda work: dict.fromkeys(work.open, seconds))
    arguments = ("femnist-b0-local1", "--out", str(tmp_path), "--threads", "1")
    _, log = rpel("reproduce", *arguments, capsys=capsys)
    assert len(re.findall(r"round \d+ of 10", log)) == (10 if seconds == 1000 else 0)
    assert "" not in log.splitlines()


def test_ctrl_c_in_the_last_round_of_a_run_stops_the_rest(tmp_path: Path) -> None:
    """A run obeys between rounds, and after its last there is nothing left to obey: the reproduction must."""

    def tick(t: Tick) -> None:
        if t.round == t.rounds:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        reproduce.make(reproduce.prepare(["extra-b-hat"], "smoke", tmp_path), progress=tick)
    (run,) = tmp_path.glob("runs/*")
    assert (run / "certificate.json").is_file()


def stopper(after: int) -> Callable[[Tick], None]:
    """Ctrl-C after so many rounds."""
    seen: list[int] = []

    def tick(t: Tick) -> None:
        seen.append(t.round)
        if len(seen) == after:
            raise KeyboardInterrupt

    return tick


def test_interrupted_reproduction_keeps_finished_runs(tmp_path: Path) -> None:
    names = ["femnist-b0-local1", "extra-b-hat"]
    with pytest.raises(KeyboardInterrupt):
        reproduce.make(reproduce.prepare(names, "smoke", tmp_path), progress=stopper(after=14))
    assert (tmp_path / "femnist-b0-local1.svg").is_file()
    assert not (tmp_path / "extra-b-hat.svg").exists()
    work = reproduce.prepare(names[:1], "smoke", tmp_path)
    assert not work.open
    assert reproduce.make(work)[0]["name"] == names[0]


@pytest.mark.full
def test_femnist_is_made_from_files_in_leaf_format(tmp_path: Path) -> None:
    """The paper's network, nodes and batches, for a round; real FEMNIST would come in the same files."""
    writers = {f"w{k}": [*range(62), *range(62)] for k in range(25)}
    folder = femnist(tmp_path, leaf_file(writers, pixel=1), leaf_file({"t": [0, 61]}))
    part = Selection(part=0.002)
    work = reproduce.prepare(
        ["femnist-b0-local1"], "short", tmp_path / "out", selection=part, data_dir=str(folder)
    )
    (entry,) = reproduce.make(work)
    assert entry["note"] == "SHORT: 1 of 500 rounds, 1 of 2 seeds"
    before, row = read_rows(tmp_path / "out" / "femnist-b0-local1.csv")
    assert (before["round"], row["round"]) == (0, 1)
    assert row["run"].startswith("short-femnist-n30-b0-s6-rpel-none-")
    assert row["bytes"] == 30 * 6 * 4 * 2_368_318


def test_impossible_panel_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(run: Any, *rest: Any) -> Any:
        raise ValueError(f"{run.spec.dataset} is not here")

    monkeypatch.setattr(reproduce, "gather", gather)
    work = reproduce.prepare(["femnist-b0-local1", "fraction-1000"], "full", tmp_path)
    assert work.missing == {"femnist-b0-local1": "femnist is not here"}
    assert [entry["name"] for entry in reproduce.make(work)] == ["fraction-1000"]
    assert "SMOKE" not in (tmp_path / "fraction-1000.svg").read_text("utf-8")
    with pytest.raises(ValueError, match="femnist is not here"):
        reproduce.prepare(["femnist-b0-local1"], "full", tmp_path)
