"""The paper's variation of CIFAR-10's training images, from given random numbers."""

import numpy as np
from numpy.typing import NDArray


def crop_flip(images: NDArray[np.uint8], uniform: NDArray[np.floating], padding: int = 4) -> NDArray[np.uint8]:
    """Random crops of the original size after padding with black, each mirrored with probability one half.

    images (N, C, H, W); uniform (N, 3) in [0, 1): row offset, column offset, mirror. Padding comes before
    normalisation, as in the published recipe, so it is black and not the mean colour.

    >>> image = np.arange(1, 5, dtype=np.uint8).reshape(1, 1, 2, 2)
    >>> crop_flip(image, np.array([[0.5, 0.5, 0.9]]), padding=1)[0, 0]
    array([[2, 1],
           [4, 3]], dtype=uint8)
    """
    n, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    top, left = ((uniform[:, k] * (2 * padding + 1)).astype(np.int64)[:, None] for k in (0, 1))
    rows = top + np.arange(height)
    columns = left + np.arange(width)
    columns = np.where(uniform[:, 2:] < 0.5, columns, columns[:, ::-1])
    picked: NDArray[np.uint8] = padded[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(picked.transpose(0, 3, 1, 2))
