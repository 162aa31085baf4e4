"""Successive softmax: k one-hot relaxations in a row. A baseline, included for comparison."""

import torch
from torch import Tensor

from khot._contents import looks_at_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_enough, check_k, check_rows, check_softness, check_softness_contents
from khot.kernels.exact.rows import compute_dtype

from .axes import as_axes, as_rows
from .hard import checked_whole


def _log_complement(log_p: Tensor) -> Tensor:
    """log(1 - p) of a softmax, accurate even for its largest entry, where 1 - p is the sum of the others."""
    largest = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, log_p.argmax(-1, keepdim=True), True)
    others = log_p.masked_fill(largest, torch.finfo(log_p.dtype).min)
    return torch.where(largest, others.logsumexp(-1, keepdim=True), torch.log1p(-others.exp()))


def _inverse(temperature: Tensor) -> Tensor:
    """1 / T, with derivatives in which a gradient of 0 is never multiplied by a 1 / T^2 that has overflowed."""
    log = temperature.log()
    return temperature.detach().reciprocal() * (log.detach() - log).exp()


def _largest(k: int | Tensor) -> int:
    if isinstance(k, (int, torch.SymInt)):
        return k
    return int(k.max()) if k.numel() else 0


def _compose(rows: Tensor, k: int | Tensor, temperature: float | Tensor) -> Tensor:
    """The map of rows (..., n), in their dtype, for a temperature that is a number or of the batch shape (...)."""
    most = _largest(k)
    if most == 0:
        nothing = rows.masked_fill(torch.ones_like(rows, dtype=torch.bool), 0)  # with its gradient of 0
        return nothing + 0 * temperature.to(rows).unsqueeze(-1) if isinstance(temperature, Tensor) else nothing
    excluded = rows == -torch.inf
    inverse = _inverse(temperature.to(rows).unsqueeze(-1)) if isinstance(temperature, Tensor) else 1 / temperature
    lowest = torch.finfo(rows.dtype).min
    # Relative to the largest score, so nothing overflows upwards. Scores that overflow downwards, such as those of
    # items chosen already, stay above the excluded ones.
    logits = (rows - rows.detach().amax(-1, keepdim=True)).masked_fill(excluded, 0) * inverse
    y = torch.zeros_like(logits)
    for j in range(most):
        log_p = logits.clamp(min=lowest / 4).masked_fill(excluded, lowest).log_softmax(-1)
        logits = logits + _log_complement(log_p) * inverse
        y = y + (log_p.exp() * (j < k).unsqueeze(-1) if isinstance(k, Tensor) else log_p.exp())
    return y.masked_fill(excluded, 0)


@of_rows()
def successive_softmax_topk(
    x: Tensor, k: int | Tensor, temperature: float | Tensor = 1.0, *, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Relaxes top-k by k softmaxes in turn (third argument: ``temperature``; ``dim`` by keyword).

    .. math:: y &= \sum_{j=1}^k p^j, \quad p^j = \mathrm{softmax}(\alpha^j / T), \\
        \alpha^1 &= x, \quad \alpha^{j+1} = \alpha^j + \log(1 - p^j)

    This is a baseline: prefer :func:`sigmoid_topk`. It has several flaws. Entries can exceed 1 (``x = (0, 1)`` with
    ``k = 2`` gives ``(0.77, 1.23)``), so they are not inclusion probabilities. It does not keep the order of ``x``.
    ``k = n`` does not give ones. Time and memory of the backward pass grow with k, which must be a whole number. The
    result sums to k, is invariant to ``x + c`` and tends to the k-hot top-k as ``temperature -> 0``. It is
    differentiable to any order in ``x`` and ``temperature``.

    The logarithm is exact where a softmax saturates. With the usual ``log(max(1 - p, eps))``, an item that leads by
    more than ``-log(eps)`` would be chosen again.

    Args:
        x: Real scores with ``n`` entries along ``dim``. ``-inf`` excludes an entry (``y = 0``, no gradient).
        k: Sum of the result, an integer, ``0 <= k <= n``; or an integer tensor that broadcasts with the batch shape. A
            tensor cannot be traced or mapped over, because its maximum is the number of rounds.
        temperature: Positive softness.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, at least 0, summing to ``k`` along ``dim``.

    Raises:
        ValueError: If ``k`` or ``temperature`` is out of range, ``x`` contains NaN or ``+inf``, or fewer than ``k``
            entries are unmasked. See :mod:`khot.relaxations`.
        TypeError: If ``k`` is not an integer, or another argument has the wrong type or dtype.

    References:
        [1] Xie, Ermon (2019), "Reparameterizable Subset Sampling via Continuous Relaxations", arXiv:1901.10517,
            section 3 (the relaxation is that of Plötz, Roth (2018), "Neural Nearest Neighbors Networks").

    Example:
        >>> successive_softmax_topk(torch.tensor([0.0, 1.0, 2.0]), 2)
        tensor([0.2574, 0.6224, 1.1202])
    """
    check_rows(x, dim, joint=True)
    k = checked_whole(k, "a number of softmaxes")
    rows = as_rows(x, dim)
    batch, n = rows.shape[:-1], rows.shape[-1]
    check_k(k, x, batch, n)
    check_softness("temperature", temperature, x, batch)
    if looks_at_contents(x, k, temperature):
        if not bool((rows < torch.inf).all()):
            raise ValueError("`x` must not contain NaN or +inf")
        check_enough(rows, k)
        if isinstance(temperature, Tensor):
            check_softness_contents("temperature", temperature, x.dtype)
    return as_axes(_compose(rows.to(compute_dtype(x)), k, temperature).to(x.dtype), x, dim)
