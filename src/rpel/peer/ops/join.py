"""Become a member: make a key, a certificate, a peer.toml and an entry for members.toml."""

import math
import socket
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rpel import certificates
from rpel.files import write_text
from rpel.peer.config.membership import INIT_FILE, Member, Membership, peer_url
from rpel.peer.config.settings import Config
from rpel.peer.core.wire import Layout
from rpel.peer.net import tls
from rpel.peer.state.models import read_layout
from rpel.text import visible

METRICS_PORT = 9464
MEMORY_FILE = "rpel-peer-memory.conf"
_PROCESS = 600_000_000  # bytes of a peer without models: the interpreter, torch, compiled kernels


@dataclass(frozen=True)
class Joined:
    """A new identity, its files, and notes for its operator."""

    member: Member
    config: Path
    key: Path
    certificate: Path
    expires: datetime
    notes: tuple[str, ...]
    memory: Path | None = None
    """A systemd drop-in with the memory that the plan needs, if members.toml is there already."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values; the key itself is never printed."""
        return {
            **{key: getattr(self.member, key) for key in ("id", "organisation", "url", "fingerprint")},
            **{key: str(getattr(self, key)) for key in ("config", "key", "certificate")},
            "expires": self.expires.isoformat(),
            "entry": self.member.toml(),
        }


def join(
    *, url: str, organisation: str = "", folder: Path = Path(), days: int = certificates.VALID_DAYS,
    **settings: Any,
) -> Joined:  # fmt: skip
    """Make peer.key (only its owner can read it), peer.crt and peer.toml, and overwrite nothing.

    A peer.toml that is there without a key, as `rpel new` writes it, is used and must agree with
    ``settings``.
    The key is encrypted with the first line of ``passphrase_file``, if that is given.

    Args:
        url: Where the other members reach this peer.
        organisation: Who runs it.
        folder: The folder to write to.
        days: How long the certificate is valid.
        settings: Keys of peer.toml such as ``id``; None is a key that is left out.
    """
    url, path = peer_url(url), folder / "peer.toml"
    given = {key: value.resolve() if isinstance(value, Path) else value for key, value in settings.items()}
    given = {key: value for key, value in given.items() if value is not None}
    own = _agreed(path, given) if path.exists() else _new_settings(path, url, given)
    for file in (own.key, own.certificate):
        if file.exists():
            raise ValueError(
                f"{_near(file)} exists already and is not overwritten: choose another folder with --dir"
            )
    passphrase = tls.read_passphrase(own.passphrase_file) if own.passphrase_file else b""
    secret, pem = certificates.create(own.id, days, passphrase=passphrase)
    member = Member.of(own.id, url, pem, organisation)
    notes = _notes(_near(own.members), member)
    tls.write_key(own.key, secret)
    write_text(own.certificate, pem)
    if not path.exists():
        own.save(path)
    expires = certificates.read_certificate(pem).not_after
    return Joined(member, path, _near(own.key), _near(own.certificate), expires, notes, _memory(folder, own))


def _near(path: Path) -> Path:
    """Return a path relative to the working directory if it is below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _new_settings(path: Path, url: str, given: dict[str, Any]) -> Config:
    """Return the settings of a new peer."""
    if "id" not in given:
        raise ValueError(f"--id is missing, and there is no {path} that has it: name this peer, as clinic-3")
    usual = {"listen": usual_listen(url), "metrics_listen": free_metrics(path.parent)}
    members = Path("members.toml").resolve()
    return Config.of({"members": members, **usual, **given}, path.resolve().parent, "the new peer.toml")


def _agreed(path: Path, given: dict[str, Any]) -> Config:
    """Return the settings of the peer.toml that is there already; what is given must be the same."""
    own = Config.load(path)
    for key, value in given.items():
        if getattr(own, key) != value:
            raise ValueError(
                f"{path} exists with {key} = {str(getattr(own, key))!r}, not {str(value)!r}: change it "
                "there, or choose another folder with --dir"
            )
    return own


def memory_needed(membership: Membership, layout: Layout) -> int:
    """Return the bytes that a peer may need: itself and s + 6 models, and half as much again."""
    return int(1.5 * (_PROCESS + (membership.pull + 6) * layout.size))


def _memory(folder: Path, own: Config) -> Path | None:
    """Write how much memory a service needs, if members.toml and the initial model are there already."""
    init = own.members.with_name(INIT_FILE)
    if not own.members.exists() or not init.exists():
        return None
    needed = memory_needed(Membership.load(own.members, draft=True), read_layout(init))
    path = folder / MEMORY_FILE
    about = "# For /etc/systemd/system/rpel-peer.service.d/"
    write_text(path, f"{about}\n[Service]\nMemoryMax={math.ceil(needed / 1e6)}M\n")
    return path


def free_metrics(folder: Path) -> str:
    """Return the first address from port 9464 on that is free and in no peer.toml of neighbouring folders."""
    named = set()
    for path in folder.resolve().parent.glob("*/peer.toml"):
        with suppress(ValueError, OSError):
            named.add(Config.load(path).metrics_listen)
    for port in range(METRICS_PORT, METRICS_PORT + 1000):
        address = f"127.0.0.1:{port}"
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if address not in named:
                return address
    return "127.0.0.1:0"


def usual_listen(url: str) -> str:
    """Return where a peer with this address listens: on all networks unless the address is a loopback one.

    >>> usual_listen("https://127.0.0.1:7001"), usual_listen("https://clinic.example:7443")
    ('127.0.0.1:7001', '0.0.0.0:7443')
    """
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    try:
        address = ip_address(host)
    except ValueError:
        return f"0.0.0.0:{parts.port}"
    here = host if address.is_loopback else "::" if address.version == 6 else "0.0.0.0"
    return f"[{here}]:{parts.port}" if ":" in here else f"{here}:{parts.port}"


def _notes(path: Path, member: Member) -> tuple[str, ...]:
    """Return what the membership, if it is there already, says about this member."""
    if not path.exists():
        return (f"{path} is not there yet: put the network's file there, with init.safetensors beside it",)
    terms = Membership.load(path, draft=True)
    for other in terms.members:
        if other.id == member.id:
            return (
                f"{member.id!r} is in {path} already: its new key comes into force by `rpel network "
                "change --replace`",
            )
        if other.url == member.url:
            raise ValueError(
                f"url {member.url!r} is that of {other.id!r} in {path}: each member needs its own"
            )
    if len(terms.members) >= terms.nodes:
        return (f"{path} has all of its {terms.nodes} members already: one more joins by `rpel network add`",)
    return ()


# --- entries ------------------------------------------------------------------------------------------------


def read_entries(path: Path) -> list[Member]:
    """Read and check the members in a file of [[member]] tables."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: it takes an entry that `rpel peer init` printed")
    wrong = f"{path} is not an entry that `rpel peer init` printed"
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{wrong}: {error}") from None
    entries: Any = content.pop("member", [])
    tables = isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)
    if content or not tables:
        raise ValueError(f"{wrong}: it takes tables [[member]]")
    where = [f"{path}, member {number}" for number in range(1, len(entries) + 1)]
    return [
        Member.parse(name if len(entries) > 1 else str(path), entry)
        for name, entry in zip(where, entries, strict=True)
    ]


def entry_lines(member: Member) -> list[str]:
    """Return who a member is and its fingerprint, in three lines of at most 80 columns.

    What the entry says is one line, too short for a fingerprint: it must not pass for what is compared.
    """
    texts = (visible(" ".join(text.split())) for text in (member.organisation, member.url))
    who = "  ".join([member.id, *(_shorten(text, 60) for text in texts if text)])
    digits = grouped(member.fingerprint)
    return [_shorten(who, 80), f"  {digits[:39]}", f"  {digits[40:]}"]


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def grouped(fingerprint: str) -> str:
    """Return a fingerprint in groups of four, as it is read over the telephone.

    >>> grouped("0e56f6f15911271d")
    '0e56 f6f1 5911 271d'
    """
    return " ".join(fingerprint[i : i + 4] for i in range(0, len(fingerprint), 4))
