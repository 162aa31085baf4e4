"""Exact divergences, registered for ``torch.distributions.kl_divergence``; TraceMeanField_ELBO uses them.

* From a design that has an entropy at any size to ``ConditionalPoisson``, which includes the uniform law: at any size.
  The divergence is infinite unless the sizes of the second, which may be a range, contain those of the first.
* Between any two designs that have a ``log_prob``: by enumeration of at most ``MAX_TERMS`` vectors. Beyond that,
  NotImplementedError is raised, and TraceMeanField_ELBO falls back on the log-probabilities of its samples.
* Between two ``PhantomUnit`` designs: the divergence of the designs that they wrap.
* From and to ``OneHotCategorical``: as between laws of a single unit, which every design with k = 1 is. The divergence
  is infinite for other sizes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import OneHotCategorical, kl_divergence, register_kl

from khot._contents import can_look
from khot._shapes import broadcast_shapes
from khot.kernels.operators.autograd import with_derivatives_of
from khot.laws import size_prior
from khot.laws.conditional_poisson import log_prob

from .base import unrounded
from .conditional_poisson import ConditionalPoisson
from .design import SamplingDesign
from .entry import entry
from .phantom_unit import PhantomUnit
from .sizes import shared_ends, sizes_of

Divergence = Callable[[Any, Any], Tensor]

MAX_TERMS = 10_000  # the most vectors to enumerate; beyond it, a sampled divergence costs far less


def _rounded(divergence: Divergence) -> Divergence:
    """Computes in float64, and converts the result to the dtype to which torch promotes the dtypes of both laws.

    In long rows a divergence is the difference of two numbers that are far larger than it.
    """

    @functools.wraps(divergence)
    def call(p: Any, q: Any) -> Tensor:
        found = divergence(*map(_unrounded, (p, q)))
        p_dtype, q_dtype = (law.dtype if isinstance(law, SamplingDesign) else law.logits.dtype for law in (p, q))
        return found.to(torch.promote_types(p_dtype, q_dtype))

    return call


def _unrounded(law: Any) -> Any:
    """A law with results in float64; a plain ConditionalPoisson in float32, whose parts are float64 and can be kept."""
    if not isinstance(law, SamplingDesign):
        return law
    wide = unrounded(law)
    return wide if isinstance(law, ConditionalPoisson) else wide._in_float64()


@register_kl(SamplingDesign, ConditionalPoisson)
@entry
@_rounded
def _kl_to_conditional_poisson(p: SamplingDesign, q: ConditionalPoisson) -> Tensor:
    """E_p[log p - log q], evaluated at the mean of p, as log q is linear; infinite if p has a size that q lacks."""
    if p.event_shape != q.event_shape or p._enumerates("entropy"):
        return _enumerated(p, q)  # raises for the missing entropy
    try:
        mean, entropy = _mean_and_entropy(p)
    except NotImplementedError:
        return _enumerated(p, q)
    if q.log_prior is not None:
        return _enumerated(p, q) if isinstance(p, PhantomUnit) else -entropy - _expected_log_prob(p, q)
    cross_entropy = -log_prob(q._logits, q._size, mean, q._kept)
    if isinstance(p, ConditionalPoisson) and p.log_prior is not None:
        size = torch.arange(p.event_shape[0] + 1, device=p.k.device)
        outside = (size < q.k.unsqueeze(-1)) | (size > q.largest_k.unsqueeze(-1))
        return torch.where((outside & (p.size_probs > 0)).any(-1), torch.inf, cross_entropy - entropy)
    smallest, largest = p.k, p.largest_k
    if isinstance(p, ConditionalPoisson) and p._size_varies:  # infinite logits may reduce its sizes
        smallest = smallest.maximum((p.logits == torch.inf).sum(-1))
        largest = largest.minimum((p.logits > -torch.inf).sum(-1))
    return torch.where((smallest >= q.k) & (largest <= q.largest_k), cross_entropy - entropy, torch.inf)


def _mean_and_entropy(p: SamplingDesign) -> tuple[Tensor, Tensor]:
    """Both in float64, by the same operations as the cross-entropy, so that equal designs have divergence 0."""
    if not isinstance(p, ConditionalPoisson):
        return p.mean, p.entropy()
    mean = p._inclusion
    if p.log_prior is not None:
        return mean, -_expected_log_prob(p, p)
    if p.parameter_name == "probs":
        return with_derivatives_of(mean.detach(), p._probs), p._entropy()
    return mean, -log_prob(p._logits, p._size, mean, p._kept)


def _expected_log_prob(p: SamplingDesign, q: ConditionalPoisson) -> Tensor:
    """E_p log q for a q with a prior over its size: a sum over sizes, given which log q is linear."""
    batch_shape = broadcast_shapes(p.batch_shape, q.batch_shape)
    p, q = p._in_float64(), q.expand(batch_shape)
    prior = q._size
    if isinstance(p, ConditionalPoisson) and p._size_varies:
        sizes, means = p.size_probs, size_prior.means_by_size(p._logits, prior)
    else:
        sizes = torch.nn.functional.one_hot(p.k, q.event_shape[0] + 1)
        means = p.mean.expand(prior.high - prior.low + 1, *p.mean.shape)
    means = means.view(len(means), *(1,) * (len(batch_shape) - len(p.batch_shape)), *means.shape[1:])
    sizes = sizes.double().expand(*batch_shape, -1)  # the axis of sizes moves to the front of all of these
    return size_prior.expected_log_prob(q._logits, prior, sizes, means.double())


@register_kl(PhantomUnit, PhantomUnit)
@entry
@_rounded
def _kl_phantom_unit(p: PhantomUnit, q: PhantomUnit) -> Tensor:
    """The divergence of the wrapped designs; infinite if p has a size that q lacks."""
    if p.event_shape != q.event_shape:
        return _enumerated(p, q)  # raises with the reason
    possible = (p.k >= q.k) & (p.largest_k <= q.largest_k)
    larger, wrapped = possible & (p.k > q.k), p.wrapped
    if not can_look(larger) or larger.any():
        # If the only size of p is the larger one of q, the phantom of p is out rather than in.
        wrapped = wrapped.expand(larger.shape)
        phantom = wrapped.probs[..., -1:].masked_fill(larger.unsqueeze(-1), 0.0)
        probs, k = torch.cat((wrapped.probs[..., :-1], phantom), -1), wrapped.k - larger.long()
        wrapped = p.design_class(probs=probs, k=k, validate_args=False, **p.design_kwargs)
    return torch.where(possible, kl_divergence(wrapped, q.wrapped), torch.inf)


@register_kl(SamplingDesign, SamplingDesign)
@entry
@_rounded
def _enumerated(p: SamplingDesign, q: SamplingDesign) -> Tensor:
    terms = _number_of_vectors(p)
    if terms > MAX_TERMS:
        raise NotImplementedError(
            f"the divergence of {type(p).__name__} from {type(q).__name__} enumerates up to {MAX_TERMS} vectors, but "
            f"there are {terms}; to ConditionalPoisson it is known at any size, from designs whose entropy needs no "
            "enumeration"
        )
    if p.event_shape != q.event_shape:
        raise ValueError(f"a divergence needs the same number of units, but got {p.event_shape} and {q.event_shape}")
    p, q = p._in_float64().expand(broadcast_shapes(p.batch_shape, q.batch_shape)), q._in_float64()
    value = p.enumerate_support(expand=False)
    log_p = p.log_prob(value)
    log_q = q._unchecked().log_prob(value)  # values that are impossible under q give infinity here and would raise
    return _divergence(log_p, log_q, dim=0)


def _divergence(log_p: Tensor, log_q: Tensor, dim: int) -> Tensor:
    """The sum of p (log p - log q) over an axis, in which terms with p = 0 are 0."""
    possible = log_p > -torch.inf
    ratio = log_p.masked_fill(~possible, 0.0) - log_q.masked_fill(~possible, 0.0)
    return (log_p.exp() * ratio).sum(dim)


def _number_of_vectors(design: SamplingDesign) -> int:
    """The number of vectors in the support of the row that has most."""
    fixed = design.wrapped if isinstance(design, PhantomUnit) else design
    n = fixed.event_shape[0]
    if fixed._size_varies:
        low, high = shared_ends(fixed, "a divergence by enumeration")
        return sum(math.comb(n, size) for size in range(low, high + 1))
    return max((math.comb(n, k) for k in sizes_of(fixed, "a divergence by enumeration")), default=0)


@register_kl(SamplingDesign, OneHotCategorical)
@entry
@_rounded
def _kl_to_one_hot(p: SamplingDesign, q: OneHotCategorical) -> Tensor:
    divergence = _divergence(_log_prob_of_single_units(p, q), _log_probs(q), dim=-1)
    return torch.where((p.k == 1) & (p.largest_k == 1), divergence, torch.inf)


@register_kl(OneHotCategorical, SamplingDesign)
@entry
@_rounded
def _kl_from_one_hot(p: OneHotCategorical, q: SamplingDesign) -> Tensor:
    return _divergence(_log_probs(p), _log_prob_of_single_units(q, p), dim=-1)


def _log_probs(one_hot: OneHotCategorical) -> Tensor:
    """Log-probabilities in float64, in which they sum to 1; rounded to a narrower type they do not."""
    logits = one_hot.logits
    # For a given probability of 0, torch has the logit log eps. Given logits are far lower if their probability is 0.
    impossible = (one_hot.probs == 0) & (logits > 2 * math.log(torch.finfo(logits.dtype).eps))
    return logits.double().masked_fill(impossible, -torch.inf).log_softmax(-1)


def _log_prob_of_single_units(design: SamplingDesign, other: OneHotCategorical) -> Tensor:
    """``(*batch_shape, n)``, ``-inf`` in rows of another size."""
    if design.event_shape != other.event_shape:
        raise ValueError(
            f"a divergence needs the same number of units, but got {design.event_shape} and {other.event_shape}"
        )
    design = design._in_float64()
    n, batch_dim = design.event_shape[0], len(design.batch_shape)
    units = torch.eye(n, dtype=design.dtype, device=design.parameter.device)
    try:
        # Without checks, because vectors of another size would raise.
        return design._unchecked().log_prob(units.view(n, *(1,) * batch_dim, n)).movedim(0, -1)
    except NotImplementedError:  # a single unit is drawn with its inclusion probability by every design
        return design.mean.log().masked_fill((design.k != 1).unsqueeze(-1), -torch.inf)
