"""Tasks on data as users have them: the kinds of inputs, frames, and many small networks at once."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel.data import user
from rpel.tasks import Classification
from rpel.tasks.engines import ENGINES, PLAIN
from rpel.tasks.engines.autograd import AutogradEngine
from rpel.tasks.engines.vmap import VmapEngine
from support.text_model import Meaning, made, texts


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.bool_, np.float32, np.float64])
def test_inputs_keep_their_kind_and_floats_take_the_models_precision(kind: Any) -> None:
    x, y = np.eye(4).astype(kind), np.array([0, 1, 0, 1])
    data = user.dataset((x, y), (x, y))
    seen: list[torch.dtype] = []

    class Watching(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            seen.append(given.dtype)
            return super().forward(given.float())

    Classification(data, [np.arange(4)], Watching(4, 2), batch_size=2, seed=0)
    assert set(seen) == {torch.float32 if np.dtype(kind).kind == "f" else torch.from_numpy(x).dtype}


def test_frames_and_series_are_taken_with_their_numbers() -> None:
    class Frame:
        """What pandas and its like have."""

        ndim, columns = (
            2,
            {"age": np.array([1, 2, 3]), "dose": np.array([0.5, 0.25, 1.0]), "ill": np.array([1, 0, 1]) > 0},
        )
        dtypes = tuple(column.dtype for column in columns.values())

        def to_numpy(self, dtype: Any = object) -> NDArray[Any]:
            return np.stack([column.astype(dtype) for column in self.columns.values()], axis=1)

    data = user.dataset((Frame(), [0, 1, 0]), (Frame(), [0, 1, 0]))
    assert data.train_x.dtype == np.float32
    assert data.train_x[2].tolist() == [3, 1, 1]
    assert data.classes == 2


def test_small_networks_with_whole_numbers_are_computed_many_at_once_as_one_by_one() -> None:
    x, y = texts()
    data, shards = user.dataset((x, y), (x, y)), [np.arange(160)] * 3
    engines = [
        Classification(
            data, shards, made(Meaning), None, F.cross_entropy, batch_size=8, seed=0, engines=table
        )
        for table in (ENGINES, PLAIN)
    ]
    assert isinstance(engines[0].engine, VmapEngine)
    assert isinstance(engines[1].engine, AutogradEngine)
    models = engines[0].initial() * np.array([[1.0], [0.9], [1.1]], np.float32)
    local, ids = engines[0].local_state(3), np.arange(3)
    many, alone = (task.gradient(models, local, ids, 4, 0)[0] for task in engines)
    np.testing.assert_allclose(many, alone, rtol=1e-4, atol=1e-7)
    for key, values in engines[0].measure(models, local).items():
        np.testing.assert_allclose(values, engines[1].measure(models, local)[key], rtol=1e-5)
    np.testing.assert_allclose(
        engines[0].full_gradient(models, local), engines[1].full_gradient(models, local), atol=1e-6
    )
