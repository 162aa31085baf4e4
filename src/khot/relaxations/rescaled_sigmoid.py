"""Rescaled sigmoid: independent inclusion probabilities, scaled to sum to k. A baseline, included for comparison."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from khot._contents import looks_at_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_k, check_maskable, check_scores, check_softness, tensors_among
from khot.kernels.exact.rows import compute_dtype

from .axes import as_axes, as_rows

FAR = 1e9  # log-odds beyond which the logarithm of a sigmoid is the log-odds, to all digits


def _ratio(scores: Tensor, temperature: float | Tensor) -> Tensor:
    """``scores / temperature`` up to a size that certainly saturates, beyond which it has no gradient."""
    most = torch.finfo(scores.dtype).max ** 0.5  # leaves room for derivatives
    if not isinstance(temperature, Tensor):
        return (scores / temperature).clamp(-most, most)
    log = temperature.log()  # its derivatives multiply no gradient of 0 by a power of 1 / T that has overflowed
    return (scores / temperature.detach()).clamp(-most, most) * (log.detach() - log).exp()


def _log_sigmoid(scores: Tensor, temperature: float | Tensor, excluded: Tensor) -> Tensor:
    """``log(sigmoid(scores / temperature))`` up to a constant for each row whose quotients all overflow downwards."""
    if scores.shape[-1] == 0:
        return scores
    largest = scores.detach().masked_fill(excluded, -torch.inf).amax(-1, keepdim=True)
    largest = torch.where((largest / temperature).detach() < -FAR, largest, 0.0)
    from_largest = _ratio(scores - largest, temperature)  # log(sigmoid(z)) is z to all digits
    return torch.where(largest < 0, from_largest, logsigmoid(from_largest))


@of_rows
def rescaled_sigmoid_topk(
    x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Relaxes top-k by a sigmoid scaled to the right sum (third argument: ``temperature``; ``dim`` by keyword).

    .. math:: y_i = \begin{cases} k\,p_i / \sum_j p_j & \sum_j p_j \ge k \\
        1 - (n - k)\,(1 - p_i) / \sum_j (1 - p_j) & \text{otherwise} \end{cases} \qquad p_i = \sigma(x_i / T)

    This is a baseline: prefer :func:`sigmoid_topk`. It has several flaws. It is not invariant to ``x + c``. It does not
    tend to the k-hot top-k as ``temperature -> 0`` unless exactly k scores are positive. Its derivative jumps where the
    sum of the sigmoids crosses k. Its Jacobian is not symmetric, so it is not the solution of a regularised top-k
    problem. It keeps the order of ``x``. Away from the jump it is differentiable to any order in ``x``, ``k`` and
    ``temperature``.

    Args:
        x: Real scores with ``n`` entries along ``dim``; ``x / temperature`` are log-odds before rescaling. ``-inf``
            excludes an entry (``y = 0``, no gradient).
        k: Sum of the result, ``0 <= k <= n``.
        temperature: Positive softness; 1 for the map as published.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        ValueError: If ``k`` or ``temperature`` is out of range, ``x`` contains NaN or ``+inf``, or fewer than ``k``
            entries are unmasked. See :mod:`khot.relaxations`.

    References:
        [1] Pervez et al. (2023), "Scalable subset sampling with neural conditional Poisson networks" (NCPSS).

    Example:
        >>> rescaled_sigmoid_topk(torch.tensor([0.0, 1.0, 2.0]), 1.5)
        tensor([0.3551, 0.5193, 0.6256])
    """
    check_scores(x, dim, joint=True)
    rows = as_rows(x, dim)
    batch, n = rows.shape[:-1], rows.shape[-1]
    check_k(k, x, batch, n)
    check_softness("temperature", temperature, x, batch)
    if looks_at_contents(*tensors_among(x, k, temperature)):
        check_maskable(rows, k, "temperature", temperature)
    excluded = rows == -torch.inf
    scores = rows.to(compute_dtype(x)).masked_fill(excluded, 0)
    k, temperature = (v.to(scores).unsqueeze(-1) if isinstance(v, Tensor) else v for v in (k, temperature))
    # Sigmoids divided by their sum are a softmax of their logarithms, which stays exact where all of them underflow.
    lowest = torch.finfo(scores.dtype).min
    share = _log_sigmoid(scores, temperature, excluded).masked_fill(excluded, lowest).softmax(-1)
    share_out = _log_sigmoid(-scores, temperature, excluded).masked_fill(excluded, lowest).softmax(-1)
    total = torch.sigmoid(_ratio(scores, temperature)).masked_fill(excluded, 0).sum(-1, keepdim=True)
    unmasked = (~excluded).sum(-1, keepdim=True).to(scores.dtype)  # an integer minus a number would be a float32
    y = torch.where(total >= k, k * share, 1 - (unmasked - k) * share_out)
    return as_axes(y.masked_fill(excluded, 0).to(x.dtype), x, dim)
