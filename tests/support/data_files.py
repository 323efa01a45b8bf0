"""Small data sets as files: any layout, and FEMNIST in LEAF's."""

import gzip
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rpel

IDX = ("images-idx3-ubyte", "labels-idx1-ubyte")


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def to_idx(array: NDArray[np.uint8]) -> bytes:
    """Return an array as an unpacked IDX file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def put(files: dict[str, bytes], folder: Path) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def leaf_file(users: dict[str, list[int]], pixel: float = 1.0) -> dict[str, Any]:
    data = {user: {"x": [[pixel] * 783 + [0.5]] * len(labels), "y": labels} for user, labels in users.items()}
    return {
        "users": list(users),
        "num_samples": [len(labels) for labels in users.values()],
        "user_data": data,
    }


def femnist(folder: Path, train: dict[str, Any], test: dict[str, Any]) -> Path:
    contents = {"femnist/train/a.json": train, "femnist/test/a.json": test}
    return put({path: json.dumps(content).encode() for path, content in contents.items()}, folder)


def sample_of_tests() -> tuple[Any, Any]:
    """Return the 1,000 test images of the packaged sample, uint8, and their digits."""
    folder = Path(str(rpel.__file__)).parent / "data" / "sample"
    x, y = (gzip.decompress((folder / f"t10k-{name}.gz").read_bytes()) for name in IDX)
    return np.frombuffer(x, np.uint8, offset=16).reshape(-1, 28, 28), np.frombuffer(y, np.uint8, offset=8)
