"""Version 0.1 stays readable: its hashes, its run folders (finished, unfinished, overflowed)."""

import json

import pytest

from rpel.config.spec import load
from rpel.simulation.methods import settle, spec_hash
from support.paths import ROOT

OLD = ROOT / "tests" / "data" / "v0.1"
HASHES = json.loads((OLD / "hashes.json").read_text())


@pytest.mark.parametrize("name", HASHES)
def test_a_preset_has_the_hash_it_had(name: str) -> None:
    assert spec_hash(settle(load(name)), {"a.gz": "0" * 64}) == HASHES[name]
