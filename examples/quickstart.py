"""Twenty hospitals, four of them traitors, no server: robust learning beside plain averaging, under the same attack.

Runs on the MNIST sample inside the package; `make demo` runs it. The two runs are kept in demo/, so a second call only
shows them again.
"""

from pathlib import Path
from typing import Any

import rpel
from rpel.plots import COLOURS, canvas, save

SETTING: dict[str, Any] = {
    "nodes": 20,
    "byzantine": 4,
    "pull": 12,
    "rounds": 60,
    "dataset": "mnist-sample",
    "attack": "foe",
}
OUT = Path("demo")


def main() -> None:
    plan = rpel.plan(nodes=20, byzantine=4, rounds=60, pull=12)
    print(
        f"The plan: each node pulls {plan.pull} of 19 peers and survives {plan.b_hat} hostile answers; "
        f"that holds with probability {plan.probability:.6f}."
    )
    runs = {
        "RPEL (NNM + trimmed mean)": rpel.simulate(**SETTING, out=OUT),
        "plain averaging": rpel.simulate(**SETTING, rule="mean", out=OUT),
    }
    print(f"\nunder the attack '{SETTING['attack']}'        mean accuracy   worst node")
    for name, run in runs.items():
        print(f"  {name:27} {run.accuracy_mean:13.3f} {run.accuracy_worst:12.3f}")
    draw(runs)


def draw(runs: dict[str, rpel.Result]) -> None:
    """Mean accuracy as a line, the worst node dashed."""
    figure, axes = canvas()
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
        rows = [row for row in run.history.rows() if row["accuracy_mean"] is not None]
        rounds = [row["round"] for row in rows]
        axes.plot(rounds, [row["accuracy_mean"] for row in rows], color=colour, label=name)
        axes.plot(rounds, [row["accuracy_worst"] for row in rows], color=colour, linestyle="--", linewidth=1)
    axes.set(xlabel="round", ylabel="test accuracy (dashed: worst node)", ylim=(0, 1))
    axes.legend(frameon=False)
    save(figure, OUT / "accuracy.svg")
    print(f"\nThe picture: {OUT / 'accuracy.svg'}")


if __name__ == "__main__":
    main()
