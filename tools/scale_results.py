"""The numbers and figures of docs/scale.md: python tools/scale_results.py [FOLDER…] [--measured FILE].

A FOLDER holds finished runs of the presets scale-100k and scale-1m; their small files (spec, metrics,
certificate) are kept in docs/results/scale/runs.tar.xz, for others to check. FILE is what
`benchmarks/scale.py --json` wrote. Figures and tables are then made from what is kept and from nothing else,
so that without arguments the page stays as it is. A table stands between <!-- KIND --> and <!-- end -->.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kept_runs import Archive, KeptRun
from rpel import plots

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "results" / "scale"
MARK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PARTS = ("local step", "draw", "forge", "aggregate", "evaluate")


def label(run: KeptRun) -> str:
    rule = "averaging" if run.spec.get("rule") == "mean" else "rpel"
    return f"{run.spec['nodes']:,} nodes, {rule} under {run.spec['attack'].upper()}"


def curves(runs: list[KeptRun]) -> None:
    """Mean and worst accuracy of all honest nodes against the round; one line where the two are alike."""
    lines: list[tuple[str, str, str, list[int], NDArray[np.float64]]] = []
    for colour, run in zip(plots.COLOURS, runs, strict=False):
        rounds = [row["round"] for row in run.evaluated]
        mean, worst = (
            np.array([row[f"accuracy_{key}"] for row in run.evaluated]) for key in ("mean", "worst")
        )
        if np.abs(mean - worst).max() < 0.04:
            lines.append((f"{label(run)}: mean and worst node", colour, "-", rounds, worst))
        else:
            lines.append((f"{label(run)}: mean", colour, "-", rounds, mean))
            lines.append((f"{label(run)}: worst node", colour, ":", rounds, worst))
    figure, axes = plots.canvas(7.4, 4.2)
    wide = plots.widths([(rounds, values) for *_, rounds, values in lines])
    for width, (words, colour, style, rounds, values) in zip(wide, lines, strict=True):
        axes.plot(rounds, values, style, color=colour, linewidth=width + 0.4, label=words)
    axes.axhline(0.1, color=plots.SOFT, linewidth=0.8, linestyle="--", label="chance")
    axes.set(
        xlabel="round", ylabel="test accuracy", ylim=(-0.02, 1), xlim=(0, None),
        title="A tenth of the nodes hostile, each node pulls about 35 others",
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1, 0.42))
    plots.save(figure, DOCS / "images" / "scale-learning.svg")


def costs(sizes: list[dict[str, Any]]) -> None:
    """Time of a round and memory against n, each beside its limit."""
    figure, axes = plots.canvas(7.4, 3.9)
    nodes = [size["nodes"] for size in sizes]
    least = [sum(part[1] for name, part in size["parts"].items() if name != "evaluate") for size in sizes]
    seconds = [size["seconds"] for size in sizes]
    used, models = ([size[key] / 1e9 for size in sizes] for key in ("bytes", "model_bytes"))
    curves = [
        (seconds, least, "o", "seconds a round", "what the machine's rates allow"),
        (used, models, "s", "memory above the import, GB", "the honest models, GB"),
    ]
    for colour, (measured, bound, marker, *labels) in zip(plots.COLOURS, curves, strict=False):
        axes.loglog(nodes, measured, color=colour, marker=marker, label=labels[0])
        axes.loglog(nodes, bound, color=colour, linestyle="--", label=labels[1])
    axes.set(xlabel="nodes n", title="A round on two cores, 650 parameters a model")
    axes.legend(frameon=False)
    plots.save(figure, DOCS / "images" / "scale-cost.svg")


def run_table(runs: list[KeptRun]) -> list[str]:
    head = [
        "| run | rounds | mean accuracy | worst node | most hostile answers met | planned for | s a round | "
        "in all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        last, seconds = run.rows[-1], [row["seconds"] for row in run.rows]
        head.append(
            f"| {label(run)} | {len(run.rows)} | {last['accuracy_mean']:.4f} | {last['accuracy_worst']:.4f} "
            f"| {run.proof['max_observed']} | {run.proof['plan']['b_hat']} | "
            f"{sorted(seconds)[len(seconds) // 2]:.1f} | {sum(seconds) / 60:.0f} min |"
        )
    return head


def cost_table(sizes: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| nodes | s a round | ms a node | memory | × the models | " + " | ".join(PARTS) + " |",
        "|---" * 10 + "|",
    ]
    for size in sizes:
        far = (f"{seconds / least:.1f}" for seconds, least in (size["parts"][name] for name in PARTS))
        rows.append(
            f"| {size['nodes']:,} | {size['seconds']:.2f} | {size['seconds'] / size['honest'] * 1e3:.3f} | "
            f"{size['bytes'] / 1e9:.1f} GB | {size['bytes'] / size['model_bytes']:.1f} | "
            + " | ".join(far)
            + " |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The numbers and figures of docs/scale.md.")
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what benchmarks/scale.py --json wrote")
    asked = parser.parse_args()
    archive = Archive(KEPT / "runs.tar.xz")
    for folder in asked.folders:
        archive.take(folder)
    archive.write()
    if asked.measured:
        shutil.copyfile(asked.measured, KEPT / "cost.json")
    runs = sorted(archive.runs(), key=order)
    sizes = json.loads((KEPT / "cost.json").read_text("utf-8"))
    curves(runs)
    costs(sizes)
    tables = {"runs": run_table(runs), "cost": cost_table(sizes)}
    page = DOCS / "scale.md"
    text = MARK.sub(lambda m: m[1] + "\n".join(tables[m[2]]) + "\n" + m[3], page.read_text("utf-8"))
    page.write_text(text, "utf-8")


def order(run: KeptRun) -> tuple[bool, int, str]:
    return (run.spec.get("rule") == "mean", run.spec["nodes"], run.spec["attack"])


if __name__ == "__main__":
    main()
