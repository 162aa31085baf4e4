r"""The definition of the sorted transport plan: Sinkhorn's iterations in logarithms, in float64.

.. math:: \min_P \langle C, P\rangle + \epsilon \sum P \log P, \qquad C_{ij} = (x_i - a_j)^2,

with anchors :math:`a_j = k - j`, a sum of 1 for each item and each of the k places, and a last place for the rest.
"""

import torch
from torch import Tensor

from khot.kernels.transport.plan import places

ITERATIONS = 5_000


def _plan(x: Tensor, half: Tensor, t: Tensor) -> Tensor:
    """The plan (..., places, n) of thresholds t between neighbouring places."""
    z = (x.unsqueeze(-2) - t.unsqueeze(-1)) / half[..., None, None]
    dual = torch.cat([z.flip(-2).cumsum(-2).flip(-2), torch.zeros_like(z[..., :1, :])], -2)
    return torch.softmax(dual, -2)


def sorted_transport(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    """y and t; for the arguments see :func:`khot.kernels.transport.solver.sorted_transport`."""
    n, count = x.shape[-1], places(k, x.shape[-1])
    sizes = torch.ones(count, dtype=torch.float64, device=x.device)
    sizes[k:] = n - k
    anchors = torch.arange(k, k - count, -1, dtype=torch.float64, device=x.device)
    scores = x.double().unsqueeze(-2) * anchors.unsqueeze(-1) / half[..., None, None]  # the duals absorb the squares
    dual = torch.zeros(*x.shape[:-1], count, dtype=torch.float64, device=x.device)
    for _ in range(ITERATIONS):
        logarithms = scores + dual.unsqueeze(-1)
        sums = (logarithms - logarithms.logsumexp(-2, keepdim=True)).logsumexp(-1)
        dual = dual + sizes.log() - sums
    t = half.unsqueeze(-1) * dual.diff(dim=-1)
    return _plan(x.double(), half, t)[..., :k, :].to(x.dtype), t


def sorted_transport_derivative(
    x: Tensor, half: Tensor, t: Tensor, grad_y: Tensor, with_half: bool
) -> tuple[Tensor, Tensor]:
    """dL/dx in x's dtype and dL/dhalf, zeros if it is not wanted, from dL/dy (..., k, n).

    It uses the implicit function theorem row by row: the sums of the places stay constant.
    """
    n, k = x.shape[-1], grad_y.shape[-2]
    rows = zip(x.double().reshape(-1, n), half.reshape(-1), t.reshape(-1, t.shape[-1]), strict=True)
    grads_x, grads_half = [], []
    for (row, h, at), grad in zip(rows, grad_y.double().reshape(-1, k, n), strict=True):
        moved = torch.func.jacrev(_plan, argnums=(0, 1, 2))(row, h, at)  # of (places, n)
        of_sums = [jacobian.sum(1)[:-1] for jacobian in moved]
        pull = torch.linalg.solve(of_sums[2].T, torch.tensordot(grad, moved[2][:k], 2))
        grads_x.append(torch.tensordot(grad, moved[0][:k], 2) - pull @ of_sums[0])
        grads_half.append((grad * moved[1][:k]).sum() - pull @ of_sums[1])
    grad_half = torch.stack(grads_half).reshape(half.shape) if with_half else torch.zeros_like(half)
    return torch.stack(grads_x).reshape(x.shape).to(x.dtype), grad_half
