"""Fixtures of the tests of tasks."""

from collections.abc import Iterator

import pytest

from rpel.backend.threads import set_threads, threads


@pytest.fixture
def thread_counts() -> Iterator[list[int]]:
    before = threads()
    yield [1, 2, 3]
    set_threads(before)
