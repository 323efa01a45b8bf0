"""``rpel report``, ``rpel runs`` (also ``ls``) and ``rpel compare``: runs that lie on disk, without torch."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Option

from rpel.cli import terminal
from rpel.cli.terminal import Json, Look
from rpel.text import count, visible

if TYPE_CHECKING:
    from rpel.report import Collection
    from rpel.report.groups import Chart
    from rpel.runs.record import RunSet


def report(
    paths: Annotated[
        list[Path],
        Argument(metavar="PATH...", help="Run folders, or folders above some.", show_default=False),
    ],
    output: Annotated[Path, Option("--output", "-o", help="The HTML page to write.")] = Path("report.html"),
    csv: Annotated[Path | None, Option(help="Write all numbers to this CSV file.")] = None,
    latex: Annotated[Path | None, Option(help="Write the table of settings to this LaTeX file.")] = None,
    figures: Annotated[
        Path | None, Option(help="Write the charts to this folder (SVG and PNG; for papers PDF).")
    ] = None,
    style: Look = "screen",
    as_json: Json = False,
) -> None:
    """Make one self-contained page of runs: curves with bands over seeds, tables that sort, certificates,
    commands.

    It needs no network, reads well on a phone, in light and dark and on paper.

    Example: rpel report runs -o report.html --csv report.csv --latex table.tex --figures figures
    """
    from rpel.files import write_text
    from rpel.plots import save
    from rpel.report import by_code, chart_groups, collect, drawing, group_runs, page
    from rpel.report.groups import METRICS, groups_as_latex, to_csv

    collection = by_code(collect(paths), terminal.say)
    if output.is_dir():
        raise ValueError(
            f"-o {str(output)!r} is a folder: give a file such as {str(output / 'report.html')!r}"
        )
    groups = group_runs(collection.runs)
    texts = {output: page(collection)}
    drawn: dict[Path, tuple[Chart, str]] = {}
    if csv is not None:
        texts[csv] = to_csv(collection.runs)
    if latex is not None:
        texts[latex] = groups_as_latex(groups)
    if figures is not None:
        suffixes = ("svg", "png") if style == "screen" else ("pdf",)
        for chart, metric, suffix in product(chart_groups(groups), METRICS, suffixes):
            drawn[figures / f"{chart.slug}-{metric}.{suffix}"] = (chart, metric)
    for path, text in texts.items():
        write_text(path, text, errors="replace")  # names of folders need not be Unicode
    for path, (chart, metric) in drawn.items():
        save(drawing.chart_figure(chart, metric), path, style)
    written = [*texts, *drawn]
    for one in collection.unfinished:
        terminal.say(visible(f"warning: {one.path} is not finished: rpel resume {one.path}"))
    for bad in collection.broken:
        terminal.say(visible(f"warning: {bad.path} is broken: {bad.reason}"))
    if not terminal.printed(_summary(collection, groups, written), as_json):
        finished = f"{count(len(collection.runs), 'finished run')} in {count(len(groups), 'setting')}"
        print(f"{output}: {finished}; {count(len(written), 'file')} written")


def _summary(collection: "Collection", groups: "list[RunSet]", written: list[Path]) -> dict[str, Any]:
    settings = [
        {
            "label": group.label,
            "stamp": group.stamp or None,
            "dataset": group.spec.dataset,
            "nodes": group.spec.nodes,
            "byzantine": group.spec.byzantine,
            "pull": group.runs[0].certificate.pull,
            "seeds": [run.spec.seed for run in group.runs],
            "held": group.held,
            "intervals": {
                key: dict(zip(("mean", "low", "high"), group.interval(key), strict=True))
                for key in group.measures
            },
        }
        for group in groups
    ]
    return {
        "runs": len(collection.runs),
        "settings": settings,
        "unfinished": [str(one.path) for one in collection.unfinished],
        "broken": {str(one.path): one.reason for one in collection.broken},
        "files": [str(path) for path in written],
    }


def runs(
    folder: Annotated[Path, Argument(help="A folder with runs somewhere below it.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a folder: what they are, how far they came, and what they ended with.

    Example: rpel runs somewhere (rpel ls is the same)
    """
    from rpel.report import collect

    collection = collect([folder])
    rows: list[dict[str, Any]] = []
    for run in collection.runs:
        ends = {f"{run.key}_{word}": run.final[f"{run.key}_{word}"] for word in ("mean", "worst")}
        said = {"measure": run.measure, **ends} if run.measure != "accuracy" else ends
        rows.append(
            {"path": run.place, "state": "finished", **_spec(run.spec), "done": run.spec.rounds, **said}
        )
        rows[-1] |= {"held": run.certificate.held, "edited": list(run.edited)}
    rows += [
        {"path": one.place, "state": "unfinished", **_spec(one.spec), "done": one.rounds}
        for one in collection.unfinished
    ]
    rows += [{"path": bad.place, "state": "broken", "error": bad.reason} for bad in collection.broken]
    if terminal.printed(rows, as_json):
        return
    table = terminal.table(
        "run", "what", "rounds", "mean", "worst", right=("rounds", "mean", "worst"), fold=("run", "what")
    )
    for row in rows:
        table.add_row(*_cells(row))
    terminal.stdout(wrap=True).print(table)
    states = [row["state"] for row in rows]
    print(", ".join(f"{states.count(s)} {s}" for s in ("finished", "unfinished", "broken") if s in states))


def _spec(spec: Any) -> dict[str, Any]:
    keys = ("name", "dataset", "method", "rule", "attack", "nodes", "byzantine", "pull", "rounds", "seed")
    return {key: getattr(spec, key) for key in keys}


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
    ends = [f"{row[key]:.4f}" if row.get(key) is not None else "" for key in keys]
    what += "" if measure == "accuracy" else f", {measure}"
    edited = f"; edited: {', '.join(row['edited'])}" if row.get("edited") else ""
    return name, Text(visible(f"{what}, seed {row['seed']}")) + Text(visible(edited), "red"), rounds, *ends


# --- compare ------------------------------------------------------------------------------------------------


def compare(
    a: Annotated[Path, Argument(metavar="A", help="A run, or a folder with the seeds of one.")],
    b: Annotated[Path, Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """Compare two runs, or two sets of seeds: what differs in their specifications, curves,
    paired differences.

    Example: rpel compare runs/quickstart-0123456789ab runs/quickstart-ba9876543210
    """
    from rpel.report.groups import compared

    comparison = compared(_one_group(a), _one_group(b))
    if terminal.printed(comparison, as_json):
        return
    for key, (mine, theirs) in comparison["differences"].items():
        print(visible(f"{key}: {mine} | {theirs}"))
    if not comparison["differences"]:
        print("the specifications differ in nothing that matters but seeds")
    table = terminal.table(
        "after the last round", "A", "B", "B - A", comparison["interval"], right=("A", "B", "B - A")
    )
    for key, row in comparison["final"].items():
        low, high = row["low"], row["high"]
        between = "" if low is None or len(comparison["seeds"]) < 2 else f"{low:+.4g} to {high:+.4g}"
        ends = ["overflowed" if row[k] is None else f"{row[k]:.4g}" for k in ("a", "b", "difference")]
        table.add_row(key.replace("_", " "), *ends, between)
    terminal.stdout(wrap=True).print(table)
    curve = ", ".join(f"{row['round']}: {row['a']:.3f} | {row['b']:.3f}" for row in comparison["curve"])
    print(f"mean {comparison['measure']} by round: {curve}" if curve else "no round was evaluated in both")
    print(f"paired over {count(len(comparison['seeds']), 'common seed')}")


def _one_group(path: Path) -> "RunSet":
    from rpel.report import by_code, collect, group_runs

    groups = group_runs(by_code(collect([path]), terminal.say).runs)
    if len(groups) != 1:
        raise ValueError(
            f"{str(path)!r} holds {count(len(groups), 'setting')}: rpel compare takes runs of one each"
        )
    return groups[0]
