r"""A product tree in which several totals matter: the law of units given that their number of ones is in a range.

With weights :math:`w_c` of the totals, constants to autograd, the tree gives

.. math:: P = \sum_c w_c\, P(\text{total} = c), \qquad O = \nabla P, \qquad
    P(c) = w_c\, P(\text{total} = c) / P.

A tree of one total has a single weight 1; everything below the root is the same. A draw takes the total from its law,
and goes down from there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..random_numbers import uniform
from .kept_tree import KeptTree
from .tree import FFT_NOISE, _shift


class Totals(NamedTuple):
    """The totals that matter, from ``first`` to ``last``, with weights ``exp(tilt * (c - k))``; all ``(R,)``."""

    first: Tensor
    last: Tensor
    tilt: Tensor

    def weights(self, count: Tensor, k: Tensor) -> Tensor:
        """The weights of counts ``(..., R)``, relative to that of k."""
        inside = (count >= self.first) & (count <= self.last)
        return (self.tilt * (count - k).masked_fill(~inside, 0)).exp() * inside


class RangeTree(KeptTree):
    """A :class:`~khot.kernels.count.tree.ProductTree` of all totals of a range; in long rows, of the likely ones.

    Args:
        leaf: ``(2, n, R)`` float64, the probabilities of 0 and of 1 of every unit.
        k: ``(R,)`` integers in the range, the expected total or the end that is nearest to it.
        bound: At least the largest total that matters in any row, and 1.
        totals: The totals that matter. Weights should not exceed 1, so that the parts outside the windows are
            negligible.
    """

    def __init__(self, leaf: Tensor, k: Tensor, bound: int, totals: Totals) -> None:
        self.totals = totals
        super().__init__(leaf, k, bound, wide_root=True)

    def anew(self, leaf: Tensor) -> "RangeTree":
        return RangeTree(leaf, self.k, self.bound, self.totals)

    @property
    def _first_total(self) -> Tensor:
        """The total at the start of the window of the root, ``(R,)``."""
        return torch.zeros_like(self.k) if self.offset is None else self.k - self.root.shape[0] // 2

    def _weights(self) -> Tensor:
        """The weights of all totals in the window of the root, ``(width, R)``."""
        count = torch.arange(self.root.shape[0], device=self.k.device)[:, None] + self._first_total
        return self.totals.weights(count, self.k)

    def _masses(self) -> Tensor:
        return (self.root * self._weights()).clamp(min=0.0)  # values below zero are FFT noise

    def probability(self) -> Tensor:
        """P, shape ``(R,)``."""
        return (self.root * self._weights()).sum(0)

    def law_of_total(self) -> Tensor:
        """P(c) of all counts c from 0 to n, shape ``(n + 1, R)``, to about 1e-16; in long rows most of them are 0."""
        masses = self._masses()
        return _shift(masses / masses.sum(0), -self._first_total, self.leaf.shape[1] + 1)

    def _root_outside(self) -> Tensor:
        return self._weights().unsqueeze(1)

    def _root_positions(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        masses = self._masses()
        cumulative = masses.where(masses > FFT_NOISE * masses.amax(0), 0.0).cumsum(0)
        u = uniform((*self.k.shape, num_samples), masses.dtype, masses.device, generator)
        return (cumulative[..., None] <= u * cumulative[-1][..., None]).sum(0)[None]
