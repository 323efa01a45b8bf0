"""What arrays are made of and who computes on them, chosen once for a run and handed down.

A backend is a module with these functions. Everything with d in its shape goes through it: whoever is above calls
NumPy only on what is small (indices, distances, weights). What each function computes is written in `plain`.
"""

from importlib import import_module
from typing import Any, Protocol, cast

from rpel.errors import nearest
from rpel.types import Floats, Integers

MODULES = {"numba": "compiled", "plain": "plain"}
"""Backends by name, and the modules of this package that they are."""


class Backend(Protocol):
    """Arrays and primitives; ``table`` (n, d), ``index`` (h, m) rows of it, −1 absent where that is allowed."""

    def repeated(self, row: Floats, rows: int) -> Floats: ...
    def empty(self, rows: int, like: Floats) -> Floats: ...
    def zeros_like(self, x: Floats) -> Floats: ...
    def finite_rows(self, table: Floats) -> Any: ...
    def squared_distances(self, table: Floats, index: Integers) -> Floats: ...
    def distances_to(self, table: Floats, index: Integers, origin: Floats | Integers | None) -> Floats: ...
    def nearest(self, distances: Floats, k: int, /) -> Any: ...
    def combine(self, table: Floats, index: Integers, weights: Floats, out: Floats | None = None) -> Floats: ...
    def coordinatewise(
        self, table: Floats, index: Integers, operation: Any, f: int = 0, mix: Any = None, out: Floats | None = None
    ) -> Floats: ...
    def moments(
        self, table: Floats, index: Integers, mean_factor: Floats, std_factor: Floats, out: Floats | None = None
    ) -> Floats: ...
    def momentum_step(
        self, x: Floats, m: Floats, g: Floats, beta: float, lr: float, decay: float, out: Floats | None = None
    ) -> tuple[Floats, Floats]: ...
    def nesterov_step(
        self, x: Floats, z: Floats, v: Floats, lr: float, momentum: float, kept: Any
    ) -> tuple[Floats, Floats]: ...
    def add_rows(self, x: Floats, columns: slice, total: Floats) -> None: ...
    def add_deviations(self, x: Floats, mean: Floats, columns: slice, total: Floats) -> None: ...
    def sum_columns(self, values: Floats) -> float: ...


def backend(name: str) -> Backend:
    """The backend of that name; nothing of the others is imported.

    >>> import numpy as np
    >>> backend("plain").repeated(np.ones(2), 3).shape
    (3, 2)
    >>> backend("nmba")
    Traceback (most recent call last):
    ValueError: there is no backend 'nmba': the nearest is 'numba' (of numba, plain)
    """
    if name not in MODULES:
        raise ValueError(f"there is no backend {name!r}: {nearest(name, list(MODULES))}")
    return cast(Backend, import_module(f"rpel.kernels.{MODULES[name]}"))
