"""The relaxed top-k mask with any link, also a user's own."""

from torch import Tensor

from khot._distributed.boundary import of_rows
from khot._validation import described
from khot.kernels.call import Call
from khot.kernels.links.base import Link
from khot.kernels.threshold.kinds import MASK

from .engine import ThresholdMap


@of_rows(sharded=True)
def capped_simplex_map(
    _call: Call,
    x: Tensor,
    k: float | Tensor,
    scale: float | Tensor = 1.0,
    *,
    link: Link,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""Relaxes top-k by a shifted, increasing link function F (third argument: ``scale``; ``dim`` by keyword).

    .. math:: y_i = F((x_i - t)/s), \quad t \text{ such that } \sum_i y_i = k

    The relaxed masks of this library, except for :func:`successive_softmax_topk`, are this map with a link of their
    own; pass a :class:`Link` to make another one. The map keeps the order of ``x``, is invariant to ``x + c``, and
    tends to the k-hot top-k as ``scale -> 0`` (a link with compact support reaches it). It is differentiable in ``x``,
    ``k`` and ``scale``, in reverse and forward mode, as often as F is.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the result, ``0 <= k <= n``.
        scale: Positive softness.
        link: The link function. A compiled graph ends at a link of your own, and the mask is computed eagerly; an
            exported program cannot have one, except for ONNX.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        TypeError: If ``link`` is not a :class:`Link`.
        ValueError: If ``k`` or ``scale`` is out of range, ``x`` contains NaN, or fewer than ``k`` entries are
            unmasked. See :mod:`khot.relaxations`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3, for general F.

    Example:
        >>> capped_simplex_map(torch.tensor([0.0, 1.0, 2.0]), 1.5, link=Logistic())
        tensor([0.2689, 0.5000, 0.7311])
    """
    if not isinstance(link, Link):
        raise TypeError(f"`link` must be a khot.relaxations.Link, but got {described(link, Link)}")
    return ThresholdMap(link, "scale", MASK).apply(_call, x, k, scale, dim)
