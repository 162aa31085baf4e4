"""Masks as programs of plain operations, such as those of ONNX."""

import torch
from torch import Tensor

from ..exact.rows import compute_dtype
from ..links.base import Link
from .kinds import Kind

HALVINGS = 48  # they narrow a bracket of 1600 scales and the range of a row far below the rounding of single precision
LONGEST_REACH = 1000.0  # links with exponential tails reach no farther


def portable_mask(x: Tensor, k: float | Tensor, scale: float | Tensor, link: Link, kind: Kind) -> Tensor:
    r"""A mask or its logarithm in plain operations, equally many for every input, for programs such as those of ONNX.

    With :math:`u = (x - \max x)/s`, the c with :math:`\sum_i F(u_i - c) = k` lies between ``min u - reach`` and
    ``reach``. The rounding of c matters if scores next to the threshold are many scales from the largest one. Not
    differentiable.

    Raises:
        NotImplementedError: If the link has power-law tails, or the map is not a mask.
    """
    if kind.absolute:
        raise NotImplementedError("an ONNX program can compute masks of scores, but not of absolute values")
    if link.reach > LONGEST_REACH:
        raise NotImplementedError(
            f"an ONNX program finds thresholds in a fixed number of steps, for links with exponential tails, "
            f"but {link!r} has heavier ones"
        )
    size, softness = (v.to(x.device).unsqueeze(-1) if isinstance(v, Tensor) else v for v in (k, scale))
    u = x.to(compute_dtype(x))
    u = (u - u.amax(-1, keepdim=True)) / softness
    low = torch.where(u > -torch.inf, u, 0.0).amin(-1, keepdim=True) - link.reach
    high = torch.full_like(low, link.reach)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = link.value(u - middle).sum(-1, keepdim=True) > size
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    z = u - (low + high) / 2
    return (link.log_value(z) if kind.log else link.value(z)).to(x.dtype)
