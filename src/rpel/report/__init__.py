"""The report: one HTML page, a CSV and figures, from run folders on disk alone; torch is never imported.

runs (what lies on disk) → settings (seeds together, curves into panels) → drawing, tables, proofs (SVG, HTML) → page.
Laws: whatever comes from disk is checked when it is read and escaped where it is written; a broken folder is reported
and stops nothing; equal runs give equal bytes; the page asks no other machine for anything.
"""

from rpel.report.collect import Collection, collect
from rpel.report.page import page
from rpel.report.settings import Panel, Setting, panels, settings

__all__ = ["Collection", "Panel", "Setting", "collect", "page", "panels", "settings"]
