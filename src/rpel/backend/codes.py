"""What models become on their way, many rows at once; `rpel.wire` says what is meant."""

import numpy as np
from numpy.typing import NDArray

from rpel.backend.cache import compiled
from rpel.types import Models


@compiled
def through_int8(x: Models, bits: NDArray[np.int32], out: Models, finite: NDArray[np.bool_]) -> None:
    """decode(encode(row)) of every row, a block at a time; ``bits`` are those of x,
    whose order is that of |x|.

    ``finite`` says of which rows something came; the others are NaN.
    """
    d, cell = x.shape[1], np.zeros(1, np.int32)
    number = cell.view(np.float32)
    for i in range(len(x)):
        largest = np.int32(0)
        for left in range(0, d, 256):
            right = min(d, left + 256)
            most = np.int32(0)
            for c in range(left, right):
                most = max(most, bits[i, c] & np.int32(0x7FFFFFFF))
            cell[0] = most
            scale = number[0] / np.float32(127)
            cell[0] = np.int32(0)
            number[0] = scale * np.float32(127)  # the largest that is decoded: it may overflow
            largest = max(largest, max(most, cell[0]))
            if scale < np.float32(2.0**-126):
                for c in range(left, right):
                    out[i, c] = 0
            else:
                for c in range(left, right):
                    out[i, c] = (np.rint(x[i, c] / scale) + np.float32(0)) * scale  # no negative zero
        finite[i] = largest < np.int32(0x7F800000)
        if not finite[i]:
            for c in range(d):
                out[i, c] = np.nan
