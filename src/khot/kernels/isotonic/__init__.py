"""TODO khot.kernels.isotonic.__init__."""

from typing import Any

import torch
from torch import Tensor

from ..autograd import move_batch_first
from ..registry import operator
from .torch_backend import Objective, _check_contents, block_minimiser, dual_ascent, pool_adjacent


@operator("isotonic")
def isotonic(
    s: Tensor, w: Tensor, strength: Tensor, p: float, magnitude: bool, dual: bool, max_iter: int, names: str
) -> tuple[Tensor, Tensor]:
    """The solution (float64) and its blocks (int64) along the last axis, for s and w (..., n), strength (...).

    With ``names`` such as "s,w", bad contents raise a ValueError in which s and w go by these names.
    """
    if s.numel() == 0:
        return torch.zeros_like(s, dtype=torch.float64), torch.zeros_like(s, dtype=torch.long)
    if names:
        _check_contents(dict(zip(names.split(","), (s, w), strict=True)), strength, magnitude)
    n = s.shape[-1]
    rows, weights = (v.double().reshape(-1, n).contiguous() for v in (s, w))  # what follows looks at rows as halves
    objective = Objective(rows, weights, strength.double().reshape(-1, 1), p, magnitude)
    if dual:
        v, blocks = dual_ascent(objective, max_iter)
    else:
        blocks = pool_adjacent(objective)
        v = block_minimiser(objective, blocks)
    return v.reshape(s.shape), blocks.reshape(s.shape)


@isotonic.register_fake
def _(
    s: Tensor, w: Tensor, strength: Tensor, p: float, magnitude: bool, dual: bool, max_iter: int, names: str
) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape, dtype=torch.float64), s.new_empty(s.shape, dtype=torch.long)


@isotonic.register_vmap
def _(info: Any, in_dims: Any, s: Tensor, w: Tensor, strength: Tensor, *options: Any) -> tuple[Any, Any]:
    s, w, strength = move_batch_first(info.batch_size, in_dims, (s, w, strength))
    return isotonic(s, w, strength, *options[:-1], ""), (0, 0)
