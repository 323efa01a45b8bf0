"""The stream of `rpel.randomness` on a device of torch: Philox 4 × 64, as NumPy has it, in whole numbers of 64 bits."""

from typing import Any

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def philox(key: Any, rest: tuple[int, int, int], blocks: int, device: str = "cpu") -> Tensor:
    """(blocks, 4) words of 64 bits, the first of Philox 4 × 64 with this key and the counter (1 …, *rest).

    Words are int64 with the bits of unsigned ones.

    >>> import numpy as np
    >>> from numpy.random import Philox
    >>> key = np.array([3, 4], np.uint64)
    >>> numpys = Philox(key=key, counter=[0, 0, 0, 7]).random_raw(8).view(np.int64)
    >>> bool((philox(key, (0, 0, 7), 2).reshape(-1).numpy() == numpys).all())
    True
    """
    counter = torch.arange(1, blocks + 1, dtype=torch.int64, device=device)
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
