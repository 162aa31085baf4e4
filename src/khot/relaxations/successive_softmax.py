"""Successive softmax: k one-hot relaxations in a row. A baseline, included for comparison.

On a CPU with numba, loops compute the map and its first derivative in x. Everything else is composed of torch
operations: other derivatives, transforms, compiled graphs, and rows on which the loops would lose digits.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot._contents import looks_at_contents
from khot._distributed.boundary import of_rows
from khot._torch_internals import no_view
from khot._validation import check_k, check_maskable, check_scores, check_softness, tensors_among
from khot.kernels.call import is_first_derivative, is_plain
from khot.kernels.exact.rows import compute_dtype, in_rows_of
from khot.kernels.operators.autograd import has_derivative
from khot.kernels.successive_softmax import Rounds, rounds

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


def _find(rows: Tensor, k: int | Tensor, temperature: float | Tensor) -> Rounds | None:
    """A backend that takes this call, or None. Backends have no derivative in the temperature."""
    if rows.numel() == 0 or not is_plain(rows, k, temperature):
        return None
    if isinstance(temperature, Tensor) and has_derivative(temperature, torch.is_grad_enabled()):
        return None
    found: Rounds | None = rounds.find(rows, _largest(k))
    return found


class _InLoops(Function):
    """The map of rows (rows, n), for temperature and k (rows,); ``most`` is the largest k."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, temperature: Tensor, k: Tensor, most: int, found: Rounds) -> Tensor:
        y, left = found.forward(rows.detach(), temperature, k, most)
        if left.any():
            y[left] = _compose(rows.detach()[left], k[left], temperature[left])
        ctx.most, ctx.found = most, found
        ctx.save_for_backward(rows, temperature, k, left)
        return no_view(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, temperature, k, left = ctx.saved_tensors
        if not is_first_derivative(grad):
            return _composed_gradient(rows, temperature, k, grad), None, None, None, None
        found = ctx.found.backward(rows.detach(), temperature, k, ctx.most, grad.contiguous())
        if left.any():
            found[left] = _composed_gradient(rows.detach()[left], temperature[left], k[left], grad[left])
        return found, None, None, None, None


def _composed_gradient(rows: Tensor, temperature: Tensor, k: Tensor, grad: Tensor) -> Tensor:
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        rows = rows.view_as(rows) if further else rows.detach().requires_grad_()
        y = _compose(rows, k, temperature)
        return torch.autograd.grad(y, rows, grad, create_graph=further)[0]


def _in_loops(found: Rounds, rows: Tensor, k: int | Tensor, temperature: float | Tensor) -> Tensor:
    batch, n = rows.shape[:-1], rows.shape[-1]
    softness = in_rows_of(rows, temperature).reshape(-1).contiguous()
    sizes = torch.as_tensor(k, dtype=torch.int64, device=rows.device).expand(batch).reshape(-1)
    flat = rows.reshape(math.prod(batch), n).contiguous()
    y: Tensor = _InLoops.apply(flat, softness, sizes.contiguous(), _largest(k), found)
    return y.view(rows.shape)


@of_rows
def successive_softmax_topk(
    x: Tensor, k: int | Tensor, temperature: float | Tensor = 1.0, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Relaxes top-k by k softmaxes in turn (third argument: ``temperature``; ``dim`` by keyword).

    .. math:: y = \sum_{j=1}^k p^j, \quad p^j = \mathrm{softmax}(\alpha^j / T), \quad
        \alpha^1 = x, \quad \alpha^{j+1} = \alpha^j + \log(1 - p^j)

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
    check_scores(x, dim, joint=True)
    k = checked_whole(k, "a number of softmaxes")
    rows = as_rows(x, dim)
    batch, n = rows.shape[:-1], rows.shape[-1]
    check_k(k, x, batch, n)
    check_softness("temperature", temperature, x, batch)
    if looks_at_contents(*tensors_among(x, k, temperature)):
        check_maskable(rows, k, "temperature", temperature)
    rows = rows.to(compute_dtype(x))
    found = _find(rows, k, temperature)
    y = _in_loops(found, rows, k, temperature) if found else _compose(rows, k, temperature)
    return as_axes(y.to(x.dtype), x, dim)
