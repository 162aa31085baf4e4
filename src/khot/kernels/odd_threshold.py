r"""Thresholds of the sparse maps that look at a = abs(x), row by row: the signed mask and the magnitudes.

With strength s and F(z) = clip(z, 0, 1)^q, q = 1 / (p - 1),

* signed mask: the t >= 0 with sum_i F((a_i - t) / s) = k, or 0 if the sum is below k already there;
* magnitudes: the t > 0 with sum_i F((a_i - t) / (s t^(p-1))) = k, the same sum with a scale that grows with t; it falls
  from the number of nonzero entries at t = 0 to 0 at t = max a. t = 0 if k is no less than that number.

Step, for the magnitudes. z = (a - t) theta / s is linear in theta = t^(1-p) both for t << a and for p = 2. As for the
mask, let P be the sum of F over the entries that are not capped and B = k - #capped; Newton on P^(1/q) = B^(1/q) is

    theta_new = theta (1 + P ((B / P)^(1/q) - 1) / (P + t^(2-p) / s * sum F')),

positive whatever B >= 0 is.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .capped_simplex import (
    SAMPLE_SIZE,
    Span,
    check_contents,
    compute_dtype,
    move_batch_first,
    row_range,
    solve_rows,
    standardise_into,
)
from .clipped_power import ClippedPower
from .guarded_newton import RESOLUTION, Evaluation, arithmetic_mean, guarded_newton
from .links import Link, TailSums
from .operator import operator

OVERSHOOT = 2**-10  # relative to the step at which the last pooled entry leaves, so that it becomes an exact zero


@operator("odd_threshold")
def odd_threshold(x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> Tensor:
    """The threshold t of each row of x (..., n), for float64 k and strength of shape (...); not differentiable.

    Args:
        x: Real entries; only their absolute values count.
        k: Sum, from 0 to n.
        strength: Positive.
        link: Key of the :class:`ClippedPower`.
        magnitude: Which of the two thresholds.
        check: Whether bad contents raise a ValueError.
    """
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        if check and bool((k != 0).any()):  # n = 0, or no rows
            raise ValueError(f"`k` must be 0 for an empty ground set, but got k={k.max().item():g}")
        return torch.zeros_like(k, memory_format=torch.contiguous_format)
    a = x.to(compute_dtype(x)).reshape(-1, n).abs()
    k, strength = k.reshape(-1), strength.reshape(-1)
    span = row_range(a)
    if check:
        if bool((span.selected > 0).any()):
            row = int((span.selected > 0).nonzero()[0])
            raise ValueError(f"`x` must be finite (0 masks an entry), but row {row} of the flattened batch is not")
        check_contents(a, k, strength, "strength", span)
    found = Link.find(link)
    assert isinstance(found, ClippedPower)
    if magnitude:
        t = _solve_magnitudes(a, k, strength, found, span)
    else:
        at = solve_rows(a, k, strength, found, span)
        t = (at.anchor + at.offset * strength).clamp(min=0)
    return t.reshape(batch)


@odd_threshold.register_fake
def _(x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> Tensor:
    return torch.empty_like(k, memory_format=torch.contiguous_format)


@odd_threshold.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> Any:
    x, k, strength = move_batch_first(info.batch_size, in_dims, (x, k, strength))
    return odd_threshold(x, k, strength, link, magnitude, False), 0


def shrink(a: Tensor, strength: Tensor, link: ClippedPower) -> Tensor:
    """The y >= 0 with y + strength y^(p-1) = a >= 0, elementwise, differentiable where a > 0, up to seven times.

    u = y^(p-1) solves u^q + strength u = a, of which either term is at least a / 2: Newton's method for this convex
    function starts within a factor 2 above the root. Derivatives go through the last three of its steps alone, each of
    which, taken from the root, doubles the number of derivatives that are exact.
    """
    if link.q == 1:
        return a / (1 + strength)
    q, constant, weight = link.q, a.detach(), strength.detach()
    u = torch.minimum(constant / weight, constant ** (1 / q))
    for i in range(7):
        if i == 4:
            u, constant, weight = u.detach(), a, strength
        u = ((q - 1) * u**q + constant) / (q * u ** (q - 1) + weight)
    return torch.where(strength * u < 0.5 * a, a - strength * u, u**q)  # the one that rounds less


def _evaluate(a: Tensor, t: Tensor, k: Tensor, strength: Tensor, link: ClippedPower, buffer: Tensor) -> Evaluation:
    q, limits = link.q, torch.finfo(a.dtype)
    scale = (strength * t ** (1 / q)).clamp(min=limits.tiny)
    sums = TailSums(*(v.double() for v in link.tail_sums(standardise_into(buffer, a, t, scale))))
    excess = sums.above - k
    residual = sums.total + excess
    growth = torch.where(excess <= 0, sums.total * ((-excess / sums.total) ** (1 / q) - 1), -residual / q)
    growth = growth * (1 + (excess == 0) * OVERSHOOT) / (sums.total + t / scale * sums.slope)
    step = t * torch.expm1(-q * torch.log1p(growth))
    found = residual.abs() <= (1 + q) * limits.eps * (sums.total + excess.abs())
    return step, residual, found | ((step.abs() <= RESOLUTION * t) & (sums.slope > 0))


def _middle(low: Tensor, high: Tensor) -> Tensor:
    """In the logarithm, over a range of many powers of ten."""
    return torch.where(high > 4 * low, low.sqrt() * high.sqrt(), arithmetic_mean(low, high))


def _solve_magnitudes(a: Tensor, k: Tensor, strength: Tensor, link: ClippedPower, span: Span) -> Tensor:
    n, q = a.shape[-1], link.q
    nonzero = a.sign().sum(-1).double()
    smallest = torch.where(a > 0, a, torch.inf).amin(-1).double()
    # At `low` every nonzero entry is capped: half of it is above t, half above the scale at t.
    floor = 1e-100 if a.dtype == torch.float64 else 1e-30  # below which y = t z vanishes anyway
    low = torch.minimum(smallest / 2, (smallest / (2 * strength)) ** q).clamp(floor, None)
    high = torch.maximum(span.highest, low)
    everything, none = k >= nonzero, k == 0
    done = everything | none
    if n >= 4 * SAMPLE_SIZE:
        sample = a[:, :: n // SAMPLE_SIZE].contiguous()
        start = _solve_magnitudes(sample, k * (sample.shape[-1] / n), strength, link, row_range(sample))
    else:
        fraction = (k / n).clamp(1e-300, 1 - 2.0**-53)
        mean, square = a.mean(-1).double(), torch.linalg.vector_norm(a, dim=-1).double().square() / n
        quantile = mean - (square - mean.square()).clamp(min=0).sqrt() * torch.special.ndtri(fraction)
        start = shrink(quantile.clamp(min=0), strength * fraction ** (1 / q), link)  # the root if all entries were this
    start = torch.maximum(torch.minimum(start, high), low)
    t = torch.where(everything, 0.0, torch.where(none, high, start))
    evaluate = partial(_evaluate, a, k=k, strength=strength, link=link, buffer=torch.empty_like(a))
    return guarded_newton(evaluate, t, (low, high), (nonzero - k, -k), done, middle=_middle)[0]
