"""What a sweep file means: a base, a grid over any fields, and cells of their own.

It is a run file with more: ``preset`` and fields (at the top or under [base]), [grid] with lists of values, all
combinations of which are run, and [[cells]] with further combinations. Law: a field that does not exist is an error of
the file; a value that cannot be is a failed cell, and the others run.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rpel.config.spec import Spec, load
from rpel.errors import nearest

_TABLES = ("preset", "base", "grid", "cells")
_NOT_MEANING = {"out", "threads"}


@dataclass(frozen=True)
class Cell:
    """One combination: what the grid gave it, and the run it makes or the sentence that says why there is none."""

    values: Mapping[str, Any]
    spec: Spec | None
    error: str = ""

    @property
    def label(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.values.items()) or "base"

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits of what is run."""
        fields = {} if self.spec is None else self.spec.model_dump(exclude=_NOT_MEANING)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def read(path: str | Path) -> list[Cell]:
    """The cells of a sweep file; a field that does not exist is an error, a value that cannot be is a failed cell."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: a sweep is a TOML file with [grid]")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    return cells(content, re.sub(r"[^\w.+-]", "-", path.stem))


def cells(content: Mapping[str, Any], name: str = "sweep") -> list[Cell]:
    """All combinations of the grid, then the cells given one by one.

    >>> found = cells({"rounds": 5, "grid": {"nodes": [10, 20], "attack": ["alie", "foe"]}, "cells": [{"nodes": 30}]})
    >>> [cell.label for cell in found][2:]
    ['nodes 20, attack alie', 'nodes 20, attack foe', 'nodes 30']
    >>> cells({"grid": {"nods": [10]}})
    Traceback (most recent call last):
    ValueError: there is no field 'nods' in [grid]; the nearest is 'nodes'
    """
    base, grid, given = _base(content), content.get("grid", {}), content.get("cells", [])
    if not isinstance(grid, Mapping) or not isinstance(given, list) or not all(isinstance(c, Mapping) for c in given):
        raise ValueError("[grid] is a table of lists and [[cells]] are tables, as in attack = ['alie', 'foe']")
    _known("base", base)
    _known("grid", grid)
    for values in given:
        _known("cells", values)
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{key} in [grid] is {values!r}: it takes a list such as [{values!r}]")
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())] if grid else []
    combinations += [dict(values) for values in given]
    if not combinations:
        raise ValueError("the sweep is empty: it needs [grid] or [[cells]]")
    preset = load(base["preset"]) if "preset" in base else Spec()
    fixed = {"name": name, **{key: value for key, value in base.items() if key != "preset"}}
    found: dict[str, Cell] = {}
    for values in combinations:
        cell = _cell(preset, fixed, values)
        found.setdefault(cell.key if cell.spec else cell.label, cell)  # the same run only once
    return list(found.values())


def _base(content: Mapping[str, Any]) -> dict[str, Any]:
    """Preset and fields, from the top of the file and from base, which may also be a preset's name."""
    base = content.get("base", {})
    table = {"preset": base} if isinstance(base, str) else dict(base)
    top = {key: value for key, value in content.items() if key == "preset" or key not in _TABLES}
    return {**top, **table}


def _known(where: str, fields: Mapping[str, Any]) -> None:
    names = [*Spec.model_fields, "preset"]
    for key in fields:
        if key not in names:
            raise ValueError(f"there is no field {key!r} in [{where}]; {nearest(key, names)}")


def _cell(preset: Spec, fixed: Mapping[str, Any], values: Mapping[str, Any]) -> Cell:
    try:
        start = load(values["preset"]) if "preset" in values else preset
        fields = {key: value for key, value in values.items() if key != "preset"}
        return Cell(values, start.but(**{**fixed, **fields}))
    except ValueError as error:
        return Cell(values, None, str(error))
