"""The definition, row by row: Gauss' rule on many small pieces, which also end at the kinks of the noise."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from khot._tracing import broadcast_shapes

from .noises import NOISES, Law, Noise

MARGIN, PIECE, POINTS = 60.0, 0.5, 12  # range of the integral beyond the positions, length of a piece, points on it


def _integral(theta: Tensor, integrand: Callable[[Tensor], Tensor]) -> Tensor:
    """The integral of a function of times ``(nodes,)`` to ``(nodes, ...)``; the times are a constant to derivatives."""
    kinks = -theta.detach()
    low, high = float(kinks.min()) - MARGIN, float(kinks.max()) + MARGIN
    cuts = torch.cat((torch.arange(low, high, PIECE, dtype=torch.float64), kinks)).sort().values
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(POINTS))
    half = cuts.diff()[:, None] / 2
    s, weight = (cuts[:-1, None] + half * (1 + nodes)).flatten(), (half * weights).flatten()
    values = integrand(s)
    return (weight.view(-1, *[1] * (values.ndim - 1)) * values).sum(0)


def _log_prob(theta: Tensor, value: Tensor, k: int, noise: Noise) -> Tensor:
    """The log-probability of one row and set."""
    drawn, is_open = value != 0, theta.isfinite()
    size = int((drawn & is_open).sum())
    if size != k - int((theta == torch.inf).sum()) or bool((drawn & (theta == -torch.inf)).any()):
        return theta.new_full((), -torch.inf)
    theta, drawn = theta[is_open], drawn[is_open]
    if size in (0, len(theta)):
        return theta.new_zeros(())

    def integrand(s: Tensor) -> Tensor:
        law = noise.law(s[:, None] + theta)
        return torch.where(drawn, law.log_cdf, law.log_sf).sum(-1).exp() * (drawn * law.ahead).sum(-1)

    return _integral(theta, integrand).log()


def _of_open(theta: Tensor, k: int, of_row: Callable[[Tensor, int], Tensor], certain: float) -> Tensor:
    """Applies a function to the open units of a row and their number of ones; k gives the result for the others."""
    is_open, included = theta.isfinite(), theta == torch.inf
    left, count = k - int(included.sum()), int(is_open.sum())
    if not 0 < left < count:
        return certain * included.double().where(~is_open, float(left > 0))
    return (certain * included.double()).masked_scatter(is_open, of_row(is_open, left))


def _inclusion(theta: Tensor, k: int, noise: Noise) -> Tensor:
    """The inclusion probabilities of one row."""

    def of_row(is_open: Tensor, k: int) -> Tensor:
        def integrand(s: Tensor) -> Tensor:
            law = noise.law(s[:, None] + theta[is_open])
            count = law.log_cdf.shape[-1]
            return torch.stack(
                [(law.log_cdf.exp() * law.ahead)[:, i] * _counts(law, k, i).sum(-1) for i in range(count)], -1
            )

        return _integral(theta[is_open], integrand)

    return _of_open(theta, k, of_row, 1.0)


def _product(theta: Tensor, k: int, vector: Tensor, noise: Noise) -> Tensor:
    r"""The product for one row: :math:`\int f_i \sum_j f_j (g_i - g_j) P(N_{-ij} = k - 1) ds`."""

    def of_row(is_open: Tensor, k: int) -> Tensor:
        g = vector[is_open]

        def integrand(s: Tensor) -> Tensor:
            law = noise.law(s[:, None] + theta[is_open])
            rate = law.log_cdf.exp() * law.ahead
            result, units = torch.zeros_like(rate), range(len(g))
            for i, j in ((i, j) for i in units for j in units if i != j):
                result[:, i] += rate[:, i] * rate[:, j] * (g[i] - g[j]) * _counts(law, k, i, j)[:, -1]
            return result

        return _integral(theta[is_open], integrand)

    return _of_open(theta, k, of_row, 0.0)


def _counts(law: Law, k: int, *without: int) -> Tensor:
    """The probabilities that 0, ..., k - 1 units have arrived, without those left out; ``(nodes, k)``."""
    came, missing = law.log_cdf.exp(), law.log_sf.exp()
    chances = torch.nn.functional.pad(torch.ones_like(came[:, :1]), (0, k - 1))
    for j in range(came.shape[-1]):
        if j not in without:
            one_more = torch.nn.functional.pad(chances[:, :-1], (1, 0))
            chances = missing[:, j, None] * chances + came[:, j, None] * one_more
    return chances


def order_log_prob(
    theta: Tensor, k: Tensor, value: Tensor, noise: str, depth: float, with_slopes: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and their derivatives with respect to the positions.

    Args:
        theta: Positions ``(*batch, n)``.
        k: Number of ones, integers ``(*batch)``.
        value: k-hot ``(*sample, *batch, n)``.
        noise: Name of the noise.
        depth: Required accuracy.
        with_slopes: Whether derivatives are needed.

    Returns:
        ``(*sample, *batch)``, ``-inf`` if a value contradicts an infinite position; and the derivatives
        ``(*sample, *batch, n)``, or undefined numbers of that shape.
    """
    shape = broadcast_shapes(theta.shape, value.shape)
    positions, values = theta.double().expand(shape).reshape(-1, shape[-1]), value.expand(shape).reshape(-1, shape[-1])
    sizes = k.expand(shape[:-1]).flatten().tolist()
    found, slopes = [], []
    for row, x, size in zip(positions, values, sizes, strict=True):
        slope, log_p = torch.func.grad_and_value(_log_prob)(row, x, size, NOISES[noise])
        found.append(log_p)
        slopes.append(slope)
    of_positions = torch.stack(slopes).view(shape) if with_slopes else positions.new_empty(*shape[:-1], 0)
    return torch.stack(found).view(shape[:-1]), of_positions


def order_inclusion(
    theta: Tensor, k: Tensor, noise: str, depth: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inclusion probabilities.

    Args:
        theta: Positions ``(R, n)``.
        k: Number of ones, integers ``(R,)``.
        noise: Name of the noise.
        depth: Required accuracy.

    Returns: Probabilities ``(R, n)``, and intermediate values that a backend may reuse for products. For logistic
        noise, these describe units of log-odds ``theta``: the tilt ``(R, 2)``; the logarithm of P(N = k) without the
        part that the rarer fates do not contribute, ``(R,)``; and the probabilities ``(R, n)`` that units have not
        arrived, and that they have, given N = k. For other noise, only the third is used, for a curvature. Finally, the
        ends ``(R, 2)`` of the integral, which are NaN for rows that are left to the exact path.
    """
    probs = torch.stack([_inclusion(row, size, NOISES[noise]) for row, size in zip(theta, k.tolist(), strict=True)])
    few, none = theta.new_zeros(len(theta), 2), torch.zeros_like(theta if noise == "logistic" else theta[:, :0])
    return probs, few, few[:, 0].clone(), none, none.clone(), few.clone()


def order_inclusion_product(
    theta: Tensor,
    k: Tensor,
    tilt: Tensor,
    log_count: Tensor,
    missing: Tensor,
    came: Tensor,
    ends: Tensor,
    vector: Tensor,
    noise: str,
    depth: float,
) -> Tensor:
    """The symmetric Jacobian of :func:`order_inclusion`, times a vector.

    Args:
        theta: Positions ``(R, n)``.
        k: Number of ones, integers ``(R,)``.
        tilt: From the other function of this backend, like the next four arguments.
        log_count: See there.
        missing: See there.
        came: See there.
        ends: See there.
        vector: ``(R, n)``.
        noise: Name of the noise.
        depth: Required accuracy.
    """
    rows = zip(theta, k.tolist(), vector, strict=True)
    return torch.stack([_product(row, size, g, NOISES[noise]) for row, size, g in rows])
