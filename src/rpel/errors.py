"""Bad input is one sentence: what is wrong, which value, and what would be right."""

from collections.abc import Iterable
from difflib import get_close_matches

_FEW, _LISTED = 4, 24
"""So few choices are always read out; more than the second number never are in full."""


class BudgetSpentError(RuntimeError):
    """The next step would exceed a privacy target; nothing of it was computed or published."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the rest of a sentence about an unknown word: the nearest choice, or all of them.

    >>> nearest("alei", ["alie", "foe"])
    "the nearest is 'alie' (of alie, foe)"
    >>> nearest("bogus", ["alie", "foe"])
    'choose one of alie, foe'
    """
    options = list(choices)
    close = get_close_matches(word, options, n=1, cutoff=0.6)
    if close:
        return f"the nearest is {close[0]!r}" + (
            f" (of {', '.join(options)})" if len(options) <= _FEW else ""
        )
    return f"choose one of {', '.join(options[:_LISTED])}{', …' if len(options) > _LISTED else ''}"


def unknown(what: str, name: object, choices: Iterable[str]) -> str:
    """Return the sentence about an unknown name: the choice that was meant, or all of them when none is near.

    >>> unknown("rule", "krumm", ["krum", "median"])
    "unknown rule 'krumm'; did you mean 'krum'?"
    >>> unknown("attack", "bogus", ["alie", "foe"])
    "unknown attack 'bogus'; choose one of alie, foe"
    """
    options = list(choices)
    if close := get_close_matches(str(name), options, n=1, cutoff=0.6):
        return f"unknown {what} {name!r}; did you mean {close[0]!r}?"
    more = ", …" if len(options) > _LISTED else ""
    return f"unknown {what} {name!r}; choose one of {', '.join(options[:_LISTED])}{more}"
