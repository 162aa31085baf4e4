"""The sparse maps by absolute value of rows of which each process holds a part, see :mod:`khot.kernels.magnitude`.

In plain torch that is the code for whole rows; a backend may have a loop for each step between two reductions, see
:class:`khot.kernels.magnitude.local_loops.LocalLoops`.
"""

import torch
from torch import Tensor

from khot._distributed.shards import Shards

from ..links.clipped_power import ClippedPower
from ..rows import Threshold
from .local_loops import LocalLoops
from .local_shape import over
from .search import threshold_value
from .torch_backend import derivative_of_parts, map_at, threshold_of_parts


def odd_map_of_parts(
    x: Tensor,
    k: Tensor,
    strength: Tensor,
    link: ClippedPower,
    magnitude: bool,
    check: bool,
    shards: Shards,
    loops: LocalLoops | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y of the entries x (..., m) here, and the threshold's anchor and offset, the same on all processes."""
    at = Threshold(*threshold_of_parts(x, k, strength, link, magnitude, check, shards, loops))
    if loops is not None and x.numel() and _are_taken(loops, strength, at):
        y = loops.values(x, strength, at, link)
        if bool(y.isfinite().all()):
            return y, *at
    return map_at(x, strength, at, link, magnitude), *at


def odd_map_derivative_of_parts(
    x: Tensor,
    strength: Tensor,
    at: Threshold,
    grad: Tensor,
    link: ClippedPower,
    magnitude: bool,
    with_strength: bool,
    shards: Shards,
    loops: LocalLoops | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx of the entries here, dL/dk and dL/dstrength, the same on all processes; not differentiable.

    One collective, and with a gradient of the strength two.
    """
    if loops is not None and x.numel() and _are_taken(loops, strength, at):
        sums = loops.slopes(x, strength, at, grad, link)
        weight, pull = shards.sum(*sums[:2])
        mean = over(weight, pull)
        grad_x, of_strength = loops.gradient(x, strength, at, grad, mean, sums, link)
        if with_strength:
            (of_strength,) = shards.sum(of_strength)
        gain = threshold_value(at, strength, link) if magnitude else 1.0
        return grad_x, gain * mean, of_strength
    return derivative_of_parts(x, strength, at, grad, link, magnitude, with_strength, shards)


def _are_taken(loops: LocalLoops, strength: Tensor, at: Threshold) -> bool:
    """Whether thresholds and strengths are such that the loops are accurate, which all processes see alike."""
    return loops.take(strength, torch.where(at.anchor == 0, 1.0, at.anchor))
