r"""Soft ranks, sorting and permutations with laws other than Laplace's, by sums over all pairs in O(n^2).

With a link F the count of the items below t is :math:`\sum_i F((t - x_i)/s)` (LapSum, section 3). The point where it
reaches a target c is given by the threshold of a relaxed mask of -x that sums to c, and that mask selects the items
below the point:

.. math:: \sum_i F((-x_i - \tau)/s) = c \iff t = -\tau .

So quantiles and slices are such masks for n targets, and have their derivatives. Excluded entries are +inf in -x, and
thus below every t. Descending order uses x itself, in which they are -inf and above every t.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot.kernels.exact.rows import compute_dtype, in_rows_of
from khot.kernels.links.base import Link
from khot.kernels.operators.autograd import with_derivatives_of

from .engine import capped_simplex_map
from .excluded import with_lowest_first
from .threshold import topk_threshold


class _Mirrored(NamedTuple):
    """The scores of the masks.

    Attributes:
        scores: -x, or x for descending order; 0 in rows in which all entries are excluded.
        is_excluded: Where x is -inf.
        number: The number of excluded entries (..., 1); 0 in rows in which all are.
    """

    scores: Tensor
    is_excluded: Tensor
    number: Tensor

    def targets(self, first: float, count: int, descending: bool) -> Tensor:
        """``first``, ``first + 1``, ... for each row, shifted to where the other entries are counted."""
        n, fraction = self.scores.shape[-1], first % 1
        target = first + torch.arange(count, dtype=torch.float64, device=self.scores.device)
        if descending:
            return target.minimum(n - self.number - fraction)
        return target.maximum(self.number + fraction)


def _mirrored(x: Tensor, descending: bool) -> _Mirrored:
    x = x.to(compute_dtype(x))
    is_excluded = x == -torch.inf
    number, n = is_excluded.sum(-1, keepdim=True), x.shape[-1]
    scores = (x if descending else -x).masked_fill(number == n, 0.0)
    return _Mirrored(scores, is_excluded, number.masked_fill(number == n, 0))


def _for_each(x: Tensor, scale: float | Tensor, count: int) -> tuple[Tensor, float | Tensor]:
    """The rows repeated for each of ``count`` targets, (..., count, n), and their scales."""
    rows = x.unsqueeze(-2).expand(*x.shape[:-1], count, x.shape[-1])
    return rows, scale.unsqueeze(-1) if isinstance(scale, Tensor) and scale.dim() > 0 else scale


def rank(x: Tensor, scale: float | Tensor, descending: bool, link: Link) -> Tensor:
    """1/2 plus the count at each finite entry (..., n); excluded entries have their mean rank."""
    n, is_excluded = x.shape[-1], x == -torch.inf
    half = torch.where(is_excluded, 0.0, x.double()) * (-0.5 if descending else 0.5)
    column = in_rows_of(x, scale)[..., None, None] * 0.5
    reach = link.reach * column  # beyond it the quotient may overflow
    below = link.value((half.unsqueeze(-1) - half.unsqueeze(-2)).clamp(-reach, reach) / column)
    below = below.masked_fill(is_excluded.unsqueeze(-2), 0.0 if descending else 1.0)
    number = is_excluded.sum(-1, keepdim=True)
    lowest = 0.5 * (number + 1) + (n - number if descending else 0)
    return torch.where(is_excluded, lowest.double(), 0.5 + below.sum(-1)).to(x.dtype)


def sort(x: Tensor, scale: float | Tensor, descending: bool, link: Link) -> Tensor:
    """The points where the count reaches 1/2, 3/2, ... (..., n)."""
    n, mirrored = x.shape[-1], _mirrored(x, descending)
    rows, scales = _for_each(mirrored.scores, scale, n)
    k = mirrored.targets(0.5, n, descending)
    t = topk_threshold(rows, k, scales, relaxation=partial(capped_simplex_map, link=link))
    t = (t if descending else -t).to(x.dtype)
    return with_lowest_first(t, mirrored.is_excluded.sum(-1, keepdim=True), descending)


def permutation(x: Tensor, scale: float | Tensor, descending: bool, link: Link) -> Tensor:
    """The share of each item between the points where the count is j - 1 and j, for positions j; (..., n, n)."""
    n, mirrored = x.shape[-1], _mirrored(x, descending)
    if n == 0:
        return x.unsqueeze(-1)[..., :0]
    # In float64: a difference of masks rounded to float32 would have a few correct digits in long rows.
    rows, scales = _for_each(mirrored.scores.double(), scale, n - 1)
    below = capped_simplex_map(rows, mirrored.targets(1.0, n - 1, descending), scales, link=link).mT
    last = below.new_ones(*x.shape, 1)
    matrix = torch.cat([below, last], -1) - pad(below, (1, 0))
    matrix = with_derivatives_of(matrix.detach().clamp(min=0.0), matrix)  # equal up to rounding
    number = mirrored.is_excluded.sum(-1, keepdim=True).unsqueeze(-1)
    place = torch.arange(n, device=x.device)
    is_lowest = place >= n - number if descending else place < number
    share = is_lowest.double() / number.clamp(min=1)
    return torch.where(mirrored.is_excluded.unsqueeze(-1), share, matrix).to(x.dtype)
