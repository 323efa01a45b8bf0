"""peer.toml: the settings of one peer. Relative paths are relative to the file itself.

Invariant: no key can seed a peer's draws. They come from the operating system, because hostile peers choose
their victims if they can predict them.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import tomli_w
from pydantic import AfterValidator, Field

from rpel.certificates import check_id
from rpel.component import registered
from rpel.errors import nearest
from rpel.files import atomic
from rpel.record import StrictRecord, read_toml

BUILT_IN_TASKS = ("mnist-sample", "mnist")
TASKS = "rpel.tasks"
"""The entry point group under which packages register tasks."""
_OWN_TASK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SEEDING = re.compile(r"seed|coin|random|rng|entropy|draw")


def check_task(task: str) -> str:
    """Return the task if it is built in, registered by an installed package, or written as module:task.

    >>> check_task("clinic.training:task")
    'clinic.training:task'
    >>> check_task("minst")
    Traceback (most recent call last):
    ValueError: there is no task 'minst': the nearest is 'mnist' (of mnist-sample, mnist), and your own
    is ...:task
    """
    known = [*BUILT_IN_TASKS, *registered(TASKS)]
    if task not in known and not _OWN_TASK.fullmatch(task):
        raise ValueError(
            f"there is no task {task!r}: {nearest(task, known)}, and your own is written module:task"
        )
    return task


def listen_address(text: str) -> tuple[str, int]:
    """Return (host, port) of an address to listen at; port 0 is any free one.

    >>> listen_address("127.0.0.1:7443"), listen_address("[::1]:0")
    (('127.0.0.1', 7443), ('::1', 0))
    """
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bare = ":" in host and not text.startswith("[")
    if not host or bare or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(
            f"address {text!r} is not valid: write host:port, such as 127.0.0.1:7443 or [::]:7443"
        )
    return host, int(port)


def next_members(members: Path) -> Path:
    """Return the path of members.next.toml beside members.toml."""
    return members.with_name(f"{members.stem}.next{members.suffix}")


def _address(text: str) -> str:
    listen_address(text)
    return text


def _metrics_address(text: str) -> str:
    return text if text.startswith("unix:") else _address(text)


Address = Annotated[str, AfterValidator(_address)]
MetricsAddress = Annotated[str, AfterValidator(_metrics_address)]


class Config(StrictRecord):
    """One peer's settings, with absolute paths, and addresses as written (see :func:`listen_address`)."""

    id: Annotated[str, AfterValidator(check_id)] = Field(description="This peer's name in members.toml.")
    members: Path = Field(
        default=Path("members.toml"),
        description="The file that all members share; init.safetensors is beside it.",
    )
    key: Path = Field(
        default=Path("peer.key"),
        description="The private key: it never leaves this machine, and only its owner can read it (mode "
        "0600).",
    )
    certificate: Path = Field(
        default=Path("peer.crt"), description="The certificate in this peer's entry in members.toml."
    )
    listen: Address = Field(
        default="127.0.0.1:7443",
        description="host:port at which other members reach this peer; 0.0.0.0 is every network of the "
        "machine.",
    )
    metrics_listen: MetricsAddress = Field(
        default="127.0.0.1:9464",
        description="host:port or unix:path of the metrics and health pages, plain HTTP: keep it on this "
        "machine.",
    )
    state_dir: Path = Field(
        default=Path("state"),
        description="Folder for half-steps, checkpoints and, at the end, model.safetensors. One for each "
        "peer.",
    )
    task: Annotated[str, AfterValidator(check_task)] = Field(
        default=BUILT_IN_TASKS[0],
        description="What is trained: mnist-sample, mnist, what a package registers, or your own as "
        "module:task.",
    )
    data: Path | None = Field(
        default=None, description="Folder or file with this peer's data, if the task needs one."
    )
    log: Path | str | None = Field(
        default=None,
        description='Another file for the lines of the signed log, audit.jsonl in the state folder; "-" is '
        "standard output.",
    )
    next_members: Path = Field(
        description="Where a later membership is announced; usually members.next.toml beside members.toml."
    )
    passphrase_file: Path | None = Field(
        default=None, description="File with the passphrase of the key, if it has one."
    )
    task_dir: Path = Field(
        default=Path(),
        description="Folder of the module of your own task, module:task; usually that of this file.",
    )
    max_grad_norm: float | None = Field(
        default=None,
        description="Differential privacy: gradients of single examples are clipped to this norm.",
        gt=0,
    )
    target_epsilon: float | None = Field(
        default=None,
        description="Plan the noise for this epsilon, or stop before the step that would exceed it.",
        gt=0,
    )
    target_delta: float | None = Field(
        default=None, description="delta of epsilon, far below one over this peer's examples.", gt=0, lt=1
    )
    noise_multiplier: float | None = Field(
        default=None, description="The noise itself, in multiples of max_grad_norm; unset: planned.", gt=0
    )
    unspent_rounds: int | None = Field(
        default=None,
        description="Count all rounds up to now as spent, even if their state is lost, except this many "
        "first ones.",
        ge=0,
    )

    @classmethod
    def load(cls, path: str | Path) -> "Config":
        """Read and check a peer.toml; the files it names may be missing."""
        path = Path(path)
        return cls.of(read_toml(path), path.resolve().parent, str(path))

    @classmethod
    def of(cls, content: Mapping[str, Any], folder: Path | None = None, where: str = "config") -> "Config":
        """Check the content of a peer.toml in a folder, by default the working directory.

        >>> Config.of({"id": "clinic-3"}, Path("/srv")).state_dir == Path("/srv/state")
        True
        """
        folder = folder or Path.cwd()
        for key in content:
            if _SEEDING.search(key.lower()):
                raise ValueError(
                    f"{where} has a key {key!r}, but draws come from the operating system and cannot be "
                    "seeded: predictable pulls would let hostile peers choose their victims"
                )
        usual = {key: field.default for key, field in cls.model_fields.items() if not field.is_required()}
        written = {key: _located(key, value, folder) for key, value in {**usual, **content}.items()}
        if not written.get("next_members"):  # members may still be of a wrong type, which is refused below
            written["next_members"] = next_members(folder / str(written["members"]))
        return cls.read(where, written)

    def save(self, path: Path) -> None:
        """Write a peer.toml that :meth:`load` reads back, with a comment on each key.

        Paths near it are written relative to it, so that the folder can be moved.
        """
        folder = path.resolve().parent
        lines = ["# One peer of an rpel network. Relative paths are relative to this file."]
        usual = {
            "next_members": next_members(self.members),
            "task_dir": folder,
        }
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            left_out = value is None or value == usual.get(key)
            written = f'# {key} = ""' if left_out else tomli_w.dumps({key: _written(value, folder)})
            lines += ["", f"# {field.description}", written.rstrip()]
        with atomic(path) as file:
            file.write(("\n".join(lines) + "\n").encode())


_PATHS = {
    key
    for key, field in Config.model_fields.items()
    if Path in (field.annotation, *get_args(field.annotation))
}


def _located(key: str, value: Any, folder: Path) -> Any:
    """Return a path relative to the file's folder; "" means none, and other types are refused later."""
    if key == "metrics_listen" and str(value).startswith("unix:"):
        return f"unix:{folder / str(value).removeprefix('unix:')}"
    if key not in _PATHS or not isinstance(value, str | Path) or value == "-":
        return value
    return folder / value if value != "" else folder if key == "task_dir" else None


def _written(value: Any, folder: Path) -> str | float:
    if not isinstance(value, Path):
        return value if isinstance(value, int | float) else str(value)
    return os.path.relpath(value, folder) if value.is_relative_to(folder.parent) else str(value)
