"""The hard mask in plain torch: what lies above the k-th largest entry, and of its equals the first."""

import torch
from torch import Tensor


def topk_mask(x: Tensor, k: Tensor, check: bool) -> Tensor:
    """Ones for the k largest entries of each row of x (..., n), zeros for the others; k is int64, (...).

    Of equal entries the first are chosen; infinities are ordinary entries. With ``check`` it is an error if an entry is
    NaN or a k out of range.
    """
    if check:
        check_ranked(x, k)
    most = n = x.shape[-1]
    if k.device.type == "cpu" and k.numel() > 0:  # elsewhere a look at k would stall the device
        most = min(max(int(k.max()), 0), n)
    return mask_of_largest(x, k, most).contiguous()


def mask_of_largest(x: Tensor, k: Tensor, most: int) -> Tensor:
    """The same, where no k is larger than ``most``."""
    if x.shape[-1] == 0 or most == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    largest, size = x.topk(most, -1).values, k.to(x.device).unsqueeze(-1)
    last = largest.gather(-1, (size - 1).clamp(0, most - 1))
    above, tied = x > last, x == last
    rest = size - above.sum(-1, keepdim=True)
    return ((above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= rest))) & (size > 0)).to(x.dtype)


def keep_largest(x: Tensor, k: Tensor, by_magnitude: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest entries of each row, zeros for the others; which they are; and the smallest positive one of a row.

    The largest in absolute value ``by_magnitude``, and the smallest of these. Entries of ``-inf``, which exclude, count
    as smaller than all others, and are never kept. Where a row has none that is positive the smallest one is infinite;
    it is NaN where the row has NaN or too few entries.
    """
    scores = x.abs().masked_fill(x == -torch.inf, -torch.inf) if by_magnitude else x
    kept = topk_mask(scores, k, False) != 0
    wrong = (kept & (scores == -torch.inf)).any(-1) | x.isnan().any(-1) | (k < 0) | (k > x.shape[-1])
    kept &= scores > -torch.inf
    positive = scores.masked_fill(~kept | ~(scores > 0), torch.inf)
    smallest = positive.amin(-1) if x.shape[-1] else x.new_full(x.shape[:-1], torch.inf)
    return x.masked_fill(~kept, 0.0).contiguous(), kept.contiguous(), smallest.masked_fill(wrong, torch.nan)


def check_ranked(x: Tensor, k: int | Tensor) -> None:
    """The rows of x (..., n), which may be infinite, have no NaN, and k lies from 0 to n."""
    if x.numel() and bool(x.amax(-1).isnan().any()):
        raise ValueError("`x` must not contain NaN")
    if isinstance(k, Tensor) and bool(((k < 0) | (k > x.shape[-1])).any()):
        raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k in [{k.min()}, {k.max()}] with n={x.shape[-1]}")
