r"""The k largest entries of rows, by counting.

y_i = 1 for the k largest x_i and 0 for the others, of equal ones the first: the mask of a threshold t above which there
are k entries, :math:`\#\{i : x_i > t\} = k`, or as many as ties allow. Numbers are ordered as the integers that their
bits are, so that a bracket of t is cut in four by counts at three thresholds, until one of them is k or two
neighbouring numbers enclose t: then entries are tied at t. That is one pass over the row for two bits of a number.
"""

import torch
from torch import Tensor

from ..operators.platforms import MAX_N
from ..registry import Operator, only_if
from . import exact
from .exact import check_ranked

__all__ = ["check_ranked", "topk_mask"]


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


topk_mask = Operator("topk_mask", exact.topk_mask, fake=_like)
topk_mask.backend("triton", module=".triton_backend")
topk_mask.backend(
    "numba",
    module=".numba_backend",
    takes=only_if(lambda x, *_: x.shape[-1] <= MAX_N, "its loops count the columns of a row in 32 bits"),
)
