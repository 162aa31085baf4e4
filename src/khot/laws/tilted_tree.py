"""Independent units among which a given number of ones is likely, and their product tree; many rows in slabs.

All functions of :mod:`khot.laws.conditional_poisson` that have no kernel are functions of such a tree.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from khot._contents import can_look
from khot._shapes import broadcast_shapes
from khot.kernels.call import runs_on_cpu
from khot.kernels.count import forest_roots
from khot.kernels.count.kept_tree import KeptTree, leaf_outside, probability
from khot.kernels.count.tree import ProductTree, Totals
from khot.kernels.exact.row_slabs import Tensors, by_rows
from khot.kernels.exact.rows import number_on
from khot.kernels.exact.small_numbers import TINY, log_of_small
from khot.kernels.operators.autograd import has_derivative
from khot.kernels.threshold import solve_threshold

from .once import Once
from .size_range import SizeRange, centred

Size = int | Tensor | SizeRange

SHORT_ROW = 24  # up to this n, sorting is cheaper; P(B = k) >= 2^-n is harmless because all convolutions are direct
FAR = 200.0  # e^-100 is negligible compared with 1
WHOLE = 2**17  # entries of rows that are processed as a whole: some 50 MB, and nothing is computed twice
SLAB = 2**14  # beyond that, entries whose product trees are built at a time
SLABS = 12  # at most; the slabs become larger instead


class Tilted(NamedTuple):
    """Bernoulli units among which B = k is likely, and their tree."""

    z: Tensor  # (*batch, n), theta + c
    shift: Tensor  # (*batch,), c
    k: Tensor  # (*batch,); for a range, the k_0 of its weights
    flip: Tensor  # (*batch,), where the tree counts zeros because there are fewer zeros than ones
    leaf: Tensor  # (2, n, rows), probabilities of what the tree does not count and of what it counts
    tree: ProductTree

    def log_probability(self) -> Tensor:
        """log P(B = k); for a range the logarithm of the weighted sum."""
        return probability(self.leaf, self.tree).log().view(self.k.shape)

    def masses(self) -> tuple[Tensor, Tensor]:
        """P(B = k, i out of S), P(B = k, i in S) of every unit, each to its own relative accuracy, ``(*batch, n)``."""
        # Values below zero are FFT noise relative to negligible probabilities.
        outside = leaf_outside(self.leaf, self.tree).clamp(min=0.0)
        few = (self.leaf * outside).movedim(1, -1).reshape(2, *self.z.shape)
        flip = self.flip[..., None]
        return torch.where(flip, few[1], few[0]), torch.where(flip, few[0], few[1])

    def inclusion(self) -> Tensor:
        """P(i in S | B = k), ``(*batch, n)``."""
        out, included = self.masses()
        return included / (out + included)

    def log_odds(self) -> Tensor:
        """The log-odds of these, which keep the digits that they lose next to 1."""
        out, included = self.masses()
        excluded, certain = included < TINY, out < TINY
        sure = excluded | certain
        log_odds = log_of_small(included.masked_fill(sure, 1.0)) - log_of_small(out.masked_fill(sure, 1.0))
        return log_odds.masked_fill(excluded, -torch.inf).masked_fill(certain, torch.inf)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the units, ``(*batch, count, n)`` bool."""
        draws = self.tree.draw(count, generator).permute(1, 2, 0)
        return draws.reshape(*self.flip.shape, *draws.shape[1:]) != self.flip[..., None, None]


def _threshold(logits: Tensor, k: Tensor) -> Tensor:
    """A t for which B = k is likely with c = -t: the root of ``sum sigmoid(logits - t) = k``; cheaper in short rows."""
    if logits.shape[-1] > SHORT_ROW:
        return solve_threshold(logits, k).nan_to_num(0.0, 0.0, 0.0)
    # Midway between the k-th and the (k+1)-th largest: the k largest are likely ones, the others likely zeros.
    end = torch.full_like(logits[..., :1], torch.inf)
    ordered = torch.cat((end, logits.sort(-1, descending=True).values, -end), -1)
    above, below = ordered.gather(-1, torch.stack((k, k + 1), -1)).unbind(-1)
    # If one of the two is infinite or missing, far from the other.
    above, below = above.where(above < torch.inf, below + FAR), below.where(below > -torch.inf, above - FAR)
    return ((above + below) / 2).nan_to_num(0.0, 0.0, 0.0)


def _bound(k: int | Tensor, n: int) -> int:
    """A Python number not below min(k, n - k) of any row, without reading from an accelerator or a vmap."""
    if isinstance(k, int):
        return max(1, min(k, n - k))
    if k.device.type == "cpu" and k.numel() and can_look(k):
        return max(1, int(k.minimum(n - k).max()))
    return max(1, n // 2)


def expand(logits: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
    """Logits in float64 and k as a tensor, expanded to the shape of the batch."""
    size = number_on(logits.device, k).long()
    batch_shape = broadcast_shapes(logits.shape[:-1], size.shape)
    return logits.double().expand(*batch_shape, logits.shape[-1]), size.expand(batch_shape)


def tilt(logits: Tensor, k: Size, kept: Once | None = None, balanced: bool = False) -> Tilted:
    """The :class:`Tilted` of these logits, differentiable in them.

    With ``balanced``, the expected number of ones is already k. In eager code on a CPU the tree contains plain
    numbers, and results get their derivatives from :mod:`khot.kernels.count.kept_tree`.
    """
    if forest_roots.is_fused(logits) or not runs_on_cpu(logits):
        return _planted(logits, k, balanced, ProductTree)
    ends = k if isinstance(k, SizeRange) else (k,)
    if kept is None:
        with torch.no_grad():
            tilted = _kept_tree(logits, balanced, *ends)
    else:
        tilted = kept.made("tree", _kept_tree, logits, balanced, *ends)
    if not has_derivative(logits, torch.is_grad_enabled()):
        return tilted
    z = expand(logits, tilted.k)[0] + tilted.shift[..., None]
    return tilted._replace(z=z, leaf=_leaf(z, tilted.flip))


def _kept_tree(logits: Tensor, balanced: bool, *ends: int | Tensor) -> Tilted:
    return _planted(logits, ends[0] if len(ends) == 1 else SizeRange(*ends), balanced, KeptTree)


def _planted(logits: Tensor, k: Size, balanced: bool, plant: type[ProductTree]) -> Tilted:
    if isinstance(k, SizeRange):
        return _planted_range(logits, k)
    n = logits.shape[-1]
    bound = _bound(k, n)
    logits, size = expand(logits, k)
    shift = torch.zeros_like(logits[..., 0]) if balanced else -_threshold(logits.detach(), size)
    z = logits + shift[..., None]
    flip = 2 * size > n
    leaf = _leaf(z, flip)
    tree = plant(leaf, torch.where(flip, n - size, size).reshape(-1), bound)
    return Tilted(z, shift, size, flip, leaf, tree)


def _planted_range(logits: Tensor, sizes: SizeRange) -> Tilted:
    n = logits.shape[-1]
    logits, low, high = expand_range(logits, sizes)
    shift, size, first, last = centred(logits, low, high)
    z = logits + shift[..., None]
    flip = low + high > n
    leaf = _leaf(z, flip)
    counted = torch.where(flip, n - size, size)
    totals = Totals(
        torch.where(flip, n - last, first).reshape(-1),
        torch.where(flip, n - first, last).reshape(-1),
        torch.where(flip, shift, -shift).reshape(-1),
    )
    tree = KeptTree(leaf, counted.reshape(-1), sizes.bound(n), totals)
    return Tilted(z, shift, size, flip, leaf, tree)


def expand_range(logits: Tensor, sizes: SizeRange) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in float64 and the ends of the ranges as tensors, expanded to the shape of the batch."""
    logits, high = expand(logits, sizes.high)
    logits, low = expand(logits, sizes.low)
    return logits, low, high.expand(low.shape)


def _leaf(z: Tensor, flip: Tensor) -> Tensor:
    minority = (z * (1 - 2 * flip.double())[..., None]).reshape(-1, z.shape[-1]).T.contiguous()
    return torch.sigmoid(torch.stack((-minority, minority)))


def tilted_by_rows(
    function: Callable[[Tilted], Tensors],
    logits: Tensor,
    k: Size,
    kept: Once | None = None,
    balanced: bool = False,
) -> Tensors:
    """``function(tilt(logits, k))``; many rows on a CPU in slabs, because a tree takes 100 times their memory."""
    if forest_roots.is_fused(logits) or logits.numel() <= WHOLE or logits.numel() == logits.shape[-1]:
        return function(tilt(logits, k, kept, balanced))
    ends = k if isinstance(k, SizeRange) else (k,)
    tensors = [end.unsqueeze(-1) for end in ends if isinstance(end, Tensor)]

    def of_rows(logits: Tensor, *ends: Tensor) -> Tensors:
        rows = [end.squeeze(-1) for end in ends]
        size = k if not rows else SizeRange(*rows) if isinstance(k, SizeRange) else rows[0]
        return function(tilt(logits, size, None, balanced))

    return by_rows(of_rows, SLAB, logits, *tensors, most=SLABS)


def single_or_range(low: Tensor, high: Tensor) -> Size:
    """The sizes between both ends, as one tensor if these are equal in all rows."""
    return low if torch.equal(low, high) else SizeRange(low, high)


def bernoulli_count_draw(
    logits: Tensor, low: Tensor, high: Tensor, seed: Tensor, draws: int, dtype: torch.dtype
) -> Tensor:
    """Draws ``(draws, *batch, n)`` of units with logits ``(*batch, n)``, given that low to high of them are ones."""
    generator = torch.Generator(logits.device).manual_seed(int(seed))
    return tilt(logits, single_or_range(low, high)).draw(draws, generator).movedim(-2, 0).to(dtype)
