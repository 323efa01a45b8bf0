"""A plain PyTorch training loop that takes part in a network of real peers: your model, your optimiser,
your data.

Once, by the founder: write the model that all members begin with, and found the network with it.

    python examples/peer_pytorch.py --initial start.safetensors
    rpel network new --peers 5 --byzantine 1 --rounds 40 --period 2 --epoch +300 --task peer_pytorch:loop \
        --model start.safetensors

Then each member (see `rpel peer init --help`), when all entries are in members.toml:

    rpel peer init --id clinic-1 --url https://127.0.0.1:7001 --metrics-listen 127.0.0.1:9001 --dir clinic-1 \
        --task peer_pytorch:loop
    python examples/peer_pytorch.py clinic-1/peer.toml

A member that is stopped, by Ctrl-C or by a power cut, goes on where it was when it is started again.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import rpel
from rpel.data import load
from rpel.optim import LocalMomentum


def make_model() -> nn.Module:
    """Any module will do; what travels are its parameters, in float32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def my_batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Stands for your own data, which never leaves this machine: here 500 of the sample's digits,
    drawn by chance."""
    sample = load("mnist-sample")
    mine = torch.randperm(len(sample.train_y), generator=torch.Generator().manual_seed(torch.seed()))[:500]
    x, y = torch.from_numpy(sample.normalised(sample.train_x[mine])), torch.from_numpy(sample.train_y[mine])
    while True:
        some = torch.randint(len(y), (size,))
        yield x[some], y[some]


def accuracy(model: nn.Module) -> float:
    """On the sample's test digits."""
    sample = load("mnist-sample")
    with torch.no_grad():
        found = model(torch.from_numpy(sample.normalised(sample.test_x))).argmax(dim=1)
    return float((found == torch.from_numpy(sample.test_y)).float().mean())


def train(path: Path) -> float:
    """Take part from the current round to the last; the accuracy of the model at the end."""
    model = make_model()
    optimizer = LocalMomentum(model.parameters(), lr=0.2, momentum=0.9)  # or any other torch optimiser
    batches = my_batches(25)
    with rpel.Peer(path) as peer:
        for round in peer.rounds(model, state={"optimizer": optimizer}):
            inputs, labels = next(batches)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            before = (
                f"{round.outcome}, {round.received} of {round.asked} answered"
                if round.outcome
                else "the first here"
            )
            print(f"round {round.number}: loss {loss.item():.3f} (the round before: {before})", flush=True)
    return accuracy(model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="this member's peer.toml")
    parser.add_argument("--initial", type=Path, help="write the initial model to this file and leave")
    given = parser.parse_args()
    if given.initial is not None:
        save_file(dict(make_model().named_parameters()), given.initial)
    elif given.config is not None:
        print(f"accuracy {train(given.config):.3f}")
    else:
        parser.error("give a peer.toml, or --initial FILE")


if __name__ == "__main__":
    main()
