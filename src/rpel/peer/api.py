"""A peer in the user's own training loop, and `rpel peer run`: a task's loop from start to the last round."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from torch import nn

from rpel.peer.config.settings import Config
from rpel.peer.core.wire import Layout
from rpel.peer.learn.learner import TaskLearner, TorchLearner, task_learner
from rpel.peer.learn.privacy import Private, private
from rpel.peer.net.snapshot import Snapshot
from rpel.peer.node.node import Node, Progress, Round
from rpel.processes import Stop
from rpel.tasks import Objective
from rpel.types import Measured

__all__ = ["Peer", "Round", "learner_of", "run"]


class Peer:
    """One member of a network of real peers, as its peer.toml says.

    ::

        with rpel.Peer("peer.toml") as peer:
            for round in peer.rounds(model, state={"optimizer": optimizer}):
                train_step(model, optimizer, next(batches))

    At the top of the loop the model holds the last round's aggregate; at its end what the step made of it is
    published, the other members' models are pulled, and the robust aggregate is loaded back. Leaving the
    loop, or an exception in it, publishes nothing for that round. A script that is started again goes on
    where it stopped. After the last round the loop ends ``linger`` periods later, as members.toml says (2):
    until then late members may need its model.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, config: Config | Mapping[str, Any] | None = None
    ) -> None:
        """Read and check peer.toml and all it names; the network begins with the ``with`` block.

        ``config``: the settings instead of a file, as a :class:`rpel.peer.config.settings.Config` or as a
        table with the keys of peer.toml; relative paths are then relative to the present folder.
        """
        if (path is None) == (config is None):
            raise ValueError("rpel.Peer takes the path of a peer.toml, or config=, and not both")
        if path is not None:
            config = Config.load(os.fspath(path))
        self._node = Node(config if isinstance(config, Config) else Config.of(config or {}))

    def __enter__(self) -> Self:
        self._node.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.__exit__(kind, error, trace)

    def rounds(self, model: nn.Module, state: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Round]:
        """The rounds from here to the last, each to be used for one local step of ``model``.

        state: optimisers, schedules and other objects with a state_dict, by name. They stay on this machine,
        are saved with every round and loaded back after a restart; an optimiser's momentum is emptied when
        the peer has to catch up with the others. A round has ``number``, and of the round before it
        ``outcome`` ("aggregated", "local_only" or "caught_up"; None if there is none), ``asked``,
        ``received`` and ``trim``.
        """
        noise = self._node.config.noise_multiplier, self._node.config.target_epsilon
        if any(value is not None for value in noise):
            raise ValueError(
                "peer.toml asks for noise, which a training loop of your own has to add itself: leave it out "
                "there (docs/privacy.md says how)"
            )
        return self._node.live(TorchLearner(model, state, self._node.layout))

    def measured(self, accuracy: float | None = None, loss: float | None = None) -> None:
        """Report what the loop measured in this round.

        It is shown on the peer's page, in its metrics and in its log.
        """
        self._node.said = Measured(accuracy, loss)

    @property
    def model_path(self) -> Path:
        """The model after the last round: ``model.safetensors`` in the state folder."""
        return self._node.model_path

    def stop(self) -> None:
        """End the loop from another thread; the round that is under way is not finished."""
        self._node.stop()

    def summary(self) -> dict[str, Any]:
        """How the rounds since the start went: outcomes, results of pulls, the last round."""
        return self._node.summary()


def run(config: Config, progress: Progress | None = None, force: bool = False) -> dict[str, Any]:
    """Run the peer with these settings and return its summary.

    On Ctrl-C and SIGTERM it raises, with everything on disk; for SIGTERM the exception is
    :class:`rpel.processes.Terminated`. ``force``: also accept a later membership that comes too late, or an
    older one.

    The summary's ``over`` says whether the last round had ended before the start, ``model`` where the model
    lies, ``model_round`` after which round (None: there is none), and ``left`` the round from which on this
    peer is no longer a member, if it left as agreed.
    """
    node = Node(config, progress=progress, force=force)
    over, last = node.over, None
    if node.ended_here:
        with suppress(ValueError):  # no round ended here
            last = node.export(node.model_path)
    else:
        learner = learner_of(node.config, node.now, node.layout)
        node.service.budget = learner.budget
        with Stop(at_once=True), node:
            for _ in node.live(learner):
                pass
        last = node.last_round
    model = str(node.model_path) if node.model_path.exists() else None
    return node.summary() | {"over": over, "model": model, "model_round": last, "left": node.left}


def learner_of(config: Config, now: Snapshot, layout: Layout) -> TaskLearner:
    """The learner of the task that a peer.toml names."""
    m = now.membership

    def make_private(task: Objective) -> Private | None:
        return private(config, m.hyperparameters, task, now.me, m.rounds, m.local_steps)

    return task_learner(
        config.task, index=now.me, nodes=m.nodes, run=m.run, hyperparameters=m.hyperparameters,
        local_steps=m.local_steps, layout=layout, rounds=m.rounds, data=config.data, folder=config.task_dir,
        make_private=make_private,
    )  # fmt: skip
