"""Numbers and values as people read them, in the terminal and on pages."""

from collections.abc import Mapping, Sequence
from typing import Any


def human_bytes(count: float) -> str:
    """Return a size in the unit that fits.

    >>> human_bytes(1_056_300_000)
    '1.06 GB'
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def percent(probability: float) -> str:
    """A probability with as many digits as it takes to see that it is not certain.

    >>> percent(0.973938), percent(1.0), percent(0.99999987), percent(1 - 1e-15)
    ('97.3938 %', '100 % (certain)', '99.999987 %', 'more than 99.9999999999 %')
    """
    if probability == 1:
        return "100 % (certain)"
    text = f"{100 * probability:.4f} %"
    if text == "100.0000 %":
        text = f"{100 * probability:.10f}".rstrip("0") + " %"
    return text if text != "100. %" else "more than 99.9999999999 %"


def duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> duration(48), duration(150), duration(8040), duration(1e6)
    ('48 s', '2 min 30 s', '2 h 14 min', '11 days 13 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days {whole % 86400 // 3600} h"


def shortened(names: Sequence[str], most: int = 5) -> str:
    """Join names, of which at most ``most`` are spelled out.

    >>> shortened(["a", "b", "c"], most=2), shortened([])
    ('a, b and 1 more', 'none')
    """
    rest = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {rest} more" if rest > 0 else "")


def visible(text: str) -> str:
    """Return text of others for a terminal: escapes, line ends and marks are replaced by their codes.

    >>> print(visible("Klinik Süd\\x1b[2K\\n\\u202e"))
    Klinik Süd\\x1b[2K\\n\\u202e
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def value_text(value: Any) -> str:
    """Return a field's value as people write it.

    >>> value_text((3, 5)), value_text("cosine(0.5)")
    ('3,5', 'cosine(0.5)')
    """
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def count(number: int, word: str) -> str:
    """Write a number with its noun.

    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def number(value: float | None, digits: str, unit: str = "", missing: str = "") -> str:
    """Write a value with its digits and unit, or a word where there is none.

    >>> number(0.0125, "+.3f", " s"), number(None, ".4f", missing="overflowed")
    ('+0.013 s', 'overflowed')
    """
    return missing if value is None else f"{value:{digits}}{unit}"


def ends(row: Mapping[str, Any], measure: str = "accuracy") -> str:
    """Mean and worst of a measure in a run's last row.

    >>> ends({"accuracy_mean": 0.91, "accuracy_worst": 0.8712})
    'mean 0.9100 worst 0.8712'
    """
    texts = (f"{end} {number(row[f'{measure}_{end}'], '.4f', missing='none')}" for end in ("mean", "worst"))
    return " ".join(texts)


def times(number: int) -> str:
    """How often.

    >>> times(1), times(1200)
    ('once', '1,200 times')
    """
    return "once" if number == 1 else f"{number:,} times"
