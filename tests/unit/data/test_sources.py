"""Data sets by name: found, downloaded or refused; and the sample in the package."""

import gzip
import hashlib
import http.server
import runpy
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpel.data import DataError, formats, load, sources
from rpel.data.sources import TIMEOUT, cache_folder, fetch
from rpel.files import cache_root
from support.data_files import md5, put, to_idx
from support.paths import ROOT


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's cache, data folder or mirror,
    nor reaches the network (an unreachable port instead)."""
    monkeypatch.setenv("RPEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RPEL_DATA_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("RPEL_DATA", raising=False)


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


def test_sample_is_the_scripts_selection_of_mnist(shared_data: Path) -> None:
    select = runpy.run_path(str(ROOT / "tools" / "make_mnist_sample.py"))["select"]
    sample, full = load(), load("mnist", shared_data)
    train, test = select(full.train_y, 500), select(full.test_y, 100)
    np.testing.assert_array_equal(sample.train_x, full.train_x[train])
    np.testing.assert_array_equal(sample.train_y, full.train_y[train])
    np.testing.assert_array_equal(sample.test_x, full.test_x[test])
    np.testing.assert_array_equal(sample.test_y, full.test_y[test])


def test_small_mnist_is_the_mean_of_three_by_three_pixels_of_the_middle() -> None:
    sample, small = load(), load("mnist-sample-8x8")
    assert (small.name, small.shape, small.checksums) == ("mnist-sample-8x8", (1, 8, 8), sample.checksums)
    for row, column in ((0, 0), (3, 5), (7, 7)):
        patch = sample.test_x[:, 0, 2 + 3 * row : 5 + 3 * row, 2 + 3 * column : 5 + 3 * column]
        expected = patch.astype(np.float64).mean(axis=(1, 2)) / 255
        np.testing.assert_allclose(small.test_x[:, 0, row, column], expected, rtol=1e-6)
    for data in (sample, small):
        x = data.normalised(data.train_x)
        assert x.dtype == np.float32
        assert abs(float(x.mean())) < 0.02
        assert abs(float(x.std()) - 1) < 0.02


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
    names = [f"MNIST/raw/{name}" for name in formats.IDX_FILES]
    files = {f"{name}.gz": content for name, content in zip(names, packed, strict=True)}
    known = {path: md5(content) for path, content in files.items()}
    unpacked = {name: md5(gzip.decompress(files[f"{name}.gz"])) for name in names}
    fields: dict[str, Any] = {"content": unpacked, "files": known, "mirrors": ("https://example.invalid/",)}
    monkeypatch.setitem(sources.SOURCES, "mnist", replace(sources.SOURCES["mnist"], **fields))
    return files


def test_search_goes_from_the_argument_to_the_environment_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_mnist(monkeypatch)
    found_in: list[Path] = []
    usual = sources.FIND["mnist"]

    def find(published: formats.Published, folder: Path) -> Any:
        found_in.append(folder)
        return usual(published, folder)

    monkeypatch.setitem(sources.FIND, "mnist", find)
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
        "cut": "IncompleteRead",
        "tampered": "MD5",
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
    mirror.files = {"wrong/file": b"contend", "right/file": b"content"}
    mirrors = (f"{mirror.url}/wrong/", "file:///etc/", f"{mirror.url}/right/")
    assert fetch("a/file", md5(b"content"), mirrors, tmp_path).read_bytes() == b"content"
    with pytest.raises(DataError, match=r"file:///"):
        fetch("another/file", md5(b"content"), mirrors[1:2], tmp_path)


def test_damaged_file_in_the_cache_is_downloaded_again_or_named(
    mirror: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.files, bad = small_mnist(monkeypatch), "MNIST/raw/t10k-labels-idx1-ubyte.gz"
    put(mirror.files | {bad: b"\x1f\x8bnonsense"}, tmp_path / "cache" / "data")
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz"):
        load("mnist", download=False)
    assert len(load("mnist").test_y) == 10
    assert mirror.asked == [bad]


def test_public_mirrors_are_https_and_every_file_has_a_digest() -> None:
    assert sum(len(source.files) for source in sources.SOURCES.values()) == 14
    for source in sources.SOURCES.values():
        assert bool(source.mirrors) == bool(source.files)
        assert all(url.startswith("https://") and url.endswith("/") for url in source.mirrors)
        assert all(len(digest) == 32 for digest in source.files.values())
        assert source.content
    assert TIMEOUT <= 60
