"""Callbacks that copy a run's metrics to a tracker as it goes: MLflow, Weights & Biases.

    rpel.simulate("mlp", callbacks=[MLflow(experiment="ward")])
    rpel.simulate("mlp", callbacks=[WandB(project="ward")])

What is tracked: the fields of the specification as parameters, and every column that has a number, by round.
metrics.jsonl stays what counts; each library is imported when its callback is made,
and nothing else here needs it.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rpel.algorithm import State
from rpel.runs.columns import Row
from rpel.simulation.loop import Tracker
from rpel.spec import Request


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is not installed: pip install {name}") from error


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The columns of a row that have a number, the round aside."""
    return {key: float(value) for key, value in row.items() if key != "round" and value is not None}


class MLflow(Tracker):
    """A run of MLflow for each run of rpel; where it is kept is MLflow's to say (MLFLOW_TRACKING_URI).

    experiment: its name; MLflow's default if left out. options: of ``mlflow.start_run``, such as tags.
    """

    def __init__(self, experiment: str | None = None, **options: Any) -> None:
        self.mlflow, self.experiment, self.options = _library("mlflow"), experiment, options

    def begin(self, spec: Request, path: Path | None, rows: Sequence[Row]) -> None:
        """Open a run with the specification as its parameters."""
        if self.experiment is not None:
            self.mlflow.set_experiment(self.experiment)
        self.mlflow.start_run(run_name=f"{spec.name}, seed {spec.seed}", **self.options)
        self.mlflow.log_params(spec.model_dump(mode="json"))
        for row in rows:
            self(None, row)

    def __call__(self, state: State | None, row: Row) -> None:
        """Log the columns of one round."""
        self.mlflow.log_metrics(_numbers(row), step=row["round"])

    def close(self) -> None:
        """Close the run."""
        self.mlflow.end_run()


class WandB(Tracker):
    """A run of Weights & Biases for each run of rpel; ``WANDB_MODE=offline`` sends nothing.

    options: of ``wandb.init``, such as project, group or mode.
    """

    def __init__(self, **options: Any) -> None:
        self.wandb, self.options = _library("wandb"), options
        self.run: Any = None

    def begin(self, spec: Request, path: Path | None, rows: Sequence[Row]) -> None:
        """Open a run with the specification as its configuration."""
        self.run = self.wandb.init(config=spec.model_dump(mode="json"), **{"name": spec.name, **self.options})
        for row in rows:
            self(None, row)

    def __call__(self, state: State | None, row: Row) -> None:
        """Log the columns of one round."""
        self.run.log(_numbers(row), step=row["round"])

    def close(self) -> None:
        """Close the run."""
        self.run.finish()
