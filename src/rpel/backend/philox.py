"""The stream of `rpel.randomness` on a device of torch: Philox 4 × 64, as NumPy has it, in whole numbers of
64 bits; and NumPy's normal numbers (a ziggurat of 256 layers, Marsaglia and Tsang, 2000) from it.

Invariant: nothing is read on the way, and shapes depend on sizes alone, so that a device is never waited for.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpel.types import Integers

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def philox(key: Any, rest: tuple[int, int, int], blocks: int, device: str = "cpu", before: Any = 0) -> Tensor:
    """(blocks, 4) words of 64 bits of Philox 4 × 64 with this key and the counter (1 …, *rest).

    before: how many blocks come before these, a number or one on the device. Words are int64 with the bits of
    unsigned ones.

    >>> import numpy as np
    >>> from numpy.random import Philox
    >>> key = np.array([3, 4], np.uint64)
    >>> numpys = Philox(key=key, counter=[0, 0, 0, 7]).random_raw(8).view(np.int64)
    >>> bool((philox(key, (0, 0, 7), 2).reshape(-1).numpy() == numpys).all())
    True
    """
    counter = torch.arange(1, blocks + 1, dtype=torch.int64, device=device) + before
    words = [counter, *(torch.full_like(counter, _signed(part)) for part in rest)]
    keys = [int(k) for k in key]
    for _ in range(10):
        high0, low0 = _product(words[0], _MULTIPLIERS[0])
        high1, low1 = _product(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ _signed(keys[0]), low1, high0 ^ words[3] ^ _signed(keys[1]), low0]
        keys = [(k + step) % 2**64 for k, step in zip(keys, _WEYL, strict=True)]
    return torch.stack(words, dim=1)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - 2**64 if word >= 2**63 else word


def shifted(x: Tensor, by: int) -> Tensor:
    """x >> by of the unsigned words."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """(upper, lower) words of unsigned products."""
    left, right = shifted(x, 32), x & _LOW
    above, below = factor >> 32, factor & _LOW
    first, second, third = right * below, right * above, left * below
    middle = shifted(first, 32) + (second & _LOW) + (third & _LOW)
    upper = left * above + shifted(second, 32) + shifted(third, 32) + shifted(middle, 32)
    return upper, x * _signed(factor)


# --- normal numbers -----------------------------------------------------------------------------------------

_R = 3.6541528853610088  # where the tail begins
_TRIES = 8  # of a number in the tail; a ninth is needed once in 10¹³ numbers
_LONGEST = 1 + 2 * _TRIES


@cache
def _layers(bits: int) -> tuple[NDArray[np.float64], Integers, NDArray[np.float64]]:
    """Of the ziggurat's 256 layers, for whole numbers of so many bits: what one of them is worth, below which
    one a number is sure to lie inside, and how high the layer is."""
    scale, x, edges = 2.0**bits, _R, [0.0] * 255 + [_R]
    area = _R * math.exp(-0.5 * _R * _R) + math.sqrt(math.pi / 2) * math.erfc(_R / math.sqrt(2))
    for i in range(254, 0, -1):
        x = edges[i] = math.sqrt(-2 * math.log(area / x + math.exp(-0.5 * x * x)))
    base = area / math.exp(-0.5 * _R * _R)
    sure = [int(_R / base * scale), 0, *(int(low / high * scale) for low, high in pairwise(edges[1:]))]
    widths, heights = np.array([base, *edges[1:]]) / scale, np.exp(-0.5 * np.square(edges))
    return widths, np.array(sure, np.int64), heights


class Normals:
    """NumPy's standard_normal from a fresh Philox generator with this key and counter (0, *rest),
    piece by piece.

    A number takes a word of the stream, 32 bits of it in float32 and 64 in float64, and one in seventy takes
    more. So every word is looked at as if a number began there,
    and which of them do is found by doubling steps.

    >>> import numpy as np
    >>> from numpy.random import Generator, Philox
    >>> key = np.array([3, 4], np.uint64)
    >>> numpys = Generator(Philox(key=key, counter=[0, 0, 0, 7])).standard_normal(5000)
    >>> made = Normals(key, (0, 0, 7), torch.float64, "cpu", torch.from_numpy)
    >>> bool(np.allclose(torch.cat([made.next(2000), made.next(3000)]).numpy(), numpys, rtol=1e-12))
    True
    """

    def __init__(
        self,
        key: Any,
        rest: tuple[int, int, int],
        kind: torch.dtype,
        device: str,
        lend: Callable[[Any], Tensor],
    ) -> None:
        """lend: something small from the host, on the device."""
        self.key, self.rest, self.kind, self.device = key, rest, kind, device
        self.narrow = kind == torch.float32
        widths, sure, heights = _layers(23 if self.narrow else 52)
        self.widths, self.sure, self.heights = lend(widths).to(kind), lend(sure), lend(heights).to(kind)
        self.used = torch.zeros((), dtype=torch.int64, device=device)  # words

    def next(self, size: int) -> Tensor:
        """(size,) the next numbers."""
        each, count = (8 if self.narrow else 4), size + size // 20 + 256
        blocks = -(-count // each) + 1
        words = philox(self.key, self.rest, blocks, self.device, before=self.used // each).reshape(-1)
        if self.narrow:
            words = torch.stack([words & _LOW, shifted(words, 32)], dim=1).reshape(-1)
        values, accepted, length = self._tried(words)
        starts, after = self._starts(self.used % each, length)
        chosen = accepted & starts
        rank = chosen.cumsum(0)
        wanted = chosen & (rank <= size)
        found = values.new_empty(size + 1)
        found.scatter_(0, torch.where(wanted, rank - 1, size), values)
        last = torch.where(wanted, after, 0).max()
        self.used = self.used - self.used % each + last
        return found[:size]

    def _tried(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of a number that would begin with each word: its value, whether it is accepted,
        how many words it takes."""
        layer, rest = words & 0xFF, shifted(words, 8)
        whole = shifted(rest, 1) & ((1 << (23 if self.narrow else 52)) - 1)
        x = whole.to(self.kind) * self.widths[layer]
        x = torch.where((rest & 1) == 1, -x, x)
        lost, scale = (8, 2.0**-24) if self.narrow else (11, 2.0**-53)
        part, sure = shifted(words, lost).to(self.kind) * scale, whole < self.sure[layer]
        above, below = self.heights[(layer - 1).clamp(min=0)], self.heights[layer]
        inside = ((above - below) * _ahead(part, 1) + below).double() < torch.exp(
            -0.5 * x.double() * x.double()
        )
        far = -torch.log1p(-part)
        beyond = far / _R
        taken = 2 * _ahead(far, 1) > beyond * beyond
        tail, length = torch.zeros_like(x), torch.full_like(words, _LONGEST)
        for k in reversed(range(_TRIES)):
            here = _ahead(taken, 1 + 2 * k)
            tail = torch.where(here, _ahead(beyond, 1 + 2 * k), tail)
            length = torch.where(here, 3 + 2 * k, length)
        tail = torch.where((shifted(whole, 8) & 1) == 1, -(_R + tail), _R + tail)
        first = layer == 0
        value = torch.where(sure | ~first, x, tail)
        return value, sure | first | inside, torch.where(sure, 1, torch.where(first, length, 2))

    def _starts(self, first: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Which words begin a number, or a try of one, if the first does; and where each would go on."""
        size, places = len(length), torch.arange(len(length), dtype=torch.int64, device=length.device)
        after = places + length
        step = torch.cat([after.clamp(max=size), after.new_full((1,), size)])
        reached = torch.zeros(size + 1, dtype=torch.int8, device=length.device)
        reached.scatter_(0, first[None], torch.ones_like(reached[:1]))
        for _ in range(size.bit_length()):
            reached = torch.maximum(
                reached, torch.zeros_like(reached).scatter_reduce_(0, step, reached, "amax")
            )
            step = step[step]
        return reached[:size].bool(), after


def _ahead(x: Tensor, by: int) -> Tensor:
    """x[i + by] at i; at the end, where nothing is used, it begins again."""
    return torch.roll(x, -by)
