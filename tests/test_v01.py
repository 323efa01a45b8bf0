"""Version 0.1 stays readable: its hashes, its run folders (finished, unfinished, overflowed)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rpel.config.spec import Spec, load, load_folder, spec_hash
from rpel.report.collect import collect
from rpel.simulation.api import resume
from rpel.simulation.checkpoint import RunFolder
from rpel.simulation.methods import settle
from rpel.simulation.result import Result
from rpel.types import Guarantee, Scale, Seal
from support.paths import ROOT

OLD = ROOT / "tests" / "data" / "v0.1"
HASHES = json.loads((OLD / "hashes.json").read_text())


def folder(kind: str) -> Path:
    (path,) = (OLD / kind).iterdir()
    return path


@pytest.mark.parametrize("name", HASHES)
def test_a_preset_has_the_hash_it_had(name: str) -> None:
    then = OLD / f"{name}.toml"  # of a preset that is another today
    assert spec_hash(settle(load(then if then.is_file() else name)), {"a.gz": "0" * 64}) == HASHES[name]


def test_a_field_added_later_changes_the_hash_only_where_it_is_not_its_default() -> None:
    spec = settle(Spec())
    assert "scale" not in spec.identity()
    assert spec.identity().keys() <= Spec.model_fields.keys()


@pytest.mark.parametrize("kind", ["finished", "overflowed"])
def test_a_finished_run_is_read_and_resuming_it_returns_it(kind: str) -> None:
    path = folder(kind)
    result = Result.load(path)
    assert Guarantee(result.certificate["guarantee"]) == {"finished": "plan", "overflowed": "none"}[kind]
    assert result.certificate["guarantee"] in ("plan", "none")
    assert len(result.history) == result.spec.rounds
    assert result.models.shape[0] == result.spec.nodes - result.spec.byzantine
    before = {file: file.read_bytes() for file in path.iterdir() if file.is_file()}
    assert resume(path).reused
    assert {file: file.read_bytes() for file in path.iterdir() if file.is_file()} == before


def test_numbers_that_overflowed_are_none() -> None:
    path = folder("overflowed")
    assert "1.797" in (path / "metrics.jsonl").read_text()
    last = Result.load(path).final
    assert last["loss"] is None
    assert last["diverged"] is None, "version 0.1 did not count them"
    assert 0 <= last["accuracy_mean"] <= 1


def test_an_unfinished_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = shutil.copytree(folder("unfinished"), tmp_path / folder("unfinished").name)
    begun = RunFolder(path).metrics()
    ((saved, _),) = RunFolder(path).checkpoints
    rounds: list[int] = []
    result = resume(path, progress=lambda tick: rounds.append(tick.round))
    assert rounds == list(range(saved + 1, result.spec.rounds + 1))
    assert result.history.rows()[:saved] == begun[:saved]
    assert np.isfinite(result.models).all()


def test_a_folder_without_a_digest_is_not_sealed_and_never_edited() -> None:
    for kind in ("finished", "overflowed"):
        assert RunFolder(folder(kind)).edited(whole=True) == (Seal.NOT_SEALED, [])


def test_all_are_reported() -> None:
    found = collect([OLD])
    assert (len(found.runs), len(found.unfinished), len(found.broken)) == (2, 1, 0)


@pytest.mark.parametrize(("name", "scale"), [("smoke-n30", "smoke"), ("short-mnist", "short"), ("mnist-30", "full")])
def test_the_scale_of_a_run_is_read_from_its_name_where_no_field_says_it(name: str, scale: str, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(f'name = "{name}"\n')
    assert load_folder(tmp_path).scale is Scale(scale)
    (tmp_path / "spec.toml").write_text(f'name = "{name}"\nscale = "full"\n')
    assert load_folder(tmp_path).scale is Scale.FULL
