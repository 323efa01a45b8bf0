"""Robust learning beside plain averaging, under the same attack: twenty nodes, four of them hostile,
no server.

Runs on the MNIST sample inside the package; `make demo` runs it. The two runs are kept in demo/, so a second
call only shows them again.
"""

import sys
from pathlib import Path
from typing import Any

import rpel
from rpel.studies import plots

SETTING: dict[str, Any] = {
    "nodes": 20,
    "byzantine": 4,
    "pull": 12,
    "rounds": 60,
    "attack": "foe",
    "eval_every": 5,
    "eval_size": 500,
}
ATTACK = "Fall of Empires (foe)"
CHANCE = 0.1  # ten digits
OUT = Path("demo")


def main() -> None:
    plan = rpel.plan(nodes=20, byzantine=4, rounds=60, pull=12)
    print(
        f"Plan: each node pulls {plan.pull} of its 19 peers and tolerates {plan.b_hat} hostile answers.\n"
        f"      No node meets more in any round, with probability {plan.probability:.6f}.\n"
        f"Attack: {ATTACK}.\n"
        "      Hostile nodes answer with minus twice the mean of the honest models.\n"
    )
    rules = {"RPEL (NNM + trimmed mean)": None, "plain averaging": "mean"}
    runs = {
        name: rpel.simulate(**SETTING, rule=rule, out=OUT, progress=show(name))
        for name, rule in rules.items()
    }
    print(f"\n{'test accuracy after 60 rounds':29} mean of nodes   worst node")
    for name, run in runs.items():
        print(f"  {name:27} {run.accuracy_mean:13.3f} {run.accuracy_worst:12.3f}")
    print(f"  {'guessing (ten digits)':27} {CHANCE:13.3f} {CHANCE:12.3f}")
    draw(runs)
    print(f"\nFigure: {OUT / 'accuracy.svg'}")
    print("Next:   source .venv/bin/activate && rpel run quickstart --attack alie")


def show(name: str) -> Any:
    """A line on stderr every ten rounds."""

    def progress(tick: Any) -> None:
        if tick.round % 10 == 0 and tick.evaluated is None:
            accuracy = f"accuracy {tick.accuracy_mean:.3f}"
            print(f"  {name}: round {tick.round} of {tick.rounds}, {accuracy}", file=sys.stderr, flush=True)

    return progress


def draw(runs: dict[str, rpel.Run]) -> None:
    """Mean accuracy as a line from round 0, the worst node dashed; one line where the two are alike."""
    figure, ((axes,),) = plots.canvas(7.0, 3.9)
    for colour, (name, run) in zip(plots.COLOURS, runs.items(), strict=False):
        rounds, accuracy = run.nodes["round"], run.nodes["accuracy"]
        mean, worst = accuracy.mean(axis=1), accuracy.min(axis=1)
        alike = bool((mean - worst).max() < 0.02)
        words = f"{name}, mean" + " and worst node" * alike
        axes.plot(rounds, mean, color=colour, label=words, linewidth=2.2)
        if not alike:
            axes.plot(rounds, worst, color=colour, label=f"{name}, worst node", linestyle="--")
    axes.axhline(CHANCE, color=plots.SOFT, linestyle=":", label="guessing")
    axes.set(xlabel="round", ylabel="test accuracy", xlim=(0, SETTING["rounds"]), ylim=(0, 1))
    axes.set_title(f"20 nodes, 4 hostile, attack: {ATTACK}")
    axes.legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1, 0.45))
    plots.save(figure, OUT / "accuracy.svg")


if __name__ == "__main__":
    main()
