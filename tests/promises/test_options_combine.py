"""Every pair of what a run can be asked for either works or is refused in one sentence."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rpel
from support.runs import differences

SMALL: dict[str, Any] = {
    "nodes": 12, "byzantine": 2, "pull": 8, "b_hat": 2, "rounds": 2, "eval_every": 2, "eval_size": 50,
    "batch_size": 10, "partition": "iid",
}  # fmt: skip
ASKED: dict[str, dict[str, Any]] = {
    "asynchronous": {"timing": "asynchronous(speeds=lognormal(0.3))"},
    "wire": {"wire": "int8"},
    "privacy": {"privacy": "dp(clip=1, noise=1, delta=1e-3)"},
    "outer": {"outer": "nesterov", "local_steps": 2},
    "optimizer": {"optimizer": "adam", "lr": 0.01},
    "backend": {"backend": "torch"},
    "workers": {"workers": 2},
}
REFUSED = {
    ("asynchronous", "wire"): "asynchronous does not go with wire int8: the nearest is wire float32",
    ("asynchronous", "privacy"): "fast nodes would spend more privacy",
    ("asynchronous", "workers"): "needs a network whose nodes are computed one by one",
}
"""Pairs that do not go together, and what is said of them."""
PAIRS = [pair for pair in combinations(ASKED, 2) if pair not in REFUSED]


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "workers" not in pair], ids="+".join)
def test_pair_of_options_works(pair: tuple[str, str]) -> None:
    if "privacy" in pair:
        pytest.importorskip("dp_accounting")
    alone = rpel.simulate("linear", **SMALL | ASKED[pair[0]])
    both = rpel.simulate("linear", **SMALL | ASKED[pair[0]] | ASKED[pair[1]])
    assert np.isfinite(both.models).all()
    assert pair[1] == "backend" or not np.array_equal(both.models, alone.models)


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=pytest.mark.full) if "workers" in pair else pair for pair in REFUSED],
    ids="+".join,
)
def test_pair_of_options_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=REFUSED[pair]) as refused:
        rpel.simulate("linear", **SMALL | ASKED[pair[0]] | ASKED[pair[1]])
    assert "\n" not in str(refused.value)


@pytest.mark.full
@pytest.mark.parametrize("first", [first for first, second in PAIRS if second == "workers"])
def test_pair_with_workers_gives_the_bytes_of_one_worker(first: str, tmp_path: Path) -> None:
    fields = SMALL | ASKED[first] | {"threads": 1}
    runs = [rpel.simulate("linear", **fields, workers=n, out=tmp_path / str(n)) for n in (1, 2)]
    one, two = (Path(str(run.path)) for run in runs)
    assert differences(one, two) == []
