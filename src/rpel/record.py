"""Turn what people write into a checked record.

TOML is read strictly and values are accepted in every form they come in.

Invariant: a record is checked when it is made, and an error is one sentence that names the key, the value and
what would be right.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from rpel.component import parse
from rpel.errors import nearest, unknown

OWN = "own"
"""The dataset, model or partition of a run that trains user-supplied objects."""
_LARGEST = 256 << 20
_LONG_KEY = re.compile(r"(?:[\w\"'-]+[ \t]*\.[ \t]*){100}")
"""A dotted key of so many parts takes the parser a time that grows with their square;
nobody writes one by hand."""


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
    except ValueError as error:
        # also TOMLDecodeError, UnicodeDecodeError, and integers of thousands of digits
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


# --- records ------------------------------------------------------------------------------------------------


class CheckedRecord(BaseModel):
    """A frozen record read from a file or from keywords, with errors of one sentence each.

    The value of a field has been checked. To change one, make another record with :meth:`replace`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **fields: Any) -> None:
        known = type(self).model_fields
        for key in fields:
            if key not in known:
                raise ValueError(unknown("field", key, known))
        try:
            super().__init__(**{key: builtin(value) for key, value in fields.items()})
        except ValidationError as error:
            raise ValueError(_sentence(error, known)) from None


class StrictRecord(CheckedRecord, strict=True):
    """What a network's people write into its files: no text is taken for a number."""

    @classmethod
    def read(cls, where: str, content: Mapping[str, Any]) -> Self:
        """The record of a table; what is wrong is one sentence that begins with ``where``, a file.

        >>> class Size(StrictRecord):
        ...     width: int
        >>> Size.read("size.toml", {"width": "3"})
        Traceback (most recent call last):
        ValueError: size.toml: width '3' is not valid: it takes a whole number
        """
        check_keys(where, content, cls.model_fields)
        for key, field in cls.model_fields.items():
            if field.is_required() and key not in content:
                raise ValueError(f"{where} lacks the key {key!r}")
        try:
            return cls(**content)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def replace(self, **changes: Any) -> Self:
        """The same with some fields changed, checked again."""
        return type(self)(**{**self.given(), **changes})

    def given(self) -> dict[str, Any]:
        """The fields by name, as they are: records within it stay records."""
        return {key: getattr(self, key) for key in type(self).model_fields}


# --- one sentence -------------------------------------------------------------------------------------------

_PATTERNS = {"^[0-9a-f]{64}$": "64 hexadecimal digits"}
_KINDS = {
    "int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false",
    "string": "text", "path": "text", "is": "text", "dict": "a table", "mapping": "a table",
}  # fmt: skip
_BOUNDS = {
    "ge": "the nearest is",
    "gt": "it must be more than",
    "le": "the nearest is",
    "lt": "it must be less than",
}


def _sentence(error: ValidationError, fields: Mapping[str, FieldInfo]) -> str:
    """The first complaint, with the key, the value given and what would be right."""
    detail = error.errors()[0]
    key, value, context = (
        str(detail["loc"][0]) if detail["loc"] else "",
        detail["input"],
        detail.get("ctx", {}),
    )
    field = fields.get(key)
    if detail["type"] == "missing":
        return f"{key} must be given"
    if field is None or (detail["type"] == "value_error" and not field.examples):
        # of a validator of our own: its message is a sentence
        return str(context.get("error", detail["msg"]))
    if detail["type"] in ("literal_error", "enum"):
        return f"{key} {value!r} is unknown: {nearest(str(value), choices(field.annotation))}"
    for bound, words in _BOUNDS.items():
        if bound in context:
            shown = f"{value:g}" if isinstance(value, float) else value
            return f"{key} {shown} is impossible: {words} {context[bound]:.15g}"
    return f"{key} {value!r} is not valid: it takes {_wanted(field, detail['type'], context)}"


def _wanted(field: FieldInfo, problem: str, context: Mapping[str, Any]) -> str:
    """What would be right: the field's own words, or its kind and its default."""
    if field.examples:
        return str(field.examples[0])
    kind = _PATTERNS.get(context.get("pattern", "")) or _KINDS.get(problem.partition("_")[0], "another value")
    plain = isinstance(field.default, int | float | str) and not isinstance(field.default, bool)
    return f"{kind} such as {field.default}" if plain else kind


def choices(annotation: Any) -> list[str]:
    """List the words that a Literal or an enum allows, without the one that only Python code uses.

    >>> from typing import Literal
    >>> choices(Literal["dirichlet", "iid", "own"])
    ['dirichlet', 'iid']
    """
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(member.value) for member in annotation]
    return [str(choice) for choice in get_args(annotation) if choice != OWN]


# --- values as people write them ----------------------------------------------------------------------------


def parse_pairs(texts: Iterable[str], what: str, example: str) -> dict[str, Any]:
    """Texts key=value (several with commas between, or JSON) as one table; what is wrong is one sentence.

    >>> parse_pairs(["lr=.1,model=mlp", '{"widths": [3, 4]}'], "hyperparameters", "lr=0.1")
    {'lr': 0.1, 'model': 'mlp', 'widths': [3, 4]}
    """
    table: dict[str, Any] = {}
    for text in texts:
        try:
            pairs = (
                json.loads(text)
                if text.lstrip().startswith("{")
                else parse(f"_({text})").bind([], anything=True)
            )
        except (ValueError, TypeError):
            pairs = {}
        if not pairs:
            raise ValueError(f"{what} {text!r} is not valid: write key=value, such as {example}, or JSON")
        table |= pairs
    return table


def builtin(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value


_MOST_SEEDS = 1_000_000
"""More are taken for a slip of the pen: they would fill the memory before the first run."""


def parse_seeds(text: str | None) -> list[int]:
    """The seeds of "0-4" or "0,1,7"; none for None.

    >>> parse_seeds("0-3"), parse_seeds("1,7")
    ([0, 1, 2, 3], [1, 7])
    """
    seeds: list[int] = []
    for part in [] if text is None else text.split(","):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if high - low >= _MOST_SEEDS:
            raise ValueError("nobody runs so many")
        seeds += range(low, high + 1)
    if text is not None and (not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0):
        raise ValueError("each seed once")
    return seeds
