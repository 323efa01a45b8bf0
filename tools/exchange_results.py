"""The runs, tables and figures of docs/results/exchange.md, in two steps.

    python tools/exchange_results.py run --data-dir DATA --out RUNS \
        [--part NAME …] [--seeds 0 1 2] [--threads N]
    python tools/exchange_results.py [RUNS …]

The first trains whatever is not finished yet in RUNS, the most telling part first, one process, one run after
the other. The second keeps the small files of finished runs in docs/results/exchange/runs.tar.xz, for others
to check, and makes tables and figures from what is kept and from nothing else, so that without arguments the
pages stay as they are. A table stands between <!-- NAME --> and <!-- end -->.
"""

import argparse
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from four_bits import FOUR_BITS, bytes_of, four_bits
from kept_runs import Archive, KeptRun, spec_of
from rpel import plots, simulate
from rpel.simulation.methods import schedule
from rpel.wire import Wire

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "results" / "exchange"
PAGES = ("exchange",)
MARK = re.compile(r"(<!-- ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Fields = dict[str, Any]
TRAINING: Fields = {
    "dataset": "mnist", "model": "mnist", "lr": 0.5, "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 25,
    "alpha": 1.0, "eval_every": 20, "eval_size": 250, "checkpoint_every": 0,
}  # fmt: skip
N30: Fields = TRAINING | {"nodes": 30, "byzantine": 6, "b_hat": 6, "rounds": 60}
N100: Fields = TRAINING | {"nodes": 100, "byzantine": 10, "b_hat": 8, "rounds": 40}
PULL = {30: 14, 100: 16}
"""s by n."""
FIXED = (
    "alie", "foe", "sign_flipping", "mimic", "dissensus", "inner_product_manipulation", "gaussian", "min_max",
    "min_sum", "fang",
)  # fmt: skip
SEARCHING = ("strongest(alie)", "strongest(min_max)")
EVERY = (*FIXED, *SEARCHING)
FEW = ("alie", "foe", "strongest(alie)")
SPEEDS = "lognormal:0.3+stragglers:0.1,10"
RANDOM = "int4 random"
"""The code of four bits that comes nearest to float32."""
TIMED = ("none", "alie", "foe", "strongest(alie)")
"""Attacks against runs that wait for nobody."""


def against(name: str) -> Fields:
    """The fields of an attack by what a table calls it: a name, or strongest(of)."""
    if name.startswith("strongest("):
        return {"attack": "strongest", "attack_params": {"of": name[len("strongest(") : -1]}}
    return {"attack": name}


def exchange(n: int, attack: str, code: str = "float32") -> Fields:
    """A run of n nodes whose models travel in that code."""
    sizes = N30 if n == 30 else N100
    wire = (
        {"wire": "int8", "name": code.replace(" ", "-")}
        if code in FOUR_BITS
        else {"wire": code, "name": "exchange"}
    )
    return sizes | against(attack) | wire | {"pull": PULL[n]}


def asynchronous(attack: str, n: int = 30) -> Fields:
    """A run of n nodes that wait for nobody, a tenth of them ten times slower."""
    times = {"asynchronous": True, "speeds": SPEEDS, "rounds": 100 if n == 30 else 70, "eval_every": 10}
    return exchange(n, attack) | times


CODES = ("float32", "int8")
PARTS: dict[str, list[Fields]] = {
    "first": [exchange(30, name, code) for name in ("alie", "foe") for code in CODES],
    "bits": [exchange(30, "alie", code) for code in FOUR_BITS if code not in ("mod 0.02", "mod 0.2")],
    "time": [asynchronous(name) for name in ("alie", "none")] + [exchange(30, "none")],
    "harder": [exchange(30, "foe", code) for code in ("int4 random", "mod 0.05")],
    "mimic": [exchange(30, name, code) for name in ("mimic", "sign_flipping") for code in CODES],
    "searched": [exchange(30, "strongest(alie)", code) for code in CODES] + [asynchronous("foe")],
    "hundred": [exchange(100, "alie", code) for code in CODES],
    "hundred-time": [run for name in TIMED for run in (asynchronous(name, n=100), exchange(100, name))],
    "others": [exchange(30, name, code) for name in FIXED for code in CODES],
    "more": [exchange(100, name, code) for name in ("foe", "strongest(alie)") for code in CODES],
    "random": [exchange(30, name, RANDOM) for name in EVERY],
    "bits-all": [exchange(30, name, code) for name in FEW for code in FOUR_BITS],
    "rest": [exchange(30, "strongest(min_max)", code) for code in CODES] + [asynchronous("strongest(alie)")],
}
"""Runs by the name of their part, the most telling first."""


# --- the runs -----------------------------------------------------------------------------------------------


def code_of(spec: Fields) -> str:
    """The code of a run: one of rpel's, or one of four bits that stood in its place."""
    return next((code for code in FOUR_BITS if code.replace(" ", "-") == spec["name"]), str(spec["wire"]))


def train(parts: Sequence[str], seeds: Sequence[int], given: Fields) -> None:
    """Every run that is not finished yet, one seed after the other."""
    for seed in seeds:
        for fields in (fields for part in parts for fields in PARTS[part]):
            own: Fields = four_bits(code) if (code := code_of(fields)) in FOUR_BITS else {}
            run = simulate(**{**fields, **given, **own, "seed": seed, "reuse": True})
            named = [
                fields["attack"],
                fields.get("attack_params", ""),
                code,
                f"seed {seed}",
            ]
            named += [
                f"n={fields['nodes']}",
                *(["asynchronous"] if fields.get("asynchronous") else []),
            ]
            accuracies = [run.final["accuracy_mean"], run.final["accuracy_worst"]]
            print(*named, *(f"{value:.4f}" for value in accuracies), file=sys.stderr, flush=True)


# --- what is kept -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The runs of one setting, a seed each."""

    runs: list[KeptRun]
    archive: Archive

    def last(self, column: str) -> list[float]:
        return [float(run.rows[-1][column] or 0.0) for run in self.runs]

    @property
    def mean(self) -> float:
        """Mean accuracy of the honest nodes, over the seeds."""
        return float(np.mean(self.last("accuracy_mean")))

    @property
    def worst(self) -> float:
        """Accuracy of the worst node, the mean over the seeds."""
        return float(np.mean(self.last("accuracy_worst")))

    @property
    def shown(self) -> str:
        if not self.runs:
            return "–"
        held = all(run.proof["held"] for run in self.runs)
        return " ".join([f"{self.mean:.3f}, {self.worst:.3f}", *([] if held else ["(b_hat was exceeded)"])])

    @property
    def bytes(self) -> float:
        """Bytes sent in the whole run, as the code has them that was in force."""
        spec = self.runs[0].spec
        messages = sum(row["messages"] for row in self.runs[0].rows)
        return float(messages * size_of(code_of(spec)))

    def nodes(self) -> NDArray[np.float64]:
        """(seeds, e, h) the accuracy of every honest node in the rounds evaluated, 0 first."""
        archives = [np.load(io.BytesIO(self.archive.files[f"{run.name}/nodes.npz"])) for run in self.runs]
        return np.stack([one["accuracy"] for one in archives])

    def slow(self) -> NDArray[np.bool_]:
        """(seeds, h) the nodes that are at least five times slower than the median."""
        return np.stack([_schedule(run.spec).w >= 5 for run in self.runs])


PARAMETERS = 176_050
"""Of the MNIST network."""


def size_of(code: str) -> float:
    """Bytes of a message."""
    return bytes_of(code, PARAMETERS) if code in FOUR_BITS else Wire(code).nbytes(PARAMETERS)  # type: ignore[arg-type]


def _schedule(spec: Fields) -> Any:
    """When the nodes of a run act, if their speeds are those of the asynchronous runs."""
    return schedule(spec_of({**spec, "speeds": SPEEDS}))


class Results:
    """Tables and figures from kept runs."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.kept = archive.runs()

    def find(self, fields: Fields) -> Cell:
        """The runs with these fields, by seed."""
        usual: Fields = {"attack_params": {}, "asynchronous": False}
        wanted = {
            key: value for key, value in (usual | fields).items() if key not in ("eval_every", "eval_size")
        }
        runs = [run for run in self.kept if all(run.spec.get(key) == value for key, value in wanted.items())]
        return Cell(sorted(runs, key=lambda run: run.spec["seed"]), self.archive)

    # --- tables ---

    def _table(self, n: int, rows: Sequence[str], codes: Sequence[str]) -> str:
        """A line for each attack, then what the columns cost; runs that were not made are –."""
        cells = {code: {attack: self.find(exchange(n, attack, code)) for attack in rows} for code in codes}
        columns_ = [name for name in codes if any(cell.runs for cell in cells[name].values())]
        lines = [["attack", *columns_]]
        lines += [[attack, *(cells[name][attack].shown for name in columns_)] for attack in rows]
        lines = [line for line in lines if set(line[1:]) != {"–"}]
        if not columns_:
            return "(Not run yet.)"
        there = {name: [cell for cell in cells[name].values() if cell.runs] for name in columns_}
        seeds = [sorted({len(cell.runs) for cell in there[name]}) for name in columns_]
        lines.append(["seeds", *(" to ".join(map(str, dict.fromkeys((s[0], s[-1])))) for s in seeds)])
        lines.append(["MB sent", *(f"{there[name][0].bytes / 1e6:,.0f}" for name in columns_)])
        return _markdown(lines)

    def wire_30(self) -> str:
        return self._table(30, EVERY, CODES)

    def wire_100(self) -> str:
        return self._table(100, FEW, CODES)

    def bits_random(self) -> str:
        return self._table(30, EVERY, ("float32", RANDOM))

    def bits(self) -> str:
        """A line for each code of four bits, beside float32."""
        attacks = ("alie", "foe", "strongest(alie)")
        lines = [["code", "bytes of a model", *attacks, "wrapped"]]
        for code in ("float32", *FOUR_BITS):
            cells = [self.find(exchange(30, attack, code)) for attack in attacks]
            known = [cell for cell in cells if cell.runs]
            if known:
                wrapped = [
                    row["wrapped"] for cell in known for row in cell.runs[0].rows[-1:] if "wrapped" in row
                ]
                share = f"{max(wrapped):.1e}" if wrapped else "–"
                lines.append([code, f"{size_of(code):,.0f}", *(cell.shown for cell in cells), share])
        return _markdown(lines)

    def asynchrony(self) -> str:
        """A line for each attack: both ways at their ends, and when the asynchronous one was as good."""
        head = [
            "n",
            "attack",
            "seeds",
            "synchronous",
            "its time",
            "asynchronous",
            "its time",
            "as good as synchronous from",
            "share",
        ]
        lines = [head]
        for n, attack in ((n, attack) for n in (30, 100) for attack in TIMED):
            still, moving = self.find(exchange(n, attack)), self.find(asynchronous(attack, n=n))
            if not (still.runs and moving.runs):
                continue
            spec = still.runs[0].spec
            ends = [
                float(_schedule(spec).charged(spec["rounds"])),
                float(moving.runs[0].rows[-1]["time"]),
            ]
            when = self._reached(moving, still.mean)
            share = "–" if when is None else f"{when / ends[0]:.2f}"
            shown = "not reached" if when is None else f"{when:,.0f}"
            setting = [str(n), attack, " and ".join(dict.fromkeys(str(len(c.runs)) for c in (still, moving)))]
            lines.append(
                [*setting, still.shown, f"{ends[0]:,.0f}", moving.shown, f"{ends[1]:,.0f}", shown, share]
            )
        return _markdown(lines)

    @staticmethod
    def _reached(cell: Cell, goal: float) -> float | None:
        """The first time evaluated at which the mean accuracy is at most half a point below the goal."""
        accuracies = [[row["accuracy_mean"] for row in run.evaluated] for run in cell.runs]
        reached = np.flatnonzero(np.mean(accuracies, axis=0) >= goal - 0.005)
        return float(cell.runs[0].evaluated[reached[0]]["time"]) if len(reached) else None

    def slow(self) -> str:
        """Slow nodes beside the others, at the end."""
        lines = [["n", "attack", "slow nodes", "the others", "worst slow", "worst other"]]
        for n, attack in ((n, attack) for n in (30, 100) for attack in TIMED):
            cell = self.find(asynchronous(attack, n))
            if cell.runs:
                end, late = cell.nodes()[:, -1], cell.slow()
                values = [end[late].mean(), end[~late].mean(), end[late].min(), end[~late].min()]
                lines.append([str(n), attack, *(f"{v:.3f}" for v in values)])
        return _markdown(lines)

    # --- figures ---

    def draw(self, folder: Path) -> None:
        """Every figure for which there are runs."""
        self._bytes(folder / "wire.svg", (*CODES, *FOUR_BITS))
        self._times(folder / "asynchrony.svg")

    def _bytes(self, path: Path, codes: Sequence[str]) -> None:
        """Accuracy against bytes, a panel for each n: mean (open) and worst node (filled)."""
        from matplotlib.ticker import FuncFormatter

        sizes = [n for n in (30, 100) if any(self.find(exchange(n, "alie", code)).runs for code in codes)]
        figure, first = plots.canvas(4.8 * len(sizes), 4.4)
        first.remove()
        for at, n in enumerate(sizes, 1):
            axes = plots.plain(figure.add_subplot(1, len(sizes), at))
            for position, code in enumerate(codes):
                cell = self.find(exchange(n, "alie", code))
                if not cell.runs:
                    continue
                colour, marker = plots.COLOURS[position % 7], "osD^vP"[position // 7 + (code in FOUR_BITS)]
                size, ends = cell.bytes / 1e9, [cell.mean, cell.worst]
                axes.plot([size, size], ends, color=colour, alpha=0.5, linewidth=1)
                axes.plot(
                    [size], ends[:1], marker=marker, color=colour, markerfacecolor="white", linestyle=""
                )
                axes.plot([size], ends[1:], marker=marker, color=colour, label=code, linestyle="")
            axes.set(xscale="log", xlabel="bytes sent (GB)", title=f"n = {n}, under ALIE")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axes.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            if at == 1:
                axes.set_ylabel("accuracy: mean (open), worst node (filled)")
            axes.legend(frameon=False, fontsize=8)
        plots.save(figure, path)

    def _times(self, path: Path) -> None:
        """Mean and worst accuracy against virtual time, both ways."""
        figure, axes = plots.canvas(7.5, 4.2)
        for colour, attack in zip(plots.COLOURS, ("none", "alie", "foe"), strict=False):
            for cell, style in (
                (self.find(asynchronous(attack)), "-"),
                (self.find(exchange(30, attack)), ":"),
            ):
                if not cell.runs:
                    continue
                clock = _schedule(cell.runs[0].spec)
                rows = cell.runs[0].evaluated
                times = [row.get("time") or clock.charged(row["round"]) for row in rows]
                name = f"{attack}, {'asynchronous' if style == '-' else 'synchronous'}"
                axes.plot(times, [row["accuracy_mean"] for row in rows], style, color=colour, label=name,
                    marker="o",
                    markersize=3)  # fmt: skip
        axes.set(xlabel="virtual time (median local phases)", ylabel="mean accuracy", xscale="log")
        axes.legend(frameon=False, fontsize=8)
        plots.save(figure, path)


def _markdown(lines: list[list[str]]) -> str:
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], "|" + "---|" * len(lines[0]), *rows[1:]])


def write(folders: Sequence[Path]) -> None:
    """Keep the runs below these folders, and put tables and figures into the pages."""
    archive = Archive(KEPT / "runs.tar.xz")
    for folder in folders:
        archive.take(folder, also=("nodes.npz",))
    archive.write()
    results = Results(archive)
    for name in PAGES:
        page = DOCS / "results" / f"{name}.md"
        text = MARK.sub(
            lambda m: f"{m[1]}{getattr(results, m[2].replace('-', '_'))()}\n{m[3]}", page.read_text("utf-8")
        )
        page.write_text(text, "utf-8")
    results.draw(KEPT)


def main() -> None:
    if sys.argv[1:2] != ["run"]:
        write([Path(folder) for folder in sys.argv[1:]])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    given = vars(parser.parse_args(sys.argv[2:]))
    train(given.pop("part"), given.pop("seeds"), given)


if __name__ == "__main__":
    main()
