"""The C(n, k) k-hot vectors in lexicographic order of their positions, any stretch of them without the others.

Those that contain unit 0 come first, C(n - 1, k - 1) of them, in the order of the remaining units; so the rank of a
vector says for one unit after the other whether it is in.
"""

import math

import torch
from torch import Tensor

from khot._tracing import one_operation

MAX_RANK = torch.iinfo(torch.long).max


def k_hot_vectors(n: int, k: int, start: int, stop: int, like: Tensor) -> Tensor:
    """The vectors of ranks ``start`` to ``stop - 1``, ``(stop - start, n)``, with the dtype and device of ``like``.

    Ranks are below C(n, k), which has to fit into 63 bits.
    """
    return k_hot_vectors_of_rank(n, k, torch.arange(start, stop, device=like.device), like)


@one_operation
def k_hot_vectors_of_rank(n: int, k: int, rank: Tensor, like: Tensor) -> Tensor:
    """The vectors of these ranks, ``(*rank.shape, n)``, with the dtype and device of ``like``."""
    values = torch.zeros(*rank.shape, n, dtype=like.dtype, device=like.device)
    if k == 0:
        return values
    if 2 * k > n:  # complements come in the opposite order
        return 1 - k_hot_vectors_of_rank(n, n - k, math.comb(n, k) - 1 - rank, like)
    # Column j: how many of the vectors that are still possible contain unit i, if j units are left to choose.
    counts = [[0, *(min(math.comb(n - 1 - i, j), MAX_RANK) for j in range(k))] for i in range(n)]
    containing_unit = torch.tensor(counts, dtype=torch.long, device=like.device)
    left = torch.full_like(rank, k)
    for i in range(n):
        containing = containing_unit[i][left]
        inside = rank < containing
        values[..., i] = inside
        rank = rank - containing.masked_fill_(inside, 0)
        left = left - inside.long()
    return values
