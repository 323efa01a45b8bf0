"""`rpel peer run`: a built-in task or the user's ``module:task``, from start to the last round."""

from pathlib import Path
from types import FrameType
from typing import Any

from rpel.config import peer as config
from rpel.peer.learner import TaskLearner, task_learner
from rpel.peer.node import Node, Progress
from rpel.processes import on_sigterm


class Terminated(KeyboardInterrupt):
    """SIGTERM came: somebody asked this peer to leave."""


def run(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Run the peer of this peer.toml; returns its summary. Ctrl-C and SIGTERM raise, with everything on disk."""
    node = Node(config.load(path), progress=progress)
    learner = learner_of(node)
    with on_sigterm(_leave), node:
        for _ in node.live(learner):
            pass
        return node.summary()


def learner_of(node: Node) -> TaskLearner:
    """The learner of the task that the node's peer.toml names."""
    m = node.standing.membership
    return task_learner(
        node.config.task,
        index=node.standing.me,
        nodes=m.nodes,
        run=m.run,
        hyperparameters=m.hyperparameters,
        local_steps=m.local_steps,
        signature=node.signature,
        data=node.config.data,
    )


def _leave(number: int, frame: FrameType | None) -> None:
    raise Terminated("terminated")
