"""Unsorted SOFT top-k: entropic optimal transport to two anchors, equal to sigmoid top-k at half of epsilon."""

from torch import Tensor

from khot._contents import can_look, checks_contents
from khot._distributed.boundary import of_rows
from khot._torch_internals import is_recorded
from khot._validation import check_rows, check_softness, check_softness_contents
from khot.kernels.call import Call
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.threshold.kinds import MASK

from .axes import as_rows
from .engine import ThresholdMap
from .linked import logarithm_of, with_link
from .sigmoid import log_sigmoid_topk

MAP = ThresholdMap(LOGISTIC, "epsilon / 2", MASK)


@with_link(LOGISTIC, factor=0.5)
@of_rows(sharded=True)
def transport_topk(
    _call: Call, x: Tensor, k: float | Tensor, epsilon: float | Tensor = 0.1, *, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Relaxes top-k by optimal transport to "in" and "out" (third argument: ``epsilon``; ``dim`` by keyword).

    .. math:: y &= n\,\Gamma_{\cdot 1}, \quad C_{ij} = (x_i - a_j)^2, \quad a = (1, 0), \\
        \Gamma &= \arg\min_{\Gamma \ge 0} \langle C, \Gamma\rangle
        + \varepsilon {\textstyle\sum_{ij}} \Gamma_{ij} \log \Gamma_{ij}, \\
        \Gamma 1 &= \tfrac{1}{n} 1, \quad \Gamma^\top 1 = (\tfrac{k}{n}, \tfrac{n-k}{n})

    Sinkhorn iterations are not needed for this problem: :math:`C_{i1} - C_{i0} = 1 - 2 x_i`, so the solution is
    :math:`\sigma((x_i - t)/(\varepsilon/2))` with t such that it sums to k. This is
    ``sigmoid_topk(x, k, epsilon / 2)``, and everything said there holds here.

    ``epsilon`` is absolute: scaling both ``x`` and ``epsilon`` by c leaves the result unchanged. The code published
    with the paper divides the cost by its largest entry, taken as a constant, which makes the effective epsilon depend
    on the data; ``epsilon * C.detach().max()`` gives the same result.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the result, ``0 <= k <= n``.
        epsilon: Positive softness.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        ValueError: If ``k`` or ``epsilon`` is out of range, ``x`` contains NaN, or fewer than ``k`` entries are
            unmasked. See :mod:`khot.relaxations`.

    References:
        [1] Xie et al. (2020), "Differentiable Top-k with Optimal Transport", arXiv:2002.06504, sections 2 and 3.

    Example:
        >>> transport_topk(torch.tensor([0.0, 1.0, 2.0]), 1.5, 2.0)
        tensor([0.2689, 0.5000, 0.7311])
    """
    check_rows(x, dim, joint=True)
    check_softness("epsilon", epsilon, x, as_rows(x, dim).shape[:-1])
    if isinstance(epsilon, Tensor):
        if checks_contents(epsilon) and (not is_recorded(epsilon) if _call.is_plain else can_look(epsilon)):
            check_softness_contents("epsilon", epsilon, x.dtype)
        epsilon = epsilon.double()
    return MAP.apply(_call, x, k, epsilon / 2, dim)


@logarithm_of(transport_topk)
def _log_transport_topk(x: Tensor, k: float | Tensor, epsilon: float | Tensor = 0.1) -> Tensor:
    """The logarithm, which losses obtain from :func:`transport_topk` itself."""
    return log_sigmoid_topk(x, k, epsilon / 2)
