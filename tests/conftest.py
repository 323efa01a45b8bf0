"""Shared by all tests: async tests run, and a closing line says what was skipped and why."""

import asyncio
import inspect
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.paths import REAL_DATA

# Generated tests draw the same examples on every machine; no deadline, because machines here are shared.
ALWAYS = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_configure(config: pytest.Config) -> None:
    """A few examples of each generated test, and many where nothing is left out (`make test-all`)."""
    everything = not config.getoption("markexpr")
    settings.register_profile("rpel", ALWAYS, max_examples=200 if everything else 15)
    settings.load_profile("rpel")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An async test runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def shared_data() -> Path:
    """The folder of full data sets; skipped, visibly, where there is none."""
    if not REAL_DATA.is_dir():
        pytest.skip("needs full data sets in RPEL_TEST_DATA")
    return REAL_DATA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with integration tests come first: they wait while others compute. Short ones, doctests,
    fill the end."""
    waiting = {item.path for item in items if item.get_closest_marker("integration")}
    items.sort(key=lambda item: (item.path not in waiting, isinstance(item, pytest.DoctestItem)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: how many tests were skipped, by reason."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    )
    parts = ", ".join(f"{count} × {reason}" for reason, count in sorted(reasons.items()))
    where = "root" if hasattr(os, "geteuid") and os.geteuid() == 0 else "no root"
    terminalreporter.write_line(
        f"skipped: {sum(reasons.values())} ({parts or 'nothing'}; running with {where})"
    )
