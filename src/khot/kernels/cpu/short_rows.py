"""Short rows of float32 side by side: blocks (n, LANES), in which a vector has one item of each of ``LANES`` rows.

The last block of a batch is filled up with copies of the last row, whose results are the same and are written there.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .lanes import SINGLE_LANES, address
from .loops import by_lanes

LANES = SINGLE_LANES
FEW = 4  # items that are moved at once: those of four rows are transposed as a matrix

_index = ir.IntType(32)
_first, _second, _low, _high = (
    [FEW * group + place for group in range(LANES // FEW) for place in places]
    for places in ((0, LANES, 1, LANES + 1), (2, LANES + 2, 3, LANES + 3), (0, 1, LANES, LANES + 1),
                   (2, 3, LANES + 2, LANES + 3))
)  # fmt: skip


def _shuffled(builder, a, b, places):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_index, len(places)), places))


def _transposed(builder, v):
    """Four vectors, of which every matrix of four numbers of each of them is transposed."""
    a, b = _shuffled(builder, v[0], v[1], _first), _shuffled(builder, v[0], v[1], _second)
    c, d = _shuffled(builder, v[2], v[3], _first), _shuffled(builder, v[2], v[3], _second)
    pairs = ((a, c, _low), (a, c, _high), (b, d, _low), (b, d, _high))
    return [_shuffled(builder, x, y, places) for x, y, places in pairs]


def _joined(builder, parts):
    while len(parts) > 1:
        both = list(range(2 * parts[0].type.count))
        parts = [_shuffled(builder, a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _moves(context, builder, given, x, first, last, j, block):
    """Pointers to items j to j + 3 of the rows from ``first`` on, and to their vectors."""
    found, one = context.make_array(given.args[0])(context, builder, x), first.type(1)
    n = builder.extract_value(found.shape, 1)
    end, few = builder.sub(last, one), ir.VectorType(ir.FloatType(), FEW)
    rows = []
    for i in range(LANES):
        r = builder.add(first, first.type(i))
        r = builder.select(builder.icmp_signed("<", r, end), r, end)
        place = builder.gep(found.data, [builder.add(builder.mul(r, n), j)])
        rows.append(builder.bitcast(place, few.as_pointer()))
    vectors = [address(context, builder, given.args[4], block, builder.add(j, j.type(c))) for c in range(FEW)]
    return rows, vectors


@intrinsic
def _gather(context, x, first, last, j, block):
    def generate(context, builder, given, args):
        rows, vectors = _moves(context, builder, given, *args)
        parts = [builder.load(row, align=4) for row in rows]
        found = _transposed(builder, [_joined(builder, parts[c::FEW]) for c in range(FEW)])
        for value, place in zip(found, vectors, strict=True):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    return types.none(x, types.int64, types.int64, types.int64, block), generate


@intrinsic
def _scatter(context, x, first, last, j, block):
    def generate(context, builder, given, args):
        rows, vectors = _moves(context, builder, given, *args)
        found = _transposed(builder, [builder.load(place, align=4) for place in vectors])
        for i in range(LANES):
            start = i // FEW * FEW
            part = _shuffled(builder, found[i % FEW], found[i % FEW], list(range(start, start + FEW)))
            builder.store(part, rows[i], align=4)
        return context.get_dummy_value()

    return types.none(x, types.int64, types.int64, types.int64, block), generate


@by_lanes
def gather_rows(x, first, last, block):
    """Fills a block with the rows from ``first`` on, up to the one before ``last``."""
    n = x.shape[1]
    if n >= FEW:
        for j in range(0, n, FEW):
            _gather(x, first, last, min(j, n - FEW), block)
    else:
        for i in range(LANES):
            for j in range(n):
                block[j, i] = x[min(first + i, last - 1), j]


@by_lanes
def scatter_rows(x, first, last, block):
    """The reverse."""
    n = x.shape[1]
    if n >= FEW:
        for j in range(0, n, FEW):
            _scatter(x, first, last, min(j, n - FEW), block)
    else:
        for i in range(LANES):
            for j in range(n):
                x[min(first + i, last - 1), j] = block[j, i]


@intrinsic
def _exchange(context, block, i, j):
    """Puts the larger of two vectors of items before the smaller one, lane by lane."""

    def generate(context, builder, given, args):
        places = [address(context, builder, given.args[0], args[0], i) for i in args[1:]]
        first, second = (builder.load(place, align=4) for place in places)
        is_above = builder.fcmp_ordered(">", first, second)
        builder.store(builder.select(is_above, first, second), places[0], align=4)
        builder.store(builder.select(is_above, second, first), places[1], align=4)
        return context.get_dummy_value()

    return types.none(block, types.int64, types.int64), generate


@by_lanes
def sort_rows(block):
    """Sorts every lane in descending order, by merge exchange (Knuth, volume 3, algorithm 5.2.2M)."""
    n, top = block.shape[0], 1
    while 2 * top < n:
        top *= 2
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            for i in range(n - d):
                if i & p == r:
                    _exchange(block, i, i + d)
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
