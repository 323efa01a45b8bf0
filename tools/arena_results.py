"""The numbers and figures of docs/results/arena.md: python tools/arena_results.py [FOLDER…].

A FOLDER holds finished runs of `rpel arena`; their small files (spec, metrics, certificate) are kept in
docs/results/arena/runs.tar.xz, for others to check. Figures and tables are made from what is kept and from
nothing else, so that without arguments the page stays as it is.
A table stands between <!-- KIND --> and <!-- end -->.
"""

import argparse
import re
from pathlib import Path

from kept_runs import Archive, KeptRun, spec_of
from rpel import plots
from rpel.arena import Contestant, Opponent, Rank, Score, Standings, trials
from rpel.text import human_bytes

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "results" / "arena"
MARK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
RULES_HOSTILE, METHODS_HOSTILE = 4, 1  # b of the two settings, which tells their runs apart
UNABLE = ("bulyan",)
"""Rules that were asked for and could not run, so that no run tells of them."""


def standings(runs: list[KeptRun], unable: tuple[str, ...] = ()) -> Standings:
    """What these runs of one setting say, and why the others could not run."""
    who = dict.fromkeys([*(contestant(run) for run in runs), *(Contestant("rpel", rule) for rule in unable)])
    opponents = {other.label: other for other in map(opponent, runs)}
    against = sorted(opponents.values(), key=lambda other: (other.name == "strongest", other.label))
    base = spec_of(runs[0].spec)
    scores = [
        _score(trial.contestant, trial.opponent, trial.cell.error, runs)
        for trial in trials(base, who, against)
    ]
    return Standings(base, tuple(who), tuple(against), tuple(scores))


def _score(one: Contestant, other: Opponent, error: str, runs: list[KeptRun]) -> Score:
    mine = [run.record for run in runs if contestant(run) == one and opponent(run) == other]
    return Score(one, other, tuple(sorted(mine, key=lambda run: run.spec.seed)), error)


def contestant(run: KeptRun) -> Contestant:
    return Contestant(run.spec["method"], run.spec["rule"])


def opponent(run: KeptRun) -> Opponent:
    return Opponent(run.spec["attack"], run.spec["attack_params"])


def matrix(standings: Standings, kind: str, column: str) -> list[str]:
    """Contestants by rank, a column an attack."""
    names = [other.label for other in standings.opponents]
    rows = [f"| {kind} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for rank in standings.ranking():
        numbers = [standings.score(rank.contestant, other).number(column) for other in standings.opponents]
        rows.append(f"| {called(rank, kind)} | " + " | ".join(map(short, numbers)) + " |")
    return rows


def ranking(standings: Standings, kind: str) -> list[str]:
    """Places, with the worst case by seed, and under how many of the attacks it is one."""
    rows = [f"| place | {kind} | worst case | under | by seed | attacks | sent |", "|---" * 7 + "|"]
    every = len(standings.opponents)
    for position, rank in enumerate(standings.ranking(), 1):
        seeds = ", ".join(f"{case:.3f}" for case in rank.cases.values())
        run = str(every) if not rank.unable else f"{every - rank.unable} of {every}"
        facts = (
            [short(rank.worst_case, 3), rank.attack, seeds, run, human_bytes(rank.bytes)]
            if rank.cases
            else ["–"] * 5
        )
        rows.append(f"| {position} | {called(rank, kind)} | " + " | ".join(facts) + " |")
    return rows


def called(rank: Rank, kind: str) -> str:
    """Rules go by the rule, methods by the method."""
    return rank.contestant.rule if kind == "rule" else rank.contestant.method


def short(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def heat_maps(standings: Standings, kind: str, path: Path) -> None:
    """The worst honest node, and below it the mean of all."""
    ranks, names = standings.ranking(), [other.label for other in standings.opponents]
    figure, both = plots.panels(0.62 * len(names) + 2.4, 0.56 * len(ranks) + 1.9, 2, 1, sharex=True)
    for axes, column, title in zip(
        both[:, 0], ("worst", "mean"), ("worst honest node", "mean of all"), strict=True
    ):
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        for i, rank in enumerate(ranks):
            for j, other in enumerate(standings.opponents):
                value = standings.score(rank.contestant, other).number(column)
                colour, ink = ("none", plots.SOFT) if value is None else plots.shade(value)
                axes.fill(
                    [j - 0.48, j + 0.48, j + 0.48, j - 0.48], [i - 0.46, i - 0.46, i + 0.46, i + 0.46], colour
                )
                axes.text(j, i, short(value), ha="center", va="center", fontsize=8, color=ink)
        axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(ranks) - 0.5, -0.5))
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=9)
        axes.set_yticks(range(len(ranks)), [called(rank, kind) for rank in ranks], fontsize=9)
        axes.tick_params(length=0)
        axes.set_title(f"test accuracy, {title}", fontsize=10.5, loc="left")
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="The numbers and figures of docs/results/arena.md.")
    parser.add_argument("folders", type=Path, nargs="*")
    archive = Archive(KEPT / "runs.tar.xz")
    for folder in parser.parse_args().folders:
        archive.take(folder)
    archive.write()
    runs = archive.runs()
    rules, methods = (
        standings([run for run in runs if run.spec["byzantine"] == hostile], unable)
        for hostile, unable in ((RULES_HOSTILE, UNABLE), (METHODS_HOSTILE, ()))
    )
    heat_maps(rules, "rule", DOCS / "images" / "arena-rules.svg")
    heat_maps(methods, "method", DOCS / "images" / "arena-methods.svg")
    tables = {
        "ranking": ranking(rules, "rule"),
        "worst": matrix(rules, "rule", "worst"),
        "methods": ranking(methods, "method"),
        "methodsworst": matrix(methods, "method", "worst"),
    }
    page = DOCS / "results" / "arena.md"
    text = MARK.sub(lambda m: m[1] + "\n".join(tables[m[2]]) + "\n" + m[3], page.read_text("utf-8"))
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
