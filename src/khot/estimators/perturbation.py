"""The top k of randomly perturbed scores: the noise, and the law of the k-hot vectors that come of it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Gamma
from torch.types import _size as SizeLike

from khot._validation import checked_positive
from khot.distributions import SamplingDesign
from khot.relaxations import topk_mask

GAMMA_TERMS = 10  # of the sum of gamma variables; its distance from the limit falls as 1 / terms

Noise = Callable[["PerturbedScores", torch.Size], Tensor]


def gaussian_noise(design: "PerturbedScores", shape: torch.Size) -> Tensor:
    """Standard normal noise."""
    return torch.randn(shape, dtype=design.logits.dtype, device=design.logits.device)


def gumbel_noise(design: "PerturbedScores", shape: torch.Size) -> Tensor:
    """Standard Gumbel noise."""
    return -torch.empty(shape, dtype=design.logits.dtype, device=design.logits.device).exponential_().log_()


def sum_of_gamma_noise(design: "PerturbedScores", shape: torch.Size) -> Tensor:
    r"""Noise whose sum over k units tends to standard Gumbel noise (Niepert, Minervini, Franceschi 2021).

    .. math:: \frac1k \Big(\sum_{i=1}^s \gamma_i - \log s\Big), \qquad \gamma_i \sim \mathrm{Gamma}(1/k, k/i)

    with shape 1/k and scale k/i. Perturb-and-MAP is then close to the exponential family over k-hot vectors.
    """
    logits = design.logits
    k = design.k.clamp(min=1).to(logits.dtype)[..., None, None]
    term = torch.arange(1, GAMMA_TERMS + 1, dtype=logits.dtype, device=logits.device)
    gamma = Gamma((1 / k).expand(*design.shape(), GAMMA_TERMS), term / k, validate_args=False)
    total = gamma.sample(shape[: len(shape) - len(design.shape())]).sum(-1)
    return (total - torch.log(term[-1])) / k.squeeze(-1)


NOISES: dict[str, Noise] = {
    "gaussian": gaussian_noise,
    "gumbel": gumbel_noise,
    "sum_of_gamma": sum_of_gamma_noise,
}


class PerturbedScores(SamplingDesign):
    """The law of the top k of ``logits + scale * noise``, which is known by its draws only.

    Args:
        logits: Real scores ``(..., n)``; ``-inf`` excludes a unit, ``inf`` includes it.
        k: Number of ones, an int or an integer tensor that broadcasts to the batch shape.
        noise: A key of ``NOISES``.
        scale: Scale of the noise; a positive number, or a tensor that broadcasts to the batch shape.
        name: What error messages call the scale.
        validate_args: Whether to check the contents of tensors.
    """

    def __init__(
        self,
        logits: Tensor,
        k: int | Tensor,
        noise: str,
        scale: float | Tensor = 1.0,
        name: str = "scale",
        validate_args: bool | None = None,
    ) -> None:
        self.noise = noise
        super().__init__(logits=logits, k=k, validate_args=validate_args)
        self.scale = checked_positive(name, scale, self.batch_shape)
        self.name = name
