"""The definition of order sampling by independent ranks, for all units of all draws at once, in plain torch."""

import torch
from torch import Tensor

from khot._contents import can_look
from khot._torch_internals import is_wrapped

from ..call import runs_on_cpu
from ..random_numbers import uniform
from ..random_numbers.philox import uniform_rows
from ..threshold import solve_threshold
from .noises import NOISES, Noise

SMALLEST = 2.0**-54  # half the spacing of the random numbers
LARGEST_LOG = 600.0  # the largest logarithm of a factor of the noise; certain units get 100 more
MODERATE = 0.5 * LARGEST_LOG  # positions whose distances from the k-th rank do not exceed this by much
SHORT = 2**12


def rank_centre(theta: Tensor, k: int | Tensor) -> Tensor:
    """A position near which ranks are computed, float64 ``(*batch)``: 0, or that of a unit with about the k-th rank.

    The latter is needed if some ranks overflow otherwise, and saves passes over a long row.
    """
    may_look = runs_on_cpu(theta) and can_look(theta) and theta.numel() > 0
    if may_look and theta.shape[-1] <= SHORT and theta.nan_to_num(0.0, 0.0, 0.0).abs().max().item() <= MODERATE:
        return theta.new_zeros(theta.shape[:-1], dtype=torch.float64)
    return solve_threshold(theta, k).nan_to_num(0.0, 0.0, 0.0)


def rank_scale(theta: Tensor, centre: Tensor) -> Tensor:
    """The factor of the exponential of the noise, float64: e^-theta, up to a common factor.

    Factors beyond e^600 in either direction are not distinguished, because the k-th rank is not there.
    """
    theta = theta.double()
    centred = theta - centre[..., None]
    certain = centred.sign() * (LARGEST_LOG + 100)
    return torch.where(theta.isinf(), certain, centred.clamp(-LARGEST_LOG, LARGEST_LOG)).neg().exp()


def draw_ranks(noise: Noise, scale: Tensor, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """Independent ranks of all units, practically without ties, never 0 or inf; the k smallest are drawn."""
    ranks = _exp_noise(noise, uniform(shape, scale.dtype, scale.device, generator))
    if is_wrapped(scale):
        return ranks * scale
    return ranks.mul_(scale)


def _exp_noise(noise: Noise, u: Tensor) -> Tensor:
    return noise.from_uniform_(u.clamp_min_(SMALLEST))


def order_draw(
    theta: Tensor, k: Tensor, centre: Tensor, seed: Tensor, draws: int, dtype: torch.dtype, noise: str
) -> Tensor:
    """k-hot draws ``(draws, *batch, n)``, a function of the seed.

    Args:
        theta: Positions ``(*batch, n)``.
        k: Number of ones, integers ``(*batch)``.
        centre: From :func:`rank_centre`.
        seed: From :func:`khot.kernels.random_numbers.philox.draw_seed`.
        draws: Number of draws for each row.
        dtype: Dtype of the result.
        noise: Name of the noise.
    """
    *batch, n = theta.shape
    ranks = _exp_noise(NOISES[noise], uniform_rows(seed, draws, batch, n)) * rank_scale(theta, centre)
    return (ranks.argsort(dim=-1, stable=True).argsort(-1) < k.unsqueeze(-1)).to(dtype)
