"""A worker that runs a list of specifications in one group, for tests: python workers.py CASES.json OUT SIZE.

Beside the run folders it leaves received-RANK.json: the bytes of arrays that it was sent in each run.
"""

import json
import sys
from pathlib import Path

from rpel.runs.folder import RunFolder
from rpel.simulation.inputs import Inputs, gather
from rpel.simulation.loop import train
from rpel.simulation.methods import resolve
from rpel.simulation.workers import END, SharedEngine, joined, pinned, serve
from rpel.spec import Request


def main(cases: Path, out: Path, size: int) -> None:
    received = []
    with pinned(1), joined(Request(workers=size)) as group:
        for number, fields in enumerate(json.loads(cases.read_text())):
            spec, before = Request(**fields), group.received
            if group.rank:
                assert serve(group, spec) == 0
            else:
                drive(SharedEngine(group), spec, RunFolder(out / str(number)))
            received.append(group.received - before)
    (out / f"received-{group.rank}.json").write_text(json.dumps(received))


def drive(shared: SharedEngine, spec: Request, folder: RunFolder) -> None:
    run = resolve(spec)
    inputs = gather(run, Inputs())
    with folder.locked(), shared.built(run, inputs) as engine:
        train(run, inputs, engine, folder)
    shared.say(END, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
