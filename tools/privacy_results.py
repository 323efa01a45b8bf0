"""Privacy, robustness, accuracy: python tools/privacy_results.py --data-dir DATA --out RUNS [--heart] [--page FILE].

Runs every epsilon under every attack with every rule (three seeds of the first rule, one of the others), and beside
each of the first seed lets a curious member guess the examples of the first honest node. Runs and guesses are kept in
RUNS, so that the command goes on where it stopped; --page writes what there is between <!-- tables --> and <!-- end of
tables -->. --rounds and --few make a smaller table: fewer rounds, one attack and the first rule only.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpel import simulate
from rpel.config.spec import load, load_folder
from rpel.experiments import curious
from rpel.files import write_text

MNIST: dict[str, Any] = {
    "dataset": "mnist", "model": "mnist", "nodes": 30, "byzantine": 4, "rounds": 200, "alpha": 1.0, "lr": 0.5,
    "momentum": 0.9, "batch_size": 50, "eval_every": 50, "eval_size": 250,
}  # fmt: skip
HEART: dict[str, Any] = {**load("heart-4").model_dump(exclude_unset=True), "batch_size": 8, "rounds": 100}
EPSILONS = (1.0, 3.0, 8.0, None)
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {"attack": "none"}, "alie": {"attack": "alie"}, "foe": {"attack": "foe"},
    "strongest(of=alie)": {"attack": "strongest", "attack_params": {"of": "alie"}},
}  # fmt: skip
RULES = ("nnm+trimmed_mean", "monna", "mean")
DELTA = {"mnist": 1e-5, "heart-disease": 1e-3}
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def cells(base: dict[str, Any], few: bool) -> Iterator[tuple[float | None, str, str, int, dict[str, Any]]]:
    """Epsilon, attack, rule, seed and the fields of each run; those without attack come first."""
    for attack in list(ATTACKS)[: 2 if few else None]:
        for rule in RULES[: 1 if few else None]:
            for epsilon in EPSILONS:
                private = {} if epsilon is None else {"target_epsilon": epsilon, "target_delta": DELTA[base["dataset"]]}
                private |= {} if epsilon is None else {"max_grad_norm": 1.0}
                for seed in range(3 if rule == RULES[0] and not few else 1):
                    yield (
                        epsilon,
                        attack,
                        rule,
                        seed,
                        {**base, **ATTACKS[attack], **private, "rule": rule, "seed": seed},
                    )


def guessed(folder: Path) -> dict[str, Any]:
    """What a curious member finds out, kept beside the run's files."""
    file = folder.with_suffix(".curious.json")
    if not file.exists():
        write_text(file, json.dumps(curious.attack(load_folder(folder), canaries=100, points=4).to_dict()))
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def row(epsilon: float | None, attack: str, rule: str, runs: list[Any]) -> str:
    """A line of the table: the worst node's accuracy, of all seeds, and what was guessed of the first."""
    worst = ", ".join(f"{run.accuracy_worst:.3f}" for run in runs)
    last = [guessed(Path(runs[0].path))["curves"][name][-1] for name in (curious.EVERY, curious.DRAWN)]
    shown = " | ".join(f"{one['auc']:.3f}" for one in last)
    said = "∞" if epsilon is None else f"{epsilon:g}"
    return f"| {said} | {attack} | {rule} | {worst} | {shown} | {last[0]['epsilon_low']:.2f} |"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--heart", action="store_true")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--rounds", type=int)
    asked = parser.parse_args()
    base = {**(HEART if asked.heart else MNIST), "data_dir": asked.data_dir}
    base |= {} if asked.rounds is None else {"rounds": asked.rounds}
    lines = [
        "| ε | attack | rule | worst node, each seed | AUC, every round | AUC, by draws | ε at least |",
        "|---|---|---|---|---|---|---|",
    ]
    kept: dict[tuple[float | None, str, str], list[Any]] = {}
    for epsilon, attack, rule, seed, fields in cells(base, asked.few):
        key = epsilon, attack, rule
        kept.setdefault(key, []).append(simulate(**fields, out=asked.out, reuse=True))
        print(f"epsilon {epsilon} {attack} {rule} seed {seed}: worst {kept[key][-1].accuracy_worst:.4f}", flush=True)
    lines += [row(*key, runs) for key, runs in kept.items()]
    table = "\n".join(lines)
    print(table)
    if asked.page is not None:
        text = asked.page.read_text("utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        write_text(asked.page, f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
