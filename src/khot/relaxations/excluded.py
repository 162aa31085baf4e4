"""Entries of -inf in the maps of sorted entries: the limit of ever smaller scores.

The m excluded entries of a row share the m lowest places, and the others follow as a row of their own. So the maps take
a finite number for them, so far below the others that no entry feels it: what the others get is the limit itself. It is
a constant, so that excluded entries have no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from khot._contents import looks_at_contents

APART = 2.0**-8  # excluded entries are below the lowest one by this share of it at least: rounding cannot join them


class Filled(NamedTuple):
    """Rows in which nothing is excluded any more.

    Attributes:
        x: The rows (..., n), in float32 or float64.
        is_excluded: Where they were -inf.
    """

    x: Tensor
    is_excluded: Tensor

    @property
    def number(self) -> Tensor:
        """How many entries of each row are excluded (..., 1)."""
        return self.is_excluded.sum(-1, keepdim=True)


def filled_below(x: Tensor, distance: Tensor | float) -> Filled:
    """The rows with finite numbers in the place of -inf, at least ``distance`` (..., 1) below all others."""
    x = x.double() if looks_at_contents(x) else x.to(torch.promote_types(x.dtype, torch.float32))
    is_excluded = x == -torch.inf
    with torch.no_grad():
        lowest = x.masked_fill(is_excluded, torch.inf).amin(-1, keepdim=True)
        lowest = lowest.masked_fill(lowest == torch.inf, 0.0)  # all are excluded
        far = (lowest - distance - APART * lowest.abs()).to(x.dtype).clamp(min=torch.finfo(x.dtype).min)
    return Filled(torch.where(is_excluded, far, x), is_excluded)


def may_have_excluded(x: Tensor) -> bool:
    """Whether some entry is -inf; True where contents cannot be read."""
    return x.numel() > 0 and (not looks_at_contents(x) or bool((x.detach() == -torch.inf).any()))


def with_lowest_first(y: Tensor, count: Tensor, descending: bool = False) -> Tensor:
    """Sorted entries (..., n) with -inf in the places of the excluded ones."""
    place = torch.arange(y.shape[-1], device=y.device)
    is_excluded = place >= y.shape[-1] - count if descending else place < count
    return y.masked_fill(is_excluded, -torch.inf)
