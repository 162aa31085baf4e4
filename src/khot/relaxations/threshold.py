"""The threshold of a top-k mask: the one number by which it decides, differentiable."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._validation import check_function, check_scores, check_softness
from khot.kernels.call import Call
from khot.kernels.threshold.kinds import MASK

from .axes import as_rows
from .boundary import with_call
from .engine import ThresholdMap
from .hard import topk_mask
from .linked import has_link, link_of
from .sigmoid import sigmoid_topk


@with_call(batch_first=True, in_parts=has_link)
def topk_threshold(
    _call: Call,
    x: Tensor,
    k: float | Tensor,
    softness: float | Tensor = 1.0,
    dim: int | tuple[int, ...] = -1,
    *,
    relaxation: Callable[..., Tensor] = sigmoid_topk,
) -> Tensor:
    r"""The threshold that scores exceed in a top-k mask (third argument: ``softness``; ``dim`` by keyword).

    .. math:: \text{relaxation}(x, k, s)_i = F((x_i - t)/s), \quad \sum_i F((x_i - t)/s) = k

    Of :func:`topk_mask`, t is the middle between the k-th and the next largest score, so that ``x > t`` is the mask
    unless the two are equal; ``inf`` for ``k = 0`` and ``-inf`` for ``k = n``. Of a relaxed mask it is finite for every
    k: at 0 and n so far away that the mask is the same to double precision. Of sparse masks without an entry strictly
    between 0 and 1 it is one of several, and its derivatives are returned as 0.

    Moves with ``x + c``. Differentiable in ``x``, ``k`` and ``softness``, to any order, as the mask is; for
    ``topk_mask`` in ``x`` alone. In float64 whatever the dtype of ``x``, but in float32 on a device without float64:
    rounding t shows in :math:`(x - t)/s` once ``abs(x) / s`` is large (above 1e6 in the tenth digit), and the masks
    themselves do not round it so.

    Args:
        x: Scores with ``n`` entries along ``dim``.
        k: Sum of the mask, ``0 <= k <= n``; for ``topk_mask`` of an integer type.
        softness: Positive softness, the third argument of the relaxation; ``topk_mask`` has none, and it has no
            influence.
        dim: Axis of the ground set, or axes that are one ground set together.
        relaxation: The mask: one of the library's, ``partial(capped_simplex_map, link=...)`` or ``topk_mask``.

    Returns:
        Float64 tensor of the batch shape, that of ``x`` without the axes of the ground set.

    Raises:
        ValueError: As the mask.
        TypeError: As the mask; or if the relaxation has no such threshold.

    Example:
        >>> topk_threshold(torch.tensor([0.0, 1.0, 2.0]), 1)
        tensor(1.8029, dtype=torch.float64)
        >>> topk_threshold(torch.tensor([0.0, 1.0, 3.0]), 1, relaxation=topk_mask)
        tensor(2., dtype=torch.float64)
    """
    check_scores(x, dim, joint=True, reads_layouts=_call.reads_layouts)
    check_function("relaxation", relaxation, "(x, k, softness)")
    rows = as_rows(x, dim)
    if relaxation is topk_mask:
        check_softness("softness", softness, x, rows.shape[:-1])  # which might be meant for an axis
        return _middle_of_the_gap(rows, k)
    link = link_of(relaxation, _call.is_compiling)
    if link is None:
        raise TypeError(
            "`relaxation` must be a mask with one threshold, F((x - t) / softness) with a link F, which has it as its "
            f"attribute `link`, or topk_mask, but got {relaxation!r}"
        )
    return ThresholdMap(link, "softness", MASK).threshold(_call, rows, k, softness)


def _middle_of_the_gap(x: Tensor, k: Any) -> Tensor:
    n, chosen = x.shape[-1], topk_mask(x, k) > 0
    if n == 0:
        return x.new_full(x.shape[:-1], torch.inf, dtype=torch.float64)
    last = x.masked_fill(~chosen, torch.inf).amin(-1).double()
    following = x.masked_fill(chosen, -torch.inf).amax(-1).double()
    middle = torch.where(last == torch.inf, following, last / 2 + following / 2)  # above no infinity is anything
    if not isinstance(k, Tensor):
        k = torch.full((), k, device=x.device)
    k = k.to(x.device)
    return middle.masked_fill(k == n, -torch.inf).masked_fill(k == 0, torch.inf)
