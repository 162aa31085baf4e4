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
FEW = 4  # items of a row that are moved at once

_index = ir.IntType(32)


def _picked(builder, x, places):
    """A vector of the numbers of x at these places."""
    return builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(_index, len(places)), list(places)))


def _joined(builder, parts):
    while len(parts) > 1:
        both = list(range(2 * parts[0].type.count))
        pattern = ir.Constant(ir.VectorType(_index, len(both)), both)
        parts = [builder.shuffle_vector(a, b, pattern) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _mover(gathers):
    """``(x, first, last, j, block)``: moves items j to j + 3 of the rows from ``first`` on to a block, or back."""

    @intrinsic
    def move(context, x, first, last, j, block):
        def generate(context, builder, given, args):
            x, first, last, j, block = args
            found, few = context.make_array(given.args[0])(context, builder, x), ir.VectorType(ir.FloatType(), FEW)
            n, end = builder.extract_value(found.shape, 1), builder.sub(last, last.type(1))
            rows = []
            for i in range(LANES):
                r = builder.add(first, first.type(i))
                r = builder.select(builder.icmp_signed("<", r, end), r, end)
                place = builder.gep(found.data, [builder.add(builder.mul(r, n), j)])
                rows.append(builder.bitcast(place, few.as_pointer()))
            units = [builder.add(j, j.type(c)) for c in range(FEW)]
            vectors = [address(context, builder, given.args[4], block, unit) for unit in units]
            sources, goals = (rows, vectors) if gathers else (vectors, rows)
            joined = _joined(builder, [builder.load(source, align=4) for source in sources])
            for i, goal in enumerate(goals):
                builder.store(_picked(builder, joined, range(i, FEW * LANES, len(goals))), goal, align=4)
            return context.get_dummy_value()

        return types.none(x, types.int64, types.int64, types.int64, block), generate

    return move


_gather, _scatter = _mover(True), _mover(False)


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
