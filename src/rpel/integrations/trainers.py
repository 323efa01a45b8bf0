"""Callbacks that make each optimiser step of somebody else's trainer one round of a network of real peers.

Hugging Face::

    with rpel.Peer("peer.toml") as peer:
        trainer = Trainer(model=model, args=TrainingArguments(..., max_steps=200), train_dataset=mine,
                          callbacks=[transformers_callback(peer)])
        trainer.train()

Lightning::

    with rpel.Peer("peer.toml") as peer:
        Trainer(max_steps=200, callbacks=[lightning_callback(peer)]).fit(module, mine)

After each optimiser step the model is published, the others' models are pulled, and the robust aggregate is
loaded back before the trainer logs, evaluates or saves. ``max_steps`` should be at least the network's
rounds: training ends with the last one. Only trained parameters travel, so adapters (LoRA) can be exchanged
alone.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from rpel.peer.api import Peer


class Rounds:
    """The rounds of a peer, advanced one by one by the caller.

    ``round`` is None once the last has ended.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.round: Any = None
        self._rounds: Iterator[Any] = iter(())

    def begin(self, model: nn.Module, state: Mapping[str, Any]) -> bool:
        """Load the network's model and, after a restart, the state; False if the run is already over."""
        self._rounds = self.peer.rounds(model, state=state)
        return self.advance()

    def advance(self) -> bool:
        """Publish the step, pull, aggregate, load back, wait for the next round; False after the last."""
        self.round = next(self._rounds, None)
        return self.round is not None


class TransformersRounds(Rounds):
    """The hooks of ``transformers.TrainerCallback``; they need only the order of its calls."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        kept = {name: given[name] for name in ("optimizer", "lr_scheduler") if given.get(name) is not None}
        control.should_training_stop = not self.begin(given["model"], kept)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called once an optimiser step, after gradient accumulation."""
        if not self.advance():
            control.should_training_stop = True


class LightningRounds(Rounds):
    """The hooks of ``lightning.Callback``."""

    _step = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        kept = {f"optimizer{i}": optimizer for i, optimizer in enumerate(trainer.optimizers)}
        self._step = trainer.global_step
        trainer.should_stop = not self.begin(module, kept)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:  # gradients are still being accumulated
            return
        self._step = trainer.global_step
        if not self.advance():
            trainer.should_stop = True


def transformers_callback(peer: Peer) -> Any:
    """A callback for ``transformers.Trainer(callbacks=[…])``; needs the package transformers."""
    base = import_module("transformers").TrainerCallback
    return type("PeerCallback", (TransformersRounds, base), {})(peer)


def lightning_callback(peer: Peer) -> Any:
    """A callback for ``lightning.Trainer(callbacks=[…])``; needs the package lightning."""
    base = import_module("lightning.pytorch").Callback
    return type("PeerCallback", (LightningRounds, base), {})(peer)
