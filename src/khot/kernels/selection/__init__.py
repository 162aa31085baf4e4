r"""The k largest entries of rows, by counting.

y_i = 1 for the k largest x_i and 0 for the others, of equal ones the first. With :math:`c(t) = \#\{i : x_i > t\}`, which
falls from n to 0, a threshold with c(t) = k makes the mask. Numbers are ordered as the integers that their bits are, so
the range of a dtype is cut in four by three counts at a time, until c(t) = k or two neighbouring numbers enclose t: then
entries are tied at t, and the first of them are chosen. That takes one pass over the row for every 2 bits at most.
"""

import torch
from torch import Tensor

from ..registry import Operator
from . import exact
from .exact import check_ranked

__all__ = ["check_ranked", "topk_mask"]


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


topk_mask = Operator("topk_mask", exact.topk_mask, fake=_like)
topk_mask.backend("numba", module=".numba_backend", takes=lambda x, *_: x.shape[-1] < 2**31)
