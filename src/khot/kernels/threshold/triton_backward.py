"""The derivative of the relaxed top-k masks in Triton; the formulas stand in :mod:`khot.relaxations.engine`.

x and the cotangent g are read once where the row stays in registers, twice otherwise. With slopes w_i = F'(z_i), which
count relative to those at the smallest abs(z), so that they never underflow all together,

    mask        d_i = g_i w_i,          dL/dx_i = (w_i / s) (g_i - D / W),         dL/dk = D / W
    logarithm   d_i = g_i w_i / F(z_i), dL/dx_i = (d_i - w_i D / W) / s,           dL/dk = D / W

with D = sum d, W = sum w (of the true slopes for the logarithm), and dL/ds = -sum_i z_i dL/dx_i. Above the threshold
dL/dk is the sum of g_i w_i / (W F(z_i)), where relative slopes will do.

Where all slopes underflow, t lies in a gap that takes digits of x from z. Such rows are read once more: their shares
w_i / W come from differences of scores, as in :mod:`khot.kernels.threshold.gaps`.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..links.base import Link
from ..links.base_triton import bounded, limit_of, log_derivative, nearest_of, slopes, triton_link, value
from ..rows import Threshold
from ..tiles import DOUBLE, Plan, Table, plan
from ..triton_tools import RowNumbers, add3, arithmetic, on_device, per_row, row_numbers, rows_of, store_tile
from .kinds import KINDS
from .triton_root import EPS_32, EPS_64, TINY_32, TINY_64, distances, load_shrunk, load_threshold

# Three or four values of each entry at a time.
BACKWARD: Table = {torch.float32: ((512, 1), (1024, 4), (4096, 8), (8192, 16)), torch.float64: DOUBLE}
SUMS = tl.constexpr(4)  # numbers of a chunk: the smallest abs(z) and three sums
FARTHEST_LEVER = tl.constexpr(1e307)  # where a z of a logarithm all but overflows
SHRUNK, GROWN = tl.constexpr(2.0**-32), tl.constexpr(2.0**32)  # what such a lever is shrunk by on the way

UNDERFLOWING_32 = tl.constexpr(TINY_32.value / EPS_32.value)  # sums of slopes below which rows are :func:`_far_row`
UNDERFLOWING_64 = tl.constexpr(TINY_64.value / EPS_64.value)


@triton.jit
def _lever(grad, z, LINK: tl.constexpr, LOG: tl.constexpr):
    """sum_i z_i dL/dz_i of a tile in float64; times 2^-32 for a logarithm, with slopes where z all but overflows."""
    if LOG:
        far = tl.minimum(tl.maximum(z.to(tl.float64), -FARTHEST_LEVER), FARTHEST_LEVER)
        return tl.sum(grad.to(tl.float64) * (far * SHRUNK), 0)
    else:
        return tl.sum(grad * bounded(z, LINK), 0).to(tl.float64)


@triton.jit
def _grad_scale(lever, scale, LOG: tl.constexpr):
    """dL/dscale from :func:`_lever`."""
    if LOG:
        root = tl.sqrt(scale)
        return -lever / root * GROWN / root
    else:
        return -lever / scale


@triton.jit
def _tile_terms(x, z, g, start, n, nearest, q, LINK: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr):
    """w and d of a tile, relative to ``nearest``."""
    w = slopes(z, nearest, q, LINK)
    if LINK.heavy:  # no slope of an infinite entry, of which are those beyond the row; tails of others vanish there
        w = tl.where(tl.abs(x) == float("inf"), 0.0, w)
    else:
        w = tl.where(start + tl.arange(0, BLOCK) < n, w, 0.0)
    if LOG:
        d = tl.where(x > -float("inf"), g * log_derivative(z, LINK), 0.0)
    else:
        d = g * w
    return w, d


@triton.jit
def _grad(w, d, g, mean, nearest, unit, LINK: tl.constexpr, LOG: tl.constexpr):
    """dL/dz times ``unit``."""
    if LOG:
        return (d - w * mean) * unit
    else:
        return (w * (_common_factor(nearest, LINK) * unit)) * (g - mean)


@triton.jit
def _common_factor(nearest, LINK: tl.constexpr):
    """What the slopes of a row are divided by."""
    return LINK.decay(nearest, 0.0 * nearest, LINK)


@triton.jit
def _tile_sums(z, g, w, d, q, LINK: tl.constexpr, LOG: tl.constexpr):
    """W and D of a tile; of a logarithm D below the threshold, and above it the sum of w g / F, in the unit of W."""
    above = 0.0 * w
    if LOG:  # whose d underflow above, where all F' are small, and whose w may do so below
        above = tl.where(z > 0, g * w / value(z, q, LINK, False), 0.0)
        d = tl.where(z > 0, 0.0, d)
    return tl.reduce((w, d, above), 0, add3)


@triton.jit
def _means(weight, direct, above, nearest, LINK: tl.constexpr, LOG: tl.constexpr):
    """D / W as dL/dx needs it, and as dL/dk."""
    least = TINY_64 if weight.dtype == tl.float64 else TINY_32
    held = tl.maximum(weight, least)
    if LOG:
        common = _common_factor(nearest, LINK)
        return (direct + above * common) / held, above / held + direct / tl.maximum(weight * common, least)
    else:
        return direct / held, direct / held


@triton.jit
def _merge(
    nearest, weight, direct, above, other, more_weight, more_direct, more_above, LINK: tl.constexpr, LOG: tl.constexpr
):
    """Sums relative to two values of ``nearest``, added up relative to the smaller."""
    least = tl.minimum(nearest, other)
    mine, theirs = LINK.decay(nearest, least, LINK), LINK.decay(other, least, LINK)
    weight = weight * mine + more_weight * theirs
    if LOG:
        direct = direct + more_direct
        above = above * mine + more_above * theirs
    else:
        direct = direct * mine + more_direct * theirs
    return least, weight, direct, above


@triton.jit
def _chunk_sums(
    x_ptr, g_ptr, n, high, off, factor, inv_scale, q,
    LINK: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Smallest abs(z) and the sums of n entries in memory."""
    if LINK.compact and LINK.reaches_zero:
        nearest = tl.zeros((), DTYPE)
    else:
        nearest = tl.full((), limit_of(LINK, DTYPE), DTYPE)
    weight, direct, above = tl.zeros((), DTYPE), tl.zeros((), DTYPE), tl.zeros((), DTYPE)
    for start in range(0, n, BLOCK):
        x = load_shrunk(x_ptr, start, n, factor, BLOCK, DTYPE)
        z = bounded(distances(x, high, off, inv_scale), LINK)
        g = _load_cotangent(g_ptr, start, n, BLOCK, DTYPE)
        there = nearest_of(z, LINK)
        w, d = _tile_terms(x, z, g, start, n, there, q, LINK, LOG, BLOCK)
        more_weight, more_direct, more_above = _tile_sums(z, g, w, d, q, LINK, LOG)
        nearest, weight, direct, above = _merge(
            nearest, weight, direct, above, there, more_weight, more_direct, more_above, LINK, LOG
        )
    return nearest, weight, direct, above


@triton.jit
def _chunk_grad(
    x_ptr, g_ptr, out_ptr, n, high, off, factor, inv_scale, unit, q, nearest, mean,
    LINK: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Writes dL/dx of n entries in memory; returns sum_i z_i dL/dz_i in float64."""
    lever = tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        x = load_shrunk(x_ptr, start, n, factor, BLOCK, DTYPE)
        z = distances(x, high, off, inv_scale)
        g = _load_cotangent(g_ptr, start, n, BLOCK, DTYPE)
        w, d = _tile_terms(x, bounded(z, LINK), g, start, n, nearest, q, LINK, LOG, BLOCK)
        store_tile(out_ptr, _grad(w, d, g, mean, nearest, unit, LINK, LOG), start, n, BLOCK)
        lever += _lever(_grad(w, d, g, mean, nearest, 1.0, LINK, LOG), z, LINK, LOG)
    return lever


@triton.jit
def _load_cotangent(g_ptr, start, n, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    return tl.load(g_ptr + cols, mask=cols < n, other=0.0).to(DTYPE)


@triton.jit
def _is_far(weight, nearest, LINK: tl.constexpr):
    """Whether the slopes of a row, whose relative ones sum to ``weight``, underflow; never those of heavy tails."""
    if LINK.heavy or (LINK.compact and LINK.reaches_zero):
        return False
    elif weight.dtype == tl.float64:
        return weight * _common_factor(nearest, LINK) < UNDERFLOWING_64
    else:
        return weight * _common_factor(nearest, LINK) < UNDERFLOWING_32


@triton.jit
def _far_side(x, z, LINK: tl.constexpr):
    """Which entries lie above the gap, and which below."""
    finite = tl.abs(x) < float("inf")
    if LINK.compact:
        return finite & (z >= LINK.cap), finite & (z < LINK.cap)
    else:
        return finite & (z > 0), finite & (z <= 0)


@triton.jit
def _far_decay(x, z, left, right, first, last, inv_scale, LINK: tl.constexpr):
    """Slopes and tails above and below the gap, relative to the slope of the nearest entry on the same side.

    That entry is ``right`` above and ``left`` below, with the distances ``first`` and ``last`` from t.
    """
    above, below = _far_side(x, z, LINK)
    beyond = tl.where(above, x - right, left - x) * inv_scale
    if LINK.compact:  # of capped entries only those next to the cap reach it when t rises
        slope = tl.where(z >= LINK.cap, tl.where(beyond > 0, 0.0, 1.0), LINK.decay(beyond, 0.0 * beyond, LINK))
        tail = slope
    else:
        start = tl.where(above, first, last)
        slope = LINK.decay_beyond(start, beyond, LINK)
        a = bounded(start + beyond, LINK)
        own_tail, own_slope = LINK.shifted_tails(a, a, LINK)
        tail = slope * (own_tail / own_slope)
    return (
        tl.where(above, slope, 0.0),
        tl.where(below, slope, 0.0),
        tl.where(above, tail, 0.0),
        tl.where(below, tail, 0.0),
    )


@triton.jit
def _far_row(
    x_ptr, g_ptr, out_ptr, n, begin, end, high, off, factor, inv_scale, unit, q, nearest, weight, direct,
    LINK: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Writes dL/dx of the entries from ``begin`` to ``end`` of a row whose slopes underflow.

    Returns dL/dk of the row and sum_i z_i dL/dz_i of these entries. Reads few entries at a time, so that rows of this
    kind, which are rare, cost the others no registers.
    """
    SHARE: tl.constexpr = 4 if DTYPE == tl.float64 else 8
    PART: tl.constexpr = BLOCK // SHARE if BLOCK >= 256 else 32
    left, right = tl.full((), -float("inf"), DTYPE), tl.full((), float("inf"), DTYPE)
    for start in range(0, n, PART):
        x = load_shrunk(x_ptr, start, n, factor, PART, DTYPE)
        above, below = _far_side(x, distances(x, high, off, inv_scale), LINK)
        right = tl.minimum(right, tl.min(tl.where(above, x, float("inf")), 0))
        left = tl.maximum(left, tl.max(tl.where(below, x, -float("inf")), 0))
    first = bounded(distances(right, high, off, inv_scale), LINK)
    last = -bounded(distances(left, high, off, inv_scale), LINK)

    zero = tl.zeros((), DTYPE)
    slope_above, slope_below, tail_above, tail_below, pull_above, pull_below = zero, zero, zero, zero, zero, zero
    for start in range(0, n, PART):
        x, g = load_shrunk(x_ptr, start, n, factor, PART, DTYPE), _load_cotangent(g_ptr, start, n, PART, DTYPE)
        z = distances(x, high, off, inv_scale)
        w_above, w_below, u_above, u_below = _far_decay(x, z, left, right, first, last, inv_scale, LINK)
        slope_above += tl.sum(w_above, 0)
        slope_below += tl.sum(w_below, 0)
        tail_above += tl.sum(u_above, 0)
        tail_below += tl.sum(u_below, 0)
        pull_above += tl.sum(g * w_above, 0)
        pull_below += tl.sum(g * w_below, 0)

    # The tails on both sides have the same sum; those of a side without entries are nothing.
    of_above = tl.where(tail_above > 0, 1.0 / tail_above, 0.0)
    of_below = tl.where(tail_below > 0, 1.0 / tail_below, 0.0)
    if LINK.compact:  # t is next to the cap of the nearest entry above; without entries below nothing holds it
        of_below = tl.where(tail_above > 0, 0.0, of_below)
        of_above = tl.where(tail_below > 0, of_above, 0.0)
    total = slope_above * of_above + slope_below * of_below
    of_above = tl.where(total > 0, of_above / total, 0.0)
    of_below = tl.where(total > 0, of_below / total, 0.0)
    if LOG:
        grad_k = pull_above * of_above + _means(weight, direct, zero, nearest, LINK, LOG)[1]
        mean = direct
    else:
        grad_k = pull_above * of_above + pull_below * of_below
        mean = grad_k

    lever = tl.zeros((), tl.float64)
    for start in range(begin, end, PART):
        x, g = load_shrunk(x_ptr, start, end, factor, PART, DTYPE), _load_cotangent(g_ptr, start, end, PART, DTYPE)
        z = distances(x, high, off, inv_scale)
        w, d = _tile_terms(x, bounded(z, LINK), g, start, end, nearest, q, LINK, LOG, PART)
        if LOG:
            w_above, w_below, _, _ = _far_decay(x, z, left, right, first, last, inv_scale, LINK)
            w = w_above * of_above + w_below * of_below
        store_tile(out_ptr, _grad(w, d, g, mean, nearest, unit, LINK, LOG), start, end, PART)
        lever += _lever(_grad(w, d, g, mean, nearest, 1.0, LINK, LOG), z, LINK, LOG)
    return grad_k, lever


@triton.jit
def _mask_bwd(
    x_ptr, g_ptr, anchor_ptr, offset_ptr, grad_x_ptr, grad_k_ptr, grad_scale_ptr, scale_ptr, scale_number: tl.float64,
    stride_scale, q_number: tl.float64, stride_x, stride_g, stride_out, n,
    SCALE_TENSOR: tl.constexpr, LOG: tl.constexpr, LINK: tl.constexpr, BLOCK: tl.constexpr,
    IN_REGISTERS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    high, off, factor, inv_scale = load_threshold(anchor_ptr, offset_ptr, row, scale, DTYPE)
    unit, q = inv_scale * factor.to(DTYPE), tl.full((), q_number, DTYPE)  # 1 / scale
    x_ptr += row * stride_x
    g_ptr += row * stride_g
    grad_x_ptr += row * stride_out
    if IN_REGISTERS:
        x, g = load_shrunk(x_ptr, 0, n, factor, BLOCK, DTYPE), _load_cotangent(g_ptr, 0, n, BLOCK, DTYPE)
        z = distances(x, high, off, inv_scale)
        nearest = nearest_of(bounded(z, LINK), LINK)
        w, d = _tile_terms(x, bounded(z, LINK), g, 0, n, nearest, q, LINK, LOG, BLOCK)
        weight, direct, above = _tile_sums(bounded(z, LINK), g, w, d, q, LINK, LOG)
        mean, grad_k = _means(weight, direct, above, nearest, LINK, LOG)
        if not LOG:  # once more for what is left of nearly equal cotangents
            g = g - mean
            mean, left = _means(weight, tl.sum(w * g, 0), above, nearest, LINK, LOG)
            grad_k += left
        store_tile(grad_x_ptr, _grad(w, d, g, mean, nearest, unit, LINK, LOG), 0, n, BLOCK)
        lever = _lever(_grad(w, d, g, mean, nearest, 1.0, LINK, LOG), z, LINK, LOG)
    else:
        nearest, weight, direct, above = _chunk_sums(
            x_ptr, g_ptr, n, high, off, factor, inv_scale, q, LINK, LOG, BLOCK, DTYPE
        )
        mean, grad_k = _means(weight, direct, above, nearest, LINK, LOG)
        lever = _chunk_grad(
            x_ptr, g_ptr, grad_x_ptr, n, high, off, factor, inv_scale, unit, q, nearest, mean, LINK, LOG, BLOCK, DTYPE
        )
    if _is_far(weight, nearest, LINK):
        grad_k, lever = _far_row(
            x_ptr, g_ptr, grad_x_ptr, n, 0, n, high, off, factor, inv_scale, unit, q, nearest, weight, direct,
            LINK, LOG, BLOCK, DTYPE,
        )  # fmt: skip
    tl.store(grad_k_ptr + row, grad_k.to(tl.float64))
    tl.store(grad_scale_ptr + row, _grad_scale(lever, scale, LOG))


@triton.jit
def _split_bwd_sums(
    x_ptr, g_ptr, anchor_ptr, offset_ptr, partial_ptr, scale_ptr, scale_number: tl.float64, stride_scale,
    q_number: tl.float64, stride_x, stride_g, n, splits, chunk,
    SCALE_TENSOR: tl.constexpr, LOG: tl.constexpr, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sums of this program's chunk."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    high, off, factor, inv_scale = load_threshold(anchor_ptr, offset_ptr, row, scale, DTYPE)
    q = tl.full((), q_number, DTYPE)
    begin = part * chunk
    nearest, weight, direct, above = _chunk_sums(
        x_ptr + row * stride_x + begin, g_ptr + row * stride_g + begin, tl.minimum(n - begin, chunk),
        high, off, factor, inv_scale, q, LINK, LOG, BLOCK, DTYPE,
    )  # fmt: skip
    base = partial_ptr + SUMS * (row * splits + part)
    tl.store(base, nearest)
    tl.store(base + 1, weight)
    tl.store(base + 2, direct)
    tl.store(base + 3, above)


@triton.jit
def _split_bwd(
    x_ptr, g_ptr, anchor_ptr, offset_ptr, partial_ptr, grad_x_ptr, grad_k_ptr, lever_ptr, scale_ptr,
    scale_number: tl.float64, stride_scale, q_number: tl.float64, stride_x, stride_g, stride_out, n, splits, chunk,
    SCALE_TENSOR: tl.constexpr, LOG: tl.constexpr, LINK: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """dL/dx of this program's chunk, from all partial sums of its row."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    high, off, factor, inv_scale = load_threshold(anchor_ptr, offset_ptr, row, scale, DTYPE)
    unit, q = inv_scale * factor.to(DTYPE), tl.full((), q_number, DTYPE)  # 1 / scale

    parts = tl.arange(0, SPLITS)
    there = parts < splits
    base = partial_ptr + SUMS * (row * splits + parts)
    theirs = tl.load(base, mask=there, other=limit_of(LINK, DTYPE))
    nearest = tl.min(theirs, 0)
    weights = tl.load(base + 1, mask=there, other=0.0)
    directs = tl.load(base + 2, mask=there, other=0.0)
    aboves = tl.load(base + 3, mask=there, other=0.0)
    none = 0.0 * weights
    _, weights, directs, aboves = _merge(nearest, none, none, none, theirs, weights, directs, aboves, LINK, LOG)
    weight, direct, above = tl.reduce((weights, directs, aboves), 0, add3)

    mean, grad_k = _means(weight, direct, above, nearest, LINK, LOG)
    begin = part * chunk
    lever = _chunk_grad(
        x_ptr + row * stride_x + begin, g_ptr + row * stride_g + begin, grad_x_ptr + row * stride_out + begin,
        tl.minimum(n - begin, chunk), high, off, factor, inv_scale, unit, q, nearest, mean, LINK, LOG, BLOCK, DTYPE,
    )  # fmt: skip
    if _is_far(weight, nearest, LINK):
        grad_k, lever = _far_row(
            x_ptr + row * stride_x, g_ptr + row * stride_g, grad_x_ptr + row * stride_out, n, begin,
            tl.minimum(n, begin + chunk), high, off, factor, inv_scale, unit, q, nearest, weight, direct,
            LINK, LOG, BLOCK, DTYPE,
        )  # fmt: skip
    tl.store(lever_ptr + row * splits + part, _grad_scale(lever, scale, LOG))
    if part == 0:
        tl.store(grad_k_ptr + row, grad_k.to(tl.float64))


def launch_backward(
    x: Tensor, scale: Tensor, at: Threshold, grad_y: Tensor, link: Link, log: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx like x, dL/dk and dL/dscale in float64 of the batch shape, from dL/dy (or dL/d log y) = ``grad_y``."""
    rows, grad = rows_of(x), rows_of(grad_y)
    at = Threshold(*(v.reshape(-1).contiguous() for v in at))
    grad_x = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    grad_k, grad_scale = torch.empty_like(at.offset), torch.empty_like(at.offset)
    torch_dtype, dtype = arithmetic(x)
    how = plan(len(rows), rows.shape[1], torch_dtype, BACKWARD)
    numbers = row_numbers(scale, x.device)
    with on_device(x):
        if how.splits > 1:
            grad_scale = _launch_split(rows, grad, at, grad_x, grad_k, numbers, link, log, how, dtype)
        else:
            _mask_bwd[(len(rows),)](
                rows, grad, *at, grad_x, grad_k, grad_scale, *numbers.arguments(at.offset), float(link.q),
                rows.stride(0), grad.stride(0), grad_x.stride(0), rows.shape[1],
                SCALE_TENSOR=numbers.tensor is not None, LOG=log, LINK=triton_link(link), BLOCK=how.block,
                IN_REGISTERS=how.resident, DTYPE=dtype, num_warps=how.warps,
            )  # fmt: skip
    batch = x.shape[:-1]
    return grad_x.reshape(x.shape), grad_k.reshape(batch), grad_scale.reshape(batch)


def _launch_split(
    x: Tensor, g: Tensor, at: Threshold, grad_x: Tensor, grad_k: Tensor, scale: RowNumbers, link: Link,
    log: bool, how: Plan, dtype: tl.dtype,
) -> Tensor:  # fmt: skip
    rows, n = x.shape
    splits, chunk = how.chunks(n)
    kind = torch.float64 if dtype == tl.float64 else torch.float32
    partial = torch.empty(rows, splits, SUMS.value, dtype=kind, device=x.device)
    lever = torch.empty(rows, splits, dtype=torch.float64, device=x.device)
    common = {
        "SCALE_TENSOR": scale.tensor is not None, "LOG": log, "LINK": triton_link(link), "BLOCK": how.block,
        "DTYPE": dtype, "num_warps": how.warps,
    }  # fmt: skip
    numbers = (*scale.arguments(at.offset), float(link.q), x.stride(0), g.stride(0))
    _split_bwd_sums[(splits, rows)](x, g, *at, partial, *numbers, n, splits, chunk, **common)
    _split_bwd[(splits, rows)](
        x, g, *at, partial, grad_x, grad_k, lever, *numbers, grad_x.stride(0), n, splits, chunk,
        SPLITS=triton.next_power_of_2(splits), **common,
    )  # fmt: skip
    return lever.sum(-1)


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, kind: str, with_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    found = Link.find(link)
    return launch_backward(x, scale, Threshold(anchor, offset), grad, found, KINDS[kind].log)
