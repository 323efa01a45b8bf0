"""A finished run as Python, tables and reports read it: `Run`, and `Runs` for several of its seeds."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpel.record import OWN
from rpel.runs.certificate import Certificate, Robustness, Survival, survival
from rpel.runs.columns import Role, Row, column, ends, headline, is_evaluated, measures, prefix
from rpel.runs.folder import RunFolder, readable
from rpel.runs.journal import number
from rpel.spec import Request, load_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from torch import nn

    from rpel.models import Factory

Arrays = Mapping[str, NDArray[Any]]
STATISTIC = "mean over the seeds (lowest to highest)"
"""What every table and figure says of several seeds, whatever their number."""


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, lowest and highest of one value a seed; NaN if one of them overflowed.

    >>> spread([0.25, 0.75]), spread([0.5]), spread([1.0, math.inf])[0]
    ((0.5, 0.25, 0.75), (0.5, 0.5, 0.5), nan)
    """
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan, math.nan
    return float(np.mean(values)), min(values), max(values)


def frame(rows: Sequence[Row]) -> "DataFrame":
    """Return rows of equal keys as a DataFrame, with NaN for what is missing.

    >>> frame([{"round": 1, "loss": None}, {"round": 2, "loss": 0.5}])["loss"].tolist()
    [nan, 0.5]
    """
    import pandas

    keys = rows[0] if rows else ()
    return pandas.DataFrame({k: [math.nan if row[k] is None else row[k] for row in rows] for k in keys})


class Run:
    """A finished run, in its folder or in memory; files are read when they are first needed.

    certificate: what the run proves about its sampling. nodes: ``round`` (e,), ``accuracy`` (e, h) and
    ``metric.<name>`` (e, h) of the honest nodes in the rounds evaluated. path: its folder, or None if nothing
    was kept. reused: whether it had been finished before and was not repeated.
    """

    def __init__(
        self,
        spec: Request,
        path: Path | None = None,
        *,
        rows: Sequence[Row] | None = None,
        certificate: Certificate | None = None,
        nodes: Arrays | None = None,
        tensors: Arrays | None = None,
        module: "nn.Module | Factory | None" = None,
        reused: bool = False,
    ) -> None:
        self.spec, self.path, self.reused = spec, path, reused
        self._rows, self._certificate, self._nodes, self._tensors = rows, certificate, nodes, tensors
        self._module = module

    @staticmethod
    def load(path: str | Path, reused: bool = False, module: "nn.Module | Factory | None" = None) -> "Run":
        """Return the finished run in a folder."""
        run = Run(load_folder(Path(path)), Path(path), module=module, reused=reused)
        _ = run.certificate
        return run

    @property
    def _folder(self) -> RunFolder:
        if self.path is None:
            raise ValueError("nothing was kept of this run: rpel.simulate(…, out='runs') keeps a folder")
        return RunFolder(self.path)

    @cached_property
    def rows(self) -> list[Row]:
        """One dict a round, with None for what is missing."""
        rows = self._folder.metrics() if self._rows is None else self._rows
        if len(rows) != self.spec.rounds:
            raise ValueError(
                f"{self.path}/metrics.jsonl holds {len(rows)} readable lines of {self.spec.rounds}: copy the "
                "folder anew, or repeat the run with --force"
            )
        keys = dict.fromkeys(key for row in rows for key in row)  # a callback may add one now and then
        return [dict.fromkeys(keys) | row for row in rows]

    @cached_property
    def history(self) -> "DataFrame":
        """One row a round; NaN in rounds that were not evaluated."""
        return frame(self.rows)

    @cached_property
    def certificate(self) -> Certificate:
        certificate = self._certificate or self._folder.certificate()
        if certificate is None:
            raise ValueError(f"{self.path} is not finished: rpel resume {self.path}")
        return certificate

    @cached_property
    def nodes(self) -> Arrays:
        return self._folder.read_arrays("nodes.npz") if self._nodes is None else self._nodes

    @cached_property
    def tensors(self) -> Arrays:
        """What models.safetensors holds: models (h, d), ids (h,), and local (h, q) if there are buffers."""
        if self._tensors is not None:
            return self._tensors
        from safetensors.numpy import load_file

        path = self._folder.path / "models.safetensors"
        with readable(path):
            tensors: dict[str, NDArray[Any]] = load_file(path)
        return tensors

    @property
    def models(self) -> NDArray[np.float32]:
        """The honest nodes' models, (h, d)."""
        return self.tensors["models"]

    def model(self, node: int) -> "nn.Module":
        """Return a new torch module with the model in that row of :attr:`models`, buffers included.

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
        """Return the state_dict of :meth:`model`."""
        return dict(self.model(node).state_dict())

    def _network(self) -> "nn.Module | Factory":
        if self._module is not None:
            return self._module
        if self.spec.model == OWN or self.spec.dataset == OWN:
            raise ValueError(
                "this run's network came from Python: give it again, as in rpel.load(path, model=…)"
            )
        from rpel import data, models

        dataset = data.load(self.spec.dataset, self.spec.data_dir)
        return models.model(self.spec.model, dataset.shape, dataset.classes, seed=self.spec.seed)

    # --- what it ended with ---

    @property
    def final(self) -> Row:
        """The last round's row: evaluated on the full test set; None where there is no number."""
        return self.rows[-1]

    def end(self, column: str) -> float:
        """Return a column after the last round; infinite if it overflowed."""
        value = self.final.get(column)
        return math.inf if value is None else float(value)

    @property
    def accuracy_mean(self) -> float:
        """Mean accuracy over the honest nodes after the last round."""
        return _float(self.final["accuracy_mean"])

    @property
    def accuracy_worst(self) -> float:
        """Accuracy of the worst honest node after the last round."""
        return _float(self.final["accuracy_worst"])

    def total(self, column: str) -> float:
        """Return a column's sum over all rounds."""
        return float(sum(row[column] for row in self.rows))

    @property
    def diverged(self) -> int:
        """The number of honest nodes that have diverged at the end."""
        return self.final.get("diverged") or 0

    @property
    def measures(self) -> tuple[str, ...]:
        """The columns that the run is judged by at its end."""
        return measures([self.final])

    @cached_property
    def measure(self) -> str:
        """What the run is judged by: "accuracy", or the name of a metric where there are no classes."""
        return headline(self.rows)

    @property
    def key(self) -> str:
        """The prefix of the columns of :attr:`measure`."""
        return prefix(self.measure)

    @property
    def more_is_better(self) -> bool:
        """Whether more of :attr:`measure` is better."""
        return self.certificate.metrics.get(self.measure, True)

    @property
    def survival(self) -> Survival:
        """What its rule survives, which is another statement than what its sampling was."""
        return survival(self.spec.rule or "its own rule", self.certificate.pull, self.certificate.b_hat)

    @property
    def well(self) -> bool:
        """Whether the sampling stayed within a plan that applies, no node diverged and the rule is robust."""
        sampled = self.certificate.held and self.certificate.guaranteed and not self.diverged
        return sampled and self.survival.robustness is not Robustness.NONE

    @cached_property
    def curve(self) -> "DataFrame":
        """The evaluated rounds, from round 0 if it is known, with the bytes sent so far.

        <measure>_lowest is the trajectory of the node that ends worst, which the paper calls the worst. Where
        nodes.npz is missing or has numbers that overflowed, it is the worst node of each round.
        """
        import pandas

        key, history = self.key, self.history.assign(bytes=self.history["bytes"].cumsum())
        table = history[[is_evaluated(row) for row in self.rows]].replace(math.nan, math.inf)
        table[f"{key}_lowest"] = table[f"{key}_worst"]
        try:
            rounds, followed = self.nodes["round"], np.asarray(self.nodes[key], np.float64)
        except ValueError:
            return table
        if not np.isfinite(followed).all():
            return table
        node = int(followed[-1].argmin() if self.more_is_better else followed[-1].argmax())
        table[f"{key}_lowest"] = table["round"].map(
            dict(zip(rounds.tolist(), followed[:, node], strict=True))
        )
        if rounds[0]:
            return table
        worst = followed[0].min() if self.more_is_better else followed[0].max()
        ends = {f"{key}_mean": followed[0].mean(), f"{key}_worst": worst, f"{key}_lowest": followed[0, node]}
        return pandas.concat([pandas.DataFrame([{"round": 0, "bytes": 0, **ends}]), table], ignore_index=True)

    def plot(self) -> "Figure":
        """Draw accuracy, or :attr:`measure`, against rounds: mean, and the node that ends worst."""
        from rpel.studies import plots

        return plots.of_runs([self])

    def summary(self) -> dict[str, Any]:
        """Return the final metrics, the folder and what the certificate says, as plain JSON values."""
        proof, spec = self.certificate, self.spec
        fields = ("name", "dataset", "model", "method", "rule", "attack", "seed")
        planned = ("nodes", "byzantine", "pull", "b_hat", "rounds", "probability")
        setting = {key: getattr(spec, key) for key in fields} | {key: proof.plan[key] for key in planned}
        last = {key: value for key, value in self.final.items() if key not in ("round", "seconds")}
        where = {"path": None if self.path is None else str(self.path), "reused": self.reused}
        judged = {"measures": list(self.measures), "seconds": round(self.total("seconds"), 3)}
        return setting | last | judged | {"certificate": proof.verdict()} | where

    def __repr__(self) -> str:
        held = "held" if self.certificate.held else "violated"
        stored = ", finished before" if self.reused else ""
        mean, worst = map(_float, ends(self.rows))
        return (
            f"<Run of {self.spec.name}: {self.measure} {mean:.4f} mean, {worst:.4f} worst, "
            f"after {len(self.rows)} rounds{_diverged(self)}; plan {held}; "
            f"{self.path or 'not kept'}{stored}>"
        )


class Runs(Sequence[Run]):
    """Several seeds of one setting; numbers are means over them. label: its name in a table or a figure."""

    def __init__(self, runs: Sequence[Run], label: str = "") -> None:
        self.runs, self.label = tuple(runs), label

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __getitem__(self, at: Any) -> Any:
        return self.runs[at]

    @property
    def spec(self) -> Request:
        return self.runs[0].spec

    @property
    def path(self) -> Path | None:
        """The folder that holds theirs."""
        first = self.runs[0].path
        return None if first is None else first.parent

    @property
    def reused(self) -> bool:
        return all(run.reused for run in self.runs)

    @cached_property
    def frame(self) -> "DataFrame":
        """All rounds of all runs, with a column ``seed``."""
        return frame([{"seed": run.spec.seed, **row} for run in self.runs for row in run.rows])

    @cached_property
    def history(self) -> "DataFrame":
        """One row a round, means over the seeds."""
        return self.frame.drop(columns="seed").groupby("round", as_index=False).mean()

    @cached_property
    def certificate(self) -> Certificate:
        """What all of them prove together: it holds if each one does. The rest is that of the first seed."""
        proofs = [run.certificate for run in self.runs]
        privacy = [proof.privacy for proof in proofs if proof.privacy is not None]
        return replace(
            proofs[0],
            held=all(proof.held for proof in proofs),
            max_observed=max(proof.max_observed for proof in proofs),
            violations=[one for proof in proofs for one in proof.violations],
            violations_total=sum(proof.violations_total for proof in proofs),
            privacy=max(privacy, key=lambda spent: spent["epsilon"], default=None),
        )

    @property
    def accuracy_mean(self) -> float:
        return self.interval("accuracy_mean")[0]

    @property
    def accuracy_worst(self) -> float:
        return self.interval("accuracy_worst")[0]

    @property
    def measures(self) -> tuple[str, ...]:
        """The columns that all of them are judged by at their ends."""
        return measures(run.final for run in self.runs)

    @property
    def diverged(self) -> int:
        """The number of honest nodes that have diverged at the end, the maximum over the seeds."""
        return max(run.diverged for run in self.runs)

    @cached_property
    def nodes(self) -> Arrays:
        """``round`` (e,); accuracy and metrics (seeds, e, h)."""
        each = [run.nodes for run in self.runs]
        return {key: each[0][key] if key == "round" else np.stack([n[key] for n in each]) for key in each[0]}

    @property
    def models(self) -> NDArray[np.float32]:
        """The honest nodes' models, (seeds, h, d)."""
        return np.stack([run.models for run in self.runs])

    def total(self, column: str) -> float:
        """Return a column's sum over all rounds and seeds."""
        return sum(run.total(column) for run in self.runs)

    def interval(self, column: str) -> tuple[float, float, float]:
        """Return mean, lowest and highest over the seeds of a column's last value; NaN if one overflowed."""
        return spread([_float(run.final.get(column)) for run in self.runs])

    def plot(self) -> "Figure":
        """Draw mean and worst node against rounds, with bands from the lowest to the highest seed."""
        from rpel.studies import plots

        return plots.of_runs(self.runs)

    def summary(self) -> dict[str, Any]:
        """Return each seed's summary, and mean, low and high over the seeds of what they end with."""
        runs = [run.summary() for run in self.runs]
        three = {key: [number(value) for value in self.interval(key)] for key in self.measures}
        intervals = {k: dict(zip(("mean", "low", "high"), v, strict=True)) for k, v in three.items()}
        of_one = {"seed", *(key for key in self.runs[0].final if column(key).role is not Role.COST)}
        common = {key: value for key, value in runs[0].items() if key not in of_one}
        means = {key: values[0] for key, values in three.items()}
        where = {"path": None if self.path is None else str(self.path), "reused": self.reused}
        times = {"diverged": self.diverged, "seconds": round(self.total("seconds"), 3)}
        proof = {"certificate": self.certificate.verdict()}
        return common | means | times | proof | where | {"intervals": intervals, "runs": runs}

    def __repr__(self) -> str:
        run = self.runs[0]
        mean, low, high = self.interval(f"{run.key}_mean")
        return (
            f"<Runs of {self.spec.name}: {len(self.runs)} seeds, {run.measure} {mean:.4f} ({low:.4f} to "
            f"{high:.4f}){_diverged(self)}>"
        )


def _diverged(run: Run | Runs) -> str:
    honest = run.spec.nodes - run.spec.hostile_count
    return f"; {run.diverged} of {honest} honest nodes have diverged" if run.diverged else ""


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)
