"""The command line: parses, calls one function each, prints. Results go to stdout, progress and warnings to stderr.

Exit status: 0 done, 1 failed, 2 bad input (one sentence, no traceback), 130 interrupted, after saving where there is
something to save. Commands import what is heavy when they are called: ``rpel plan`` never sees torch.
"""

import ast
import importlib
import os
import sys
from collections.abc import Callable, Iterable
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


_COMMANDS = {
    "plan": "plan", "run": "run", "arena": "experiments", "list": "run:list_names", "new": "project",
    "doctor": "peer",
    "bench": "experiments", "resume": "run", "show": "run", "runs": "report", "compare": "report", "graph": "plan",
    "sweep": "experiments", "reproduce": "experiments", "report": "report", "ls": "report:runs",
    "red-team": "peer:red_team", "watch": "peer", "verify": "peer",
}  # fmt: skip
"""Commands in the order of the help: their module, and their function where it is called otherwise."""
_GROUPS = {"network": "network:app", "peer": "peer:app", "privacy": "privacy:app", "import": "experiments:imports"}
_NAMED = ("run", "arena")  # whose help lists names that can be given


def _place(name: str) -> tuple[str, str]:
    """The module and the object of a command or a group."""
    module, _, known = {**_COMMANDS, **_GROUPS}[name].partition(":")
    return module, known or name


def _with(names: Iterable[str], found: Callable[[str], Any]) -> typer.Typer:
    """The command line with these commands and groups, found(name) each."""
    from typer.core import TyperCommand

    if found is _found:
        from rpel.cli import terminal
    app = _empty()
    for name in names:
        if name in _GROUPS:
            app.add_typer(found(name))
            continue
        kind = terminal.NamesInHelp if found is _found and name in _NAMED else TyperCommand
        app.command(name=name, cls=kind, hidden=name == "ls")(found(name))
    return app


def _found(name: str) -> Any:
    module, known = _place(name)
    return getattr(importlib.import_module(f"rpel.cli.{module}"), known)


@cache
def _whole() -> typer.Typer:
    """All commands."""
    return _with([*_COMMANDS, *_GROUPS], _found)


def _listed() -> typer.Typer:
    """All commands with what the help says of them and nothing behind: their modules are read, not imported."""
    return _with([*_COMMANDS, *_GROUPS], _outline)


def _outline(name: str) -> Any:
    module, known = _place(name)
    for part in _parsed(module).body:
        if isinstance(part, ast.FunctionDef) and part.name == known:

            def command() -> None:
                pass

            command.__doc__ = ast.get_docstring(part)
            return command
        if (
            isinstance(part, ast.Assign)
            and isinstance(part.value, ast.Call)
            and known in map(ast.unparse, part.targets)
        ):
            said = {word.arg: ast.literal_eval(word.value) for word in part.value.keywords if word.arg == "help"}
            group = typer.Typer(name=name, **said)
            group.command()(_root)
            group.callback()(_root)
            return group
    raise LookupError(f"rpel.cli.{module} has no {known}")


@cache
def _parsed(module: str) -> ast.Module:
    return ast.parse((Path(__file__).parent / f"{module}.py").read_text())


def _for(words: list[str]) -> typer.Typer:
    """The command line as far as these words need it: ``rpel plan`` answers at once, and so does ``rpel --help``."""
    if words[:1] == ["--help"] or not words:
        return _listed()
    return _with(words[:1], _found) if words[0] in _COMMANDS or words[0] in _GROUPS else _whole()


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
        app = _for(words)
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
