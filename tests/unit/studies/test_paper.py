"""The paper's panels: their runs are the paper's, and what is made of them at a small scale."""

import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from rpel.runs.folder import RunFolder
from rpel.simulation.methods import resolve
from rpel.spec import load, spec_hash
from rpel.studies.paper import (
    COLUMNS,
    EXTRAS,
    PANELS,
    Reproduction,
    Scale,
    Selection,
    chosen,
    find,
    fractions,
    shortened,
    sized,
    stamp,
)
from support.commands import rpel
from support.data_files import femnist, leaf_file

pytestmark = pytest.mark.integration


def listed() -> list[str]:
    """The names as the reference lists them."""
    both, sparse = ("mean", "worst"), [f"s{s}-b{b}" for s in (3, 4, 5) for b in (0, 1)]
    names = ["mnist-left", "mnist-right", "cifar10-left", "cifar10-right"]
    names += [f"fraction-{n}" for n in (1000, 10000, 100000)]
    names += [f"alie-{m}-{cell}" for m in both for cell in ["s15-b0", "s15-b3", "s15-b6", *sparse]]
    names += [f"dissensus-{m}-{cell}" for m in both for cell in sparse]
    names += [f"cifar10-alpha{a}-s{s}" for a in ("0.5", "1") for s in (6, 19)]
    names += [f"cifar10-dissensus-local{k}-{m}-s{s}" for k in (1, 3) for m in both for s in (6, 10)]
    names += ["mnist-100-b8", "mnist-30-b5", "cifar10-b2-s6", "cifar10-b2-s19"]
    names += [f"cifar10-local3-s{s}" for s in (6, 10, 19)]
    return names + [f"femnist-b{b}-local{k}" for b in (0, 3) for k in (1, 3)]


def test_sixty_names_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(rpel("reproduce", "--list", "--json", capsys=capsys)[0])
    assert sorted(row["name"] for row in shown) == sorted(listed())
    assert all(set(row) == {"name", "figure", "title"} for row in shown)
    beyond = json.loads(rpel("reproduce", "--list", "--extra", "--json", capsys=capsys)[0])
    assert {row["name"] for row in beyond} == {panel.name for panel in EXTRAS}
    assert rpel("reproduce", "--list", capsys=capsys)[0].count("\n") == 60


def test_every_run_is_valid_at_every_size() -> None:
    for panel in (*PANELS, *EXTRAS):
        for curve in panel.curves:
            spec = curve.spec()
            assert resolve(spec).pull == spec.pull, (panel.name, curve.label)
    for scale in (Scale.SMOKE, Scale.SHORT):
        for name in ("mnist-left", "cifar10-alpha0.5-s6", "femnist-b3-local3", "extra-stragglers"):
            assert all(
                resolve(cell.spec).plan.feasible for cell in sized(find(name), scale).cells if cell.spec
            )


def test_full_scale_panels_have_the_papers_sizes() -> None:
    """Sizes, seeds and schedules of docs/reference/definitions.md, section 6, and the runs of the presets."""
    seeds = {"mnist": 2, "cifar10": 3, "femnist": 2}
    sizes = {
        "mnist": (200, 25, 0.9, 1e-4), "cifar10": (2000, 50, 0.99, 1e-2), "femnist": (500, 50, 0.99, 1e-4),
    }  # fmt: skip
    for panel in PANELS:
        specs = [cell.spec for cell in sized(panel, Scale.FULL).cells if cell.spec]
        assert len(specs) == sum(seeds[spec.dataset] for spec in specs if spec.seed == 0)
        for s in specs:
            assert (s.rounds, s.batch_size, s.momentum, s.weight_decay) == sizes[s.dataset]
    presets = {"mnist-left": "mnist-100", "cifar10-left": "cifar10-20", "femnist-b3-local1": "femnist-30"}
    for name, preset in presets.items():
        alie = next(
            c.spec for c in sized(find(name), Scale.FULL).cells if c.labels["curve"] == "ALIE" and c.spec
        )
        assert spec_hash(resolve(alie).spec, {}) == spec_hash(resolve(load(preset)).spec, {})


def test_mean_and_worst_show_the_same_runs() -> None:
    def specs(name: str) -> list[Any]:
        return [cell.spec for cell in sized(find(name), Scale.FULL).cells]

    pairs = [panel.name for panel in PANELS if "-worst-" in panel.name]
    assert len(pairs) == 19
    for worst in pairs:
        assert specs(worst) == specs(worst.replace("-worst-", "-mean-"))
        assert find(worst).column == "accuracy_lowest"
    assert specs("alie-mean-s3-b0") == specs("dissensus-mean-s3-b0")


def test_short_and_partial_panels_say_what_is_missing() -> None:
    spec = load("mnist-30")
    assert (shortened(spec, 0.3).rounds, shortened(spec, 0.3).b_hat) == (60, resolve(spec).b_hat)
    left = sized(find("cifar10-left"), Scale.SHORT, Selection(part=0.05))
    assert [cell.spec.rounds for cell in left.cells if cell.spec] == [100] * 3
    assert (left.note, left.stamp) == ("SHORT: 100 of 2000 rounds, 1 of 3 seeds", "5 % of the rounds")
    part = Selection(attacks=["alie"], seeds="0", eval_every=50, part=0.25)
    (cell,) = sized(find("cifar10-alpha1-s6"), Scale.SHORT, part).cells
    assert cell.spec is not None
    assert (cell.spec.attack, cell.spec.eval_every) == ("alie", 50)
    note = sized(find("cifar10-alpha1-s6"), Scale.SHORT, part).note
    assert note == "SHORT: 500 of 2000 rounds, 1 of 3 seeds; ALIE only; seed 0"
    rivals = sized(find("alie-mean-s3-b1"), Scale.FULL, Selection(methods=["rpel", "cs-plus"], seeds="1"))
    found = [(c.spec.method, c.spec.seed) for c in rivals.cells if c.spec]
    assert found == [("rpel", 1), ("cs-plus", 1)]
    assert rivals.note.endswith("1 of 2 seeds, bands from lowest to highest; RPEL, CS+ only; seed 1")
    for selection, words in (
        (Selection(part=2), r"^part 2 .* 0\.1"), (Selection(attacks=["gaussian"]), "'gaussian'"),
        (Selection(seeds="0,x"), r"seeds '0,x'.*0-4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            sized(find("mnist-left"), Scale.SHORT if selection.part is None else Scale.FULL, selection)


@pytest.mark.parametrize("scale", Scale)
def test_runs_of_a_panel_are_stamped_by_their_sizes_and_rounds(scale: Scale) -> None:
    for panel in (*PANELS, *EXTRAS):
        for cell in sized(panel, scale).cells:
            assert cell.spec is not None
            words = stamp(cell.spec)
            assert {"smoke": words == "SMOKE", "short": words.endswith("% of the rounds"), "full": not words}[
                scale
            ]
    assert stamp(load("quickstart")) == stamp(load("mnist-30").replace(nodes=31, rounds=5)) == ""


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
    table = fractions(find(f"fraction-{nodes}"))
    tenth = table[table["byzantine"] == nodes // 10].set_index("pull")
    pairs = [tuple(tenth.loc[s, ["b_hat_median", "b_hat_99"]]) for s in (10, 20, 30, 40, 50)]
    assert pairs == expected
    assert set(table["byzantine"] * 100 // nodes) == {2, 4, 6, 8, 10}
    seen = table[[f"simulation_{i}" for i in range(1, 6)]]
    assert (table["mean"] * (table["pull"] + 1)).tolist() == pytest.approx(seen.mean(axis=1).tolist())
    assert (table["low"] <= table["mean"]).all()
    assert ((seen.mean(axis=1) - table["b_hat_median"]).abs() <= 1.5).all()


def test_unknown_panel_or_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'mnist-rigth'.*'mnist-right'"):
        chosen(["mnist-rigth"])
    with pytest.raises(ValueError, match=r"'ful'.*'full'"):
        Reproduction(["mnist-right"], "ful", tmp_path)
    with pytest.raises(ValueError, match=r"panel.*all"):
        Reproduction([], "smoke", tmp_path)


# --- made ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Mean and worst of one comparison, and a panel of Figure 3, by smoke."""
    out = tmp_path_factory.mktemp("made")
    names = ["alie-worst-s3-b1", "alie-mean-s3-b1", "fraction-1000"]
    work = Reproduction(names, "smoke", out, threads=1)
    assert len(work.study.states) == 4, "mean and worst are run once"
    return out, work.run()


def test_files_are_there_and_stamped(made: tuple[Path, list[dict[str, Any]]]) -> None:
    out, entries = made
    assert [entry["name"] for entry in entries] == ["alie-worst-s3-b1", "alie-mean-s3-b1", "fraction-1000"]
    index = json.loads((out / "index.json").read_text("utf-8"))
    assert {entry["name"]: entry for entry in index} == {entry["name"]: entry for entry in entries}
    for entry in entries:
        assert all((out / file).stat().st_size > 500 for file in entry["files"])
        assert ">SMOKE</text>" in (out / f"{entry['name']}.svg").read_text("utf-8")
        assert (out / f"{entry['name']}.png").read_bytes().startswith(b"\x89PNG")
    for number in (3, 4, 5):
        drawn = (out / f"figure-{number}.svg").read_text("utf-8")
        assert ">SMOKE</text>" in drawn
        assert "not run yet" in drawn, "the panels that exist are shown"


def test_csv_holds_the_runs_numbers(made: tuple[Path, list[dict[str, Any]]]) -> None:
    out, entries = made
    table = pandas.read_csv(out / "alie-worst-s3-b1.csv")
    assert set(table["curve"]) == {"RPEL", "CS+", "GTS", "ClippedGossip"}
    assert {f"runs/{run}" for run in table["run"]} == set(entries[0]["runs"])
    assert set(table["round"]) == {0, 2, 4, 6, 8, 10}
    first = table[table["round"] == 0]
    assert (first["bytes"] == 0).all()
    assert first["accuracy_worst"].between(0, 0.3).all()
    for _, row in table[table["round"] > 0].iterrows():
        metrics = RunFolder(out / "runs" / row["run"]).metrics()
        told = metrics[row["round"] - 1]
        assert row[["accuracy_mean", "accuracy_worst"]].tolist() == [
            told["accuracy_mean"],
            told["accuracy_worst"],
        ]
        assert row["bytes"] == sum(line["bytes"] for line in metrics[: row["round"]])
        assert row["accuracy_lowest"] >= row["accuracy_worst"]
    last = table[table["round"] == 10]
    assert (last["accuracy_lowest"] == last["accuracy_worst"]).all()


def test_second_call_repeats_nothing(
    made: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, entries = made
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}
    files = {path: path.read_bytes() for path in out.glob("alie-mean-s3-b1.*")}
    command = ("reproduce", "alie-mean-s3-b1", "--scale", "smoke", "--out", str(out), "--json")
    assert json.loads(rpel(*command, capsys=capsys)[0])["panels"] == [entries[1]]
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")} == before
    assert {path: path.read_bytes() for path in out.glob("alie-mean-s3-b1.*")} == files
    assert len(json.loads((out / "index.json").read_text("utf-8"))) == 3


@pytest.mark.full
def test_femnist_is_made_from_files_in_leaf_format(tmp_path: Path) -> None:
    """The paper's network, nodes and batches, for a round; real FEMNIST would come in the same files."""
    writers = {f"w{k}": [*range(62), *range(62)] for k in range(25)}
    folder = femnist(tmp_path, leaf_file(writers, pixel=1), leaf_file({"t": [0, 61]}))
    options: dict[str, Any] = {"selection": Selection(part=0.002), "data_dir": str(folder)}
    (entry,) = Reproduction(["femnist-b0-local1"], "short", tmp_path / "out", **options).run()
    assert entry["note"] == "SHORT: 1 of 500 rounds, 1 of 2 seeds"
    before, row = (row for _, row in pandas.read_csv(tmp_path / "out" / "femnist-b0-local1.csv").iterrows())
    assert (before["round"], row["round"]) == (0, 1)
    assert row["run"].startswith("short-femnist-n30-b0-s6-rpel-none-")
    assert row["bytes"] == 30 * 6 * 4 * 2_368_318


def test_impossible_panel_does_not_stop_the_others(tmp_path: Path) -> None:
    work = Reproduction(["femnist-b0-local1", "fraction-1000"], "full", tmp_path, data_dir=str(tmp_path))
    assert [entry["name"] for entry in work.run()] == ["fraction-1000"]
    assert "femnist" in work.missing["femnist-b0-local1"]
    assert "SMOKE" not in (tmp_path / "fraction-1000.svg").read_text("utf-8")
    with pytest.raises(ValueError, match="femnist"):
        Reproduction(["femnist-b0-local1"], "full", tmp_path, data_dir=str(tmp_path))
