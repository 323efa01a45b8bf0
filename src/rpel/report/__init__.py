"""The report: one HTML page, CSV, LaTeX and figures, from run folders on disk alone; torch is never imported.

collect (what lies on disk) → groups (seeds together, groups into charts) → drawing → page.
Invariants: whatever comes from disk is checked when it is read and escaped where it is written; a broken
folder is reported and stops nothing; equal runs give equal bytes;
the page asks no other machine for anything.
"""

from rpel.report.collect import Collection, by_code, collect
from rpel.report.groups import Chart, chart_groups, group_runs
from rpel.report.page import page

__all__ = ["Chart", "Collection", "by_code", "chart_groups", "collect", "group_runs", "page"]
