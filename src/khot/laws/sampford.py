r"""Sampford's design: :math:`P(x) \propto \prod_{i: x_i = 1} \pi_i / (1 - \pi_i) \cdot \sum_{i: x_i = 1} (1 - \pi_i)`.

As :math:`\sum_i \pi_i = k`, the last sum equals :math:`\sum_{i: x_i = 0} \pi_i`. Adding both, for independent units of
probabilities :math:`\pi_i` with B ones,

.. math:: P(x) = \frac{P_\pi(x) \, D(x)}{E_\pi[D; B = k]}, \qquad D(x) = \sum_i |x_i - \pi_i|, \qquad
    E_\pi[D; B = k] = \sum_i \pi_i (1 - \pi_i) \, (P(B = k | x_i = 1) + P(B = k | x_i = 0)),

in which no term is negative. As k ones are expected, B = k is likely. One product tree gives all terms.

This is a mixture from which one can draw without rejection: mark a unit and its value by the weight of one of these
terms, then draw the other units given that value and B = k. If there are fused kernels, a recursion over the units
draws both at once; see :mod:`khot.laws.unit_by_unit`.

All functions take probabilities ``(*batch, n)`` whose rows sum to k, an int or an integer tensor that broadcasts with
the batch shape. They remove the rounding error of the sum and calculate in float64. Exact 0 and 1 are legal and have
zero gradient. Arguments are not checked here. Functions that are called with the same probabilities, k and ``kept``
share the product tree.

References:
    [1] Sampford (1967), "On sampling without replacement with unequal probabilities of selection", Biometrika 54(3/4).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._contents import can_look
from khot._shapes import broadcast_shapes
from khot._torch_internals import for_transforms
from khot.kernels.call import runs_on_cpu
from khot.kernels.count import forest_roots
from khot.kernels.count.kept_tree import KeptTree, leaf_outside
from khot.kernels.count.tree import ProductTree
from khot.kernels.draws import balance
from khot.kernels.exact.row_slabs import by_rows
from khot.kernels.exact.rows import number_on
from khot.kernels.exact.small_numbers import TINY, log_odds, log_of_small, quotient
from khot.kernels.operators.autograd import by_formula, has_derivative
from khot.kernels.random_numbers import uniform

from . import conditional_poisson, unit_by_unit
from .conditional_poisson import pull_back
from .once import Once
from .tilted_tree import SLAB, SLABS

COVARIANCE_CHUNK = 64  # rows of the covariance calculated at a time
MAX_DRAW_ELEMENTS = 2**22  # units drawn at a time, which bounds the memory: every draw has its own product tree


class _Units(NamedTuple):
    """Independent units with these probabilities, and the tree of their number of ones."""

    chances: Tensor  # (2, *batch, n), of a zero and of a one
    leaf: Tensor  # (2, n, rows), the same
    tree: ProductTree

    def outside(self) -> Tensor:
        """P(B = k) given a zero and given a one, ``(2, n, rows)``."""
        return leaf_outside(self.leaf, self.tree).clamp(min=0.0)  # values below zero are FFT noise

    def marks(self, outside: Tensor) -> Tensor:
        """The weights of a mark on zeros and on ones, ``(2, n, rows)``."""
        return self.leaf[0] * self.leaf[1] * outside


def _leaf(chances: Tensor) -> Tensor:
    """From ``(2, ..., n)`` to ``(2, n, rows)``."""
    return chances.reshape(2, -1, chances.shape[-1]).mT


def _size(probs: Tensor, k: int | Tensor) -> Tensor:
    """k for each row."""
    size = number_on(probs.device, k).long()
    return size.expand(broadcast_shapes(probs.shape[:-1], size.shape))


def _most(k: int | Tensor, n: int) -> int:
    """A Python number not below any k, without reading from an accelerator or a vmap."""
    if isinstance(k, int):
        return max(1, k)
    return max(1, int(k.max())) if k.device.type == "cpu" and k.numel() and can_look(k) else n


def _units(balanced: Tensor, size: Tensor, most: int, kept: Once) -> _Units:
    """Keeps the tree, without a graph, in eager mode on a CPU."""
    chances, rows = torch.stack((1 - balanced, balanced)), size.reshape(-1)
    leaf = _leaf(chances)
    if forest_roots.is_fused(balanced) or not runs_on_cpu(balanced):
        return _Units(chances, leaf, ProductTree(leaf, rows, most))
    tree = kept.made("tree", _kept_tree, chances, rows, most)
    return _Units(chances, leaf if has_derivative(balanced, torch.is_grad_enabled()) else tree.leaf, tree)


def _kept_tree(chances: Tensor, rows: Tensor, most: int) -> KeptTree:
    return KeptTree(_leaf(chances).contiguous(), rows, most)


def log_prob(probs: Tensor, k: int | Tensor, value: Tensor, kept: Once | None = None) -> Tensor:
    """Log-probability of k-hot values ``(*sample, *batch, n)``; ``-inf`` if one contradicts a probability 0 or 1."""
    kept = Once() if kept is None else kept

    def by_tree(probs: Tensor, value: Tensor) -> Tensor:
        size, most = _size(probs, k), _most(k, probs.shape[-1])

        def scored(balanced: Tensor, value: Tensor) -> tuple[Tensor, ...]:
            return _scored(_units(balanced, size, most, kept), value)

        balanced = kept.made_if_constant("balanced", balance, probs, size)
        return by_formula(lambda *x: scored(*x)[0], scored, _slope, balanced, value.double())

    if unit_by_unit.takes(probs, k, value) and not has_derivative(value, torch.is_grad_enabled()):
        return unit_by_unit.sampford_log_prob(probs, k, value, kept, by_tree)
    return by_tree(probs, value)


def _scored(units: _Units, value: Tensor) -> tuple[Tensor, ...]:
    """The log-probability of values, float64, and what its derivative needs."""
    chances, outside = units.chances, units.outside()
    excluded = chances <= 0
    zero, one = log_of_small(chances.masked_fill(excluded.any(0), 1.0))
    chance = torch.lerp(zero, one, value).sum(-1)
    distance = torch.lerp(chances[1], chances[0], value).sum(-1)
    weight = units.marks(outside).sum((0, 1)).view(chances.shape[1:-1])
    fixed = weight == 0  # rows without a choice, in which D is 0 for the only value
    distance, weight = distance.masked_fill(fixed, 1.0), weight.masked_fill(fixed, 1.0)
    impossible = torch.where(value > 0, excluded[1], excluded[0]).any(-1)
    result = (chance + (log_of_small(distance) - log_of_small(weight))).masked_fill(impossible, -torch.inf)
    return result, units.leaf, outside, distance, weight, impossible


def _slope(
    g: Tensor, balanced: Tensor, value: Tensor, leaf: Tensor, outside: Tensor, distance: Tensor, weight: Tensor,
    impossible: Tensor,
) -> Tensor:  # fmt: skip
    """The derivative, times g, in the balanced probabilities.

    In E[D; B = k] a probability occurs in D, and as the probability of a value. In the latter, the derivative of the
    logarithm is (P(x_i = 1) - p_i) / (p_i (1 - p_i)), which is 0. Units of probability 0 or 1 have no derivative.
    """
    g, spread = g.masked_fill(impossible, 0.0).unsqueeze(-1), balanced * (1 - balanced)
    zero, one = leaf * outside
    of_weight = (zero - one).T.view(spread.shape) / weight.unsqueeze(-1)
    of_chance = (value - balanced) / spread - of_weight
    each = torch.addcmul(of_chance * g, 1 - 2 * value, g / distance.unsqueeze(-1))
    return each.sum_to_size(spread.shape).masked_fill(spread == 0, 0.0)


def covariance(probs: Tensor, k: int | Tensor) -> Tensor:
    """Covariance of the k-hot vector, ``(*batch, n, n)``: the Jacobian, at t = 0, of the mean of e^<t, x> P(x)."""
    probs = balance(probs, number_on(probs.device, k))
    logits = log_odds(probs)
    certain = logits.isinf()

    def mean(tilted: Tensor) -> Tensor:
        z, pulled_back = pull_back(conditional_poisson.inclusion_log_odds, tilted, k)
        p, q = torch.sigmoid(z), torch.sigmoid(-z)
        distance = ((1 - probs) * p + probs * q).sum(-1, keepdim=True)
        shift = quotient(pulled_back((1 - 2 * probs) * p * q), distance.masked_fill(distance < TINY, 1.0))
        return (p + shift).masked_fill(certain, 0.0)

    n = probs.shape[-1]
    unit = torch.eye(n, dtype=probs.dtype, device=probs.device)
    rows = unit.view(n, *[1] * (probs.ndim - 1), n).expand(n, *probs.shape)
    with for_transforms():
        _, product = torch.func.vjp(mean, logits)[:2]
        return torch.func.vmap(lambda v: product(v)[0], out_dims=-2, chunk_size=COVARIANCE_CHUNK)(rows)


@torch.no_grad()
def sample(
    probs: Tensor,
    k: int | Tensor,
    sample_shape: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    kept: Once | None = None,
) -> Tensor:
    """Draws k-hot vectors exactly, ``(*sample_shape, *batch, n)`` bool."""
    n = probs.shape[-1]
    drawn = unit_by_unit.sample_marked(probs, k, math.prod(sample_shape), generator)
    if drawn is not None:
        return drawn.view(*sample_shape, *drawn.shape[1:])
    kept, size, count = Once() if kept is None else kept, _size(probs, k), math.prod(sample_shape)
    units = _units(kept.made_if_constant("balanced", balance, probs, size), size, _most(k, n), kept)
    marks = units.marks(units.outside()).flatten(0, 1).T.cumsum(-1)  # (rows, 2n)
    slab = max(1, MAX_DRAW_ELEMENTS // max(1, probs.numel()))
    parts = []
    for start in range(0, max(1, count), slab):
        u = uniform((len(marks), min(slab, count - start)), marks.dtype, marks.device, generator)
        of_each = marks if can_look(u) else marks + 0 * u.sum(-1, keepdim=True)  # a vmap needs a row for each search
        mark = torch.searchsorted(of_each, u * marks[:, -1:], right=True).clamp(max=2 * n - 1)
        parts.append(_draw_marked(units, mark.T, generator))
    drawn = parts[0] if len(parts) == 1 else torch.cat(parts)
    return drawn.view(*sample_shape, *units.chances.shape[1:])


def _draw_marked(units: _Units, mark: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws ``(draws, rows, n)``, bool, given the indices of their marks among zeros and ones, ``(draws, rows)``."""
    n, bound = units.tree.leaf.shape[1], units.tree.bound
    probs, unit = units.tree.leaf[1].T.expand(*mark.shape, n), (mark % n).unsqueeze(-1)
    # Rows without a choice have weights of 0 only; they get an arbitrary mark, a one on the last unit.
    fixed = (mark >= n).unsqueeze(-1) & (probs.gather(-1, unit) > 0)

    def of_rows(probs: Tensor, k: Tensor) -> tuple[Tensor]:
        tree = ProductTree(_leaf(torch.stack((1 - probs, probs))).contiguous(), k.flatten(), bound)
        return (tree.draw(1, generator).squeeze(-1).T.view(probs.shape),)

    given = probs.scatter(-1, unit, fixed.double())
    return by_rows(of_rows, SLAB, given, units.tree.k.expand(mark.shape).unsqueeze(-1), most=SLABS)[0]
