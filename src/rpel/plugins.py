"""Code of others by name: ``module:object`` imported, or what installed packages register as entry points.

Invariant: nothing is imported before a name is asked for that only a package can have.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rpel.errors import nearest

_EXAMPLES = {
    "rule": "give a name such as 'nnm+trimmed_mean', a rpel.rules.Rule, or a function",
    "attack": "give a name such as 'alie' ('none': no attack), a rpel.attacks.Attack, or a function",
}


def check_callable(thing: Any, what: str) -> None:
    """Refuse an object from Python that cannot be a rule or an attack.

    >>> check_callable(3, "rule")
    Traceback (most recent call last):
    ValueError: rule 3 is of type int: give a name such as 'nnm+trimmed_mean', a rpel.rules.Rule...
    """
    if not callable(thing):
        kind = "not possible" if thing is None else f"of type {type(thing).__name__}"
        raise ValueError(f"{what} {thing!r} is {kind}: {_EXAMPLES[what]}")


def is_own(name: str) -> bool:
    """Whether a name is of the form ``module:object``.

    >>> is_own("my.module:rule"), is_own("nnm+trimmed_mean")
    (True, False)
    """
    return ":" in name


_HANDED: MutableMapping[str, Any] = WeakValueDictionary()
"""User-supplied objects by the names they were given, while somebody holds them."""
_KEPT: dict[str, Any] = {}
"""Those that do not say when they are gone."""


def named(thing: Any) -> str:
    """A name ``module:object`` under which :func:`load` finds a user-supplied object, while it lives.

    No two living objects share one, so that of two lambdas each is found.

    >>> named(len), load(named(len), "rule") is len
    ('builtins:len', True)
    >>> one, other = (lambda x: 1), (lambda x: 2)
    >>> load(named(one), "rule") is one, load(named(other), "rule") is other
    (True, True)
    """
    own = getattr(thing, "name", None) or getattr(thing, "__qualname__", type(thing).__qualname__)
    first = f"{getattr(thing, '__module__', None) or type(thing).__module__}:{own}".replace("+", "-")
    where = _HANDED if getattr(type(thing), "__weakrefoffset__", 0) else _KEPT
    names = (first if i == 1 else f"{first}-{i}" for i in count(1))
    name = next(name for name in names if (held := _handed(name)) is None or held is thing)
    where[name] = thing
    return name


def _handed(name: str) -> Any:
    return _HANDED.get(name, _KEPT.get(name))


def load(name: str, what: str, folder: Path | None = None) -> Any:
    """The object that ``module:object`` names; ValueError in one sentence if it is not there.

    A module that is not installed is looked for in ``folder``, or in the working directory if none is given.

    >>> load("math:sqrt", "rule")(4.0)
    2.0
    >>> load("math:sqr", "rule")
    Traceback (most recent call last):
    ValueError: rule 'math:sqr': module math has no 'sqr'
    """
    if (handed := _handed(name)) is not None:
        return handed
    module, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise ValueError(f"{what} {name!r} is not of the form module:name")
    _look_here(module.partition(".")[0], folder or Path.cwd())
    try:
        value: Any = import_module(module)
    except ImportError as error:
        where = "" if folder is None else f" (it is looked for in {folder})"
        raise ValueError(f"{what} {name!r} cannot be imported: {error}{where}") from error
    for part in path.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{what} {name!r}: module {module} has no {path!r}")
        value = getattr(value, part)
    return value


def _look_here(package: str, here: Path) -> None:
    """Let a module that lies in this folder be found."""
    if find_spec(package) is None and ((here / f"{package}.py").is_file() or (here / package).is_dir()):
        sys.path.append(str(here))


@cache
def registered(group: str) -> dict[str, EntryPoint]:
    """What installed packages register under an entry point group such as ``rpel.rules``,
    not yet imported."""
    return {point.name: point for point in entry_points(group=group)}


def load_registered(group: str, name: str) -> Any:
    """The object registered under that name; ValueError if its package cannot be imported."""
    point = registered(group)[name]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} of {group} ({point.value}) cannot be imported: {error}") from error


def find(group: str, name: str, ours: Iterable[str], folder: Path | None = None) -> Any:
    """What a name stands for that is not one of ours: ``module:object`` (see :func:`load`),
    or registered by a package.

    >>> find("rpel.rules", "medien", ["mean", "median"])
    Traceback (most recent call last):
    ValueError: there is no rule 'medien'; the nearest is 'median'...
    """
    what = group.rpartition(".")[2].removesuffix("s")
    if is_own(name):
        return load(name, what, folder)
    if name in registered(group):
        return load_registered(group, name)
    raise ValueError(f"there is no {what} {name!r}; {nearest(name, [*ours, *registered(group)])}")


def place_of(thing: Any) -> str:
    """Where a function or a class was written, as module:object."""
    return f"{thing.__module__}:{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def about(group: str, ours: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, the first line of its documentation): ours, then what installed packages register."""
    theirs = {name: load_registered(group, name) for name in registered(group)}
    return [(name, _first_line(thing)) for name, thing in (*ours.items(), *theirs.items())]


def origins(group: str, names: Iterable[str]) -> Iterator[tuple[str, Any, str]]:
    """(name, object, package and version) of those of the names that are not the library's own,
    already loadable."""
    for name in names:
        if is_own(name):
            thing = load(name, group.rpartition(".")[2])
            yield name, thing, _version(getattr(thing, "__module__", None) or type(thing).__module__)
        elif name in registered(group):
            point = registered(group)[name]
            yield (
                name,
                load_registered(group, name),
                f"{point.dist.name} {point.dist.version}" if point.dist else "",
            )


def _version(module: str) -> str:
    """The package that a module comes from, with its version; empty where it is a user's file."""
    for package in packages_distributions().get(module.partition(".")[0], []):
        return f"{package} {version(package)}"
    return ""


# --- which code that is -------------------------------------------------------------------------------------

_SEEN: dict[str, tuple[Any, str]] = {}


def code_digest(name: str, thing: Any) -> str:
    """Twelve digits of the files that define an object: its module,
    and those that it imports from the same folder.

    In one process they stay what they were as long as the object does: a file that is edited after its import
    has not changed what runs.
    """
    if name not in _SEEN or _SEEN[name][0] is not thing:
        digest = hashlib.sha256()
        for path in _files(getattr(thing, "__module__", None) or type(thing).__module__):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
        _SEEN[name] = thing, digest.hexdigest()[:12]
    return _SEEN[name][1]


def _files(module: str) -> list[Path]:
    """The source files of a module and of what it imports from the folder that it lies in,
    in a fixed order."""
    top = sys.modules.get(module.partition(".")[0])
    start = Path(getattr(top, "__file__", None) or "")
    if not start.is_file():
        return []
    package = start.name == "__init__.py"
    folder = start.parents[1] if package else start.parent
    files, todo = set[Path](), sorted(start.parent.rglob("*.py")) if package else [start]
    installed = folder.name in ("site-packages", "dist-packages")  # there, others are told by their version
    while todo:
        path = todo.pop()
        if path not in files and path.suffix == ".py":
            files.add(path)
            todo += [] if installed else _imported(path, folder)
    return sorted(files)


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    """The files in a folder that a source file imports, packages whole."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if (folder / f"{top}.py").is_file():
                yield folder / f"{top}.py"
            yield from (folder / top).rglob("*.py") if (folder / top).is_dir() else ()


def _first_line(thing: Any) -> str:
    """The first paragraph of its docstring, in one line."""
    return " ".join((getattr(thing, "__doc__", None) or "").strip().partition("\n\n")[0].split())
