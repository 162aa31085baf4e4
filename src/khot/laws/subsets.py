"""The C(n, k) k-hot vectors in lexicographic order of their positions; any range of them without the others.

Vectors that contain unit 0 come first, C(n - 1, k - 1) of them, in the order of the remaining units. So the rank of a
vector determines, one unit after another, which units it contains.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from khot._host import on_host_without_float64

MAX_RANK = torch.iinfo(torch.long).max
MAX_SHORT_RANK = torch.iinfo(torch.int).max


def k_hot_vectors(n: int, k: int, start: int, stop: int, like: Tensor) -> Tensor:
    """The vectors of ranks ``start`` to ``stop - 1``, ``(stop - start, n)``, with the dtype and device of ``like``.

    Ranks are below C(n, k), which has to fit into 63 bits.
    """
    return k_hot_vectors_of_rank(n, k, torch.arange(start, stop, device=like.device), like)


@on_host_without_float64
def k_hot_vectors_of_rank(n: int, k: int | Tensor, rank: Tensor, like: Tensor) -> Tensor:
    """The vectors of these ranks, ``(*rank.shape, n)``, with the dtype and device of ``like``.

    A tensor k broadcasts to the shape of ``rank``, and its sizes may differ.
    """
    shape, number = rank.shape, torch.long
    if isinstance(k, Tensor):
        largest, left = n, k.expand(shape)
    elif 2 * k > n:  # complements come in the opposite order
        return 1 - k_hot_vectors_of_rank(n, n - k, math.comb(n, k) - 1 - rank, like)
    else:
        largest, left = k, torch.full_like(rank, k)
        if math.comb(n, k) <= MAX_SHORT_RANK:
            number = torch.int  # half the bytes to read and write per unit
    if largest == 0 or n == 0:
        return torch.zeros(*shape, n, dtype=like.dtype, device=like.device)
    rank, left = rank.flatten().to(number), left.flatten().to(number)
    unit_is_in = []
    for containing_unit in _vectors_with_unit(n, largest, like.device).to(number).unbind():
        containing = containing_unit.index_select(0, left)
        inside = rank < containing
        unit_is_in.append(inside)
        rank = rank - containing.masked_fill_(inside, 0)
        left = left - inside.to(number)
    return torch.stack(unit_is_in, -1).to(like.dtype).view(*shape, n)


@on_host_without_float64
def rank_of_k_hot_vectors(value: Tensor) -> Tensor:
    """The rank of each vector ``(..., n)`` among those of the same size, ``(...)``, which has to fit into 63 bits."""
    inside = value > 0
    n = inside.shape[-1]
    left = inside.long().flip(-1).cumsum(-1).flip(-1)  # units to choose at i and after it
    containing = _vectors_with_unit(n, n, value.device)[torch.arange(n, device=value.device), left]
    return containing.masked_fill(inside, 0).sum(-1)


def _vectors_with_unit(n: int, largest: int, device: torch.device) -> Tensor:
    """Row i, column j: the number of remaining possible vectors that contain unit i, if j units are left to choose.

    If this exceeds ``MAX_RANK``, so does every rank of a vector that does not contain the unit.
    """
    rows, choices = [], [1, *[0] * (largest - 1)]  # C(m, j), by Pascal's rule from m = 0
    for _ in range(n):
        rows.append([0, *choices])
        choices = [1, *(min(fewer + as_many, MAX_RANK) for fewer, as_many in pairwise(choices))]
    return torch.tensor(rows[::-1], dtype=torch.long, device=device)
