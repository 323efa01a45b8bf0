"""Code of others by name: ``module:object`` imported, or what installed packages register as entry points.

Invariant: nothing is imported before a name is asked for that only a package can have.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any


def is_own(name: str) -> bool:
    """Whether a name is of the form ``module:object``.

    >>> is_own("my.module:rule"), is_own("nnm+trimmed_mean")
    (True, False)
    """
    return ":" in name


def load(name: str, what: str) -> Any:
    """The object that ``module:object`` names; ValueError in one sentence if it is not there.

    >>> load("math:sqrt", "rule")(4.0)
    2.0
    >>> load("math:sqr", "rule")
    Traceback (most recent call last):
    ValueError: rule 'math:sqr': module math has no 'sqr'
    """
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise ValueError(f"{what} {name!r} cannot be imported: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{what} {name!r}: module {module} has no {path!r}")
        found = getattr(found, part)
    return found


@cache
def registered(group: str) -> dict[str, EntryPoint]:
    """What installed packages register under an entry point group such as ``rpel.rules``, not yet imported."""
    return {point.name: point for point in entry_points(group=group)}


def load_registered(group: str, name: str) -> Any:
    """The object registered under that name; ValueError if its package cannot be imported."""
    point = registered(group)[name]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} of {group} ({point.value}) cannot be imported: {error}") from error


def first_line(thing: Any) -> str:
    """The first line of its documentation."""
    return (getattr(thing, "__doc__", None) or "").strip().partition("\n")[0]
