"""The command that makes a run again: a preset and the options in which the run differs from it."""

import shlex
from functools import cache
from typing import Any

from rpel.config.spec import OWN, Spec, load, presets
from rpel.text import value_text

_LEFT_OUT = ("data_dir", "out", "seeds")  # where things lie on one machine, and what one run of several does not know


def command(spec: Spec) -> str | None:
    """The command line, from the preset the run is named after or else the nearest; None for objects from Python.

    >>> command(load("mnist-30").but(attack="foe", seed=3))
    'rpel run mnist-30 --attack foe --seed 3'
    """
    if OWN in (spec.dataset, spec.model):
        return None
    known = _presets()
    base = (
        spec.name if spec.name in known else min(known, key=lambda name: (len(_differences(spec, known[name])), name))
    )
    words = [
        "rpel",
        "run",
        base,
        *(word for key, value in _differences(spec, known[base]) for word in _flag(key, value)),
    ]
    return shlex.join(words)


@cache
def _presets() -> dict[str, Spec]:
    return {name: load(name) for name in presets()}


def _differences(spec: Spec, base: Spec) -> list[tuple[str, Any]]:
    """(field, value) wherever the run is not as the preset; what is unset needs no option."""
    pairs = [(key, getattr(spec, key), getattr(base, key)) for key in Spec.model_fields if key not in _LEFT_OUT]
    return [(key, value) for key, value, theirs in pairs if value is not None and value != theirs]


def _flag(key: str, value: Any) -> list[str]:
    """The option that sets a field.

    >>> _flag("b_hat", 4), _flag("silent", False)
    (['--b-hat', '4'], ['--not-silent'])
    """
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--not-{key}"]
    return [f"--{name}", value_text(value)]
