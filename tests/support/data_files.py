"""Small data sets as files: any layout, and FEMNIST in LEAF's."""

import json
from pathlib import Path
from typing import Any


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
