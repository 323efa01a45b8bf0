"""The wire: what is sent is what safetensors reads,
and nothing is taken in but a whole model of this network."""

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterable
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from rpel import models
from rpel.peer.core import wire
from rpel.peer.core.wire import Layout, Malformed, Reception
from rpel.peer.net import http
from rpel.peer.state import models as model_files
from rpel.types import Models, WireName
from rpel.wire import Wire

LAYOUT = Layout(("w", "b"), ((5, 3), (5,)), np.dtype("float32"))
VALUES = np.arange(20, dtype="float32") - 7.5
ROUND = 41


def body(layout: Layout = LAYOUT, flat: Models = VALUES) -> bytes:
    return layout.header + flat.tobytes()


def headers(**changes: str) -> dict[str, str]:
    """The right headers, with some changed: underscores stand for hyphens."""
    right = {
        "Content-Length": str(LAYOUT.size),
        "Content-Type": "application/octet-stream",
        "RPEL-Round": str(ROUND),
    }
    return right | {name.replace("_", "-"): value for name, value in changes.items()}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    names = draw(
        st.lists(
            st.text(min_size=1).filter(lambda n: n != "__metadata__"), min_size=1, max_size=5, unique=True
        )
    )
    shapes = [tuple(draw(st.lists(st.integers(1, 4), max_size=3))) for _ in names]
    return Layout(tuple(names), tuple(shapes), np.dtype(draw(st.sampled_from(["float32", "float64"]))))


def some_values(layout: Layout, seed: int = 0) -> Models:
    return np.random.default_rng(seed).normal(size=layout.d).astype(layout.dtype)


# --- what a model looks like --------------------------------------------------------------------------------


@given(layouts(), st.integers(0, 99))
def test_body_is_what_the_safetensors_library_reads(layout: Layout, seed: int) -> None:
    flat = some_values(layout, seed)
    read = safetensors.numpy.load(body(layout, flat))
    assert read.keys() == set(layout.names)
    for name, part in wire.split(layout, flat).items():
        assert read[name].dtype == layout.dtype
        np.testing.assert_array_equal(read[name], part)
    assert len(body(layout, flat)) == layout.size
    assert len(layout.header) % 8 == 0
    assert b"__metadata__" not in layout.header


@given(layouts())
def test_split_and_flatten_are_inverse_and_split_copies_nothing(layout: Layout) -> None:
    flat = some_values(layout)
    parts = wire.split(layout, flat)
    assert all(np.shares_memory(part, flat) for part in parts.values())
    out = np.empty_like(flat)
    assert wire.flatten(layout, dict(reversed(parts.items())), out) is out
    np.testing.assert_array_equal(out, flat)


@given(layouts())
def test_files_of_the_library_and_ours_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout
) -> None:
    folder, flat = tmp_path_factory.mktemp("wire"), some_values(layout)
    model_files.save(folder / "ours", layout, flat)
    again, values = model_files.load(folder / "ours")
    assert again == layout
    np.testing.assert_array_equal(values, flat)
    safetensors.numpy.save_file(wire.split(layout, flat), folder / "theirs", metadata={"format": "np"})
    theirs, values = model_files.load(folder / "theirs")
    assert model_files.read_layout(folder / "theirs") == theirs
    assert dict(zip(theirs.names, theirs.shapes, strict=True)) == dict(
        zip(layout.names, layout.shapes, strict=True)
    )
    for name, part in wire.split(theirs, values).items():
        np.testing.assert_array_equal(part, wire.split(layout, flat)[name])


def test_torch_module_has_the_layout_of_its_parameters_in_their_order() -> None:
    module = models.model("cifar10")
    layout = Layout.of(module.named_parameters())
    # no buffers of BatchNorm
    assert dict(zip(layout.names, layout.shapes, strict=True)) == models.shapes(module)
    flat = wire.flatten(layout, dict(module.named_parameters()))
    assert torch.equal(torch.from_numpy(flat), models.flatten(module))


def test_hash_changes_with_every_part_of_the_layout() -> None:
    others = [
        Layout(("w", "c"), LAYOUT.shapes, LAYOUT.dtype),
        Layout(LAYOUT.names, ((3, 5), (5,)), LAYOUT.dtype),
        Layout(LAYOUT.names, LAYOUT.shapes, np.dtype("float64")),
        Layout(("b", "w"), ((5,), (5, 3)), LAYOUT.dtype),
    ]
    assert len({layout.sha256 for layout in [LAYOUT, *others]}) == 5


def test_digest_covers_header_and_every_value() -> None:
    seen = {wire.digest(LAYOUT, VALUES), wire.digest(Layout(("x",), ((20,),), LAYOUT.dtype), VALUES)}
    for i in range(LAYOUT.d):
        other = VALUES.copy()
        other[i] = np.nextafter(other[i], np.float32(np.inf))
        seen.add(wire.digest(LAYOUT, other))
    assert len(seen) == LAYOUT.d + 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout.of({"w": np.zeros(3, "float16")}), "float16"),
        (lambda: Layout.of({"w": np.zeros(3, "float32"), "n": np.zeros((), "int64")}), "float32 and int64"),
        (lambda: Layout.of({}), "at least one"),
        (lambda: Layout.of({"__metadata__": np.zeros(3)}), "__metadata__"),
        (lambda: Layout(("w", "w"), ((1,), (1,)), np.dtype("float32")), "one name"),
        (
            lambda: wire.flatten(LAYOUT, {"w": VALUES[:15].reshape(5, 3)}),
            "has the parameters w (5, 3), but",
        ),
        (
            lambda: wire.flatten(LAYOUT, {**wire.split(LAYOUT, VALUES), "c": VALUES}),
            "has the parameters c (20,), w",
        ),
        (
            lambda: wire.flatten(LAYOUT, {"w": VALUES[:15].reshape(3, 5), "b": VALUES[15:]}),
            "models have w (5, 3), b",
        ),
        (lambda: wire.split(LAYOUT, VALUES.astype("float64")), "float64"),
        (lambda: wire.split(LAYOUT, VALUES[1:]), "[20]"),
        (lambda: wire.raw(LAYOUT, np.zeros(40, "float32")[::2]), "side by side"),
        (lambda: Reception(LAYOUT, np.frombuffer(VALUES.tobytes(), "float32"), ROUND), "written to"),
    ],
)
def test_bytes_that_are_no_model_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def with_header(text: bytes, values: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + values


ENTRY = {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}
BAD_FILES = {
    "empty": b"",
    "a header of a terabyte": struct.pack("<Q", 2**40) + b"{}",
    "no JSON": with_header(b"{nonsense"),
    "nested": with_header(b"[" * 50_000),
    "a list": with_header(b"[1, 2]"),
    "nothing in it": with_header(b"{}"),
    "no shape": with_header(b'{"w":{"dtype":"F32"}}'),
    "half precision": with_header(json.dumps({"w": ENTRY | {"dtype": "BF16"}}).encode(), bytes(20)),
    "mixed": with_header(json.dumps({"w": ENTRY, "n": ENTRY | {"dtype": "I64"}}).encode(), bytes(40)),
    "a shape of text": with_header(json.dumps({"w": ENTRY | {"shape": ["5"]}}).encode(), bytes(20)),
    "a negative shape": with_header(json.dumps({"w": ENTRY | {"shape": [-5]}}).encode(), bytes(20)),
    "claims a terabyte": with_header(
        json.dumps({"w": ENTRY | {"shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    ),
    "a hole": with_header(json.dumps({"w": ENTRY | {"data_offsets": [4, 24]}}).encode(), bytes(24)),
    "cut short": with_header(json.dumps({"w": ENTRY}).encode(), bytes(19)),
    "too long": with_header(json.dumps({"w": ENTRY}).encode(), bytes(21)),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_file_that_is_no_model_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD_FILES[kind])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        model_files.load(path)


# --- what is taken in ---------------------------------------------------------------------------------------


def receive(status: int, head: Any, data: bytes, cuts: list[int] | None = None) -> Models:
    """The row after a reply that came in pieces; Malformed if it was refused."""
    row = np.full(LAYOUT.d, np.nan, LAYOUT.dtype)
    reply = Reception(LAYOUT, row, ROUND)
    reply.head(status, head)
    edges = [0, *sorted(cuts or []), len(data)]
    for first, last in pairwise(edges):
        reply.feed(memoryview(data)[first:last])
    reply.close()
    assert reply.missing == 0
    return row


@given(st.lists(st.integers(0, LAYOUT.size), max_size=8))
def test_valid_reply_is_accepted_however_it_is_chunked(cuts: list[int]) -> None:
    np.testing.assert_array_equal(receive(200, headers(), body(), cuts), VALUES)


def test_what_is_read_from_a_socket_is_read_into_the_row() -> None:
    """No copy between: the rest of the row is the buffer that the event loop reads into."""
    row = np.zeros(LAYOUT.d, LAYOUT.dtype)
    reply = Reception(LAYOUT, row, ROUND)
    reply.head(200, headers())
    reply.feed(body()[: len(LAYOUT.header) + 5])
    space = reply.space()
    assert (len(space), np.may_share_memory(np.frombuffer(space, np.uint8), row)) == (row.nbytes - 5, True)
    space[:] = body()[-len(space) :]
    reply.took(len(space))
    reply.close()
    np.testing.assert_array_equal(row, VALUES)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
def test_complete_model_is_an_answer_even_if_not_finite(value: float) -> None:
    flat = np.full(LAYOUT.d, value, "float32")
    np.testing.assert_array_equal(receive(200, headers(), body(LAYOUT, flat)), flat)


@pytest.mark.parametrize(
    "head",
    [
        headers(Content_Length=str(LAYOUT.size + 1)),
        headers(Content_Length=str(LAYOUT.size - 1)),
        headers(Content_Length=str(2**40)),
        headers(Content_Length=f"+{LAYOUT.size}"),
        headers(Content_Length=f"0{LAYOUT.size}"),
        headers(Content_Length=f"{LAYOUT.size}.0"),
        headers(Content_Encoding="gzip"),
        headers(Content_Encoding="identity"),
        headers(Transfer_Encoding="chunked"),
        headers(Content_Type="text/html"),
        headers(Content_Type="application/octet-stream; charset=x"),
        headers(RPEL_Round=str(ROUND - 1)),
        headers(RPEL_Round=str(ROUND + 1)),
        headers(RPEL_Round=f"{ROUND}.0"),
        {name: value for name, value in headers().items() if name != "RPEL-Round"},
        {name: value for name, value in headers().items() if name != "Content-Length"},
        {name: value for name, value in headers().items() if name != "Content-Type"},
        CIMultiDict([*headers().items(), ("content-length", str(LAYOUT.size))]),
        CIMultiDict([*headers().items(), ("RPEL-Round", "40")]),
        {},
    ],
)
def test_head_that_is_not_exactly_right_is_refused_before_any_byte(head: Any) -> None:
    reply = Reception(LAYOUT, np.zeros(LAYOUT.d, LAYOUT.dtype), ROUND)
    with pytest.raises(Malformed):
        reply.head(200, head)
    with pytest.raises(Malformed):
        reply.feed(body())
    with pytest.raises(Malformed):
        reply.close()


@pytest.mark.parametrize("status", [100, 204, 206, 301, 302, 307, 308, 404, 409, 425, 500])
def test_only_status_200_carries_a_model(status: int) -> None:
    with pytest.raises(Malformed, match=str(status)):
        receive(status, headers(Location="https://elsewhere.example/"), body())


def test_header_names_are_the_same_in_any_case() -> None:
    head = {name.lower(): value for name, value in headers().items()}
    np.testing.assert_array_equal(receive(200, head, body()), VALUES)


# --- mutated replies ----------------------------------------------------------------------------------------


def test_receiving_takes_no_memory_beyond_the_row() -> None:
    layout = Layout(("w",), ((1 << 21,),), np.dtype("float32"))  # 8 MiB
    row, chunk = np.zeros(layout.d, layout.dtype), bytes(1 << 16)
    head = headers(Content_Length=str(layout.size))

    def stream(claim: str, chunks: Iterable[bytes]) -> None:
        reply = Reception(layout, row, ROUND)
        reply.head(200, head | {"Content-Length": claim})
        reply.feed(layout.header)
        for part in chunks:
            reply.feed(part)
        reply.close()

    tracemalloc.start()
    try:
        stream(str(layout.size), repeat(chunk, 4 * layout.d // len(chunk)))
        for claim in (str(2**40), str(layout.size)):  # a claim of 1 TB, and a stream without end
            with pytest.raises(Malformed):
                stream(claim, repeat(chunk))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 18


# --- heads --------------------------------------------------------------------------------------------------

REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nRPEL-Round: 7"
REQUEST = b"GET /v1/clock HTTP/1.1\r\nHost: a:7443"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\r\n", b"\n"),  # h11 takes a bare line feed
        (b"\r\n", b"\r"),
        (b": ", b" : "),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"HTTP/1.1", b"HTTP/1.1 "),
        (b"7", b"7\r\n folded"),
        (b"7", b"7\x00"),
        (b"7", b"7\xff"),
        (b"7", b"7" * 300),
        (b"7", b"7" + 17 * b"\r\nX: y"),
        (b"7", b"7\r\nContent-Length: 8\r\nContent-Length: 8"),  # h11 makes one of two that are the same
        (b"7", b"7\r\nTransfer-Encoding: gzip"),
    ],
)
def test_head_that_is_not_plain_is_refused_at_either_end(old: bytes, new: bytes) -> None:
    assert (http.parse_head(REPLY).status, http.parse_request(REQUEST).path) == (200, "/v1/clock")
    for parse, head in ((http.parse_head, REPLY), (http.parse_request, REQUEST)):
        with pytest.raises(Malformed):
            parse(head.replace(old, new, 1) if old != b"7" else new.join(head.rsplit(b"7", 1)))
    with pytest.raises(Malformed):
        http.parse_head(REPLY.replace(b"200", b"100"))  # an interim reply


# --- codes --------------------------------------------------------------------------------------------------


def coded(name: WireName, d: int, dtype: str = "float32") -> Layout:
    return Layout(("w", "b"), ((d - 1,), (1,)), np.dtype(dtype), name)


def received(layout: Layout, message: bytes, piece: int) -> Models:
    row = np.full(layout.d, 5.0, layout.dtype)
    reply = Reception(layout, row, ROUND, hashed=True)
    reply.head(200, headers(Content_Length=str(layout.size)))
    for begin in range(0, len(message), piece):
        reply.feed(message[begin : begin + piece])
    reply.close()
    assert reply.digest.hex() == wire.digest_of([message])
    return row


@pytest.mark.parametrize("d", [2, 255, 257, 70_000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_coded_body_is_decoded_in_place_as_in_the_simulator(d: int, dtype: str) -> None:
    layout = coded("int8", d, dtype)
    flat = some_values(layout)
    message = b"".join(layout.body(flat))
    assert len(message) == layout.size
    expected = np.empty((1, d), layout.dtype)
    Wire("int8").through(flat[None], expected)
    assert received(layout, message, piece=max(1, d // 3)).tobytes() == expected.tobytes()
    assert layout.sha256 == layout.exact.sha256 == Layout(layout.names, layout.shapes, layout.dtype).sha256
    tensors = safetensors.deserialize(message)  # type: ignore[no-untyped-call]  # a safetensors file still
    assert {entry["dtype"] for _, entry in tensors} == {"I8", "F32"}


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_simulated_int8_rounds_ties_and_keeps_the_smallest_scale_as_peers_do(backend: str) -> None:
    half = np.arange(-127, 127, dtype=np.float32) + np.float32(0.5)  # ties: codes are rounded half to even
    ties, least = np.append(half, [127, 0]).astype(np.float32), np.float32(2.0**-126)
    below = np.nextafter(127 * least, np.float32(0))
    blocks = [ties, ties * least, np.full(256, 127 * least), np.full(256, below), ties * np.float32(2.0**100)]
    flat = np.concatenate(blocks).astype(np.float32)
    layout = coded("int8", len(flat))
    message = b"".join(layout.body(flat))
    answer = received(layout, message, piece=len(message))
    assert answer[:254].tolist() == [round(x) for x in half.tolist()], "Python rounds half to even, too"
    assert (answer[256:510] == answer[:254] * least).all()
    assert (answer[512:768] == 127 * least).all()
    assert not answer[768:1024].any(), "a scale below 2**-126 is none"
    delivered: Any = flat[None] if backend == "numba" else torch.from_numpy(flat[None])
    out = delivered.copy() if backend == "numba" else delivered.clone()
    Wire("int8").through(delivered, out)
    assert np.asarray(out)[0].tobytes() == answer.tobytes()


@pytest.mark.parametrize("change", ["negative", "nan", "inf", "-128", "overflow"])
def test_codes_that_say_no_number_make_a_complete_model_that_is_not_finite(change: str) -> None:
    layout = coded("int8", 300)
    message = bytearray(b"".join(layout.body(some_values(layout))))
    if change == "-128":
        message[-layout.values + 17] = 0x80
    else:
        scale = {"negative": -1.0, "nan": np.nan, "inf": np.inf, "overflow": 3e38}[change]
        message[-4:] = np.float32(scale).tobytes()
    row = received(layout, bytes(message), piece=1000)
    assert np.isnan(row).all()
    one_more = Reception(layout, row, ROUND)
    with pytest.raises(Malformed, match="content-length"):
        one_more.head(200, headers(Content_Length=str(layout.size + 1)))


def test_model_of_one_parameter_cannot_become_smaller() -> None:
    with pytest.raises(ValueError, match=r"1 parameter.*int8.*float32"):
        Layout(("w",), ((1,),), np.dtype("float32"), "int8")
