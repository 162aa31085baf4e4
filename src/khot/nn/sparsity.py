"""Parametrisations of weights that keep the largest: n of every m, or a share of a whole weight."""

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from khot._distributed.boundary import of_rows
from khot._module import Module
from khot._validation import (
    check_flag,
    check_floating,
    check_scores,
    check_strided,
    checked_count,
    checked_int,
    checked_positive,
    checked_share,
)
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import sigmoid_topk, sparse_topk_magnitude, topk_mask
from khot.relaxations.sparse import check_exponent

from ._keeping import keep_largest
from ._masking import Masking, Relaxation, check_axes, checked_size

LARGEST_TILE = 4  # larger tiles have thousands of patterns


class Pattern(Module):
    """A parametrisation whose pattern, the positions of the weights that it keeps, can be fixed.

    The pattern is a buffer of bools, saved with the state. Loading a state with a pattern fixes it.
    """

    pattern: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pattern", None)
        self._is_freezing = False

    def reset_parameters(self) -> None:
        """Gives the parameters their first values; a fixed pattern is found again at the next call."""
        super().reset_parameters()
        if self.pattern is not None:
            self.freeze()

    def freeze(self, weight: Tensor | None = None) -> None:
        """Fixes the pattern: from now on, the same weights are kept whatever their values, and only they are trained.

        Args:
            weight: Dense weight that determines the pattern; by default the weight of the next call. Until then the
                state has no pattern.
        """
        self._is_freezing, self.pattern = weight is None, None
        if weight is not None:
            pattern = self._pattern_of(weight.detach())
            with torch.inference_mode(False):  # training cannot use a buffer that was made in inference mode
                self.pattern = pattern.clone()

    def unfreeze(self) -> None:
        """Lets every call find the pattern again, as before :meth:`freeze`."""
        self._is_freezing, self.pattern = False, None

    def _pattern_of(self, weight: Tensor) -> Tensor:
        """Which weights are kept, as bools."""
        raise NotImplementedError

    def _within_pattern(self, weight: Tensor) -> Tensor | None:
        """The weights of the fixed pattern, if there is one by now."""
        if self._is_freezing:
            self.freeze(weight)
        if self.pattern is None:
            return None
        if self.pattern.shape != weight.shape:
            raise ValueError(
                f"`weight` must have the shape {tuple(self.pattern.shape)} of the fixed pattern, but got "
                f"{tuple(weight.shape)}"
            )
        if self.pattern.device != weight.device:  # after loading a state from another device
            with torch.inference_mode(False):
                self.pattern = self.pattern.to(weight.device)
        return torch.where(self.pattern, weight, torch.zeros((), dtype=weight.dtype, device=weight.device))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The dense weight to start from: the one that is assigned."""
        return weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}pattern")
        if saved is not None and (self.pattern is None or self.pattern.shape != saved.shape):
            with torch.inference_mode(False):
                self._is_freezing, self.pattern = False, torch.empty_like(saved)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _shown_pattern(self) -> str:
        """The part of ``extra_repr`` about the pattern."""
        return ", frozen" if self.pattern is not None or self._is_freezing else ""


class NMSparsity(Masking, Pattern):
    """Keeps exactly n of every m neighbours along an axis: a parametrisation of weights.

    ``torch.nn.utils.parametrize.register_parametrization(layer, "weight", NMSparsity(2, 4))`` makes the weight of a
    layer 2:4 sparse at every use; the dense weight behind it is trained. Magnitudes or learned scores decide which
    weights are kept. Without a softness, a weight that is not kept gets no gradient; with one, and
    ``straight_through``, it gets that of the relaxed mask. A relaxed mask (``straight_through=False``) is soft in
    training and has its exact pattern only in evaluation. :meth:`freeze` fixes the pattern, to train with a pattern
    found once.

    Accelerators multiply quickly by weights that are sparse along the axis that is summed over: the last one of a
    linear layer, and ``dim=1``, the input channels, of a convolution.

    With ``transposable``, every m x m tile has n of m along both of its axes, so that the transposed weight of the
    backward pass is as quick [2]. The tile keeps the largest possible sum of magnitudes, found among all of its
    patterns: there are 90 for 2:4.

    Args:
        n: Number of weights to keep in every group.
        m: Length of a group, which must divide the length of the axis.
        softness, relaxation, straight_through, learn_softness: See :class:`TopKMask`.
        scores: Initial scores of the shape of the weight, which are learned and decide in place of the magnitudes; they
            need a softness.
        dim: Axis of the groups.
        transposable: Whether tiles are sparse along both axes, ``dim`` and the first other one. It needs the hard mask,
            and m of at most 4.

    References:
        [1] Mishra et al. (2021), "Accelerating sparse deep neural networks", arXiv:2104.08378.
        [2] Hubara et al. (2021), "Accelerated sparse neural training: a provable and efficient method to find N:M
            transposable masks", arXiv:2102.08124.

    Example:
        >>> NMSparsity(2, 4)(torch.tensor([[0.3, -2.0, 1.0, 0.9, 4.0, 3.0, 2.0, 1.0]]))
        tensor([[ 0., -2.,  1.,  0.,  4.,  3.,  0.,  0.]])
    """

    _numbers = ("n", "_softness")
    n: int
    scores: Parameter | None

    def __init__(
        self,
        n: int = 2,
        m: int = 4,
        *,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        straight_through: bool = False,
        learn_softness: bool = False,
        scores: Tensor | None = None,
        dim: int = -1,
        transposable: bool = False,
    ) -> None:
        super().__init__(softness, relaxation, straight_through, learn_softness)
        check_flag("transposable", transposable)
        self.dim, self.transposable = checked_int("dim", dim), bool(transposable)
        self.m = checked_count("m", m)
        if transposable and m > LARGEST_TILE:
            raise ValueError(f"`m` must be at most {LARGEST_TILE} for a transposable pattern, but got {m}")
        self.n = n
        if scores is not None:
            check_floating("scores", scores)
        self.register_parameter("scores", None if scores is None else Parameter(scores.detach().clone()))
        if scores is not None:
            self._start["scores"] = scores.detach().clone()
        self._softness = self._checked("_softness", softness)

    def _checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """The checked ``n``, or the checked softness, which learned scores need."""
        if name == "n":
            n = checked_size("n", value, whole=True)
            if n > self.m:
                raise ValueError(f"`n` must satisfy 0 <= n <= m, but got n={n} with m={self.m}")
            self._tiles = _tile_patterns(n, self.m) if self.transposable else ()  # found here, outside of graphs
            return n
        if value is not None and getattr(self, "transposable", False):
            raise ValueError("`transposable` patterns are hard: they need softness=None")
        if value is None and getattr(self, "scores", None) is not None:
            raise ValueError("`scores` need a `softness`: a hard mask gives them no gradient")
        return super()._checked(name, value, learned)

    def forward(self, weight: Tensor) -> Tensor:
        self._check_weight(weight)
        kept = self._within_pattern(weight)
        if kept is not None:
            return kept
        is_hard = not (self.training or self.straight_through) or self.softness is None
        if is_hard and self.scores is None and not self.transposable:
            found = keep_largest(self._groups(weight), self._number("n"), -1, "magnitude")
            if found is not None:
                return found.values.reshape(self._moved_shape(weight)).movedim(-1, self.dim)
        wide = weight.to(compute_dtype(weight))
        return (wide * self._mask(wide, hard=is_hard)).to(weight.dtype)

    def _pattern_of(self, weight: Tensor) -> Tensor:
        """Which weights are kept, as bools."""
        self._check_weight(weight)
        return self._mask(weight.to(compute_dtype(weight)), hard=True) != 0

    def _mask(self, wide: Tensor, hard: bool) -> Tensor:
        if self.transposable:
            return _transposable_mask(wide.detach(), self._tiles, self.m, dim=(self.dim, self._across(wide)))
        scores = wide.abs() if self.scores is None else self.scores.to(wide.dtype)
        mask = self._mask_of(self._groups(scores), self._number("n"), -1, hard=hard)
        return mask.reshape(self._moved_shape(scores)).movedim(-1, self.dim)

    def _groups(self, weight: Tensor) -> Tensor:
        return torch.unflatten(weight.movedim(self.dim, -1), -1, (-1, self.m))

    def _across(self, weight: Tensor) -> int:
        """The second axis of tiles."""
        return 1 if self.dim in (0, -weight.dim()) else 0

    def _moved_shape(self, weight: Tensor) -> torch.Size:
        return weight.movedim(self.dim, -1).shape

    def _check_weight(self, weight: Tensor) -> None:
        check_strided("weight", weight)
        if not -weight.dim() <= self.dim < weight.dim():
            raise ValueError(f"`dim` must be an axis of the weight, but got dim={self.dim} for {tuple(weight.shape)}")
        if self.transposable and (weight.dim() < 2 or weight.shape[self._across(weight)] % self.m):
            raise ValueError(
                f"`transposable` needs a second axis that m={self.m} divides, but got shape {tuple(weight.shape)}"
            )
        if weight.shape[self.dim] % self.m:
            axis = "the last axis" if self.dim == -1 else f"axis {self.dim}"
            raise ValueError(f"`m` must divide {axis}, but got m={self.m} for a weight of shape {tuple(weight.shape)}")
        if self.scores is not None and self.scores.shape != weight.shape:
            raise ValueError(
                f"`scores` must have the shape {tuple(weight.shape)} of the weight, but have {tuple(self.scores.shape)}"
            )

    def extra_repr(self) -> str:
        scores = ", scores" if self.scores is not None else ""
        dim = "" if self.dim == -1 else f", dim={self.dim}"
        dim += ", transposable=True" if self.transposable else ""
        return f"n={self.n}, m={self.m}{self._shown_softness()}{scores}{dim}{self._shown_pattern()}"


@functools.cache
def _tile_patterns(n: int, m: int) -> tuple[tuple[float, ...], ...]:
    """All m x m matrices of zeros and ones with n ones in every row and column, flattened, in a fixed order."""
    rows = [[float(i in ones) for i in range(m)] for ones in itertools.combinations(range(m), n)]
    tiles = itertools.product(rows, repeat=m)
    of_columns = (tile for tile in tiles if all(sum(column) == n for column in zip(*tile, strict=True)))
    return tuple(tuple(itertools.chain(*tile)) for tile in of_columns)


@of_rows()
def _transposable_mask(x: Tensor, patterns: tuple[tuple[float, ...], ...], m: int, *, dim: tuple[int, int]) -> Tensor:
    """The mask of the best pattern of each m x m tile of the two axes."""
    choices = torch.tensor(patterns, dtype=x.dtype, device=x.device)
    moved = x.abs().movedim(dim, (-1, -2))
    tiles = torch.unflatten(torch.unflatten(moved, -1, (-1, m)), -3, (-1, m)).movedim(-3, -2).flatten(-2)
    scaled = tiles / tiles.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)  # sums that cannot overflow
    best = torch.unflatten(choices[(scaled @ choices.mT).argmax(-1)], -1, (m, m)).movedim(-2, -3)
    return best.reshape(moved.shape).movedim((-1, -2), dim).contiguous()


class MagnitudeSparsity(Pattern):
    r"""Keeps the entries of a weight with the largest absolute values: a parametrisation that prunes in training.

    ``torch.nn.utils.parametrize.register_parametrization(layer, "weight", MagnitudeSparsity(0.1))`` keeps a tenth of
    the weights of a layer at every use; the dense weights behind them are trained. Without a strength, a weight that is
    not kept gets no gradient. With one, training uses the relaxed :func:`~khot.sparse_topk_magnitude` of the whole
    weight, in which weights near the threshold shrink rather than jump [1]; evaluation keeps their exact share.

    With ``dim``, every slice keeps its own share: ``dim=-1`` keeps equally many weights for each output of a linear
    layer, and ``dim=(1, 2, 3)`` for each output channel of a convolution.

    ``density`` and ``strength`` may be assigned at any time: :class:`Anneal` can increase sparsity gradually.
    :meth:`freeze` fixes the pattern.

    Args:
        density: Share of the weights to keep, in [0, 1]; their number is rounded.
        strength: Strength of the regulariser of the relaxed map; None for the hard one.
        p: Exponent of the regulariser, ``1 < p <= 2``.
        dim: Axis or axes along which the weights compete; by default all.

    Attributes:
        density: Share of the weights to keep. It may be assigned at any time.
        strength: Strength of the regulariser, or None. It may be assigned at any time.

    References:
        [1] Sander et al. (2023), "Fast, differentiable and sparse top-k: a convex analysis perspective", section 5.1.

    Example:
        >>> MagnitudeSparsity(0.5)(torch.tensor([[0.3, -2.0], [1.0, 0.2]]))
        tensor([[ 0., -2.],
                [ 1.,  0.]])
    """

    _numbers = ("density", "strength")
    density: float
    strength: float | None

    def __init__(
        self, density: float, *, strength: float | None = None, p: float = 2.0, dim: int | tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        check_exponent(p)
        if dim is not None:
            check_axes(dim)
            dim = tuple(map(int, dim if isinstance(dim, tuple) else (dim,)))
        self.density, self.strength, self.p, self.dim = density, strength, p, dim

    def _checked(self, name: str, value: Any) -> Any:
        """The checked density or strength."""
        if name == "density":
            checked_share("density", value)
            return float(value)
        return None if value is None else checked_positive("strength", value, torch.Size())

    def forward(self, weight: Tensor) -> Tensor:
        check_strided("weight", weight)
        check_scores(weight, self._axes(weight), joint=True)
        kept = self._within_pattern(weight)
        if kept is not None:
            return kept
        strength = self._number("strength")
        if strength is None:
            found = keep_largest(weight, self._size(weight), self._axes(weight), "magnitude")
            if found is not None:
                return found.values
        wide = weight.to(compute_dtype(weight))
        if strength is not None:
            wide = sparse_topk_magnitude(wide, self._size(weight), strength, self.p, dim=self._axes(weight))
        if strength is None or not self.training:
            wide = wide * self._pattern_of(weight.detach())
        return wide.to(weight.dtype)

    def _pattern_of(self, weight: Tensor) -> Tensor:
        """Which weights are kept, as bools."""
        magnitudes = weight.to(compute_dtype(weight)).abs()
        return topk_mask(magnitudes, self._size(weight), dim=self._axes(weight)) != 0

    def _axes(self, weight: Tensor) -> tuple[int, ...]:
        return tuple(range(weight.dim())) if self.dim is None else self.dim

    def _size(self, weight: Tensor) -> int | Tensor:
        size: Any = self._number("density") * math.prod([weight.shape[axis] for axis in self._axes(weight)])
        return size.round().long() if isinstance(size, Tensor) else round(size)

    def extra_repr(self) -> str:
        relaxed = "" if self.strength is None else f", strength={self.strength:.4g}, p={self.p}"
        dim = "" if self.dim is None else f", dim={self.dim}"
        return f"density={self.density:.4g}{relaxed}{dim}{self._shown_pattern()}"
