"""Pathwise gradients: those that ``rsample`` carries, whether relaxed, straight-through or of any other kind."""

from functools import partial

import torch
from torch import Tensor
from torch.distributions import Distribution

from khot._notes import feels_between_vertices
from khot.distributions.base import draw
from khot.distributions.design import Relaxation

from ._convention import Loss, checked_call, declares, evaluate
from ._reinmax import ReinMax
from ._straight_through import StraightThrough
from .wrapper import wrap_latents


@feels_between_vertices
@declares(unbiased=False)
def pathwise(
    design: Distribution, f: Loss, num_samples: int = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    r"""The mean of f over draws by ``rsample``, with the gradient that these draws carry.

    .. math:: \nabla E[f(x)] \approx \frac1S \sum_s \nabla f(x_s), \qquad x_s = x(\theta, \text{noise}_s)

    For a continuous relaxation, this is an unbiased gradient of the relaxed objective. For a hard sample with a
    substitute gradient, such as :class:`~khot.StraightThrough`, the bias is described in the class of ``design``. f
    must be differentiable in x; parameters inside f get their gradient too.

    Args:
        design: A distribution over vectors with ``has_rsample``.
        f: Maps values to losses ``(num_samples, *batch_shape)``, see :mod:`khot.estimators`.
        num_samples: Number of independent draws, S.
        generator: Source of randomness; by default torch's own.

    Returns:
        Surrogate of shape ``batch_shape``, whose value is the mean of f over the draws.

    Raises:
        NotImplementedError: If ``design`` has no ``rsample``.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> design = StraightThrough(ConditionalPoisson(logits=logits, k=2))
        >>> surrogate = pathwise(design, lambda x: (x * torch.arange(4.0)).sum(-1), num_samples=8)
        >>> torch.autograd.grad(surrogate, logits)[0]
        tensor([-0.5000, -0.1667,  0.1667,  0.5000])
    """
    num_samples = checked_call(design, f, num_samples)
    if not design.has_rsample:
        raise NotImplementedError(
            f"pathwise needs a distribution with rsample, but {type(design).__name__} has none: wrap it, as in "
            "ReinMax(design) or StraightThrough(design), or use score_function, which needs only log_prob"
        )
    values = draw(design, (num_samples,), generator, "rsample")
    return evaluate(f, values, design, reads_values_again=False).mean(0)


@feels_between_vertices
@declares(unbiased=False)
def straight_through(
    design: Distribution, f: Loss, num_samples: int = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """:func:`pathwise` through ``StraightThrough(design)``: f at hard samples, backward through ``design.mean``.

    ``design`` is a sampling design, or several made independent by ``to_event``; it needs no ``log_prob``.
    :class:`~khot.StraightThrough` describes the bias.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> surrogate = straight_through(Pivotal(logits=logits, k=2), lambda x: x[..., 0])
        >>> torch.autograd.grad(surrogate, logits)[0]
        tensor([ 0.1875, -0.0625, -0.0625, -0.0625])
    """
    num_samples = checked_call(design, f, num_samples)
    return pathwise(wrap_latents(design, StraightThrough), f, num_samples, generator=generator)


@feels_between_vertices
@declares(unbiased=False)
def reinmax(
    design: Distribution,
    f: Loss,
    num_samples: int = 1,
    *,
    temperature: float | Tensor = 1.0,
    relaxation: Relaxation | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """:func:`pathwise` through ``ReinMax(design)``: f at hard samples, backward with second-order accuracy.

    ``design`` is a sampling design, or several made independent by ``to_event``; it needs no ``log_prob``.
    :class:`~khot.ReinMax` describes ``temperature``, ``relaxation`` and the bias.

    Example:
        >>> logits = torch.zeros(2, requires_grad=True)
        >>> surrogate = reinmax(Pivotal(logits=logits, k=1), lambda x: x[..., 0] ** 2)
        >>> torch.autograd.grad(surrogate, logits)[0].sum()
        tensor(0.)
    """
    num_samples = checked_call(design, f, num_samples)
    wrap = partial(ReinMax, temperature=temperature, relaxation=relaxation)
    return pathwise(wrap_latents(design, wrap), f, num_samples, generator=generator)
