"""The torch twin: the same primitives for arrays that live on a device of torch, an accelerator's or the CPU's.

What each function computes, with examples, is written in `plain`.

Invariants:
- whatever has d in its shape stays on the device. Indices, weights and factors come from the host as NumPy arrays, and
  distances, flags and sums go there, all through :meth:`Torch.read`: the one way from the device to the host;
- work is cut into pieces of victims and columns so that no temporary exceeds the budget; nothing writes to its inputs;
- distances come from differences, summed in float64, or in compensated float32 on a device without float64 (mps);
- up to 64 values are ordered by a pruned min-max network of elementwise operations, which compilers of torch can fuse:
  sorting along a short axis keeps one block of threads per segment busy.

Results repeat exactly on one device; they equal the other twins to rounding, not bit by bit.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpel.backend import plain
from rpel.backend.plain import Operation, check_operation
from rpel.backend.sorting import network, ranks

log = logging.getLogger("rpel")
BUDGET = 256 << 20
"""Bytes of temporaries at once."""
LONGEST = 64
"""Values up to which a network orders them."""


@dataclass
class Crossings:
    """Models that had to go through the host, because somebody's code takes or returns NumPy: calls and bytes."""

    calls: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, who: str, nbytes: int) -> None:
        """One call of ``who`` moved so many bytes."""
        self.calls[who] = self.calls.get(who, 0) + 1
        self.nbytes[who] = self.nbytes.get(who, 0) + nbytes


@dataclass(frozen=True)
class Torch:
    """Primitives on tensors of one device; temporaries take at most ``budget`` bytes.

    >>> arrays = Torch("cpu")
    >>> x = arrays.array(np.array([[0.0, 0.0], [3.0, 4.0]]))
    >>> arrays.distances_to(x, np.array([[0, 1]]), None)
    array([[ 0., 25.]])
    """

    device: str = "cpu"
    budget: int = BUDGET
    crossings: Crossings = field(default_factory=Crossings, compare=False)

    @cached_property
    def wide(self) -> torch.dtype:
        """In what distances are summed: float64, where the device has it."""
        return torch.float32 if torch.device(self.device).type == "mps" else torch.float64

    # --- between the host and the device ---

    def read(self, x: Tensor) -> NDArray[Any]:
        """A result without d in its shape, on the host: the one way there."""
        return np.asarray(x.detach().cpu().numpy())

    def lend(self, values: Any) -> Tensor:
        """Something small from the host, on the device."""
        return torch.as_tensor(values).to(self.device) if not isinstance(values, Tensor) else values.to(self.device)

    def array(self, values: Any) -> Any:
        """Values from anywhere on the device; in float32 where it has no float64."""
        if isinstance(values, Tensor):
            return values.to(self.device)
        given = np.asarray(values)
        if given.dtype.kind not in "fiub":
            return given
        found = torch.from_numpy(np.ascontiguousarray(given))
        return (found.to(self.wide) if given.dtype == np.float64 else found).to(self.device)

    def host(self, x: Any) -> Any:
        """Anything as NumPy's; models, too: for checkpoints and results."""
        return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)

    def crossed(self, who: str, nbytes: int) -> None:
        """Somebody's code works on NumPy's arrays: said once, counted always."""
        if who not in self.crossings.calls:
            log.warning("%s works on NumPy arrays: what it takes and gives goes through the host", who)
        self.crossings.add(who, nbytes)

    def statement(self) -> dict[str, Any] | None:
        """Name, device, and who took models to the host how often, in how many bytes."""
        calls, nbytes = self.crossings.calls, self.crossings.nbytes
        through = {who: {"calls": calls[who], "bytes": nbytes[who]} for who in sorted(calls)}
        return {"name": "torch", "device": self.device, "through_host": through}

    def device_memory(self) -> int | None:
        """Bytes that are free on the device; None where it is the host."""
        kind = torch.device(self.device).type
        if kind == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        if kind == "mps":
            return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
        return None

    # --- arrays ---

    def repeated(self, row: Any, rows: int) -> Any:
        return self.array(row)[None].repeat(rows, 1)

    def empty(self, rows: int, like: Any) -> Any:
        kind = like.dtype if isinstance(like, Tensor) else torch.from_numpy(np.empty(0, like.dtype)).dtype
        return torch.empty((rows, like.shape[-1]), dtype=kind, device=self.device)

    def zeros_like(self, x: Any) -> Any:
        return torch.zeros_like(x)

    def zeros(self, rows: int, columns: int, like: Any) -> Any:
        return torch.zeros((rows, columns), dtype=like.dtype, device=self.device)

    def sums(self, d: int, like: Any) -> Any:
        return torch.zeros(d, dtype=self.wide, device=self.device)

    def copy(self, x: Any) -> Any:
        return x.clone()

    def take(self, table: Any, rows: Any) -> Any:
        return table.index_select(0, self._numbers(rows))

    def put(self, x: Any, rows: Any, values: Any) -> None:
        x.index_copy_(0, self._numbers(rows), self.array(values).to(x.dtype))

    def _numbers(self, rows: Any) -> Tensor:
        """Row numbers on the device, from numbers or marks."""
        given = np.asarray(rows)
        return self.lend(np.flatnonzero(given) if given.dtype == bool else given.astype(np.int64))

    def appended(self, rows: Any, row: Any, most: int) -> Any:
        return torch.cat([rows, row.to(rows.dtype)[None]])[-most:]

    # --- pieces ---

    def _pieces(self, size: int, bytes_each: int) -> Iterator[slice]:
        """Slices of 0 … size − 1 whose temporaries fit the budget; at least one element each."""
        step = max(1, self.budget // max(1, bytes_each))
        for start in range(0, size, step):
            yield slice(start, min(size, start + step))

    def _grid(self, h: int, d: int, each: int) -> Iterator[tuple[slice, slice]]:
        """(victims, columns) pieces of an (h, d) result that needs ``each`` bytes of temporaries per entry.

        Columns are cut first to what one victim may use, then as many victims as fit.
        """
        for columns in self._pieces(d, each):
            for victims in self._pieces(h, each * (columns.stop - columns.start)):
                yield victims, columns

    def _gathered(self, table: Tensor, index: Tensor, columns: slice) -> Tensor:
        """(h, m, w) the rows of an index (h, m), on some columns."""
        found = table[:, columns].index_select(0, index.reshape(-1))
        return found.view(*index.shape, -1)

    def _result(self, table: Tensor, h: int, out: Tensor | None) -> Tensor:
        return table.new_empty((h, table.shape[1])) if out is None else out

    # --- distances ---

    def finite_rows(self, table: Any) -> Any:
        found = [torch.isfinite(table[rows]).all(dim=1) for rows in self._pieces(len(table), table.shape[1])]
        return self.read(torch.cat(found)) if found else np.empty(0, bool)

    def squared_distances(self, table: Any, index: Any) -> Any:
        return self.read(self._squared(table, self.lend(index)))

    def _squared(self, table: Tensor, index: Tensor) -> Tensor:
        """(h, m, m) squared distances, on the device."""
        h, m = index.shape
        total = _Sum((h, m, m), self.wide, table.device)
        for victims, columns in self._grid(h, table.shape[1], m * (table.dtype.itemsize + 3 * self.wide.itemsize)):
            x = self._gathered(table, index[victims], columns).to(self.wide)
            part = torch.zeros((x.shape[0], m, m), dtype=self.wide, device=table.device)
            for a in range(m - 1):
                part[:, a, a + 1 :] = self._length(x[:, a + 1 :] - x[:, a : a + 1])
            total.add(victims, part + part.transpose(1, 2))
        return total.value

    def _length(self, x: Tensor) -> Tensor:
        """Σ x² over the last axis, summed in the wide type."""
        return x.to(self.wide, copy=True).square_().sum(dim=-1)

    def distances_to(self, table: Any, index: Any, origin: Any) -> Any:
        rows = self.lend(index)
        h, m = rows.shape
        total = _Sum((h, m), self.wide, table.device)
        present = rows.clamp(min=0)
        points = None
        if origin is not None:
            points = self.array(origin)
            if not points.is_floating_point():
                points = table.index_select(0, points.long())
        for victims, columns in self._grid(h, table.shape[1], m * (table.dtype.itemsize + 3 * self.wide.itemsize)):
            x = self._gathered(table, present[victims], columns).to(self.wide)
            if points is not None:
                at = points[victims, None, columns] if points.ndim == 2 else points[columns]
                x = x - at.to(x.dtype)
            total.add(victims, self._length(x))
        return self.read(total.value.masked_fill_(rows < 0, 0.0))

    def nearest(self, distances: Any, k: int) -> Any:
        return plain.nearest(distances, k)

    @staticmethod
    def _nearest(distances: Tensor, k: int) -> Tensor:
        own = torch.eye(distances.shape[1], dtype=torch.bool, device=distances.device)
        kept = torch.sort(distances.masked_fill(own, -1.0), dim=2, stable=True).indices[:, :, :k]
        return kept.sort(dim=2).values

    # --- sums and operations ---

    def combine(self, table: Any, index: Any, weights: Any, out: Any = None) -> Any:
        rows, given = self.lend(index), self.lend(weights)
        h, m = rows.shape
        result = self._result(table, h, out)
        used = (rows >= 0) & (given != 0)
        factors = given.masked_fill(~used, 0.0).to(table.dtype)
        for victims, columns in self._grid(h, table.shape[1], 3 * table.dtype.itemsize):
            width = columns.stop - columns.start
            total = table.new_zeros((victims.stop - victims.start, width))
            for j in range(m):
                row = table[:, columns].index_select(0, rows[victims, j].clamp(min=0))
                row.masked_fill_(~used[victims, j, None], 0.0)
                total.addcmul_(row, factors[victims, j, None])
            result[victims, columns] = total
        return result

    def coordinatewise(
        self, table: Any, index: Any, operation: Any, f: int = 0, mix: Any = None, out: Any = None
    ) -> Any:
        rows = self.lend(index)
        h, m = rows.shape
        result = self._result(table, h, out)
        if isinstance(mix, int):
            check_operation(operation, m, f)
            for part in self._pieces(h, 8 * self.wide.itemsize * m * m):
                kept = self._nearest(self._squared(table, rows[part]), mix)
                self._operated(table, rows[part], operation, f, kept, result[part])
            return result
        parts = None if mix is None else self.lend(mix)
        check_operation(operation, m if parts is None else parts.shape[1], f)
        self._operated(table, rows, operation, f, parts, result)
        return result

    def _operated(
        self, table: Tensor, index: Tensor, operation: Operation, f: int, mix: Tensor | None, result: Tensor
    ) -> None:
        h, m = index.shape
        mixed = m if mix is None else mix.shape[1]
        for victims, columns in self._grid(h, table.shape[1], (m + 4 * mixed) * table.dtype.itemsize):
            x = self._gathered(table, index[victims], columns)
            values = list(x.unbind(1)) if mix is None else _mixed(x, mix[victims])
            result[victims, columns] = _operate(values, operation, f)

    def moments(self, table: Any, index: Any, mean_factor: Any, std_factor: Any, out: Any = None) -> Any:
        rows = self.lend(index)
        h, m = rows.shape
        result = self._result(table, h, out)
        present, kind = rows >= 0, table.dtype
        count = present.sum(dim=1, keepdim=True)
        means, spreads = (self.lend(np.asarray(a, np.float64)).to(kind)[:, None] for a in (mean_factor, std_factor))
        spreads = torch.where(count > 1, spreads, 0.0)
        for victims, columns in self._grid(h, table.shape[1], 4 * table.dtype.itemsize):
            some = [(rows[victims, j].clamp(min=0), ~present[victims, j, None]) for j in range(m)]
            mean = table.new_zeros((victims.stop - victims.start, columns.stop - columns.start))
            for row, absent in some:
                mean += table[:, columns].index_select(0, row).masked_fill_(absent, 0.0)
            mean /= count[victims].clamp(min=1).to(kind)
            found = means[victims] * mean
            if np.any(std_factor):
                square = torch.zeros_like(mean)
                for row, absent in some:
                    square += (table[:, columns].index_select(0, row) - mean).square_().masked_fill_(absent, 0.0)
                square /= (count[victims] - 1).clamp(min=1).to(kind)
                found += torch.where(spreads[victims] != 0, spreads[victims] * square.sqrt_(), 0.0)
            result[victims, columns] = found
        return result

    # --- the local step, and sums over nodes ---

    def momentum_step(
        self, x: Any, m: Any, g: Any, beta: float, lr: float, decay: float, out: Any = None
    ) -> tuple[Any, Any]:
        m.mul_(beta).add_(g, alpha=1 - beta)
        half = torch.empty_like(x) if out is None else out
        for rows in self._pieces(len(x), 2 * x.shape[1] * x.dtype.itemsize):
            half[rows] = x[rows] - lr * torch.add(m[rows], x[rows], alpha=decay)
        return half, m

    def nesterov_step(self, x: Any, z: Any, v: Any, lr: float, momentum: float, kept: Any) -> tuple[Any, Any]:
        moved = self.lend(~np.asarray(kept))[:, None]
        for rows in self._pieces(len(x), 3 * x.shape[1] * x.dtype.itemsize):
            step = x[rows] - z[rows]
            v[rows] = torch.where(moved[rows], momentum * v[rows] + step, v[rows])
            z[rows] = torch.where(moved[rows], x[rows] - lr * (step + momentum * v[rows]), z[rows])
        return z, v

    def add_rows(self, x: Any, columns: slice, total: Any) -> None:
        total[columns] += x[:, columns].sum(dim=0, dtype=total.dtype)

    def add_deviations(self, x: Any, mean: Any, columns: slice, total: Any) -> None:
        for piece in self._pieces(columns.stop - columns.start, 2 * len(x) * total.dtype.itemsize):
            at = slice(columns.start + piece.start, columns.start + piece.stop)
            total[at] += (x[:, at].to(total.dtype) - mean[at]).square_().sum(dim=0)

    def sum_columns(self, values: Any) -> float:
        return float(self.read(values.sum()))

    def mean(self, table: Any) -> Any:
        return table.mean(dim=0, dtype=self.wide)

    def squared_norm(self, vector: Any) -> float:
        return float(self.read(self._length(vector)))

    def squared_lengths(self, x: Any) -> Any:
        return np.asarray(self.read(self._length(x)), np.float64)

    def row_distances(self, a: Any, b: Any) -> Any:
        found = torch.zeros(len(a), dtype=self.wide, device=a.device)
        for rows in self._pieces(len(a), a.shape[1] * (a.dtype.itemsize + self.wide.itemsize)):
            found[rows] = self._length(a[rows] - b[rows]).sqrt_()
        return np.asarray(self.read(found), np.float64)

    # --- what attacks and some rules need beside them ---

    def oja_step(self, table: Any, z: Any) -> tuple[Any, Any]:
        mean, along = self.mean(table), torch.zeros(len(table), dtype=self.wide, device=table.device)
        pieces = list(self._pieces(table.shape[1], 2 * len(table) * self.wide.itemsize))
        for at in pieces:
            along += (table[:, at].to(self.wide) - mean[at]) @ z[at].to(self.wide)
        moved = torch.empty_like(mean)
        for at in pieces:
            moved[at] = along @ (table[:, at].to(self.wide) - mean[at])
        moved /= torch.linalg.vector_norm(moved).clamp(min=torch.finfo(self.wide).tiny)
        along.zero_()
        for at in pieces:
            along += (table[:, at].to(self.wide) - mean[at]) @ moved[at]
        return moved, self.read(along.abs_())

    def uniform(self, key: Any, round: int, size: int) -> Any:
        words = philox(key, (0, 0, round), -(-size // 4), self.device)
        return (_shifted(words.reshape(-1)[:size], 11)).to(self.wide).mul_(2.0**-53)

    def normal(self, key: Any, round: int, mu: float, sigma: float, out: Any) -> Any:
        """The noise is drawn on the host, where the stream is, and sent: what d numbers cross the bus for."""
        drawn = plain.normal(key, round, mu, sigma, np.empty(tuple(out.shape), np.float32))
        self.crossings.add("attack gaussian: noise drawn on the host", drawn.nbytes)
        out[:] = self.array(drawn)
        return out

    def beyond_range(self, table: Any, index: Any, rising: Any, share: Any, out: Any) -> Any:
        rows = self.lend(index)
        h, m = rows.shape
        for victims, columns in self._grid(h, table.shape[1], 6 * table.dtype.itemsize):
            low = high = table[:, columns].index_select(0, rows[victims, 0])
            for j in range(1, m):
                row = table[:, columns].index_select(0, rows[victims, j])
                low, high = torch.minimum(low, row), torch.maximum(high, row)
            beyond = torch.where(high > low, share[columns].to(low.dtype) * (high - low), 1e-3 * low.abs())
            out[victims, columns] = torch.where(rising[columns], low - beyond, high + beyond)
        return out

    def against_sign(self, x: Any, gamma: Any) -> Any:
        factors = self.lend(gamma).to(x.dtype)[:, None]
        for rows in self._pieces(len(x), 2 * x.shape[1] * x.dtype.itemsize):
            x[rows] -= factors[rows] * x[rows].sign()
        return x

    def nonzeros(self, x: Any) -> Any:
        return self.read((x != 0).sum(dim=1))

    def add_outer(self, table: Any, rows: Any, factors: Any, vector: Any, out: Any) -> Any:
        scale = self.lend(factors).to(table.dtype)[:, None]
        chosen = self.lend(rows)
        for some in self._pieces(len(out), 2 * table.shape[1] * table.dtype.itemsize):
            out[some] = scale[some] * vector + table.index_select(0, chosen[some])
        return out

    def add_scaled(self, z: Any, factors: Any, vector: Any) -> None:
        z.addcmul_(self.lend(factors).to(z.dtype)[:, None], self.array(vector).to(z.dtype)[None])

    def top_direction(self, table: Any, index: Any, columns: Any) -> Any:
        rows, found = self.lend(index), []
        chosen = None if columns is None else self.lend(columns)
        h, m = rows.shape
        width = table.shape[1] if chosen is None else chosen.shape[1]
        for some in self._pieces(h, 3 * m * width * self.wide.itemsize):
            if chosen is None:
                x = self._gathered(table, rows[some], slice(None))
            else:
                x = table[rows[some, :, None], chosen[some, None, :]]
            x = x.to(self.wide)
            x = x - x[:, :1]  # around the own vector first: a mean of forged ones may be huge
            x /= x.abs().amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(self.wide).tiny)
            x -= x.mean(dim=1, keepdim=True)
            found.append(torch.linalg.eigh(x @ x.transpose(1, 2))[1][:, :, -1].square())
        return np.asarray(self.read(torch.cat(found)), np.float64)


def local_device(device: str, local_rank: int) -> str:
    """The device of one of several workers on a machine: of "cuda" each has its own.

    >>> local_device("cpu", 1), local_device("cuda:1", 0)
    ('cpu', 'cuda:1')
    """
    if device != "cuda":
        return device
    return f"cuda:{local_rank % max(1, torch.cuda.device_count())}"


def missing(device: str) -> str | None:
    """Why torch cannot use a device here, in a few words; None where it can.

    >>> missing("cpu") is None
    True
    """
    kind, _, number = device.partition(":")
    if kind == "mps":
        if torch.backends.mps.is_available():
            return None
        return "torch sees no Apple GPU" if torch.backends.mps.is_built() else f"torch {torch.__version__} has no mps"
    if kind != "cuda":
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU-only build, install one with CUDA"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: is its driver there?"
    return None if int(number or 0) < count else f"torch sees {count} of them, numbered from 0"


class _Sum:
    """A sum of parts, compensated (Kahan) where the type is not float64."""

    def __init__(self, shape: tuple[int, ...], kind: torch.dtype, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=kind, device=device)
        self.lost = None if kind == torch.float64 else torch.zeros_like(self.value)

    def add(self, rows: slice, part: Tensor) -> None:
        if self.lost is None:
            self.value[rows] += part
            return
        wanted = part - self.lost[rows]
        total = self.value[rows] + wanted
        self.lost[rows] = torch.nan_to_num((total - self.value[rows]) - wanted)
        self.value[rows] = total


def _mixed(x: Tensor, mix: Tensor) -> list[Tensor]:
    """m′ rows (h, w) from x (h, m, w), one old row at a time: zeros are skipped, whatever they would multiply."""
    total = x.new_zeros((*mix.shape[:2], x.shape[2]))
    for j in range(mix.shape[2]):
        if mix.is_floating_point():
            weight = mix[:, :, j, None].to(x.dtype)
            total += torch.where(weight != 0, weight * x[:, j, None], 0.0)
        else:
            total += x.gather(1, mix[:, :, j, None].long().expand(-1, -1, x.shape[2]))
    return list((total if mix.is_floating_point() else total / mix.shape[2]).unbind(1))


def _operate(values: list[Tensor], operation: Operation, f: int) -> Tensor:
    """(h, w) the operation over m values (h, w) of every coordinate."""
    m = len(values)
    if operation == "meamed":
        return _near_median(values, m - f)
    ordered = _ordered(values, operation, f)
    kept = ordered[0]
    for one in ordered[1:]:
        kept = kept + one
    return kept / len(ordered)


def _ordered(values: list[Tensor], operation: Operation, f: int) -> list[Tensor]:
    """The values at the ranks that an operation looks at, in ascending order."""
    m, wanted = len(values), ranks(len(values), f, operation)
    if m > LONGEST:
        whole = torch.stack(values).sort(dim=0).values
        return [whole[r] for r in wanted]
    lanes = list(values)
    for a, b in network(m, f, operation):
        lanes[a], lanes[b] = torch.minimum(lanes[a], lanes[b]), torch.maximum(lanes[a], lanes[b])
    return [lanes[r] for r in wanted]


def _near_median(values: list[Tensor], k: int) -> Tensor:
    """The mean of the k values nearest to the median, ties to the lower row: each is counted among the others."""
    middle = _ordered(values, "median", 0)
    median = (middle[0] + middle[-1]) / 2
    away = [(value - median).abs() for value in values]
    total = torch.zeros_like(median)
    for j, own in enumerate(away):
        before = torch.zeros_like(own, dtype=torch.int16)
        for i, other in enumerate(away):
            before += (other <= own) if i < j else (other < own)
        total += torch.where(before < k, values[j], 0.0)
    return total / k


# --- the stream of `rpel.randomness`, on the device -------------------------------------------------------------------

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def philox(key: Any, rest: tuple[int, int, int], blocks: int, device: str = "cpu") -> Tensor:
    """(blocks, 4) words of 64 bits, the first of Philox 4 × 64 with this key and the counter (1 …, *rest).

    Words are int64 with the bits of unsigned ones.

    >>> from numpy.random import Generator, Philox
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


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by of the unsigned words."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """(upper, lower) words of unsigned products."""
    left, right = _shifted(x, 32), x & _LOW
    above, below = factor >> 32, factor & _LOW
    first, second, third = right * below, right * above, left * below
    middle = _shifted(first, 32) + (second & _LOW) + (third & _LOW)
    upper = left * above + _shifted(second, 32) + _shifted(third, 32) + _shifted(middle, 32)
    return upper, x * _signed(factor)


# --- the codes of `rpel.wire` -----------------------------------------------------------------------------------------


def through(name: str, x: Tensor, out: Tensor, block: int) -> None:
    """decode(encode(x)) of a model (d,) into ``out``, which may be x; NaN everywhere if the code cannot say it."""
    narrow = x.to(torch.float32)
    if name == "bfloat16":
        found = narrow.to(torch.bfloat16).to(torch.float32)
    else:
        padded = torch.nn.functional.pad(narrow, (0, -len(narrow) % block)).view(-1, block)
        scale = padded.abs().amax(dim=1, keepdim=True) / 127
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
        codes = torch.round(padded / torch.where(scale == 0, 1.0, scale)) + 0.0  # no negative zero
        found = torch.where(scale == 0, 0.0, codes * scale).reshape(-1)[: len(narrow)]
    good = torch.isfinite(found).all() & torch.isfinite(narrow).all()
    out[:] = torch.where(good, found, torch.nan)
