"""``rpel report``, ``rpel runs`` (also ``ls``) and ``rpel compare``: runs that lie on disk, without torch."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.runs.run import STATISTIC
from rpel.text import count, number, visible

if TYPE_CHECKING:
    from rpel.runs.run import Runs
    from rpel.studies.report import Collection

REPORT, RUNS = Path("report.html"), Path("runs")
ENDS = ("mean", "low", "high")


@opt.described
def report(
    paths: list[Path], output: Path = REPORT, csv: Path | None = None, latex_file: Path | None = None,
    figures: Path | None = None, style: opt.Look = "screen", as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Make one self-contained page of runs.

    It shows curves with bands over seeds, sortable tables, certificates and the commands that repeat the
    runs. It needs no network and reads well on a phone, in light and dark, and on paper.

    Example: rpel report runs -o report.html --csv report.csv --latex table.tex --figures figures

    Arguments:
        paths (PATH...): Run folders, or folders above some.

    Options:
        output (--output, -o): The HTML page to write.
        csv: Write all numbers to this CSV file.
        latex_file (--latex): Write the table of settings to this LaTeX file.
        figures: Write the charts to this folder (SVG and PNG; for papers PDF).
    """
    from rpel.files import write_text
    from rpel.studies.plots import save
    from rpel.studies.report import METRICS, charts, collect, latex, numbers, of_runs, settings, table_of

    collection = collect(paths)
    if output.is_dir():
        raise ValueError(f"-o {str(output)!r} is a folder: give a file such as {str(output / REPORT)!r}")
    groups = settings(collection.runs)
    texts = {output: of_runs(collection)}
    if csv is not None:
        texts[csv] = numbers(collection.runs).to_csv(index=False)
    if latex_file is not None:
        texts[latex_file] = latex(table_of(groups), about=STATISTIC, index=False)
    for path, text in texts.items():
        write_text(path, text, errors="replace")  # folder names need not be Unicode
    drawn: list[Path] = []
    if figures is not None:
        for chart, metric in product(charts(groups), METRICS):
            for suffix in ("svg", "png") if style == "screen" else ("pdf",):
                drawn.append(figures / f"{chart.slug}-{metric}.{suffix}")
                save(chart.draw(metric), drawn[-1], style)
    written = [*texts, *drawn]
    for one in collection.unfinished:
        terminal.say(visible(f"warning: {one.path} is not finished: rpel resume {one.path}"))
    for path, reason in collection.broken.items():
        terminal.say(visible(f"warning: {path} is broken: {reason}"))
    if not terminal.printed(_summary(collection, groups, written), as_json):
        finished = f"{count(len(collection.runs), 'finished run')} in {count(len(groups), 'setting')}"
        print(f"{output}: {finished}; {count(len(written), 'file')} written")


def _summary(collection: "Collection", groups: "list[Runs]", written: list[Path]) -> dict[str, Any]:
    from rpel.studies.paper import stamp

    def setting(group: "Runs") -> dict[str, Any]:
        shared = {"dataset": group.spec.dataset, "nodes": group.spec.nodes}
        shared["byzantine"] = group.spec.hostile_count
        intervals = {key: dict(zip(ENDS, group.interval(key), strict=True)) for key in group.measures}
        return {
            "label": group.label, "stamp": stamp(group.spec) or None, **shared,
            "pull": group.certificate.pull, "seeds": [run.spec.seed for run in group],
            "held": group.certificate.held, "intervals": intervals,
        }  # fmt: skip

    return {
        "runs": len(collection.runs),
        "settings": [setting(group) for group in groups],
        "unfinished": [str(one.path) for one in collection.unfinished],
        "broken": {str(path): reason for path, reason in collection.broken.items()},
        "files": [str(path) for path in written],
    }


@opt.described
def runs(folder: Path = RUNS, as_json: opt.Json = False) -> None:
    """List the runs below a folder: what they are, how far they came, and what they ended with.

    Example: rpel runs somewhere

    Arguments:
        folder: A folder with runs somewhere below it.
    """
    from rpel.studies.report import collect

    collection = collect([folder])
    rows: list[dict[str, Any]] = []
    for run in collection.runs:
        measured = {f"{run.key}_{end}": run.final[f"{run.key}_{end}"] for end in ("mean", "worst")}
        if run.measure != "accuracy":
            measured = {"measure": run.measure, **measured}
        known = {"path": str(run.path), "state": "finished", **_spec(run.spec), "done": run.spec.rounds}
        rows.append(known | measured | {"held": run.certificate.held})
    rows += [
        {"path": str(one.path), "state": "unfinished", **_spec(one.spec), "done": one.rounds}
        for one in collection.unfinished
    ]
    broken = collection.broken.items()
    rows += [{"path": str(path), "state": "broken", "error": reason} for path, reason in broken]
    if terminal.printed(rows, as_json):
        return
    columns = ("run", "what", "rounds", "mean", "worst")
    table = terminal.table(*columns, right=columns[2:], fold=columns[:2])
    for row in rows:
        table.add_row(*_cells(row))
    terminal.stdout(wrap=True).print(table)
    states = [row["state"] for row in rows]
    print(", ".join(f"{states.count(s)} {s}" for s in ("finished", "unfinished", "broken") if s in states))


def _spec(spec: Any) -> dict[str, Any]:
    keys = ("name", "dataset", "method", "rule", "attack", "nodes", "byzantine", "pull", "rounds", "seed")
    return {key: getattr(spec, key) for key in keys} | {"byzantine": spec.hostile_count}


def _cells(row: dict[str, Any]) -> tuple[Text | str, ...]:
    name = Text(visible(row["path"].rpartition("/")[2]))
    if row["state"] == "broken":
        return name, Text(visible(f"broken: {row['error']}"), "red"), "", "", ""
    rule = "" if row["rule"] is None else f" {row['rule']}"
    what = f"{row['method']}{rule}, {row['attack']}, n {row['nodes']} b {row['byzantine']} s {row['pull']}"
    rounds = str(row["rounds"]) if row["state"] == "finished" else f"{row['done']}/{row['rounds']}"
    from rpel.runs.columns import prefix

    measure = row.get("measure", "accuracy")
    keys = [f"{prefix(measure)}_{word}" for word in ("mean", "worst")]
    ends = [number(row.get(key), ".4f") for key in keys]
    what += "" if measure == "accuracy" else f", {measure}"
    return name, visible(f"{what}, seed {row['seed']}"), rounds, *ends


# --- compare ------------------------------------------------------------------------------------------------


@opt.described
def compare(a: Path, b: Path, as_json: opt.Json = False) -> None:
    """Compare two runs, or two sets of seeds.

    Shows the differences of their specifications, their curves, and paired differences.

    Example: rpel compare runs/quickstart-0123456789ab runs/quickstart-ba9876543210

    Arguments:
        a (A): A run, or a folder with the seeds of one.
        b (B): Another.
    """
    from rpel.studies.report import compared

    comparison = compared(_one_group(a), _one_group(b))
    if terminal.printed(comparison, as_json):
        return
    for key, (mine, theirs) in comparison["differences"].items():
        print(visible(f"{key}: {mine} | {theirs}"))
    if not comparison["differences"]:
        print("the specifications differ in nothing that matters but seeds")
    columns = ("after the last round", "A", "B", "B - A", comparison["interval"])
    table = terminal.table(*columns, right=columns[1:4])
    paired = bool(comparison["seeds"])
    for key, row in comparison["final"].items():
        low, high = row["low"], row["high"]
        between = "" if low is None or len(comparison["seeds"]) < 2 else f"{low:+.4g} to {high:+.4g}"
        ends = [number(row[end], ".4g", missing="overflowed") for end in ("a", "b")]
        difference = number(row["difference"], ".4g", missing="overflowed" if paired else "")
        table.add_row(key.replace("_", " "), *ends, difference, between)
    terminal.stdout(wrap=True).print(table)
    curve = ", ".join(f"{row['round']}: {row['a']:.3f} | {row['b']:.3f}" for row in comparison["curve"])
    print(f"mean {comparison['measure']} by round: {curve}" if curve else "no round was evaluated in both")
    if paired:
        print(f"paired over {count(len(comparison['seeds']), 'common seed')}")
    else:
        print("no differences: they are paired by seed, and A and B have no seed in common")


def _one_group(path: Path) -> "Runs":
    from rpel.studies.report import collect, settings

    groups = settings(collect([path]).runs)
    if len(groups) != 1:
        held = count(len(groups), "setting")
        raise ValueError(f"{str(path)!r} holds {held}: rpel compare takes runs of one each")
    return groups[0]
