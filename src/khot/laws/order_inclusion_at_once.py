r"""Inclusion probabilities of ordinary rows in at most 40 large operations, and products with their Jacobian.

With :math:`\varphi_i = 1 - F_i + F_i z` and :math:`T = z^{1 - k} \prod_i \varphi_i` at points z of the unit circle,

.. math:: u_i = P(N_{-i} = k - 1) = \operatorname{mean} \frac{T}{\varphi_i}, \qquad
    \pi_i = \int F_i \Big( \sum_j f_j u_j + f_i u_i \Big) ds, \qquad
    (J g)_i = \int f_i \operatorname{mean} \frac{T}{\varphi_i}
    \Big( g_i \sum_j \frac{f_j}{\varphi_j} - \sum_j \frac{f_j g_j}{\varphi_j} \Big) ds,

where :math:`N_{-i}` is the number of the other units that have arrived, and J is the Jacobian, which is symmetric.

For logistic noise, the units that have arrived, given that there are k, are the same conditional Poisson design at all
times. At any time p, this includes unit i with a probability proportional to :math:`m_i = p_i \operatorname{mean} T /
\varphi_i`, and i but not j to :math:`m_{ij} = p_i (1 - p_j) \operatorname{mean} T / \varphi_i \varphi_j`. With
:math:`C_{ij}` the mean of :math:`(1 - F_i) F_j` over the times, by weights :math:`P(N = k)`,

.. math:: \pi_i \propto \sum_j C_{ji} m_j + C_{ii} m_i, \qquad J_{ij} \propto -C_{ij} m_{ij} \quad (i \ne j).
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from khot.kernels.order_sampling.noises import LOG_EXPONENTIAL, LOGISTIC, Noise

from .order_at_once import DEPTH, FINE, Times, centred, constants, expected_counts, is_ordinary, times

# Units times points of the circle, or times the length of their row: for more of them, product trees are faster.
MOST = {LOGISTIC: (2**21, 2**26), LOG_EXPONENTIAL: (2**13, 2**21)}  # on a CPU and elsewhere
ELEMENTS = 5 * 10**6, 2**26  # complex numbers held at a time in each of a few tensors, on a CPU and elsewhere


@lru_cache(maxsize=64)
def _circle(n: int, k: int, ends: tuple[float, float], device: torch.device) -> list[Tensor]:
    """1 - z on half of the circle, for expected numbers between the ends; and the weights, which contain z^(1 - k)."""
    least, most = ends[0] * math.exp(-1 / FINE), ends[1] * math.exp(1 / FINE)
    radius = DEPTH / 3 + math.sqrt(DEPTH**2 / 9 + 2 * DEPTH * min(n / 4, most))  # by Bernstein
    points = min(n + 1, math.ceil(max(most - k, k - least) + radius)) | 1  # odd: where z = -1, a factor may vanish
    angle, j = 2 * math.pi / points, np.arange((points + 1) // 2)
    weight = np.where(j == 0, 1.0, 2.0) / points * np.exp(1j * angle * (j * (1 - k) % points))
    return constants(device, 1 - np.exp(1j * angle * j), weight)


def _pays(noise: Noise, theta: Tensor, k: int) -> bool:
    """Whether product trees, which need more operations, are slower."""
    n = theta.shape[-1]
    each = n if noise is LOGISTIC else len(_circle(n, k, expected_counts(n, k), theta.device)[0])
    return theta.numel() * each <= MOST[noise][theta.device.type != "cpu"]


def inclusion(noise: Noise, theta: Tensor, k: int | Tensor) -> Tensor | None:
    """Inclusion probabilities ``(*batch, n)``."""
    if not is_ordinary(theta, k) or not _pays(noise, theta, cast(int, k)):
        return None
    rows = centred(theta)
    found = times(noise, rows.detach(), cast(int, k))
    if found is None:
        return None
    return cast(Tensor, _Inclusion.apply(rows, partial(LAWS[noise], when=found, k=k))).view(theta.shape)


class _Inclusion(Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, law: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(theta)
        ctx.law = law
        return law(theta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.law(*ctx.saved_tensors, grad), None


def _logistic(theta: Tensor, grad: Tensor | None = None, *, when: Times, k: int) -> Tensor:
    """The probabilities or, with ``grad``, a product with their Jacobian, which is differentiable."""
    z, n = when.node[..., None] + theta, theta.shape[-1]
    came, missing = z.sigmoid(), z.neg().sigmoid()
    weight = torch.add(missing.log().sum(-1), when.node, alpha=k).softmax(0)
    both = torch.einsum("grn,grm->rnm", weight[..., None] * missing, came)
    p = (when.middle[:, None] + theta).sigmoid()[..., None]
    turn, turns = _circle(n, k, (k, k), theta.device)
    phi = 1 - p * turn
    law, share = phi.prod(-2, keepdim=True) * turns, p / phi
    m = (law @ share.mT).real
    included = torch.addcmul(m @ both, m, both.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)).squeeze(-2)
    total = included.sum(-1, keepdim=True)
    if grad is None:
        return included / total * k
    links = both * ((share * law) @ ((1 - p) / phi).mT).real
    return (links.sum(-1) * grad - (links @ grad[..., None]).squeeze(-1)) / total * k


def _log_exponential(theta: Tensor, grad: Tensor | None = None, *, when: Times, k: int) -> Tensor:
    """:func:`_logistic` for exponential ranks, some nodes at a time."""
    n, nodes = theta.shape[-1], len(when.node)
    turn, turns = _circle(n, k, expected_counts(n, k), theta.device)

    def part(node: Tensor) -> Tensor:
        x = (node[..., None] + theta).exp().neg()
        came = x.expm1()  # -F
        coming = torch.addcmul(x, x, came)  # -f
        phi = 1 + came[..., None] * turn
        law, share = phi.prod(-2, keepdim=True) * turns, phi.reciprocal()
        if grad is None:
            flow = coming * (law @ share.mT).real.squeeze(-2)
            return (came * (flow.sum(-1, keepdim=True) + flow)).sum(0)
        ahead = torch.stack((coming, coming * grad), -2).to(share.dtype) @ share
        own, others = ((law * ahead) @ share.mT).real.unbind(-2)
        return (coming * (grad * own - others)).sum(0)

    each = max(1, ELEMENTS[theta.device.type != "cpu"] // (theta.numel() * len(turn)))
    total, *others = [part(node) for node in when.node.split(each)]
    result = sum(others, total) * (when.width[:, None] / (nodes - 1))
    return result.clamp(0, 1) if grad is None else result


LAWS: dict[Noise, Callable[..., Tensor]] = {LOGISTIC: _logistic, LOG_EXPONENTIAL: _log_exponential}
