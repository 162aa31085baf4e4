"""Hard masks, and the positions of their ones, in Triton.

Numbers become integers of the same order, and three counts at a time cut a bracket in four.

There are three ways to process a row, chosen by :func:`khot.kernels.gpu.plans.plan`:

    registers   one program for a row, or for several short ones, which stay on chip: x is read once, y written once
    tiles       one program for a row, which it reads again for every count
    split       several programs for a row and a launch for every count, which ends at once for rows that are done;
                each program sums the counts of the previous launch, and the last counts give the ties before each part

Layout: x, y (rows, n), unit last stride; k (rows,). For indices, y has positions (rows, width), filled up already, and
bounds (rows, 2) are those of the part of each row. Keys are int32, for float64 int64. NaN has a place in their order:
every mask gets exactly k ones. Keys up to the floor, such as that of ``-inf``, are never chosen.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._torch_internals import is_recorded

from ..gpu.launch import launch
from ..gpu.plans import Table, plan
from ..gpu.tools import add3, arithmetic, in_shape, on_device, rows_of
from .exact import check_ranked, parts_of

SELECT: Table = {
    torch.float32: ((512, 1), (1024, 4), (4096, 8), (8192, 8)),
    torch.float64: ((256, 1), (1024, 4), (2048, 8), (4096, 16)),
}
SHORT, TOGETHER = 256, 512  # entries of rows that share a program, and of all rows in it
EXCLUDED = {  # keys of -inf
    torch.float64: -0x7FF0000000000000, torch.float32: -0x7F800000, torch.float16: -0x7C00, torch.bfloat16: -0x7F80,
}  # fmt: skip
BITS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}


@dataclass(frozen=True)
class Task:
    """What a kernel is compiled for.

    Attributes:
        lowest: The least number in the dtype of keys, which is no key.
        key: The dtype of keys.
        floor: The largest key that is never chosen.
        block: Entries of a row that a program holds at a time.
        aligned: Whether rows begin and end at multiples of 16 entries.
        indices: Whether positions are wanted, rather than a mask.
        rows: Rows of a program.
        in_registers: Whether they stay on chip.
        parts: Programs of a split row, or the next power of 2.
    """

    lowest: int
    key: tl.dtype
    floor: int
    block: int
    aligned: bool
    indices: bool
    rows: int = 1
    in_registers: bool = False
    parts: int = 1


_task = functools.cache(Task)


@triton.jit
def _load_keys(x_ptr, places, there, TASK: tl.constexpr):
    """Numbers as integers of the same order, both zeros as 0; the lowest key, which is no number's, outside the row."""
    x = tl.load(x_ptr + places, mask=there, other=0.0)
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
    elif x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(there, tl.where(bits < 0, TASK.lowest - bits, bits), TASK.lowest)


@triton.jit
def _mean(a, b):
    return (a >> 1) + (b >> 1) + (a & b & 1)  # their sum may overflow


@triton.jit
def _cuts(low, high):
    """Three keys that cut a bracket in four."""
    middle = _mean(low, high)
    return tl.maximum(_mean(low, middle), low + 1), middle, _mean(middle, high)


@triton.jit
def _count_three(key, a, b, c):
    return (key > a[:, None]).to(tl.int32), (key > b[:, None]).to(tl.int32), (key > c[:, None]).to(tl.int32)


@triton.jit
def _count_span(x_ptr, begin, end, a, b, c, TASK: tl.constexpr):
    """How many entries of a row, from ``begin`` to ``end``, are above three keys, each (1,)."""
    BLOCK: tl.constexpr = TASK.block
    one, two, three = tl.zeros((1, BLOCK), tl.int32), tl.zeros((1, BLOCK), tl.int32), tl.zeros((1, BLOCK), tl.int32)
    for start in range(begin, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        first, second, third = _count_three(_load_keys(x_ptr, cols, cols < end, TASK), a, b, c)
        one += first
        two += second
        three += third
    return tl.reduce((one, two, three), 1, add3)


@triton.jit
def _is_found(low, high, above, k):
    return (above == k) | (low + 1 >= high)


@triton.jit
def _narrow(low, high, above, k, over_a, over_b, over_c):
    """The largest key with more than k above it, the smallest with at most k, how many are above that, and the end."""
    a, b, c = _cuts(low, high)
    going = ~_is_found(low, high, above, k)
    low = tl.where(going, tl.where(over_c > k, c, tl.where(over_b > k, b, tl.where(over_a > k, a, low))), low)
    top = tl.where(over_a <= k, a, tl.where(over_b <= k, b, tl.where(over_c <= k, c, high)))
    above_top = tl.where(over_a <= k, over_a, tl.where(over_b <= k, over_b, tl.where(over_c <= k, over_c, above)))
    high, above = tl.where(going, top, high), tl.where(going, above_top, above)
    return low, high, above, tl.min(_is_found(low, high, above, k).to(tl.int32), 0) > 0


@triton.jit
def _chosen(key, high, rest, seen):
    """The chosen entries of tiles (rows, entries) after ``seen`` ties in earlier tiles, and the new number of ties."""
    chosen = key > high[:, None]
    if tl.max(rest - seen, 0) > 0:
        tied = (key == high[:, None]).to(tl.int32)
        chosen |= (tied > 0) & (seen[:, None] + tl.cumsum(tied, 1) <= rest[:, None])
        seen += tl.sum(tied, 1)
    return chosen, seen


@triton.jit
def _store(y_ptr, cols, chosen, there, written, TASK: tl.constexpr):
    """Stores a mask, or the positions after ``written`` earlier ones, and returns their new number."""
    if TASK.indices:
        places = tl.cumsum(chosen.to(tl.int32), 1)
        tl.store(y_ptr + (written - 1)[:, None] + places, tl.broadcast_to(cols, places.shape), mask=chosen)
        written += tl.max(places, 1)
    else:
        tl.store(y_ptr + cols, chosen.to(tl.float32).to(y_ptr.dtype.element_ty), mask=there)
    return written


@triton.jit
def _mark_span(x_ptr, y_ptr, begin, end, high, rest, seen, written, TASK: tl.constexpr):
    BLOCK: tl.constexpr = TASK.block
    for start in range(begin, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        chosen, seen = _chosen(_load_keys(x_ptr, cols, cols < end, TASK), high, rest, seen)
        written = _store(y_ptr, cols, chosen, cols < end, written, TASK)


@triton.jit
def _part_of(bounds_ptr, row, there, begin, end, k, high, TASK: tl.constexpr):
    """The part of rows inside [begin, end), each (ROWS,), and the first bracket: a short part is chosen whole."""
    first = tl.load(bounds_ptr + 2 * row, mask=there, other=0).to(tl.int32)
    last = tl.load(bounds_ptr + 2 * row + 1, mask=there, other=0).to(tl.int32)
    high = tl.where(k >= last - first, TASK.floor + 1, high)
    return tl.maximum(first, begin), tl.minimum(last, end), high


@triton.jit(do_not_specialize=["stride_k", "stride_x", "width", "rows", "n"])
def _topk_mask(x_ptr, y_ptr, k_ptr, bounds_ptr, stride_k, stride_x, width, rows, n, TASK: tl.constexpr):
    """Some rows in registers, or one in tiles."""
    ROWS: tl.constexpr = TASK.rows
    BLOCK: tl.constexpr = TASK.block
    if TASK.aligned:
        n, stride_x = n // 16 * 16, stride_x // 16 * 16  # so that the compiler knows that they are multiples
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, cols = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    there = (row < rows)[:, None] & (cols < n)  # (ROWS, BLOCK)
    k = tl.load(k_ptr + row * stride_k, mask=row < rows, other=0).to(tl.int32)  # (ROWS,)
    low, high = tl.full((ROWS,), TASK.floor, TASK.key), tl.full((ROWS,), -(TASK.lowest + 1), TASK.key)
    above, seen, written = tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32)
    begin, end = 0, n
    if TASK.indices:
        begins, ends, high = _part_of(bounds_ptr, row, row < rows, 0, n, k, high, TASK)
        there &= (cols >= begins[:, None]) & (cols < ends[:, None])
        begin, end = tl.max(begins, 0), tl.max(ends, 0)  # of the only row, in tiles
    else:
        width = n
    if TASK.in_registers:
        key = _load_keys(x_ptr, row[:, None] * stride_x + cols, there, TASK)
    found = tl.min(_is_found(low, high, above, k).to(tl.int32), 0) > 0
    while ~found:
        a, b, c = _cuts(low, high)
        if TASK.in_registers:
            over_a, over_b, over_c = tl.reduce(_count_three(key, a, b, c), 1, add3)
        else:
            over_a, over_b, over_c = _count_span(x_ptr + first * stride_x, begin, end, a, b, c, TASK)
        low, high, above, found = _narrow(low, high, above, k, over_a, over_b, over_c)
    if TASK.in_registers:
        chosen, seen = _chosen(key, high, k - above, seen)
        _store(y_ptr + row[:, None] * width, cols, chosen, there, written, TASK)
    else:
        x_ptr, y_ptr = x_ptr + first * stride_x, y_ptr + first * width
        _mark_span(x_ptr, y_ptr, begin, end, high, k - above, seen, written, TASK)


@triton.jit
def _load_counts(counts_ptr, step, rows, row, parts, TASK: tl.constexpr):
    """Counts of the parts of a row above three keys, (1, TASK.parts)."""
    PARTS: tl.constexpr = TASK.parts
    part = tl.arange(0, PARTS)[None, :]
    counts, there = counts_ptr + 3 * ((step * rows + row) * parts + part), part < parts
    one, two = tl.load(counts, mask=there, other=0), tl.load(counts + 1, mask=there, other=0)
    return one, two, tl.load(counts + 2, mask=there, other=0)


@triton.jit
def _load_bracket(state_ptr, step, rows, row, TASK: tl.constexpr):
    state = state_ptr + 3 * (step * rows + row + tl.arange(0, 1))
    return tl.load(state).to(TASK.key), tl.load(state + 1).to(TASK.key), tl.load(state + 2).to(tl.int32)  # (1,)


@triton.jit
def _store_three(pointer, one, two, three):
    at = pointer + tl.arange(0, 1)
    tl.store(at, one.to(pointer.dtype.element_ty))
    tl.store(at + 1, two.to(pointer.dtype.element_ty))
    tl.store(at + 2, three.to(pointer.dtype.element_ty))


@triton.jit(do_not_specialize=["stride_k", "stride_x", "n", "step", "last", "blocks"])
def _topk_mask_count(
    x_ptr, state_ptr, counts_ptr, k_ptr, bounds_ptr, stride_k, stride_x, n, step, last, blocks, TASK: tl.constexpr
):
    """The bracket that the counts of the previous step leave, and counts of this program's part of the row in it.

    In the last step the thresholds of all rows are known, and entries at and above the threshold are counted.
    """
    if TASK.aligned:
        n, stride_x = n // 16 * 16, stride_x // 16 * 16
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts, rows = tl.num_programs(0), tl.num_programs(1)
    k = tl.load(k_ptr + row * stride_k + tl.arange(0, 1)).to(tl.int32)
    low, high = tl.full((1,), TASK.floor, TASK.key), tl.full((1,), -(TASK.lowest + 1), TASK.key)
    above = tl.zeros((1,), tl.int32)
    begin = part * blocks * TASK.block
    end = begin + tl.minimum(n - begin, blocks * TASK.block)
    if TASK.indices:
        begins, ends, high = _part_of(bounds_ptr, row + tl.arange(0, 1), True, begin, end, k, high, TASK)
        begin, end = tl.max(begins, 0), tl.max(ends, 0)
    found = tl.max(_is_found(low, high, above, k).to(tl.int32), 0) > 0
    if step > 0:
        low, high, above = _load_bracket(state_ptr, step - 1, rows, row, TASK)
        one, two, three = _load_counts(counts_ptr, step - 1, rows, row, parts, TASK)
        over_a, over_b, over_c = tl.reduce((one, two, three), 1, add3)
        low, high, above, found = _narrow(low, high, above, k, over_a, over_b, over_c)
    if part == 0:
        _store_three(state_ptr + 3 * (step * rows + row), low, high, above)
    if (step == last) | ~found:
        a, b, c = _cuts(low, high)
        if step == last:
            a, b, c = high - 1, high, high
        one, two, three = _count_span(x_ptr + row * stride_x, begin, end, a, b, c, TASK)
        _store_three(counts_ptr + 3 * ((step * rows + row) * parts + part), one, two, three)


@triton.jit(do_not_specialize=["stride_k", "stride_x", "width", "n", "last", "blocks"])
def _topk_mask_mark(
    x_ptr, y_ptr, state_ptr, counts_ptr, k_ptr, bounds_ptr, stride_k, stride_x, width, n, last, blocks,
    TASK: tl.constexpr,
):  # fmt: skip
    """The mask of this program's part of the row."""
    PARTS: tl.constexpr = TASK.parts
    if TASK.aligned:
        n, stride_x = n // 16 * 16, stride_x // 16 * 16
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts, rows = tl.num_programs(0), tl.num_programs(1)
    k = tl.load(k_ptr + row * stride_k + tl.arange(0, 1)).to(tl.int32)
    _, high, above = _load_bracket(state_ptr, last, rows, row, TASK)
    upto, over, _ = _load_counts(counts_ptr, last, rows, row, parts, TASK)
    is_earlier = tl.arange(0, PARTS)[None, :] < part
    seen = tl.sum(tl.where(is_earlier, upto - over, 0), 1)  # ties in earlier parts
    written = tl.sum(tl.where(is_earlier, over, 0), 1) + tl.minimum(seen, k - above)
    begin = part * blocks * TASK.block
    end = begin + tl.minimum(n - begin, blocks * TASK.block)
    if TASK.indices:
        begins, ends, _ = _part_of(bounds_ptr, row + tl.arange(0, 1), True, begin, end, k, high, TASK)
        begin, end = tl.max(begins, 0), tl.max(ends, 0)
    else:
        width = n
    x_ptr, y_ptr = x_ptr + row * stride_x, y_ptr + row * width
    _mark_span(x_ptr, y_ptr, begin, end, high, k - above, seen, written, TASK)


def topk_mask(x: Tensor, k: Tensor, check: bool) -> Tensor:
    if check and not is_recorded(x):
        check_ranked(x, k)
    items, sizes = rows_of(x), k.reshape(-1)
    y = torch.empty_like(items, memory_format=torch.contiguous_format)
    _select(items, y, sizes, sizes, False, False)
    return in_shape(y, x.shape)


def topk_indices(x: Tensor, k: int, begins: Tensor, ends: Tensor, skips: bool, fill: int, check: bool) -> Tensor:
    if check and not is_recorded(x):
        check_ranked(parts_of(x, begins, ends), k)
    items, bounds = rows_of(x), torch.stack((begins, ends), -1)
    found = torch.full((len(items), k), fill, dtype=torch.int64, device=x.device)
    sizes = torch.full((), min(k, x.shape[-1]), device=x.device).expand(len(items))
    if k > 0:
        _select(items, found, sizes, bounds, True, skips)
    return found.reshape(*x.shape[:-1], k)


def _select(x: Tensor, y: Tensor, k: Tensor, bounds: Tensor, indices: bool, skips: bool) -> None:
    """Writes the masks of rows, or the positions of their ones, to y."""
    (rows, n), bits = x.shape, BITS[x.dtype]
    how = plan(rows, n, arithmetic(x)[0], SELECT)
    strides, aligned = (k.stride(0), x.stride(0)), n % 16 == 0 and x.stride(0) % 16 == 0
    lowest, key = -(2 ** (bits - 1)), tl.int64 if bits == 64 else tl.int32
    common = lowest, key, EXCLUDED[x.dtype] if skips else lowest, how.block, aligned, indices
    with on_device(x):
        if how.splits == 1:
            short = how.block <= SHORT
            task = _task(*common, rows=TOGETHER // how.block if short else 1, in_registers=how.resident)
            arguments: tuple[Tensor | int, ...] = x, y, k, bounds, *strides, y.shape[1], rows, n
            launch(_topk_mask, (-(-rows // task.rows), 1, 1), arguments, (task,), num_warps=4 if short else how.warps)
            return
        (parts, length), last = how.chunks(n), bits // 2  # steps, each of which finds two bits of a key
        state = torch.empty(last + 1, rows, 3, dtype=torch.int64, device=x.device)
        counts = torch.empty(last + 1, rows, parts, 3, dtype=torch.int32, device=x.device)
        task, blocks = _task(*common, parts=1 << (parts - 1).bit_length()), length // how.block
        for step in range(last + 1):
            arguments = x, state, counts, k, bounds, *strides, n, step, last, blocks
            _topk_mask_count[parts, rows](*arguments, task, num_warps=how.warps)
        arguments = x, y, state, counts, k, bounds, *strides, y.shape[1], n, last, blocks
        _topk_mask_mark[parts, rows](*arguments, task, num_warps=how.warps)
