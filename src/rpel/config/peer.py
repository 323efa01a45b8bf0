"""peer.toml: what one peer needs to know beside members.toml. Relative paths are relative to the file itself.

Invariant: no key can fix the coins. A peer draws whom it pulls from with the operating system's randomness, because a
draw that others can predict lets hostile peers choose their victims.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import AfterValidator, BeforeValidator, Strict, TypeAdapter, ValidationInfo
from pydantic_core import PydanticCustomError

from rpel.certificates import check_id
from rpel.config.record import check_keys, read_toml, validated
from rpel.errors import nearest
from rpel.files import atomic
from rpel.plugins import registered

BUILT_IN_TASKS = ("mnist-sample", "mnist")
TASKS = "rpel.tasks"
"""The entry point group under which packages register tasks."""
_OWN_TASK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_COINS = re.compile(r"seed|coin|random|rng|entropy|draw")


def check_task(task: str) -> str:
    """The task itself, if it is a built-in one, registered by an installed package, or looks like one's own.

    >>> check_task("clinic.training:task")
    'clinic.training:task'
    >>> check_task("minst")
    Traceback (most recent call last):
    ValueError: there is no task 'minst': the nearest is 'mnist' (of mnist-sample, mnist), and your own is ...:task
    """
    known = [*BUILT_IN_TASKS, *registered(TASKS)]
    if task not in known and not _OWN_TASK.fullmatch(task):
        raise ValueError(f"there is no task {task!r}: {nearest(task, known)}, and your own is written module:task")
    return task


def listen_address(text: str) -> tuple[str, int]:
    """(host, port) of an address to listen at; port 0 is any free one.

    >>> listen_address("127.0.0.1:7443"), listen_address("[::1]:0")
    (('127.0.0.1', 7443), ('::1', 0))
    """
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bare = ":" in host and not text.startswith("[")
    if not host or bare or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {text!r} is not valid: write host:port, such as 127.0.0.1:7443 or [::]:7443")
    return host, int(port)


def next_members(members: Path) -> Path:
    """members.toml → members.next.toml, beside it."""
    return members.with_name(f"{members.stem}.next{members.suffix}")


def _address(text: str) -> str:
    listen_address(text)
    return text


def _beside(value: Any, info: ValidationInfo) -> Any:
    """A path as written in the file, relative to the file's folder (the validation's context)."""
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "a path is text")
    folder: Path = info.context  # type: ignore[assignment]
    return folder / value if value else None


def _log_target(value: Any, info: ValidationInfo) -> Any:
    return value if value == "-" else _beside(value, info)


def _metrics_address(text: str, info: ValidationInfo) -> str:
    """host:port, or unix: and a path, relative to the file's folder."""
    if text.startswith("unix:"):
        folder: Path = info.context  # type: ignore[assignment]
        return f"unix:{folder / text.removeprefix('unix:')}"
    return _address(text)


Address = Annotated[str, Strict(), AfterValidator(_address)]
MetricsAddress = Annotated[str, Strict(), AfterValidator(_metrics_address)]
Located = Annotated[Path, BeforeValidator(_beside)]
MaybeLocated = Annotated[Path | None, BeforeValidator(_beside)]


@dataclass(frozen=True)
class Config:
    """One peer's settings: paths made absolute, addresses as written (see :func:`listen_address`).

    ``data`` and ``passphrase_file`` are None where none is given; ``log`` is "-" for standard output; ``next_members``
    is where a later membership is looked for.
    """

    id: Annotated[str, Strict(), AfterValidator(check_id)]
    members: Located
    key: Located
    certificate: Located
    listen: Address
    metrics_listen: MetricsAddress
    state_dir: Located
    task: Annotated[str, Strict(), AfterValidator(check_task)]
    data: MaybeLocated
    log: Annotated[Path | str, BeforeValidator(_log_target)]
    next_members: Located
    passphrase_file: MaybeLocated = None
    task_dir: Located = Path()

    @classmethod
    def load(cls, path: str | Path) -> "Config":
        """A peer.toml, checked; whether the files it names are there is not asked here."""
        path = Path(path)
        content, folder = read_toml(path), path.resolve().parent
        _refuse_coins(str(path), content)
        check_keys(str(path), content, [f.name for f in fields(cls)])
        written = {**_DEFAULTS, **content}
        written["task_dir"] = written.get("task_dir") or "."
        written["next_members"] = written.get("next_members") or str(next_members(folder / str(written["members"])))
        return validated(str(path), written, _CONFIG, context=folder)

    def save(self, path: Path) -> None:
        """Write a peer.toml that :meth:`load` reads back, with a comment on each key.

        Paths near it are relative to it, so that all can move together.
        """
        folder = path.resolve().parent
        lines = ["# One peer of an rpel network. Relative paths are relative to this file."]
        for f in fields(self):
            value = getattr(self, f.name)
            usual = value is None or value == {
                "next_members": next_members(self.members),
                "task_dir": folder,
            }.get(f.name)
            written = tomli_w.dumps({f.name: _written(value, folder)}) if not usual else f'# {f.name} = ""\n'
            lines += ["", f"# {_ABOUT[f.name]}", written.rstrip()]
        with atomic(path) as file:
            file.write(("\n".join(lines) + "\n").encode())


_CONFIG = TypeAdapter(Config)
_DEFAULTS: Mapping[str, Any] = {
    "members": "members.toml",
    "key": "peer.key",
    "certificate": "peer.crt",
    "listen": "127.0.0.1:7443",
    "metrics_listen": "127.0.0.1:9464",
    "state_dir": "state",
    "task": "mnist-sample",
    "data": "",
    "log": "-",
}
_ABOUT = {
    "id": "This peer's name in members.toml.",
    "members": "The file that all members hold; init.safetensors lies beside it.",
    "key": "The private key: it never leaves this machine, and only its owner may read it (mode 0600).",
    "certificate": "The certificate that this peer's entry in members.toml holds.",
    "listen": "host:port at which other members reach this peer; 0.0.0.0 is every network of the machine.",
    "metrics_listen": "host:port or unix:path of the metrics and health pages, plain HTTP: keep it on this machine.",
    "state_dir": "Folder for half-steps, checkpoints and, at the end, model.safetensors. One for each peer.",
    "task": "What is trained: mnist-sample, mnist, what a package registers, or your own as module:task.",
    "data": "Folder or file with this peer's data, if the task needs one.",
    "log": 'File for one JSON line a round; "-" is standard output.',
    "next_members": "Where a coming membership is looked for; usually members.next.toml beside members.toml.",
    "passphrase_file": "File with the passphrase of the key, if it has one.",
    "task_dir": "Folder in which a task of your own, module:task, is looked for; usually that of this file.",
}


def _written(value: Any, folder: Path) -> str:
    if not isinstance(value, Path):
        return str(value)
    return os.path.relpath(value, folder) if value.is_relative_to(folder.parent) else str(value)


def _refuse_coins(where: str, content: Mapping[str, Any]) -> None:
    for key in content:
        if _COINS.search(key.lower()):
            raise ValueError(
                f"{where} has a key {key!r}, but no key can fix a peer's coins: they come from the operating system, "
                "so that nobody can predict its pulls"
            )
