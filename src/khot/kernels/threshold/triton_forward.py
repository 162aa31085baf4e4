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
from ..triton_tools import on_device, reciprocal, rows_of
from .search import SLIGHT, SMALL
from .triton_flagged import launch_flagged
from .triton_rows import Numbers, Tile, any_row, load, over, partial_sums, per_row, program_rows, starts, store, tile_of
from .triton_search import DONE, SPECIAL, first_guess, moments, search, settle

SMALL_K, SLIGHT_RATE = tl.constexpr(SMALL), tl.constexpr(SLIGHT)


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
def _write(
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
    k, scale64 = per_row(row, sizes, k_number, scale_number, stride_k, stride_scale)
    whole, rest = split_k(k, TILE.dtype)
    scale, q = scale64.to(TILE.dtype), tl.full((), q_number, tl.float64).to(TILE.dtype)
    x_rows = starts(x_ptr, row, stride_x, TILE)
    origin, count, total, squares = moments(x_rows, n, TILE)
    anchor, low, high, density, sound = first_guess(origin, count, total, squares, whole, rest, scale, q, law, LINK)
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
            _write(x_rows, y_rows, n, anchor, off, inverse, factor, q, LINK, False, True, TILE)
        else:
            _write(x_rows, y_rows, n, anchor, off, inverse, k, q, LINK, KIND == "log_mask", False, TILE)


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
        _launch_rows(items, y, at, numbers, link, kind, tile)
        launch_flagged(items, y, at, numbers, link, kind)
    batch = x.shape[:-1]
    return None if y is None else y.reshape(x.shape), anchor.reshape(batch), offset.reshape(batch), flags


def _launch_rows(
    x: Tensor, y: Tensor | None, at: tuple[Tensor, ...], numbers: Numbers, link: Link, kind: str, tile: Tile
) -> None:
    rows, n = x.shape
    q, *law = link_numbers(link)
    _mask_fwd[(triton.cdiv(rows, tile.rows),)](
        x, y, at, *numbers, x.stride(0), rows, n, q, tuple(law), LINK=triton_link(link), KIND=kind, TILE=tile,
        num_warps=tile.warps,
    )  # fmt: skip


def threshold(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> tuple[Tensor, Tensor]:
    _, anchor, offset = _checked(x, k, scale, link, "threshold", softness, check)
    return anchor, offset


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, anchor, offset = _checked(x, k, scale, link, "log_mask" if log else "mask", softness, check)
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
