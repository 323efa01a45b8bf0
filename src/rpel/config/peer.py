"""peer.toml: what one peer needs to know beside members.toml. Relative paths are relative to the file itself.

Law: no key can fix the coins. A peer draws whom it pulls from with the operating system's randomness, because a draw
that others can predict lets hostile peers choose their victims.
"""

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from rpel.certificates import check_id
from rpel.config.reading import check_keys, listen_address, read_toml, take
from rpel.errors import nearest
from rpel.files import atomic

BUILT_IN_TASKS = ("mnist-sample", "mnist")
_OWN_TASK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_COINS = re.compile(r"seed|coin|random|rng|entropy|draw")
_DEFAULTS = {
    "members": "members.toml",
    "key": "peer.key",
    "certificate": "peer.crt",
    "listen": "127.0.0.1:7443",
    "metrics_listen": "127.0.0.1:9464",
    "state_dir": "state",
    "task": "mnist-sample",
    "data": "",
    "log": "-",
    "next_members": "",
}


@dataclass(frozen=True)
class Config:
    """One peer's settings: paths made absolute, addresses as written (see :func:`reading.listen_address`).

    ``data`` is None where none is given; ``log`` is "-" for standard output; ``next_members`` is where a later
    membership is looked for.
    """

    id: str
    members: Path
    key: Path
    certificate: Path
    listen: str
    metrics_listen: str
    state_dir: Path
    task: str
    data: Path | None
    log: Path | str
    next_members: Path


def load(path: str | Path) -> Config:
    """A peer.toml, checked; whether the files it names are there is not asked here."""
    path = Path(path)
    content, folder = read_toml(path), path.resolve().parent
    _refuse_coins(str(path), content)
    check_keys(str(path), content, [f.name for f in fields(Config)])
    text = {key: take(str(path), content, key, str, default) for key, default in _DEFAULTS.items()}
    try:
        member = check_id(take(str(path), content, "id", str))
        check_task(text["task"])
        for key in ("listen", "metrics_listen"):
            listen_address(text[key])
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
    members = folder / text["members"]
    return Config(
        id=member,
        members=members,
        key=folder / text["key"],
        certificate=folder / text["certificate"],
        listen=text["listen"],
        metrics_listen=text["metrics_listen"],
        state_dir=folder / text["state_dir"],
        task=text["task"],
        data=folder / text["data"] if text["data"] else None,
        log="-" if text["log"] == "-" else folder / text["log"],
        next_members=folder / text["next_members"] if text["next_members"] else next_members(members),
    )


def save(config: Config, path: Path) -> None:
    """Write a peer.toml that :func:`load` reads back; paths near it are relative to it, so that all can move."""
    folder = path.resolve().parent
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    if config.next_members == next_members(config.members):
        del values["next_members"]
    text = {key: _written(v, folder) if isinstance(v, Path) else v for key, v in values.items() if v is not None}
    with atomic(path) as file:
        file.write(tomli_w.dumps(text).encode())


def _written(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder) if path.is_relative_to(folder.parent) else str(path)


def check_task(task: str) -> str:
    """The task itself, if it is a built-in one or looks like one's own.

    >>> check_task("clinic.training:task")
    'clinic.training:task'
    >>> check_task("minst")
    Traceback (most recent call last):
    ValueError: there is no task 'minst': the nearest is 'mnist' (of mnist-sample, mnist), and your own is ...:task
    """
    if task not in BUILT_IN_TASKS and not _OWN_TASK.fullmatch(task):
        raise ValueError(
            f"there is no task {task!r}: {nearest(task, BUILT_IN_TASKS)}, and your own is written module:task"
        )
    return task


def next_members(members: Path) -> Path:
    """members.toml → members.next.toml, beside it."""
    return members.with_name(f"{members.stem}.next{members.suffix}")


def _refuse_coins(where: str, content: dict[str, Any]) -> None:
    for key in content:
        if _COINS.search(key.lower()):
            raise ValueError(
                f"{where} has a key {key!r}, but no key can fix a peer's coins: they come from the operating system, "
                "so that nobody can predict its pulls"
            )
