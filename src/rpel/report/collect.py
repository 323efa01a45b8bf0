"""Run folders under some paths: the finished, the unfinished and the broken, each read once and checked."""

import math
import os
import shlex
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rpel.config.record import OWN
from rpel.config.spec import Spec, load, load_folder, presets
from rpel.runs.certificate import Robustness, Survival, made_here, survival
from rpel.runs.columns import COLUMNS, Role, Row, When, column, headline, is_evaluated, names, prefix
from rpel.runs.folder import RunFolder, base_of
from rpel.text import value_text
from rpel.types import Guarantee

_ACCURACIES = tuple(key for key in names(when=When.EVALUATED) if key.startswith("accuracy"))
_ALWAYS = tuple(key for key in names(when=When.ALWAYS) if column(key).role is not Role.MEASURE)  # these may overflow
_MARKS = {"spec.toml", "metrics.jsonl"}
_DAMAGE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class Proof:
    """What a certificate says, in plain numbers and texts."""

    pull: int
    b_hat: int
    fraction: float
    probability: float
    confidence: float
    guarantee: Guarantee
    held: bool
    max_observed: int
    histogram: tuple[int, ...]
    violations: tuple[tuple[int, int, int], ...]
    violations_total: int
    threads: int
    versions: tuple[tuple[str, str], ...]
    data: tuple[tuple[str, str], ...]

    @property
    def guaranteed(self) -> bool:
        """Whether the plan's probability was promised for this run at all; on fixed graphs, for one, it is not."""
        return self.guarantee == Guarantee.PLAN


@dataclass(frozen=True)
class Run:
    """A finished run: its rows (all rounds), those evaluated, and its proof; ``place`` is its path on a page.

    rows       those of metrics.jsonl with <measure>_lowest, that of the node that ends worst (None: not known)
    quartiles  of the honest nodes' measure at the end, from the lowest to the highest; empty if they are not known
    start      the measure in round 0, by column; empty if it is not known
    edited     what was changed after the run had finished: files, or its name
    measure    what it is judged by: accuracy, or a metric where there are no classes; better: whether more is better
    """

    place: str
    spec: Spec
    rows: tuple[Row, ...]
    proof: Proof
    quartiles: tuple[float, ...] = ()
    start: Mapping[str, float] = field(default_factory=dict)
    edited: tuple[str, ...] = ()
    measure: str = "accuracy"
    better: bool = True

    @property
    def key(self) -> str:
        """What the columns of its measure begin with."""
        return prefix(self.measure)

    @property
    def folder(self) -> str:
        return self.place.rpartition("/")[2]

    @property
    def survival(self) -> Survival:
        """What its rule survives: another statement than what its sampling was."""
        return survival(self.spec.rule or "its own rule", self.proof.pull, self.proof.b_hat)

    @property
    def well(self) -> bool:
        """As the run left it, the sampling within a plan that applies, the rule not known to be fragile."""
        sampled = self.proof.held and self.proof.guaranteed
        return not self.edited and sampled and self.survival.robustness is not Robustness.NONE

    @property
    def evaluated(self) -> list[Row]:
        return [row for row in self.rows if is_evaluated(row)]

    @property
    def followed(self) -> bool:
        """Whether the node that ends lowest is known in every round evaluated."""
        return bool(self.quartiles)

    def series(self, column: str, from_start: bool = False) -> list[float]:
        """A column in the rounds evaluated; for a node that is not known, the worst of each round."""
        first = [self.start[column]] if from_start else []
        column = f"{self.key}_worst" if column == f"{self.key}_lowest" and not self.followed else column
        return [*first, *(_infinite(row[column]) for row in self.evaluated)]

    def final(self, column: str) -> float:
        return _infinite(self.rows[-1][column])

    def total(self, column: str) -> float:
        """The sum over all rounds."""
        return float(sum(row[column] for row in self.rows))

    @property
    def numbers(self) -> list[Row]:
        """The rows without times: equal for equal runs."""
        left_out = ("seconds", f"{self.key}_lowest")
        return [{key: value for key, value in row.items() if key not in left_out} for row in self.rows]


@dataclass(frozen=True)
class Unfinished:
    """A run that has not come to its end."""

    path: Path
    place: str
    spec: Spec
    rounds: int


@dataclass(frozen=True)
class Broken:
    """A folder that cannot be read, and why."""

    path: Path
    place: str
    reason: str


@dataclass(frozen=True)
class Collection:
    """All that lies under some paths, in the order of their names; ``shown`` is how the paths are written on a page."""

    shown: tuple[str, ...]
    runs: tuple[Run, ...]
    unfinished: tuple[Unfinished, ...]
    broken: tuple[Broken, ...]


def collect(paths: Iterable[str | Path]) -> Collection:
    """Read every run folder at or under the paths; one reached twice counts once.

    >>> collect(["nowhere"])
    Traceback (most recent call last):
    ValueError: there is no folder 'nowhere': give run folders or folders above them
    """
    given = [Path(path) for path in paths]
    found: dict[Path, str] = {}
    for path in given:
        if not path.is_dir():
            raise ValueError(f"there is no folder {str(path)!r}: give run folders or folders above them")
        under = {folder.resolve(): _place(path, folder) for folder in _folders(path)}
        if not under:
            raise ValueError(f"there is no run in {str(path)!r}: rpel run PRESET --out {path} makes one")
        found = under | found
    read = [_read(path, place) for path, place in sorted(found.items(), key=lambda item: (item[1], item[0]))]
    return Collection(
        tuple(shown(path) for path in given),
        tuple(one for one in read if isinstance(one, Run)),
        tuple(one for one in read if isinstance(one, Unfinished)),
        tuple(one for one in read if isinstance(one, Broken)),
    )


def by_code(found: Collection, say: Callable[[str], None]) -> Collection:
    """Of a run that several codes have made, the one by the running code; where there is none, all, and they are named.

    What is left out, or stands beside each other, is said.
    """
    alike: dict[Path, list[Run]] = {}
    for run in found.runs:
        alike.setdefault(base_of(Path(run.place)), []).append(run)
    out: set[str] = set()
    for runs in alike.values():
        names = ", ".join(run.place for run in runs)
        if len(runs) > 1 and (ours := [run for run in runs if made_here(dict(run.proof.versions))]):
            out |= {run.place for run in runs} - {run.place for run in ours}
            say(f"of {names} only what this code has made is shown: {', '.join(run.place for run in ours)}")
        elif len(runs) > 1:
            say(f"one run by several other codes, all shown: {names}")
    done = {base for base, runs in alike.items() if any(made_here(dict(run.proof.versions)) for run in runs)}
    waiting = tuple(one for one in found.unfinished if base_of(Path(one.place)) not in done)
    return replace(found, runs=tuple(run for run in found.runs if run.place not in out), unfinished=waiting)


def shown(path: Path) -> str:
    """A path as a page shows it: without the folders of this machine that lie above.

    >>> shown(Path("runs/mnist")), shown(Path("/home/somebody/runs"))
    ('runs/mnist', 'runs')
    """
    if not path.is_absolute():
        return path.as_posix()
    whole, here = path.resolve(), Path.cwd().resolve()
    return whole.relative_to(here).as_posix() if here in whole.parents else whole.name


def _place(top: Path, folder: Path) -> str:
    return (Path(shown(top)) / folder.relative_to(top)).as_posix()


def _folders(top: Path) -> Iterator[Path]:
    """The run folders at or under a folder; links are followed, circles are not."""
    seen = set()
    for where, folders, files in os.walk(top, followlinks=True):
        here = Path(where)
        if (real := here.resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        if _MARKS & set(files):
            folders.clear()
            yield here


# --- reading one folder ----------------------------------------------------------------------------------------------


def _read(path: Path, place: str) -> Run | Unfinished | Broken:
    try:
        folder, spec = RunFolder(path), load_folder(path)
        found, rows = folder.certificate(), folder.metrics()
        if found is None:
            return Unfinished(path, place, spec, len(rows))
        proof = _proof(found)
        spec = spec.replace(pull=proof.pull, b_hat=proof.b_hat)
        for value in (*vars(spec).values(), *vars(proof).values()):
            if isinstance(value, int):
                float(value)  # OverflowError: a page could not sort by it
        checked = tuple(_rows(rows, spec.rounds))
        evaluated, measure = [row["round"] for row in checked if is_evaluated(row)], headline(checked)
        better = found.get("metrics", {}).get(measure, True) is not False
        lowest, quartiles, start = _nodes(folder, evaluated, prefix(measure), better)
        known = tuple({**row, f"{prefix(measure)}_lowest": lowest.get(row["round"])} for row in checked)
        return Run(place, spec, known, proof, quartiles, start, tuple(folder.edited()[1]), measure, better)
    except _DAMAGE as error:
        return Broken(path, place, _reason(error, path, place))


def _reason(error: BaseException, path: Path, place: str) -> str:
    told = isinstance(error, OSError | ValueError)
    return (str(error) if told else f"its files do not hold what a run writes: {error!r}").replace(str(path), place)


def _rows(rows: list[Row], rounds: int) -> Iterator[Row]:
    """The rows, all of them there, with numbers where numbers belong and nothing else."""
    if len(rows) != rounds:
        raise ValueError(f"metrics.jsonl holds {len(rows)} good lines of {rounds} rounds")
    if not is_evaluated(rows[-1]):
        raise ValueError("the last round of metrics.jsonl was not evaluated")
    undeclared = sorted({key for row in rows for key in row} - set(COLUMNS))
    others = [key for key in undeclared if all(row.get(key) is None or _is_number(row[key]) for row in rows)]
    for row in rows:
        needed = _ALWAYS if row["accuracy_mean"] is None else (*_ALWAYS, *_ACCURACIES)
        for key in COLUMNS:
            value = row.get(key)
            if not _is_number(value) and (value is not None or key in needed):
                raise ValueError(f"metrics.jsonl has {key} {value!r} in round {row['round']}")
        yield {key: row.get(key) for key in (*COLUMNS, *others)}


def _infinite(value: float | None) -> float:
    """What overflowed (null) as a number to draw and to compare."""
    return math.inf if value is None else float(value)


def _is_number(value: Any) -> bool:
    """Whether it is a finite number.

    >>> [_is_number(value) for value in (1, 0.5, float("nan"), True, "1", None)]
    [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _nodes(
    folder: RunFolder, rounds: list[int], key: str, better: bool
) -> tuple[dict[int, float], tuple[float, ...], dict[str, float]]:
    """From nodes.npz: by round the measure of the node that ends worst, quartiles at the end, measures in round 0.

    Nothing if it does not belong to these rounds, round 0 before them or not.
    """
    try:
        found = folder.read_arrays("nodes.npz")
        accuracy, at = np.asarray(found[key], np.float64), found["round"].tolist()
        if at not in (rounds, [0, *rounds]) or accuracy.shape != (len(at), accuracy.shape[1]):
            raise ValueError("nodes.npz does not belong to metrics.jsonl")
        if not np.isfinite(accuracy).all():
            raise ValueError("nodes.npz has values that are no numbers")
    except (*_DAMAGE, zipfile.BadZipFile, EOFError):
        return {}, (), {}  # a page can do without
    lowest = accuracy[:, int(np.argmin(accuracy[-1] if better else -accuracy[-1]))].tolist()
    first = float(accuracy[0].mean()), float(accuracy[0].min() if better else accuracy[0].max()), lowest[0]
    start = {f"{key}_{word}": value for word, value in zip(("mean", "worst", "lowest"), first, strict=True)}
    start = {} if at[0] else start
    ends = np.quantile(accuracy[-1], (0, 0.25, 0.5, 0.75, 1)).tolist()
    return dict(zip(at, lowest, strict=True)), tuple(ends), start


def _proof(found: Mapping[str, Any]) -> Proof:
    plan, histogram = found["plan"], tuple(int(count) for count in found["histogram"])
    if min(histogram, default=0) < 0:
        raise ValueError("certificate.json counts less than nothing")
    kinds = {"pull": int, "b_hat": int, "fraction": float, "probability": float, "confidence": float}
    facts: dict[str, Any] = {key: kind(plan[key]) for key, kind in kinds.items()}
    facts |= {key: int(found[key]) for key in ("max_observed", "violations_total", "threads")}
    facts |= {key: tuple((str(k), str(v)) for k, v in found[key].items()) for key in ("versions", "data")}
    return Proof(
        guarantee=Guarantee(found["guarantee"]),
        held=found["held"] is True,
        histogram=histogram,
        violations=tuple((int(v["round"]), int(v["node"]), int(v["count"])) for v in found["violations"]),
        **facts,
    )


# --- the command that makes a run again ------------------------------------------------------------------------------

_LEFT_OUT = ("data_dir", "out", "seeds")  # where things lie on one machine, and what one run of several does not know


def command(spec: Spec) -> str | None:
    """The command line, from the preset the run is named after or else the nearest; None for objects from Python.

    >>> command(load("mnist-30").replace(attack="foe", seed=3))
    'rpel run mnist-30 --attack foe --seed 3'
    """
    if OWN in (spec.dataset, spec.model):
        return None
    differences = {name: _differences(spec, preset) for name, preset in _presets().items()}
    near = min(differences, key=lambda name: (name != spec.name, len(differences[name]), name))
    flags = [word for key, value in differences[near] for word in _flag(key, value)]
    return shlex.join(["rpel", "run", near, *flags])


@cache
def _presets() -> dict[str, Spec]:
    return {name: load(name) for name in presets()}


def _differences(spec: Spec, base: Spec) -> list[tuple[str, Any]]:
    """(field, value) wherever the run is not as the preset; what is unset needs no option."""
    pairs = [(key, getattr(spec, key), getattr(base, key)) for key in Spec.model_fields if key not in _LEFT_OUT]
    return [(key, value) for key, value, theirs in pairs if value is not None and value != theirs]


def _flag(key: str, value: Any) -> list[str]:
    """The option that sets a field.

    >>> _flag("b_hat", 4), _flag("silent", False)
    (['--b-hat', '4'], ['--not-silent'])
    """
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--not-{key}"]
    return [f"--{name}", value_text(value)]
