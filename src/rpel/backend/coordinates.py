"""Trimmed mean, median and meamed of every coordinate, for all victims, with the mixing before them.

How this works. A victim holds rows a, b, c, d, e, f; nearest-neighbour mixing replaces a by the mean of,
say, a, b, c and e. That sum, and the five others, come from a table of sums: the rows are dealt into groups
of three, and of each group all subsets are summed once (a, b, a + b, c, a + c, b + c, a + b + c; d, e, …).
The mixed row is one entry of each group, (a + b + c) + (e): one addition instead of three, and with 31 rows
348 instead of 527. A code, for each mixed row and group, says which entry (`encode`). Rows are scaled down
by a power of two before they are added, so that finite rows near 1e38 cannot overflow to +∞ here and −∞
there, which would meet as NaN.

The six values of a column then pass a sorting network: a fixed list of pairs, in each of which the lower
value goes first. Only the pairs on which a wanted rank depends are kept: for the median of six, ranks 2 and
3. The sum of the wanted ranks is divided once.

There are two forms of this, with the same arithmetic in the same order, so with the same bits. The
*written* kernel (`_write`) has one statement for each addition and each pair, for one m and f: the fastest,
but it takes seconds to compile. The *any-m* kernel (`_any_m`) walks lists of groups and pairs. It also
takes weights instead of codes, and has meamed. `_use_written` says when the first is worth its compilation.

All loops over columns have a constant length (see `rpel.backend.rows`). Columns are the outer loop and
victims the inner one, so that a block of the table stays in the second cache while every victim uses it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpel.backend import distances, threads
from rpel.backend.base import Operation
from rpel.backend.compile import aligned, compiled, inlined, written
from rpel.backend.rows import BLOCK, Columns, over_columns, weigh_block
from rpel.types import Floats, Integers

LARGE = 5e7  # values (victims · m · d) from which a written kernel is compiled
RECENT_CALLS = 16  # a round with victims of different m makes a few
LONGEST = 64  # values per column up to which one is written
SECOND_CACHE = 512 << 10  # bytes of a victim's rows up to which they are still there after their distances
VICTIMS_AT_ONCE = 48  # whose distances and coordinates follow each other there
SMALL_WORK = 1 << 16  # values below which waking a thread costs more than it saves

Mixing = NDArray[Any] | None
"""How m rows become m′ values: (h, m′, groups) codes, (h, m′, m) float64 weights, or None: they stay."""


# --- sorting networks ---------------------------------------------------------------------------------------


def merge_exchange(m: int) -> Iterator[tuple[int, int]]:
    """Generate Batcher's network for any m (Knuth, volume 3, algorithm 5.2.2M).

    >>> list(merge_exchange(3))
    [(0, 2), (0, 1), (1, 2)]
    """
    top = 1 << max(0, (m - 1).bit_length() - 1)
    p = top if m > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(m - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2


@cache
def network(m: int, wanted: range) -> tuple[tuple[int, int], ...]:
    """Return the pairs that bring m values of the wanted ranks to their places, in any order.

    >>> network(4, range(0, 1)), network(9, range(9))
    (((0, 2), (1, 3), (0, 1)), ())
    """
    summed: set[int] = set(wanted)
    ordered: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for a, b in reversed(list(merge_exchange(m))):
        if ordered & {a, b} or (a in summed) != (b in summed):  # two ranks of one sum need no order
            pairs.append((a, b))
            ordered |= {a, b}
            summed -= {a, b}
    return tuple(reversed(pairs))


def ranks(m: int, f: int, operation: Operation) -> range:
    """Return the ranks that an operation looks at.

    >>> ranks(16, 7, "trimmed_mean"), ranks(5, 0, "median"), ranks(5, 2, "meamed")
    (range(7, 9), range(2, 3), range(0, 5))
    """
    if operation == "trimmed_mean":
        return range(f, m - f)
    return range((m - 1) // 2, m // 2 + 1) if operation == "median" else range(m)


# --- groups and codes ---------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """How m rows are dealt: group g has rows edges[g] … edges[g + 1] − 1, entries from bases[g] + 1 on."""

    edges: Integers
    bases: Integers

    @property
    def entries(self) -> int:
        """The length of the table of sums; entry 0 is the sum of no row."""
        return int(self.bases[-1]) + 1


@cache
def groups_of(m: int) -> Groups:
    """Return groups of three rows, the sums of whose subsets fit the first cache.

    >>> groups_of(4).edges.tolist(), groups_of(4).bases.tolist()
    ([0, 2, 4], [0, 3, 6])
    """
    count = -(-m // 3)
    edges = np.array([m * g // count for g in range(count + 1)])
    return Groups(edges, np.cumsum(np.append(0, (1 << np.diff(edges)) - 1)))


def encode(kept: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """(h, m′, groups) Return the entries whose sum is each mixed row, made of the marked rows (h, m′, m)."""
    edges, bases = groups_of(kept.shape[2])
    codes = np.empty((*kept.shape[:2], len(edges) - 1), np.uint32)
    _encode(kept, edges, bases, codes)
    return codes


@compiled
def _encode(kept: NDArray[np.bool_], edges: Integers, bases: Integers, codes: Integers) -> None:
    h, m, groups = codes.shape
    for i in range(h):
        for a in range(m):
            for g in range(groups):
                subset = 0
                for j in range(edges[g], edges[g + 1]):
                    subset += kept[i, a, j] << (j - edges[g])
                codes[i, a, g] = bases[g] + subset if subset else 0


def _block(m: int, mixed: bool, dtype: Any) -> int:
    """Return the columns of a block; the sums of one victim fit into the first-level cache."""
    return int((64 if mixed and m > 8 else BLOCK) * 4 // np.dtype(dtype).itemsize)


# --- the written kernel -------------------------------------------------------------------------------------


@cache
def _write(m: int, f: int, mixed: bool, kind: str) -> Any:
    """Write kernel(table, index, codes, left, right, divisor, sums, flat, y, z, out): the trimmed mean.

    sums (also as flat), y and z are scratch. The median is the trimmed mean with f = (m − 1) // 2.
    """
    block, groups, wanted = _block(m, mixed, kind), groups_of(m), range(f, m - f)
    number = len(groups.edges) - 1
    body: list[str] = []

    def over_columns(*statements: str, inside: str = "") -> None:
        body.extend([f"{inside}for c in range({block}):", *(f"{inside}    {line}" for line in statements)])

    for g in range(number) if mixed else ():
        first, last = groups.edges[g], groups.edges[g + 1]
        body += [f"r{j} = table[index[i, {first + j}], start:]" for j in range(last - first)]
        sums = []
        for subset in range(1, 1 << (last - first)):
            top = subset.bit_length() - 1
            rest = subset - (1 << top)
            sums += [f"s{subset} = " + (f"s{rest} + s{1 << top}" if rest else f"r{top}[c] * down")]
            sums += [f"flat[{(groups.bases[g] + subset) * block} + c] = s{subset}"]
        over_columns(*sums)
    body += [f"for a in range({m}):"]
    if mixed:
        body += [f"    p{g} = codes[i, a, {g}]" for g in range(number)]
        total = " + ".join(f"sums[p{g}, c]" for g in range(number))
        over_columns(f"y[a * {block} + c] = {total}", inside="    ")
    else:
        body += ["    row = table[index[i, a], start:]"]
        over_columns(f"y[a * {block} + c] = row[c]", inside="    ")
    over_columns(
        *(f"v{r} = y[{r * block} + c]" for r in range(m)),
        *(f"v{a}, v{b} = min(v{a}, v{b}), max(v{a}, v{b})" for a, b in network(m, wanted)),
        f"z[c] = ({' + '.join(f'v{r}' for r in wanted)}) / divisor",
    )
    body += ["result = out[i, start:]"]
    over_columns("result[c] = z[c]")
    return written([
        "def kernel(table, index, codes, left, right, divisor, sums, flat, y, z, out):",
        f"    down = table.dtype.type({2.0 ** -m.bit_length()})",
        "    for i in range(len(index)):",
        f"        for begin in range(left, right, {block}):",
        f"            start = min(begin, table.shape[1] - {block})",
        *(f"            {line}" for line in body),
    ])  # fmt: skip


# --- the kernel for any m -----------------------------------------------------------------------------------


class Scratch(NamedTuple):
    """What a thread needs for one victim: sums, values, a result; rows, factors and sum of a mixing."""

    sums: Floats
    y: Floats
    z: Floats
    rows: Integers
    factors: Floats
    total: Floats


class Plan(NamedTuple):
    """What the any-m kernel does: how rows are dealt and scaled, the network, and which ranks it sums.

    near: 0, or for meamed how many values it drops.
    """

    edges: Integers
    bases: Integers
    down: float
    pairs: Integers
    first: int
    last: int
    near: int


@inlined
def _mix_codes(
    table: Floats, rows: Integers, codes: Integers, plan: Plan, start: int, sums: Floats, y: Floats
) -> None:
    """Fill y with sums of rows, from the table of the sums of each group's subsets."""
    down = table.dtype.type(plan.down)
    for g in range(codes.shape[1]):
        first, base = plan.edges[g], plan.bases[g]
        for j in range(plan.edges[g + 1] - first):
            row, single = table[rows[first + j], start:], sums[base + (1 << j)]
            for c in range(BLOCK):
                single[c] = row[c] * down
            for subset in range(1, 1 << j):
                both, rest = sums[base + (1 << j) + subset], sums[base + subset]
                for c in range(BLOCK):
                    both[c] = rest[c] + single[c]
    groups = codes.shape[1]
    for a in range(len(codes)):
        value, entry = y[a], sums[codes[a, 0]]
        for c in range(BLOCK):
            value[c] = entry[c]
        whole = 1 + (groups - 1) // 4 * 4
        for g in range(1, whole, 4):
            s0, s1, s2, s3 = (
                sums[codes[a, g]],
                sums[codes[a, g + 1]],
                sums[codes[a, g + 2]],
                sums[codes[a, g + 3]],
            )
            for c in range(BLOCK):
                value[c] = value[c] + s0[c] + s1[c] + s2[c] + s3[c]
        for g in range(whole, groups):
            entry = sums[codes[a, g]]
            for c in range(BLOCK):
                value[c] += entry[c]


@inlined
def _mix_weights(table: Floats, rows: Integers, weights: Floats, start: int, s: Scratch) -> None:
    """Fill y with weighted sums of rows, in float64; a row of weight 0 is not read."""
    for a in range(len(weights)):
        count = 0
        for j in range(weights.shape[1]):
            if weights[a, j] != 0.0:
                s.rows[count], s.factors[count] = rows[j], weights[a, j]
                count += 1
        weigh_block(table, s.rows, s.factors, count, start, s.total)
        value = s.y[a]
        for c in range(BLOCK):
            value[c] = s.total[c]


@inlined
def _fill(
    table: Floats, rows: Integers, codes: Integers, weights: Floats, plan: Plan, start: int, s: Scratch
) -> None:
    """Fill y with the values of a victim; codes and weights are empty where they are not what mixes."""
    if len(codes):
        _mix_codes(table, rows, codes, plan, start, s.sums, s.y)
    elif len(weights):
        _mix_weights(table, rows, weights, start, s)
    else:
        for j in range(len(rows)):
            row, value = table[rows[j], start:], s.y[j]
            for c in range(BLOCK):
                value[c] = row[c]


@compiled
def _any_m(
    table: Floats, index: Integers, codes: Any, weights: Floats, plan: Plan, left: int, right: int,
    divisor: Any, s: Scratch, out: Floats,
) -> None:  # fmt: skip
    """out[i] = the operation of a plan over columns left … right − 1, for every victim."""
    y, z = s.y, s.z
    for i in range(len(index)):
        for begin in range(left, right, BLOCK):
            start = min(begin, table.shape[1] - BLOCK)
            _fill(table, index[i], codes[i], weights[i], plan, start, s)
            for p in range(len(plan.pairs)):
                lower, higher = y[plan.pairs[p, 0]], y[plan.pairs[p, 1]]
                for c in range(BLOCK):
                    a, b = lower[c], higher[c]
                    lower[c], higher[c] = min(a, b), max(a, b)
            if plan.near:
                if _sum_near_median(y, plan.near, z):  # sorted values have lost their rows
                    _fill(table, index[i], codes[i], weights[i], plan, start, s)
                    _break_ties(y, plan.near, z)
            else:
                value = y[plan.first]
                for c in range(BLOCK):
                    z[c] = value[c]
                for rank in range(plan.first + 1, plan.last):
                    value = y[rank]
                    for c in range(BLOCK):
                        z[c] += value[c]
            result = out[i, start:]
            for c in range(BLOCK):
                result[c] = z[c] / divisor


@inlined
def _sum_near_median(y: Floats, f: int, z: Floats) -> bool:
    """z = the sum of the m − f sorted values nearest to the median; NaN, and True, where two tie.

    The values that stay are neighbours in rank: rank r < f goes exactly when rank r + m − f is nearer.
    """
    m, zero, half, nan = len(y), y.dtype.type(0), y.dtype.type(0.5), y.dtype.type(np.nan)
    kept, low, high = m - f, y[(m - 1) // 2], y[m // 2]
    for c in range(BLOCK):
        z[c] = zero
    for rank in range(m):
        value, above, below = y[rank], y[min(rank + kept, m - 1)], y[max(rank - kept, 0)]
        bottom, top = rank < f, rank >= kept
        for c in range(BLOCK):
            median = (low[c] + high[c]) * half
            under, over = median - value[c], above[c] - median
            leaves = bottom and over < under
            enters = not top or -under < median - below[c]
            z[c] += value[c] if enters and not leaves else zero
            z[c] = nan if bottom and over == under and over > zero else z[c]
    ties = 0
    for c in range(BLOCK):
        ties += z[c] != z[c]
    return ties > 0


@inlined
def _break_ties(y: Floats, f: int, z: Floats) -> None:
    """Where z is NaN for a tie, sum the values nearest to the median by (distance, row); y is not sorted."""
    m = len(y)
    values = np.empty(m)
    for c in range(BLOCK):
        if np.isnan(z[c]):
            low = high = 0.0
            for j in range(m):
                values[j] = y[j, c]
            for j in range(m):
                place = _place(values, j)
                low = values[j] if place == (m - 1) // 2 else low
                high = values[j] if place == m // 2 else high
            apart = np.abs(values - (low + high) / 2)
            z[c] = 0
            for j in range(m):
                if _place(apart, j) < m - f:
                    z[c] += y[j, c]


@inlined
def _place(values: Floats, j: int) -> int:
    """Count the values that come before the j-th in order of (value, row)."""
    before = 0
    for q in range(len(values)):
        before += values[q] < values[j] or (values[q] == values[j] and q < j)
    return before


# --- which kernel, on which columns -------------------------------------------------------------------------


class Job(NamedTuple):
    """An operation on m values of one dtype, each made of k rows (0: of all, with weights; 1: of one)."""

    operation: Operation
    f: int
    m: int
    rows: int
    k: int
    kind: str

    @property
    def near(self) -> int:
        """For meamed, how many values it drops."""
        return self.f if self.operation == "meamed" else 0

    @property
    def down(self) -> float:
        """The power of two by which rows are scaled so that the sum of finite ones is finite."""
        return 2.0 ** -self.rows.bit_length() if self.k > 1 else 1.0

    @property
    def divisor(self) -> Any:
        """What the sum of the wanted ranks is divided by."""
        kept = self.m - self.f if self.near else len(ranks(self.m, self.f, self.operation))
        return np.dtype(self.kind).type(kept * max(1, self.k) * self.down)

    @property
    def written(self) -> tuple[Any, ...] | None:
        """The arguments of `_write`, if there is a written kernel for this job."""
        if self.near or not self.k or self.m > LONGEST or (self.k > 1 and self.m != self.rows):
            return None
        wanted = ranks(self.m, self.f, self.operation)
        return self.m, wanted.start, self.k > 1, self.kind


_ready: set[Any] = set()  # arguments of written kernels
_recent: deque[tuple[Any, float]] = deque(
    maxlen=RECENT_CALLS
)  # which kernel would have done, for how many values


def prepare(m: int, f: int, operation: Operation, dtype: Any, mixed: bool) -> None:
    """Compile, or load from disk, the written kernel and the distances before it now.

    >>> prepare(3, 1, "median", np.float32, mixed=False)
    """
    k = m - f if mixed else 1
    _ready.add(Job(operation, f, m, m, k, np.dtype(dtype).name).written)
    table, index = np.zeros((1, BLOCK), dtype), np.zeros((1, m), np.int64)
    if mixed:
        nearest_mixed(table, index, operation, f, k, np.empty_like(table))
    else:
        coordinatewise(table, index, operation, f, None, 1, np.empty_like(table))


def _use_written(job: Job, values: float) -> bool:
    """Say whether the written kernel is ready, or one large call is worth compiling it.

    A run prepares the kernel of its m. Where victims have different m, only one that covers most of the
    values lately is compiled; the others share the any-m kernel.
    """
    key = job.written
    if key is None or key in _ready:
        return key is not None
    _recent.append((key, values))
    recent = list(_recent)
    own = sum(done for other, done in recent if other == key)
    if values >= LARGE and 2 * own >= sum(done for _, done in recent):
        _ready.add(key)
    return key in _ready


Run = Callable[[Integers, Mixing, int, int, Floats], None]
"""run(index, mix, left, right, out) computes columns left … right − 1 of out, with scratch of its own."""


def _runner(table: Floats, job: Job, fast: bool) -> Run:
    """Return a job with its own scratch, by the written kernel or the one for any m."""
    dtype, divisor, no_codes = table.dtype, job.divisor, np.zeros((0, 0, 0), np.uint32)
    fast = fast and job.written is not None
    block = _block(job.m, job.k > 1, dtype) if fast else BLOCK
    groups = groups_of(job.rows)
    sums = aligned(groups.entries if job.k > 1 else 1, block, dtype)
    sums[0] = 0
    y, z = aligned(job.m, block, dtype), aligned(1, block, dtype).ravel()
    if fast and job.written:
        kernel, flat, values = _write(*job.written), sums.ravel(), y.ravel()

        def by_text(index: Integers, mix: Mixing, left: int, right: int, out: Floats) -> None:
            codes = no_codes if mix is None else mix
            kernel(table, index, codes, left, right, divisor, sums, flat, values, z, out)

        return by_text
    wanted = ranks(job.m, job.f, job.operation)
    pairs = list(merge_exchange(job.m)) if job.near else network(job.m, wanted)
    network_ = np.array(pairs, np.int64).reshape(-1, 2)
    plan = Plan(*groups, job.down, network_, wanted.start, wanted.stop, job.near)
    scratch = Scratch(
        sums, y, z, np.empty(job.rows, np.int64), np.empty(job.rows), aligned(1, BLOCK, np.float64)[0]
    )

    def by_lists(index: Integers, mix: Mixing, left: int, right: int, out: Floats) -> None:
        nothing = np.zeros((len(index), 0, 0))
        codes = nothing.astype(np.uint32) if mix is None or not job.k else mix
        weights = nothing if mix is None or job.k else mix
        _any_m(table, index, codes, weights, plan, left, right, divisor, scratch, out)

    return by_lists


def coordinatewise(
    table: Floats, index: Integers, operation: Operation, f: int, mix: Mixing, k: int, out: Floats,
    fast: bool | None = None,
) -> Floats:  # fmt: skip
    """(h, d) Compute the operation for each coordinate.

    Args:
        table: (n, d).
        index: (h, m), without −1.
        operation: what is done with the m′ values.
        f: how many values it allows for.
        mix: codes, weights or None.
        k: how many rows a code sums; 1 without mixing, 0 with weights.
        out: (h, d), where the result goes.
        fast: whether to use the written kernel; None: if it is worth it.

    >>> table = np.array([[0.0], [1.0], [2.0], [9.0]])
    >>> coordinatewise(table, np.array([[0, 1, 2, 3]]), "trimmed_mean", 1, None, 1, np.empty((1, 1)))
    array([[1.5]])
    """
    rows = index.shape[1]
    job = Job(operation, f, rows if mix is None else mix.shape[1], rows, k, table.dtype.name)
    values = float(len(index)) * job.m * table.shape[1]
    chosen = _use_written(job, values) if fast is None else fast

    def make(table: Floats) -> Columns:
        run = _runner(table, job, chosen)
        return lambda index, some, left, right, out: run(
            index, None if mix is None else mix[some], left, right, out
        )

    over_columns(table, index, make, out, small=values < SMALL_WORK)
    return out


def nearest_mixed(
    table: Floats, index: Integers, operation: Operation, f: int, k: int, out: Floats
) -> Floats:
    """(h, d) Compute the operation after every row became the mean of the k nearest of its victim's rows.

    Small models go victim by victim, from distances to result while the rows are in the cache. For large ones
    the distances of many victims come first. Either way they take less than a tenth of the table's memory.

    >>> table, index = np.array([[0.0], [1.0], [9.0]]), np.array([[0, 1, 2]])
    >>> nearest_mixed(table, index, "median", 0, 2, np.empty((1, 1)))
    array([[0.5]])
    """
    (h, m), d = index.shape, table.shape[1]
    if k == 1:  # the nearest row is the row itself
        return coordinatewise(table, index, operation, f, None, 1, out)
    if BLOCK <= d <= SECOND_CACHE // (m * table.itemsize) and h > distances.MAX_SHARED_ROWS:
        job = Job(operation, f, m, m, k, table.dtype.name)
        fast = _use_written(job, float(h) * m * d)

        def work(begin: int, end: int) -> None:
            run = _runner(table, job, fast)
            for first in range(begin, end, VICTIMS_AT_ONCE):
                some = slice(first, min(end, first + VICTIMS_AT_ONCE))
                kept = distances.neighbours(table, index[some], k, alone=True)
                run(index[some], encode(kept), 0, d, out[some])

        threads.run(work, h)
        return out
    step = max(1, table.nbytes // 25 // (8 * m * m))
    for first in range(0, h, step):
        some = slice(first, first + step)
        kept = distances.neighbours(table, index[some], k)
        coordinatewise(table, index[some], operation, f, encode(kept), k, out[some])
    return out
