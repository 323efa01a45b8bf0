"""The command line: parses, calls one function each, prints.

Results go to stdout, progress and warnings to stderr.

Exit status: 0 done, 1 failed, 2 bad input (one sentence, no traceback), 130 interrupted, after saving what
can be saved. Commands import heavy modules only when they are called: ``rpel plan`` never imports torch.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import rpel
from rpel.errors import BudgetSpentError
from rpel.processes import end_with_torchrun, uncollected

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


class WholeSentences(TyperGroup):
    """A group whose help shows the first paragraph of each command in full.

    typer would cut it at the width of the screen.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, _summary(command)) for name, command in known if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _summary(command: Any) -> str:
    return " ".join((command.short_help or (command.help or "").partition("\n\n")[0]).split())


def _empty() -> typer.Typer:
    """The command line before it has commands."""
    made = typer.Typer(
        name="rpel",
        help="Robust Pull-based Epidemic Learning: train one model among peers, some of them hostile, with "
        "no server.",
        epilog="Start with: rpel doctor, then rpel run quickstart --attack foe. rpel COMMAND --help has "
        "examples.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        cls=WholeSentences,
    )
    made.callback()(_root)
    return made


_COMMANDS = {
    "plan": ("plan", "How many peers to pull, and how sure the answer is."),
    "run": ("run", "Train among simulated nodes, some of them hostile."),
    "arena": ("experiments", "Every rule against every attack, ranked by the worst case."),
    "list": ("run:list_names", "List rules, attacks, methods, data sets or presets."),
    "new": ("project", "Write a project of your own that runs as it is."),
    "doctor": ("doctor", "Check that this machine is ready."),
    "resume": ("run", "Continue interrupted runs from their last checkpoint."),
    "show": ("run", "Print the specification of a preset or a run as TOML."),
    "runs": ("report", "List the runs below a folder and how they ended."),
    "compare": ("report", "Compare two runs, or two sets of seeds."),
    "sweep": ("experiments", "Run all combinations of a grid, several at a time."),
    "reproduce": ("experiments", "Make the figures of the paper again."),
    "audit": ("audit", "Guess which examples a member has, and bound its epsilon."),
    "report": ("report", "Make one HTML page of runs: curves, tables, certificates."),
}
"""Commands in the order of the help: module (and function where its name differs),
and what the help says of them."""
_GROUPS = {
    "network": ("network:app", "Networks of real peers: plan one, change it, watch it, try it."),
    "peer": ("peer:app", "One peer of a network: become a member and take part."),
}
_NAMED = ("run", "arena")  # whose help lists names that can be given


def _found(name: str) -> Any:
    """The function of a command, or the Typer of a group."""
    module, _, known = {**_COMMANDS, **_GROUPS}[name][0].partition(":")
    return getattr(importlib.import_module(f"rpel.cli.{module}"), known or name)


def _with(names: Iterable[str], object_of: Callable[[str], Any] = _found) -> typer.Typer:
    """The command line with these commands and groups, object_of(name) each."""
    app = _empty()
    for name in names:
        if name in _GROUPS:
            app.add_typer(object_of(name), cls=WholeSentences, name=name, short_help=_GROUPS[name][1])
        else:
            kind = _listing_names() if object_of is _found and name in _NAMED else None
            app.command(name=name, cls=kind, short_help=_COMMANDS[name][1])(object_of(name))
    return app


def _listing_names() -> Any:
    from rpel.cli.terminal import NamesInHelp

    return NamesInHelp


@cache
def _whole() -> typer.Typer:
    """All commands."""
    return _with([*_COMMANDS, *_GROUPS])


def _listed() -> typer.Typer:
    """All commands with what the help says of them and nothing behind: no module is imported for it."""

    def nothing(name: str) -> Any:
        if name not in _GROUPS:
            return lambda: None
        group = typer.Typer()
        group.command()(_root)
        group.callback()(_root)
        return group

    return _with([*_COMMANDS, *_GROUPS], nothing)


def _for(words: list[str]) -> typer.Typer:
    """Build as much of the command line as these words need.

    This keeps ``rpel plan`` and ``rpel --help`` fast.
    """
    if words[:1] == ["--help"] or not words:
        return _listed()
    return _with(words[:1]) if words[0] in _COMMANDS or words[0] in _GROUPS else _whole()


def __getattr__(name: str) -> Any:
    if name == "app":
        return _whole()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; bad input is one sentence on stderr and exit status 2."""
    end_with_torchrun()
    os.environ["MPLBACKEND"] = "agg"  # commands open no window, and a notebook's backend need not exist here
    words = sys.argv[1:] if arguments is None else arguments
    if "_RPEL_COMPLETE" in os.environ:  # a shell asks how the words that it passes along can go on
        words = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]
    try:
        with uncollected():
            app = _for(words)
        status = app(arguments, prog_name="rpel", standalone_mode=False)
    except UsageError as error:
        _leave_with_help(error)
        _fail(_usage(error), 2)
    except ValueError as error:
        _fail(str(error), 2)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, FileExistsError) as error:
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
    """A folder where a file is wanted, the other way round, or a path that is not there."""
    name = error.filename2 or error.filename
    if not isinstance(name, str | os.PathLike):
        return str(error)
    path = Path(name)
    if isinstance(error, FileNotFoundError):
        return f"{path} can be neither opened nor created (no such file or folder): give another path"
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder, and a file is wanted there"
    file = next((at for at in (path, *path.parents) if at.is_file()), path)
    return f"{file} is a file, and a folder is wanted there"


def _fail(sentence: str, status: int) -> None:
    print(f"rpel: {sentence}", file=sys.stderr)
    sys.exit(status)
