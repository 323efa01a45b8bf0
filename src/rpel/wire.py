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

from rpel.types import Floats, Models, WireName

BLOCK = 256
_CHUNK = 256 * BLOCK  # parameters that are coded at once, so that they stay in the cache
_AT_ONCE = 1 << 22  # numbers that a device codes at once
_LEAST = np.float32(2.0**-126)


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
            part = np.asarray(x[some], np.float32)
            codes, scales = _int8(part)
            at = d + 4 * (begin // BLOCK)
            message[some] = codes.view(np.uint8)
            message[at : at + 4 * len(scales)] = scales.astype("<f4").view(np.uint8)
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
        """Decode an int8 message into ``out`` (d,), at whose own beginning it may lie:
        the last come first.

        Nothing but a few blocks is ever held twice, so that a model needs no more memory than its row.
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

    def through(self, x: Models, out: Models) -> NDArray[np.bool_] | None:
        """Write what models (n, d) become on their way into ``out`` (n, d), which may be x.

        Returns (n,) which of them are finite there, or None where nobody has looked.
        """
        if self.name == "float32":
            if out is not x:
                out[:] = x
            return None
        if not isinstance(x, np.ndarray):
            from rpel.backend.torch import through

            step = max(1, _AT_ONCE // x.shape[1])
            for begin in range(0, len(x), step):  # nothing of the table's size is made
                through(x[begin : begin + step], out[begin : begin + step], BLOCK)
            return None
        from rpel.backend import codes, pool  # the planner asks for sizes and needs no numba

        narrow = np.ascontiguousarray(x, np.float32)
        bits = narrow.view(np.int32)
        room = out if out.dtype == np.float32 else np.empty_like(narrow)
        finite = np.empty(len(x), np.bool_)

        def some(begin: int, end: int) -> None:
            rows = slice(begin, end)
            codes.through_int8(narrow[rows], bits[rows], room[rows], finite[rows])

        pool.run(some, len(x), small=x.size < 1 << 16)
        if room is not out:
            out[:] = room
        return finite


def _int8(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    d, blocks = len(x), -(-len(x) // BLOCK)
    padded = np.zeros(blocks * BLOCK, np.float32)
    padded[:d] = x
    table = padded.reshape(blocks, BLOCK)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scale = np.abs(table).max(axis=1) / np.float32(127)
        scale[scale < _LEAST] = 0
        codes = np.rint(table / np.where(scale == 0, np.float32(1), scale)[:, None])
    codes[(scale == 0) | ~np.isfinite(table).all(axis=1)] = 0
    scale[~np.isfinite(table).all(axis=1)] = np.nan
    return codes.reshape(-1)[:d].astype(np.int8), scale.astype(np.float32)
