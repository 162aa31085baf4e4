"""A relaxed mask in plain operations, as many for every input: for programs that run outside of torch, such as ONNX."""

import torch
from torch import Tensor

from khot.kernels.links.base import Link
from khot.kernels.rows import compute_dtype

STEPS = 48  # halvings of at most 1600 scales and the range of a row: far below the rounding of single precision
LONGEST_REACH = 1000.0  # of links whose tails end like exponentials


def portable_mask(x: Tensor, k: float | Tensor, scale: float | Tensor, link: Link, log: bool) -> Tensor:
    r"""The mask F((x - t)/s) that sums to k along the last axis, or its logarithm, by bisection; not differentiable.

    With :math:`u = (x - \max x)/s`, c from :math:`\sum_i F(u_i - c) = k` lies between ``min u - reach`` and ``reach``.
    Rounding of c shows where scores next to the threshold are many scales from the largest one.

    Args:
        x: Scores (..., n); ``-inf`` excludes an entry.
        k: Sum, a number or a tensor of the batch shape.
        scale: Positive, likewise.
        link: The link function F.
        log: Whether the logarithm is wanted.

    Raises:
        NotImplementedError: If the link has tails like powers.
    """
    if link.reach > LONGEST_REACH:
        raise NotImplementedError(
            f"a program for ONNX finds thresholds in a fixed number of steps, for links with tails like exponentials, "
            f"but {link!r} has heavier ones"
        )
    size, softness = (v.to(x.device).unsqueeze(-1) if isinstance(v, Tensor) else v for v in (k, scale))
    u = x.to(compute_dtype(x))
    u = (u - u.amax(-1, keepdim=True)) / softness
    low = torch.where(u > -torch.inf, u, 0.0).amin(-1, keepdim=True) - link.reach
    high = torch.full_like(low, link.reach)
    for _ in range(STEPS):
        middle = (low + high) / 2
        above = link.value(u - middle).sum(-1, keepdim=True) > size
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    z = u - (low + high) / 2
    return (link.log_value(z) if log else link.value(z)).to(x.dtype)
