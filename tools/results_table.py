"""Final accuracies of finished runs as a Markdown table:
python tools/results_table.py FOLDER… (above run folders).

Runs of one setting (all fields alike but the seed) share a row; each cell lists the seeds in order.
"""

import json
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

SHOWN = ("method", "rule", "nodes", "byzantine", "pull", "b_hat", "attack")
Row = tuple[Any, ...]


def finished(folders: list[str]) -> list[Path]:
    return sorted(p.parent for folder in folders for p in Path(folder).rglob("certificate.json"))


def main() -> None:
    rows: dict[Row, list[tuple[int, dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for path in finished(sys.argv[1:]):
        spec = tomllib.loads((path / "spec.toml").read_text())
        last = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
        proof = json.loads((path / "certificate.json").read_text())
        rows[tuple(spec.get(key) for key in SHOWN)].append((spec.get("seed", 0), last, proof))
    print(
        "| method | rule | n | b | s | b_hat | attack | seeds | mean accuracy | worst node | most hostile "
        "met |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for key in sorted(
        rows, key=lambda row: tuple(map(str, (row[2], row[4], row[6], row[0] != "rpel", row[0], row[1])))
    ):
        runs = sorted(rows[key], key=lambda one: one[0])
        seeds = ", ".join(str(seed) for seed, _, _ in runs)
        mean, worst = (
            ", ".join(f"{last[name]:.4f}" for _, last, _ in runs)
            for name in ("accuracy_mean", "accuracy_worst")
        )
        met = ", ".join(str(proof["max_observed"]) for _, _, proof in runs)
        print("| " + " | ".join([*(str(part) for part in key), seeds, mean, worst, met]) + " |")


if __name__ == "__main__":
    main()
