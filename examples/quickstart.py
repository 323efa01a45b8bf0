"""Twenty hospitals, four of them traitors, no server: robust learning beside plain averaging, under the same attack.

Runs on the MNIST sample inside the package; `make demo` runs it. The two runs are kept in demo/, so a second call only
shows them again.
"""

import sys
from pathlib import Path
from typing import Any

import rpel
from rpel.plots import COLOURS, canvas, save

SETTING: dict[str, Any] = {
    "nodes": 20,
    "byzantine": 4,
    "pull": 12,
    "rounds": 60,
    "attack": "foe",
    "eval_every": 5,
    "eval_size": 500,
}
OUT = Path("demo")


def main() -> None:
    plan = rpel.plan(nodes=20, byzantine=4, rounds=60, pull=12)
    print(
        f"The plan: each node pulls {plan.pull} of 19 peers and survives {plan.b_hat} hostile answers; "
        f"that holds with probability {plan.probability:.6f}."
    )
    rules = {"RPEL (NNM + trimmed mean)": None, "plain averaging": "mean"}
    runs = {name: rpel.simulate(**SETTING, rule=rule, out=OUT, progress=say(name)) for name, rule in rules.items()}
    print(f"\nunder the attack '{SETTING['attack']}'        mean accuracy   worst node")
    for name, run in runs.items():
        print(f"  {name:27} {run.accuracy_mean:13.3f} {run.accuracy_worst:12.3f}")
    draw(runs)


def say(name: str) -> Any:
    """A line on stderr every ten rounds."""

    def progress(tick: Any) -> None:
        if tick.round % 10 == 0:
            accuracy = f"accuracy {tick.accuracy_mean:.3f}"
            print(f"  {name}: round {tick.round} of {tick.rounds}, {accuracy}", file=sys.stderr, flush=True)

    return progress


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
