"""Values in a tuple or a dict, as examples with several inputs are: the same done to each.

A tree is a value, a tuple of trees or a dict of trees; lists are values.
"""

from collections.abc import Callable, Iterator
from typing import Any

Tree = Any
"""An array or tensor, a tuple of trees or a dict of trees."""


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree with function(value, …) in place of each value; `others` have the same form.

    >>> mapped(lambda value: 2 * value, {"ids": 1, "masks": (2, 3)})
    {'ids': 2, 'masks': (4, 6)}
    """
    if isinstance(tree, dict):
        return {
            key: mapped(function, value, *(other[key] for other in others)) for key, value in tree.items()
        }
    if isinstance(tree, tuple):
        return tuple(mapped(function, *values) for values in zip(tree, *others, strict=True))
    return function(tree, *others)


def leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Name and value of each value, in order; the name says where it stands.

    >>> list(leaves({"ids": 1, "masks": (2, 3)}, "x"))
    [("x['ids']", 1), ("x['masks'][0]", 2), ("x['masks'][1]", 3)]
    """
    if isinstance(tree, dict | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{name}[{key!r}]")
    else:
        yield name, tree


def first(tree: Tree) -> Any:
    """The first value.

    >>> first(({"ids": 1}, 2))
    1
    """
    return next(leaves(tree))[1]
