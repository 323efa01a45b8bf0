"""Hugging Face's Trainer in a network of real peers: one optimiser step is one round.

The Trainer calls ``on_step_end`` once for each optimiser step, after gradient accumulation, and before it logs,
evaluates or saves; that is where the step is published, the others' models are pulled and the robust aggregate is
loaded back, so that the Trainer evaluates and saves the aggregate.

    with rpel.Peer("peer.toml") as peer:
        trainer = Trainer(model=model, args=TrainingArguments(..., max_steps=200), train_dataset=mine,
                          callbacks=[peer_callback(peer)])
        trainer.train()

``max_steps`` should be at least the network's rounds: training then ends with the last round. On the wire weights have
the precision of the network's initial model. `transformers` is no dependency of rpel: it is imported when the callback
is made. The founder writes the initial model with ``safetensors.torch.save_file(dict(model.named_parameters()), path)``
and gives it to ``rpel network new --model``.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import rpel


class StepIsRound:
    """The callback's hooks; they need nothing of transformers, only its order of calls."""

    def __init__(self, peer: rpel.Peer) -> None:
        self.peer = peer
        self.rounds: Iterator[Any] = iter(())
        self.round: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Load the network's model; after a restart, optimiser and schedule too."""
        kept = {name: given[name] for name in ("optimizer", "lr_scheduler") if given.get(name) is not None}
        self.rounds = self.peer.rounds(given["model"], state=kept)
        self._advance(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Publish the step, pull, aggregate, load back, and wait for the next round."""
        self._advance(control)

    def _advance(self, control: Any) -> None:
        self.round = next(self.rounds, None)
        if self.round is None:  # the last round has ended, and the model holds its aggregate
            control.should_training_stop = True


def peer_callback(peer: rpel.Peer) -> Any:
    """A callback for ``Trainer(callbacks=[…])``."""
    transformers = import_module("transformers")
    return type("PeerCallback", (StepIsRound, transformers.TrainerCallback), {})(peer)
