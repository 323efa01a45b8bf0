"""All numbers as CSV: a line for each round of each run, with the fields that define the run in front."""

from collections.abc import Sequence

from rpel.config.spec import Spec
from rpel.report.collect import Run
from rpel.simulation.result import Table
from rpel.text import value_text

_PLACES = ("data_dir", "out", "seeds", "checkpoint_every", "device", "threads")


def csv(runs: Sequence[Run]) -> str:
    """The lines of all runs; what a run did not evaluate is empty.

    >>> csv([])
    '\\n'
    """
    fields = [key for key in Spec.model_fields if key not in _PLACES]
    lines = []
    for run in runs:
        known = {"run": run.folder} | {key: value_text(getattr(run.spec, key)) for key in fields}
        known |= {"held": value_text(run.proof.held)}
        lines += [known | row for row in run.rows]
    return Table(lines).to_csv()
