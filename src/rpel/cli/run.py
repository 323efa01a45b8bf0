"""``rpel run``, ``resume``, ``show`` and ``list``. Every field of a Spec is an option,
made from the field itself."""

import inspect
import sys
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from rpel import spec as specs
from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.errors import nearest
from rpel.processes import uncollected
from rpel.record import choices
from rpel.text import count, ends

if TYPE_CHECKING:
    from rpel.runs.run import Run


def run(source: str, force: bool, reuse: bool, tensorboard: bool, as_json: bool, **options: Any) -> None:
    """Train among simulated nodes, some of them hostile, and keep the run in a folder named by its meaning.

    Presets: quickstart, mnist-30, mnist-100, cifar10-20, femnist-30, scale-100k, scale-1m; for a GPU
    cifar10-100, resnet18-cifar10; and real federations: femnist-writers, reviews-16, shakespeare, heart-4. A
    file holds the fields below (see rpel show). A field keeps its value from there unless its option is
    given. A run that is known to be the same (specification, data, code) is not repeated if it is finished,
    and goes on from its last checkpoint if not.

    Example: rpel run quickstart --attack foe --byzantine 3
    """
    spec = specs.load(source).replace(**opt.given(**options))
    with terminal.display() as shown:
        with uncollected():
            from rpel.simulation.run import run as run_spec

        result = run_spec(
            spec, progress=shown.tick, download=shown.download, force=force, reuse=reuse,
            tensorboard=tensorboard,
        )  # fmt: skip
    if not terminal.printed(result.summary(), as_json):
        terminal.show_run(result.summary())


@opt.described
def resume(
    path: Path, force: bool = False, tensorboard: opt.TensorBoard = False, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Go on with an interrupted run from its last checkpoint, as if it had not stopped;
    or with all below a folder.

    Where several codes have made a run, the one of the running code is meant.

    Example: rpel resume runs/quickstart-0123456789ab

    Arguments:
        path (RUN|FOLDER): A run, or a folder above some.

    Options:
        force: Also if other code has begun it.
    """
    if not (path / "spec.toml").is_file() and path.is_dir():
        _resume_all(path, force, tensorboard, as_json)
        return
    specs.load_folder(path)
    with terminal.display() as shown:
        result = _resumed(path, shown, force, tensorboard)
    if not terminal.printed(result.summary(), as_json):
        terminal.show_run(result.summary())


def _resumed(path: Path, shown: terminal.RunDisplay, force: bool, tensorboard: bool) -> "Run":
    from rpel.simulation import api

    return api.resume(
        path, progress=shown.tick, download=shown.download, force=force, tensorboard=tensorboard
    )


def _resume_all(top: Path, force: bool, tensorboard: bool, as_json: bool) -> None:
    """Every unfinished run below a folder, one after the other; one that fails does not stop the others."""
    from rpel.studies.report import collect

    collection = collect([top])
    results, failed = [], 0
    with terminal.display() as shown:
        shown.say(f"{count(len(collection.unfinished), 'unfinished run')} below {top}")
        for one in collection.unfinished:
            try:
                results.append(_resumed(one.path, shown, force, tensorboard).summary())
            except ValueError as error:
                shown.say(f"rpel: {one.path}: {error}")
                failed += 1
    if not terminal.printed(results, as_json):
        for end in results:
            print(f"{end['path']}: accuracy {ends(end)}")
    if failed:
        raise typer.Exit(1)


def show(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE|RUN")], as_json: opt.Json = False
) -> None:
    """Print the specification of a preset, a file or a run as TOML that rpel run takes.

    Example: rpel show mnist-100 > mine.toml
    """
    spec = specs.load(source)
    if not terminal.printed(spec.model_dump(), as_json):
        print(specs.to_toml(spec), end="")


# --- options from fields ------------------------------------------------------------------------------------


def _options() -> Iterator[inspect.Parameter]:
    """The source, one option for each field of a Spec, and the flags of the command."""
    source = typer.Argument(
        metavar="PRESET|FILE.toml", help="A preset, a TOML file or a run folder.", show_default=False
    )
    yield _parameter("source", Annotated[str, source], inspect.Parameter.empty)
    for key, field in specs.Spec.model_fields.items():
        flag = f"--{key.replace('_', '-')}"
        names = [flag, "--param"] if key == "attack_params" else [flag]
        default = "" if field.default in (None, {}) else f" [unless the source says: {field.default}]"
        about = field.description or key
        text = f"{about[0].upper()}{about[1:]}.{default}"
        if field.annotation is bool:
            option = typer.Option(f"{flag}/--not-{key}", help=text)
            yield _parameter(key, Annotated[bool | None, option], None)
        else:
            option = typer.Option(*names, help=text, metavar=_metavar(field))
            yield _parameter(key, Annotated[str | None, option], None)
    force = typer.Option("--force", help="Begin anew, even if it is finished.")
    yield _parameter("force", Annotated[bool, force], False)
    yield _parameter("reuse", opt.Reuse, False)
    yield _parameter("tensorboard", opt.TensorBoard, False)
    yield _parameter("as_json", opt.Json, False)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _metavar(field: Any) -> str:
    """What stands for the value in the help: the choices of a name, else its kind."""
    kinds = get_args(field.annotation)
    if kinds and all(isinstance(kind, str) for kind in kinds):
        return "|".join(choices(field.annotation))
    if int in (field.annotation, *kinds):
        return "INTEGER"
    return "NUMBER" if field.annotation is float else "TEXT"


run.__signature__ = inspect.Signature(list(_options()))  # type: ignore[attr-defined]


# --- names --------------------------------------------------------------------------------------------------

_KINDS = ("rules", "attacks", "methods", "datasets", "presets")
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
    "femnist": "FEMNIST in LEAF's format, or of 155 writers, by writer; from a folder of yours",
    "heart-disease": "UCI heart disease, four hospitals; from a folder of yours",
    "fdu-mtl": "FDU-MTL, reviews of 16 departments; from a folder of yours",
    "shakespeare": "tiny Shakespeare by speaker, the next of 64 characters",
    "mnist-8x8": "MNIST made 8 × 8: centre crop, then means of 3 × 3 pixels",
    "mnist-sample-8x8": "the embedded sample made 8 × 8",
}


_SYMBOLS = {
    "rules": "m vectors are aggregated, of which f may be hostile; rules join into chains, such as "
    "nnm+trimmed_mean",
    "attacks": "μ and σ are mean and standard deviation of the honest models that a victim gets, x_i is its "
    "own model, W are a graph's weights; --param sets a parameter, such as z=1.5",
}
"""What a list's letters mean, for a person who reads it."""


def list_names(
    kind: Annotated[str, typer.Argument(metavar="|".join(_KINDS))], as_json: opt.Json = False
) -> None:
    """List the rules, attacks, methods, data sets or presets there are, with one line each.

    Example: rpel list attacks
    """
    if kind not in _KINDS:
        raise ValueError(f"there is no list of {kind!r}; {nearest(kind, _KINDS)}")
    rows = list(_names(kind))
    facts = [{"name": name, "about": about} for name, about in rows]
    if not terminal.printed(facts, as_json, ensure_ascii=False):
        terminal.print_pairs(rows)
        if kind in _SYMBOLS and sys.stdout.isatty():
            terminal.say(_SYMBOLS[kind])


def _names(kind: str) -> Iterable[tuple[str, str]]:
    """(name, about) of every thing of that kind; what is heavy is imported for its own list only."""
    if kind == "rules":
        from rpel.rules import registry as rules

        return rules.about()
    if kind == "attacks":
        from rpel import attacks

        return attacks.about()
    if kind == "methods":
        from rpel.simulation.methods import METHODS

        return ((name, f"{_PEERS[method.peers]}; {method.rule}") for name, method in METHODS.items())
    if kind == "datasets":
        return ((name, _DATASETS.get(name, "")) for name in choices(specs.DatasetName))
    folder = resources.files("rpel") / "presets"
    texts = ((name, (folder / f"{name}.toml").read_text("utf-8")) for name in specs.presets())
    return ((name, text.partition("\n")[0].lstrip("# ")) for name, text in texts)
