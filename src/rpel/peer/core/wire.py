"""Encode models on the wire: safetensors bytes whose header every peer computes itself.

The module is pure: bytes in, bytes out, no sockets.

Invariants: every model of a network looks the same, so a body is accepted only if its length and its header
bytes are exactly the expected ones, and nothing of the header is ever parsed; value bytes go straight into
the row that waits for them, codes too (:mod:`rpel.wire`), so a reply can take no more memory than that row;
values are not judged here (a complete model that is not finite is an answer, and the rule's business).
What is hashed and signed is the body.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np

from rpel.text import shortened
from rpel.types import Models, WireName
from rpel.wire import BLOCK, Wire

DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LISTED = 40  # parameters that an error names


class Malformed(Exception):  # noqa: N818 (it is the reply that is wrong, not the program)
    """A reply that is not a model of this network; one sentence says why."""


@dataclass(frozen=True)
class Layout:
    """What every model of a network looks like: names and shapes in the vector's order, float32 or float64.

    >>> layout = Layout(("w", "b"), ((2, 3), (2,)), np.dtype("float32"))
    >>> layout.d, len(layout.header) % 8, layout.size - len(layout.header)
    (8, 0, 32)
    >>> layout.header[8:].rstrip()
    b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}}'
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]
    wire: WireName = "float32"
    """How half-steps travel; float32: as they are, float64 too."""

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise ValueError(f"models travel as float32 or float64, not as {self.dtype}")
        if len(set(self.names)) != len(self.names) or len(self.names) != len(self.shapes):
            raise ValueError(
                f"each parameter needs one name and one shape, not {self.names} and {self.shapes}"
            )
        if "__metadata__" in self.names:
            raise ValueError(
                "a parameter cannot be called '__metadata__': safetensors keeps that name for itself"
            )
        if self.d == 0:
            raise ValueError("a model needs at least one parameter")
        if self.values > self.d * self.dtype.itemsize:
            raise ValueError(
                f"a model of {self.d} parameter does not become smaller by wire {self.wire}: use float32"
            )

    @classmethod
    def of(cls, named: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Self:
        """The layout of named arrays or tensors, such as ``module.named_parameters()``, in their order.

        >>> Layout.of({"w": np.zeros((2, 3)), "b": np.zeros(2)}).d
        8
        """
        arrays = {
            name: _array(value) for name, value in (named.items() if isinstance(named, Mapping) else named)
        }
        dtypes = sorted({str(array.dtype) for array in arrays.values()})
        if len(dtypes) > 1:
            raise ValueError(f"the parameters of a model must have one type, not {' and '.join(dtypes)}")
        shapes = tuple(array.shape for array in arrays.values())
        return cls(tuple(arrays), shapes, np.dtype(dtypes[0] if dtypes else "float32"))

    @cached_property
    def d(self) -> int:
        """The number of values of a model."""
        return sum(math.prod(shape) for shape in self.shapes)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The beginning of each parameter in the vector, and the end of the last one."""
        return tuple(accumulate((math.prod(shape) for shape in self.shapes), initial=0))

    @cached_property
    def offsets(self) -> list[tuple[int, ...]]:
        """(first byte, byte after the last) of each parameter among the values."""
        width = self.dtype.itemsize
        return [(first * width, last * width) for first, last in pairwise(self.bounds)]

    @cached_property
    def header(self) -> bytes:
        """Return the bytes before the values: the JSON's length as 8 bytes, then the JSON.

        The JSON is padded to align the values.
        """
        kind, width = _NAMES[self.dtype], self.dtype.itemsize
        sizes = [width * (last - first) for first, last in pairwise(self.bounds)]
        return _header(
            [(n, kind, s, size) for n, s, size in zip(self.names, self.shapes, sizes, strict=True)]
        )

    @property
    def exact(self) -> "Layout":
        """The same models, travelling as they are: the common initial one does."""
        return replace(self, wire="float32")

    @cached_property
    def body_header(self) -> bytes:
        """The bytes before the values of a body; of a coded one, too, they make a safetensors file of it."""
        if self.wire == "float32":
            return self.header
        blocks = -(-self.d // BLOCK)
        return _header([("codes", "I8", (self.d,), self.d), ("scales", "F32", (blocks,), 4 * blocks)])

    @cached_property
    def values(self) -> int:
        """The bytes of a body behind its header."""
        return self.d * self.dtype.itemsize if self.wire == "float32" else Wire(self.wire).nbytes(self.d)

    @cached_property
    def size(self) -> int:
        """The length of a body in bytes: header and values."""
        return len(self.body_header) + self.values

    def body(self, flat: Models) -> tuple[bytes, memoryview]:
        """A half-step (d,) as it travels, header and values, without a copy where it is not coded."""
        values = raw(self, flat) if self.wire == "float32" else memoryview(Wire(self.wire).encode(flat))
        return self.body_header, values

    @cached_property
    def sha256(self) -> str:
        """The header's hash, by which peers know that they mean the same kind of model."""
        return hashlib.sha256(self.header).hexdigest()


def split(layout: Layout, flat: Models) -> dict[str, Models]:
    """The parameters by name, as views of the vector (d,).

    >>> parts = split(Layout(("w", "b"), ((1, 2), (1,)), np.dtype("float64")), np.array([1.0, 2.0, 3.0]))
    >>> parts["w"].tolist(), parts["b"].tolist()
    ([[1.0, 2.0]], [3.0])
    """
    _check_vector(layout, flat)
    pieces = zip(layout.names, layout.shapes, pairwise(layout.bounds), strict=True)
    return {name: flat[first:last].reshape(shape) for name, shape, (first, last) in pieces}


def flatten(layout: Layout, named: Mapping[str, Any], out: Models | None = None) -> Models:
    """The vector (d,) of arrays or tensors by name, into ``out`` if given; the inverse of :func:`split`.

    >>> layout = Layout(("w", "b"), ((1, 2), (1,)), np.dtype("float64"))
    >>> flatten(layout, {"b": np.array([3.0]), "w": np.array([[1.0, 2.0]])}).tolist()
    [1.0, 2.0, 3.0]
    """
    arrays = {name: _array(value) for name, value in named.items()}
    check_layout(layout, {name: array.shape for name, array in arrays.items()}, "the model given")
    flat = np.empty(layout.d, layout.dtype) if out is None else out
    for name, part in split(layout, flat).items():
        if arrays[name].dtype != part.dtype:
            raise ValueError(f"parameter {name!r} is {arrays[name].dtype}, expected {part.dtype}")
        part[...] = arrays[name]
    return flat


class Reordering:
    """Convert between the vector of a network's models and one with the parameters in another order.

    The parameters are the same by name and shape.

    >>> layout = Layout(("b", "w"), ((1,), (1, 2)), np.dtype("float64"))
    >>> order = Reordering(layout, {"w": (1, 2), "b": (1,)}, "task 'clinic:task'")
    >>> order.same, order.inwards(np.array([3.0, 1.0, 2.0]), np.empty(3)).tolist()
    (False, [1.0, 2.0, 3.0])
    >>> order.outwards(np.array([1.0, 2.0, 3.0]), np.empty(3)).tolist()
    [3.0, 1.0, 2.0]
    """

    def __init__(self, layout: Layout, shapes: Mapping[str, tuple[int, ...]], whose: str) -> None:
        """``whose`` shapes they are, for the sentence that refuses those that do not match."""
        own = {name: tuple(shape) for name, shape in shapes.items()}
        check_layout(layout, own, whose)
        self.same = tuple(own) == layout.names
        theirs = dict(zip(layout.names, pairwise(layout.bounds), strict=True))
        ends = accumulate((math.prod(shape) for shape in own.values()), initial=0)
        self._pieces = [
            (slice(*theirs[name]), slice(*mine)) for name, mine in zip(own, pairwise(ends), strict=True)
        ]

    def inwards(self, network: Models, out: Models) -> Models:
        """A vector of the network in the own order, into ``out``, which must not share its memory."""
        for theirs, mine in self._pieces:
            out[mine] = network[theirs]
        return out

    def outwards(self, own: Models, out: Models) -> Models:
        """A vector in the own order as the network has it, into ``out``, which must not share its memory."""
        for theirs, mine in self._pieces:
            out[theirs] = own[mine]
        return out


def check_layout(layout: Layout, shapes: Mapping[str, tuple[int, ...]], whose: str) -> None:
    """Refuse a layout whose names or shapes are not those of the network's models, in whatever order.

    >>> check_layout(Layout(("w",), ((3,),), np.dtype("float32")), {"w": (2,), "b": (1,)}, "task 't:t'")
    Traceback (most recent call last):
    ValueError: task 't:t' has the parameters w (2,), b (1,), but this network's models have w (3,)
    """
    expected = dict(zip(layout.names, layout.shapes, strict=True))
    if dict(shapes) != expected:
        own, network = _listed(shapes, expected), _listed(expected, shapes)
        raise ValueError(f"{whose} has the parameters {own}, but this network's models have {network}")


def _listed(shapes: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]) -> str:
    """Names and shapes, those that the other does not have first."""
    ordered = sorted(shapes.items(), key=lambda entry: other.get(entry[0]) == entry[1])
    return shortened([f"{name} {shape}" for name, shape in ordered], most=_LISTED)


def raw(layout: Layout, flat: Models) -> memoryview:
    """The values' bytes, without a copy.

    >>> len(raw(Layout(("w",), ((3,),), np.dtype("float32")), np.zeros(3, "float32")))
    12
    """
    _check_vector(layout, flat)
    if not flat.flags.c_contiguous:
        raise ValueError("a model's values must lie side by side in memory")
    return flat.data.cast("B")


def digest(layout: Layout, flat: Models) -> str:
    """The hash of a whole body, header and values.

    >>> digest(Layout(("w",), ((3,),), np.dtype("float32")), np.zeros(3, "float32"))[:12]
    '92d3d5190c09'
    """
    return digest_of(layout.body(flat))


def digest_of(parts: Iterable[bytes | memoryview]) -> str:
    """The hash of a body in parts."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part)
    return sha256.hexdigest()


Tensor = tuple[str, str, tuple[int, ...], int]
"""Name, type, shape and how many bytes."""


def _header(entries: list[Tensor]) -> bytes:
    """The beginning of a safetensors file with these tensors."""
    ends = accumulate((size for *_, size in entries), initial=0)
    text = json.dumps(
        {
            name: {"dtype": kind, "shape": shape, "data_offsets": offsets}
            for (name, kind, shape, _), offsets in zip(entries, pairwise(ends), strict=True)
        },
        separators=(",", ":"),
    ).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Reception:
    """Receive one reply into a row: ``head`` once, ``feed`` as bytes come, ``close`` at their end.

    ``close`` decodes the reply. Each of the three raises Malformed as soon as the reply cannot be a model of
    this network in the wanted round; the content of the row is then undefined. ``missing`` is the number of
    bytes still expected: no more need be read.

    >>> layout, row = Layout(("w",), ((2,),), np.dtype("float32")), np.zeros(2, "float32")
    >>> reply = Reception(layout, row, round=7)
    >>> headers = {"Content-Length": str(layout.size), "Content-Type": "application/octet-stream",
    ...     "RPEL-Round": "7"}
    >>> reply.head(200, headers)
    >>> reply.feed(layout.header + np.array([1, 2], "float32").tobytes())
    >>> reply.close()
    >>> row.tolist(), reply.missing
    ([1.0, 2.0], 0)
    """

    def __init__(self, layout: Layout, row: Models, round: int, hashed: bool = False) -> None:
        """``hashed``: work out the :attr:`digest` as the bytes come."""
        if not row.flags.writeable:
            raise ValueError("a reply needs a row that can be written to")
        self._layout, self._row, self._values, self._round = layout, row, raw(layout, row), round
        self._received, self._header = 0, bytearray(len(layout.body_header))
        self._open = False
        self._hash = hashlib.sha256() if hashed else None

    @property
    def digest(self) -> bytes:
        """The hash of the whole body, once it is there."""
        assert self._hash is not None, "asked for with hashed"
        return self._hash.digest()

    @property
    def missing(self) -> int:
        """Bytes still expected."""
        return self._layout.size - self._received

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Judge status and headers; a header that counts may stand there only once."""
        if status != 200:
            raise Malformed(f"status {status} instead of 200")
        pairs = [(name.lower(), value) for name, value in headers.items()]
        for name in ("content-encoding", "transfer-encoding"):
            if any(name == other for other, _ in pairs):
                raise Malformed(f"a reply must not have the header {name}")
        expected = {
            "content-length": str(self._layout.size),
            "content-type": "application/octet-stream",
            "rpel-round": str(self._round),
        }
        for name, wanted in expected.items():
            values = [value for other, value in pairs if other == name]
            if values != [wanted]:
                raise Malformed(f"{name} is {', '.join(values)[:80] or 'missing'} instead of {wanted}")
        self._open = True

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes: those of the header are compared, those of the values go into the row."""
        if not self._open:
            raise Malformed("bytes without an accepted head")
        part = memoryview(data).cast("B")
        if len(part) > self.missing:
            self._broken(f"more than the {self._layout.size} bytes of a model")
        while part:
            space = self.space()[: len(part)]
            space[:], part = part[: len(space)], part[len(space) :]
            self.took(len(space))

    def space(self) -> memoryview:
        """Return the buffer for the next bytes: the rest of the header, or of the row."""
        header = len(self._header)
        if self._received < header:
            return memoryview(self._header)[self._received :]
        return self._values[self._received - header : self._layout.values]

    def took(self, count: int) -> None:
        """Note that ``count`` bytes were written to :meth:`space`."""
        begin, header = self._received, self._layout.body_header
        self._received += count
        part: bytearray | memoryview
        if begin < len(header):
            part = self._header[begin : self._received]
            if part != header[begin : self._received]:
                self._broken("the header is not that of this network's models")
        else:
            part = self._values[begin - len(header) : self._received - len(header)]
        if self._hash is not None:
            self._hash.update(part)

    def close(self) -> None:
        """The reply has ended: was it all of a model?"""
        if not self._open or self.missing:
            raise Malformed(f"the reply ended {self.missing} bytes short")
        self._open = False
        if self._layout.wire != "float32":
            Wire(self._layout.wire).unpack(self._values[: self._layout.values], self._row)

    def _broken(self, why: str) -> None:
        self._open = False
        raise Malformed(why)


def _array(value: Any) -> Models:
    """An array as it is, a tensor as the array that shares its memory."""
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def _check_vector(layout: Layout, flat: Models) -> None:
    if flat.shape != (layout.d,) or flat.dtype != layout.dtype:
        raise ValueError(f"a model is {layout.dtype}[{layout.d}] here, not {flat.dtype}{list(flat.shape)}")
