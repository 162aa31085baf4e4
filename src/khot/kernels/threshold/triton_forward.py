"""Relaxed top-k masks in Triton: the threshold of ordinary rows and y = F((x - t) / scale) in one kernel.

A row that the search does not solve is flagged, and :mod:`khot.kernels.threshold.triton_flagged`, which is launched
after every call, solves it by other means: nobody waits for the device to tell which rows these are. That kernel also
notes rows whose contents are not in order, of which none is ever solved here.

Few rows of many entries are split over all multiprocessors: the start is the root of a sample, each step is a launch
whose programs add up the partial sums of the one before, and which ends at once when the row is done.

Layout: x, y (rows, n), unit last stride; k, scale, anchor, offset (rows,) in float64, where k and scale may be one
number for all rows. Arithmetic in float32, in float64 for float64 scores and links that are too steep for float32.
Saved for the derivative: all but k and y.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contents import check_rows
from ..links.base import Link, link_numbers
from ..links.base_triton import triton_link, value
from ..triton_tools import add4, on_device, quotient, reciprocal, rows_of
from .triton_flagged import launch_flagged
from .triton_rows import (
    PARTS,
    Numbers,
    Tile,
    any_row,
    chunk_of,
    is_normal,
    is_split,
    load,
    over,
    partial_sums,
    per_row,
    program_rows,
    starts,
    store,
    tile_of,
)
from .triton_search import DONE, GOING, LOST, SPECIAL, advance, first_guess, moments, row_sums, search, settle

SMALL_K = tl.constexpr(0.5)  # a sum so small that no entry which is scaled to make up for rounding gets to 1
SLIGHT_RATE = tl.constexpr(2.0**-10)  # relative, at most, what is made up for
SAMPLE = 2**14  # entries of a split row that are looked at first
STEPS = tl.constexpr(6)
STATE, SUMS = tl.constexpr(8), tl.constexpr(4)  # room for the numbers of a split row, and for the sums of a chunk


@triton.jit
def split_k(k, dtype: tl.constexpr):
    """A float64 k as the nearest integer and a rest, which keeps its digits in float32."""
    whole = (k + 0.5).to(tl.int32)
    return whole, (k - whole.to(tl.float64)).to(dtype)


@triton.jit
def _growth(x_rows, n, anchor, off, inverse, q, k, LINK: tl.constexpr, TILE: tl.constexpr):
    """What the entries of masks with a small k, far out in a tail, are to grow by to sum to k."""
    total = partial_sums(TILE)
    for start in range(0, n, TILE.size):
        z = (load(x_rows, start, n, -float("inf"), TILE) - over(anchor)) * over(inverse) - over(off)
        total += tl.sum(value(z, q, LINK, False), 0)
    grown = k / tl.sum(total, 1)
    return tl.where((k < SMALL_K) & (tl.abs(grown - 1.0) < SLIGHT_RATE), grown, 1.0)


@triton.jit
def write_values(
    x_rows, y_rows, n, anchor, off, inverse, factor, q,
    LINK: tl.constexpr, LOG: tl.constexpr, GROWN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """y of each row."""
    for start in range(0, n, TILE.size):
        z = (load(x_rows, start, n, -float("inf"), TILE) - over(anchor)) * over(inverse) - over(off)
        y = value(z, q, LINK, LOG)
        store(y_rows, y * over(factor) if GROWN else y, start, n, TILE)


@triton.jit(do_not_specialize=["stride_k", "stride_scale", "stride_x", "rows", "n"])
def _mask_fwd(
    x_ptr, y_ptr, at, sizes, k_number: tl.float64, scale_number: tl.float64, stride_k, stride_scale, stride_x, rows, n,
    q_number: tl.float64, law, LINK: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The rows of a program; flags those that it does not solve."""
    SINGLE: tl.constexpr = x_ptr.dtype.element_ty != tl.float64
    row = program_rows(rows, TILE)
    anchor_ptr, offset_ptr, flag_ptr = at
    whole, rest = split_k(per_row(row, sizes[0], k_number, stride_k), TILE.dtype)
    scale = per_row(row, sizes[1], scale_number, stride_scale).to(TILE.dtype)
    q = tl.full((), q_number, tl.float64).to(TILE.dtype)
    x_rows = starts(x_ptr, row, stride_x, TILE)
    origin, count, total, squares = moments(x_rows, n, TILE)
    anchor, low, high, density, sound = first_guess(origin, count, total, squares, whole, rest, scale, q, law, LINK)
    sound = sound & is_normal(scale, x_ptr.dtype.element_ty)
    anchor, off, state = search(
        x_rows, n, anchor, low, high, density, sound, whole, rest, scale, q, LINK, TILE, SINGLE
    )  # fmt: skip
    if any_row(state == SPECIAL):
        anchor, off, state = settle(x_rows, n, anchor, off, state, whole, scale, q, LINK, TILE, SINGLE)
    tl.store(anchor_ptr + row, anchor.to(tl.float64))
    tl.store(offset_ptr + row, off.to(tl.float64) * (1.0 / LINK.unit))
    tl.store(flag_ptr + row, (state != DONE).to(tl.int32))
    if tl.program_id(0) == 0:
        tl.store(flag_ptr + rows, 0)
    if KIND != "threshold":
        inverse, k = reciprocal(scale) * LINK.unit, whole + rest
        y_rows = starts(y_ptr, row, n, TILE)
        if (KIND == "mask") & any_row(k < SMALL_K):
            factor = _growth(x_rows, n, anchor, off, inverse, q, k, LINK, TILE)
            write_values(x_rows, y_rows, n, anchor, off, inverse, factor, q, LINK, False, True, TILE)
        else:
            write_values(x_rows, y_rows, n, anchor, off, inverse, k, q, LINK, KIND == "log_mask", False, TILE)


@triton.jit
def _store_state(at, anchor, off, low, high, older, density, state):
    tl.store(at, anchor)
    tl.store(at + 1, off)
    tl.store(at + 2, low)
    tl.store(at + 3, high)
    tl.store(at + 4, older)
    tl.store(at + 5, density)
    tl.store(at + 6, state.to(anchor.dtype))


@triton.jit
def _load_state(at):
    numbers = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    return numbers, tl.load(at + 6).to(tl.int32)


@triton.jit
def _load_sums(at):
    """The sums over a row, from those of its chunks."""
    part = tl.arange(0, PARTS)[None, :]
    there, base = part < tl.num_programs(0), at[:, None] + part * SUMS
    above = tl.load(base, mask=there, other=0.0).to(tl.int32)
    signed = tl.load(base + 1, mask=there, other=0.0)
    total = tl.load(base + 2, mask=there, other=0.0)
    slope = tl.load(base + 3, mask=there, other=0.0)
    return tl.reduce((above, signed, total, slope), 1, add4)


@triton.jit
def _row_numbers(row, sizes, k_number, scale_number, stride_k, stride_scale, q_number, TILE: tl.constexpr):
    whole, rest = split_k(per_row(row, sizes[0], k_number, stride_k), TILE.dtype)
    scale = per_row(row, sizes[1], scale_number, stride_scale).to(TILE.dtype)
    return whole, rest, scale, tl.full((), q_number, tl.float64).to(TILE.dtype)


@triton.jit(do_not_specialize=["stride_k", "stride_scale", "n", "length"])
def _split_start(
    sample_ptr, state_ptr, sizes, k_number: tl.float64, scale_number: tl.float64, stride_k, stride_scale, n, length,
    q_number: tl.float64, law, LINK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The root of a sample of ``length`` entries of each row of n."""
    SINGLE: tl.constexpr = sample_ptr.dtype.element_ty != tl.float64
    row, growth = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), n / length
    sizes_of_sample = per_row(row, sizes[0], k_number, stride_k) / growth
    whole, rest = split_k(sizes_of_sample, TILE.dtype)
    _, _, scale, q = _row_numbers(row, sizes, k_number, scale_number, stride_k, stride_scale, q_number, TILE)
    x_rows = starts(sample_ptr, row, length, TILE)
    origin, count, total, squares = moments(x_rows, length, TILE)
    guess, low, high, density, sound = first_guess(origin, count, total, squares, whole, rest, scale, q, law, LINK)
    sound = sound & is_normal(scale, sample_ptr.dtype.element_ty)
    anchor, off, _ = search(
        x_rows, length, guess, low, high, density, sound, whole, rest, scale, q, LINK, TILE, SINGLE
    )  # fmt: skip
    # Moments of a sample give no bracket of the row, but one that is finite does as long as steps are good.
    reach = (high - low) * LINK.unit * growth
    state = tl.where(sound & (tl.abs(anchor) < float("inf")), GOING, LOST)
    at = state_ptr + row * STATE
    _store_state(at, anchor, off, off - reach, off + reach, 2.0 * reach, density * growth, state)


@triton.jit
def _advanced(work, row, step, whole, rest, scale, q, LINK: tl.constexpr, SINGLE: tl.constexpr):
    """The numbers and the state of rows after ``step`` steps, and the signed sum of the last."""
    at = step * tl.num_programs(1) + row
    numbers, state = _load_state(work[0] + (at - tl.num_programs(1)) * STATE)
    anchor, off, low, high, older, density = numbers
    above, signed, total, slope = _load_sums(work[1] + (at - tl.num_programs(1)) * (PARTS * SUMS))
    inverse = reciprocal(scale) * LINK.unit
    new_anchor, new_off, new_low, new_high, new_older, new_state = advance(
        above, signed, total, slope, whole, rest, anchor, off, low, high, older, density, scale, inverse, q,
        LINK, SINGLE,
    )  # fmt: skip
    going = state == GOING
    anchor, off = tl.where(going, new_anchor, anchor), tl.where(going, new_off, off)
    low, high, older = tl.where(going, new_low, low), tl.where(going, new_high, high), tl.where(going, new_older, older)
    return anchor, off, low, high, older, density, tl.where(going, new_state, state), tl.where(going, 0.0, signed)


@triton.jit(do_not_specialize=["stride_k", "stride_scale", "stride_x", "n", "step"])
def _split_step(
    x_ptr, work, sizes, k_number: tl.float64, scale_number: tl.float64, stride_k, stride_scale, stride_x, n,
    q_number: tl.float64, step, LINK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sums of this program's chunk at the threshold after ``step`` steps."""
    SINGLE: tl.constexpr = x_ptr.dtype.element_ty != tl.float64
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    whole, rest, scale, q = _row_numbers(
        row, sizes, k_number, scale_number, stride_k, stride_scale, q_number, TILE
    )  # fmt: skip
    at = step * tl.num_programs(1) + row
    if step == 0:
        numbers, state = _load_state(work[0] + at * STATE)
        anchor, off, low, high, older, density = numbers
    else:
        anchor, off, low, high, older, density, state, _ = _advanced(
            work, row, step, whole, rest, scale, q, LINK, SINGLE
        )
        if part == 0:
            _store_state(work[0] + at * STATE, anchor, off, low, high, older, density, state)
    # A small k is compared with what its mask sums up to, also where that is done.
    if tl.max(((state == GOING) | ((state == DONE) & (whole + rest < SMALL_K))).to(tl.int32), 0) > 0:
        begin, length = chunk_of(n, TILE)
        x_rows = starts(x_ptr, row, stride_x, TILE) + begin
        above, signed, total, slope = row_sums(
            x_rows, length, anchor, off, reciprocal(scale) * LINK.unit, q, LINK, TILE
        )
        base = work[1] + (at * PARTS + part) * SUMS
        tl.store(base, above.to(TILE.dtype))
        tl.store(base + 1, signed)
        tl.store(base + 2, total)
        tl.store(base + 3, slope)


@triton.jit(do_not_specialize=["stride_k", "stride_scale", "stride_x", "n"])
def _split_fwd(
    x_ptr, y_ptr, at, work, sizes, k_number: tl.float64, scale_number: tl.float64, stride_k, stride_scale, stride_x, n,
    q_number: tl.float64, LINK: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """y of this program's chunk, and the threshold."""
    SINGLE: tl.constexpr = x_ptr.dtype.element_ty != tl.float64
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    whole, rest, scale, q = _row_numbers(
        row, sizes, k_number, scale_number, stride_k, stride_scale, q_number, TILE
    )  # fmt: skip
    anchor, off, _, _, _, _, state, total = _advanced(work, row, STEPS, whole, rest, scale, q, LINK, SINGLE)
    if part == 0:
        tl.store(at[0] + row, anchor.to(tl.float64))
        tl.store(at[1] + row, off.to(tl.float64) * (1.0 / LINK.unit))
        tl.store(at[2] + row, (state != DONE).to(tl.int32))
        if tl.program_id(1) == 0:
            tl.store(at[2] + tl.num_programs(1), 0)
    if KIND != "threshold":
        k = whole + rest
        grown = quotient(k, total)
        factor = tl.where((k < SMALL_K) & (tl.abs(grown - 1.0) < SLIGHT_RATE), grown, 1.0)
        begin, length = chunk_of(n, TILE)
        x_rows, y_rows = starts(x_ptr, row, stride_x, TILE) + begin, starts(y_ptr, row, n, TILE) + begin
        write_values(
            x_rows, y_rows, length, anchor, off, reciprocal(scale) * LINK.unit, factor, q,
            LINK, KIND == "log_mask", KIND == "mask", TILE,
        )  # fmt: skip


def launch_forward(
    x: Tensor, k: Tensor, scale: Tensor, link: Link, kind: str = "mask"
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """y (or log y; None of kind "threshold"), anchors, offsets, and flags.

    x is (..., n), k and scale (...). There is a flag for each row that the fast path has left to the other, and at the
    end one for contents that are not in order.
    """
    items = rows_of(x)
    rows, n = items.shape
    y = None if kind == "threshold" else torch.empty((rows, n), dtype=x.dtype, device=x.device)
    anchor, offset = (torch.empty(rows, dtype=torch.float64, device=x.device) for _ in range(2))
    flags = torch.empty(rows + 1, dtype=torch.int32, device=x.device)
    at, numbers = (anchor, offset, flags), Numbers.of(k, scale, x.device)
    with on_device(x):
        tile = tile_of(items, *(() if y is None else (y,)), double=x.dtype == torch.float64 or link.is_steep)
        launch = _launch_split if is_split(rows, n) else _launch_rows
        launch(items, y, at, numbers, link, kind, tile)
        launch_flagged(items, y, at, numbers, link, kind)
    batch = x.shape[:-1]
    return None if y is None else y.reshape(x.shape), anchor.reshape(batch), offset.reshape(batch), flags


def _launch_split(
    x: Tensor, y: Tensor | None, at: tuple[Tensor, ...], numbers: Numbers, link: Link, kind: str, tile: Tile
) -> None:
    rows, n = x.shape
    sample = x[:, :: n // SAMPLE].contiguous()
    dtype = torch.float64 if tile.dtype == tl.float64 else torch.float32
    state = torch.empty((STEPS.value, rows, STATE.value), dtype=dtype, device=x.device)
    sums = torch.empty((STEPS.value, rows, PARTS.value, SUMS.value), dtype=dtype, device=x.device)
    work, grid, (q, *law) = (state, sums), (tile.splits(rows, n), rows), link_numbers(link)
    common = {"LINK": triton_link(link), "TILE": tile, "num_warps": tile.warps}
    _split_start[(rows,)](sample, state, *numbers, n, sample.shape[1], q, tuple(law), **common)
    for step in range(STEPS.value):
        _split_step[grid](x, work, *numbers, x.stride(0), n, q, step, **common)
    _split_fwd[grid](x, y, at, work, *numbers, x.stride(0), n, q, KIND=kind, **common)


def _launch_rows(
    x: Tensor, y: Tensor | None, at: tuple[Tensor, ...], numbers: Numbers, link: Link, kind: str, tile: Tile
) -> None:
    rows, n = x.shape
    q, *law = link_numbers(link)
    _mask_fwd[(triton.cdiv(rows, tile.rows),)](
        x, y, at, *numbers, x.stride(0), rows, n, q, tuple(law), LINK=triton_link(link), KIND=kind, TILE=tile,
        num_warps=tile.warps,
    )  # fmt: skip


def threshold(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor]:
    _, anchor, offset = _checked(x, k, scale, link, "threshold", softness, check)
    return anchor, offset


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, anchor, offset = _checked(x, k, scale, link, kind, softness, check)
    assert y is not None
    return y, anchor, offset


def _checked(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    y, anchor, offset, flags = launch_forward(x, k, scale, Link.find(link), kind)
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()  # a graph cannot look
    if check and not captured and bool(flags[-1]):
        check_rows(x, k, scale, softness)
    return y, anchor, offset
