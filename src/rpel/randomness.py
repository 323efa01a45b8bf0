"""The only source of randomness: every random number comes from (seed, purpose, round, node).

Laws: equal coordinates give equal numbers whatever was drawn before, so any round replays alone and a resumed run draws
what it would have drawn; different coordinates never share a number, because the purpose chooses the key of a
counter-based generator (Philox) and round and node its counter.
"""

import hashlib
import json

import numpy as np
from numpy.random import Generator, Philox

Purpose = str | tuple[str, int]
"""What the numbers are for; a purpose may carry a number, as in ("batch", 2) for local step 2."""


def key(seed: int, purpose: Purpose) -> np.ndarray:
    """The generator's key, two unsigned 64-bit words: a hash of seed and purpose."""
    digest = hashlib.sha256(json.dumps([seed, purpose]).encode()).digest()
    return np.frombuffer(digest[:16], dtype="<u8")


def stream(seed: int, purpose: Purpose, round: int = 0, node: int = 0) -> Generator:
    """The generator of these coordinates, at its beginning.

    >>> a, b = stream(0, "pull", round=3, node=7), stream(0, "pull", round=3, node=7)
    >>> bool((a.random(5) == b.random(5)).all())
    True
    """
    return Generator(Philox(key=key(seed, purpose), counter=[0, 0, node, round]))
