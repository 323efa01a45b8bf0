"""Where things are: the repository, its test data,
and the folder of real data sets that it does not contain."""

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"

REAL_DATA = Path(os.environ.get("RPEL_TEST_DATA") or ROOT.parent / "shared" / "data")
"""Full data sets in the layout of ``data_dir`` (CONTRIBUTING.md);
tests that need them are skipped without."""
