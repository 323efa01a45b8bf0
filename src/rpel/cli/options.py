"""Options that several commands share, declared once, and commands whose docstring describes theirs."""

import inspect
import re
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from rpel.studies.plots import Style

HERE, MEMBERS, SETTINGS = Path(), Path("members.toml"), Path("peer.toml")  # where files are looked for
Json = Annotated[bool, Option("--json", help="Print the results as JSON.")]
JsonLines = Annotated[bool, Option("--json", help="Print one line of JSON each time.")]
Nodes = Annotated[int, Option(help="Number of nodes, n.")]
SomeNodes = Annotated[int | None, Option(help="Number of nodes, n.")]
Byzantine = Annotated[int, Option(help="How many of them may be hostile, b.")]
Rounds = Annotated[int, Option(help="Rounds of the whole training, T.")]
Plot = Annotated[Path | None, Option(help="Draw to this file (.svg, .png, .pdf).")]
Look = Annotated[
    Style, Option("--style", help="Look of figures; paper: one column wide, Times-like letters, no title.")
]
DataDir = Annotated[str | None, Option(help="Folder with the data sets.")]
Threads = Annotated[int | None, Option(help="Threads (unset: as many as cores).", min=1)]
Jobs = Annotated[int | None, Option(help="Runs at a time. [as many as cores]", min=1)]
Engine = Annotated[str, Option(help="Where runs are processes: local, or ray, whose tasks they are.")]
Address = Annotated[str | None, Option(help="The Ray cluster, such as auto. [one on this machine]")]
Members = Annotated[Path, Option(help="The network's members.toml.")]
Asking = Annotated[Path, Option(help="The settings of the member that asks.")]
Settings = Annotated[Path, Option(help="This peer's settings.")]
Late = Annotated[
    int | None, Option(help="Rounds go on with this many honest peers late. [2, fewer if n is small]")
]
Parameters = Annotated[
    list[str] | None, Option(help="A parameter of the attack, such as z=1.5.", metavar="KEY=VALUE")
]
NotNegative = Annotated[float, Option(min=0.0)]
Positive = Annotated[int, Option(min=1)]

_LINE = re.compile(r"(\w+)(?: \(([^)]+)\))?: (.+)")


def described(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose docstring says what its parameters are, below ``Arguments:`` and ``Options:``.

    ``name: text``; ``name (METAVAR): text`` where the help calls the value something else;
    ``name (--flag, -f): text`` where the option has other names. A further line stands deeper. What several
    commands share says itself what it is, as ``Json`` does.
    """
    about, *sections = re.split(r"\n\n(Arguments|Options):\n", inspect.getdoc(function) or "")
    known = dict(inspect.signature(function).parameters)
    for kind, text in zip(sections[::2], sections[1::2], strict=True):
        for line in re.sub(r"\n {8}", " ", text).splitlines():
            name, words, about_it = _LINE.fullmatch(line.strip()).groups()  # type: ignore[union-attr]
            known[name] = _typed(known[name], Argument if kind == "Arguments" else Option, words, about_it)
    for name, parameter in known.items():
        if not hasattr(parameter.annotation, "__metadata__"):
            raise TypeError(f"{function.__name__} does not say what {name} is")
    function.__signature__ = inspect.Signature(list(known.values()))  # type: ignore[attr-defined]
    function.__doc__ = about
    return function


def _typed(
    parameter: inspect.Parameter, make: Callable[..., Any], words: str | None, about: str
) -> inspect.Parameter:
    """A parameter with what typer wants to know of it."""
    kind = parameter.annotation
    bounds = getattr(kind, "__metadata__", None)
    info = copy(bounds[0]) if bounds else make()
    info.help = about
    if words and not words.startswith("-"):
        info.metavar = words
    elif words or kind is bool:
        info.param_decls = (words or f"--{parameter.name.replace('_', '-')}").split(", ")
    plain = kind.__origin__ if bounds else kind
    return parameter.replace(annotation=Annotated[plain, info])


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {key: value for key, value in options.items() if value is not None}
