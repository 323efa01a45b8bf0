"""A worker that runs a list of specifications in one group, for tests: python workers.py CASES.json OUT SIZE.

Beside the run folders it leaves received-RANK.json: the bytes of arrays that it was sent in each run.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

from rpel.runs.folder import RunFolder
from rpel.simulation import workers as launch
from rpel.simulation.inputs import Inputs, gather
from rpel.simulation.methods import resolve
from rpel.simulation.run import pinned
from rpel.simulation.runner import Run
from rpel.spec import Spec


def main(cases: Path, out: Path, size: int) -> None:
    received = []
    with pinned(1), launch.joined(Spec(workers=size)) as workers:
        for number, fields in enumerate(json.loads(cases.read_text())):
            spec = resolve(Spec(**fields))
            inputs = gather(spec, Inputs())
            workers.agree(str(number))
            folder, before = RunFolder(out / str(number)), workers.received
            with folder.locked() if workers.rank == 0 else nullcontext():
                Run(spec, inputs, folder, workers=workers).result()
            received.append(workers.received - before)
    (out / f"received-{workers.rank}.json").write_text(json.dumps(received))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
