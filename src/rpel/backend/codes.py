"""What models become on their way, many rows at once; `rpel.wire` says what is meant."""

import numpy as np
from numpy.typing import NDArray

from rpel.backend.cache import compiled
from rpel.types import Models


@compiled
def through_int8(x: Models, bits: NDArray[np.int32], out: Models) -> None:
    """decode(encode(row)) of every row, a block at a time; ``bits`` are those of x, whose order is that of |x|."""
    d = x.shape[1]
    for i in range(len(x)):
        largest = np.int32(0)
        for left in range(0, d, 256):
            right = min(d, left + 256)
            most = np.int32(0)
            for c in range(left, right):
                most = max(most, bits[i, c] & np.int32(0x7FFFFFFF))
            largest = max(largest, most)
            scale = np.float32(0)
            for c in range(left, right):
                if bits[i, c] & np.int32(0x7FFFFFFF) == most:
                    scale = abs(x[i, c]) / np.float32(127)
                    break
            if scale < np.float32(2.0**-126):
                for c in range(left, right):
                    out[i, c] = 0
            else:
                for c in range(left, right):
                    out[i, c] = (np.rint(x[i, c] / scale) + np.float32(0)) * scale  # no negative zero
        if largest >= np.int32(0x7F800000):  # something is not finite
            for c in range(d):
                out[i, c] = np.nan


@compiled
def through_bfloat16(x: Models, bits: NDArray[np.int32], out: NDArray[np.int32]) -> None:
    """The same; ``out`` are the bits of the result."""
    d = x.shape[1]
    for i in range(len(x)):
        largest = np.int32(0)
        for c in range(d):
            even = (bits[i, c] >> np.int32(16)) & np.int32(1)
            rounded = (bits[i, c] + np.int32(0x7FFF) + even) & np.int32(-65536)
            largest = max(largest, max(rounded & np.int32(0x7FFFFFFF), bits[i, c] & np.int32(0x7FFFFFFF)))
            out[i, c] = rounded
        if largest >= np.int32(0x7F800000):
            for c in range(d):
                out[i, c] = np.int32(0x7FC00000)
