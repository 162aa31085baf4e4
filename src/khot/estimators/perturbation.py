"""The top k of randomly perturbed scores: the noise, and the law of the resulting k-hot vectors."""

from collections.abc import Callable

import torch
from torch import Tensor

from khot._torch_internals import may_differentiate
from khot._validation import check_positive_contents, checked_positive
from khot.distributions import SamplingDesign
from khot.distributions.base import column, unrounded
from khot.kernels.random_numbers import exponential, gamma, normal
from khot.relaxations import topk_mask

from .wrapper import DesignWrapper

GAMMA_TERMS = 10  # terms of the sum of gamma variables; its distance from the limit decreases as 1 / terms

Noise = Callable[["PerturbedScores", torch.Size, torch.Generator | None], Tensor]


def gaussian_noise(design: "PerturbedScores", shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
    """Standard normal noise."""
    return normal(shape, unrounded(design).dtype, design.parameter.device, generator)


def gumbel_noise(design: "PerturbedScores", shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
    """Standard Gumbel noise."""
    return -exponential(shape, unrounded(design).dtype, design.parameter.device, generator).log_()


def sum_of_gamma_noise(
    design: "PerturbedScores", shape: torch.Size, generator: torch.Generator | None = None
) -> Tensor:
    r"""Noise whose sum over k units tends to standard Gumbel noise (Niepert, Minervini, Franceschi 2021).

    .. math:: \frac1k \Big(\sum_{i=1}^s \gamma_i - \log s\Big), \qquad \gamma_i \sim \mathrm{Gamma}(1/k, k/i)

    with shape 1/k and scale k/i. So the total noise of a vector is that of perturb-and-MAP, but vectors with units in
    common do not have independent noise, and draws vary less than in the exponential family over k-hot vectors.
    """
    dtype = unrounded(design).dtype
    k = design.k.clamp(min=1).to(dtype)[..., None, None]
    term = torch.arange(1, GAMMA_TERMS + 1, dtype=dtype, device=k.device)
    total = (gamma((1 / k).expand(*shape, GAMMA_TERMS), generator) / (term / k)).sum(-1)
    return (total - torch.log(term[-1])) / k.squeeze(-1)


class PerturbedScores(SamplingDesign):
    """The law of the top k of ``logits + scale * noise``, which is only known through its draws.

    Args:
        logits, k, scale, validate_args: See :class:`PerturbedTopK`.
        noise: The function that draws the noise.
        name: The name of the scale in error messages.
    """

    def __init__(
        self,
        logits: Tensor,
        k: int | Tensor,
        noise: Noise,
        scale: float | Tensor = 1.0,
        name: str = "scale",
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(logits=logits, k=k, validate_args=validate_args)
        self.noise, self.scale = noise, checked_positive(name, scale, self.batch_shape)
        if self._validate_args:
            check_positive_contents(name, self.scale)

    def _validate_contents(self) -> None:
        super()._validate_contents()
        self._validate_infinite_logits()

    @property
    def _mean(self) -> Tensor:
        raise NotImplementedError(
            "the inclusion probabilities of the top k of perturbed scores are not known: estimate them from draws, "
            "sample((1000,)).mean(0)"
        )

    def _mode(self) -> Tensor:
        """The top k of the unperturbed scores, the most probable vector if all units have the same noise."""
        return self.top(self._logits)

    def _unavailable(self, wanted: str, of_what: str = "") -> NotImplementedError:
        return NotImplementedError(f"the {wanted} of the top k of perturbed scores is not known")

    def perturb(self, shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
        """Perturbed scores of this shape, without gradient; at least in float32, which separates equal logits."""
        with torch.no_grad():
            return self._wide + column(self.scale) * self.noise(self, shape, generator)

    def top(self, scores: Tensor) -> Tensor:
        """The k-hot vectors that select the largest scores."""
        return topk_mask(scores, self._size).to(self.dtype)

    def _sample(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.top(self.perturb(shape + self._batch_shape + self._event_shape, generator))


class PerturbedWrapper(DesignWrapper):
    """A wrapper of perturbed scores."""

    design: PerturbedScores
    stand_in = "ConditionalPoisson(logits=logits, k=k)"
    stand_in_is = "a design that is close"

    @property
    def needs_gradient(self) -> bool:
        """Whether draws need a gradient of the logits."""
        return torch.is_grad_enabled() and may_differentiate(self.design.logits)
