"""Files of images: what is read is the published data, and nothing else ever gets through."""

import hashlib
import io
import json
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpel.data import DataError, formats, load
from rpel.data.sources import SOURCES
from support.data_files import femnist, leaf_file, md5, put, to_idx

FOLDER, SUBSET = "cifar-10-batches-py", "femnist-subset/femnist-155-writers.npz"

# IDX


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.binary(min_size=625, max_size=625))
def test_idx_returns_what_was_written(shape: list[int], content: bytes) -> None:
    array = np.frombuffer(content, np.uint8)[: np.prod(shape)].reshape(shape)
    np.testing.assert_array_equal(formats.parse_idx(to_idx(array)), array)


@st.composite
def edited(draw: st.DrawFn, contents: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that were right until a few of them were changed, dropped or added; or any bytes at all."""
    content = bytearray(draw(contents))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(content)))
        content[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return draw(st.one_of(st.just(bytes(content)), st.binary(max_size=40)))


small_arrays = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(lambda shape: np.ones(shape, np.uint8))


# CIFAR-10


def batch(n: int = 4, **changed: Any) -> dict[bytes, Any]:
    rng = np.random.default_rng(1)
    contents = {
        "data": rng.integers(0, 255, (n, 3072), np.uint8),
        "labels": [i % 10 for i in range(n)],
    } | changed
    return {key.encode(): value for key, value in contents.items()}


@pytest.mark.parametrize("protocol", [3, 4])
def test_cifar_batches_are_read_in_channel_order(protocol: int) -> None:
    contents = batch()
    x, y = formats.parse_batch(pickle.dumps(contents, protocol))
    np.testing.assert_array_equal(x[2, 1].ravel(), contents[b"data"][2, 1024:2048])
    assert y.tolist() == [0, 1, 2, 3]


class Evil:
    """On unpickling, makes a folder: a stand-in for any code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_malicious_pickle_runs_no_code(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    content = pickle.dumps(batch(labels=Evil(trace)), 3)
    with pytest.raises(DataError, match=r"pickle.*\w+\.mkdir"):
        formats.parse_batch(content)
    assert not trace.exists()
    pickle.loads(content)  # the trap itself works
    assert trace.exists()


@pytest.mark.parametrize("name", ["eval", "getattr", "__import__"])
def test_pickle_cannot_name_builtins_or_reach_through_numpy(name: str) -> None:
    for module in ("builtins", "__builtin__", "numpy", "numpy._core.multiarray"):
        with pytest.raises(DataError, match=r"pickle: .*(import|eval|getattr)"):
            formats.unpickle(f"c{module}\n{name}\n.".encode())
    with pytest.raises(DataError, match=r"pickle: .*__class__"):
        formats.unpickle(b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93.")


plain_values = st.recursive(
    st.one_of(st.integers(), st.binary(max_size=8), st.booleans(), small_arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.binary(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(plain_values)
def test_pickle_of_plain_values_is_read_unchanged(value: Any) -> None:
    np.testing.assert_equal(formats.unpickle(pickle.dumps(value, 3)), value)


@given(edited(plain_values.map(lambda value: pickle.dumps(value, 3))))
def test_arbitrary_pickle_bytes_are_refused_or_plain_values(content: bytes) -> None:
    try:
        actual = formats.unpickle(content)
    except DataError as error:
        assert "refused as a pickle" in str(error)  # noqa: PT017  (both outcomes are right, each in its own way)
    else:
        assert type(actual).__module__ in ("builtins", "numpy")


def small_cifar(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    published = SOURCES["cifar10"]
    members = {Path(name).name: pickle.dumps(batch(2 + i), 3) for i, name in enumerate(published.content)}
    content = {name: md5(members[Path(name).name]) for name in published.content}
    monkeypatch.setitem(SOURCES, "cifar10", replace(published, content=content))
    return members


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"{FOLDER}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_cifar_folder_and_both_archives_are_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = small_cifar(monkeypatch)
    layouts = [{f"{FOLDER}/{name}": content for name, content in members.items()}]
    layouts += [{name: archive(members)} for name in formats.CIFAR_ARCHIVES]
    loaded = [
        load("cifar10", put(files, tmp_path / str(i)), download=False) for i, files in enumerate(layouts)
    ]
    assert loaded[0].train_x.shape == (2 + 3 + 4 + 5 + 6, 3, 32, 32)
    assert loaded[0].test_y.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert loaded[0].augment == "crop-flip"
    for other in loaded[1:]:
        np.testing.assert_array_equal(loaded[0].train_x, other.train_x)
        assert loaded[0].checksums == other.checksums


def test_changed_cifar_batch_is_refused_before_unpickling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = small_cifar(monkeypatch)
    members["test_batch"] = pickle.dumps(Evil(tmp_path / "trace"), 3)
    with pytest.raises(DataError, match="test_batch in "):
        load("cifar10", put({formats.CIFAR_ARCHIVES[0]: archive(members)}, tmp_path / "given"))
    del members["test_batch"]
    with pytest.raises(DataError, match="test_batch"):
        load("cifar10", put({formats.CIFAR_ARCHIVES[0]: archive(members)}, tmp_path / "given"))
    with pytest.raises(DataError, match=r"tar\.gz is damaged"):
        load("cifar10", put({formats.CIFAR_ARCHIVES[0]: archive(members)[:-40]}, tmp_path / "given"))


def test_cifar10_is_read_whole_from_the_repacked_archive(shared_data: Path) -> None:
    cifar10 = load("cifar10", shared_data, download=False)
    assert (cifar10.train_x.shape, cifar10.test_x.shape) == ((50000, 3, 32, 32), (10000, 3, 32, 32))
    assert np.bincount(cifar10.train_y).tolist() == [5000] * 10
    assert cifar10.train_x.mean(axis=(0, 2, 3)) / 255 == pytest.approx(cifar10.mean, abs=1e-4)
    assert cifar10.test_y[:5].tolist() == [3, 8, 8, 0, 6]


# FEMNIST


def test_femnist_pools_writers_and_remembers_them(tmp_path: Path) -> None:
    folder = femnist(tmp_path, leaf_file({"f1": [0, 61], "f2": [9]}), leaf_file({"f9": [10], "f2": [1]}))
    put({"femnist/train/b.json": json.dumps(leaf_file({"f3": [5], "f1": [6]})).encode()}, folder)
    loaded = load("femnist", folder)
    assert loaded.train_y.tolist() == [0, 61, 9, 5, 6]
    assert loaded.writers is not None
    assert loaded.writers.tolist() == [0, 0, 1, 2, 0]
    assert loaded.test_writers is not None
    assert loaded.test_writers.tolist() == [3, 1]
    assert (loaded.classes, loaded.shape, loaded.train_x.dtype.name) == (62, (1, 28, 28), "uint8")
    assert loaded.train_x[0, 0, 27, 26:].tolist() == [255, 128]  # white stays white, rows stay rows
    assert sorted(loaded.checksums) == ["femnist/test/a.json", "femnist/train/a.json", "femnist/train/b.json"]


@pytest.mark.parametrize(
    "broken",
    [
        {"users": ["f1"]},
        [1],
        leaf_file({"f1": [62]}),
        leaf_file({"f1": [0]}, pixel=1.5),
        leaf_file({"f1": [0]}, pixel=float("nan")),
        leaf_file({"f1": [0]}) | {"num_samples": [2]},
        {"users": ["f1"], "num_samples": [1], "user_data": {"f1": {"x": [[1.0]], "y": [0]}}},
        leaf_file({}),
    ],
)
def test_bad_femnist_file_is_named(broken: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"femnist.train.* (not in LEAF's format|holds no examples)"):
        load("femnist", femnist(tmp_path, broken, leaf_file({"f1": [0]})))


def subset_file(folder: Path) -> bytes:
    """A file of two writers in the form of the 155 writers' file."""
    x = np.arange(3 * 784, dtype=np.uint8).reshape(3, 28, 28)
    y, w = np.array([0, 61, 35], np.uint8), np.array([0, 1, 1], np.uint16)
    file = io.BytesIO()
    np.savez(
        file, x_train=x, y_train=y, w_train=w, x_test=x[:1], y_test=y[:1], w_test=w[1:2], users=["f1", "f2"]
    )
    put({SUBSET: file.getvalue()}, folder)
    return file.getvalue()


def test_femnist_of_155_writers_is_read_where_leafs_files_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(subset_file(tmp_path)).hexdigest()
    with pytest.raises(DataError, match=f"155-writers.*{digest}"):
        load("femnist", tmp_path)
    monkeypatch.setitem(SOURCES, "femnist", replace(SOURCES["femnist"], content={SUBSET: digest}))
    loaded = load("femnist", tmp_path)
    assert loaded.writers is not None
    assert loaded.test_writers is not None
    assert (loaded.train_y.tolist(), loaded.writers.tolist(), loaded.test_writers.tolist()) == (
        [0, 61, 35],
        [0, 1, 1],
        [1],
    )
    assert (loaded.shape, loaded.train_x.dtype.name, loaded.train_y.dtype.name) == (
        (1, 28, 28),
        "uint8",
        "int64",
    )
    assert loaded.train_x[0, 0, 1, :2].tolist() == [28, 29]
    assert loaded.checksums == {SUBSET: digest}
    assert load(
        "femnist", femnist(tmp_path, leaf_file({"f1": [5]}), leaf_file({"f1": [6]}))
    ).train_y.tolist() == [5]


def test_femnist_has_nothing_to_download_and_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"femnist/train.*--data-dir.*RPEL_DATA"):
        load("femnist")
