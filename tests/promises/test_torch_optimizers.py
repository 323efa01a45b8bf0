"""Optimizers of torch as the local step of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpel import resume, simulate
from support.runs import TINY, CrashError, crash_after, differences


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.RMSprop], ids=["many at once", "one by one"])
def test_run_with_an_optimiser_that_crashed_goes_on_to_the_same_bytes(optimizer: Any, tmp_path: Path) -> None:
    fields = {**TINY, "optimizer": optimizer, "lr": 0.01, "outer": "nesterov", "local_steps": 2}
    whole = simulate(**fields, out=tmp_path / "whole")
    with pytest.raises(CrashError):
        simulate(**fields, out=tmp_path / "crashed", progress=crash_after(5))
    (path,) = (tmp_path / "crashed").iterdir()
    resume(path, optimizer=None if isinstance(optimizer, str) else optimizer)
    assert whole.path is not None
    assert differences(whole.path, path) == []
    assert not np.array_equal(whole.models, simulate(**{**fields, "outer": "none"}, out=None).models)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": "adamw(beta=1)"}, "AdamW has no parameter 'beta': the nearest is"),
        ({"optimizer": "adam(eps=-1)"}, "optimizer cannot be made: Invalid epsilon value"),
        ({"optimizer": lambda parameters: 3}, "optimizer makes a int"),
        ({"optimizer": "adamm"}, "optimizer 'adamm'.*'adamw'|optimizer 'adamm'.*'adam'"),
        ({"optimizer": "momentum(eps=1)"}, "momentum takes no parameters"),
        ({"outer": "none(0.5)"}, "none takes no parameters"),
        ({"lr": "cosinus(0.5)"}, "unknown schedule 'cosinus'; did you mean 'cosine'"),
        ({"lr": "cosine(0.5, 3, 0.1, 7)"}, "cosine takes at most 3"),
    ],
)  # fmt: skip
def test_bad_optimisers_and_schedules_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        simulate("linear", **fields, out=None)
    assert "\n" not in str(error.value)
