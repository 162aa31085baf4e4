"""Relaxed top-k masks in Triton: the threshold and y = F((x - t) / scale) in one kernel.

Three ways through a row, chosen by :func:`khot.kernels.tiles.plan`:

    registers   one program per row, which stays on chip: x is read once, y written once
    tiles       one program per row, which reads it again for every step of the root finder
    split       several programs per row, a launch per step; each program adds up the partial sums of the one before

Layout: x, y (rows, n), unit last stride; k, scale, anchor, offset (rows,) in float64, where k and scale may be one
number for all rows. Arithmetic in float32, in float64 for float64. Saved for the derivative: all but k and y.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contents import check_rows
from ..links.base import Link, link_numbers
from ..links.base_triton import triton_link, value
from ..rows import Threshold
from ..tiles import Plan, Table, plan
from ..triton_tools import (
    RowNumbers,
    add4,
    arithmetic,
    inverse_scale,
    on_device,
    per_row,
    row_numbers,
    rows_of,
    store_tile,
)
from .kinds import KINDS
from .triton_root import (
    FIRST_STEPS,
    advance,
    distances,
    finish_row,
    load_shrunk,
    load_threshold,
    normal_scale,
    row_root,
    row_sums,
    shrinkage,
    split_k,
    tile_root,
)

FORWARD: Table = {
    torch.float32: ((512, 1), (1024, 8), (4096, 8), (8192, 8)),
    torch.float64: ((128, 1), (512, 8), (1024, 8), (2048, 16)),
}
WIDE_TILE = {torch.float32: (4096, 16), torch.float64: (1024, 8)}
SMALL_K = tl.constexpr(0.5)  # so small that no entry which is scaled to make up for rounding gets to 1
SLIGHT_RATE = tl.constexpr(2.0**-10)  # relative, at most, what is made up for
GOING, DONE, STUCK, SPECIAL = tl.constexpr(0.0), tl.constexpr(1.0), tl.constexpr(2.0), tl.constexpr(3.0)


@triton.jit
def _mask_fwd(
    x_ptr, y_ptr, anchor_ptr, offset_ptr, sound_ptr, k_ptr, k_number: tl.float64, stride_k, scale_ptr,
    scale_number: tl.float64, stride_scale, q_number: tl.float64, centre: tl.float64, spread: tl.float64,
    stride_x, stride_y, n, sample_step,
    K_TENSOR: tl.constexpr, SCALE_TENSOR: tl.constexpr, HAS_Y: tl.constexpr, CHECK: tl.constexpr, LOG: tl.constexpr,
    LINK: tl.constexpr, BLOCK: tl.constexpr, HARD_BLOCK: tl.constexpr, IN_REGISTERS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    k = per_row(k_ptr, k_number, row, stride_k, K_TENSOR)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    factor, q = shrinkage(scale, DTYPE), tl.full((), q_number, DTYPE)
    normal = normal_scale(scale, DTYPE)
    scale = scale * factor
    x_ptr += row * stride_x
    y_ptr += row * stride_y
    if IN_REGISTERS:
        tile = load_shrunk(x_ptr, 0, n, factor, BLOCK, DTYPE)
        high, off, done, special, sound = tile_root(
            tile, k, scale, factor, q, centre, spread, LINK, BLOCK, DTYPE
        )  # fmt: skip
        if CHECK:
            tl.store(sound_ptr + row, sound & normal)
    else:
        tile = tl.load(x_ptr + tl.arange(0, BLOCK) * sample_step).to(DTYPE) * factor.to(DTYPE)
        high, off, done, special = row_root(
            x_ptr, tile, n, k, scale, factor, q, centre, spread, LINK, BLOCK, DTYPE
        )  # fmt: skip
    if special | (~done):
        high, off = finish_row(x_ptr, n, k, scale, factor, q, high, off, done, special, LINK, HARD_BLOCK, DTYPE)
        if IN_REGISTERS:
            tile = load_shrunk(x_ptr, 0, n, factor, BLOCK, DTYPE)  # again, rather than to hold it through all that
    _store_threshold(anchor_ptr, offset_ptr, row, high, off, factor)
    if HAS_Y:
        k = per_row(k_ptr, k_number, row, stride_k, K_TENSOR)  # again, as the tile
        _store_values(x_ptr, y_ptr, tile, n, k, high, off, factor, scale, q, LINK, LOG, BLOCK, IN_REGISTERS, DTYPE)


@triton.jit
def _store_values(
    x_ptr, y_ptr, tile, n, k, high, off, factor, scale, q,
    LINK: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr, IN_REGISTERS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """y of a row: of the tile in registers, or of all tiles in memory."""
    inv_scale, rate = inverse_scale(scale, DTYPE), tl.zeros((), DTYPE)
    if IN_REGISTERS:
        if (not LOG) & (k < SMALL_K):
            rate = _settling(k, tl.sum(value(distances(tile, high, off, inv_scale), q, LINK, LOG), 0), DTYPE)
        y = value(distances(tile, high, off, inv_scale), q, LINK, LOG)  # again, rather than to hold it beside the tile
        store_tile(y_ptr, y if LOG else y + rate * y, 0, n, BLOCK)
    else:
        if (not LOG) & (k < SMALL_K):
            total = tl.zeros((), tl.float64)
            for start in range(0, n, BLOCK):
                x = load_shrunk(x_ptr, start, n, factor, BLOCK, DTYPE)
                total += tl.sum(value(distances(x, high, off, inv_scale), q, LINK, LOG), 0).to(tl.float64)
            rate = _settling(k, total, DTYPE)
        for start in range(0, n, BLOCK):
            x = load_shrunk(x_ptr, start, n, factor, BLOCK, DTYPE)
            y = value(distances(x, high, off, inv_scale), q, LINK, LOG)
            store_tile(y_ptr, y if LOG else y + rate * y, start, n, BLOCK)


@triton.jit
def _settling(k, total, DTYPE: tl.constexpr):
    """What the entries of a mask with a small k, far out in a tail, are to grow by to sum to k."""
    rate = k / total.to(tl.float64) - 1.0
    return tl.where(tl.abs(rate) < SLIGHT_RATE, rate, 0.0).to(DTYPE)


@triton.jit
def _store_threshold(anchor_ptr, offset_ptr, row, high, off, factor):
    """The anchor in the units of x, and the offset, which is in scales."""
    tl.store(anchor_ptr + row, high.to(tl.float64) / factor)
    tl.store(offset_ptr + row, off.to(tl.float64))


@triton.jit
def _split_start(
    x_ptr, state_ptr, k_ptr, k_number: tl.float64, stride_k, scale_ptr, scale_number: tl.float64, stride_scale,
    q_number: tl.float64, stride_x, n, centre: tl.float64, spread: tl.float64, sample_step,
    K_TENSOR: tl.constexpr, SCALE_TENSOR: tl.constexpr, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The root of a sample of each row."""
    row = tl.program_id(0).to(tl.int64)
    k = per_row(k_ptr, k_number, row, stride_k, K_TENSOR) * (BLOCK / n.to(tl.float64))
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    factor, q = shrinkage(scale, DTYPE), tl.full((), q_number, DTYPE)
    tile = tl.load(x_ptr + row * stride_x + tl.arange(0, BLOCK) * sample_step).to(DTYPE) * factor.to(DTYPE)
    high, off, _, _, _ = tile_root(tile, k, scale * factor, factor, q, centre, spread, LINK, BLOCK, DTYPE)
    _store_state(state_ptr + 3 * row, high, off, GOING)


@triton.jit
def _split_advance(
    state_ptr, partial_ptr, row, rows, step, splits, k, scale, factor, q,
    LINK: tl.constexpr, SPLITS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The threshold and status of a row after ``step`` steps, from what they were before the last and its sums."""
    before = state_ptr + 3 * ((step - 1) * rows + row)
    high, off, status = tl.load(before).to(DTYPE), tl.load(before + 1).to(DTYPE), tl.load(before + 2)
    if status == GOING:
        part = tl.arange(0, SPLITS)
        base = partial_ptr + 4 * (((step - 1) * rows + row) * splits + part)
        there = part < splits
        above, signed, total, slope = tl.reduce(
            (
                tl.load(base, mask=there, other=0.0),
                tl.load(base + 1, mask=there, other=0.0),
                tl.load(base + 2, mask=there, other=0.0),
                tl.load(base + 3, mask=there, other=0.0),
            ),
            0,
            add4,
        )
        whole, rest = split_k(k)
        high, off, done, going, special = advance(
            high, off, above.to(tl.int32), signed.to(DTYPE), total.to(DTYPE), slope.to(DTYPE),
            whole, rest.to(DTYPE), scale, factor, q, LINK, DTYPE,
        )  # fmt: skip
        ended = tl.where(done, tl.where(special, SPECIAL, DONE), STUCK)
        status = tl.where(going, GOING, ended).to(tl.float64)
    return high, off, status


@triton.jit
def _store_state(pointer, high, off, status):
    tl.store(pointer, high.to(tl.float64))
    tl.store(pointer + 1, off.to(tl.float64))
    tl.store(pointer + 2, status)


@triton.jit(do_not_specialize=["step"])  # or it would be compiled once for step 0, once for 1 and once for others
def _split_step(
    x_ptr, state_ptr, partial_ptr, k_ptr, k_number: tl.float64, stride_k, scale_ptr, scale_number: tl.float64,
    stride_scale, q_number: tl.float64, stride_x, n, rows, step, splits, chunk,
    K_TENSOR: tl.constexpr, SCALE_TENSOR: tl.constexpr, LINK: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Takes the step that the last partial sums tell, then adds up this program's chunk of the row there."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = per_row(k_ptr, k_number, row, stride_k, K_TENSOR)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    factor, q = shrinkage(scale, DTYPE), tl.full((), q_number, DTYPE)
    scale = scale * factor
    high, off = tl.load(state_ptr + 3 * row).to(DTYPE), tl.load(state_ptr + 3 * row + 1).to(DTYPE)
    status = tl.full((), GOING, tl.float64)
    if step > 0:
        high, off, status = _split_advance(
            state_ptr, partial_ptr, row, rows, step, splits, k, scale, factor, q, LINK, SPLITS, DTYPE
        )
        if part == 0:
            _store_state(state_ptr + 3 * (step * rows + row), high, off, status)
    if status == GOING:
        begin = part * chunk
        length = tl.minimum(n - begin, chunk)
        above, signed, total, slope = row_sums(
            x_ptr + row * stride_x + begin, length, high, off, factor, inverse_scale(scale, DTYPE), q,
            LINK, BLOCK, DTYPE,
        )  # fmt: skip
        base = partial_ptr + 4 * ((step * rows + row) * splits + part)
        tl.store(base, above.to(tl.float64))
        tl.store(base + 1, signed.to(tl.float64))
        tl.store(base + 2, total.to(tl.float64))
        tl.store(base + 3, slope.to(tl.float64))


@triton.jit
def _split_finish(
    x_ptr, anchor_ptr, offset_ptr, state_ptr, partial_ptr, k_ptr, k_number: tl.float64, stride_k, scale_ptr,
    scale_number: tl.float64, stride_scale, q_number: tl.float64, stride_x, n, rows, steps, splits,
    K_TENSOR: tl.constexpr, SCALE_TENSOR: tl.constexpr, LINK: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The threshold after the last step; a hard row is finished here, by one program."""
    row = tl.program_id(0).to(tl.int64)
    k = per_row(k_ptr, k_number, row, stride_k, K_TENSOR)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    factor, q = shrinkage(scale, DTYPE), tl.full((), q_number, DTYPE)
    scale = scale * factor
    high, off, status = _split_advance(
        state_ptr, partial_ptr, row, rows, steps, splits, k, scale, factor, q, LINK, SPLITS, DTYPE
    )
    special = status == SPECIAL
    done = (status == DONE) | special
    if special | (~done):
        x_ptr += row * stride_x
        high, off = finish_row(x_ptr, n, k, scale, factor, q, high, off, done, special, LINK, BLOCK, DTYPE)
    _store_threshold(anchor_ptr, offset_ptr, row, high, off, factor)


@triton.jit
def _split_map(
    x_ptr, y_ptr, anchor_ptr, offset_ptr, scale_ptr, scale_number: tl.float64, stride_scale, q_number: tl.float64,
    stride_x, stride_y, n,
    SCALE_TENSOR: tl.constexpr, LOG: tl.constexpr, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile of y."""
    start, row = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    high, off, factor, inv_scale = load_threshold(anchor_ptr, offset_ptr, row, scale, DTYPE)
    x = load_shrunk(x_ptr + row * stride_x, start, n, factor, BLOCK, DTYPE)
    z = distances(x, high, off, inv_scale)
    store_tile(y_ptr + row * stride_y, value(z, tl.full((), q_number, DTYPE), LINK, LOG), start, n, BLOCK)


def launch_forward(
    x: Tensor, k: Tensor, scale: Tensor, link: Link, log: bool = False, with_y: bool = True, check: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """y (or log y; empty if not wanted), anchors, offsets, and with ``check`` whether each row is in order.

    x is (..., n), k and scale (...). Only rows that are held in registers are checked, of the others the last is False.
    """
    rows = rows_of(x)
    y = torch.empty(rows.shape if with_y else (0, 1), dtype=x.dtype, device=x.device)
    at = Threshold(*(torch.empty(len(rows), dtype=torch.float64, device=x.device) for _ in range(2)))
    sound = torch.zeros(len(rows), dtype=torch.bool, device=x.device) if check else None
    torch_dtype, dtype = arithmetic(x)
    how = plan(len(rows), rows.shape[1], torch_dtype, FORWARD, WIDE_TILE)
    sizes = row_numbers(k, x.device), row_numbers(scale, x.device)
    with on_device(x):
        if how.splits > 1:
            _launch_split(rows, y, at, *sizes, link, log, how, dtype)
        else:
            _launch_rows(rows, y, at, sound, *sizes, link, log, how, dtype)
    anchor, offset = (v.reshape(x.shape[:-1]) for v in at)
    return y.reshape(x.shape if with_y else 0), anchor, offset, sound


def _launch_rows(
    x: Tensor, y: Tensor, at: Threshold, sound: Tensor | None, k: RowNumbers, scale: RowNumbers, link: Link,
    log: bool, how: Plan, dtype: tl.dtype,
) -> None:  # fmt: skip
    n = x.shape[1]
    _mask_fwd[(len(x),)](
        x, y, *at, at.anchor if sound is None else sound, *k.arguments(at.anchor), *scale.arguments(at.anchor),
        *link_numbers(link), x.stride(0), y.stride(0), n, max(1, n // how.block),
        K_TENSOR=k.tensor is not None, SCALE_TENSOR=scale.tensor is not None,
        HAS_Y=len(y) > 0, CHECK=sound is not None, LOG=log, LINK=triton_link(link), BLOCK=how.block,
        HARD_BLOCK=32 * how.warps, IN_REGISTERS=how.resident, DTYPE=dtype, num_warps=how.warps,
    )  # fmt: skip


def _launch_split(
    x: Tensor, y: Tensor, at: Threshold, k: RowNumbers, scale: RowNumbers, link: Link, log: bool,
    how: Plan, dtype: tl.dtype,
) -> None:  # fmt: skip
    (rows, n), steps = x.shape, FIRST_STEPS.value
    splits, chunk = how.chunks(n)
    state = torch.empty(steps, rows, 3, dtype=torch.float64, device=x.device)
    partial = torch.empty(steps, rows, splits, 4, dtype=torch.float64, device=x.device)
    common = {
        "SCALE_TENSOR": scale.tensor is not None, "LINK": triton_link(link), "BLOCK": how.block, "DTYPE": dtype,
        "num_warps": how.warps,
    }  # fmt: skip
    solve = {**common, "K_TENSOR": k.tensor is not None}
    placeholder, (q, *start) = at.anchor, link_numbers(link)
    numbers = (*k.arguments(placeholder), *scale.arguments(placeholder), q, x.stride(0), n)
    _split_start[(rows,)](x, state, *numbers, *start, n // how.block, **solve)
    solve["SPLITS"] = triton.next_power_of_2(splits)
    for step in range(steps):
        _split_step[(splits, rows)](x, state, partial, *numbers, rows, step, splits, chunk, **solve)
    _split_finish[(rows,)](x, *at, state, partial, *numbers, rows, steps, splits, **solve)
    if len(y):
        _split_map[(triton.cdiv(n, how.block), rows)](
            x, y, *at, *scale.arguments(placeholder), q, x.stride(0), y.stride(0), n, LOG=log, **common
        )


def threshold(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor]:
    _, anchor, offset = _checked(x, k, scale, link, False, softness, check, with_y=False)
    return anchor, offset


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _checked(x, k, scale, link, KINDS[kind].log, softness, check, with_y=True)


def _checked(
    x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool, softness: str, check: bool, with_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    found = Link.find(link)
    check = check and not (x.is_cuda and torch.cuda.is_current_stream_capturing())  # a graph cannot look
    y, anchor, offset, sound = launch_forward(x, k, scale, found, log, with_y, check)
    if sound is not None and not bool(sound.all()):
        check_rows(x, k, scale, softness)
    return y, anchor, offset
