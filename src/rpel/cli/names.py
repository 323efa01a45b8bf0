"""``rpel list``: what there is to choose from, each with one line."""

import inspect
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from rpel.cli.options import Json
from rpel.errors import nearest

_PEERS = {
    "pull": "each node pulls s random peers",
    "everybody": "each node hears all others",
    "graph": "neighbours of a fixed graph of the same budget",
    "push": "each node pushes to s random peers",
    "regular": "a random regular graph each round",
}
_DATASETS = {
    "mnist-sample": "5,000 images of MNIST, inside the package",
    "mnist": "MNIST, 28 × 28 digits",
    "fashion-mnist": "Fashion-MNIST, 28 × 28 articles of clothing",
    "cifar10": "CIFAR-10, 32 × 32 colour images",
    "femnist": "FEMNIST in LEAF's format, by writer; from a folder of yours",
    "mnist-8x8": "MNIST made 8 × 8: centre crop, then means of 3 × 3 pixels",
    "mnist-sample-8x8": "the embedded sample made 8 × 8",
}


def list_names(
    kind: Annotated[str, typer.Argument(metavar="rules|attacks|methods|datasets|presets", show_default=False)],
    as_json: Json = False,
) -> None:
    """List the rules, attacks, methods, data sets or presets there are, with one line each.

    Example: rpel list attacks
    """
    kinds: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {
        "rules": _rules, "attacks": _attacks, "methods": _methods, "datasets": _datasets, "presets": _presets,
    }  # fmt: skip
    if kind not in kinds:
        raise ValueError(f"there is no list of {kind!r}; {nearest(kind, kinds)}")
    rows = [{"name": name, "about": about} for name, about in kinds[kind]()]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['about']}")


def _first_line(thing: Any) -> str:
    """The first line of its documentation."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _rules() -> Iterable[tuple[str, str]]:
    from rpel.aggregation import registry

    return registry.about()


def _attacks() -> Iterable[tuple[str, str]]:
    from rpel.attacks import registry

    return registry.about()


def _methods() -> Iterable[tuple[str, str]]:
    from rpel.simulation.methods import METHODS

    return ((name, f"{_PEERS[method.peers]}; {method.rule}") for name, method in METHODS.items())


def _datasets() -> Iterable[tuple[str, str]]:
    from typing import get_args

    from rpel.config import spec

    return ((name, _DATASETS.get(name, "")) for name in get_args(spec.DatasetName) if name != spec.OWN)


def _presets() -> Iterable[tuple[str, str]]:
    from importlib import resources

    from rpel.config.spec import presets

    folder = resources.files("rpel.config") / "presets"
    texts = ((name, (folder / f"{name}.toml").read_text("utf-8")) for name in presets())
    return ((name, text.partition("\n")[0].lstrip("# ")) for name, text in texts)
