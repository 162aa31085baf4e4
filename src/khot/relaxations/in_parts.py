"""The hard mask of sharded rows, of which each process holds some items."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._distributed.shards import Shards
from khot._validation import checks_contents
from khot.kernels.exact.rows import compute_dtype, in_rows_of, with_an_item


def topk_mask_of_parts(x: Tensor, k: int | Tensor, shards: Shards) -> Tensor:
    """The hard mask of the items x (..., m) of this process. Ties go to the lower-numbered processes.

    Every process sends its k largest items, or all of them if it has fewer, in one collective.
    """
    size = in_rows_of(x, k).long()
    if size.numel() == 0:  # no rows on any of these processes
        return torch.zeros_like(x)
    items = with_an_item(x.detach().to(compute_dtype(x)), -torch.inf)
    sent = max(1, min(int(size.amax()), max(shards.lengths)))
    best = items.topk(min(sent, items.shape[-1]), -1).values
    candidates = shards.gather(pad(best, (0, sent - best.shape[-1]), value=-torch.inf))
    ordered = candidates.movedim(0, -1).flatten(-2)
    if checks_contents(x) and bool(ordered.isnan().any()):  # NaN counts as the largest
        raise ValueError("`x` must not contain NaN")
    ordered = ordered.sort(-1, descending=True).values
    last = ordered.gather(-1, (size - 1).clamp(0, ordered.shape[-1] - 1).unsqueeze(-1))
    real = torch.arange(sent, device=x.device) < torch.tensor(shards.lengths, device=x.device).unsqueeze(-1)
    real = real.view(-1, *(1,) * size.dim(), sent)  # False for padding
    tied = ((candidates == last) & real).sum(-1)
    left = size - (ordered > last).sum(-1) - tied[: shards.own].sum(0)  # for ties on this process and later ones
    ties = items == last
    mask = (items > last) | (ties & (ties.cumsum(-1) <= left.unsqueeze(-1)))
    mask &= (size > 0).unsqueeze(-1)
    return mask[..., : x.shape[-1]].to(x.dtype)
