"""A worker that runs a list of specifications in one group, for tests: python workers.py CASES.json OUT."""

import json
import sys
from pathlib import Path

from rpel.config.spec import Spec
from rpel.simulation import distributed
from rpel.simulation.checkpoint import RunFolder
from rpel.simulation.inputs import Objects, gather
from rpel.simulation.methods import settle
from rpel.simulation.run import Run, _follow, pinned


def main(cases: Path, out: Path, size: int) -> None:
    with pinned(1), distributed.joined(Spec(workers=size)) as workers:
        for number, fields in enumerate(json.loads(cases.read_text())):
            spec = settle(Spec(**fields))
            inputs = gather(spec, Objects())
            workers.agree(str(number))
            if workers.rank:
                _follow(spec, inputs, workers)
                continue
            folder = RunFolder(out / str(number))
            with folder.locked():
                Run(spec, inputs, folder, workers=workers).result()
            workers.tell(distributed.Command.END)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
