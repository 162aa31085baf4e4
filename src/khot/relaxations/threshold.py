"""The threshold of a top-k mask, the one number that decides which entries it selects, differentiable."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._distributed.boundary import of_rows
from khot._validation import check_function, check_rows, check_softness
from khot.kernels.call import Call
from khot.kernels.threshold.kinds import MASK

from .axes import as_rows
from .engine import ThresholdMap
from .hard import topk_mask
from .linked import has_link, link_of, scale_of
from .sigmoid import sigmoid_topk


@of_rows(batch_first=True, sharded=has_link)
def topk_threshold(
    _call: Call,
    x: Tensor,
    k: float | Tensor,
    softness: float | Tensor = 1.0,
    *,
    dim: int | tuple[int, ...] = -1,
    relaxation: Callable[..., Tensor] = sigmoid_topk,
) -> Tensor:
    r"""The threshold above which scores are selected (third argument: ``softness``; ``dim`` by keyword).

    .. math:: \text{relaxation}(x, k, s)_i = F((x_i - t)/s), \quad \sum_i F((x_i - t)/s) = k

    For :func:`topk_mask`, t is the midpoint between the k-th and the next largest score, so
    ``x > t`` is the mask unless the two are equal; t is ``inf`` for ``k = 0`` and ``-inf`` for ``k = n``. For a relaxed
    mask, t is finite for every k: at 0 and n it is so far away that the mask is the same to double precision. For a
    sparse mask without an entry strictly between 0 and 1, t is one of several solutions, and its derivatives are
    returned as 0.

    The threshold moves with ``x + c``. It is differentiable to any order in ``x``, ``k`` and ``softness``, as the mask
    is; for ``topk_mask`` in ``x`` alone. Its dtype is float64 whatever the dtype of ``x``, or float32 on a device
    without float64. Rounding t affects :math:`(x - t)/s` once ``abs(x) / s`` is large (the tenth digit above 1e6). The
    masks themselves do not round t in this way.

    Args:
        x: Scores with ``n`` entries along ``dim``.
        k: Sum of the mask, ``0 <= k <= n``; an integer for ``topk_mask``.
        softness: Positive softness, the third argument of the relaxation; ignored for ``topk_mask``, which has none.
        dim: Axis of the ground set, or axes that together form one ground set.
        relaxation: The mask: one of this library, ``partial(capped_simplex_map, link=...)`` or ``topk_mask``.

    Returns:
        Float64 tensor of the batch shape: the shape of ``x`` without the axes of the ground set.

    Raises:
        ValueError: If the mask raises one.
        TypeError: If the mask raises one, or if the relaxation has no such threshold.

    Example:
        >>> topk_threshold(torch.tensor([0.0, 1.0, 2.0]), 1)
        tensor(1.8029, dtype=torch.float64)
        >>> topk_threshold(torch.tensor([0.0, 1.0, 3.0]), 1, relaxation=topk_mask)
        tensor(2., dtype=torch.float64)
    """
    check_rows(x, dim, joint=True)
    check_function("relaxation", relaxation, "(x, k, softness)")
    rows = as_rows(x, dim)
    if relaxation is topk_mask:
        check_softness("softness", softness, x, rows.shape[:-1])  # the caller may have meant it as an axis
        return _middle_of_the_gap(rows, k)
    link = link_of(relaxation)
    if link is None:
        raise TypeError(
            "`relaxation` must be topk_mask, or a mask F((x - t) / softness) with one threshold t and the link F as "
            f"its attribute `link`, but got {relaxation!r}"
        )
    check_softness("softness", softness, x, rows.shape[:-1])
    return ThresholdMap(link, "softness", MASK).threshold(_call, rows, k, scale_of(relaxation, softness))


def _middle_of_the_gap(x: Tensor, k: Any) -> Tensor:
    n, chosen = x.shape[-1], topk_mask(x, k) > 0
    if n == 0:
        return x.new_full(x.shape[:-1], torch.inf, dtype=torch.float64)
    last = x.masked_fill(~chosen, torch.inf).amin(-1).double()
    following = x.masked_fill(chosen, -torch.inf).amax(-1).double()
    middle = torch.where(last == torch.inf, following, last / 2 + following / 2)  # nothing is above infinity
    if not isinstance(k, Tensor):
        k = torch.full((), k, device=x.device)
    k = k.to(x.device)
    return middle.masked_fill(k == n, -torch.inf).masked_fill(k == 0, torch.inf)
