"""A round of rpel against the best that an expert writes in an afternoon with JAX and with PyTorch.

Run: python benchmarks/rivals.py [WORK …] [--rounds N] [--data-dir DIR] [--json]. JAX lives in an environment
of its own, `.venv-rivals`, which is made when it is not there. All get the same initial model, the same
batches and the same pulls; the rivals' batches are ready normalised, and rpel draws and normalises within its
round. First, equal work is checked: after one round, all must have the models of the same round computed in
float64, but for rounding and for the neighbours that rounding exchanges, and its accuracy (so dropout is left
out of the CIFAR-10 network). Later rounds say less: two trainings that differ by a rounding drift apart.
Rounds are taken in turns, one at a time, and the best of each counts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine  # noqa: F401  (an empty cache of kernels)
import rival_torch
from contestant import race, read
from rpel.data import Dataset, dirichlet, from_arrays, iid, load, virtual
from rpel.models import model
from rpel.simulation.engine import Engine
from rpel.simulation.methods import resolve
from rpel.spec import Spec
from rpel.tasks import Classification

HERE = Path(__file__).resolve().parent
JAX = ("jax==0.10.0", "jaxlib==0.10.0")
WORKS: dict[str, dict[str, Any]] = {
    "mnist-100": {"nodes": 100, "byzantine": 10, "pull": 15, "b_hat": 7, "batch_size": 25},
    "mnist-30": {"nodes": 30, "byzantine": 6, "pull": 15, "b_hat": 6, "batch_size": 25},
    "n=10,000 d=650": {"nodes": 10_000, "byzantine": 1_000, "pull": 30, "b_hat": 13, "batch_size": 25},
    "cifar10-20": {"nodes": 20, "byzantine": 3, "pull": 6, "b_hat": 3, "batch_size": 50},
}
OFF = 1e-3  # of what a node has learnt, root mean square; half of the nodes must be nearer
NORMALISED = {"cifar10-20": 2e-2}  # the same where batches are normalised: PyTorch's float32 is off by 8e-3
SWAPPED = 0.5  # the same for every node: whose mixing took another neighbour is off by a part of the spread
RIVALS = {"cifar10-20": ("torch",)}  # everywhere else both
ROUNDS = {"cifar10-20": 3}  # everywhere else 6
SCORED = 4, 250  # nodes and test examples: CIFAR-10's network takes three milliseconds of a core for each


def ours(name: str, data_dir: str | None) -> Engine:
    """The simulation of a work, as rpel runs it."""
    run = resolve(Spec(**WORKS[name], rounds=200, attack="alie", lr=0.5, momentum=0.9, weight_decay=1e-4))
    spec = run.spec
    h, batch = spec.nodes - spec.hostile_count, spec.batch_size
    if name == "cifar10-20":
        data = load("cifar10", data_dir) if data_dir else _like_cifar()
        shards: Any = iid(data.train_y, h, batch, 0)
    elif spec.nodes > 1000:
        data = load("mnist-sample-8x8")
        shards = virtual(data.train_y, spec.nodes, float("inf"), 0)
    else:
        data = load("mnist", data_dir) if data_dir else load()
        shards = dirichlet(data.train_y, h, 1.0, batch, seed=0)
    network = {"cifar10-20": "cifar10", "n=10,000 d=650": "linear"}.get(name, "mnist")
    return Engine(
        run, Classification(data, shards, model(network, data.shape, dropout=0.0), batch_size=batch, seed=0)
    )


def _like_cifar() -> Dataset:
    """Random images of CIFAR-10's shape, each class with a colour of its own."""
    coins, y = np.random.default_rng(0), np.arange(2000) % 10
    x = coins.integers(0, 128, (2000, 3, 32, 32)) + coins.integers(0, 128, (10, 3, 1, 1))[y]
    return from_arrays(
        (x.astype(np.uint8), y), (x[:500].astype(np.uint8), y[:500]), mean=(0.5,) * 3, std=(0.25,) * 3
    )


def write(run: Engine, name: str, rounds: int, folder: Path) -> None:
    """The work as arrays: see `contestant.Work`."""
    task: Any = run.task
    examples, inputs, labels, peers = task.examples, [], [], []
    row = np.full(run.spec.nodes, -1)
    row[run.roster.honest_ids(1)] = run.rows
    for t in range(1, rounds + 1):
        drawn = examples.indices(run.rows, t, 0)
        inputs.append(examples.train(drawn, examples.coins(run.rows, t, 0), torch.float32).numpy())
        labels.append(examples.labels(drawn, run.rows).astype(np.int32))
        peers.append(row[run.topology.sample(t, run.roster.honest_ids(1))].astype(np.int32))
    arrays = {"initial": run.task.initial(), "inputs": inputs, "labels": labels, "peers": peers}
    for key, value in arrays.items():
        np.save(folder / f"{key}.npy", np.asarray(value))
    network = {"cifar10-20": "cifar10", "n=10,000 d=650": "linear"}.get(name, "mnist")
    about = {"network": network, "f": run.spec.b_hat, "lr": 0.5}
    (folder / "work.json").write_text(json.dumps(about))


class Ours:
    """rpel as a contestant: it draws the same batches and pulls itself."""

    def __init__(self, name: str, data_dir: str | None) -> None:
        self.run = ours(name, data_dir)

    def step(self, t: int) -> None:
        assert self.run.round == t
        self.run.step()

    def models(self) -> Any:
        return self.run.state.x


class Contestant:
    """A process that takes a round when told."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
        )
        self.best, self.memory = {"wall": float("inf"), "cpu": float("inf")}, 0.0

    def tell(self, line: str) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer

    def round(self, t: int, counts: bool) -> None:
        taken = self.tell(f"round {t}")
        if counts:
            self.best = {key: min(self.best[key], taken[key]) for key in self.best}

    def models(self, file: Path) -> Any:
        self.memory = self.tell(f"models {file}")["megabytes"]
        return np.load(file)

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def jax_python() -> str:
    """The interpreter of the rivals' environment, made on first use."""
    position = HERE.parent / ".venv-rivals"
    python = position / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", position], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *JAX], check=True)
    return str(python)


def commands(name: str, folder: Path, data_dir: str | None) -> dict[str, list[str]]:
    """How each contestant is started, ours first."""
    data = ["--data-dir", data_dir] if data_dir else []
    actual = {"rpel": [sys.executable, str(HERE / "rivals.py"), str(folder), name, "--child", *data]}
    for rival in RIVALS.get(name, ("jax", "torch")):
        python = jax_python() if rival == "jax" else sys.executable
        actual[rival] = [python, str(HERE / f"rival_{rival}.py"), str(folder)]
    return actual


def compare(name: str, rounds: int, data_dir: str | None) -> list[dict[str, Any]]:
    """Equal work checked after the first round, which compiles, then rounds in turns; a line for each
    rival."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, run = Path(temporary), ours(name, data_dir)
        write(run, name, rounds, folder)
        exact = reference(folder)
        racers = {who: Contestant(command) for who, command in commands(name, folder, data_dir).items()}
        try:
            for t in range(rounds):
                for who, racer in racers.items():
                    racer.round(t, counts=t > 0)
                    if t == 0:
                        check(run, exact, who, racer.models(folder / "models.npy"), NORMALISED.get(name, OFF))
            for racer in racers.values():
                racer.models(folder / "models.npy")  # and what memory it has needed until now
        finally:
            for racer in racers.values():
                racer.end()
    return [line(name, who, racers) for who in racers if who != "rpel"]


def reference(folder: Path) -> Any:
    """The models after the first round of a work, by PyTorch's autograd in float64."""
    exact = rival_torch.Rival(read(folder), torch.float64)
    exact.step(0)
    return exact.models().numpy()


def check(run: Engine, exact: Any, who: str, models: Any, most: float) -> None:
    """ValueError unless a contestant has learnt what the reference has.

    A Gram matrix in float32 takes another neighbour here and there; so do rows of float32 that are equally
    near but for a rounding.
    """
    task: Any = run.task
    initial = task.initial()
    length = np.sqrt(np.square(exact - initial).mean(axis=1))
    off = np.sqrt(np.square(models - exact).mean(axis=1)) / length
    nodes, examples = SCORED
    some, local = np.arange(min(examples, task.examples.dataset.test_size)), task.local_state(nodes)
    score, wanted = (
        float(task.evaluate(x[:nodes].astype(np.float32), local, some)[0].mean()) for x in (models, exact)
    )
    print(
        f"  {who:6} off float64's models by {np.median(off):.1e} of what was learnt (half of the nodes), "
        f"{off.max():.1e} (all); accuracy {score:.4f}, theirs {wanted:.4f}",
        file=sys.stderr,
    )
    if not (np.median(off) < most and off.max() < SWAPPED and abs(score - wanted) < 0.02):
        raise ValueError(f"{who} computes something else than the round in float64")


def line(name: str, who: str, racers: dict[str, Contestant]) -> dict[str, Any]:
    rival, mine = racers[who], racers["rpel"]
    return {
        "work": f"{name} round", "rival": who, "rival_seconds": rival.best["wall"],
        "seconds": mine.best["wall"], "ratio": rival.best["wall"] / mine.best["wall"],
        "rival_cpu": rival.best["cpu"], "cpu": mine.best["cpu"],
        "cpu_ratio": rival.best["cpu"] / mine.best["cpu"], "rival_megabytes": rival.memory,
        "megabytes": mine.memory,
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(WORKS)}; all if left out")
    options.add_argument(
        "--rounds", type=int, help="taken by each, the first of which is not counted [6; CIFAR-10 3]"
    )
    options.add_argument(
        "--data-dir", help="with MNIST and CIFAR-10; without it the sample and random images"
    )
    options.add_argument("--json", action="store_true", help="a list of objects instead of lines")
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child:
        race(lambda _: Ours(given.works[1], given.data_dir))
        return
    values = []
    for name in given.works or WORKS:
        lines = compare(name, given.rounds or ROUNDS.get(name, 6), given.data_dir)
        values += lines
        for one in [] if given.json else lines:
            print(
                f"{one['work']:24} {one['rival']:6} {one['rival_seconds']:7.3f} s ({one['rival_cpu']:.2f} "
                f"CPU-s, {one['rival_megabytes']:,.0f} MB)   rpel {one['seconds']:7.3f} s ({one['cpu']:.2f}, "
                f"{one['megabytes']:,.0f} MB)   {one['ratio']:5.2f} x   by CPU-s {one['cpu_ratio']:.2f} x"
            )
    if given.json:
        print(json.dumps(values))


if __name__ == "__main__":
    main()
