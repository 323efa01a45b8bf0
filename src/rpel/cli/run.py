"""Define ``rpel run``, ``resume``, ``show`` and ``list``.

Every field of a Spec is an option, made from the field itself.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpel import spec as specs
from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.errors import nearest
from rpel.processes import uncollected
from rpel.text import count, ends

if TYPE_CHECKING:
    from rpel.runs.run import Run


@opt.described
def run(
    source: str, attack: str | None = None, rule: str | None = None, method: str | None = None,
    nodes: str | None = None, byzantine: str | None = None, pull: str | None = None,
    b_hat: str | None = None, rounds: str | None = None, dataset: str | None = None,
    data_dir: opt.DataDir = None, model: str | None = None, seed: str | None = None,
    seeds: str | None = None, device: str | None = None, workers: str | None = None,
    out: str | None = None, fields: list[str] | None = None, force: bool = False,
    track: str | None = None, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Simulate training among nodes, some of them hostile, and keep the run in a folder.

    Presets: quickstart, mnist-30, mnist-100, cifar10-20, femnist-30, scale-100k, scale-1m; for a GPU
    cifar10-100, resnet18-cifar10; and real federations: femnist-writers, reviews-16, shakespeare, heart-4. A
    field keeps its value from the preset or file unless it is set here; rpel list fields describes all of
    them. A finished run is not repeated, and an unfinished one goes on from its last checkpoint.

    Example: rpel run quickstart --attack foe -s batch_size=50

    Arguments:
        source (PRESET|FILE.toml): A preset, a TOML file or a run folder.

    Options:
        attack: What hostile nodes send, such as foe or alie(z=1.5).
        rule: How models are aggregated, such as mean or nnm+median.
        method: How nodes exchange models, such as rpel, all-to-all or cs-plus.
        nodes (N): Number of nodes, n.
        byzantine (B): How many of them are hostile, b.
        pull (S): Peers pulled per node and round, s; or plan.
        b_hat: Hostile answers that a round survives; or plan.
        rounds (T): Rounds.
        dataset: Data set: a name, or module:function of yours.
        model: Network: a name, or the paper's notation.
        seed (N): Where all randomness comes from.
        seeds: Several runs, such as 0-4 or 0,1,7; with intervals.
        device: Where models and data live: cpu, cuda, cuda:1, mps.
        workers (N): Processes that share the run.
        out: Folder for run folders. [runs]
        fields (--set, -s): Any other field, as in batch_size=50; may be given several times.
        force: Begin anew, even if it is finished.
        track: Copy the metrics to tensorboard, mlflow or wandb.
    """
    changes = opt.given(
        attack=attack, rule=rule, method=method, nodes=nodes, byzantine=byzantine, pull=pull, b_hat=b_hat,
        rounds=rounds, dataset=dataset, data_dir=data_dir, model=model, seed=seed, seeds=seeds, device=device,
        workers=workers, out=out, track=track,
    )  # fmt: skip
    for text in fields or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text!r} is not valid: write FIELD=VALUE, such as batch_size=50")
        changes[key.strip().replace("-", "_")] = value.strip()
    spec = specs.load(source).replace(**changes)
    with terminal.display() as shown:
        with uncollected():
            from rpel.simulation.run import run as run_spec

        result = run_spec(spec, progress=shown.tick, download=shown.download, force=force)
    if not terminal.printed(result.summary(), as_json):
        terminal.show_run(result.summary())


@opt.described
def resume(path: Path, force: bool = False, as_json: opt.Json = False) -> None:
    """Continue an interrupted run, or all runs below a folder, from the last checkpoint.

    The result is the same as without the interruption.

    Example: rpel resume runs/quickstart-0123456789ab

    Arguments:
        path (RUN|FOLDER): A run, or a folder above some.

    Options:
        force: Start again, also if other code has begun it.
    """
    if not (path / "spec.toml").is_file() and path.is_dir():
        _resume_all(path, force, as_json)
        return
    specs.load_folder(path)
    with terminal.display() as shown:
        result = _resumed(path, shown, force)
    if not terminal.printed(result.summary(), as_json):
        terminal.show_run(result.summary())


def _resumed(path: Path, shown: terminal.RunDisplay, force: bool) -> "Run":
    from rpel.simulation import api

    return api.resume(path, progress=shown.tick, download=shown.download, force=force)


def _resume_all(top: Path, force: bool, as_json: bool) -> None:
    """Every unfinished run below a folder, one after the other; one that fails does not stop the others."""
    from rpel.studies.report import collect

    collection = collect([top])
    results, failed = [], 0
    with terminal.display() as shown:
        shown.say(f"{count(len(collection.unfinished), 'unfinished run')} below {top}")
        for one in collection.unfinished:
            try:
                results.append(_resumed(one.path, shown, force).summary())
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


# --- names --------------------------------------------------------------------------------------------------

_KINDS = ("rules", "attacks", "methods", "datasets", "presets", "fields")
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
    "own model, W are a graph's weights; parameters stand behind the name, as in alie(z=1.5)",
}
"""What a list's letters mean, for a person who reads it."""


def list_names(
    kind: Annotated[str, typer.Argument(metavar="|".join(_KINDS))], as_json: opt.Json = False
) -> None:
    """List the rules, attacks, methods, data sets, presets or fields there are, with one line each.

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
        return ((name, _DATASETS[name]) for name in specs.DATASETS)
    if kind == "fields":
        return ((key, _field(field)) for key, field in specs.ordered_fields().items())
    texts = ((name, specs.preset_text(name)) for name in specs.presets())
    return ((name, text.partition("\n")[0].lstrip("# ")) for name, text in texts)


def _field(field: Any) -> str:
    """What a field means, with its default."""
    default = "" if field.default is None else f" [{field.default}]"
    return f"{field.description}{default}"
