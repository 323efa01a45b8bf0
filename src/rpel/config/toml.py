"""TOML files that people write by hand, read strictly: whatever is wrong is one sentence with the file and the key."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rpel.errors import nearest

T = TypeVar("T")
_KINDS = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "dict": "a table",
    "mapping": "a table",
}
_PATTERNS = {"^[0-9a-f]{64}$": "64 hexadecimal digits"}
_LARGEST = 256 << 20
_LONG_KEY = re.compile(r"(?:[\w\"'-]+[ \t]*\.[ \t]*){100}")
"""A dotted key of so many parts takes the parser a time that grows with their square; nobody writes one by hand."""


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; ValueError in one sentence where there is none."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes: at most {_LARGEST:,} are read")
    try:
        text = path.read_text("utf-8")
        if _LONG_KEY.search(text):
            raise ValueError("a key has more than 100 parts")
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is not TOML: it is nested too deeply") from None
    except ValueError as error:  # also TOMLDecodeError, UnicodeDecodeError, and integers of thousands of digits
        raise ValueError(f"{path} is not TOML: {error}") from None


def check_keys(where: str, found: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a key that is not known: misspelt, it would be ignored in silence.

    >>> check_keys("peer.toml", ["lisen"], ["id", "listen"])
    Traceback (most recent call last):
    ValueError: peer.toml has an unknown key 'lisen': the nearest is 'listen' (of id, listen)
    """
    options = list(known)
    for key in found:
        if key not in options:
            raise ValueError(f"{where} has an unknown key {key!r}: {nearest(key, options)}")


def validated(where: str, content: Mapping[str, Any], adapter: TypeAdapter[T], context: Any = None) -> T:
    """The record that pydantic makes of a table; what is wrong is one sentence that begins with ``where``.

    >>> from dataclasses import dataclass
    >>> from pydantic import StrictInt
    >>> @dataclass
    ... class Size:
    ...     width: StrictInt
    >>> validated("size.toml", {"width": "3"}, TypeAdapter(Size))
    Traceback (most recent call last):
    ValueError: size.toml: width '3' is not valid: it takes a whole number
    """
    try:
        return adapter.validate_python(content, context=context)
    except ValidationError as error:
        raise ValueError(_sentence(where, error)) from None


def _sentence(where: str, error: ValidationError) -> str:
    """The first complaint, with the key, the value given and what would be right."""
    found = error.errors()[0]
    key, value, context = ".".join(map(str, found["loc"])), found["input"], found.get("ctx", {})
    before = f"{where}: " if where else ""
    if found["type"] == "missing":
        return f"{where} lacks the key {key!r}"
    if found["type"] == "value_error":  # a validator of our own: its message is a sentence
        return f"{before}{context['error']}"
    for bound in ("ge", "le"):
        if bound in context:
            return f"{before}{key} {value:g} is impossible: the nearest is {context[bound]:.15g}"
    wanted = _PATTERNS.get(context.get("pattern", "")) or _KINDS.get(found["type"].partition("_")[0], "another value")
    return f"{before}{key} {value!r} is not valid: it takes {wanted}"
