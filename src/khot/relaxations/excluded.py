"""Entries of -inf in the maps of sorted entries, treated as the limit of ever smaller scores.

The m excluded entries of a row share the m lowest places, and the others follow as if they were a row of their own. The
maps therefore replace -inf with a finite number so far below the other entries that these are not affected: their
values are exactly the limit. The number is a constant, so excluded entries have no gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from khot._contents import looks_at_contents

APART = 2.0**-8  # excluded entries are below the lowest by at least this fraction of it, so rounding cannot merge them


@dataclass(frozen=True)  # Dynamo of torch 2.6 finds no properties of tuples
class Filled:
    """Rows in which no entry is -inf any more.

    Attributes:
        x: The rows (..., n), in float32 or float64.
        is_excluded: Where the entries were -inf.
    """

    x: Tensor
    is_excluded: Tensor

    @property
    def number(self) -> Tensor:
        """The number of excluded entries of each row (..., 1)."""
        return self.is_excluded.sum(-1, keepdim=True)


def filled_below(x: Tensor, distance: Tensor | float) -> Filled:
    """The rows with -inf replaced by finite numbers, at least ``distance`` (..., 1) below all other entries."""
    x = x.double() if looks_at_contents(x) else x.to(torch.promote_types(x.dtype, torch.float32))
    is_excluded = x == -torch.inf
    with torch.no_grad():
        lowest = x.masked_fill(is_excluded, torch.inf).amin(-1, keepdim=True)
        lowest = lowest.nan_to_num(torch.nan, 0.0)  # if all entries are excluded
        far = torch.sub(lowest - distance, lowest.abs(), alpha=APART).to(x.dtype).clamp(min=torch.finfo(x.dtype).min)
    return Filled(torch.where(is_excluded, far, x), is_excluded)


def may_have_excluded(x: Tensor) -> bool:
    """Whether some entry is -inf; True if the contents cannot be read."""
    return x.numel() > 0 and (not looks_at_contents(x) or bool((x.detach() == -torch.inf).any()))


def with_lowest_first(y: Tensor, count: Tensor, descending: bool = False) -> Tensor:
    """Sorted entries (..., n) with -inf in the places of the excluded ones."""
    place = torch.arange(y.shape[-1], device=y.device)
    is_excluded = place >= y.shape[-1] - count if descending else place < count
    return y.masked_fill(is_excluded, -torch.inf)
