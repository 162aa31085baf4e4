"""Sigmoid top-k: the relaxed top-k mask with the logistic link, the k-of-n counterpart of softmax."""

from torch import Tensor

from khot._distributed.boundary import of_rows
from khot.kernels.call import Call
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.threshold.kinds import MASK

from .engine import ThresholdMap
from .linked import logarithm_of, with_link

MAP = ThresholdMap(LOGISTIC, "temperature", MASK)


@with_link(MAP.link)
@of_rows(sharded=True)
def sigmoid_topk(
    _call: Call, x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0, *, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Relaxes top-k smoothly, as softmax relaxes argmax (third argument: ``temperature``; ``dim`` by keyword).

    .. math:: y_i &= \sigma((x_i - t)/T), \quad \sum_i y_i = k; \\
        y &= \arg\max_{y \in [0,1]^n, \sum y = k} \langle x, y \rangle + T \sum_i H_b(y_i)

    with the binary entropy :math:`H_b`. Tends to the k-hot top-k as ``temperature -> 0`` and to ``k / n`` as it grows.
    The map is permutation-equivariant, keeps the order of ``x`` and is invariant to ``x + c``. It is differentiable to
    any order in ``x``, ``k`` and ``temperature``, in reverse and forward mode.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the result, ``0 <= k <= n``.
        temperature: Positive softness.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        ValueError: If ``k`` or ``temperature`` is out of range, ``x`` contains NaN, or fewer than ``k`` entries are
            unmasked. See :mod:`khot.relaxations`.

    References:
        [1] "Differentiable top-k: from one-hot to k-hot", Eqs. (9)-(11),
            https://openreview.net/forum?id=HxLmtJYfBi
        [2] Amos, Koltun, Kolter (2019), "The Limited Multi-Label Projection Layer", arXiv:1906.08707.

    Example:
        >>> sigmoid_topk(torch.tensor([0.0, 1.0, 2.0]), 1.5)
        tensor([0.2689, 0.5000, 0.7311])
    """
    return MAP.apply(_call, x, k, temperature, dim)


@logarithm_of(sigmoid_topk)
@of_rows(sharded=True)
def log_sigmoid_topk(
    _call: Call, x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0, *, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Logarithm of :func:`sigmoid_topk` (third argument: ``temperature``; ``dim`` by keyword).

    .. math:: \log y_i = -\log(1 + e^{-(x_i - t)/T}), \quad \sum_i y_i = k

    Accurate even where the mask itself underflows. The logarithm of its complement, :math:`\log(1 - y)`, is
    ``log_sigmoid_topk(-x, n - k, temperature)``. Differentiable as :func:`sigmoid_topk` is.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the mask, ``0 <= k <= n``. For ``k = 0`` the result is the logarithm of a vanishing mask: finite,
            below -700.
        temperature: Positive softness.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, at most 0, whose exponential sums to ``k`` along ``dim``.

    Raises:
        ValueError: As for :func:`sigmoid_topk`.
        TypeError: As for :func:`sigmoid_topk`.

    References:
        [1] "Differentiable top-k: from one-hot to k-hot", Eqs. (9)-(11),
            https://openreview.net/forum?id=HxLmtJYfBi

    Example:
        >>> log_sigmoid_topk(torch.tensor([0.0, 1000.0]), 1)
        tensor([-500.,    0.])
    """
    return MAP.logarithm(_call, x, k, temperature, dim)
