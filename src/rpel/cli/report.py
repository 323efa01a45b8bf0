"""``rpel report``: one page from finished runs."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpel.cli.options import Json
from rpel.text import count

if TYPE_CHECKING:
    from rpel.report import Collection, Group
    from rpel.report.groups import Chart


def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Run folders, or folders above some.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML page to write.")] = Path("report.html"),
    csv: Annotated[Path | None, typer.Option(help="Write all numbers to this CSV file.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the table of settings to this LaTeX file.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Write the charts to this folder as SVG and PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Make one self-contained page of runs: curves with bands over seeds, tables that sort, certificates, commands.

    It needs no network, reads well on a phone, in light and dark and on paper.

    Example: rpel report runs -o report.html --csv report.csv --latex table.tex --figures figures
    """
    from rpel.files import atomic
    from rpel.plots import save
    from rpel.report import chart_groups, collect, drawing, group_runs, page, tables
    from rpel.report.groups import METRICS

    found = collect(paths)
    if output.is_dir():
        raise ValueError(f"-o {str(output)!r} is a folder: give a file such as {str(output / 'report.html')!r}")
    groups = group_runs(found.runs)
    texts = {output: page(found)}
    drawn: dict[Path, tuple[Chart, str]] = {}
    if csv is not None:
        texts[csv] = tables.to_csv(found.runs)
    if latex is not None:
        texts[latex] = tables.groups_as_latex(groups)
    if figures is not None:
        for chart in chart_groups(groups):
            texts |= {figures / f"{chart.slug}-{metric}.svg": drawing.svg_file(chart, metric) for metric in METRICS}
            drawn |= {figures / f"{chart.slug}-{metric}.png": (chart, metric) for metric in METRICS}
    for path, text in texts.items():
        with atomic(path) as file:
            file.write(text.encode("utf-8", "replace"))  # names of folders need not be Unicode
    for path, (chart, metric) in drawn.items():
        save(drawing.png_figure(chart, metric), path)
    written = [*texts, *drawn]
    _warn(found)
    if as_json:
        print(json.dumps(_summary(found, groups, written), indent=2))
    else:
        finished = f"{count(len(found.runs), 'finished run')} in {count(len(groups), 'setting')}"
        print(f"{output}: {finished}; {count(len(written), 'file')} written")


def _warn(found: "Collection") -> None:
    for one in found.unfinished:
        print(f"rpel: warning: {one.path} is not finished: rpel resume {one.path}", file=sys.stderr)
    for bad in found.broken:
        print(f"rpel: warning: {bad.path} is broken: {bad.reason}", file=sys.stderr)


def _summary(found: "Collection", groups: "list[Group]", written: list[Path]) -> dict[str, Any]:
    settings = [
        {
            "label": group.label,
            "stamp": group.stamp or None,
            "dataset": group.spec.dataset,
            "nodes": group.spec.nodes,
            "byzantine": group.spec.byzantine,
            "pull": group.runs[0].proof.pull,
            "seeds": [run.spec.seed for run in group.runs],
            "held": group.held,
            "intervals": {
                key: dict(zip(("mean", "low", "high"), group.final(key), strict=True))
                for key in ("accuracy_mean", "accuracy_worst", "accuracy_median", "loss", "consensus")
            },
        }
        for group in groups
    ]
    return {
        "runs": len(found.runs),
        "settings": settings,
        "unfinished": [str(one.path) for one in found.unfinished],
        "broken": {str(one.path): one.reason for one in found.broken},
        "files": [str(path) for path in written],
    }
