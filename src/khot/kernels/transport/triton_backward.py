"""The derivative of sorted optimal transport in Triton; the formulas are in :mod:`khot.kernels.transport`.

One program per row computes the plan P again in tiles, see the module ``triton_tile``: two passes for the duals h of
the places, H h = sum_i P_.i o (g_.i - <P_.i, g_.i>), and one for the gradient. The second pass solves for the remainder
of the first, sum_i P_.i o (g_.i - h - <P_.i, g_.i - h>), so the weights need no more digits than matrix units provide.

Everything is relative to the item's own, largest place, which therefore contributes nothing. So g - <P, g> and
sum_j a_j dL/ds_j, with the anchors a, keep their digits where P is nearly 0 or 1.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.tools import arithmetic, inverse_scale, on_device, per_row, row_numbers, rows_of, store_tile
from ..operators.platforms import MAX_N
from .triton_tile import (
    add_weights,
    all_weights,
    epsilon,
    load_thresholds,
    solve_laplacian,
    tile_scores,
    transport_plan,
)


@triton.jit
def _tile_terms(
    x_ptr, g_ptr, stride_place, stride_item, start, n, t, h, k, inv_scale,
    PLACES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """P, P o (v - <P, v>) for v = g - h, the scores (PLACES, BLOCK), and each item's own place, the mean of ties."""
    cols, place = start + tl.arange(0, BLOCK), tl.arange(0, PLACES)[:, None]
    x = tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(DTYPE)
    scores = tile_scores(x, t, inv_scale, DTYPE)
    plan = tl.exp(scores)
    plan = plan * tl.where(cols < n, 1.0 / tl.sum(plan, 0), 0.0)[None, :]
    at = g_ptr + (place * stride_place + cols[None, :] * stride_item)
    v = tl.load(at, mask=(place < k) & (cols[None, :] < n), other=0.0).to(DTYPE) - h[:, None]
    own = scores == tl.max(scores, 0)[None, :]
    share = 1.0 / tl.sum(tl.where(own, 1.0, 0.0).to(DTYPE), 0)
    v -= (tl.sum(tl.where(own, v, 0.0), 0) * share)[None, :]
    centred = plan * (v - tl.sum(plan * v, 0)[None, :])
    return plan, centred, scores, tl.sum(tl.where(own, place, 0), 0).to(DTYPE) * share


@triton.jit(do_not_specialize=["k"])
def _sorted_transport_bwd(
    x_ptr, g_ptr, t_ptr, grad_x_ptr, grad_scale_ptr, scale_ptr, scale_number: tl.float64, stride_scale,
    stride_place, stride_item, n, k,
    SCALE_TENSOR: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row, places = tl.program_id(0).to(tl.int64), tl.minimum(k + 1, n)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    inv_scale, place = inverse_scale(scale, DTYPE), tl.arange(0, PLACES)
    x_ptr += row * n
    g_ptr += row * k * n
    t_ptr += row * (places - 1)
    t = load_thresholds(t_ptr, places, PLACES, DTYPE)

    h = tl.zeros((PLACES,), DTYPE)
    weights = tl.zeros((BLOCK // 32, PLACES, PLACES), tl.float32)
    for step in tl.static_range(2):
        right = tl.zeros((PLACES, BLOCK), DTYPE)
        for start in range(0, n, BLOCK):
            plan, centred, _, _ = _tile_terms(
                x_ptr, g_ptr, stride_place, stride_item, start, n, t, h, k, inv_scale, PLACES, BLOCK, DTYPE
            )
            right += centred
            if step == 0:
                weights = add_weights(weights, plan, PLACES, BLOCK)
        total = tl.sum(right, 1).to(tl.float32)
        h += solve_laplacian(all_weights(weights), total, places, 2.0 * epsilon(DTYPE), PLACES).to(DTYPE)

    grad_x_ptr += row * n
    lever = tl.zeros((BLOCK,), DTYPE)
    for start in range(0, n, BLOCK):
        _, centred, scores, own = _tile_terms(
            x_ptr, g_ptr, stride_place, stride_item, start, n, t, h, k, inv_scale, PLACES, BLOCK, DTYPE
        )
        grad = tl.sum((own[None, :] - place[:, None]) * centred, 0) * inv_scale
        store_tile(grad_x_ptr, grad, start, n, BLOCK)
        lever += tl.sum(centred * scores, 0)
    tl.store(grad_scale_ptr + row, -tl.sum(lever, 0).to(tl.float64) / scale)


def sorted_transport_derivative(
    x: Tensor, half: Tensor, t: Tensor, grad_y: Tensor, with_half: bool
) -> tuple[Tensor, Tensor]:
    k, n = grad_y.shape[-2:]
    rows, grad, (_, dtype) = rows_of(x).contiguous(), grad_y.reshape(-1, k, n), arithmetic(x)
    row, place, item = grad.stride()
    if row != k * n or k * place + n * item > MAX_N:  # a program's offsets are int32
        grad = grad.contiguous()
    how, thresholds = transport_plan(len(rows), n, k), t.reshape(len(rows), -1).contiguous()
    grad_x = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    grad_half = torch.empty(len(rows), dtype=torch.float64, device=x.device)
    scale = row_numbers(half, x.device)
    with on_device(x):
        _sorted_transport_bwd[(len(rows),)](
            rows, grad, thresholds, grad_x, grad_half, *scale.arguments(thresholds), grad.stride(1), grad.stride(2),
            n, k, SCALE_TENSOR=scale.tensor is not None, PLACES=how.block_places, BLOCK=how.block, DTYPE=dtype,
            num_warps=how.warps, num_stages=1,
        )  # fmt: skip
    return grad_x.reshape(x.shape), grad_half.reshape(x.shape[:-1])
