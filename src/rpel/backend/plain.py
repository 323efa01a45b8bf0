"""The plain twin: NumPy, one victim at a time, in float64.
What these lines say is what the fast twins must equal.

Invariants: rows that are not kept never enter a sum (no "all minus the dropped"), so a forged 3e38 outside
the kept set leaves no trace; ties are stable on (distance, column); inputs are never written to.

What the NumPy twins accept is checked here, too, once, before any pointer moves: the compiled kernels run
without bounds checks, and nothing reaches them that has not passed.
A check costs a small share of the work it guards.

Shapes: `table` (n, d) holds the models, `index` (h, m) the rows each of h victims aggregates,
column 0 its own.
"""

from typing import Any, Literal

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from rpel.types import Floats, Integers, Mix, Out

Operation = Literal["trimmed_mean", "median", "meamed"]
OPERATIONS: tuple[Operation, ...] = ("trimmed_mean", "median", "meamed")


def check_table(table: Floats) -> None:
    """A C-contiguous (n, d) table of float32 or float64.

    >>> check_table(np.zeros((2, 3), np.float32))
    """
    if table.ndim != 2 or table.dtype not in (np.float32, np.float64) or not table.flags.c_contiguous:
        raise ValueError(
            f"table must be a C-contiguous (n, d) float32 or float64 array, not {describe(table)}"
        )


def check_index(table: Floats, index: Integers, absent: bool = False) -> None:
    """A table, and an (h, m) integer index whose entries are rows of it, or −1 where `absent` allows it.

    >>> check_index(np.zeros((2, 3)), np.array([[0, 1]]))
    """
    check_table(table)
    if index.ndim != 2 or index.dtype.kind not in "iu":
        raise ValueError(f"index must be an (h, m) integer array, not {describe(index)}")
    check_range("index", index, -1 if absent else 0, len(table))


def check_range(name: str, values: Integers, low: int, high: int) -> None:
    """Every entry in [low, high).

    >>> check_range("index", np.array([0, 3]), 0, 3)
    Traceback (most recent call last):
    ValueError: index holds 3, outside 0 … 2
    """
    if values.size:
        least, most = int(values.min()), int(values.max())
        if least < low or most >= high:
            raise ValueError(f"{name} holds {least if least < low else most}, outside {low} … {high - 1}")


def check_operation(operation: str, m: int, f: int) -> None:
    """A known operation that leaves at least one of m values.

    >>> check_operation("trimmed_mean", 4, 2)
    Traceback (most recent call last):
    ValueError: trimmed_mean with f=2 leaves nothing of 4 values
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, not {operation!r}")
    dropped = {"trimmed_mean": 2 * f, "median": 0, "meamed": f}[operation]
    if m < 1 or f < 0 or dropped >= m:
        raise ValueError(f"{operation} with f={f} leaves nothing of {m} values")


def check_mix(mix: Mix, h: int, m: int) -> int:
    """Number of values per coordinate, m′: m without mixing or with that of the k nearest, else that of the
    mix, (h, m′, k) or float (h, m′, m).

    >>> check_mix(None, 5, 3), check_mix(np.zeros((5, 2, 3)), 5, 3), check_mix(np.zeros((5, 4, 1), int), 5, 3)
    (3, 2, 4)
    """
    if mix is None:
        return m
    if isinstance(mix, int):
        if not 1 <= mix <= m:
            raise ValueError(f"mix must be within 1 … {m} nearest rows, not {mix}")
        return m
    if mix.ndim != 3 or len(mix) != h or mix.shape[2] < 1 or (mix.dtype.kind == "f" and mix.shape[2] != m):
        raise ValueError(f"mix must be integer ({h}, m', k) or float ({h}, m', {m}), not {describe(mix)}")
    if mix.dtype.kind in "iu":
        check_range("mix", mix, 0, m)
    return int(mix.shape[1])


def result_array(table: Floats, h: int, out: Out) -> Floats:
    """`out` when it fits, else a new (h, d) array of the table's dtype. It must not overlap the table.

    >>> result_array(np.zeros((2, 3), np.float32), 4, None).shape
    (4, 3)
    """
    if out is None:
        return np.empty((h, table.shape[1]), table.dtype)
    if out.shape != (h, table.shape[1]) or out.dtype != table.dtype or not out.flags.c_contiguous:
        raise ValueError(f"out must be C-contiguous {(h, table.shape[1])} {table.dtype}, not {describe(out)}")
    if np.may_share_memory(out, table):
        raise ValueError("out must not share memory with the table: victims still read the rows")
    return out


def describe(array: NDArray[Any]) -> str:
    """Shape and dtype for a message.

    >>> describe(np.zeros(3))
    '(3,) float64'
    """
    return f"{array.shape} {array.dtype}"


# --- the primitives -----------------------------------------------------------------------------------------


def finite_rows(table: Floats) -> NDArray[np.bool_]:
    """(n,) True where every entry of the row is finite.

    >>> finite_rows(np.array([[1.0, 2.0], [np.inf, 0.0]]))
    array([ True, False])
    """
    check_table(table)
    return np.array([np.isfinite(row).all() for row in table], bool)


def squared_distances(table: Floats, index: Integers) -> Floats:
    """(h, m, m) squared Euclidean distances among the rows of each victim.

    >>> squared_distances(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1]]))
    array([[[ 0., 25.], [25.,  0.]]])
    """
    check_index(table, index)
    h, m = index.shape
    result = np.empty((h, m, m))
    with np.errstate(over="ignore"):
        for i, rows in enumerate(index):
            x = table[rows].astype(np.float64)
            for a in range(m):
                result[i, a] = np.square(x - x[a]).sum(axis=1)
    return result


def distances_to(table: Floats, index: Integers, origin: Floats | Integers | None) -> Floats:
    """(h, m) squared distances of the rows to an origin: None is zero, (d,) floats a point, (h,) integers
    rows, (h, d) floats a point for each victim.

    Absent entries (−1) give 0.

    >>> distances_to(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1], [1, -1]]), None)
    array([[ 0., 25.], [25.,  0.]])
    """
    check_index(table, index, absent=True)
    result = np.zeros(index.shape)
    with np.errstate(over="ignore"):
        for i, j in np.argwhere(index >= 0):
            x = table[index[i, j]].astype(np.float64)
            result[i, j] = np.square(x - _origin(table, origin, i)).sum()
    return result


def _origin(table: Floats, origin: Floats | Integers | None, victim: int) -> Floats:
    if origin is None:
        return np.zeros(table.shape[1])
    if origin.dtype.kind in "iu":
        return np.asarray(table[origin[victim]], np.float64)
    return np.asarray(origin[victim] if origin.ndim == 2 else origin, np.float64)


def nearest(distances: Floats, k: int) -> NDArray[np.int32]:
    """(h, m, k) for every anchor the k nearest columns, itself included, in ascending order of column.

    Ties go to the lower column; the anchor counts as nearest to itself even among equals.

    >>> nearest(np.array([[[0.0, 9.0, 1.0], [9.0, 0.0, 4.0], [1.0, 4.0, 0.0]]]), 2)
    array([[[0, 2], [1, 2], [0, 2]]], dtype=int32)
    """
    m = distances.shape[1]
    own_first = np.where(np.eye(m, dtype=bool), -1.0, distances)
    kept = np.argsort(own_first, axis=2, kind="stable")[:, :, :k]
    return np.sort(kept, axis=2).astype(np.int32)


def combine(table: Floats, index: Integers, weights: Floats, out: Out = None) -> Floats:
    """(h, d) weighted sums Σ_j weights[i, j] · table[index[i, j]]; weight 0 and index −1 are skipped,
    never read.

    >>> combine(np.array([[1.0, 2.0], [np.nan, 4.0]]), np.array([[0, 1]]), np.array([[2.0, 0.0]]))
    array([[2., 4.]])
    """
    check_index(table, index, absent=True)
    result = result_array(table, len(index), out)
    with np.errstate(over="ignore", invalid="ignore"):
        for i, rows in enumerate(index):
            total = np.zeros(table.shape[1])
            for row, weight in zip(rows, weights[i], strict=True):
                if row >= 0 and weight != 0:
                    total += weight * table[row].astype(np.float64)
            result[i] = total
    return result


def coordinatewise(
    table: Floats, index: Integers, operation: Operation, f: int = 0, mix: Mix = None, out: Out = None
) -> Floats:
    """(h, d) the operation on each coordinate of the victim's values, after mixing.

    - ``trimmed_mean``: without the f lowest and f highest, the mean of the rest;
    - ``median``: the mean of the two middle values when their number is even;
    - ``meamed``: the mean of the m′ − f values nearest to the median, ties to the lower row.

    `mix` replaces the m rows by m′: integers (h, m′, k) take the mean of the k rows named (nearest-neighbour
    mixing); floats (h, m′, m) are weights, of which zeros are skipped;
    a number k stands for the k nearest rows of each.

    >>> table = np.array([[0.0], [1.0], [2.0], [9.0]])
    >>> everyone = np.array([[0, 1, 2, 3]])
    >>> [float(coordinatewise(table, everyone, name, 1)[0, 0]) for name
    ...     in ("trimmed_mean", "median", "meamed")]
    [1.5, 1.5, 1.0]
    """
    check_index(table, index)
    check_operation(operation, check_mix(mix, *index.shape), f)
    result = result_array(table, len(index), out)
    if isinstance(mix, int):
        mix = nearest(squared_distances(table, index), mix)
    with np.errstate(over="ignore", invalid="ignore"):
        for i, rows in enumerate(index):
            x = table[rows].astype(np.float64)
            result[i] = _operate(x if mix is None else _mixed(x, mix[i]), operation, f)
    return result


def _mixed(x: Floats, mix: NDArray[Any]) -> Floats:
    """(m′, d) the mixed rows of one victim."""
    if mix.dtype.kind in "iu":
        return np.stack([x[kept].sum(axis=0) / len(kept) for kept in mix])
    return np.stack([row[row != 0] @ x[row != 0] for row in mix])


def _operate(y: Floats, operation: Operation, f: int) -> Floats:
    """(d,) the operation over the rows of y (m′, d)."""
    ordered = np.sort(y, axis=0)
    m = len(y)
    median = (ordered[(m - 1) // 2] + ordered[m // 2]) / 2
    if operation == "median":
        return np.asarray(median, np.float64)
    if operation == "trimmed_mean":
        return np.asarray(ordered[f : m - f].mean(axis=0), np.float64)
    kept = np.argsort(np.abs(y - median), axis=0, kind="stable")[: m - f]
    return np.asarray(np.take_along_axis(y, kept, axis=0).mean(axis=0), np.float64)


def moments(
    table: Floats, index: Integers, mean_factor: Floats, std_factor: Floats, out: Out = None
) -> Floats:
    """(h, d) mean_factor[i] · μ + std_factor[i] · σ per coordinate, over the present rows of index[i].

    σ has the divisor (count − 1) and is 0 for a single row; with no row at all the result is 0.

    >>> moments(np.array([[1.0], [3.0]]), np.array([[0, 1]]), np.array([1.0]),
    ...     np.array([2.0])) == 2 + 2 * 2**0.5
    array([[ True]])
    """
    check_index(table, index, absent=True)
    result = result_array(table, len(index), out)
    for i, rows in enumerate(index):
        x = table[rows[rows >= 0]].astype(np.float64)
        mean = x.mean(axis=0) if len(x) else np.zeros(table.shape[1])
        deviation = x.std(axis=0, ddof=1) if len(x) > 1 else np.zeros(table.shape[1])
        result[i] = mean_factor[i] * mean + (std_factor[i] * deviation if std_factor[i] else 0.0)
    return result


# --- arrays, the local step, and sums over nodes ------------------------------------------------------------


def repeated(row: Floats, rows: int) -> Floats:
    """(rows, d) copies of a row (d,).

    >>> repeated(np.array([1.0, 2.0]), 2)
    array([[1., 2.], [1., 2.]])
    """
    return np.tile(row, (rows, 1))


def empty(rows: int, like: Floats) -> Floats:
    """(rows, d) numbers of any value, of the kind of an array (…, d)."""
    return np.empty((rows, like.shape[-1]), like.dtype)


def zeros_like(x: Floats) -> Floats:
    """Zeros of the shape and kind of x."""
    return np.zeros_like(x)


def momentum_step(
    x: Floats, m: Floats, g: Floats, beta: float, lr: float, decay: float, out: Out = None
) -> tuple[Floats, Floats]:
    """(x^{t+1/2}, m^t): m = βm + (1−β)g, then x − η(m + λx). m is updated in place; x is left,
    unless it is ``out``.

    >>> momentum_step(np.ones((1, 1)), np.zeros((1, 1)), np.ones((1, 1)), 0.9, 0.5, 0.0)[0].round(3)
    array([[0.95]])
    """
    m[:] = beta * m + (1 - beta) * g
    half = np.empty_like(x) if out is None else out
    half[:] = x - lr * (m + decay * x)
    return half, m


def nesterov_step(
    x: Floats, z: Floats, v: Floats, lr: float, momentum: float, kept: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """(x', v): Δ = x − z, v = μv + Δ, x' = x − η(Δ + μv), row by row; rows ``kept`` (h,)
    are z and leave their v.

    v is updated in place, and x' is written to z.

    >>> nesterov_step(np.ones((1, 1)), np.zeros((1, 1)), np.zeros((1, 1)), 0.5, 0.9,
    ...     np.zeros(1, bool))[0].round(3)
    array([[0.05]])
    """
    for i in np.flatnonzero(~kept):
        step = x[i] - z[i]
        v[i] = momentum * v[i] + step
        z[i] = x[i] - lr * (step + momentum * v[i])
    return z, v


def add_rows(x: Floats, columns: slice, total: Floats) -> None:
    """total[c] += Σ_i x[i, c] for these columns, row after row: a sum may be continued with further rows.

    >>> total = np.zeros(2); add_rows(np.array([[1.0, 2.0], [3.0, 4.0]]), slice(0, 2), total); total
    array([4., 6.])
    """
    for row in x:
        total[columns] += row[columns]


def add_deviations(x: Floats, mean: Floats, columns: slice, total: Floats) -> None:
    """total[c] += Σ_i (x[i, c] − mean[c])² for these columns, row after row.

    >>> total = np.zeros(1); add_deviations(np.array([[1.0], [3.0]]), np.array([2.0]), slice(0, 1),
    ...     total); total
    array([2.])
    """
    for row in x:
        total[columns] += np.square(row[columns] - mean[columns])


def sum_columns(values: Floats) -> float:
    """The sum of (d,) values."""
    return float(np.sum(values))


def array(values: Any) -> NDArray[Any]:
    """Values from anywhere as an array of this backend."""
    return np.asarray(values)


def host(x: Any) -> NDArray[Any]:
    """An array of this backend as NumPy's: itself."""
    return np.asarray(x)


def device_memory() -> int | None:
    """Bytes that are free where arrays live; None where that is the host's memory."""
    return None


def copy(x: Floats) -> Floats:
    """The same numbers in memory of their own."""
    return np.array(x)


def zeros(rows: int, columns: int, like: Floats) -> Floats:
    """(rows, columns) zeros, of the kind of another array."""
    return np.zeros((rows, columns), like.dtype)


def sums(d: int, like: Floats) -> Floats:
    """(d,) zeros in float64, to be added to, where another array is."""
    return np.zeros(d)


def take(table: Floats, rows: Any, out: Out = None) -> Floats:
    """(k, d) copies of some rows, by numbers or marks; with ``out``, by numbers alone.

    >>> take(np.array([[1.0], [2.0]]), np.array([1, 1, 0])).tolist()
    [[2.0], [2.0], [1.0]]
    """
    return np.asarray(table[rows]) if out is None else np.take(table, rows, axis=0, out=out, mode="clip")


def put(x: Floats, rows: Any, values: Floats) -> None:
    """x[rows] = values (k, d); rows by numbers or marks."""
    x[rows] = values


def appended(rows: Floats, row: Floats, most: int) -> Floats:
    """The rows (k, d) with one more (d,) behind them; of more than ``most``, the last.

    >>> appended(np.zeros((2, 1)), np.ones(1), 2).tolist()
    [[0.0], [1.0]]
    """
    return np.concatenate([rows, row.astype(rows.dtype)[None]])[-most:]


# --- what attacks and some rules need beside them -----------------------------------------------------------

_CACHED = 1 << 17  # numbers in double precision that stay in the second cache
_GATHERED = 4_000_000  # numbers of a gathered piece, 32 MB


def mean(table: Floats) -> Floats:
    """(d,) the mean of all rows, in float64."""
    return np.asarray(table.mean(axis=0, dtype=np.float64))


def squared_norm(vector: Floats) -> float:
    """‖v‖² of (d,) numbers."""
    return float(np.square(vector).sum())


def squared_lengths(x: Floats) -> Floats:
    """(h,) ‖x_i‖², in float64.

    >>> squared_lengths(np.array([[3.0, 4.0]]))
    array([25.])
    """
    return np.array([np.square(row.astype(np.float64)).sum() for row in x])


def row_distances(a: Floats, b: Floats) -> Floats:
    """(h,) ‖a_i − b_i‖, in float64; rows may have been driven to infinity.

    >>> row_distances(np.array([[3.0, 4.0]]), np.zeros((1, 2)))
    array([5.])
    """
    found, step = np.empty(len(a)), max(1, _CACHED // a.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):
        for some in (slice(at, at + step) for at in range(0, len(found), step)):
            apart = np.subtract(a[some], b[some], dtype=np.float64)
            found[some] = np.sqrt(np.square(apart, out=apart).sum(axis=1))
    return found


def oja_step(table: Floats, z: Floats) -> tuple[Floats, Floats]:
    """z (d,) ← normalised Σ_i (x_i − mean)⟨x_i − mean, z⟩, and (n,)
    how far along it each row is from the mean.

    >>> oja_step(np.array([[1.0, 0.0], [3.0, 0.0]]), np.ones(2))[0].tolist()
    [1.0, 0.0]
    """
    centred = table - table.mean(axis=0, dtype=np.float64)
    z = (centred @ z) @ centred
    z = z / max(float(np.linalg.norm(z)), np.finfo(np.float64).tiny)
    return z, np.abs(centred @ z)


def uniform(key: NDArray[np.uint64], round: int, size: int) -> Floats:
    """(size,) numbers in [0, 1): the first of the stream of this key and round (`rpel.randomness`)."""
    return np.asarray(Generator(Philox(key=key, counter=[0, 0, 0, round])).random((size,)))


def normal(key: NDArray[np.uint64], round: int, mu: float, sigma: float, out: Floats) -> Floats:
    """N(μ, σ²) into ``out``, from the stream of this key and round."""
    noise = Generator(Philox(key=key, counter=[0, 0, 0, round])).standard_normal(out.shape, dtype=np.float32)
    np.multiply(noise, sigma, out=out)
    return np.add(out, mu, out=out)


def standard_normal(source: Generator, size: int, like: Floats) -> Floats:
    """(size,) N(0, 1) from a generator of `rpel.randomness`, drawn in the precision of another array."""
    return np.asarray(source.standard_normal(size, dtype=like.dtype.type))


def beyond_range(
    table: Floats, index: Integers, rising: NDArray[np.bool_], share: Floats, out: Floats
) -> Floats:
    """(h, d) per coordinate min − u(max − min) over a victim's rows where ``rising`` (d,),
    else max + u(max − min).

    share: (d,) u. Where max = min, a thousandth of it takes the place of the range.

    >>> table, rows = np.array([[1.0], [3.0]]), np.array([[0, 1]])
    >>> beyond_range(table, rows, np.array([True]), np.array([0.5]), np.empty((1, 1)))
    array([[0.]])
    """
    block = max(1, _GATHERED // index.size)
    for start in range(0, len(share), block):
        at = slice(start, start + block)
        x = table[:, at][index]
        low, high = x.min(axis=1).astype(np.float64), x.max(axis=1).astype(np.float64)
        beyond = np.where(high > low, share[at] * (high - low), 1e-3 * np.abs(low))
        out[:, at] = np.where(rising[at], low - beyond, high + beyond)
    return out


def against_sign(x: Floats, gamma: Floats) -> Floats:
    """x (h, d) ← x − γ_i · sign x; γ (h,). In place."""
    block = max(1, _GATHERED // len(x))
    for start in range(0, x.shape[1], block):
        part = x[:, start : start + block]
        part -= gamma[:, None] * np.sign(part)
    return x


def nonzeros(x: Floats) -> Integers:
    """(h,) how many numbers of each row are not zero."""
    return np.asarray(np.count_nonzero(x, axis=1))


def add_outer(table: Floats, rows: Integers, factors: Floats, vector: Floats, out: Floats) -> Floats:
    """(h, d) factors_i · vector + table[rows_i] into ``out``; the vector is (1, d)."""
    np.multiply(factors[:, None], vector, out=out, casting="same_kind")
    out += table[rows]
    return out


def add_scaled(z: Floats, factors: Floats, vector: Floats) -> None:
    """z (h, d) += factors_i · vector (d,)."""
    z += factors.astype(z.dtype)[:, None] * vector


def top_direction(table: Floats, index: Integers, columns: Integers | None) -> Floats:
    """(h, m) in proportion to ⟨x_j − μ, v⟩², v the direction in which a victim's rows vary most.

    columns: (h, q) the coordinates that are looked at; None: all.

    >>> top_direction(np.array([[0.0], [1.0], [9.0]]), np.array([[0, 1, 2]]), None).argmax()
    np.int64(2)
    """
    picked = table[index] if columns is None else table[index[:, :, None], columns[:, None, :]]
    x = np.array(picked, np.float64)
    x -= x[:, :1].copy()  # around the own vector first: a mean of forged ones may be huge
    x /= np.maximum(np.abs(x).max(axis=(1, 2), keepdims=True), np.finfo(np.float64).tiny)
    x -= x.mean(axis=1, keepdims=True)
    return np.asarray(np.linalg.eigh(x @ x.transpose(0, 2, 1))[1][:, :, -1] ** 2)  # of the Gram matrix


def shares(x: Floats, other: Any) -> bool:
    """Whether the other one may lie in the memory of x."""
    return np.may_share_memory(x, other)
