r"""The k largest entries of rows, by counting.

y_i = 1 for the k largest x_i and 0 for the others, where ties go to the first: the mask of a threshold t above which
there are k entries, :math:`\#\{i : x_i > t\} = k`, or as many as ties allow. Numbers are ordered like the integers with
the same bits, so counts at three thresholds cut a bracket of t in four, until one of the counts is k, or two
neighbouring numbers enclose t; entries are then tied at t. This takes one pass over the row for two bits of a number.

``topk_mask`` gives the mask, and ``topk_indices`` the positions of its ones; ``keep_largest``, a loop without an
operator, gives the entries times the mask, or with another number such as ``-inf`` in place of the zeros, for modules,
which then need no further pass.
"""

import torch
from torch import Tensor

from ..registry import Operation, Operator
from . import exact
from .exact import check_ranked

__all__ = ["bounds_of", "check_ranked", "keep_largest", "rows_outside", "topk_indices", "topk_mask"]


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


topk_mask = Operator("topk_mask", exact.topk_mask, fake=_like)
topk_mask.backend("triton", module=".triton_backend")
topk_mask.backend("numba", module=".numba_backend")


def _indices_like(x: Tensor, k: int, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], k), dtype=torch.int64)


topk_indices = Operator("topk_indices", exact.topk_indices, fake=_indices_like)
topk_indices.backend("triton", module=".triton_backend")
topk_indices.backend("numba", module=".numba_backend")


def bounds_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of each row of x (..., n), and the end, as :data:`topk_indices` takes them."""
    first, end = (torch.full((), place, dtype=torch.int64, device=x.device) for place in (0, x.shape[-1]))
    return first.expand(x.shape[:-1]), end.expand(x.shape[:-1])


keep_largest = Operation(__name__, "keep_largest")  # for plain calls; without loops, modules multiply by the mask
keep_largest.backend("numba", module=".numba_backend")

rows_outside = Operation(__name__, "rows_outside")  # likewise, for values of float32 or float64
rows_outside.backend("numba", module=".numba_sums")
