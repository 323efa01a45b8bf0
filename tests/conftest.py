"""Shared by all tests: a closing line that says what was skipped and why, so that a skip is never silent."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"

# Generated tests draw the same examples on every machine; no deadline, because machines here are shared.
settings.register_profile(
    "rpel", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("rpel")


@pytest.fixture
def shared_data() -> Path:
    """The real data sets beside the repository; skipped, visibly, where they are not."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs ../shared/data")
    return SHARED / "data"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: how many tests were skipped, by reason."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    parts = ", ".join(f"{count} × {reason}" for reason, count in sorted(reasons.items()))
    where = "root" if hasattr(os, "geteuid") and os.geteuid() == 0 else "no root"
    terminalreporter.write_line(f"skipped: {sum(reasons.values())} ({parts or 'nothing'}; running with {where})")
