"""A run as everybody reads it, from Python, tables, reports and comparisons: `Run`,
and `RunSet` for several seeds."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpel import plots
from rpel.record import OWN
from rpel.runs.certificate import Certificate, Robustness, Survival, survival
from rpel.runs.columns import (
    METRIC,
    Role,
    Row,
    column,
    ends,
    headline,
    is_evaluated,
    measures,
    prefix,
)
from rpel.runs.folder import RunFolder, readable
from rpel.runs.journal import number
from rpel.runs.table import Table
from rpel.spec import Spec, load_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from rpel.models import Factory

Floats = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]
_PROVEN = ("guarantee", "held", "max_observed", "violations_total")


def _spent(runs: "Sequence[Run]") -> dict[str, Any]:
    """What certificates say of privacy, of the run that spent most; nothing where none says anything."""
    statements = [run.certificate.privacy for run in runs if run.certificate.privacy is not None]
    return {"privacy": max(statements, key=lambda one: one["epsilon"])} if statements else {}


class Finished:
    """What one run and several seeds of it share: a table of rounds, whose last row is what it came to."""

    @property
    def history(self) -> Table:
        raise NotImplementedError

    def total(self, column: str) -> float:
        """A column's sum over all rounds."""
        raise NotImplementedError

    @property
    def final(self) -> dict[str, Any]:
        """The last round's row: full test set, nothing missing."""
        return self.history.rows()[-1]

    @property
    def accuracy_mean(self) -> float:
        """Mean accuracy over the honest nodes after the last round, and over the seeds."""
        return _float(self.final["accuracy_mean"])

    @property
    def accuracy_worst(self) -> float:
        """Accuracy of the worst honest node after the last round, mean over the seeds."""
        return _float(self.final["accuracy_worst"])

    @property
    def seconds(self) -> float:
        """Time spent in rounds and evaluations."""
        return self.total("seconds")


class Run(Finished):
    """A finished run, in its folder or in memory; what lies on disk is read when it is first asked for.

    history      a row a round: accuracy_mean, accuracy_worst, … (NaN in rounds not evaluated)
    certificate  what the run proves about its sampling
    nodes        round (e,), accuracy (e, h) and metric.<name> (e, h), honest nodes in the rounds evaluated
    path         its folder; None when nothing was kept
    reused       True when the run had been finished before and was not repeated
    place        its path as a page shows it
    """

    def __init__(
        self,
        spec: Spec,
        path: Path | None = None,
        *,
        history: Table | None = None,
        certificate: Certificate | None = None,
        nodes: Arrays | None = None,
        tensors: Arrays | None = None,
        module: "nn.Module | Factory | None" = None,
        reused: bool = False,
        place: str = "",
    ) -> None:
        self.spec, self.path, self.reused, self.module, self.place = spec, path, reused, module, place
        given = {"history": history, "certificate": certificate, "nodes": nodes, "tensors": tensors}
        self.__dict__.update({key: value for key, value in given.items() if value is not None})

    @staticmethod
    def load(path: str | Path, reused: bool = False, module: "nn.Module | Factory | None" = None) -> "Run":
        """The finished run in a folder."""
        folder = RunFolder(Path(path))
        spec = load_folder(folder.path)
        certificate = folder.certificate()
        if certificate is None:
            raise ValueError(f"{path} is not finished: rpel resume {path}")
        return Run(spec, folder.path, certificate=certificate, module=module, reused=reused)

    # --- what there is ---

    @property
    def _folder(self) -> RunFolder:
        if self.path is None:
            raise ValueError("nothing was kept of this run: rpel.simulate(…, out='runs') keeps a folder")
        return RunFolder(self.path)

    @cached_property
    def history(self) -> Table:
        rows = self._folder.metrics()
        if len(rows) != self.spec.rounds:
            raise ValueError(
                f"{self.path}/metrics.jsonl holds {len(rows)} readable lines of {self.spec.rounds}: copy the "
                "folder anew, or repeat the run with --force"
            )
        columns = dict.fromkeys(key for row in rows for key in row)  # a callback may add one now and then
        return Table([dict.fromkeys(columns) | row for row in rows])

    @cached_property
    def certificate(self) -> Certificate:
        certificate = self._folder.certificate()
        if certificate is None:
            raise ValueError(f"{self.path} is not finished: rpel resume {self.path}")
        return certificate

    @cached_property
    def nodes(self) -> dict[str, NDArray[Any]]:
        return self._folder.read_arrays("nodes.npz")

    @cached_property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """What models.safetensors holds: models (h, d), ids (h,), and local (h, q)
        where there are buffers."""
        from safetensors.numpy import load_file

        path = self._folder.path / "models.safetensors"
        with readable(path):
            tensors: dict[str, NDArray[Any]] = load_file(path)
        return tensors

    @property
    def models(self) -> NDArray[np.float32]:
        """(h, d) the honest nodes' models; read from disk when first asked for."""
        return self.tensors["models"]

    def model(self, node: int) -> "nn.Module":
        """A new torch module with the model of the node in that row of :attr:`models`, buffers included.

        Frozen parameters, which :attr:`models` does not hold, have the values that all nodes share. A loaded
        run whose network came from Python needs it again: rpel.load(path, model=…).
        """
        import torch

        from rpel.models import initialised, unflatten

        rows = len(self.models)
        if not -rows <= node < rows:
            raise ValueError(f"there is no node {node}: the {rows} honest nodes are 0 to {rows - 1}")
        module = copy.deepcopy(initialised(self._network(), self.spec.seed))
        unflatten(module, torch.from_numpy(np.array(self.models[node])))
        if "local" in self.tensors:
            local, at = torch.from_numpy(np.array(self.tensors["local"][node])), 0
            for buffer in module.buffers():
                buffer.copy_(local[at : at + buffer.numel()].reshape(buffer.shape))
                at += buffer.numel()
        return module.eval()

    def state_dict(self, node: int) -> dict[str, Any]:
        """The state_dict of :meth:`model`."""
        return dict(self.model(node).state_dict())

    def _network(self) -> "nn.Module | Factory":
        if self.module is not None:
            return self.module
        if self.spec.model == OWN or self.spec.dataset == OWN:
            raise ValueError(
                "this run's network came from Python: give it again, as in rpel.load(path, model=…)"
            )
        from rpel import data, models

        dataset = data.load(self.spec.dataset, self.spec.data_dir)
        return models.model(self.spec.model, dataset.shape, dataset.classes, seed=self.spec.seed)

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.place.rpartition("/")[2] if self.place or self.path is None else self.path.name

    # --- what it ended with ---

    def end(self, column: str) -> float:
        """A column after the last round; infinite where it overflowed."""
        return _infinite(self.final[column])

    def total(self, column: str) -> float:
        """A column's sum over all rounds."""
        return float(sum(row[column] for row in self.history))

    @property
    def diverged(self) -> int:
        """The number of honest nodes that have diverged at the end."""
        return self.final.get("diverged") or 0

    @property
    def measures(self) -> tuple[str, ...]:
        """The columns it is judged by at its end."""
        return measures([self.final])

    @cached_property
    def measure(self) -> str:
        """What the run is judged by: "accuracy", or the name of a metric where there are no classes."""
        return headline(self.history.rows())

    @property
    def more_is_better(self) -> bool:
        """Whether more of :attr:`measure` is better."""
        return self.certificate.metrics.get(self.measure, True)

    @property
    def survival(self) -> Survival:
        """What its rule survives: another statement than what its sampling was."""
        return survival(self.spec.rule or "its own rule", self.certificate.pull, self.certificate.b_hat)

    @property
    def well(self) -> bool:
        """Whether the sampling stayed within a plan that applies, no node diverged and the rule is robust."""
        sampled = self.certificate.held and self.certificate.guaranteed and not self.diverged
        return sampled and self.survival.robustness is not Robustness.NONE

    # --- its curves ---

    @property
    def key(self) -> str:
        """What the columns of its measure begin with."""
        return prefix(self.measure)

    @cached_property
    def evaluated(self) -> list[Row]:
        """The rows of the rounds evaluated."""
        return [row for row in self.history if is_evaluated(row)]

    @property
    def _followed(self) -> Floats:
        """The measure of every honest node in the rounds evaluated."""
        return self.nodes[self.key]

    def lowest(self) -> Floats:
        """(e,) the trajectory of the node that ends lowest, which is what the paper plots as the worst."""
        followed = self._followed
        return np.asarray(followed[:, int(np.argmin(followed[-1] if self.more_is_better else -followed[-1]))])

    @cached_property
    def curves(self) -> "Curves":
        """What nodes.npz adds to the history; a report can do without."""
        try:
            return Curves.of(self)
        except ValueError:
            return Curves({}, (), {})

    @property
    def rows(self) -> list[Row]:
        """The history with <measure>_lowest, that of the node that ends worst; None where it is not known."""
        return [{**row, f"{self.key}_lowest": self.curves.lowest.get(row["round"])} for row in self.history]

    def series(self, column: str, from_start: bool = False) -> list[float]:
        """A column in the rounds evaluated, with round 0 or not.

        <measure>_lowest follows the node that ends worst; where nodes are not known,
        it is the worst of each round.
        """
        first = [self.curves.start[column]] if from_start else []
        if column == f"{self.key}_lowest":
            if self.curves.lowest:
                return [*first, *(self.curves.lowest[row["round"]] for row in self.evaluated)]
            column = f"{self.key}_worst"
        return [*first, *(_infinite(row[column]) for row in self.evaluated)]

    def plot(self) -> "Figure":
        """Accuracy, or :attr:`measure`, against rounds: mean, worst node, and the node that ends worst."""
        return _drawn(self, _title(self.spec), self._followed)

    # --- in other forms ---

    def summary(self) -> dict[str, Any]:
        """The final metrics, where the run lies, and what its certificate says, as plain JSON values."""
        plan, spec = self.certificate["plan"], self.spec
        setting = {
            key: getattr(spec, key)
            for key in ("name", "dataset", "model", "method", "rule", "attack", "seed")
        }
        setting |= {
            key: plan[key] for key in ("nodes", "byzantine", "pull", "b_hat", "rounds", "probability")
        }
        proof = self.certificate.verdict() | _spent([self])
        last = {key: value for key, value in self.final.items() if key not in ("round", "seconds")}
        where = {"path": None if self.path is None else str(self.path), "reused": self.reused}
        judged = {"measures": list(self.measures)}
        return setting | last | judged | {"seconds": round(self.seconds, 3), "certificate": proof} | where

    def to_pandas(self) -> Any:
        """The history as a pandas DataFrame."""
        return self.history.to_pandas()

    def __repr__(self) -> str:
        held = "held" if self.certificate["held"] else "violated"
        stored = ", finished before" if self.reused else ""
        mean, worst = (math.nan if value is None else value for value in ends(self.history.rows()))
        return (
            f"<Run of {self.spec.name}: {self.measure} {mean:.4f} mean, {worst:.4f} worst, "
            f"after {len(self.history)} rounds{_diverged(self)}; plan {held}; "
            f"{self.path or 'not kept'}{stored}>"
        )


@dataclass(frozen=True)
class Curves:
    """What the honest nodes did: by round the measure of the node that ends lowest, quartiles at the end,
    from the lowest to the highest, and the accuracies in round 0, by column;
    each empty if it is not known."""

    lowest: dict[int, float]
    quartiles: tuple[float, ...]
    start: dict[str, float]

    @staticmethod
    def of(run: Run) -> "Curves":
        """From nodes.npz; ValueError if a node's metric overflowed."""
        followed, at = np.asarray(run._followed, np.float64), run.nodes["round"].tolist()
        if not np.isfinite(followed).all():
            raise ValueError("nodes.npz has values that are no numbers")
        lowest = run.lowest().tolist()
        worst = followed[0].min() if run.more_is_better else followed[0].max()
        first = float(followed[0].mean()), float(worst), lowest[0]
        columns = (f"{run.key}_mean", f"{run.key}_worst", f"{run.key}_lowest")
        ends = np.quantile(followed[-1], (0, 0.25, 0.5, 0.75, 1)).tolist()
        start = dict(zip(columns, first, strict=True)) if not at[0] else {}
        return Curves(dict(zip(at, lowest, strict=True)), tuple(ends), start)


class RunSet(Finished):
    """Several seeds of one setting: ``runs`` one by one; history,
    accuracies and certificate over all of them.

    label  tells it from the others of a chart
    """

    def __init__(self, runs: Sequence[Run], label: str = "") -> None:
        self.runs, self.label = tuple(runs), label

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __getitem__(self, at: int) -> Run:
        return self.runs[at]

    # --- what they share ---

    @property
    def spec(self) -> Spec:
        return self.runs[0].spec

    @property
    def path(self) -> Path | None:
        """The folder that holds theirs."""
        first = self.runs[0].path
        return None if first is None else first.parent

    @property
    def reused(self) -> bool:
        return all(run.reused for run in self.runs)

    @property
    def measure(self) -> str:
        """What they are judged by: "accuracy", or the name of a metric where there are no classes."""
        return self.runs[0].measure

    @property
    def more_is_better(self) -> bool:
        return self.runs[0].more_is_better

    # --- over the seeds ---

    @cached_property
    def history(self) -> Table:
        """Row by row the mean over the seeds, and low and high of the accuracies."""
        return _together([run.history for run in self.runs])

    @cached_property
    def certificate(self) -> Certificate:
        """Whether the plan held in all of them, and all certificates as ``runs``."""
        return self.runs[0].certificate

    @property
    def held(self) -> bool:
        return all(run.certificate.held for run in self.runs)

    @property
    def max_observed(self) -> int:
        return max(run.certificate.max_observed for run in self.runs)

    @property
    def diverged(self) -> int:
        """The number of honest nodes that have diverged at the end, the maximum over the seeds."""
        return max(run.diverged for run in self.runs)

    @cached_property
    def nodes(self) -> dict[str, NDArray[Any]]:
        """round (e,), and accuracy and metrics (seeds, e, h)."""
        first = self.runs[0].nodes
        return {
            key: first[key] if key == "round" else np.stack([run.nodes[key] for run in self.runs])
            for key in first
        }

    @cached_property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """models (seeds, h, d), ids (seeds, h), and local where there are buffers."""
        return {key: np.stack([run.tensors[key] for run in self.runs]) for key in self.runs[0].tensors}

    @property
    def models(self) -> NDArray[np.float32]:
        """(seeds, h, d) the honest nodes' models."""
        return self.tensors["models"]

    def model(self, node: int) -> "nn.Module":
        """Not of several seeds at once: runs[0].model(node)."""
        raise ValueError(
            f"there are {len(self.runs)} runs: ask one of them, as in result.runs[0].model({node})"
        )

    def total(self, column: str) -> float:
        """A column's sum over all rounds and seeds."""
        return sum(run.total(column) for run in self.runs)

    @property
    def measures(self) -> tuple[str, ...]:
        """The columns they are judged by at their ends."""
        return measures(run.final for run in self.runs)

    def interval(self, column: str) -> tuple[float, float, float]:
        """(mean, low, high) of a column's last value over the seeds: a 95 % t-interval,
        or both values of two seeds.

        NaN where a seed's value overflowed.
        """
        values = [_float(run.final.get(column)) for run in self.runs]
        return interval(values) if np.isfinite(values).all() else (math.nan, math.nan, math.nan)

    # --- curves ---

    def columns(self, metric: str) -> tuple[str, ...]:
        """What a metric is drawn from: the first solid, the second, the paper's worst node, dashed."""
        key = self.runs[0].key
        return (f"{key}_mean", f"{key}_lowest") if metric == "accuracy" else (metric,)

    def rounds(self, column: str) -> list[int]:
        """The rounds of :meth:`curve`: those evaluated, and for accuracies round 0 where it is known."""
        evaluated = [row["round"] for row in self.runs[0].evaluated]
        return [0, *evaluated] if self._begins(column) else evaluated

    def curve(self, column: str) -> Floats:
        """(3, e): mean, lowest and highest over the seeds; infinite where a number overflowed."""
        begins = self._begins(column)
        values = np.array([run.series(column, begins) for run in self.runs])
        return np.stack([values.mean(0), values.min(0), values.max(0)])

    def _begins(self, column: str) -> bool:
        return all(column in run.curves.start for run in self.runs)

    def lowest(self) -> Floats:
        """(seeds, e) the trajectory of the node that ends lowest, for each seed."""
        return np.stack([run.lowest() for run in self.runs])

    def plot(self) -> "Figure":
        """Mean and worst accuracy against rounds, averaged over the seeds,
        with bands from lowest to highest."""
        followed = np.stack([run._followed for run in self.runs])
        return _drawn(self.runs[0], _title(self.spec, len(self.runs)), followed)

    # --- in other forms ---

    def summary(self) -> dict[str, Any]:
        """Each seed's summary, and (mean, low, high) over the seeds of what they end with."""
        runs = [run.summary() for run in self.runs]
        over = {key: [number(value) for value in self.interval(key)] for key in self.measures}
        intervals = {
            key: dict(zip(("mean", "low", "high"), values, strict=True)) for key, values in over.items()
        }
        proof = self.certificate.verdict() | _spent(self.runs)
        of_one = {"seed", *(key for key in self.runs[0].final if column(key).role is not Role.COST)}
        common = {key: value for key, value in runs[0].items() if key not in of_one}
        means = {key: values[0] for key, values in over.items()}
        where = {"path": None if self.path is None else str(self.path), "reused": self.reused}
        times = {"diverged": self.diverged, "seconds": round(self.seconds, 3), "certificate": proof}
        return common | means | times | where | {"intervals": intervals, "runs": runs}

    def to_pandas(self) -> Any:
        """All rows of all runs as one pandas DataFrame, with a column ``seed``."""
        return Table([{"seed": run.spec.seed, **row} for run in self.runs for row in run.history]).to_pandas()

    def __repr__(self) -> str:
        name = self.measure
        mean, low, high = self.interval(f"{prefix(name)}_mean")
        return (
            f"<RunSet of {self.spec.name}: {len(self.runs)} seeds, {name} {mean:.4f} ({low:.4f} to "
            f"{high:.4f}){_diverged(self)}>"
        )


Result = Run
Results = RunSet
"""What Run and RunSet were called; both names stay."""


def _drawn(run: Run, title: str, followed: Floats) -> "Figure":
    return plots.accuracy(title, run.nodes["round"], followed, _label(run), run.more_is_better)


def _diverged(run: Run | RunSet) -> str:
    honest = run.spec.nodes - run.spec.byzantine
    return f"; {run.diverged} of {honest} honest nodes have diverged" if run.diverged else ""


def _label(run: Run) -> str:
    return "test accuracy" if run.measure == "accuracy" else f"{run.measure} on test data"


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _infinite(value: float | None) -> float:
    """What overflowed (null) as a number to draw and to compare."""
    return math.inf if value is None else float(value)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): a 95 % t-interval from three values on, lowest and highest of two.

    >>> interval([0.25, 0.75])
    (0.5, 0.25, 0.75)
    """
    mean = float(np.mean(values))
    if len(values) < 3:
        return mean, min(values), max(values)
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return mean, mean - half, mean + half


def _together(tables: Sequence[Table]) -> Table:
    """Row by row the mean over the seeds, and low and high of the accuracies."""
    rows = []
    for alike in zip(*(table.rows() for table in tables), strict=True):
        row: dict[str, Any] = {}
        for key in alike[0]:
            values = [other.get(key) for other in alike]  # a run of another version may lack a column
            known = [] if None in values else [float(value) for value in values]
            row[key] = float(np.mean(known)) if known else None
            if key in ("accuracy_mean", "accuracy_worst") or key.startswith(METRIC):
                low, high = interval(known)[1:] if known else (None, None)
                row |= {f"{key}_low": low, f"{key}_high": high}
        rows.append(row | {"round": alike[0]["round"]})
    return Table(rows)


def _title(spec: Spec, seeds: int = 1) -> str:
    many = f", {seeds} seeds" if seeds > 1 else ""
    hostile = f"{spec.byzantine:,} of {spec.nodes:,} hostile ({spec.attack})"
    return f"{spec.name}: {spec.method}, {hostile}, pull {spec.pull}{many}"
