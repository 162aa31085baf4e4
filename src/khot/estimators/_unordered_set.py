"""The unordered set estimator: distinct draws, weighted so that the estimate is unbiased."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import Distribution

from khot._contents import can_look, has_contents
from khot._torch_internals import all_true
from khot._validation import check_choice, check_generator
from khot.distributions.base import draw
from khot.distributions.design import MAX_SUPPORT
from khot.kernels.random_numbers import exponential

from ._convention import Loss, checked_call, declares, evaluate
from .support import Support
from .wrapper import scores_of, wide

STEP = 0.1  # the step of the quadrature; the error of the trapezoidal rule decreases like exp(-pi² / STEP)
LOWEST = -40.0  # its left end; everything below is at most exp(-40) of the integral
# Its right end: v has at most the tail of a Gamma variable of shape S + 1, and beyond these nothing of it is left.
TAIL, TAIL_DEVIATIONS = 40, 10


@declares(unbiased=True)
def unordered_set(
    design: Distribution,
    f: Loss,
    num_samples: int = 1,
    baseline: Literal["built_in", "none"] = "built_in",
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Unbiased gradients from a set B of S distinct draws, so that f is never evaluated twice at the same vector.

    Let D be the support, and :math:`p^{D'}(C)` the probability that drawing :math:`|C|` distinct vectors from
    :math:`D'`, one after the other in proportion to p, gives the set C. With the leave-one-out ratio
    :math:`R(B, x) = p^{D \setminus x}(B \setminus x) / p^D(B)`,

    .. math:: \nabla E[f(x)] &\approx \sum_{x \in B} R(B, x) \, \nabla p(x) \, \big(f(x) - b_x\big), \\
        b_x &= \sum_{y \in B} p(y) R^{D \setminus x}(B, y) f(y), \\ R^{D \setminus x}(B, x) &= 1

    For S = 1, where there is no baseline, this is the score-function estimator; if B is the whole support it is exact.
    The ratios are computed by quadrature from :math:`p^{D'}(C) = \int_0^\infty e^{-v} \prod_{x \in C} (1 - e^{-v p(x) /
    W}) dv`, where W is the mass of :math:`D' \setminus C`. Derivatives of the surrogate of every order are unbiased.

    The draws are the S largest values of log p plus Gumbel noise over the enumerated support. So C(n, k) must be small,
    or for several latents the number of combinations.

    Args:
        design: A distribution over vectors with ``log_prob`` and ``enumerate_support``, or several of them made
            independent by ``to_event``, whose values are all combinations.
        f: Maps values to losses ``(num_samples, *batch_shape)``, see :mod:`khot.estimators`.
        num_samples: Number of distinct draws, S; at most the number of values of positive probability.
        baseline: ``"built_in"`` for :math:`b_x`, or ``"none"``.
        generator: Source of randomness; by default torch's own.

    Returns:
        Surrogate of shape ``batch_shape``: its gradient is the estimate. Its value, and thus the gradient of parameters
        inside f, weights the draws by :math:`p(x) R(B, x)`. Weights of 1 / S would be biased, because distinct draws
        contain improbable vectors too often.

    Raises:
        ValueError: If the support is too large to be listed.
        NotImplementedError: If ``design`` has no ``log_prob``, or rows of its batch differ in k.

    References:
        [1] Kool, van Hoof, Welling (2020), "Estimating gradients for discrete random variables by sampling without
            replacement", arXiv:2002.06043.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> design = ConditionalPoisson(logits=logits, k=2)
        >>> surrogate = unordered_set(design, lambda x: x[..., 0] * x[..., 1], num_samples=6)  # all there are
        >>> torch.autograd.grad(surrogate, logits)[0]
        tensor([ 0.0833,  0.0833, -0.0833, -0.0833])
    """
    check_choice("baseline", baseline, ("built_in", "none"))
    num_samples = checked_call(design, f, num_samples)
    values, log_rest = _draw(design, num_samples, generator)
    return _surrogate(design, values, evaluate(f, values, design), log_rest, baseline)


@torch.no_grad()
def _draw(design: Distribution, num_samples: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """S distinct values ``(S, *batch_shape, *event_shape)`` and the log-probability of all others, ``batch_shape``."""
    if 0 in design.batch_shape:  # without rows the support has no size
        values = draw(design, (num_samples,), generator)
        return values, values.new_zeros(design.batch_shape)
    support = Support(design, f"unordered_set lists at most {MAX_SUPPORT} k-hot vectors")
    values = support.values(0, support.count)
    log_prob, _ = scores_of(design, values)
    check_generator(generator, log_prob.device)
    possible = (log_prob > -torch.inf).sum(0)
    if num_samples > support.count or (has_contents(log_prob) and not all_true(possible >= num_samples)):
        most = int(possible.min()) if can_look(possible) else f"at most {support.count}"
        raise ValueError(
            f"`num_samples` must not exceed the number of vectors of positive probability, {most}, "
            f"but got {num_samples}: unordered_set draws distinct vectors"
        )
    gumbel = -exponential(log_prob.shape, log_prob.dtype, log_prob.device, generator).log()
    drawn = (log_prob + gumbel).topk(num_samples, dim=0).indices
    log_rest = log_prob.scatter(0, drawn, -torch.inf).logsumexp(0)
    values = values.expand(-1, *design.batch_shape, *design.event_shape)
    return values.take_along_dim(drawn.view(*drawn.shape, *(1,) * len(design.event_shape)), 0), log_rest


def _surrogate(
    design: Distribution, values: Tensor, losses: Tensor, log_rest: Tensor, baseline: str = "built_in"
) -> Tensor:
    log_prob, dtype = scores_of(design, values)
    dtype, losses = torch.promote_types(dtype, losses.dtype), wide(losses)
    log_p = log_prob.detach().double().movedim(0, -1)  # (*batch_shape, S)
    log_set, log_without_one, log_without_two = _log_set_probabilities(log_p - log_rest.double().unsqueeze(-1))
    weight = (log_p + log_without_one - log_set.unsqueeze(-1)).exp()
    advantage = losses
    if baseline == "built_in" and values.shape[0] > 1:
        share = (log_p.unsqueeze(-2) + log_without_two - log_without_one.unsqueeze(-1)).exp()  # [x, y]: p(y) R(B, y)
        expected = share @ losses.detach().double().movedim(0, -1).unsqueeze(-1)
        advantage = losses - expected.squeeze(-1).movedim(-1, 0).to(losses.dtype)
    # 0, with the derivatives of every order of p(x) / p(x).detach(), as in score_function.
    likelier = torch.expm1(log_prob - log_prob.detach())
    return (weight.movedim(-1, 0).to(losses.dtype) * (losses + advantage * likelier)).sum(0).to(dtype)


def _log_set_probabilities(log_ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p(C) of drawing the set C first, for C = B, B without x, and B without x and y, each from what remains.

    In all cases the same vectors stay undrawn, so the ratios are the same.

    Args:
        log_ratio: log(p(x) / W) of the vectors in B, ``(*batch_shape, S)``; W is the mass of the undrawn vectors.

    Returns:
        Tensors ``batch_shape``, ``(*batch_shape, S)`` and ``(*batch_shape, S, S)``. The last one has B without x on its
        diagonal, so that row x contains the probabilities within D without x.
    """
    size = log_ratio.shape[-1]
    highest = math.log(size + TAIL + TAIL_DEVIATIONS * math.sqrt(size))
    t = torch.arange(LOWEST, highest, STEP, dtype=log_ratio.dtype, device=log_ratio.device)  # v = exp(t)
    exponent = log_ratio.unsqueeze(-2) + t.unsqueeze(-1)  # (*batch_shape, nodes, S)
    small = exponent < LOWEST  # where 1 - exp(-v p / W) is v p / W
    factor = torch.where(small, exponent, torch.log(-torch.expm1(-exponent.exp())))
    every = factor.sum(-1, keepdim=True) + (t - t.exp() + math.log(STEP)).unsqueeze(-1)
    but_one = every - factor
    but_two = []
    for x in range(size):
        other = factor.clone()
        other[..., x] = 0
        but_two.append((but_one[..., x, None] - other).logsumexp(-2))
    return every.squeeze(-1).logsumexp(-1), but_one.logsumexp(-2), torch.stack(but_two, -2)
