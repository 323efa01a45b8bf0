"""A round of every method at n = 30 with the MNIST network, against a round of RPEL, in one run."""

import machine
from rpel.data import dirichlet, load
from rpel.models import model
from rpel.simulation.engine import Simulation
from rpel.simulation.methods import METHODS, resolve
from rpel.spec import Spec
from rpel.tasks import Classification


def main() -> None:
    data = load()
    shards = dirichlet(data.train_y, 24, 1.0, 25, seed=0)
    task = Classification(data, shards, lambda: model("mnist"), batch_size=25, seed=0)
    seconds = {}
    for name, method in METHODS.items():
        pull = 29 if method.peers == "everybody" else 15
        spec = Spec(nodes=30, byzantine=6, pull=pull, b_hat=6, rounds=200, method=name, attack="alie")
        run = Simulation(resolve(spec), task)
        run.step()
        seconds[name] = machine.best(run.step, 15)
        print(
            f"{name:22} {seconds[name] * 1e3:7.1f} ms a round   {seconds[name] / seconds['rpel']:5.2f} of "
            "RPEL's",
            flush=True,
        )


if __name__ == "__main__":
    main()
