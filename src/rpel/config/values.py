"""Values as people write them, in TOML, on the command line or in Python, made into what a Spec holds.

What cannot be read raises a short ValueError; the Spec turns it into a sentence that names the field.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any


def learning_rate(value: Any) -> Any:
    """A number, or a schedule as pairs or as text "500:0.5,1000:0.1"."""
    if isinstance(value, str) and ":" in value:
        value = [part.split(":") for part in value.split(",")]
    if isinstance(value, str | int | float):
        return _positive(float(value))
    try:
        pieces = tuple((int(last), _positive(float(rate))) for last, rate in value)
    except TypeError:
        raise ValueError("pairs are needed") from None
    if not pieces or any(last <= before for (before, _), (last, _) in pairwise(pieces)):
        raise ValueError("the rounds must rise")
    return pieces


def _positive(rate: float) -> float:
    if not 0 < rate < float("inf"):
        raise ValueError("a rate must be positive")
    return rate


def unbounded(value: Any) -> Any:
    """Infinity as the word "inf"; anything else as it is.

    >>> unbounded(float("inf")), unbounded(1.0)
    ('inf', 1.0)
    """
    return "inf" if value in (float("inf"), "inf", "infinity", "∞") else value


def parameters(value: Any) -> Any:
    """A table, JSON, or text "z=1.5,targeting=all"."""
    if isinstance(value, Mapping):
        return {key: builtin(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return json.loads(value)
    pairs = [part.partition("=") for part in value.split(",") if part]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError("each parameter needs an =")
    return {key.strip(): _scalar(text.strip()) for key, _, text in pairs}


def parse_pairs(texts: Iterable[str], what: str, example: str) -> dict[str, Any]:
    """Texts key=value (several with commas between, or JSON) as one table; what is wrong is one sentence.

    >>> parse_pairs(["lr=.1,model=mlp", '{"widths": [3, 4]}'], "hyperparameters", "lr=0.1")
    {'lr': 0.1, 'model': 'mlp', 'widths': [3, 4]}
    """
    table: dict[str, Any] = {}
    for text in texts:
        try:
            found = dict(parameters(text))
        except (ValueError, TypeError):
            found = {}
        if not found or any(not key or value == "" for key, value in found.items()):
            raise ValueError(f"{what} {text!r} is not valid: write key=value, such as {example}, or JSON")
        table |= found
    return table


def _scalar(text: str) -> Any:
    try:
        return json.loads(f"0{text}" if text.startswith(".") else text)  # .5 is a number for people
    except ValueError:
        return text


def builtin(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value


def planned(value: Any) -> Any:
    return None if value == "plan" else value


def parse_seeds(text: str | None) -> list[int]:
    """The seeds of "0-4" or "0,1,7"; none for None.

    >>> parse_seeds("0-3"), parse_seeds("1,7")
    ([0, 1, 2, 3], [1, 7])
    """
    seeds: list[int] = []
    for part in [] if text is None else text.split(","):
        first, dash, last = part.partition("-")
        seeds += range(int(first), int(last if dash else first) + 1)
    if text is not None and (not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0):
        raise ValueError("each seed once")
    return seeds
