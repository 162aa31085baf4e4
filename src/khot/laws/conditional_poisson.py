r"""Conditional Poisson design: the law :math:`P(S) \propto \exp \sum_{i \in S} \theta_i` over the k-subsets of n units.

Equivalently, these are independent Bernoulli units of log-odds :math:`z_i = \theta_i + c`, for any c, given that their
number of ones B is k. With c such that the expected number is k, B = k is a likely event, and

.. math:: \log Z = \sum_i \log(1 + e^{z_i}) - k c + \log P(B = k), \qquad
    \log P(x) = \sum_i \log \mathrm{Bernoulli}(x_i; \sigma(z_i)) - \log P(B = k)

lose no digits at any scale of the logits. c is a constant to autograd, since no result depends on it.

All functions take logits ``(*batch, n)`` and k, an int or an integer tensor that broadcasts with the batch shape, with
``0 <= k <= n``, or a :class:`~khot.laws.size_range.SizeRange` of these. They calculate in and return float64, and are
differentiable in the logits to any order. A logit of ``-inf`` excludes its unit and ``+inf`` includes it, both with
zero gradient; at most k units may be included and at least k must not be excluded. Arguments are not checked here.

Each function uses a product tree. The most common calls with rows that are not long use passes over the units instead,
if these have a fused kernel; see :mod:`khot.laws.unit_by_unit`. Functions that are called with the same logits, k and
``kept`` share intermediate values.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from khot._shapes import broadcast_shapes
from khot._torch_internals import for_transforms
from khot.kernels.call import runs_on_cpu
from khot.kernels.count.kept_tree import KeptTree
from khot.kernels.exact.row_slabs import Tensors, by_rows, in_slabs, slab_size
from khot.kernels.operators.autograd import has_derivative, wants_gradient

from . import unit_by_unit
from .once import Once
from .size_range import SizeRange
from .tilted_tree import (
    FAR,
    SLAB,
    WHOLE,
    Size,
    Tilted,
    expand,
    expand_range,
    tilt,
    tilted_by_rows,
)

PAIRS = 2**22  # entries of matrices whose rows are computed at a time


def _bernoulli_log_prob(z: Tensor, value: Tensor) -> Tensor:
    """Sum over the units of ``value log sigmoid(z) + (1 - value) log sigmoid(-z)``, with 0 log 0 = 0."""
    positive = z > 0
    size, miss = torch.where(positive, z, -z), torch.where(positive, 1 - value, value)
    sure = size == torch.inf
    penalty = torch.where(sure, torch.where(miss == 0, 0.0, torch.inf), miss * size.masked_fill(sure, 0.0))
    return (F.logsigmoid(size) - penalty).sum(-1)


def log_counts_and_shifts(logits: Tensor, k: int | Tensor, kept: Once | None = None) -> tuple[Tensor, Tensor]:
    """log P(B = k) of each row, and the c for which this is likely, both ``(*batch,)``."""

    def function(tilted: Tilted) -> Tensors:
        return tilted.log_probability(), tilted.shift

    log_count, shift = tilted_by_rows(function, logits, k, kept)
    return log_count, shift


def shifted_log_prob(logits: Tensor, shift: Tensor, value: Tensor) -> Tensor:
    """:func:`_bernoulli_log_prob` at ``logits + shift``, by slabs of rows."""

    def function(logits: Tensor, shift: Tensor, value: Tensor) -> Tensors:
        return (_bernoulli_log_prob(logits.double() + shift, value.double()),)

    if logits.numel() <= WHOLE and value.numel() <= WHOLE:
        return function(logits, shift.unsqueeze(-1), value)[0]
    shape = broadcast_shapes(logits.shape, value.shape)
    logits, value = logits.expand(shape), value.expand(shape)
    shift = shift.unsqueeze(-1).expand(*shape[:-1], 1)
    if not shift.is_contiguous():  # draws of rows, in the first dimension
        size = slab_size(len(value), value[:1].numel(), SLAB)
        return in_slabs(function, size, logits, shift, value)[0]
    return by_rows(function, SLAB, logits, shift, value)[0]


def log_prob(logits: Tensor, k: Size, value: Tensor, kept: Once | None = None) -> Tensor:
    """Log-probability of k-hot values.

    Args:
        logits: Log-odds ``(*batch, n)``.
        k: Size of the subsets, int or integer tensor, or a range.
        value: k-hot ``(*sample, *batch, n)``. Between k-hot vectors the result is linear in ``value``. Its derivative
            there is the logits for a range, and the logits plus a constant for a single k.
        kept: What was already made from these logits, such as their tree.

    Returns:
        ``(*sample, *batch)``; ``-inf`` where ``value`` contradicts an infinite logit.
    """

    def by_tree(logits: Tensor, value: Tensor) -> Tensor:
        if isinstance(k, SizeRange):
            log_sum, shift, size = tilted_by_rows(
                lambda tilted: (tilted.log_probability(), tilted.shift, tilted.k.double()), logits, k, kept
            )
            return shifted_log_prob(logits, shift, value) - shift * (value.double().sum(-1) - size) - log_sum
        log_count, shift = log_counts_and_shifts(logits, k, kept)
        return shifted_log_prob(logits, shift, value) - log_count

    if unit_by_unit.takes(logits, k, value):
        return unit_by_unit.log_prob(logits, k, value, kept, by_tree)
    return by_tree(logits, value)


def inclusion_probabilities(logits: Tensor, k: Size, kept: Once | None = None) -> Tensor:
    """P(i in S) of every unit, ``(*batch, n)``, to about 1e-15; its Jacobian is the covariance of the k-hot vector.

    The result must not be written to: it may be a kept tensor.
    """

    def by_tree(logits: Tensor) -> Tensor:
        return tilted_by_rows(lambda tilted: (tilted.inclusion(),), logits, k, kept)[0]

    if unit_by_unit.takes(logits, k):
        return unit_by_unit.inclusion(logits, k, kept, False, by_tree)
    return by_tree(logits)


def inclusion_log_odds(logits: Tensor, k: Size, kept: Once | None = None) -> Tensor:
    """Log-odds of the inclusion probabilities, which keep the digits that the probabilities lose next to 1."""

    def by_tree(logits: Tensor) -> Tensor:
        return tilted_by_rows(lambda tilted: (tilted.log_odds(),), logits, k, kept)[0]

    if unit_by_unit.takes(logits, k):
        return unit_by_unit.inclusion(logits, k, kept, True, by_tree)
    return by_tree(logits)


def log_prob_and_chances(
    logits: Tensor, k: int | Tensor, value: Tensor, kept: Once | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`log_prob` for log-odds of independent units with k ones on average, and :func:`chances`."""
    if unit_by_unit.takes(logits, k, value):
        return log_prob(logits, k, value, kept), *chances(logits, k, kept)
    log_count, shift, log_odds = tilted_by_rows(
        lambda tilted: (tilted.log_probability(), tilted.shift, tilted.log_odds()), logits, k, kept, balanced=True
    )
    return shifted_log_prob(logits, shift, value) - log_count, torch.sigmoid(-log_odds), torch.sigmoid(log_odds)


def chances(logits: Tensor, k: int | Tensor, kept: Once | None = None) -> tuple[Tensor, Tensor]:
    """The probabilities of a zero and of a one of each unit, both with a small relative error."""
    if unit_by_unit.takes(logits, k) and not wants_gradient(logits):
        return unit_by_unit.chances(logits, k, kept)
    log_odds = inclusion_log_odds(logits, k, kept)
    return torch.sigmoid(-log_odds), torch.sigmoid(log_odds)


def count_law(logits: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
    """log P(B = k) for units of exactly these finite log-odds, and the log-odds of inclusion given B = k."""
    tilted = tilt(logits, k)
    positive = logits > 0  # for these the probability of a zero is smaller, so its derivative is more accurate
    sign = torch.where(positive, 1.0, -1.0)
    ratios = F.logsigmoid(sign * logits) - F.logsigmoid(sign * tilted.z)
    log_count = ratios.sum(-1) + (positive.sum(-1) - tilted.k) * tilted.shift + tilted.log_probability()
    return log_count, tilted.log_odds()


def pull_back(
    function: Callable[[Tensor, Any], Tensor], logits: Tensor, k: Size
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """``function(logits, k)`` and the linear map from its cotangents to those of the logits."""
    with for_transforms():
        value, vjp = torch.func.vjp(lambda t: function(t, k), logits)[:2]

    def product(v: Tensor) -> Tensor:
        with for_transforms():
            return cast(Tensor, vjp(v)[0])

    return value, product


def slopes(
    function: Callable[[Tensor, Any], Tensor], logits: Tensor, k: Size
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """:func:`pull_back` for code that is not differentiated again: by plain autograd if that is enough."""
    no_graphs = torch.is_inference_mode_enabled()  # only transforms of torch.func differentiate in this mode
    if torch.is_grad_enabled() or no_graphs or not runs_on_cpu(logits) or has_derivative(logits, False):
        return pull_back(function, logits, k)
    with torch.enable_grad():
        theta = logits.detach().requires_grad_()
        value = function(theta, k)
    return value.detach(), lambda v: torch.autograd.grad(value, theta, v, retain_graph=True)[0]


def times_covariance(v: Tensor, logits: Tensor, k: Size) -> Tensor:
    """The covariance of the k-hot vector times v, ``(*batch, n)``, differentiable in both."""
    derivative = pull_back if has_derivative(v, False) else slopes
    return derivative(inclusion_probabilities, logits, k)[1](v)


def covariance(logits: Tensor, k: Size) -> Tensor:
    """Covariance of the k-hot vector, ``(*batch, n, n)``, from the 2 n designs given a unit.

    An entry has the digits that ``P(i, j) P(neither) - P(only i) P(only j)`` leaves.
    """
    inside, outside = _log_odds_given((torch.inf, -torch.inf), logits, k)
    change = torch.sigmoid(inside) * torch.sigmoid(-outside) - torch.sigmoid(-inside) * torch.sigmoid(outside)
    log_odds = inclusion_log_odds(logits, k)
    return _symmetric((torch.sigmoid(log_odds) * torch.sigmoid(-log_odds))[..., None] * change)


def pairwise_inclusion(logits: Tensor, k: Size, mean: Tensor) -> Tensor:
    """P(i and j in S), ``(*batch, n, n)``, each with a small relative error, from the n designs that include a unit.

    On the diagonal are the inclusion probabilities ``mean``.
    """
    (inside,) = _log_odds_given((torch.inf,), logits, k)
    return _symmetric(mean[..., None] * torch.sigmoid(inside))


def _symmetric(x: Tensor) -> Tensor:
    """A matrix that is symmetric up to rounding, without this rounding."""
    return (x + x.mT) / 2


def _log_odds_given(fates: tuple[float, ...], logits: Tensor, k: Size) -> Tensors:
    """For each of these fates, log-odds of all units given that the i-th unit has it, ``(*batch, n, n)``.

    Units without a choice keep their own fate.
    """
    whole = expand_range(logits, k)[0] if isinstance(k, SizeRange) else expand(logits, k)[0]
    shape = *whole.shape, whole.shape[-1]
    free = inclusion_log_odds(logits.detach(), k).isfinite()
    fixed = torch.eye(shape[-1], dtype=torch.bool, device=logits.device) & free[..., None]
    ends = [end for end in (k if isinstance(k, SizeRange) else (k,)) if isinstance(end, Tensor)]

    def of_rows(rows: Tensor, fixed: Tensor, *ends: Tensor) -> Tensors:
        sizes = [end.squeeze(-1) for end in ends]
        size = k if not sizes else SizeRange(*sizes) if isinstance(k, SizeRange) else sizes[0]
        return tuple(inclusion_log_odds(rows.masked_fill(fixed, fate), size) for fate in fates)

    each = (end.expand(shape[:-2])[..., None, None].expand(*shape[:-1], 1) for end in ends)
    return by_rows(of_rows, PAIRS, whole[..., None, :].expand(shape), fixed, *each, most=None)


def size_probabilities(logits: Tensor, k: SizeRange) -> Tensor:
    """P(|x| = s) for all s from 0 to n, ``(*batch, n + 1)``, each to about 1e-16."""

    def function(tilted: Tilted) -> Tensors:
        tree = cast(KeptTree, tilted.tree)
        tree = tree if tilted.leaf is tree.leaf else tree.anew(tilted.leaf)  # so that its root has derivatives
        counts = tree.law_of_total().T.reshape(*tilted.flip.shape, logits.shape[-1] + 1)  # -1 would fail without rows
        return (torch.where(tilted.flip[..., None], counts.flip(-1), counts),)

    return tilted_by_rows(function, logits, k)[0]


def entropy(logits: Tensor, k: Size, kept: Once | None = None, inclusion: Tensor | None = None) -> Tensor:
    """Entropy in nats, ``(*batch,)``.

    With ``inclusion``, a result of :func:`inclusion_probabilities` for these tensors, both share a graph.
    """
    # log_prob is linear in its value, so its expectation is its value at the mean.
    if not isinstance(k, SizeRange) and unit_by_unit.takes(logits, k):
        mean = inclusion_probabilities(logits, k, kept) if inclusion is None else inclusion
        return -log_prob(logits, k, mean, kept)

    def function(tilted: Tilted) -> Tensors:
        mean = tilted.inclusion()
        if isinstance(k, SizeRange):  # for certain units, log-odds times rounding errors must vanish exactly
            mean = torch.where(tilted.z.abs() > FAR, (tilted.z > 0).double(), mean)
        surprise = tilted.log_probability() - _bernoulli_log_prob(tilted.z, mean)
        if isinstance(k, SizeRange):
            sure = tilted.shift.abs() > FAR  # the size is certain
            surprise = surprise + torch.where(sure, 0.0, tilted.shift) * (mean.sum(-1) - tilted.k)
        return (surprise,)

    return tilted_by_rows(function, logits, k, kept)[0]


@torch.no_grad()
def sample(
    logits: Tensor,
    k: Size,
    sample_shape: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    kept: Once | None = None,
) -> Tensor:
    """Draws k-hot vectors exactly: the count of every left child given that of its parent, from the root downwards.

    Args:
        logits: Log-odds ``(*batch, n)``.
        k: Size of the subsets, int or integer tensor, or a range.
        sample_shape: Leading shape of independent draws.
        generator: Source of randomness; by default torch's own.
        kept: What was already made from these logits, such as their tree.

    Returns:
        Bool ``(*sample_shape, *batch, n)``, every row with exactly k ones, or with a number of ones in the range.
    """
    count, n = math.prod(sample_shape), logits.shape[-1]
    drawn = unit_by_unit.sample(logits, k, count, generator)
    if drawn is not None:
        return drawn.view(*sample_shape, *drawn.shape[1:])

    # (*batch, samples, n)
    (draws,) = tilted_by_rows(lambda tilted: (tilted.draw(count, generator),), logits, k, kept)
    return draws.movedim(-2, 0).reshape(*sample_shape, *draws.shape[:-2], n)
