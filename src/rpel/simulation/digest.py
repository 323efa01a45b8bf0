"""What identifies an object that the user handed over: a network, a loss, arrays. Equal digests mean equal behaviour.

Law: when in doubt, differ. A digest covers the code as far as it can be read, every value inside, and what a function
has captured; an object that cannot be described for good counts as new in each process.
"""

import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn


def digest(thing: Any) -> str:
    """SHA-256 of all that :func:`parts` says about a thing.

    >>> scaled = lambda factor: lambda output, target: factor * output
    >>> digest(scaled(2)) == digest(scaled(2)), digest(scaled(2)) == digest(scaled(3))
    (True, False)
    """
    found = hashlib.sha256()
    for part in parts(thing):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def parts(thing: Any) -> Iterator[bytes]:
    """The description of a thing, piece by piece."""
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu().contiguous().numpy()
    if isinstance(thing, np.ndarray):
        yield f"{thing.dtype} {thing.shape}".encode()
        yield np.ascontiguousarray(thing).tobytes()
    elif isinstance(thing, nn.Module):
        yield from _module(thing)
    elif isinstance(thing, functools.partial):
        yield from _each(thing.func, thing.args, thing.keywords)
    elif isinstance(thing, MethodType):
        yield from _each(thing.__func__, thing.__self__)
    elif isinstance(thing, FunctionType):
        yield f"{thing.__module__}.{thing.__qualname__}".encode()
        yield _source(thing) or thing.__code__.co_code
        yield from _each(thing.__defaults__, thing.__kwdefaults__, *(c.cell_contents for c in thing.__closure__ or ()))
    elif isinstance(thing, Mapping):
        yield from _each(*(pair for item in thing.items() for pair in item))
    elif isinstance(thing, tuple | list):
        yield from _each(*thing)
    elif isinstance(thing, type):
        yield str(thing).encode() + _source(thing)
    elif callable(thing) and hasattr(thing, "__dict__"):
        yield from _each(type(thing), vars(thing))
    else:
        yield repr(thing).encode()


def _each(*things: Any) -> Iterator[bytes]:
    for thing in things:
        yield digest(thing).encode()


def _module(module: nn.Module) -> Iterator[bytes]:
    """Structure, code, plain attributes and every value of a network."""
    yield repr(module).encode()
    for name, part in module.named_modules():
        own = {key: value for key, value in vars(part).items() if not key.startswith("_") and key != "training"}
        yield from _each(name, type(part), own)
    for name, value in module.state_dict().items():
        yield from _each(name, value)


def _source(thing: Any) -> bytes:
    """The source where it can be read and is not torch's own."""
    if str(getattr(thing, "__module__", "")).startswith("torch."):
        return b""
    try:
        return inspect.getsource(thing).encode()
    except (OSError, TypeError):
        return b""
