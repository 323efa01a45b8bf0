"""Real trainers among real peers: transformers with LoRA adapters, and Lightning. Run by `make test-all`."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from rpel.peer.core.wire import Layout
from rpel.types import Models
from support.paths import ROOT
from support.thread_network import NetworkFiles, found
from support.waiting import PATIENCE

pytestmark = pytest.mark.full


def flat(named: dict[str, Any]) -> Models:
    """The tensors end to end, in the order of their names in the layout."""
    return np.concatenate([value.numpy().ravel() for value in named.values()])


READY = "import {modules}; print('ready', flush=True); import sys; sys.argv = ['', input()]; "
"""What a process does before its round 1 can be named: its imports take long on a busy machine."""


def finished(modules: str, program: str, make: Callable[[], NetworkFiles]) -> list[str]:
    """Three processes, one for each peer, whose network is founded when all of them are ready;
    what they printed."""
    command = [sys.executable, "-c", READY.format(modules=modules) + program]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    files = make()
    for i, process in enumerate(processes):  # all of them before the first is waited for
        assert process.stdin is not None
        print(files.folder / f"peer-{i}" / "peer.toml", file=process.stdin, flush=True)
    # periods are stretched on a busy machine
    patience = files.membership.rounds * files.membership.period + PATIENCE
    ends = [process.communicate(timeout=patience) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], [error[-2000:] for _, error in ends]
    return [out for out, _ in ends]


def test_peers_exchange_lora_adapters_alone_and_learn(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    example, initial = ROOT / "examples" / "peer_lora.py", tmp_path / "adapters.safetensors"
    subprocess.run([sys.executable, str(example), "--initial", str(initial)], check=True)
    adapters = load_file(initial)
    assert adapters
    assert all("lora" in name for name in adapters)
    layout = Layout.of(adapters.items())
    ends = finished(
        "transformers, peft, rpel.peer.api",
        f"import runpy; runpy.run_path({str(example)!r}, run_name='__main__')",
        lambda: found(tmp_path, 3, rounds=12, period=6.0, soon=8.0, layout=layout, initial=flat(adapters)),
    )
    losses = [re.findall(r"loss ([\d.]+) before, ([\d.]+) after", out)[-1] for out in ends]
    assert all(float(after) < float(before) - 0.15 for before, after in losses), losses


LIGHTNING = """
import sys, torch, rpel
import lightning.pytorch as pl
from rpel.integrations.trainers import lightning_callback

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return (self.layer(batch[0]) - batch[1]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
x = torch.randn(512, 2)
data = torch.utils.data.TensorDataset(x, x @ torch.tensor([[1.0], [-2.0]]) + 0.5)
module = Line()
with rpel.Peer(sys.argv[1]) as peer:
    trainer = pl.Trainer(max_steps=1000, callbacks=[lightning_callback(peer)], logger=False,
                         accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=32))
rounds = sum(peer.summary()["outcomes"].values())
print("steps", trainer.global_step, "rounds", rounds, "weight", *module.layer.weight[0].tolist())
"""


def test_each_optimiser_step_of_lightning_is_a_round(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    torch = pytest.importorskip("torch")
    layer = {"layer.weight": torch.zeros(1, 2), "layer.bias": torch.zeros(1)}
    layout = Layout.of(layer.items())
    printed = finished(
        "lightning.pytorch, rpel.peer.api",
        f"exec({LIGHTNING!r})",
        lambda: found(tmp_path, 3, rounds=15, period=3.0, soon=8.0, layout=layout, initial=flat(layer)),
    )
    ends = [re.findall(r"steps (\d+) rounds (\d+) weight (\S+) (\S+)", out)[-1] for out in printed]
    # a busy machine may miss a few
    assert all(8 <= int(steps) == int(rounds) <= 15 for steps, rounds, *_ in ends)
    assert all(abs(float(a) - 1) < 0.5 and abs(float(b) + 2) < 0.5 for *_, a, b in ends)
