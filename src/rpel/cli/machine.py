"""``rpel doctor``, ``rpel bench`` and ``rpel import``: this machine, and ways in from elsewhere."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rpel.cli.options import DataDir, Json
from rpel.text import count, duration

imports = typer.Typer(name="import", help="Take over experiments of other libraries.", no_args_is_help=True)


def doctor(
    preset: Annotated[str | None, typer.Option(help="Also: is there memory for this preset or run file?")] = None,
    config: Annotated[Path | None, typer.Option(help="Also: a peer.toml, its members, certificate and port.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Look whether this machine is ready: versions, kernels, data, disk, memory, clock; what is wrong, how to mend it.

    Example: rpel doctor --preset scale-100k
    """
    from rpel.operations.doctor import examine

    found = examine(preset, config, data_dir)
    wrong = [one for one in found if not one.ok]
    if as_json:
        print(json.dumps([one.to_dict() for one in found], indent=2))
    else:
        for one in found:
            print(f"{'ok   ' if one.ok else 'WRONG'}  {one.check}: {one.detail}")
            if one.remedy:
                print(f"       {one.remedy}")
        print(f"{count(len(wrong), 'problem')} found" if wrong else "all is well")
    if wrong:
        raise typer.Exit(1)


def bench(as_json: Json = False) -> None:
    """Measure what matters on this machine, in about two minutes, as ratios to the plain way of doing the same.

    Example: rpel bench --json
    """
    from rpel.experiments.bench import measurements

    begun, rows = time.perf_counter(), []
    print("measuring; other work on this machine makes it slower than it is", file=sys.stderr)
    for one in measurements():
        rows.append(one.to_dict())
        if not as_json:
            ours, theirs = f"{1e3 * one.seconds:.3g} ms", f"{1e3 * one.seconds_against:.3g} ms"
            print(f"{one.name}: {ours}, {one.ratio:.1f} times faster than {one.against} ({theirs})", flush=True)
    seconds = time.perf_counter() - begun
    if as_json:
        print(json.dumps({"benchmarks": rows, "seconds": seconds}, indent=2))
    else:
        print(f"took {duration(seconds)}")


@imports.callback()
def _imports() -> None:
    pass


@imports.command()
def byzfl(
    file: Annotated[Path, typer.Argument(help="ByzFL's config.json.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The sweep file to write. [printed]")] = None,
) -> None:
    """Make a sweep file of a ByzFL benchmark's config.json; what has no counterpart is said in it and on stderr.

    Example: rpel import byzfl config.json -o sweep.toml
    """
    import tomllib

    from rpel.experiments.byzfl import read
    from rpel.experiments.sweep import cells

    found = read(file)
    text = found.to_toml()
    made = cells(tomllib.loads(text))
    for line in found.remarks:
        print(f"rpel: note: {line}", file=sys.stderr)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, "utf-8")
        print(f"{output}: {count(len(made), 'run')} to sweep: rpel sweep {output}")
