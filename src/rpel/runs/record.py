"""What a run gives back: history, models, certificate, where it lies, and a picture; for one seed or for several."""

import copy
import csv
import html
import io
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpel import plots
from rpel.config.record import OWN
from rpel.config.spec import Spec, load_folder
from rpel.runs.columns import METRIC, Role, column, ends, headline, measures
from rpel.runs.folder import RunFolder
from rpel.runs.journal import number
from rpel.types import Seal

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

Floats = NDArray[np.float64]
log = logging.getLogger("rpel")
_PROVEN = ("guarantee", "held", "max_observed", "violations_total")


@dataclass(frozen=True, eq=False)
class Result:
    """A finished run.

    history      a row a round: accuracy_mean, accuracy_worst, … (NaN in rounds not evaluated)
    certificate  what the run proves about its sampling
    nodes        round (e,) and accuracy (e, h): every honest node in the rounds evaluated; metric.<name> (e, h), too
    path         its folder; None when nothing was kept
    reused       True when the run had been finished before and was not repeated
    """

    spec: Spec
    history: "Table"
    certificate: dict[str, Any]
    nodes: dict[str, NDArray[Any]]
    path: Path | None = None
    reused: bool = False
    kept: "dict[str, NDArray[Any]] | None" = field(default=None, repr=False)
    module: "nn.Module | None" = field(default=None, repr=False)

    @cached_property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """What models.safetensors holds: models (h, d), ids (h,), and local (h, q) where there are buffers."""
        if self.kept is not None:
            return self.kept
        from safetensors.numpy import load_file

        assert self.path is not None
        found: dict[str, NDArray[Any]] = load_file(self.path / "models.safetensors")
        return found

    @property
    def models(self) -> NDArray[np.float32]:
        """(h, d) the honest nodes' models; read from disk when first asked for."""
        return self.tensors["models"]

    def model(self, node: int) -> "nn.Module":
        """A new torch module with the model of the node in that row of :attr:`models`, buffers included.

        A loaded run whose network came from Python needs it again: rpel.load(path, model=…).
        """
        import torch

        from rpel.models import unflatten

        rows = len(self.models)
        if not -rows <= node < rows:
            raise ValueError(f"there is no node {node}: the {rows} honest nodes are 0 to {rows - 1}")
        module = copy.deepcopy(self._network())
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

    def _network(self) -> "nn.Module":
        if self.module is not None:
            return self.module
        if self.spec.model == OWN or self.spec.dataset == OWN:
            raise ValueError("this run's network came from Python: give it again, as in rpel.load(path, model=…)")
        from rpel import data, models

        found = data.load(self.spec.dataset, self.spec.data_dir)
        return models.model(self.spec.model, found.shape, found.classes, seed=self.spec.seed)

    @property
    def final(self) -> dict[str, Any]:
        """The last round's row: full test set, nothing missing."""
        return self.history.rows()[-1]

    @property
    def accuracy_mean(self) -> float:
        """Mean accuracy over the honest nodes after the last round."""
        return _float(self.final["accuracy_mean"])

    @property
    def accuracy_worst(self) -> float:
        """Accuracy of the worst honest node after the last round."""
        return _float(self.final["accuracy_worst"])

    @property
    def measure(self) -> str:
        """What the run is judged by: "accuracy", or the name of a metric where there are no classes."""
        return headline(self.history.rows())

    @property
    def more_is_better(self) -> bool:
        """Whether more of :attr:`measure` is better."""
        return bool(self._certificates[0].get("metrics", {}).get(self.measure, True))

    @property
    def _certificates(self) -> list[dict[str, Any]]:
        return [self.certificate]

    @property
    def _followed(self) -> Floats:
        """The measure of every honest node in the rounds evaluated."""
        return self.nodes["accuracy" if self.measure == "accuracy" else f"{METRIC}{self.measure}"]

    @property
    def seconds(self) -> float:
        """Time spent in rounds and evaluations."""
        return float(sum(self.history["seconds"]))

    @cached_property
    def seal(self) -> Seal:
        """Whether the run folder is as the run left it."""
        return Seal.NOT_SEALED if self.path is None else RunFolder(self.path).edited()[0]

    def lowest(self) -> Floats:
        """(e,) the trajectory of the node that ends lowest, which is what the paper plots as the worst."""
        followed = self._followed
        return np.asarray(followed[:, int(np.argmin(followed[-1] if self.more_is_better else -followed[-1]))])

    def plot(self) -> "Figure":
        """Accuracy, or :attr:`measure`, against rounds: mean, worst node, and the node that ends worst."""
        return self._drawn(_title(self.spec))

    def _drawn(self, title: str) -> "Figure":
        label = "test accuracy" if self.measure == "accuracy" else f"{self.measure} on test data"
        return plots.accuracy(title, self.nodes["round"], self._followed, label, self.more_is_better)

    def summary(self) -> dict[str, Any]:
        """The final metrics, where the run lies, and what its certificate says, as plain JSON values."""
        plan, spec = self.certificate["plan"], self.spec
        setting = {key: getattr(spec, key) for key in ("name", "dataset", "model", "method", "rule", "attack", "seed")}
        setting |= {key: plan[key] for key in ("nodes", "byzantine", "pull", "b_hat", "rounds", "probability")}
        proof = {key: self.certificate.get(key) for key in _PROVEN}
        last = {key: value for key, value in self.final.items() if key not in ("round", "seconds")}
        where = {"path": None if self.path is None else str(self.path), "reused": self.reused}
        judged = {"measures": list(measures([self.final]))}
        return setting | last | judged | {"seconds": round(self.seconds, 3), "certificate": proof} | where

    def __repr__(self) -> str:
        held = "held" if self.certificate["held"] else "violated"
        stored = ", finished before" if self.reused else ""
        mean, worst = (math.nan if value is None else value for value in ends(self.history.rows()))
        return (
            f"<Result of {self.spec.name}: {self.measure} {mean:.4f} mean, {worst:.4f} worst, "
            f"after {len(self.history)} rounds; plan {held}; {self.path or 'not kept'}{stored}>"
        )

    @staticmethod
    def load(path: str | Path, reused: bool = False, module: "nn.Module | None" = None) -> "Result":
        """The stored result of a finished run."""
        folder = RunFolder(Path(path))
        certificate = folder.certificate()
        if certificate is None:
            raise ValueError(f"{path} is not finished: rpel resume {path}")
        seal, changed = folder.edited()
        if seal is Seal.EDITED:
            log.warning("%s was edited after it was finished: %s", path, ", ".join(changed))
        nodes = folder.read_arrays("nodes.npz")
        return Result(
            load_folder(folder.path), Table(folder.metrics()), certificate, nodes, folder.path, reused, None, module
        )


class Results(Result):
    """Several seeds of one setting: ``runs`` one by one; history, accuracies and certificate over all of them."""

    def __init__(self, runs: Sequence[Result]) -> None:
        first = runs[0]
        followed = [key for key in first.nodes if key != "round"]
        nodes = {"round": first.nodes["round"], **{key: np.stack([run.nodes[key] for run in runs]) for key in followed}}
        super().__init__(
            spec=first.spec,
            history=_together([run.history for run in runs]),
            certificate=_all_held([run.certificate for run in runs]),
            nodes=nodes,
            path=None if first.path is None else first.path.parent,
            reused=all(run.reused for run in runs),
        )
        object.__setattr__(self, "runs", tuple(runs))

    runs: tuple[Result, ...]

    @cached_property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """models (seeds, h, d), ids (seeds, h), and local where there are buffers."""
        return {key: np.stack([run.tensors[key] for run in self.runs]) for key in self.runs[0].tensors}

    def model(self, node: int) -> "nn.Module":
        """Not of several seeds at once: runs[0].model(node)."""
        raise ValueError(f"there are {len(self.runs)} runs: ask one of them, as in result.runs[0].model({node})")

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    def interval(self, column: str) -> tuple[float, float, float]:
        """(mean, low, high) of a column's last value over the seeds: a 95 % t-interval, or both values of two seeds.

        NaN where a seed's value overflowed.
        """
        return interval([_float(run.final[column]) for run in self.runs])

    def summary(self) -> dict[str, Any]:
        """Each seed's summary, and (mean, low, high) over the seeds of what they end with."""
        runs = [run.summary() for run in self.runs]
        judged = measures(run.final for run in self.runs)
        over = {key: [number(value) for value in self.interval(key)] for key in judged}
        intervals = {key: dict(zip(("mean", "low", "high"), values, strict=True)) for key, values in over.items()}
        proof = {key: self.certificate.get(key) for key in _PROVEN}
        of_one = {"seed", *(key for key in self.runs[0].final if column(key).role is not Role.COST)}
        common = {key: value for key, value in runs[0].items() if key not in of_one}
        means = {key: values[0] for key, values in over.items()}
        where = {"path": None if self.path is None else str(self.path), "reused": self.reused}
        times = {"seconds": round(self.seconds, 3), "certificate": proof}
        return common | means | times | where | {"intervals": intervals, "runs": runs}

    def lowest(self) -> Floats:
        """(seeds, e) the trajectory of the node that ends lowest, for each seed."""
        return np.stack([run.lowest() for run in self.runs])

    def plot(self) -> "Figure":
        """Mean and worst accuracy against rounds, averaged over the seeds, with bands from lowest to highest."""
        return self._drawn(_title(self.spec, len(self.runs)))

    @property
    def _certificates(self) -> list[dict[str, Any]]:
        return [run.certificate for run in self.runs]

    def __repr__(self) -> str:
        name = self.measure
        mean, low, high = self.interval("accuracy_mean" if name == "accuracy" else f"{METRIC}{name}_mean")
        return f"<Results of {self.spec.name}: {len(self.runs)} seeds, {name} {mean:.4f} ({low:.4f} to {high:.4f})>"


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


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


def _together(tables: "Sequence[Table]") -> "Table":
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


def _all_held(certificates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "guarantee": certificates[0]["guarantee"],
        "held": all(one["held"] for one in certificates),
        "max_observed": max(one["max_observed"] for one in certificates),
        "violations_total": sum(one["violations_total"] for one in certificates),
        "runs": list(certificates),
    }


def _title(spec: Spec, seeds: int = 1) -> str:
    many = f", {seeds} seeds" if seeds > 1 else ""
    hostile = f"{spec.byzantine:,} of {spec.nodes:,} hostile ({spec.attack})"
    return f"{spec.name}: {spec.method}, {hostile}, pull {spec.pull}{many}"


# --- the table -------------------------------------------------------------------------------------------------------

_SHOWN = 10


class Table:
    """Rows of equal keys.

    >>> t = Table([{"round": 1, "loss": None}, {"round": 2, "loss": 0.5}])
    >>> t.columns, len(t), t["loss"].tolist()
    (('round', 'loss'), 2, [nan, 0.5])
    >>> print(t)
    round  loss
        1
        2   0.5
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = list(rows)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._rows[0]) if self._rows else ()

    def rows(self) -> list[dict[str, Any]]:
        """All rows, each a dict; None where there is no value."""
        return list(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __getitem__(self, column: str) -> NDArray[Any]:
        """A column; missing values are NaN."""
        if column not in self.columns:
            raise KeyError(f"there is no column {column!r}: there are {', '.join(self.columns)}")
        values = [row[column] for row in self._rows]
        return np.array([np.nan if value is None else value for value in values])

    def where(self, column: str) -> "Table":
        """The rows that have a value in this column, such as those that were evaluated.

        >>> len(Table([{"loss": None}, {"loss": 0.5}]).where("loss"))
        1
        """
        return Table([row for row in self._rows if row[column] is not None])

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as CSV, also written to the path when there is one; missing values are empty.

        >>> Table([{"round": 1, "loss": None}]).to_csv()
        'round,loss\\n1,\\n'
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        if path is not None:
            Path(path).write_text(text.getvalue(), "utf-8")
        return text.getvalue()

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame."""
        if find_spec("pandas") is None:
            raise ValueError("pandas is not installed: pip install 'rpel[pandas]'")
        pandas = import_module("pandas")
        return pandas.DataFrame(self._rows, columns=list(self.columns))

    def _sample(self) -> list[dict[str, Any] | None]:
        """All rows of a short table, else the first and the last with a gap (None) between."""
        if len(self) <= 2 * _SHOWN:
            return list(self._rows)
        return [*self._rows[:_SHOWN], None, *self._rows[-_SHOWN:]]

    def __str__(self) -> str:
        cells = [
            ["…"] * len(self.columns) if row is None else [_cell(v) for v in row.values()] for row in self._sample()
        ]
        lines = [list(self.columns), *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)

    def __repr__(self) -> str:
        return f"<Table of {len(self)} rows: {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        head = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{'…' if row is None else _cell(row[c])}</td>" for c in self.columns) + "</tr>"
            for row in self._sample()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
