"""Relaxed top-k masks in Triton: the threshold of a row and y = F((x - t) / scale) in one kernel.

A row that the search does not solve is flagged, and a second launch of the same kernel solves it by other means, see
:mod:`khot.kernels.threshold.triton_flagged`. It follows every call, and its programs end at once if no flag is set, so
that the host does not have to wait for the flags. The second launch also records rows with invalid contents, which the
first one never solves.

A few long rows are split over all multiprocessors. The start is the root of a sample. Each step is a launch whose
programs add up the partial sums of the previous step, and which ends at once when the row is done. The last launch
writes the values.

Layout: x, y (rows, n), unit last stride; k, scale, anchor, offset (rows,) in float64, where k and scale may be one
number for all rows. Arithmetic is in float32, or in float64 for float64 scores and links that are too steep for
float32. Everything except k and y is saved for the derivative.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._torch_internals import is_recorded

from ..gpu.launch import kind_of, launch
from ..gpu.plans import is_split
from ..gpu.tools import add4, in_shape, on_device, quotient, reciprocal, rows_of
from ..links.base import Link
from ..links.base_triton import triton_link, value
from . import exact
from .triton_flagged import solve
from .triton_gaps import settle
from .triton_rows import (
    PARTS,
    Argument,
    Tile,
    any_row,
    chunk_of,
    distances,
    flagged_tile,
    launch_tiles,
    look_at_flags,
    over,
    partial_sums,
    per_row,
    program_rows,
    scores,
    starts,
    store,
    store_numbers,
    tile_of,
)
from .triton_search import DONE, GOING, LOST, SPECIAL, advance, row_sums, search_row

SMALL_K = tl.constexpr(0.5)  # a sum so small that no entry reaches 1 when it is scaled to compensate for rounding
SLIGHT_RATE = tl.constexpr(2.0**-10)  # largest relative correction
SAMPLE = 2**14  # entries of the sample of a split row
STEPS = tl.constexpr(6)
STATE, SUMS = tl.constexpr(8), tl.constexpr(4)  # numbers stored for a split row, and for the sums of a chunk


@triton.jit
def _row_numbers(row, sizes, numbers, q_number, TILE: tl.constexpr):
    """k as the nearest integer and a rest, which keeps its digits in float32; the scale of the tile's scores; q."""
    k = per_row(row, sizes[0], numbers[0], numbers[2])
    whole = (k + 0.5).to(tl.int32)
    scale = per_row(row, sizes[1], numbers[1], numbers[3]) * TILE.factor
    q = tl.full((), q_number, tl.float64).to(TILE.dtype)
    return whole, (k - whole.to(tl.float64)).to(TILE.dtype), scale.to(TILE.dtype), q


@triton.jit
def _growth(k, total):
    """The factor by which the entries of a mask with a small k, far out in a tail, must grow to sum to k."""
    grown = quotient(k, total)
    return tl.where((k < SMALL_K) & (tl.abs(grown - 1.0) < SLIGHT_RATE), grown, 1.0)


@triton.jit
def _total(x_rows, n, anchor, off, inverse, q, LINK: tl.constexpr, TILE: tl.constexpr):
    total = partial_sums(TILE)
    for start in range(0, n, TILE.size):
        z = distances(scores(x_rows, start, n, TILE), anchor, off, inverse)
        total += tl.sum(value(z, q, LINK, False), 0)
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["stride_k", "stride_scale", "stride_x", "rows", "n"])
def _mask_fwd(
    x_ptr, y_ptr, at, sizes, k_number: tl.float64, scale_number: tl.float64, stride_k, stride_scale, stride_x, rows, n,
    q_number: tl.float64, law, LINK: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The rows of a program, or those of some rows that are flagged."""
    numbers = k_number, scale_number, stride_k, stride_scale
    if TILE.stage == "flagged":
        begin, end, some = look_at_flags(at[2], rows)
        if some:
            for row in range(begin, end):
                if tl.load(at[2] + row) != 0:
                    _fill_rows(
                        row + tl.arange(0, 1), x_ptr, y_ptr, at, sizes, numbers, stride_x, rows, n, q_number, law,
                        LINK, KIND, TILE,
                    )  # fmt: skip
    else:
        _fill_rows(
            program_rows(rows, TILE), x_ptr, y_ptr, at, sizes, numbers, stride_x, rows, n, q_number, law,
            LINK, KIND, TILE,
        )  # fmt: skip


@triton.jit
def _fill_rows(
    row, x_ptr, y_ptr, at, sizes, numbers, stride_x, rows, n, q_number, law,
    LINK: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Threshold and values of rows, or of a chunk of a split row; flags rows that the search does not solve."""
    row = row.to(tl.int64)
    anchor_ptr, offset_ptr, flag_ptr, state_ptr, sums_ptr = at
    whole, rest, scale, q = _row_numbers(row, sizes, numbers, q_number, TILE)
    k, x_rows, factor = whole + rest, starts(x_ptr, row, stride_x, TILE), 0.0 * rest + 1.0
    inverse = reciprocal(scale) * LINK.unit
    if TILE.stage == "flagged":
        anchor, off, sound = solve(x_rows, n, k, scale, q, LINK, TILE)
        tl.store(flag_ptr + rows + 0 * row, 1, mask=~sound)
    elif TILE.stage == "end":
        anchor, off, _, _, _, _, state, total = _advanced(
            state_ptr, sums_ptr, row, STEPS, whole, rest, scale, q, LINK, TILE
        )
        factor = _growth(k, total)
        _store_flags(flag_ptr, row, rows, state)
    else:
        anchor, off, state, _, _, _ = search_row(x_rows, n, whole, rest, scale, q, law, LINK, TILE)
        if any_row(state == SPECIAL):
            anchor, off, state = settle(x_rows, n, anchor, off, state, whole, scale, LINK, TILE)
        if (KIND == "mask") and any_row(k < SMALL_K):
            factor = _growth(k, _total(x_rows, n, anchor, off, inverse, q, LINK, TILE))
        _store_flags(flag_ptr, row, rows, state)
    tl.store(anchor_ptr + row, anchor.to(tl.float64) * (1.0 / TILE.factor))
    tl.store(offset_ptr + row, off.to(tl.float64) * (1.0 / LINK.unit))
    if KIND != "threshold":
        begin, length = chunk_of(n, TILE)
        x_rows, y_rows = x_rows + begin, starts(y_ptr, row, n, TILE) + begin
        for start in range(0, length, TILE.size):
            z = distances(scores(x_rows, start, length, TILE), anchor, off, inverse)
            y = value(z, q, LINK, KIND == "log_mask")
            store(y_rows, y * over(factor) if KIND == "mask" else y, start, length, TILE)


@triton.jit
def _store_flags(flag_ptr, row, rows, state):
    """Sets a flag for each row that is not solved, and clears those for contents."""
    tl.store(flag_ptr + row, (state != DONE).to(tl.int32))
    if tl.program_id(0) == 0:
        tl.store(flag_ptr + rows, 0)


@triton.jit
def _sums_of_row(at):
    """The sums over a row, added up from its chunks."""
    part = tl.arange(0, PARTS)[None, :]
    there, base = part < tl.num_programs(0), at[:, None] + part * SUMS
    above = tl.load(base, mask=there, other=0.0).to(tl.int32)
    signed = tl.load(base + 1, mask=there, other=0.0)
    total = tl.load(base + 2, mask=there, other=0.0)
    slope = tl.load(base + 3, mask=there, other=0.0)
    return tl.reduce((above, signed, total, slope), 1, add4)


@triton.jit(do_not_specialize=["stride_k", "stride_scale", "n", "length"])
def _split_start(
    sample_ptr, at, sizes, k_number: tl.float64, scale_number: tl.float64, stride_k, stride_scale, n, length,
    q_number: tl.float64, law, LINK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The root of a sample of ``length`` entries of each row of n."""
    row, growth = program_rows(tl.num_programs(0), TILE), n / length
    whole, rest, scale, q = _row_numbers(
        row, sizes, (k_number / growth, scale_number, stride_k, stride_scale), q_number, TILE
    )
    x_rows = starts(sample_ptr, row, length, TILE)
    anchor, off, _, width, density, sound = search_row(x_rows, length, whole, rest, scale, q, law, LINK, TILE)
    # Moments of a sample give no bracket of the row, but a finite one is enough as long as steps are good.
    reach = width * growth
    state = tl.where(sound & (tl.abs(anchor) < float("inf")), GOING, LOST)
    numbers = anchor, off, off - reach, off + reach, 2.0 * reach, density * growth, state.to(anchor.dtype)
    store_numbers(at[3] + row * STATE, numbers)


@triton.jit
def _advanced(state_ptr, sums_ptr, row, step, whole, rest, scale, q, LINK: tl.constexpr, TILE: tl.constexpr):
    """The numbers and the state of rows after ``step`` steps, and the signed sum of the last."""
    before = (step - 1) * tl.num_programs(1) + row
    at = state_ptr + before * STATE
    anchor, off, low, high, older, density = (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    )  # fmt: skip
    state = tl.load(at + 6).to(tl.int32)
    above, signed, total, slope = _sums_of_row(sums_ptr + before * (PARTS * SUMS))
    new_anchor, new_off, new_low, new_high, new_older, new_state = advance(
        above, signed, total, slope, whole, rest, anchor, off, low, high, older, density, scale, q,
        LINK, TILE,
    )  # fmt: skip
    going = state == GOING
    anchor, off = tl.where(going, new_anchor, anchor), tl.where(going, new_off, off)
    state = tl.where(going, new_state, state)
    low, high, older = tl.where(going, new_low, low), tl.where(going, new_high, high), tl.where(going, new_older, older)
    return anchor, off, low, high, older, density, state, tl.where(going, 0.0, signed)


@triton.jit(do_not_specialize=["stride_k", "stride_scale", "stride_x", "n", "step"])
def _split_step(
    x_ptr, at, sizes, k_number: tl.float64, scale_number: tl.float64, stride_k, stride_scale, stride_x, n,
    q_number: tl.float64, step, LINK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sums of this program's chunk at the threshold that was stored after ``step`` steps."""
    part, row = tl.program_id(0), program_rows(tl.num_programs(1), TILE)
    whole, rest, scale, q = _row_numbers(row, sizes, (k_number, scale_number, stride_k, stride_scale), q_number, TILE)
    here = step * tl.num_programs(1) + row
    if step == 0:
        anchor, off = tl.load(at[3] + here * STATE), tl.load(at[3] + here * STATE + 1)
        state = tl.load(at[3] + here * STATE + 6).to(tl.int32)
    else:
        anchor, off, low, high, older, density, state, _ = _advanced(
            at[3], at[4], row, step, whole, rest, scale, q, LINK, TILE
        )
        if part == 0:
            numbers = anchor, off, low, high, older, density, state.to(anchor.dtype)
            store_numbers(at[3] + here * STATE, numbers)
    # A small k is compared with the sum of its mask, even if the row is done.
    if any_row((state == GOING) | ((state == DONE) & (whole + rest < SMALL_K))):
        begin, length = chunk_of(n, TILE)
        x_rows = starts(x_ptr, row, stride_x, TILE) + begin
        above, signed, total, slope = row_sums(
            x_rows, length, anchor, off, reciprocal(scale) * LINK.unit, q, LINK, TILE
        )
        store_numbers(at[4] + (here * PARTS + part) * SUMS, (above.to(TILE.dtype), signed, total, slope))


def launch_forward(
    x: Tensor, k: Tensor | float, scale: Tensor | float, link: Link, kind: str = "mask"
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """y (or log y; None for the kind "threshold"), anchors, offsets, and flags.

    x is (..., n), k and scale are (...) or numbers. There is a flag for each row that the fast path has left to the
    other one, and at the end one for invalid contents.
    """
    items = rows_of(x)
    rows, n = shape = items.shape
    y = None if kind == "threshold" else torch.empty(shape, dtype=x.dtype, device=x.device)
    anchor = torch.empty(rows, dtype=torch.float64, device=x.device)
    offset = torch.empty(rows, dtype=torch.float64, device=x.device)
    flags = torch.empty(rows + 1, dtype=torch.int32, device=x.device)
    tile = tile_of(items, *(() if y is None else (y,)), double=link.is_steep)
    (first, k_number, stride_k), (second, scale_number, stride_scale) = (Argument.of(v, x.device) for v in (k, scale))
    sizes, (q, *law) = (first, second), link.numbers
    numbers, stride = (sizes, k_number, scale_number, stride_k, stride_scale), items.stride(0)
    partial = flags, flags  # only split rows need more
    with on_device(x):
        if is_split(rows, n):
            partial = _launch_steps(items, (anchor, offset, flags), numbers, link, tile)
            tile = tile.at_stage("end")
        arguments = (items, y, (anchor, offset, flags, *partial), *numbers, stride, rows, n, q, tuple(law))
        kinds = kind_of((items, first, second)), stride_k, stride_scale, stride  # new tensors are aligned
        launch_tiles(_mask_fwd, arguments, (triton_link(link), kind), (tile, flagged_tile(items)), shape, kinds)
    batch = x.shape[:-1]
    return None if y is None else in_shape(y, x.shape), in_shape(anchor, batch), in_shape(offset, batch), flags


def _launch_steps(
    x: Tensor, at: tuple[Tensor, ...], numbers: tuple[Any, ...], link: Link, tile: Tile
) -> tuple[Tensor, Tensor]:
    """The numbers of each row and the sums of its chunks after each step."""
    (rows, n), (q, *law) = x.shape, link.numbers
    sample = x[:, :: n // SAMPLE].contiguous()
    state = torch.empty((STEPS.value, rows, STATE.value), dtype=tile.torch_dtype, device=x.device)
    sums = torch.empty((STEPS.value, rows, PARTS.value, SUMS.value), dtype=tile.torch_dtype, device=x.device)
    at, piece, start = (*at, state, sums), triton_link(link), tile.at_stage("start")
    arguments: tuple[Any, ...] = (sample, at, *numbers, n, sample.shape[1], q, tuple(law))
    launch(_split_start, start.grid(rows, n), arguments, (piece, start), **start.options)
    for step in range(STEPS.value):
        arguments = (x, at, *numbers, x.stride(0), n, q, step)
        launch(_split_step, tile.grid(rows, n), arguments, (piece, tile), **tile.options)
    return state, sums


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: int, q: float, kind: str, softness: str, check: bool, with_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, anchor, offset, flags = launch_forward(x, k, scale, Link.find(link, q), kind if with_values else "threshold")
    if check and has_invalid(flags):
        exact.mask(x, k, scale, link, q, kind, softness, True, False)  # raises the error
    return x.new_empty((*x.shape[:-1], 0)) if y is None else y, anchor, offset


def has_invalid(flags: Tensor) -> bool:
    """Whether contents are invalid; False where nobody can look, while a graph is recorded."""
    return not is_recorded(flags) and bool(flags[-1])
