r"""The law of a sum of independent Bernoulli variables, as a binary tree of convolutions.

The leaves are the laws ``(q_i, p_i)`` of the units, and an inner node is the law of the number of ones among its units:
the convolution of its two children. The tree gives

* upwards, the law of the total;
* downwards, the *outside* of every node, :math:`g_v(c) = P(\text{total} = k \mid \text{count of } v = c)`, which at a
  leaf is the derivative of :math:`P(\text{total} = k)` in ``(q_i, p_i)``;
* downwards with random numbers, exact draws of all units given that the total is k.

The two operations behind all of this are in :mod:`khot.kernels.count.pairs`; every result is differentiable to any
order. If several totals matter, with weights :math:`w_c` that are constants to autograd, :math:`P = \sum_c w_c\,
P(\text{total} = c)` takes the place of :math:`P(\text{total} = k)`, and everything below the root is the same.

Kept counts. A node keeps only a window of counts, so that a row of n units costs at most O(n log² n). Small nodes keep
0, 1, ..., min(size, bound). Large ones keep their mean plus or minus a radius that a count exceeds with a probability
below ``TAIL`` (by Hoeffding's and Bernstein's inequalities). The windows are centred on differences of the rounded
cumulative mean, so that the centres of two children add up to that of their parent: none is off by more than one, and
the crop after a convolution is the same for all nodes of a level.

Layout: ``(counts, nodes, rows)``; the children of node j, of m, are the nodes j and j + m of the level below. On an
accelerator the lowest levels, which are all of them up to 1024 units, are one operation, see
:mod:`khot.kernels.count.forest`, with neighbours as children and no windows.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from khot._contents import has_contents
from khot._torch_internals import is_transformed

from ..random_numbers import uniform
from . import forest_draw
from .forest import forest_levels, outsides, roots, tree_sums
from .pairs import merge, split
from .torch_pairs import DIRECT_WIDTH

TAIL = 1e-20  # probability that may fall outside a window, far below the rounding of float64
RECENTRE_GAIN = 0.75  # a window around the mean pays for its indexing if it is narrower by this factor
FFT_NOISE = 8 * torch.finfo(torch.float64).eps  # relative to a node's largest entry; smaller entries are noise
MAX_DRAW_ELEMENTS = 2**22  # units drawn at a time, which bounds the memory


class _Level(NamedTuple):
    """How one level of nodes is computed from the level below."""

    start: int  # first entry of the convolution that is kept
    length: int  # number of entries that are kept
    radius: int | None  # of windows laid around the means after the convolution (once per tree, None elsewhere)
    origin: int  # index of count zero in the window of a node without units, before the convolution


class Totals(NamedTuple):
    """The totals that matter, from ``first`` to ``last``, with weights ``exp(tilt * (c - k))``; all ``(R,)``.

    Weights should not exceed 1, so that the parts outside the windows are negligible.
    """

    first: Tensor
    last: Tensor
    tilt: Tensor

    def weights(self, count: Tensor, k: Tensor) -> Tensor:
        """The weights of counts ``(..., R)``, relative to that of k."""
        inside = (count >= self.first) & (count <= self.last)
        return (self.tilt * (count - k).masked_fill(~inside, 0)).exp() * inside


def _radius(size: int, n: int, bound: int) -> int:
    """Distance from its mean that a node of ``size`` of the n units exceeds with probability below TAIL."""
    deviation = -math.log(TAIL / 2)
    most = min(bound, n / 2)
    variance = most * (1 - most / n)  # largest variance of the total, if its mean is at most bound
    hoeffding = math.sqrt(size * deviation / 2)
    bernstein = deviation / 3 + math.sqrt(deviation**2 / 9 + 2 * deviation * variance)
    return math.ceil(min(hoeffding, bernstein)) + 2  # the centre is rounded


def _plan(n: int, bound: int, wide_root: bool = False) -> tuple[_Level, ...]:
    levels: list[_Level] = []
    nodes, size, width, centred = n, 1, 2, False
    while nodes > 1:
        nodes, size, child = (nodes + 1) // 2, min(2 * size, n), width
        origin = child // 2 if centred else 0
        radius = min(_radius(size, n, bound), child - 1) if nodes > 1 or wide_root else 0
        if centred:
            width = 2 * radius + 1
            levels.append(_Level(child - 1 - radius, width, None, origin))
            continue
        width = min(size, bound) + 1
        centred = nodes > 1 and 2 * radius + 1 < RECENTRE_GAIN * width
        levels.append(_Level(0, width, radius if centred else None, origin))
        width = 2 * radius + 1 if centred else width
    return tuple(levels)


def _shift(x: Tensor, offset: Tensor, width: int) -> Tensor:
    """``y[i] = x[i + offset]`` for i < width, zero outside x; the adjoint is the shift by ``-offset``."""
    index = torch.arange(width, device=x.device).view(-1, *[1] * offset.ndim) + offset
    inside = (index >= 0) & (index < x.shape[0])
    return torch.gather(x, 0, index.clamp(0, x.shape[0] - 1)) * inside


def _pad_even(x: Tensor, dim: int, origin: int | None = None) -> Tensor:
    """Appends a node without units to an odd number of nodes: the law of the count zero at ``origin``, or zeros."""
    if x.shape[dim] % 2 == 0:
        return x
    pad = torch.zeros_like(x.narrow(dim, 0, 1))
    if origin is not None:
        pad[origin] = 1.0
    return torch.cat((x, pad), dim)


def _in_pairs(x: Tensor, dim: int) -> Tensor:
    """The nodes along an axis as two halves, the left and the right children."""
    return torch.unflatten(x, dim, (2, -1))


class ProductTree:
    """Laws of the counts of all nodes over n units, for each of R rows.

    Args:
        leaf: ``(2, n, R)`` float64, the probabilities of 0 and of 1 of every unit.
        k: ``(R,)`` integers, the total that matters. The windows assume ``sum(leaf[1]) = k``, unless the tree is so
            small that it keeps all counts up to ``bound``.
        bound: At least ``max(k, 1)``; at most about ``n / 2`` if only k matters.
        totals: The totals that matter, if there are others than k, which is then the expected total or the end that is
            nearest to it; in long rows only the likely ones count.
        with_forest: Whether the lowest levels may be one operation, if there is a kernel for it.
    """

    def __init__(
        self, leaf: Tensor, k: Tensor, bound: int, totals: Totals | None = None, with_forest: bool = True
    ) -> None:
        self.leaf, self.k, self.bound, self.totals = leaf, k, bound, totals
        self.plan = _plan(leaf.shape[1], bound, totals is not None)
        centred = next((at for at, level in enumerate(self.plan, 1) if level.radius is not None), len(self.plan))
        self.low = forest_levels(leaf, centred) if with_forest else 0  # levels computed by one operation
        self.pairs: list[Tensor] = []  # for the others: (width, 2, nodes of the new level, R)
        self.offset: Tensor | None = None
        self.whole = 0 < self.low == len(self.plan)
        if not self.whole:
            self._build()

    def _build(self) -> None:
        x, mean = self.leaf, self.leaf[1].detach()
        if self.low:
            x, mean = roots(x, self.k, self.bound, self.low), tree_sums(mean, self.low)
            x = self._recentre(x, mean, self.plan[self.low - 1])
        recentred = any(level.radius is not None for level in self.plan)
        for level in self.plan[self.low :]:
            x = _in_pairs(_pad_even(x, 1, level.origin), 1)
            self.pairs.append(x)
            x = merge(x, level.start, level.length)
            if recentred and self.offset is None:
                mean = _in_pairs(_pad_even(mean, 0), 0).sum(0)
            x = self._recentre(x, mean, level)
        self.root = x.squeeze(1)  # (width, R)

    def _recentre(self, x: Tensor, mean: Tensor, level: _Level) -> Tensor:
        """Lays the windows around the means; happens once per tree."""
        if level.radius is None:
            return x
        self.offset = self._centres(mean) - level.radius
        return _shift(x, self.offset, 2 * level.radius + 1)

    def _first(self, level: _Level) -> Tensor | None:
        """The first counts of the windows laid at a level, ``(nodes, R)``, if any were."""
        return None if level.radius is None else self.offset

    def _uncentre(self, g: Tensor, level: _Level) -> Tensor:
        """The adjoint of :meth:`_recentre`."""
        first = self._first(level)
        return g if first is None else _shift(g, -first, level.length)

    def _positions(self, count: Tensor, level: _Level) -> Tensor:
        """The positions of counts ``(nodes, R)`` in the windows laid at a level."""
        first = self._first(level)
        return count if first is None else count - first

    def _counts(self, index: Tensor, level: _Level) -> Tensor:
        """The counts at positions ``(nodes, R, samples)`` in the windows laid at a level."""
        first = self._first(level)
        return index if first is None else index + first[..., None]

    def _centres(self, mean: Tensor) -> Tensor:
        """Integers within one of the means, which add up to k over all nodes and to a mean over every subtree."""
        counts = [mean.shape[0]]
        while counts[-1] > 1:
            counts.append((counts[-1] + 1) // 2)
        order = torch.zeros(1, dtype=torch.long, device=mean.device)
        for children, parents in zip(counts[-2::-1], counts[:0:-1], strict=True):
            order = torch.stack((order, order + parents), 1).flatten()
            order = order[order < children]
        ends = mean[order].cumsum(0)[:-1].round().long()
        ends = torch.cat((torch.zeros_like(self.k)[None], ends, self.k[None]))
        return ends.diff(dim=0)[order.argsort()]

    @property
    def _root_index(self) -> Tensor:
        """Position of the total k in the window of the root."""
        return self.k if self.offset is None else torch.zeros_like(self.k)

    @property
    def _first_total(self) -> Tensor:
        """The total at the start of the window of the root, ``(R,)``."""
        return torch.zeros_like(self.k) if self.offset is None else self.k - self.root.shape[0] // 2

    def _weights(self) -> Tensor:
        """The weights of all totals in the window of the root, ``(width, R)``."""
        count = torch.arange(self.root.shape[0], device=self.k.device)[:, None] + self._first_total
        return cast(Totals, self.totals).weights(count, self.k)

    def _masses(self) -> Tensor:
        return (self.root * self._weights()).clamp(min=0.0)  # values below zero are FFT noise

    def law_of_total(self) -> Tensor:
        """P(c) of all counts c from 0 to n, shape ``(n + 1, R)``, to about 1e-16; in long rows most of them are 0."""
        masses = self._masses()
        return _shift(masses / masses.sum(0), -self._first_total, self.leaf.shape[1] + 1)

    def probability(self) -> Tensor:
        """P(total = k), or the weighted sum over the totals, shape ``(R,)``."""
        if self.totals is not None:
            return (self.root * self._weights()).sum(0)
        if self.whole:
            return roots(self.leaf, self.k, self.bound, self.low).flatten()
        return self.root.gather(0, self._root_index[None]).squeeze(0)

    def _root_outside(self) -> Tensor:
        """The weights of totals: 1 for the total k, and 0 for the others, if only k matters."""
        if self.totals is not None:
            return self._weights().unsqueeze(1)
        index = torch.arange(self.root.shape[0], device=self.k.device)[:, None]
        return (index == self._root_index).to(self.leaf.dtype).unsqueeze(1)

    def leaf_outside(self) -> Tensor:
        """P(total = k | unit = 0) and P(total = k | unit = 1), shape ``(2, n, R)``."""
        if self.whole:
            one = torch.ones_like(self.leaf[:1, :1])
            return outsides(self.leaf, one, self.k, self.bound, self.low)
        g = self._root_outside()
        for x, level in zip(reversed(self.pairs), reversed(self.plan[self.low :]), strict=True):
            g = self._uncentre(g[:, : x.shape[2]], level)  # without the node that was added to an odd number
            g = split(g, x, level.start).flatten(1, 2)
        if self.low:
            trees = -(-self.leaf.shape[1] // 2**self.low)
            g = self._uncentre(g[:, :trees], self.plan[self.low - 1])
            return outsides(self.leaf, g, self.k, self.bound, self.low)
        return g[:, : self.leaf.shape[1]]

    def draw(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws the units given total = k: bool, ``(n, R, num_samples)``, exactly k ones along dim 0."""
        launch = forest_draw.find(self.leaf) if has_contents(self.leaf) and not is_transformed() else None
        if self.low and launch is None:
            return ProductTree(self.leaf, self.k, self.bound, with_forest=False).draw(num_samples, generator)
        _, n, rows = self.leaf.shape
        levels, slab = self._draw_levels(), max(1, MAX_DRAW_ELEMENTS // max(1, n * rows))
        starts = range(0, max(1, num_samples), slab)
        parts = [self._draw_slab(levels, min(slab, num_samples - start), generator, launch) for start in starts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _root_positions(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Positions in the window of the root of the totals to draw for, ``(1, R, samples)``."""
        if self.totals is not None:
            masses = self._masses()
            cumulative = masses.where(masses > FFT_NOISE * masses.amax(0), 0.0).cumsum(0)
            u = uniform((*self.k.shape, num_samples), masses.dtype, masses.device, generator)
            return (cumulative[..., None] <= u * cumulative[-1][..., None]).sum(0)[None]
        return self._root_index[None, :, None].expand(-1, -1, num_samples)

    def _draw_levels(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each level, the children's laws without FFT noise, and the smallest and largest index of each child."""
        if self.whole:
            return []
        low, high = (self.leaf[0] == 0).long(), (self.leaf[1] > 0).long()
        levels, noisy = [], False
        if self.low:
            low, high = (self._positions(tree_sums(b, self.low), self.plan[self.low - 1]) for b in (low, high))
        for x, level in zip(self.pairs, self.plan[self.low :], strict=True):
            low, high = (F.pad(b.T, (0, 2 * x.shape[2] - b.shape[0]), value=level.origin).T for b in (low, high))
            low, high = _in_pairs(low, 0), _in_pairs(high, 0)
            levels.append((x.where(x > FFT_NOISE * x.amax(0), 0) if noisy else x, low, high))
            noisy = noisy or x.shape[0] > DIRECT_WIDTH
            low, high = (self._positions(b.sum(0) - level.start, level) for b in (low, high))
        return levels

    def _draw_slab(
        self,
        levels: list[tuple[Tensor, Tensor, Tensor]],
        num_samples: int,
        generator: torch.Generator | None,
        launch: Callable[..., Tensor] | None,
    ) -> Tensor:
        index = self._root_positions(num_samples, generator)  # (nodes, R, samples)
        for (x, low, high), level in zip(reversed(levels), reversed(self.plan[self.low :]), strict=True):
            total = self._counts(index[: x.shape[2]], level) + level.start  # of the two children's indices
            left = _draw_left(x, total, generator)
            # Only affects rounding: counts that the units below cannot have stay impossible.
            left = left.maximum(torch.maximum(low[0][..., None], total - high[1][..., None]))
            left = left.minimum(torch.minimum(high[0][..., None], total - low[1][..., None]))
            index = torch.cat((left, total - left))
        if launch is not None and self.low:
            trees = -(-self.leaf.shape[1] // 2**self.low)
            counts = self._counts(index[:trees], self.plan[self.low - 1])
            return launch(self.leaf, self.bound, self.low, counts, generator)
        return index[: self.leaf.shape[1]] == 1


def _draw_left(x: Tensor, total: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws i with probability proportional to ``x[i, 0] * x[total - i, 1]``, by inversion."""
    width = x.shape[0]
    other = total - torch.arange(width, device=x.device).view(-1, 1, 1, 1)
    inside = (other >= 0) & (other < width)
    right = x[:, 1, ..., None].expand(*other.shape)
    cumulative = (right.gather(0, other.clamp(0, width - 1)) * inside * x[:, 0, ..., None]).cumsum(0)
    u = uniform(total.shape, x.dtype, x.device, generator)
    return (cumulative <= u * cumulative[-1]).sum(0)
