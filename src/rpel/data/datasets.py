"""Data sets by name: found in a folder, in the cache, or downloaded; checked, and returned as compact arrays.

Invariants: images stay uint8 as published and are normalised by whoever trains, other data are used as they
are; every source file's SHA-256 travels with the arrays; a file that is not the published one is never used.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rpel import component
from rpel.data import federations, formats
from rpel.data.dataset import Dataset
from rpel.data.files import DataError, MissingDataError, Progress, Remote, cache_folder, fetch, search_folders
from rpel.data.formats import Digests
from rpel.errors import nearest

MNIST_DIGESTS = (
    Digests("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    Digests("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    Digests("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    Digests("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
)
FASHION_DIGESTS = (
    Digests("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    Digests("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
    Digests("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
    Digests("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
)
SAMPLE_DIGESTS = (
    Digests(None, "e07065aa00c34f3e5d6b97dc6b181484"),
    Digests(None, "65ab26c10126989f05a16553360cec81"),
    Digests(None, "378ada602e4488f4f63399815d1dd82d"),
    Digests(None, "ea74d8849001d1f3513149e2e7af1246"),
)

_MNIST_STATISTICS = ((0.1307,), (0.3081,))
_SMALL_MNIST_STATISTICS = ((0.1774,), (0.2807,))
_FASHION_STATISTICS = ((0.2860,), (0.3530,))
_CIFAR_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
# LEAF's images are mostly white background (1.0), which this puts near zero, as MNIST's black is.
_FEMNIST_STATISTICS = ((0.9637,), (0.1592,))


def _remotes(folder: str, digests: tuple[Digests, ...], *mirrors: str) -> tuple[Remote, ...]:
    return tuple(
        Remote(f"{folder}/{name}.gz", known.packed, tuple(f"{mirror}{name}.gz" for mirror in mirrors))
        for name, known in zip(formats.IDX_FILES, digests, strict=True)
        if known.packed
    )


@dataclass(frozen=True)
class Source:
    """How one data set is found in a folder (None: not there),
    and which files to download when it is nowhere."""

    find: Callable[[Path], Dataset | None]
    remotes: tuple[Remote, ...]
    layout: str
    """What a data folder must hold, for messages."""


def _idx_source(
    name: str,
    folder: str,
    digests: tuple[Digests, ...],
    statistics: tuple[tuple[float, ...], tuple[float, ...]],
    *mirrors: str,
) -> Source:
    def find(root: Path) -> Dataset | None:
        paths = formats.locate_idx(root / folder)
        if paths is None:
            return None
        arrays, checksums = formats.read_idx(paths, digests)
        checksums = {f"{folder}/{file}": digest for file, digest in checksums.items()}
        return Dataset(name, *arrays, 10, *statistics, checksums)

    return Source(
        find,
        _remotes(folder, digests, *mirrors),
        f"{folder}/{formats.IDX_FILES[0]}.gz and its three companions",
    )


def _find_cifar10(root: Path) -> Dataset | None:
    path = formats.locate_cifar(root)
    if path is None:
        return None
    arrays, checksums = formats.read_cifar(path)
    return Dataset("cifar10", *arrays, 10, *_CIFAR_STATISTICS, checksums, augment="crop-flip")


def _find_femnist(root: Path) -> Dataset | None:
    folder, subset = formats.locate_femnist(root), root / formats.FEMNIST_SUBSET
    if folder is not None:  # all that the user made with LEAF, rather than the subset
        numbers: dict[str, int] = {}
        train, test = (formats.read_femnist(folder, split, numbers) for split in ("train", "test"))
    elif subset.is_file():
        train, test = formats.read_femnist_subset(subset)
    else:
        return None
    return Dataset(
        "femnist",
        *(train.x, train.y, test.x, test.y),
        formats.FEMNIST_CLASSES,
        *_FEMNIST_STATISTICS,
        train.checksums | test.checksums,
        writers=train.writers,
        test_writers=test.writers,
    )


def _find_heart(root: Path) -> Dataset | None:
    return (
        _owned("heart-disease", 2, federations.read_heart(root)) if federations.locate_heart(root) else None
    )


def _find_reviews(root: Path) -> Dataset | None:
    path = root / federations.REVIEWS
    return _owned("fdu-mtl", 2, federations.read_reviews(path)) if path.is_file() else None


def _find_shakespeare(root: Path) -> Dataset | None:
    path, characters = root / federations.SHAKESPEARE, len(federations.CHARACTERS)
    return _owned("shakespeare", characters, federations.read_shakespeare(path)) if path.is_file() else None


def _owned(
    name: str, classes: int, parts: tuple[federations.Arrays, federations.Arrays, dict[str, str]]
) -> Dataset:
    (x, y, owners), (test_x, test_y, test_owners), checksums = parts
    return Dataset(
        name, x, y, test_x, test_y, classes, checksums=checksums, writers=owners, test_writers=test_owners
    )  # fmt: skip


SOURCES = {
    "mnist": _idx_source(
        "mnist",
        "MNIST/raw",
        MNIST_DIGESTS,
        _MNIST_STATISTICS,
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion-mnist": _idx_source(
        "fashion-mnist",
        "FashionMNIST/raw",
        FASHION_DIGESTS,
        _FASHION_STATISTICS,
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
    "cifar10": Source(
        _find_cifar10,
        (
            Remote(
                formats.CIFAR_ARCHIVES[1],
                formats.CIFAR_MD5,
                (f"https://www.cs.toronto.edu/~kriz/{formats.CIFAR_ARCHIVES[1]}",),
            ),
        ),
        f"{' or '.join(formats.CIFAR_ARCHIVES)} or the unpacked folder {formats.CIFAR_FOLDER}",
    ),
    "femnist": Source(
        _find_femnist,
        (),
        f"femnist/train/*.json and femnist/test/*.json, made with LEAF, or {formats.FEMNIST_SUBSET}",
    ),
    "heart-disease": Source(
        _find_heart,
        tuple(
            Remote(
                f"{federations.HEART_FOLDER}/processed.{name}.data",
                md5,
                (f"{federations.HEART_URL}processed.{name}.data",),
            )
            for name, md5 in federations.HOSPITALS_MD5.items()
        ),
        f"{federations.HEART_FOLDER}/processed.{{{','.join(federations.HOSPITALS)}}}.data",
    ),
    "fdu-mtl": Source(_find_reviews, (), federations.REVIEWS),
    "shakespeare": Source(
        _find_shakespeare,
        (Remote(federations.SHAKESPEARE, federations.SHAKESPEARE_MD5, (federations.SHAKESPEARE_URL,)),),
        federations.SHAKESPEARE,
    ),
}
SMALLER = {"mnist-8x8": "mnist", "mnist-sample-8x8": "mnist-sample"}
"""Data sets made from another by `eight_by_eight`: for many nodes with small models."""
NAMES = ("mnist-sample", *SOURCES, *SMALLER)
GROUP = "rpel.datasets"
"""The entry points under which packages register data sets."""


def load(
    name: str = "mnist-sample",
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """The data set of that name, from data_dir, RPEL_DATA, the cache, or a download into the cache,
    in this order.

    >>> sample = load()
    >>> sample.train_x.shape, sample.train_x.dtype, sample.test_y.shape
    ((5000, 1, 28, 28), dtype('uint8'), (1000,))
    >>> load("cifar-10")
    Traceback (most recent call last):
    ValueError: there is no data set 'cifar-10'; the nearest is 'cifar10'
    """
    if name == "mnist-sample":
        return _sample()
    if name in SMALLER:
        return eight_by_eight(load(SMALLER[name], data_dir, download, progress), name)
    if name not in SOURCES:
        return _from_outside(name)
    folders = search_folders(data_dir)
    for folder in folders:
        data = _found(name, folder)
        if data is not None:
            return data
    return _downloaded(name, folders, download, progress)


def _from_outside(name: str) -> Dataset:
    """What a function of others makes: ``module:function``, or one that an installed package registers."""
    if not component.is_own(name) and name not in component.registered(GROUP):
        raise ValueError(
            f"there is no data set {name!r}; {nearest(name, [*NAMES, *component.registered(GROUP)])}"
        )
    made = component.find(GROUP, name, NAMES)
    dataset = made() if callable(made) else made
    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise ValueError(
            f"data set {name!r} is a {kind}: it takes a rpel.data.Dataset, or a function that returns one"
        )
    from rpel.data import user  # which takes a Dataset of anybody's, and stands above

    return user.dataset(replace(dataset, name=name), None)


def _found(name: str, folder: Path) -> Dataset | None:
    """The data set in a folder; a damaged copy is reported, except in the cache,
    which can be filled again."""
    try:
        return SOURCES[name].find(folder)
    except DataError as error:
        if folder != cache_folder():
            raise
        raise DataError(f"{error}; delete it, and it will be downloaded again") from error


def _sample() -> Dataset:
    arrays, checksums = formats.read_sample(SAMPLE_DIGESTS)
    checksums = {f"sample/{file}": digest for file, digest in checksums.items()}
    return Dataset("mnist-sample", *arrays, 10, *_MNIST_STATISTICS, checksums)


def eight_by_eight(mnist: Dataset, name: str) -> Dataset:
    """MNIST's images made small: the middle 24 × 24 pixels, of which each 3 × 3 become their mean,
    from 0 to 1.

    >>> small = eight_by_eight(load(), "mnist-sample-8x8")
    >>> small.train_x.shape, small.train_x.dtype
    ((5000, 1, 8, 8), dtype('float32'))
    """
    train_x, test_x = (
        (x[:, :, 2:26, 2:26].reshape(len(x), 1, 8, 3, 8, 3).sum(axis=(3, 5)) / (9 * 255)).astype(np.float32)
        for x in (mnist.train_x, mnist.test_x)
    )
    mean, std = _SMALL_MNIST_STATISTICS
    return replace(mnist, name=name, train_x=train_x, test_x=test_x, mean=mean, std=std)


def _downloaded(name: str, folders: list[Path], download: bool, progress: Progress | None) -> Dataset:
    source = SOURCES[name]
    advice = f"put {source.layout} into a folder and name it with --data-dir or RPEL_DATA"
    if not download or not source.remotes:
        why = "" if source.remotes else " and has no archive to download"
        raise MissingDataError(f"{name} is not in {', '.join(map(str, folders))}{why}: {advice}")
    for remote in source.remotes:
        if (cache_folder() / remote.path).is_file():
            continue
        try:
            fetch(remote, cache_folder(), progress)
        except DataError as error:
            raise MissingDataError(
                f"{name} could not be downloaded ({error}): try again, or {advice}"
            ) from error
    data = _found(name, cache_folder())
    if data is None:
        raise MissingDataError(
            f"{name} disappeared from {cache_folder()} while it was being read: try again, or {advice}"
        )
    return data
