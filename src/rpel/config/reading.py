"""TOML files that people write by hand, read strictly: whatever is wrong is one sentence with the file and the key."""

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rpel.errors import nearest

T = TypeVar("T")
_KINDS: dict[type, str] = {str: "text", int: "a whole number", float: "a number", dict: "a table", list: "a list"}


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; ValueError in one sentence where there is none."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def check_keys(where: str, found: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a key that is not known: misspelt, it would be ignored in silence.

    >>> check_keys("peer.toml", {"lisen": ""}, ["id", "listen"])
    Traceback (most recent call last):
    ValueError: peer.toml has an unknown key 'lisen': the nearest is 'listen' (of id, listen)
    """
    options = list(known)
    for key in found:
        if key not in options:
            raise ValueError(f"{where} has an unknown key {key!r}: {nearest(key, options)}")


def take(where: str, found: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """A value of the kind expected; a whole number will do for a float.

    >>> take("members.toml", {"period": 60}, "period", float)
    60.0
    >>> take("members.toml", {"period": "60"}, "period", float)
    Traceback (most recent call last):
    ValueError: members.toml: period '60' is not valid: it takes a number
    """
    value: Any = found.get(key, default)
    if value is None:
        raise ValueError(f"{where} lacks the key {key!r}")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{where}: {key} {value!r} is not valid: it takes {_KINDS[kind]}")
    result: T = value
    return result


def peer_url(text: str) -> str:
    """An address at which a member is asked: https, host and port, nothing else; without a slash at its end.

    >>> peer_url("https://Clinic.example:7443/"), peer_url("https://clinic.example")
    ('https://clinic.example:7443', 'https://clinic.example:443')
    >>> peer_url("http://clinic.example:7443")
    Traceback (most recent call last):
    ValueError: url 'http://clinic.example:7443' is not valid: write it as https://clinic.example:7443
    """
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if not host or port == 0 or any(letter.isspace() for letter in text):
        raise ValueError(f"url {text!r} is not valid: write it as https://host:7443")
    where = f"[{host}]" if ":" in host else host
    rest = (parts.username, parts.path.rstrip("/"), parts.query, parts.fragment)
    if parts.scheme != "https" or "://" not in text or any(rest):
        raise ValueError(f"url {text!r} is not valid: write it as https://{where}:{port or 7443}")
    return f"https://{where}:{port or 443}"


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
