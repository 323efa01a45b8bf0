"""Data sets of Hugging Face are trained on as they are, or a message names their columns."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rpel
from support.own import OWN, blobs

datasets = pytest.importorskip("datasets", reason="needs datasets, as make test-all installs it")


def hugging(seed: int, inputs: str = "x", label: str = "label", **more: Any) -> Any:
    """Return three classes of points, as rows with columns of these names."""
    x, y = blobs(seed)
    return datasets.Dataset.from_dict({inputs: x.tolist(), label: y.tolist(), **more})


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_simulate_trains_on_a_hugging_face_dataset_as_on_its_arrays(form: str | None) -> None:
    def trained(train: Any, test: Any) -> Any:
        torch.manual_seed(0)
        return rpel.simulate(nn.Linear(5, 3), train, test, **OWN, out=None)

    ours = trained(*(hugging(seed).with_format(form) for seed in (0, 1)))
    np.testing.assert_array_equal(ours.models, trained(blobs(0), blobs(1)).models)
    assert ours.accuracy_mean > 0.7


def test_columns_that_cannot_be_told_apart_are_named() -> None:
    odd = hugging(0, "width", "height", depth=[0.5] * 240)
    with pytest.raises(ValueError, match=r"(?s)(?=.*width)(?=.*height)(?=.*depth)"):
        rpel.simulate(nn.Linear(5, 3), odd, odd, **OWN, out=None)
