"""The k largest entries, as modules: a mask, entries times a mask, and the entries themselves with their indices."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from khot._distributed.placements import is_dtensor
from khot._torch_internals import outside_selective_checkpoints
from khot._validation import DIM_IS_A_KEYWORD, check_flag, check_scores, check_strided, checked_int, is_int
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import sigmoid_topk
from khot.relaxations.axes import as_axes, as_rows

from ._keeping import keep_largest
from ._masking import Masking, Relaxation, check_axes, keep_masked, places_of_largest
from ._running_state import is_first_pass, number_of_rows
from .idle_units import DEAD_AFTER, CountsIdleUnits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Selection(NamedTuple):
    """The k selected entries, as :meth:`TopK.select` returns them.

    Args:
        values: The entries, with their gradient; for :class:`GatherTopK` the tokens.
        indices: Their positions in the ground set, int64, in increasing order.
    """

    values: Tensor
    indices: Tensor


class TopKMask(CountsIdleUnits):
    """The mask of the k largest entries: hard, relaxed, or hard with the gradient of the relaxed one.

    ``k`` and ``softness`` may be assigned at any time, as :class:`Anneal` does. A call can have its own k,
    ``module(x, k)``: a number, or a tensor with one for each row, of an integer type if the mask is hard.

    With ``n``, the module counts for how many training rows each unit has not been kept; :meth:`auxiliary_loss` revives
    dead units [1]. Rows of ``-inf``, such as padding, and the second pass of an activation checkpoint do not count.

    Args:
        k: Number of entries; for a relaxed mask the sum, which need not be an integer.
        softness: Third argument of the relaxation; None for the hard mask, which has no gradient.
        relaxation: Relaxed mask, called as ``relaxation(x, k, softness)``.
        dim: Axis of the ground set, or axes that together form one ground set.
        straight_through: Whether a hard mask gets the gradient of the relaxed one.
        learn_softness: Whether the softness is a parameter, ``exp(log_softness)``, that starts at ``softness``.
        by: "value" for the largest entries, "magnitude" for the largest absolute values.
        n: Number of units, the length of the last axis, for :meth:`auxiliary_loss`.
        dead_after: Number of rows (tokens, in a language model) without being kept after which a unit is dead.
        group: Processes that share the counts, ``torch.distributed.group.WORLD`` for all: a unit that any of them keeps
            is not idle. All must call the module equally often. Copies and pickles have no group.

    Attributes:
        k: Number of entries. It may be assigned at any time.

    Raises:
        ValueError: When it is called, if a row has fewer than ``k`` entries above ``-inf``.

    References:
        [1] Gao et al. (2024), "Scaling and evaluating sparse autoencoders", arXiv:2406.04093.

    Example:
        >>> TopKMask(2)(torch.tensor([0.3, 2.0, -1.0, 0.9]))
        tensor([0., 1., 0., 1.])
    """

    _what_others_take = DIM_IS_A_KEYWORD

    def __init__(
        self,
        k: float,
        *,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        dim: int | tuple[int, ...] = -1,
        straight_through: bool = False,
        learn_softness: bool = False,
        by: str = "value",
        n: int | None = None,
        dead_after: int = DEAD_AFTER,
        group: "ProcessGroup | None" = None,
    ) -> None:
        super().__init__(softness, relaxation, straight_through, learn_softness, by)
        check_axes(dim)
        self.k, self.dim = k, dim
        self._set_up_counts(n, dead_after, group)
        if n is not None and dim != -1:
            raise ValueError(f"`n` counts units along the last axis, which needs dim=-1, but got dim={dim}")

    def _checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """The checked value; also checks that k is an int when the softness becomes None."""
        value = super()._checked(name, value, learned)
        if name == "_softness" and value is None and hasattr(self, "k") and not is_int(self.k):
            raise ValueError(f"`softness` can be None, which gives the hard mask, only with an int `k`, but k={self.k}")
        return value

    def mask(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        """The mask of these scores."""
        return self._mask_of(x, self._number("k") if k is None else k, self.dim)

    def forward(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        k = self._number("k") if k is None else k
        self._check_units(x, self.dim)
        mask = self.mask(x, k)
        self._count(x, mask, k)
        return mask

    def _count(self, x: Tensor, mask: Tensor, k: float | Tensor) -> None:
        """Counts this call in training."""
        if not (self.training and self.idle is not None and is_first_pass()):
            return
        with outside_selective_checkpoints(), torch.no_grad():
            x = x.detach()
            if self.softness is not None and not self.straight_through:  # all entries of a relaxed mask may be positive
                whole = k.detach().round().long() if isinstance(k, Tensor) else round(k)
                mask = self._mask_of(x, whole, -1, hard=True)
            was_kept = ((mask != 0) & (x != 0)).reshape(-1, x.shape[-1])
            if is_dtensor(was_kept):
                counts: Any = was_kept.sum(0)
                of_units = counts.full_tensor() > 0
            else:
                of_units = was_kept.any(0)
            self._count_idle(*self._over_group(of_units, number_of_rows(x)))

    def extra_repr(self) -> str:
        return f"k={self.k}, dim={self.dim}{self._shown_softness()}{self._shown_units()}"


class TopK(TopKMask):
    """Keeps the k largest entries and sets the others to 0: the entries times the mask of :class:`TopKMask`.

    Ties go to the earlier entries, on every device. Gradients reach the entries that are kept and, with a softness, the
    others as well, through the mask. An entry of ``-inf`` is never kept and gives 0. :meth:`select` returns only the k
    entries and their indices. Errors are those of :class:`TopKMask`.

    Args:
        k: Number of entries; for a relaxed mask the sum, which need not be an integer.
        softness: Third argument of the relaxation; None for the hard mask.
        relaxation: Relaxed mask, called as ``relaxation(x, k, softness)``.
        dim: Axis of the ground set, or axes that together form one ground set.
        straight_through: Whether a hard mask gets the gradient of the relaxed one.
        learn_softness: Whether the softness is a parameter, ``exp(log_softness)``, that starts at ``softness``.
        by: "value" for the largest entries, "magnitude" for the entries of largest absolute value, with their signs.
        n: Number of units, for :meth:`auxiliary_loss`.
        dead_after: Number of rows without being kept after which a unit is dead.
        group: Processes that share the counts.

    Attributes:
        k: Number of entries. It may be assigned at any time.

    References:
        [1] Makhzani, Frey (2014), "k-sparse autoencoders", arXiv:1312.5663.

    Example:
        >>> TopK(2)(torch.tensor([0.3, 2.0, 0.1, 0.9]))
        tensor([0.0000, 2.0000, 0.0000, 0.9000])
        >>> TopK(2).select(torch.tensor([0.3, 2.0, 0.1, 0.9]))
        Selection(values=tensor([2.0000, 0.9000]), indices=tensor([1, 3]))
    """

    _takes_excluded = False  # whether a selection may be filled up with entries excluded by ``-inf``

    def forward(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        k = self._number("k") if k is None else k
        self._check_units(x, self.dim)
        kept = keep_largest(x, k, self.dim, self.by) if self._softness is None else None
        y, mask = kept[:2] if kept else keep_masked(x, lambda entries: self.mask(entries, k))
        self._count(x, mask, k)
        return y

    def select(self, x: Tensor, k: int | None = None) -> Selection:
        """The k largest entries as values and indices, without the zeros.

        If ``softness`` is set, values are multiplied by the mask (or by 1 for a straight-through mask), so that the
        other entries get gradients, too.

        Args:
            x: Entries, as for the module.
            k: How many to select, an int; by default the module's ``k``.

        Returns:
            Values and indices with k entries along ``dim``, in increasing order of the indices. Several axes become
            one, in row-major order, at the end. If rows have fewer than k entries above ``-inf`` and contents cannot be
            read, the remaining values are 0.
        """
        check_scores(x, self.dim, joint=True)
        k = checked_int("k", self.k if k is None else k, "an int for a selection, since all rows have as many entries")
        rows = as_rows(x, self.dim)
        indices = places_of_largest(self._scores_of(rows.detach()), k, may_exclude=self._takes_excluded)
        values = rows.gather(-1, indices)
        values = values.masked_fill(values == -torch.inf, 0)
        if self.softness is not None:
            mask = self._mask_of(rows.to(compute_dtype(rows)), k, -1)
            values = (values * mask.gather(-1, indices)).to(x.dtype)
        if isinstance(self.dim, tuple):
            return Selection(values, indices)
        return Selection(as_axes(values, x, self.dim), as_axes(indices, x, self.dim))


class GatherTopK(Masking):
    r"""Selects the k tokens with the highest scores from a sequence, such as patches of an image or tokens of a text.

    It is called with scores ``(..., n)`` and tokens ``(..., n, d)``. With a softness, the tokens are multiplied by
    weights that are 1 and have the gradient of the relaxed mask (straight-through), so that the scores are learned;
    without one, the scores get no gradient.

    With ``rest``, one more token follows the k: the mean of the others, weighted by the softmax of their scores [2],

    .. math:: \sum_{i \notin S} w_i t_i, \quad w_i = e^{s_i} / {\textstyle\sum}_{j \notin S} e^{s_j}.

    Scores that are logarithms of attention give weights in proportion to attention. The weights have their own gradient
    in the scores, without a softness, too. If no other score is above ``-inf``, this token is 0.

    Args:
        k: Number of tokens. It may be assigned at any time.
        softness, relaxation, learn_softness: See :class:`TopKMask`; without a softness the scores get no gradient.
        rest: Whether to append the mean of the other tokens.

    Attributes:
        k: Number of tokens. It may be assigned at any time.

    Raises:
        ValueError: When it is called, if a row has fewer than ``k`` scores above ``-inf``.

    References:
        [1] Cordonnier et al. (2021), "Differentiable patch selection for image recognition", arXiv:2104.03059.
        [2] Liang et al. (2022), "Not all patches are what you need: expediting vision transformers via token
            reorganizations", arXiv:2202.07800, which does not divide by the sum.

    Example:
        >>> tokens = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
        >>> GatherTopK(2)(torch.tensor([0.9, 0.1, 0.5]), tokens)
        Selection(values=tensor([[1., 1.],
            [3., 3.]]), indices=tensor([0, 2]))
    """

    k: int

    def __init__(
        self,
        k: int,
        *,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        learn_softness: bool = False,
        rest: bool = False,
    ) -> None:
        super().__init__(softness, relaxation, softness is not None, learn_softness)
        check_flag("rest", rest)
        self.k, self.rest = k, bool(rest)

    def _checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """The checked ``k``, an int whatever the softness, or the checked softness."""
        if name == "k":
            k = checked_int("k", value)
            if k < 0:
                raise ValueError(f"`k` must be at least 0, but got {value}")
            return k
        if value is not None and not self.straight_through:
            raise ValueError("`softness` cannot be assigned to a module without one: construct it with a softness")
        return super()._checked(name, value, learned)

    def forward(self, scores: Tensor, tokens: Tensor, k: int | None = None) -> Selection:
        check_scores(scores, -1)
        check_strided("tokens", tokens)
        if tokens.shape[:-1] != scores.shape:
            wanted = ", ".join(map(str, (*scores.shape, "d")))
            raise ValueError(f"`tokens` must have shape ({wanted}), as scores do, but got {tuple(tokens.shape)}")
        k = checked_int("k", self.k if k is None else k)
        indices = places_of_largest(scores.detach(), k)
        values = tokens.gather(-2, indices.unsqueeze(-1).expand(*indices.shape, tokens.shape[-1]))
        if self.softness is not None:
            weights = self._mask_of(scores.to(compute_dtype(scores)), k, -1).gather(-1, indices).unsqueeze(-1)
            values = (values * weights).to(tokens.dtype)
        if self.rest:
            values = torch.cat((values, _mean_of_others(scores, tokens, indices)), -2)
        return Selection(values, indices)

    def extra_repr(self) -> str:
        return f"k={self.k}{self._shown_softness()}" + (", rest=True" if self.rest else "")


def _mean_of_others(scores: Tensor, tokens: Tensor, indices: Tensor) -> Tensor:
    """The mean (..., 1, d) of the tokens that are not among these, weighted by the softmax of their scores."""
    dtype = torch.promote_types(compute_dtype(scores), compute_dtype(tokens))
    others = scores.to(dtype).scatter(-1, indices, -torch.inf)
    is_empty = (others == -torch.inf).all(-1, keepdim=True)
    weights = others.masked_fill(is_empty, 0).softmax(-1).masked_fill(is_empty, 0)
    return (weights.unsqueeze(-2) @ tokens.to(dtype)).to(tokens.dtype)
