"""What is asked of every data set, and random crops."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rpel.data import DataError, crop_flip, from_arrays


def test_crops_stay_inside_the_padded_image_and_mirror_half_of_them() -> None:
    rng = np.random.default_rng(3)
    images = rng.integers(1, 255, (64, 3, 32, 32), np.uint8)
    uniform = rng.random((64, 3))
    cropped = crop_flip(images, uniform)
    assert cropped.shape == images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    for i, (row, column, mirror) in enumerate(uniform):
        top, left = int(row * 9), int(column * 9)
        plain = padded[i, :, top : top + 32, left : left + 32]
        np.testing.assert_array_equal(cropped[i], plain if mirror < 0.5 else plain[:, :, ::-1])


def test_user_arrays_are_identified_by_content() -> None:
    x, y = np.random.default_rng(0).random((6, 1, 4, 4)), np.arange(6) % 3
    one, two = from_arrays((x, y), (x[:3], y[:3])), from_arrays((x + 1, y), (x[:3], y[:3]))
    assert one.classes == 3
    assert one.checksums["own/test"] == two.checksums["own/test"]
    assert one.checksums["own/train"] != two.checksums["own/train"]
    np.testing.assert_allclose(one.normalised(x), x, rtol=1e-6)


@pytest.mark.parametrize(
    "labels", [np.arange(5), np.array([0.5] * 6), np.array([-1] * 6), np.zeros((6, 1), int)]
)
def test_user_arrays_that_do_not_fit_are_refused(labels: NDArray[Any]) -> None:
    x = np.zeros((6, 1, 4, 4))
    with pytest.raises(DataError, match=r"train (has 6 examples and 5 targets|labels .*whole numbers)"):
        from_arrays((x, labels), (x, np.zeros(6, int)))
