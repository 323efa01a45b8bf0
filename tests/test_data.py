"""Data sets: what is loaded is the published data, and nothing else ever gets through."""

import gzip
import hashlib
import http.server
import io
import json
import math
import os
import pickle
import runpy
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rpel.data import DataError, crop_flip, datasets, formats, from_arrays, load
from rpel.data.files import TIMEOUT, Remote, cache_folder, fetch
from rpel.data.formats import Digests
from rpel.files import cache_root
from rpel.models import model, parameter_count
from support.data_files import femnist, leaf_file, put
from support.paths import ROOT


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's cache, data folder or mirror,
    nor reaches the network (an unreachable port instead)."""
    monkeypatch.setenv("RPEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RPEL_DATA_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("RPEL_DATA", raising=False)


def to_idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize(
    ("own", "shared", "root"),
    [("/own", "/shared", "/own"), (None, "/shared", "/shared/rpel"), (None, None, "/home/me/.cache/rpel")],
)
def test_cache_is_where_the_user_keeps_caches(
    own: str | None, shared: str | None, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("RPEL_CACHE", own), ("XDG_CACHE_HOME", shared)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cache_root() == Path(root)
    assert cache_folder() == Path(root) / "data"


# The sample


def test_sample_is_balanced_and_about_a_megabyte() -> None:
    sample = load()
    assert sample.name == "mnist-sample"
    assert sample.train_x.shape == (5000, 1, 28, 28)
    assert sample.test_x.shape == (1000, 1, 28, 28)
    assert sample.train_x.dtype == np.uint8
    assert np.bincount(sample.train_y).tolist() == [500] * 10
    assert np.bincount(sample.test_y).tolist() == [100] * 10
    files = [f for f in (resources.files("rpel.data") / "sample").iterdir() if f.name.endswith(".gz")]
    assert 0.8e6 < sum(len(f.read_bytes()) for f in files) < 1.1e6


def test_sample_readme_states_the_checksums_of_the_files() -> None:
    readme = (resources.files("rpel.data") / "sample" / "README.md").read_text(encoding="utf-8")
    checksums = load().checksums
    assert len(checksums) == 4
    assert all(digest in readme for digest in checksums.values())


def test_sample_is_the_scripts_selection_of_mnist(shared_data: Path) -> None:
    select = runpy.run_path(str(ROOT / "tools" / "make_mnist_sample.py"))["select"]
    sample, full = load(), load("mnist", shared_data)
    train, test = select(full.train_y, 500), select(full.test_y, 100)
    np.testing.assert_array_equal(sample.train_x, full.train_x[train])
    np.testing.assert_array_equal(sample.train_y, full.train_y[train])
    np.testing.assert_array_equal(sample.test_x, full.test_x[test])
    np.testing.assert_array_equal(sample.test_y, full.test_y[test])


def test_normalised_sample_has_about_zero_mean_and_unit_deviation() -> None:
    sample = load()
    x = sample.normalised(sample.train_x)
    assert x.dtype == np.float32
    assert abs(float(x.mean())) < 0.02
    assert abs(float(x.std()) - 1) < 0.02


def test_small_mnist_is_the_mean_of_three_by_three_pixels_of_the_middle() -> None:
    sample, small = load(), load("mnist-sample-8x8")
    assert (small.name, small.shape, small.checksums) == ("mnist-sample-8x8", (1, 8, 8), sample.checksums)
    for row, column in ((0, 0), (3, 5), (7, 7)):
        patch = sample.test_x[:, 0, 2 + 3 * row : 5 + 3 * row, 2 + 3 * column : 5 + 3 * column]
        expected = patch.astype(np.float64).mean(axis=(1, 2)) / 255
        np.testing.assert_allclose(small.test_x[:, 0, row, column], expected, rtol=1e-6)
    x = small.normalised(small.train_x)
    assert abs(float(x.mean())) < 0.02
    assert abs(float(x.std()) - 1) < 0.02


def test_linear_model_of_small_mnist_has_650_parameters(shared_data: Path) -> None:
    small = load("mnist-8x8", shared_data, download=False)
    assert (small.train_x.shape, small.test_x.shape) == ((60000, 1, 8, 8), (10000, 1, 8, 8))
    assert parameter_count(model("linear", small.shape)) == 650


# Names and search order


def test_unknown_name_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ValueError, match=r"'fashion_mnist'.*'fashion-mnist'"):
        load("fashion_mnist")


def test_missing_data_folder_is_named() -> None:
    with pytest.raises(DataError, match="no-such-folder"):
        load("mnist", "no-such-folder")


def small_mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Four small files that stand in for MNIST's,
    with the digests that make the loader take them for the real ones."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 255, (20, 28, 28)),
        np.arange(20) % 10,
        rng.integers(0, 255, (10, 28, 28)),
        np.arange(10),
    ]
    packed = [gzip.compress(to_idx(a.astype(np.uint8)), mtime=0) for a in arrays]
    digests = tuple(Digests(_md5(content), _md5(gzip.decompress(content))) for content in packed)
    source = datasets._idx_source("mnist", "MNIST/raw", digests, ((0.5,), (0.5,)), "https://example.invalid/")
    monkeypatch.setitem(datasets.SOURCES, "mnist", source)
    return {f"MNIST/raw/{name}.gz": content for name, content in zip(formats.IDX_FILES, packed, strict=True)}


def _md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def test_search_goes_from_the_argument_to_the_environment_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_mnist(monkeypatch)
    found_in: list[Path] = []
    source = datasets.SOURCES["mnist"]

    def find(folder: Path) -> Any:
        found_in.append(folder)
        return source.find(folder)

    monkeypatch.setitem(datasets.SOURCES, "mnist", replace(source, find=find))
    empty, environment = tmp_path / "empty", tmp_path / "environment"
    empty.mkdir()
    environment.mkdir()
    monkeypatch.setenv("RPEL_DATA", str(environment))
    put(files, tmp_path / "cache" / "data")
    assert len(load("mnist", empty).train_y) == 20
    assert found_in == [empty, environment, tmp_path / "cache" / "data"]
    found_in.clear()
    load("mnist", put(files, tmp_path / "given"))
    assert found_in == [tmp_path / "given"]


def test_packed_repacked_and_unpacked_files_are_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_mnist(monkeypatch)
    unpacked = {path.removesuffix(".gz"): gzip.decompress(content) for path, content in files.items()}
    repacked = {path: gzip.compress(gzip.decompress(content), 1, mtime=5) for path, content in files.items()}
    one, two, three = (
        load("mnist", put(f, tmp_path / str(i)), download=False)
        for i, f in enumerate((files, unpacked, repacked))
    )
    np.testing.assert_array_equal(one.train_x, two.train_x)
    assert one.checksums == two.checksums == three.checksums
    assert (
        one.checksums["MNIST/raw/t10k-labels-idx1-ubyte"]
        == hashlib.sha256(to_idx(np.arange(10, dtype=np.uint8))).hexdigest()
    )


@pytest.mark.parametrize("packed", [True, False])
def test_changed_pixel_in_a_data_folder_is_refused_and_the_file_left_alone(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_mnist(monkeypatch)
    contents = {path: bytearray(gzip.decompress(content)) for path, content in files.items()}
    contents["MNIST/raw/train-images-idx3-ubyte.gz"][100] ^= 1
    changed = {p: gzip.compress(c) if packed else bytes(c) for p, c in contents.items()}
    folder = put(changed if packed else {p[:-3]: c for p, c in changed.items()}, tmp_path / "given")
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        load("mnist", folder)
    assert len(list(folder.rglob("*ubyte*"))) == 4


def test_mnist_is_read_whole_and_has_the_references_statistics(shared_data: Path) -> None:
    mnist = load("mnist", shared_data, download=False)
    assert (mnist.train_x.shape, mnist.test_x.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert mnist.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    levels, counts = (
        np.arange(256) / 255,
        np.bincount(mnist.train_x.ravel(), minlength=256) / mnist.train_x.size,
    )
    mean = (levels * counts).sum()
    assert mnist.mean is not None
    assert mnist.std is not None
    assert mean == pytest.approx(mnist.mean[0], abs=5e-5)
    assert ((levels - mean) ** 2 * counts).sum() ** 0.5 == pytest.approx(mnist.std[0], abs=5e-5)


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


@given(edited(small_arrays.map(to_idx)))
def test_idx_reads_exactly_the_bytes_whose_header_tells_the_truth(content: bytes) -> None:
    dimensions = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    start = 4 + 4 * dimensions
    promised = None
    if 1 <= dimensions <= 4 and len(content) >= start:
        promised = start + math.prod(struct.unpack(f">{dimensions}I", content[4:start]))
    if promised == len(content):
        assert to_idx(formats.parse_idx(content)) == content
    else:
        with pytest.raises(DataError, match=r"^the file (is not an IDX file|has \d+ bytes)"):
            formats.parse_idx(content)


GOOD = to_idx(np.zeros((2, 3), np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"\0\1" + GOOD[2:], "begins with 00 01 08 02"),
        (b"\0\0\x0d" + GOOD[3:], "begins with 00 00 0d"),
        (b"\0\0\x08\0", "not an IDX file"),
        (GOOD[:7], "ends inside its header"),
        (GOOD[:-1], "has 17 bytes where .* promises 18"),
        (GOOD + b"\0", "has 19 bytes"),
        (b"\0\0\x08\2" + b"\xff" * 8, "promises 18446744065119617037"),
    ],
)
def test_bad_idx_file_names_its_fault(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        formats.parse_idx(content)


def test_truncated_gzip_is_reported_damaged() -> None:
    with pytest.raises(DataError, match=r"^the file is damaged: .*ended"):
        formats.unpack(gzip.compress(GOOD * 10)[:-12])


def test_images_and_labels_must_belong_together() -> None:
    images, labels = np.zeros((3, 2, 2), np.uint8), np.array([1, 2, 11], np.uint8)
    with pytest.raises(DataError, match=r"images.*labels|labels.*images"):
        formats._paired(images, labels[:2], 10, "training")
    with pytest.raises(DataError, match=r"labels .*11.* 10 classes"):
        formats._paired(images, labels, 10, "training")


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


@pytest.mark.parametrize(
    "wrong",
    [
        [1, 2],
        batch(data=[1]),
        batch(data=np.zeros((4, 9), np.uint8)),
        batch(labels=[1]),
        batch(labels=[0, 1, 2, 10]),
    ],
)
def test_batch_of_the_wrong_form_is_refused(wrong: Any) -> None:
    with pytest.raises(DataError, match=r"b'data'|b'labels'"):
        formats.parse_batch(pickle.dumps(wrong, 3))


def small_cifar(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    members = {name: pickle.dumps(batch(2 + i), 3) for i, name in enumerate(formats.CIFAR_BATCHES)}
    monkeypatch.setattr(formats, "CIFAR_BATCHES", {name: _md5(content) for name, content in members.items()})
    return members


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"{formats.CIFAR_FOLDER}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_cifar_folder_and_both_archives_are_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = small_cifar(monkeypatch)
    layouts = [{f"{formats.CIFAR_FOLDER}/{name}": content for name, content in members.items()}]
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


def test_crops_stay_inside_the_padded_image_and_mirror_half_of_them() -> None:
    rng = np.random.default_rng(3)
    images = rng.integers(1, 255, (64, 3, 32, 32), np.uint8)
    uniform = rng.random((64, 3))
    cropped = crop_flip(images, uniform)
    assert cropped.shape == images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    for i, (row, column, mirror) in enumerate(uniform):
        top, left = int(row * 9), int(column * 9)
        plain = padded[i, :, top : top + 32, left : left + 32]
        np.testing.assert_array_equal(cropped[i], plain if mirror < 0.5 else plain[:, :, ::-1])


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
    ("broken", "message"),
    [
        ({"users": ["f1"]}, "not in LEAF's format"),
        ([1], "not in LEAF's format"),
        (leaf_file({"f1": [62]}), "user f1: a label is not a whole number from 0 to 61"),
        (leaf_file({"f1": [0]}, pixel=1.5), "user f1: a pixel is outside 0 to 1"),
        (leaf_file({"f1": [0]}, pixel=float("nan")), "a pixel is outside"),
        (leaf_file({"f1": [0]}) | {"num_samples": [2]}, "1 images and 1 labels where num_samples says 2"),
        (
            {"users": ["f1"], "num_samples": [1], "user_data": {"f1": {"x": [[1.0]], "y": [0]}}},
            "lists of 784",
        ),
        (leaf_file({}), "holds no examples"),
    ],
)
def test_bad_femnist_file_names_fault_and_file(broken: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load("femnist", femnist(tmp_path, broken, leaf_file({"f1": [0]})))


def subset_file(folder: Path) -> bytes:
    """A file of two writers in the form of the 155 writers' file."""
    x = np.arange(3 * 784, dtype=np.uint8).reshape(3, 28, 28)
    y, w = np.array([0, 61, 35], np.uint8), np.array([0, 1, 1], np.uint16)
    file = io.BytesIO()
    np.savez(
        file, x_train=x, y_train=y, w_train=w, x_test=x[:1], y_test=y[:1], w_test=w[1:2], users=["f1", "f2"]
    )
    put({formats.FEMNIST_SUBSET: file.getvalue()}, folder)
    return file.getvalue()


def test_femnist_of_155_writers_is_read_where_leafs_files_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(subset_file(tmp_path)).hexdigest()
    with pytest.raises(DataError, match=f"155 writers.*{digest}"):
        load("femnist", tmp_path)
    monkeypatch.setattr(formats, "FEMNIST_SUBSET_SHA256", digest)
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
    assert loaded.checksums == {formats.FEMNIST_SUBSET: digest}
    assert load(
        "femnist", femnist(tmp_path, leaf_file({"f1": [5]}), leaf_file({"f1": [6]}))
    ).train_y.tolist() == [5]


def test_femnist_has_nothing_to_download_and_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"femnist/train.*--data-dir.*RPEL_DATA"):
        load("femnist")


# Your own


def test_user_arrays_are_identified_by_content() -> None:
    x, y = np.random.default_rng(0).random((6, 1, 4, 4)), np.arange(6) % 3
    one, two = from_arrays((x, y), (x[:3], y[:3])), from_arrays((x + 1, y), (x[:3], y[:3]))
    assert one.classes == 3
    assert one.checksums["own/test"] == two.checksums["own/test"]
    assert one.checksums["own/train"] != two.checksums["own/train"]
    np.testing.assert_allclose(one.normalised(x), x, rtol=1e-6)


@pytest.mark.parametrize(
    "labels", [np.arange(5), np.array([0.5] * 6), np.array([-1] * 6), np.zeros((6, 1), int)]
)
def test_user_arrays_that_do_not_fit_are_refused(labels: NDArray[Any]) -> None:
    x = np.zeros((6, 1, 4, 4))
    with pytest.raises(DataError, match=r"train (examples .*\(6, 1, 4, 4\)|labels .*whole numbers)"):
        from_arrays((x, labels), (x, np.zeros(6, int)))


# Downloads


class Server:
    """A local mirror whose files can be whole, cut off while being sent, or absent."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.lstrip("/")
                outer.asked.append(path)
                if path not in outer.files:
                    self.send_error(404)
                    return
                content = outer.files[path]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if path in outer.cut else content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    mirror = Server()
    thread = threading.Thread(target=mirror.server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("RPEL_DATA_URL", mirror.url + "/")
    yield mirror
    mirror.server.shutdown()
    thread.join()
    mirror.server.server_close()


def test_download_lands_in_the_cache_reports_progress_and_is_not_repeated(
    mirror: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.files = small_mnist(monkeypatch)
    seen: list[tuple[str, int, int | None]] = []
    loaded = load("mnist", progress=lambda *report: seen.append(report))
    assert len(loaded.train_y) == 20
    first = mirror.files["MNIST/raw/train-images-idx3-ubyte.gz"]
    assert seen[0] == ("train-images-idx3-ubyte.gz", len(first), len(first))
    assert {path.name for path in (tmp_path / "cache/data/MNIST/raw").iterdir()} == {
        f"{f}.gz" for f in formats.IDX_FILES
    }
    load("mnist")
    assert mirror.asked == list(mirror.files)


def test_four_hospitals_files_are_downloaded_as_published(mirror: Server, shared_data: Path) -> None:
    files = [
        f"heart-disease/processed.{name}.data" for name in ("cleveland", "hungarian", "switzerland", "va")
    ]
    mirror.files = {file: (shared_data / file).read_bytes() for file in files}
    data = load("heart-disease")
    assert data.writers is not None
    assert np.bincount(data.writers).tolist() == [228, 221, 93, 150]
    assert mirror.asked == files


def test_cifar_download_is_the_public_archive(mirror: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(small_cifar(monkeypatch))
    remote = Remote(formats.CIFAR_ARCHIVES[1], _md5(content), ())
    monkeypatch.setitem(datasets.SOURCES, "cifar10", replace(datasets.SOURCES["cifar10"], remotes=(remote,)))
    mirror.files = {"cifar-10-python.tar.gz": content}
    assert len(load("cifar10").train_y) == 20


@pytest.mark.parametrize("fault", ["cut", "tampered", "absent"])
def test_bad_download_is_removed_and_reported(
    fault: str, mirror: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = small_mnist(monkeypatch)
    bad = "MNIST/raw/t10k-images-idx3-ubyte.gz"
    mirror.files = dict(good)
    if fault == "cut":
        mirror.cut.add(bad)
    elif fault == "tampered":
        mirror.files[bad] = good[bad][:-1] + b"?"
    else:
        del mirror.files[bad]
    words = {
        "cut": r"cut off after \d+ of \d+ bytes and was removed",
        "tampered": "MD5 .* was removed",
        "absent": "Not Found",
    }
    with pytest.raises(
        DataError, match=rf"mnist could not be downloaded .*t10k-images.*{words[fault]}.*--data-dir"
    ) as caught:
        load("mnist")
    assert "\n" not in str(caught.value)
    left = {path.name for path in (tmp_path / "cache/data/MNIST/raw").iterdir()}
    assert left == {f"{formats.IDX_FILES[0]}.gz", f"{formats.IDX_FILES[1]}.gz"}
    mirror.files, mirror.cut = dict(good), set()
    assert len(load("mnist").test_y) == 10  # the next try fetches only what is missing
    assert mirror.asked.count("MNIST/raw/train-images-idx3-ubyte.gz") == 1


def test_offline_download_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"refused.*MNIST/raw/train-images.*--data-dir.*RPEL_DATA") as caught:
        load("mnist")
    assert "\n" not in str(caught.value)


def test_missing_data_without_download_contacts_no_server(mirror: Server) -> None:
    with pytest.raises(DataError, match=r"fashion-mnist.*cache.*FashionMNIST/raw/train-images"):
        load("fashion-mnist", download=False)
    assert mirror.asked == []


def test_second_mirror_serves_when_the_first_fails(
    mirror: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RPEL_DATA_URL")
    mirror.files = {"file": b"content", "wrong": b"contend"}
    remote = Remote(
        "a/file", _md5(b"content"), (f"{mirror.url}/wrong", "file:///etc/hostname", f"{mirror.url}/file")
    )
    assert fetch(remote, tmp_path).read_bytes() == b"content"
    with pytest.raises(DataError, match=r"file:///.*https"):
        fetch(replace(remote, urls=remote.urls[1:2]), tmp_path)


def test_damaged_file_in_the_cache_is_named_with_the_remedy(
    mirror: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_mnist(monkeypatch)
    put(files | {"MNIST/raw/t10k-labels-idx1-ubyte.gz": b"\x1f\x8bnonsense"}, tmp_path / "cache" / "data")
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz.*delete"):
        load("mnist")


def test_public_mirrors_are_https_and_every_file_has_a_digest() -> None:
    remotes = [remote for source in datasets.SOURCES.values() for remote in source.remotes]
    assert len(remotes) == 14
    assert all(url.startswith("https://") for remote in remotes for url in remote.urls)
    assert all(len(remote.md5) == 32 for remote in remotes)
    unpacked = [known.unpacked for known in datasets.MNIST_DIGESTS + datasets.FASHION_DIGESTS]
    # so that other packings of both, such as Debian's, are recognised by content
    assert len(set(unpacked)) == 8
    assert all(len(digest) == 32 for digest in unpacked)
    assert TIMEOUT <= 60
