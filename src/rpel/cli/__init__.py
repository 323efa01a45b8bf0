"""The command line: parses, calls one function each, prints. Results go to stdout, progress and warnings to stderr.

Exit status: 0 done, 1 failed, 2 bad input (one sentence, no traceback), 130 interrupted, after saving where there is
something to save. Commands import what is heavy when they are called: ``rpel plan`` never sees torch.
"""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

import rpel
from rpel.errors import BudgetSpentError
from rpel.processes import end_with_starter

# typer carries its own click, whose UsageError it does not export
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rpel {rpel.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def _empty() -> typer.Typer:
    """The command line before it has commands."""
    made = typer.Typer(
        name="rpel",
        help="Robust Pull-based Epidemic Learning: machine learning among peers, some hostile, with no server.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    made.callback()(_root)
    return made


def _plan_alone() -> typer.Typer:
    """``rpel plan`` and nothing else: a planner that answers at once."""
    from rpel.cli.plan import plan

    alone = _empty()
    alone.command()(plan)
    return alone


@cache
def _whole() -> typer.Typer:
    """All commands."""
    from rpel.cli import network, peer
    from rpel.cli.experiments import arena, bench, imports, reproduce, sweep
    from rpel.cli.plan import graph, plan
    from rpel.cli.report import compare, report, runs
    from rpel.cli.run import list_names, resume, run, show
    from rpel.cli.terminal import NamesInHelp

    app = _empty()
    app.command()(plan)
    app.command(cls=NamesInHelp)(run)
    app.command(cls=NamesInHelp)(arena)
    app.command(name="list")(list_names)
    for command in (peer.doctor, bench, resume, show, runs, compare, graph, sweep, reproduce, report):
        app.command()(command)
    app.command(name="ls", hidden=True)(runs)
    app.command()(peer.red_team)
    app.command()(peer.watch)
    app.command()(peer.verify)
    for group in (network, peer):
        app.add_typer(group.app)
    app.add_typer(imports)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return _whole()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; bad input is one sentence on stderr and exit status 2."""
    end_with_starter()
    os.environ["MPLBACKEND"] = "agg"  # commands open no window, and a notebook's backend need not exist here
    words = sys.argv[1:] if arguments is None else arguments
    try:
        app = _plan_alone() if words[:1] == ["plan"] else _whole()
        status = app(arguments, prog_name="rpel", standalone_mode=False)
    except UsageError as error:
        _leave_with_help(error)
        _fail(_usage(error), 2)
    except (ValueError, FileNotFoundError) as error:
        _fail(str(error), 2)
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        _fail(_misplaced(error), 2)
    except (OSError, BudgetSpentError) as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort) as error:
        _fail(str(error) or "interrupted", 130)
    sys.exit(status if isinstance(status, int) else 0)


def _leave_with_help(error: Any) -> None:
    """``rpel``, ``rpel network`` and ``rpel peer`` alone ask for their help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.ctx.get_help())
        sys.exit(0)


def _usage(error: Any) -> str:
    """The parser's complaint as one sentence that names the option and the value given."""
    detail = error.__cause__.errors()[0] if hasattr(error.__cause__, "errors") else None
    if detail is None:
        sentence = str(error.format_message()).rstrip(".").replace("\n", " ")
    else:
        example = {"int_parsing": "a whole number such as 100", "float_parsing": "a number such as 0.99"}
        choices = detail["msg"].partition("one of ")[2].rstrip(".")
        bound = f"a value {detail['msg'].partition('be ')[2]}"
        wanted = example.get(detail["type"]) or (f"one of {choices}" if choices else bound)
        sentence = f"{error.param.opts[0]} {detail['input']!r} is not valid: it takes {wanted}"
    return sentence + (f" (see {error.ctx.command_path} --help)" if error.ctx else "")


def _misplaced(error: OSError) -> str:
    """A folder where a file is wanted, or the other way round."""
    name = error.filename2 or error.filename
    if not isinstance(name, str | os.PathLike):
        return str(error)
    place = Path(name)
    if isinstance(error, IsADirectoryError):
        return f"{place} is a folder, and a file is wanted there"
    file = next((at for at in (place, *place.parents) if at.is_file()), place)
    return f"{file} is a file, and a folder is wanted there"


def _fail(sentence: str, status: int) -> None:
    print(f"rpel: {sentence}", file=sys.stderr)
    sys.exit(status)
