"""The codes of a pulled model: messages decode to the bit, and the simulator's shortcut equals them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rpel.types import WireName
from rpel.wire import Wire

NAMES: tuple[WireName, ...] = ("float32", "int8")
Array = NDArray[Any]


def drawn(seed: int, d: int) -> Array:
    """Models of every size of number: huge, tiny, zero blocks, and some not finite."""
    source = np.random.default_rng(seed)
    scales = 10.0 ** source.integers(-44, 38, size=(3, -(-d // 100)))
    x = (source.standard_normal((3, d)) * np.repeat(scales, 100, axis=1)[:, :d]).astype(np.float32)
    x[0, : min(d, 300)] = 0
    if seed % 3 == 0:
        x[1, source.integers(d)] = source.choice([np.nan, np.inf, -np.inf])
    return x


@given(st.sampled_from(NAMES), st.integers(0, 1000), st.integers(1, 700))
def test_decoded_model_equals_its_message(name: WireName, seed: int, d: int) -> None:
    x, wire = drawn(seed, d), Wire(name)
    out = np.empty_like(x)
    wire.through(x, out)
    for row, received in zip(x, out, strict=True):
        message = wire.encode(row)
        assert len(message) == wire.nbytes(d)
        np.testing.assert_array_equal(received.view(np.uint32), wire.decode(message, d).view(np.uint32))


@given(st.integers(0, 1000), st.integers(1, 700))
def test_int8_is_within_half_a_step_of_each_block(seed: int, d: int) -> None:
    x = drawn(3 * seed + 1, d)[2]
    received = Wire("int8").decode(Wire("int8").encode(x), d)
    for left in range(0, d, 256):
        block = x[left : left + 256]
        assert (
            np.abs(received[left : left + 256] - block).max()
            <= np.abs(block).max() / 127 * 0.5001 + 2.0**-119
        )


def test_message_that_is_none_is_a_model_without_a_finite_number() -> None:
    wire, good = Wire("int8"), bytearray(Wire("int8").encode(np.ones(300, np.float32)))
    assert np.isfinite(wire.decode(bytes(good), 300)).all()
    for at, value in ((0, b"\x80"), (300, np.float32(np.inf).tobytes()), (304, np.float32(-1).tobytes())):
        bad = bytes(good[:at] + value + good[at + len(value) :])
        assert np.isnan(wire.decode(bad, 300)).all()
    with pytest.raises(ValueError, match=r"300 parameters.*308 bytes.*307"):
        wire.decode(bytes(good[:-1]), 300)


def test_ties_round_to_even_and_the_last_block_is_shorter() -> None:
    x = np.zeros(258, np.float32)
    x[:4] = [127.0, 0.5, 1.5, 2.5]
    x[256:] = [254.0, 3.0]
    codes = np.frombuffer(Wire("int8").encode(x), np.int8, 258)
    assert codes[:4].tolist() == [127, 0, 2, 2]
    assert codes[256:].tolist() == [127, 2]
