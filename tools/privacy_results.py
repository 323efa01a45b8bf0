"""The runs and the tables of docs/results/privacy.md, in two steps.

    python tools/privacy_results.py run --data-dir DATA --out RUNS \
        [--only NAME …] [--seeds 0 1 2] [--threads N]
    python tools/privacy_results.py [RUNS …]

The first trains under every ε, attack and rule (the seeds after the first with the first rule only), then
with more local steps, and lets a curious member guess the examples of one node, beside every
ε. Finished runs stay in RUNS, so that the command goes on where it stopped. The second keeps their small
files in docs/results/privacy/runs.tar.xz and writes the page's tables from what is kept and from nothing
else: without arguments the page stays as it is. A table stands between <!-- NAME --> and <!-- end -->.
"""

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kept_runs import Archive, KeptRun, two_steps
from rpel import simulate
from rpel.experiments import curious
from rpel.spec import load, load_folder

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "results" / "privacy"
MARK = re.compile(r"(<!-- ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
GUESSED = "curious.json"
EPSILONS = (1.0, 3.0, 8.0, None)
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {"attack": "none"}, "alie": {"attack": "alie"}, "foe": {"attack": "foe"},
    "strongest(of=alie)": {"attack": "strongest", "attack_params": {"of": "alie"}},
}  # fmt: skip
RULES = ("nnm+trimmed_mean", "monna", "mean")
VARIANTS: dict[str, dict[str, Any]] = {"3 local steps": {"local_steps": 3}}


@dataclass(frozen=True)
class Study:
    """What is trained, with which δ, and the learning rate of clipped gradients, which are shorter."""

    fields: dict[str, Any]
    delta: float
    clipped_lr: float
    variants: bool = False

    def run(self, epsilon: float | None, attack: str, rule: str, **more: Any) -> dict[str, Any]:
        """The keywords of one run."""
        private: dict[str, Any] = {
            "target_epsilon": epsilon, "target_delta": self.delta, "max_grad_norm": 1.0,
            "lr": self.clipped_lr,
        }  # fmt: skip
        return {
            **self.fields,
            **ATTACKS[attack],
            **({} if epsilon is None else private),
            "rule": rule,
            **more,
        }

    def cells(self, seed: int) -> Iterator[dict[str, Any]]:
        """All runs of a seed, the first rule first."""
        for rule in RULES if seed == 0 else RULES[:1]:
            for attack in ATTACKS:
                for epsilon in EPSILONS:
                    yield self.run(epsilon, attack, rule, seed=seed)
        for more in VARIANTS.values() if self.variants and seed == 0 else ():
            for attack in ("none", "alie"):
                yield self.run(8.0, attack, RULES[0], seed=seed, **more)


STUDIES = {
    "mnist": Study(
        {
            "dataset": "mnist", "model": "mnist", "nodes": 30, "byzantine": 4, "rounds": 60, "alpha": 10.0,
            "lr": 0.5, "momentum": 0.9, "batch_size": 50, "eval_every": 20, "eval_size": 250,
            "name": "privacy-mnist",
        },
        1e-5,
        clipped_lr=1.0,
        variants=True,
    ),
    "heart": Study(
        {
            **load("heart-4").model_dump(exclude_unset=True),
            "batch_size": 8, "rounds": 100, "name": "privacy-heart",
        },
        1e-3,
        clipped_lr=1.0,
    ),
}  # fmt: skip
"""By the name of their tables."""


# --- the runs -----------------------------------------------------------------------------------------------


def train(names: Sequence[str], seeds: Sequence[int], given: dict[str, Any]) -> None:
    """Every run that is not finished yet; what is guessed comes after the first seed."""
    for seed in seeds:
        for name in names:
            for fields in STUDIES[name].cells(seed):
                run = simulate(**{**fields, **given, "reuse": True})
                print(
                    name,
                    *(fields.get(key) for key in ("rule", "attack", "target_epsilon", "seed")),
                    run,
                    flush=True,
                )
            if seed == 0:
                for epsilon in EPSILONS:
                    run = simulate(
                        **{**STUDIES[name].run(epsilon, "none", RULES[0], seed=0), **given, "reuse": True}
                    )
                    guess(Path(run.path))


def guess(folder: Path) -> None:
    """What a curious member finds out about the examples of the first honest node, beside the run's files."""
    file = folder / GUESSED
    if not file.exists():
        findings = curious.attack(load_folder(folder), canaries=100, points=4)
        file.write_text(json.dumps(findings.to_dict()), "utf-8")


# --- the tables ---------------------------------------------------------------------------------------------


def label(epsilon: float | None) -> str:
    return "∞" if epsilon is None else f"{epsilon:g}"


def shown(values: Sequence[float]) -> str:
    """The mean, and half of the range over the seeds.

    >>> shown([0.5, 0.7]), shown([0.25]), shown([])
    ('.600\\xa0±\\xa0.100', '.250', '–')
    """
    if not values:
        return "–"
    numbers = [statistics.fmean(values)] + ([(max(values) - min(values)) / 2] if len(values) > 1 else [])
    return "\u00a0±\u00a0".join(f"{number:.3f}".removeprefix("0") for number in numbers)


def rows_of(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def matches(run: KeptRun, fields: dict[str, Any]) -> bool:
    """Whether a kept run is that of these keywords, whatever its seed."""
    asked = {"target_epsilon": None, "attack_params": None, "local_steps": 1} | fields
    keys = ("name", "rule", "attack", "attack_params", "target_epsilon", "local_steps", "rounds")
    usual = {"local_steps": 1}
    return all((run.spec.get(key, usual.get(key)) or None) == (asked.get(key) or None) for key in keys)


def accuracy(study: Study, runs: Sequence[KeptRun], variants: bool) -> str:
    """The worst node's accuracy: a line for each rule and attack, a column for each ε."""
    lines = []
    for rule in RULES:
        for attack in ATTACKS:
            every = [
                [r for r in runs if matches(r, study.run(epsilon, attack, rule))] for epsilon in EPSILONS
            ]
            worst = [shown([r.rows[-1]["accuracy_worst"] for r in accuracy_text]) for accuracy_text in every]
            if any(every):
                lines.append([rule, attack, *worst])
    for name, more in VARIANTS.items() if variants else ():
        for attack in ("none", "alie"):
            accuracy_text = [r for r in runs if matches(r, study.run(8.0, attack, RULES[0], **more))]
            if accuracy_text:
                ended = shown([r.rows[-1]["accuracy_worst"] for r in accuracy_text])
                lines.append([f"{RULES[0]}, {name}", attack, "–", "–", ended, "–"])
    return rows_of(["rule", "attack", *(f"ε = {label(epsilon)}" for epsilon in EPSILONS)], lines)


def guesses(study: Study, runs: Sequence[KeptRun], archive: Archive) -> str:
    """What the curious member finds out: a line for each ε."""
    lines = []
    for epsilon in EPSILONS:
        studied = [
            r for r in runs if matches(r, study.run(epsilon, "none", RULES[0])) and r.spec["seed"] == 0
        ]
        files = [
            archive.files[f"{r.name}/{GUESSED}"] for r in studied if f"{r.name}/{GUESSED}" in archive.files
        ]
        if not files:
            continue
        curves, proof = json.loads(files[0])["curves"], studied[0].proof["privacy"] or {}
        every, drawn = curves[curious.EVERY][-1], curves[curious.DRAWN][-1]
        noise = proof.get("noise_multiplier", 0.0)
        numbers = [every["auc"], every["tpr"], drawn["auc"], drawn["tpr"], every["canary_auc"]]
        lines.append(
            [label(epsilon), f"{noise:.3g}", *(f"{n:.3f}" for n in numbers), f"{every['epsilon_low']:.2f}"]
        )
    head = [
        "ε",
        "noise multiplier",
        "AUC, sees every round",
        "TPR at 1 %",
        "AUC, by draws",
        "TPR at 1 %",
        "canaries, AUC",
    ]
    return rows_of([*head, "ε at least"], lines)


def write(folders: Sequence[Path]) -> None:
    """Keep the runs below these folders, and put the tables into the page."""
    archive = Archive(KEPT / "runs.tar.xz")
    for folder in folders:
        archive.take(folder)
        for file in folder.rglob(GUESSED):
            archive.files[f"{file.parent.name}/{GUESSED}"] = file.read_bytes()
    archive.write()
    runs, tables = archive.runs(), {}
    for name, study in STUDIES.items():
        tables[name] = accuracy(study, runs, study.variants)
        tables[f"{name}-guessed"] = guesses(study, runs, archive)
    page = DOCS / "results" / "privacy.md"
    text = MARK.sub(lambda m: f"{m[1]}{tables[m[2]]}\n{m[3]}", page.read_text("utf-8"))
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    two_steps(__doc__ or "", STUDIES, train, write)
