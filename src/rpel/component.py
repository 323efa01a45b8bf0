"""Components: names with parameters in one syntax, ``module:object``, and the entry points of packages.

``name``, ``name(value, key=value)``, ``a+b`` for a chain, ``package.module:object`` for a user's own code.
A value is a number, a word, a quoted text, a list, a pair such as ``500:0.5``, or a component of its own::

    >>> parse("asynchronous(speeds=lognormal(0.5)+stragglers(0.1, 10), latency=.1)").keywords
    {'speeds': 'lognormal(0.5)+stragglers(0.1, 10)', 'latency': 0.1}

Invariants: a component that is a value stays text, in one spelling, so that parameters are plain data in
TOML, JSON and a run's hash; nothing is imported before a name is asked for that only a package can have.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from rpel.errors import unknown

Value = float | str | bool | Sequence["Value"]
"""What a parameter can be; a component is text."""


@dataclass(frozen=True)
class Component:
    """A name with its parameters; ``str`` gives the text that :func:`parse` reads.

    >>> str(Component("krum", (), {"neighbours": "m-f-2"})), str(Component("median"))
    ('krum(neighbours=m-f-2)', 'median')
    """

    name: str
    args: tuple[Value, ...] = ()
    keywords: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        values = [*map(_text, self.args), *(f"{key}={_text(value)}" for key, value in self.keywords.items())]
        return f"{self.name}({', '.join(values)})" if values else self.name

    def bind(self, names: Iterable[str], *, anything: bool = False) -> dict[str, Any]:
        """Return all parameters by name; those without one take the names in their order.

        Args:
            names: the parameters that there are.
            anything: whether keywords beside them are allowed.

        >>> parse("nesterov(0.7, momentum=0.9)").bind(["lr", "momentum"])
        {'lr': 0.7, 'momentum': 0.9}
        >>> parse("alie(zz=1)").bind(["z"])
        Traceback (most recent call last):
        ValueError: alie has no parameter 'zz': it takes z
        """
        names = list(names)
        if len(self.args) > len(names):
            takes = f"at most {len(names)}" if names else "no parameters"
            raise ValueError(f"{self.name} takes {takes}, not {len(self.args)}: {self}")
        bound: dict[str, Any] = dict(zip(names, self.args, strict=False))
        for key, value in self.keywords.items():
            if key not in names and not anything:
                takes = f"it takes {', '.join(names)}" if names else "it takes none"
                raise ValueError(f"{self.name} has no parameter {key!r}: {takes}")
            if key in bound:
                raise ValueError(f"{self} gives {key} twice")
            bound[key] = value
        return bound

    def bind_to(self, function: Callable[..., Any], skip: int = 0, anything: bool = False) -> dict[str, Any]:
        """Return all parameters by the names that a function or a class gives them, after the first few.

        >>> parse("cosine(0.5, warmup=10)").bind_to(lambda rounds, peak, warmup=0: peak, skip=1)
        {'peak': 0.5, 'warmup': 10}
        """
        variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        takes = list(signature(function).parameters.values())[skip:]
        names = [p.name for p in takes if p.kind not in variable]
        bound = self.bind(names, anything=anything or any(p.kind is Parameter.VAR_KEYWORD for p in takes))
        needed = (p.name for p in takes if p.default is Parameter.empty and p.kind not in variable)
        for name in needed:
            if name not in bound:
                raise ValueError(f"{self.name} needs its parameter {name!r}, as in {self.name}({name}=…)")
        return bound


# --- the grammar --------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z_][\w.-]*(?::[A-Za-z_][\w.]*)?")
_WORD = re.compile(r"[A-Za-z_/~][\w./*:-]*")
_NOTATION = re.compile(r"\w+\([^()=]*\)(?:-\w+(?:\([^()=]*\))?)+")  # of a model, as in C(20)-R-M-L(10)-S
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_QUOTED = re.compile(r'"([^"]*)"|\'([^\']*)\'')
_SPACE = re.compile(r"\s*")
_DEEPEST = 50


def parse(text: str) -> Component:
    """Return the one component that a text is.

    >>> parse("alie(z=1.5, targeting=most-exposed)")
    Component(name='alie', args=(), keywords={'z': 1.5, 'targeting': 'most-exposed'})
    >>> parse("steps(500:0.5, 1000:0.1)").args
    ((500, 0.5), (1000, 0.1))
    >>> parse("alie(z=1.5")
    Traceback (most recent call last):
    ValueError: 'alie(z=1.5' ends too early: a ')' is missing
    """
    chain = parse_chain(text)
    if len(chain) > 1:
        raise ValueError(f"{text!r} is a chain of {len(chain)}: one name is needed, as in {chain[0]}")
    return chain[0]


def parse_chain(text: str) -> list[Component]:
    """Return the components that a text joins by ``+``.

    >>> [str(part) for part in parse_chain("nnm + krum(neighbours=m-f-2)")]
    ['nnm', 'krum(neighbours=m-f-2)']
    """
    reader = _Reader(text)
    chain = reader.chain()
    reader.end()
    return chain


def parse_value(text: str) -> Value:
    """Return the value that a text is, as a parameter of a component is read.

    >>> parse_value("1e-3"), parse_value("true"), parse_value("[1, 2]"), parse_value("inf")
    (0.001, True, [1, 2], 'inf')
    """
    reader = _Reader(text)
    value = reader.value()
    reader.end()
    return value


class _Reader:
    """A text and how far it has been read."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise ValueError(
                f"{text!r} is a {type(text).__name__}: a name is needed, such as name(key=value)"
            )
        self.text, self.at, self.depth = text, 0, 0

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = _SPACE.match(self.text, found.end()).end()  # type: ignore[union-attr]
        return found

    def sign(self, character: str) -> bool:
        """Whether this character comes next, which is then read."""
        here = self.text.startswith(character, self.at)
        if here:
            self.at = _SPACE.match(self.text, self.at + 1).end()  # type: ignore[union-attr]
        return here

    def fail(self, wanted: str) -> ValueError:
        if self.at >= len(self.text):
            return ValueError(f"{self.text!r} ends too early: {wanted} is missing")
        return ValueError(f"{self.text!r} is not valid: {wanted} is needed before {self.text[self.at :]!r}")

    def end(self) -> None:
        if self.at < len(self.text):
            raise self.fail("'+' or the end")

    def chain(self) -> list[Component]:
        self.match(_SPACE)
        parts = [self.component()]
        while self.sign("+"):
            parts.append(self.component())
        return parts

    def component(self) -> Component:
        name = self.match(_NAME)
        if name is None:
            raise self.fail("a name")
        if not self.sign("("):
            return Component(name.group())
        args: list[Value] = []
        keywords: dict[str, Value] = {}
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError(f"{self.text[:40]!r}… is nested too deeply")
        while not self.sign(")"):
            if args or keywords:
                self.separator(")")
            start = self.at
            key = self.match(_NAME)
            if key and self.sign("="):
                if key.group() in keywords:
                    raise ValueError(f"{self.text!r} gives {key.group()} twice")
                keywords[key.group()] = self.value()
            elif keywords:
                raise ValueError(f"{self.text!r}: values without a name come first")
            else:
                self.at = start
                args.append(self.value())
        self.depth -= 1
        return Component(name.group(), tuple(args), keywords)

    def separator(self, closing: str) -> None:
        if not self.sign(","):
            raise self.fail(f"a {closing!r}" if self.at >= len(self.text) else f"',' or {closing!r}")

    def value(self) -> Value:
        """A number, a pair, a list, a quoted text, a word, or a component, which stays text."""
        self.match(_SPACE)
        if number := self.match(_NUMBER):
            return (_number(number.group()), self.value()) if self.sign(":") else _number(number.group())
        if quoted := self.match(_QUOTED):
            return quoted[1] or quoted[2] or ""
        if self.sign("["):
            return self.list()
        start = self.at
        if (notation := self.match(_NOTATION)) and self.text[self.at : self.at + 1] in ("", ",", ")", "]"):
            return notation.group()
        self.at = start
        word = self.match(_WORD)
        if word is None:
            raise self.fail("a value")
        if self.text[self.at : self.at + 1] in ("(", "+"):
            self.at = start
            return "+".join(map(str, self.chain()))
        return {"true": True, "false": False}.get(word.group(), word.group())

    def list(self) -> list[Value]:
        values: list[Value] = []
        while not self.sign("]"):
            if values:
                self.separator("]")
            values.append(self.value())
        return values


def _number(text: str) -> float:
    """A whole number where it is written as one."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _text(value: Value) -> str:
    """A value as it is written; words that would be read as something else stand in quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        try:
            plain = parse_value(value) == value
        except ValueError:
            plain = False
        return value if plain else f"'{value}'" if "'" not in value else f'"{value}"'
    if isinstance(value, tuple) and len(value) == 2:
        return ":".join(map(_text, value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


# --- objects of the user and of packages --------------------------------------------------------------------

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


def load(name: str, what: str, folder: Path | None = None) -> Any:
    """The object that ``module:object`` names; ValueError in one sentence if it is not there.

    A module that is not installed is looked for in ``folder``, or in the working directory if none is given.

    >>> load("math:sqrt", "rule")(4.0)
    2.0
    >>> load("math:sqr", "rule")
    Traceback (most recent call last):
    ValueError: rule 'math:sqr': module math has no 'sqr'
    """
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
    """List what installed packages register under an entry point group such as ``rpel.rules``.

    Nothing is imported yet.
    """
    return {point.name: point for point in entry_points(group=group)}


def load_registered(group: str, name: str) -> Any:
    """The object registered under that name; ValueError if its package cannot be imported."""
    point = registered(group)[name]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} of {group} ({point.value}) cannot be imported: {error}") from error


def find(group: str, name: str, ours: Iterable[str], folder: Path | None = None) -> Any:
    """Load a component that is not built in.

    The name is ``module:object`` (see :func:`load`) or registered by a package.

    >>> find("rpel.rules", "medien", ["mean", "median"])
    Traceback (most recent call last):
    ValueError: unknown rule 'medien'; did you mean 'median'?
    """
    what = group.rpartition(".")[2].removesuffix("s")
    if is_own(name):
        return load(name, what, folder)
    if name in registered(group):
        return load_registered(group, name)
    raise ValueError(unknown(what, name, [*ours, *registered(group)]))


def place_of(thing: Any) -> str:
    """Return where a function or a class is defined, as module:object."""
    return f"{thing.__module__}:{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def about(group: str, ours: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, the first line of its documentation): ours, then what installed packages register."""
    theirs = {name: load_registered(group, name) for name in registered(group)}
    return [(name, _first_line(thing)) for name, thing in (*ours.items(), *theirs.items())]


def origins(group: str, names: Iterable[str]) -> Iterator[tuple[str, Any, str]]:
    """Return (name, object, package and version) for the names that are not built in.

    They must be loadable already.
    """
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
    """Compute a digest of twelve digits of the files that define an object.

    These are its module and the modules that it imports from the same folder.

    Within one process the digest stays the same as long as the object exists: editing a file after its import
    does not change the code that runs.
    """
    if name not in _SEEN or _SEEN[name][0] is not thing:
        digest = hashlib.sha256()
        for path in _files(getattr(thing, "__module__", None) or type(thing).__module__):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
        _SEEN[name] = thing, digest.hexdigest()[:12]
    return _SEEN[name][1]


def _files(module: str) -> list[Path]:
    """List the source files of a module and of its imports from the same folder, in a fixed order."""
    top = sys.modules.get(module.partition(".")[0])
    start = Path(getattr(top, "__file__", None) or "")
    if not start.is_file():
        return []
    package = start.name == "__init__.py"
    folder = start.parents[1] if package else start.parent
    files, todo = set[Path](), sorted(start.parent.rglob("*.py")) if package else [start]
    installed = folder.name in ("site-packages", "dist-packages")  # known by their version
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
