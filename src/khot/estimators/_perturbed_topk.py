r"""Top-k of scores with Gaussian noise, differentiated through the noise (Berthet et al. 2020, Cordonnier et al. 2021).

.. math:: y(\theta) = E[\mathrm{top}_k(\theta + \sigma Z)], \qquad
    J = \tfrac{1}{\sigma} E[(\mathrm{top}_k(\theta + \sigma Z) - \mathrm{top}_k(\theta))\,Z^\top]

Since E[Z] = 0, the unperturbed solution may be subtracted. It is a control variate: draws in which the noise changes
nothing contribute nothing to the gradient.
"""

import torch
from torch import Tensor

from khot._contents import looks_at_contents
from khot._host import on_host_without_float64
from khot._notes import feels_between_vertices
from khot._torch_internals import leave_graph_if_differentiated
from khot._validation import (
    DIM_IS_A_KEYWORD,
    check_draw,
    check_enough,
    check_generator,
    check_k,
    check_positive_contents,
    check_scores,
    checked_count,
    checked_positive,
)
from khot.distributions.base import column, unrounded
from khot.distributions.entry import entry
from khot.kernels.random_numbers import normal
from khot.relaxations import topk_mask
from khot.relaxations.axes import as_axes, as_rows
from khot.relaxations.hard import checked_whole

from .perturbation import PerturbedScores, PerturbedWrapper, gaussian_noise
from .wrapper import Scorer, substitute_gradient, wide


@on_host_without_float64
def perturbed_topk(
    x: Tensor,
    k: int | Tensor,
    scale: float | Tensor = 1.0,
    num_samples: int = 100,
    *,
    dim: int | tuple[int, ...] = -1,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Relaxes top-k by the mean over Gaussian perturbations (third argument: ``scale``; ``dim`` by keyword).

    .. math:: y &= \frac1M \sum_m \mathrm{top}_k(x + \sigma Z_m), \\
        \frac{\partial y}{\partial x} &:= \frac{1}{\sigma M} \sum_m (\mathrm{top}_k(x + \sigma Z_m) -
        \mathrm{top}_k(x))\,Z_m^\top

    The result is random. Value and derivative are unbiased estimates of their limits as M grows. Both errors decrease
    as :math:`1/\sqrt M`; the error of the derivative is also proportional to :math:`1/\sigma`. The entries are
    multiples of 1/M and sum to k. The function can serve as the ``relaxation`` of a design. It is differentiable once,
    in ``x`` only, and takes O(M n) time and memory.

    Args:
        x: Real scores with ``n`` entries along ``dim``. ``-inf`` excludes an entry, ``+inf`` selects it.
        k: Number of ones, an integer or an integer tensor that broadcasts with the batch shape, ``0 <= k <= n``.
        scale: Standard deviation of the noise, a positive number or a tensor that broadcasts with the batch shape.
        num_samples: Number of perturbations, M.
        dim: Axis of the ground set, or axes that together form one ground set.
        generator: Source of randomness on the device of ``x``; by default torch's own.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim`` up to rounding.

    Raises:
        ValueError: If ``x`` contains NaN, or fewer than ``k`` entries are unmasked.

    References:
        [1] Berthet et al. (2020), "Learning with differentiable perturbed optimizers", arXiv:2002.08676.
        [2] Cordonnier et al. (2021), "Differentiable patch selection for image recognition", arXiv:2104.03059.

    Example:
        >>> perturbed_topk(torch.tensor([0.0, 10.0, 20.0]), 2)
        tensor([0., 1., 1.])
    """
    check_scores(x, dim, joint=True)
    num_samples = checked_count("num_samples", num_samples)
    check_generator(generator, x.device)
    leave_graph_if_differentiated()
    rows = as_rows(x, dim)
    k = checked_whole(k)
    check_k(k, x, rows.shape[:-1], rows.shape[-1])
    if looks_at_contents(x, k):
        check_enough(rows, k)
    scale = checked_positive("scale", scale, rows.shape[:-1], advice=DIM_IS_A_KEYWORD)
    check_positive_contents("scale", scale)
    rows = wide(rows)
    noise = normal((num_samples, *rows.shape), rows.dtype, x.device, generator).masked_fill(rows.isinf(), 0)
    drawn = topk_mask(rows + column(scale) * noise, k)
    y = substitute_gradient(drawn.mean(0), rows, _pull_back, drawn - topk_mask(rows, k), noise / column(scale))
    return as_axes(y.to(x.dtype), x, dim)


def _pull_back(g: Tensor, difference: Tensor, noise: Tensor) -> Tensor:
    return ((g * difference).sum(-1, keepdim=True) * noise).mean(0)


@feels_between_vertices
class PerturbedTopK(PerturbedWrapper):
    r"""The top k of Gaussian-perturbed logits, with a Monte Carlo estimate of the Jacobian of their mean.

    .. math:: x &= \mathrm{top}_k(\theta + \sigma Z_0), \\ \frac{\partial x}{\partial \theta} &:=
        \frac{1}{\sigma M} \sum_{m=1}^M (\mathrm{top}_k(\theta + \sigma Z_m) - \mathrm{top}_k(\theta))\,Z_m^\top

    This is the straight-through form of :func:`perturbed_topk`. The Jacobian of E[x] is estimated without bias from M
    further perturbations of every draw, so the gradient of E[f(x)] is unbiased for linear f, and otherwise biased to
    first order in the curvature of f. ``rsample`` returns exact k-hot vectors; if a gradient is needed it costs O(M n)
    time and memory per draw.

    ``mean`` and ``log_prob`` are not known. For an ELBO, choose how draws are scored: ``log_prob=`` a design
    of the same shape and size, or ``"none"``, which scores 0 and drops the entropy.

    Args:
        logits: Real scores ``(..., n)``; ``-inf`` excludes a unit, ``inf`` includes it.
        k: Number of ones, an int or an integer tensor that broadcasts to the batch shape.
        scale: Standard deviation of the noise, which gets no gradient; a positive number, or a tensor that broadcasts
            to the batch shape.
        num_samples: Number of perturbations for the Jacobian, M.
        log_prob: How draws are scored.
        validate_args: Whether to check the contents of tensors.

    Example:
        >>> logits = torch.tensor([0.0, 10.0, 20.0], requires_grad=True)
        >>> PerturbedTopK(logits=logits, k=2).rsample().detach()
        tensor([0., 1., 1.])
    """

    def __init__(
        self,
        logits: Tensor,
        k: int | Tensor,
        scale: float | Tensor = 1.0,
        num_samples: int = 100,
        *,
        log_prob: Scorer = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(
            PerturbedScores(logits, k, gaussian_noise, scale, "scale", validate_args), log_prob, validate_args
        )
        self.num_samples = checked_count("num_samples", num_samples)

    def _rsample(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.attach_gradient(self.design.sample(shape, generator=generator), generator)

    @entry
    def attach_gradient(self, value: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``value``, a draw ``(*sample_shape, *batch_shape, n)`` from any source, with this estimator's gradient."""
        check_draw("value", value, self)
        check_generator(generator, self.design.logits.device)
        if not self.needs_gradient:
            return value
        design = unrounded(self.design)
        logits = design.logits.detach()
        scale = column(design.scale)
        shape = torch.Size((self.num_samples, *value.shape))
        noise = gaussian_noise(design, shape, generator).masked_fill(logits.isinf(), 0)
        difference = design.top(logits + scale * noise) - design.top(logits)
        drawn = substitute_gradient(wide(value), design.logits, _pull_back, difference, noise / scale)
        return drawn.to(value.dtype)
