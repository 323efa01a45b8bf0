"""``rpel report``: one page from finished runs."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpel.cli.options import Json

if TYPE_CHECKING:
    from rpel.report import Collection, Setting


def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Run folders, or folders above some.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML page to write.")] = Path("report.html"),
    csv: Annotated[Path | None, typer.Option(help="Write all numbers to this CSV file.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Draw the panels to this folder as SVG and PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Make one self-contained page of runs: curves with bands over seeds, tables that sort, certificates, commands.

    It needs no network, reads well on a phone, in light and dark and on paper.

    Example: rpel report runs -o report.html --csv report.csv --figures figures
    """
    from rpel import report as reports
    from rpel.files import atomic

    found = reports.collect(paths)
    if output.is_dir():
        raise ValueError(f"-o {str(output)!r} is a folder: give a file such as {str(output / 'report.html')!r}")
    texts = {output: reports.page(found)}
    if csv is not None:
        from rpel.report.numbers import csv as as_csv

        texts[csv] = as_csv(found.runs)
    for path, text in texts.items():
        with atomic(path) as file:
            file.write(text.encode("utf-8", "replace"))  # names of folders need not be Unicode
    groups = reports.settings(found.runs)
    written = list(texts)
    if figures is not None:
        from rpel.report.figures import save

        written += save(reports.panels(groups), figures)
    _warn(found)
    if as_json:
        print(json.dumps(_summary(found, groups, written), indent=2))
    else:
        print(f"{output}: {len(found.runs)} finished runs in {len(groups)} settings; {len(written)} files written")


def _warn(found: "Collection") -> None:
    for one in found.unfinished:
        print(f"rpel: warning: {one.path} is not finished: rpel resume {one.path}", file=sys.stderr)
    for bad in found.broken:
        print(f"rpel: warning: {bad.path} is broken: {bad.reason}", file=sys.stderr)


def _summary(found: "Collection", groups: "list[Setting]", written: list[Path]) -> dict[str, Any]:
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
