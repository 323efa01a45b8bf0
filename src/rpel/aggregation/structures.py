"""Lists of arrays, of tensors, or of state_dicts as the m vectors of a rule, and the result as one of them.

Whole numbers in a state_dict (BatchNorm's count of batches) are no part of the vectors: the result has the first one's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rpel.aggregation.base import Array, is_tensor


def stacked(items: Sequence[Any], name: str) -> tuple[Array, Callable[[Array], Any]]:
    """(m, d) what the m items hold, and the way back from a vector (d,) to such an item.

    >>> x, back = stacked([{"w": np.ones((2, 2))}, {"w": np.zeros((2, 2))}], "mean")
    >>> x.shape, back(x[0])["w"].shape
    ((2, 4), (2, 2))
    """
    if not items:
        raise ValueError(f"{name} needs at least one vector")
    first, leaves = items[0], [_leaves(item) for item in items]
    floating = [_is_floating(leaf) for _, leaf in leaves[0]]
    shapes = [(key, tuple(leaf.shape)) for key, leaf in leaves[0]]
    for other in leaves[1:]:
        if [(key, tuple(leaf.shape)) for key, leaf in other] != shapes:
            raise ValueError(f"{name} needs items that all have the same entries of the same shapes")
    if not any(floating):
        raise ValueError(f"{name} needs items with floats in them")

    def back(vector: Array) -> Any:
        start, parts = 0, {}
        for (key, leaf), counts in zip(leaves[0], floating, strict=True):
            if not counts:
                parts[key] = leaf
                continue
            size = int(np.prod(leaf.shape, dtype=np.int64))
            parts[key] = _like(vector[start : start + size].reshape(tuple(leaf.shape)), leaf)
            start += size
        return _rebuilt(first, parts)

    return _table([[leaf for (_, leaf), counts in zip(one, floating, strict=True) if counts] for one in leaves]), back


def _leaves(item: Any) -> list[tuple[Any, Any]]:
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, list | tuple):
        return list(enumerate(item))
    return [(None, item)]


def _rebuilt(first: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(first, Mapping):
        made = type(first)()
        made.update(parts)  # type: ignore[attr-defined]
        return made
    return type(first)(parts.values()) if isinstance(first, list | tuple) else parts[None]


def _is_floating(leaf: Any) -> bool:
    if is_tensor(leaf):
        return bool(leaf.is_floating_point())
    if not isinstance(leaf, np.ndarray):
        raise ValueError(f"a rule takes lists of arrays, tensors or dictionaries of them, not {type(leaf).__name__}")
    return bool(leaf.dtype.kind == "f")


def _table(rows: list[list[Any]]) -> Array:
    if not is_tensor(rows[0][0]):
        return np.stack([np.concatenate([leaf.reshape(-1) for leaf in row]) for row in rows])
    import torch

    widest = torch.float64 if any(leaf.dtype == torch.float64 for leaf in rows[0]) else torch.float32
    return torch.stack([torch.cat([leaf.detach().reshape(-1).to(widest) for leaf in row]) for row in rows])


def _like(part: Array, leaf: Any) -> Any:
    return part.to(leaf.dtype) if is_tensor(leaf) else part.astype(leaf.dtype)
