"""Totals of a population, estimated from the units that a design drew."""

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from khot._shapes import broadcast_shapes
from khot._validation import check_draw, check_floating, described

from .base import unrounded
from .design import SamplingDesign
from .entry import entry
from .phantom_unit import PhantomUnit

FEW = 30  # units; the approximation of the variance is meant for large populations


@entry
def horvitz_thompson(design: SamplingDesign, value: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""Estimates the total of ``y`` over all n units from the drawn units, and the variance of this estimate.

    .. math:: T &= \sum_{i \in S} \frac{y_i}{\pi_i}, \\ V &= \sum_{i < j \in S}
        \Bigl(\frac{\pi_i \pi_j}{\pi_{ij}} - 1\Bigr) \Bigl(\frac{y_i}{\pi_i} - \frac{y_j}{\pi_j}\Bigr)^2

    T is unbiased under every design that can draw every unit with a nonzero ``y_i``. V, in the form of Sen, Yates and
    Grundy, is unbiased for the variance of T if every pair can be drawn, and may be negative. The phantom of a
    :class:`PhantomUnit` counts as a unit with ``y = 0``. Let m be the number of units of S that are not certain; for
    m = 1 the draw says nothing about the variance, and V is NaN. For a design without ``pairwise_inclusion``, V is the
    approximation of Hájek and Deville for designs of high entropy with many units:

    .. math:: V &= \frac{m}{m - 1} \sum_{i \in S} (1 - \pi_i) \Bigl(\frac{y_i}{\pi_i} - B\Bigr)^2, \\
        B &= \frac{\sum_{i \in S} (1 - \pi_i)\,y_i / \pi_i}{\sum_{i \in S} (1 - \pi_i)}

    It is too large if a design spreads its draws over an order that y follows. Its first use on a class of designs for
    fewer than 30 units raises a warning. :class:`Brewer` (up to k = 10), :class:`GumbelTopK` and
    :class:`ParetoSampling` have an exact V by enumeration of up to 1,000,000 subsets.

    Differentiable in ``y``, and in the parameter of the design if its inclusion probabilities and pairs are.

    Args:
        design: The design that drew ``value``.
        value: k-hot draws ``(..., n)``, such as ``design.sample((100,))``; bools and integers count as well.
        y: The observations, ``(..., n)``, one entry for each unit of the population; broadcasts with ``value``. Units
            that were not drawn have no influence, and may be NaN.

    Returns:
        The estimated totals and their estimated variances, each of the shape of ``value * y`` without its last axis, in
        the wider of the dtypes of ``value``, if that is a floating-point one, and ``y``.

    Raises:
        ValueError: With the validation of ``design`` on, if it cannot draw ``value``.
        NotImplementedError: If ``design`` is a ConditionalPoisson with a range of sizes: V needs a fixed size.

    References:
        [1] Horvitz, Thompson (1952), "A generalization of sampling without replacement from a finite universe".
        [2] Sen (1953), and Yates, Grundy (1953), for the variance.
        [3] Tillé (2006), "Sampling Algorithms", sections 2.8 and 7.5, for Deville's approximation of the variance.

    Example:
        Inclusion probabilities proportional to a known size, at most 1, make T exact where y is proportional to it:

        >>> size = torch.tensor([1.0, 2.0, 3.0, 4.0, 90.0])
        >>> design = Sampford(probs=capped_softmax(size.log(), 3))
        >>> design.mean
        tensor([0.2000, 0.4000, 0.6000, 0.8000, 1.0000])
        >>> drawn, y = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([math.nan, 20.0, math.nan, 40.0, 100.0])
        >>> total, variance = horvitz_thompson(design, drawn, y)
        >>> total
        tensor(200.)
    """
    if not isinstance(design, SamplingDesign):
        raise TypeError(f"`design` must be a khot.SamplingDesign, but got {described(design, SamplingDesign)}")
    if design._size_varies and not isinstance(design, PhantomUnit):
        raise NotImplementedError(
            f"horvitz_thompson needs draws of one size, but `design` has a range of sizes, {design.support}"
        )
    given: Any = value
    is_whole = isinstance(given, Tensor) and not (given.is_floating_point() or given.is_complex())
    check_draw("value", given.double() if is_whole else given, design)
    _check_observed(y, value)
    dtype = y.dtype if is_whole else torch.promote_types(value.dtype, y.dtype)
    return _estimates(unrounded(design)._in_float64(), value.double(), y, dtype)


def _estimates(design: SamplingDesign, value: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """T and V in a dtype, from a design and draws in float64."""
    _check_drawn(value, design)
    value, y = torch.broadcast_tensors(value, y.double())
    y = y.masked_fill(value == 0, 0.0)
    total = (y / _positive(design.mean.double())).sum(-1)
    return total.to(dtype), _variance(design, value, y).to(dtype)


@torch.no_grad()
def _check_drawn(value: Tensor, design: SamplingDesign) -> None:
    """Checks that the design can draw each value, by its size, inclusion probabilities and, if known, probability."""
    if not design._checks_contents(value):
        return
    message = "`value` must contain vectors that `design` can draw, but has {}. The arguments are (design, value, y)"
    inside = design.support.check(value)
    if not inside.all():
        wrong = value[~inside][0]
        is_binary = bool(((wrong == 0) | (wrong == 1)).all())
        got = f"one with {int(wrong.sum())} ones" if is_binary else f"an entry {wrong[(wrong != 0) & (wrong != 1)][0]}"
        raise ValueError(message.format(f"{got}, which is not in its support {design.support}"))
    mean = design.mean.double()
    for chance, digit, verb in ((0.0, 1.0, "with"), (1.0, 0.0, "without")):
        impossible = (value == digit) & (mean == chance)
        if impossible.any():
            unit = int(impossible.nonzero()[0, -1])
            raise ValueError(message.format(f"one {verb} unit {unit}, whose inclusion probability is {chance:.0f}"))
    if design._enumerates("pairwise_inclusion"):  # all other designs can draw every such vector
        return
    try:
        log_prob = design.log_prob(value)
    except NotImplementedError:
        return
    if (log_prob == -torch.inf).any():
        raise ValueError(message.format("one of probability 0"))


def _check_observed(y: Any, value: Tensor) -> None:
    wanted = f"`y` must be a floating-point tensor that broadcasts with `value` of shape {tuple(value.shape)}"
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise TypeError(f"{wanted}, but got {y.dtype if isinstance(y, Tensor) else type(y).__name__}")
    check_floating("y", y)
    try:
        units = {broadcast_shapes(y.shape, value.shape)[-1], *y.shape[-1:]}
    except RuntimeError:
        units = set()
    if y.dim() == 0 or units != {value.shape[-1]}:
        raise ValueError(
            f"{wanted}, but got shape {tuple(y.shape)}: it has one entry for each of the {value.shape[-1]} units of "
            "the population, and those that were not drawn may be NaN"
        )


def _positive(probs: Tensor) -> Tensor:
    """Sets the probability of units that are never drawn to 1; they do not contribute to any sum."""
    return probs.masked_fill(probs == 0, 1.0)


def _variance(design: SamplingDesign, value: Tensor, y: Tensor) -> Tensor:
    if isinstance(design, PhantomUnit):
        phantom = design.k.to(value.dtype) + 1 - value.sum(-1)
        value, y = torch.cat((value, phantom.unsqueeze(-1)), -1), torch.nn.functional.pad(y, (0, 1))
        design = design.wrapped
    probs = design.mean.double()
    ratio, random_units = y / _positive(probs), ((value > 0) & (probs < 1)).sum(-1)
    try:
        pairs = design.pairwise_inclusion.double()
    except NotImplementedError:
        if design.event_shape[0] < FEW:
            _warn_of_few_units(type(design).__name__)
        variance = _high_entropy(probs, value, ratio)
    else:
        variance = _sen_yates_grundy(probs, pairs, value, ratio)
    return variance.masked_fill(random_units == 1, torch.nan)


@functools.cache  # once for each class of designs
def _warn_of_few_units(name: str) -> None:
    message = (
        f"horvitz_thompson approximates the variance here, because this {name} has no pairwise_inclusion, and the "
        f"approximation is meant for {FEW} units or more: with fewer, prefer a design that has it, such as Sampford"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=6)  # at the line that calls horvitz_thompson


def _sen_yates_grundy(probs: Tensor, pairs: Tensor, value: Tensor, ratio: Tensor) -> Tensor:
    """V, computed without a tensor of the shape (draws, n, n)."""
    drawable = (pairs > 0) & ~torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device)
    product = probs.unsqueeze(-1) * probs.unsqueeze(-2)
    weight = torch.where(drawable, product / torch.where(drawable, pairs, 1.0) - 1, 0.0)
    centre = (value * ratio).sum(-1, keepdim=True) / value.sum(-1, keepdim=True).clamp(min=1)
    centred = value * (ratio - centre)  # only differences matter; a common level would cost them digits
    total = (centred * centred * _products(weight, value)).sum(-1)
    return total - (centred * _products(weight, centred)).sum(-1)


def _products(weight: Tensor, vectors: Tensor) -> Tensor:
    """The product of each symmetric matrix (*batch, n, n) with all its vectors (*sample, *batch, n)."""
    batch = weight.shape[:-2]
    rows = vectors.expand(broadcast_shapes(vectors.shape, weight.shape[:-1]))
    count = math.prod(rows.shape[: rows.dim() - 1 - len(batch)])
    draws = rows.reshape(count, *batch, rows.shape[-1]).movedim(0, -2)  # (*batch, draws, n)
    return (draws @ weight).movedim(-2, 0).reshape(rows.shape)


def _high_entropy(probs: Tensor, value: Tensor, ratio: Tensor) -> Tensor:
    weight = value * (1 - probs)
    total = weight.sum(-1, keepdim=True)
    centre = (weight * ratio).sum(-1, keepdim=True) / _positive(total)
    spread = (weight * (ratio - centre).square()).sum(-1)
    drawn = (weight > 0).sum(-1)
    return drawn / (drawn - 1).clamp(min=1) * spread
