"""Data that real owners hold: what is read, whose it is, and that a preset trains one node an owner."""

import io
import lzma
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpel import simulate
from rpel.data import DataError, federations, largest_owners, load
from rpel.data.federations import CHARACTERS, parse_heart, parse_reviews, parse_shakespeare
from rpel.data.sources import SOURCES
from rpel.spec import load as load_spec
from support.data_files import put


def test_missing_heart_values_become_public_constants() -> None:
    full = "63,1,1,145,233,1,2,150,0,2.3,3,0,6,0"
    bare = "54,0,4,0,0,?,?,?,?,?,?,?,?,2"
    x, y = parse_heart(f"{full}\n{bare}\n")
    assert y.tolist() == [0, 1]
    assert x[1].tolist() == [0] * 6 + [-1, 0, 0] + [0, 0, 0, 1] + [0] * 9
    assert np.array_equal(parse_heart(f"{bare}\n{bare}\n")[0][1], x[1]), (
        "a patient's numbers do not depend on others"
    )
    with pytest.raises(DataError, match="13 findings"):
        parse_heart("1,2,3\n")


def test_hospitals_keep_their_patients_apart(shared_data: Path) -> None:
    heart = load("heart-disease", shared_data)
    assert heart.writers is not None
    assert heart.test_writers is not None
    both = np.bincount(heart.writers) + np.bincount(heart.test_writers)
    assert both.tolist() == [303, 294, 123, 200]
    assert (heart.shape, heart.classes, heart.mean) == ((federations.HEART_FEATURES,), 2, None)
    assert np.isfinite(heart.train_x).all()
    assert np.abs(heart.train_x).max() < 10


def test_changed_patient_is_refused(tmp_path: Path, shared_data: Path) -> None:
    files = dict.fromkeys(SOURCES["heart-disease"].content, b"")
    source = shared_data / "heart-disease/processed.cleveland.data"
    files["heart-disease/processed.cleveland.data"] = source.read_bytes().replace(b"63.0", b"64.0", 1)
    with pytest.raises(DataError, match=r"processed\.cleveland\.data"):
        load("heart-disease", put(files, tmp_path))


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return lzma.compress(buffer.getvalue())


def test_reviews_are_numbered_by_their_words_alone_and_belong_to_their_department(tmp_path: Path) -> None:
    lines = {"toys": b"1\tgood toy\n0\tbad \xff toy\n", "books": b"1\tgood book\n"}
    packed = archive(
        {f"x/{name}.task.{split}": text for name, text in lines.items() for split in ("train", "test")}
    )
    (x, y, owners), (test_x, _, test_owners) = parse_reviews(packed)
    assert y.tolist() == [1, 1, 0]
    assert owners.tolist() == test_owners.tolist() == [0, 1, 1], "departments by name: books, toys"
    words: Any = x
    assert words[0, 0] == words[1, 0] != words[2, 0], "good is good in every department"
    assert words[:, 3:].max() == 0
    assert np.array_equal(x, test_x)
    with pytest.raises(DataError, match=r"fdu-mtl\.tar\.xz"):
        load("fdu-mtl", put({"fdu-mtl/fdu-mtl.tar.xz": packed}, tmp_path))


def test_speakers_keep_their_words_and_each_character_is_followed_by_the_next() -> None:
    speech = "To be, or not to be, that is the question:\nWhether 'tis nobler.\n" * 4
    text = f"HAMLET:\n{speech}\n\nGHOST:\nSwear.\n\nHAMLET:\nRest, rest, perturbed spirit!\n"
    (x, y, owners), (test_x, _, _) = parse_shakespeare(text, fewest=100)
    assert owners.max() == 0, "the ghost says too little"
    ids, targets = np.asarray(x), np.asarray(y)
    assert np.array_equal(ids[:, 1:], targets[:, :-1])
    assert "".join(CHARACTERS[i] for i in ids[0]).startswith("To be, or not to be")
    assert ids.shape[1] == federations.WINDOW
    assert len(test_x) == 0, "a tenth of so little is no window"


def test_text_of_shakespeare_has_99_speakers_and_65_characters(shared_data: Path) -> None:
    data = load("shakespeare", shared_data)
    assert data.writers is not None
    assert data.test_writers is not None
    assert len(np.unique(data.writers)) == len(np.unique(data.test_writers)) == 99
    assert data.classes == len(CHARACTERS) == 65
    assert (data.train_x.min(), data.train_x.max(), data.labels) == (0, 64, None)


def test_owners_with_most_examples_have_a_node_each() -> None:
    writers = np.repeat([4, 9, 2, 7], [3, 8, 5, 2])
    parts = largest_owners(writers, 3, batch=3)
    assert [writers[part].tolist() for part in parts] == [[9] * 8, [2] * 5, [4] * 3]
    with pytest.raises(ValueError, match=r"4 nodes.* 3 .* 3\b"):
        largest_owners(writers, 4, batch=3)


FEDERATIONS = {"femnist-writers": (151, 15), "reviews-16": (16, 3), "heart-4": (4, 1)}


@pytest.mark.parametrize(
    "preset",
    [name if name == "heart-4" else pytest.param(name, marks=pytest.mark.full) for name in FEDERATIONS],
)
def test_federation_s_preset_trains_one_node_an_owner(preset: str, shared_data: Path) -> None:
    spec = load_spec(preset)
    assert (spec.nodes, spec.byzantine, spec.partition) == (*FEDERATIONS[preset], "owner")
    fields = {key: getattr(spec, key) for key in type(spec).model_fields if getattr(spec, key) is not None}
    fields |= {"rounds": 1, "eval_size": 50, "data_dir": str(shared_data), "out": None, "local_steps": 1}
    if preset == "femnist-writers":
        fields |= {"nodes": 12, "byzantine": 2, "pull": 6, "b_hat": 2}
    result = simulate(**fields)
    assert result.final["accuracy_mean"] > 0
    own = result.nodes["metric.own_accuracy"]
    assert np.isnan(own[0]).all()
    assert np.isfinite(own[1]).all()
    assert result.final["metric.own_accuracy_worst"] == own[1].min()
    assert result.final["metric.own_loss_worst"] == result.nodes["metric.own_loss"][1].max()
