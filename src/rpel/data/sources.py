"""Data sets by name: found in a folder, or downloaded into the cache and checked by pooch.

RPEL_DATA_URL replaces every mirror; below it the files lie as in a data folder (``MNIST/raw/…``), so that
``python -m http.server`` in a data folder is a mirror.
"""

import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from rpel import component
from rpel.data import federations, formats
from rpel.data.dataset import DataError, Dataset, MissingDataError
from rpel.files import cache_root

Progress = Callable[[str, int, int | None], None]
"""progress(name, done, total): bytes so far and in all."""

TIMEOUT = 30.0
GROUP = "rpel.datasets"
"""The entry points under which packages register data sets."""


_LISTED: dict[str, dict[str, Any]] = tomllib.loads(
    (resources.files("rpel.data") / "sources.toml").read_text("utf-8")
)
SOURCES = {name: formats.Published(name, **listed) for name, listed in _LISTED.items()}
FIND: dict[str, Callable[[formats.Published, Path], Dataset | None]] = {
    "mnist": formats.find_idx,
    "fashion-mnist": formats.find_idx,
    "cifar10": formats.find_cifar,
    "femnist": formats.find_femnist,
    "heart-disease": federations.find_heart,
    "fdu-mtl": federations.find_reviews,
    "shakespeare": federations.find_shakespeare,
}
"""How each data set is found in a folder; None: it is not there."""
SMALLER = {"mnist-8x8": "mnist", "mnist-sample-8x8": "mnist-sample"}
"""Data sets made from another by `eight_by_eight`: for many nodes with small models."""
NAMES = ("mnist-sample", *SOURCES, *SMALLER)


def load(
    name: str = "mnist-sample",
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """Return the data set of that name.

    Args:
        name: one of `NAMES`, of a package's entry points, or ``module:object`` (a `Dataset`, a pair (train,
            test) as `rpel.simulate` takes them, or a function that returns one of these).
        data_dir: a folder that is searched first; then come RPEL_DATA and the cache.
        download: into the cache, what is in no folder.
        progress: told of the bytes of a download.

    >>> sample = load()
    >>> sample.train_x.shape, sample.train_x.dtype, sample.test_y.shape
    ((5000, 1, 28, 28), dtype('uint8'), (1000,))
    """
    if name == "mnist-sample":
        return formats.sample(SOURCES["mnist"])
    if name in SMALLER:
        return eight_by_eight(load(SMALLER[name], data_dir, download, progress), name)
    if name not in SOURCES:
        return _from_outside(name)
    source, folders, cache = SOURCES[name], search_folders(data_dir), cache_folder()
    download &= bool(source.files)
    for folder in folders:
        try:
            if (data := FIND[name](source, folder)) is not None:
                return data
        except DataError:
            if folder != cache or not download:  # there, a damaged file is downloaded again
                raise
    advice = f"put {source.layout} into a folder and name it with --data-dir or RPEL_DATA"
    if not download:
        why = "" if source.files else " and has no archive to download"
        raise MissingDataError(f"{name} is not in {', '.join(map(str, folders))}{why}: {advice}")
    try:
        for path, md5 in source.files.items():
            fetch(path, md5, source.mirrors, cache, progress)
        data = FIND[name](source, cache)
    except (DataError, OSError) as error:
        raise MissingDataError(f"{name} could not be downloaded ({error}): try again, or {advice}") from error
    if data is None:
        raise MissingDataError(f"{name} disappeared from {cache} while it was read: try again, or {advice}")
    return data


def _from_outside(name: str) -> Dataset:
    """Return the data set of a user's or a package's function or object."""
    asked = component.parse(name)
    made = component.find(GROUP, asked.name, NAMES)
    from rpel.data import user

    if callable(made):
        made = made(**asked.bind_to(made))
    return user.named(made, name)


def cache_folder() -> Path:
    """Return the folder of downloads."""
    return cache_root() / "data"


def search_folders(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Return the folders to look in, first to last: the one given, RPEL_DATA, the cache."""
    given = [Path(folder).expanduser() for folder in (data_dir, os.environ.get("RPEL_DATA")) if folder]
    for folder in given:
        if not folder.is_dir():
            raise DataError(f"the data folder {str(folder)!r} does not exist or is not a folder")
    return [*given, cache_folder()]


def eight_by_eight(mnist: Dataset, name: str) -> Dataset:
    """Shrink MNIST's images to the means, from 0 to 1, of 3 × 3 of the middle 24 × 24 pixels.

    >>> small = eight_by_eight(load(), "mnist-sample-8x8")
    >>> small.train_x.shape, small.train_x.dtype
    ((5000, 1, 8, 8), dtype('float32'))
    """
    train_x, test_x = (
        (x[:, :, 2:26, 2:26].reshape(len(x), 1, 8, 3, 8, 3).sum(axis=(3, 5)) / (9 * 255)).astype(np.float32)
        for x in (mnist.train_x, mnist.test_x)
    )
    return replace(mnist, name=name, train_x=train_x, test_x=test_x, mean=(0.1774,), std=(0.2807,))


# --- downloads ----------------------------------------------------------------------------------------------


class _Bar:
    """A progress bar as pooch drives it, for a callback."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self.progress, self.total, self.done = name, progress, 0, 0

    def update(self, count: int) -> None:
        self.done = min(self.done + count, self.total or self.done + count)
        self.progress(self.name, self.done, self.total or None)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def fetch(
    path: str, md5: str, mirrors: Sequence[str], folder: Path, progress: Progress | None = None
) -> Path:
    """Download a file to its path below the folder, from the first mirror that gives the published one."""
    import pooch  # type: ignore[import-untyped]

    pooch.get_logger().setLevel("WARNING")
    own, reasons = os.environ.get("RPEL_DATA_URL"), []
    urls = [f"{own.rstrip('/')}/{path}"] if own else [mirror + path.rpartition("/")[2] for mirror in mirrors]
    bar = _Bar(Path(path).name, progress) if progress else False
    for url in urls:
        get = pooch.HTTPDownloader(
            bar, 1 << 18, timeout=TIMEOUT, headers={"User-Agent": "rpel", "Accept-Encoding": "identity"}
        )
        try:
            return Path(pooch.retrieve(url, f"md5:{md5}", path, folder, downloader=get))
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            reasons.append(f"{url}: {str(error).partition('. ')[0]}")
    raise DataError("; ".join(reasons))
