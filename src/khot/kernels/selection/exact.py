"""The hard mask in plain torch: the entries above the k-th largest, and the first of those equal to it."""

import torch
from torch import Tensor

NOT_A_NUMBER = "`x` must not contain NaN"


def topk_mask(x: Tensor, k: Tensor, check: bool) -> Tensor:
    """Ones for the k largest entries of each row of x (..., n), zeros for the others; k is int64, (...).

    Ties go to the first entries; infinities are ordinary entries. With ``check``, an entry of NaN or a k out of range
    is an error.
    """
    if check:
        check_ranked(x, k)
    most = n = x.shape[-1]
    if k.device.type == "cpu" and k.numel() > 0:  # elsewhere, reading k would stall the device
        most = min(max(int(k.max()), 0), n)
    return mask_of_largest(x, k, most).contiguous()


def mask_of_largest(x: Tensor, k: Tensor, most: int) -> Tensor:
    """The mask of :func:`topk_mask`, if no k is larger than ``most``."""
    if x.shape[-1] == 0 or most == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    largest, size = x.topk(most, -1).values, k.to(x.device).unsqueeze(-1)
    last = largest.gather(-1, (size - 1).clamp(0, most - 1))
    above, tied = x > last, x == last
    rest = size - above.sum(-1, keepdim=True)
    return ((above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= rest))) & (size > 0)).to(x.dtype)


def topk_indices(x: Tensor, k: int, begins: Tensor, ends: Tensor, skips: bool, fill: int, check: bool) -> Tensor:
    """The positions (..., k), increasing, of the k largest entries of the part [begin, end) of each row x (..., n).

    Bounds are int64, (...), with 0 <= begin <= end <= n. With ``skips``, entries of ``-inf`` are left out, and places
    for which there are too few entries get ``fill``; without, parts must be whole rows. With ``check``, an entry of NaN
    is an error.
    """
    n = x.shape[-1]
    column, most, scores = torch.arange(n, device=x.device), min(k, n), parts_of(x, begins, ends)
    if check:
        check_ranked(scores, k)
    chosen = mask_of_largest(scores, torch.full_like(begins, most), most) != 0
    if skips:
        chosen &= scores > -torch.inf
    place = torch.where(chosen, chosen.cumsum(-1) - 1, k)  # the last one is cut off
    found = torch.full((*x.shape[:-1], k + 1), fill, device=x.device)
    return found.scatter(-1, place, column.expand(x.shape))[..., :k].contiguous()


def parts_of(x: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """The rows, with ``-inf`` outside their parts [begin, end)."""
    column = torch.arange(x.shape[-1], device=x.device)
    return x.masked_fill((column < begins.unsqueeze(-1)) | (column >= ends.unsqueeze(-1)), -torch.inf)


def check_ranked(x: Tensor, k: int | Tensor) -> None:
    """Checks that the rows of x (..., n), which may be infinite, have no NaN, and that k is from 0 to n."""
    if x.numel() and bool(x.amax(-1).isnan().any()):
        raise ValueError(NOT_A_NUMBER)
    if isinstance(k, Tensor) and bool(((k < 0) | (k > x.shape[-1])).any()):
        raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k in [{k.min()}, {k.max()}] with n={x.shape[-1]}")
