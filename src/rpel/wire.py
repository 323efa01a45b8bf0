"""What a pulled model is made of: float32 as it is, or int8 in blocks with a scale each.

    int8: blocks of 256 consecutive parameters; scale = max|x| / 127 in float32, 0 where it is below 2⁻¹²⁶;
    code = x / scale, rounded half to even, in −127 … 127; decoded = code · scale.
    A message is d code bytes, then the scales as little-endian float32: d + 4⌈d/256⌉ bytes.

Everybody decodes alike, to the bit: one IEEE division, one multiplication, nothing contracted. A block with a
non-finite entry has the scale NaN. What is not a message (a scale that is negative, NaN or infinite, a code
of −128, a decoded value that is not finite) makes the whole model non-finite,
which rules count as one of the b̂.

`Wire.through` is what a model becomes on its way: the simulator's shortcut, equal to decoding its message.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpel.backend.arrays import namespace, on_host, zeros
from rpel.types import Floats, Models, WireName

BLOCK = 256
_CHUNK = 256 * BLOCK  # parameters that are coded at once, so that they stay in the cache
_DEVICE_CHUNK = 1 << 22
_LEAST = 2.0**-126  # the smallest scale


@dataclass(frozen=True)
class Wire:
    """A code by its name.

    >>> int8 = Wire("int8")
    >>> x = np.array([[0.5, -1.0, 0.25]], np.float32)
    >>> int8.decode(int8.encode(x[0]), 3).round(3), int8.nbytes(1000)
    (array([ 0.504, -1.   ,  0.252], dtype=float32), 1016)
    """

    name: WireName = "float32"

    def nbytes(self, d: int) -> int:
        """The bytes of a message with d parameters."""
        return 4 * d if self.name == "float32" else d + 4 * -(-d // BLOCK)

    def encode(self, x: Floats) -> bytes:
        """The message of a model (d,)."""
        if self.name == "float32":
            return np.asarray(x, "<f4").tobytes()
        d, message = len(x), np.empty(self.nbytes(len(x)), np.uint8)
        for begin in range(0, d, _CHUNK):
            some = slice(begin, min(d, begin + _CHUNK))
            _, codes, scales = _quantise(np.asarray(x[None, some]))
            unspoilt = np.isfinite(scales) & (scales > 0)
            at = d + 4 * (begin // BLOCK)
            message[some] = (
                np.where(unspoilt, codes, 0).reshape(-1)[: some.stop - begin].astype(np.int8).view(np.uint8)
            )
            message[at : at + 4 * scales.size] = (
                np.where(np.isfinite(scales), scales, np.nan).astype("<f4").reshape(-1).view(np.uint8)
            )
        return message.tobytes()

    def decode(self, message: bytes, d: int) -> NDArray[np.float32]:
        """The model (d,) of a message; all NaN where it is not one. ValueError for another length."""
        if len(message) != self.nbytes(d):
            raise ValueError(
                f"a {self.name} message of {d} parameters has {self.nbytes(d)} bytes, not {len(message)}"
            )
        if self.name == "float32":
            return np.frombuffer(message, "<f4").astype(np.float32)
        out = np.empty(d, np.float32)
        self.unpack(message, out)
        return out

    def unpack(self, message: bytes | memoryview, out: Models) -> None:
        """Decode an int8 message into ``out`` (d,).

        The message may lie at the beginning of ``out`` itself, because the last values are decoded first.

        Only a few blocks are ever held twice, so a model needs no more memory than its row.
        """
        d, raw = len(out), np.frombuffer(message, np.uint8)
        scales = raw[d:].copy().view("<f4")
        sound = bool(np.isfinite(scales).all() and (scales >= 0).all())
        for begin in reversed(range(0, d, _CHUNK)):
            some = slice(begin, min(d, begin + _CHUNK))
            codes = raw[some].view(np.int8)
            sound &= bool((codes != -128).all())
            with np.errstate(over="ignore", invalid="ignore"):
                each = np.repeat(scales[begin // BLOCK : -(-some.stop // BLOCK)], BLOCK)
                values = codes.astype(np.float32) * each[: len(codes)]
            sound &= bool(np.isfinite(values).all())
            out[some] = values
        if not sound:
            out.fill(np.nan)

    def through(self, x: Models, out: Models) -> None:
        """Write what models (n, d) become on their way into ``out`` (n, d), which may be x."""
        if self.name == "float32":
            if out is not x:
                out[:] = x
            return
        step = max(1, (_CHUNK if on_host(x) else _DEVICE_CHUNK) // x.shape[1])

        def work(begin: int, end: int) -> None:
            for first in range(begin * step, min(end * step, len(x)), step):
                rows = slice(first, first + step)
                out[rows] = _round_trip(x[rows])

        units = -(-len(x) // step)
        if on_host(x):
            from rpel.backend import threads  # the planner asks for sizes and needs no threads

            threads.run(work, units, small=x.shape[0] * x.shape[1] < 1 << 16)
        else:
            work(0, units)


def _round_trip(x: Models) -> Models:
    """decode(encode(row)) of each row (n, d), in float32; NaN all along where the code cannot say it."""
    narrow, codes, scale = _quantise(x)
    xp, (n, d) = namespace(narrow), narrow.shape
    with np.errstate(invalid="ignore", over="ignore"):
        decoded = (xp.where(scale == 0, 0.0, codes) + 0.0) * scale  # no negative zero
    decoded = xp.reshape(decoded, (n, -1))[:, :d]
    finite = xp.all(xp.isfinite(decoded) & xp.isfinite(narrow), axis=1, keepdims=True)
    result: Models = xp.where(finite, decoded, xp.nan)
    return result


def _quantise(x: Models) -> tuple[Models, Models, Models]:
    """x (n, d) in float32, its codes (n, blocks, BLOCK) as floats, and its scales (n, blocks, 1)."""
    xp, (n, d) = namespace(x), x.shape
    narrow = xp.astype(x, xp.float32, copy=False)
    padded = zeros((n, -(-d // BLOCK) * BLOCK), narrow)
    padded[:, :d] = narrow
    table = xp.reshape(padded, (n, -1, BLOCK))
    with np.errstate(invalid="ignore", over="ignore"):
        scale = xp.max(xp.abs(table), axis=2, keepdims=True) / 127
        scale = xp.where(scale < _LEAST, 0.0, scale)
        codes = xp.round(table / xp.where(scale == 0, 1.0, scale))
    return narrow, codes, scale
