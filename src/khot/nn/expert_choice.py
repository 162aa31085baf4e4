"""A router in which every expert takes the tokens that it wants most."""

from typing import Any

import torch
from torch import Tensor

from khot._contents import looks_at_contents
from khot._validation import check_scores, expanded, in_wide_dtype
from khot.kernels.exact.rows import number_on
from khot.relaxations import sigmoid_topk

from ._masking import Relaxation, at_most, checked_size, has_parts
from .topk import Selection, TopK

NUMBER_OF_EXPERTS = "; the number of experts is no argument, but the last axis of the logits"


class ExpertChoice(TopK):
    """Routing in which every expert takes the tokens that it wants most, so that all experts have the same load.

    Takes gates ``(..., tokens, experts)`` and keeps the ``capacity`` largest in each column: the result is the gates
    times a mask along the tokens. A token may go to several experts, or to none. ``relaxation=sparse_topk`` has zeros
    as well as a gradient. If there are fewer tokens than its capacity, an expert takes all: a last batch may be
    shorter, and ``-inf`` excludes tokens such as padding. ``capacity`` and ``softness`` may be assigned at any time.
    ``module(x, k)`` uses another capacity for this call, a number or a tensor ``(..., experts)``. :meth:`select`
    returns only the gates and indices of the selected tokens, ``(..., capacity, experts)``.

    Args:
        capacity: Number of tokens per expert; for a relaxed mask the sum of its weights.
        softness, relaxation, straight_through, learn_softness: See :class:`TopKMask`.

    References:
        [1] Zhou et al. (2022), "Mixture-of-experts with expert choice routing", arXiv:2202.09368.

    Example:
        >>> gates = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])  # three tokens, two experts
        >>> ExpertChoice(1)(gates)
        tensor([[0.9000, 0.0000],
                [0.0000, 0.0000],
                [0.0000, 0.7000]])
    """

    _takes_excluded = True
    _what_others_take = NUMBER_OF_EXPERTS

    def __init__(
        self,
        capacity: float,
        *,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        straight_through: bool = False,
        learn_softness: bool = False,
    ) -> None:
        super().__init__(
            capacity,
            softness=softness,
            relaxation=relaxation,
            dim=-2,
            straight_through=straight_through,
            learn_softness=learn_softness,
        )

    def _checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """The checked ``k``, under the name ``capacity``, or the checked softness."""
        if name == "k":
            return checked_size("capacity", value, whole=self._softness is None)
        return super()._checked(name, value, learned)

    @property
    def capacity(self) -> float:
        """Number of tokens per expert, which may be assigned at any time."""
        return self.k

    @capacity.setter
    def capacity(self, value: float) -> None:
        self.k = value

    def forward(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        return super().forward(x, self._capacity_for(x, self._number("k") if k is None else k))

    def select(self, x: Tensor, k: int | None = None) -> Selection:
        """Gates and indices of the tokens of each expert, ``(..., capacity, experts)``, as in :meth:`TopK.select`.

        Args:
            x: Gates ``(..., tokens, experts)``.
            k: Capacity for this call, an int; by default the module's.
        """
        check_gates(x)
        capacity = self._checked("k", self.k if k is None else k)
        return super().select(x, min(capacity, x.shape[-2]))

    def _capacity_for(self, x: Tensor, capacity: float | Tensor) -> float | Tensor:
        """The capacity, limited to the number of tokens that each expert can take."""
        check_gates(x)
        tokens: Any = x.shape[-2]
        looks = not has_parts(x) and looks_at_contents(x, capacity)
        if isinstance(capacity, Tensor):
            if self.softness is None and (capacity.is_floating_point() or capacity.dtype == torch.bool):
                raise TypeError(
                    f"`capacity` must be an int or an integer tensor for a hard mask, but got {capacity.dtype}"
                )
            expanded("capacity", capacity, x.shape[:-2] + x.shape[-1:])
            capacity = in_wide_dtype(capacity)
            if looks and bool((capacity < 0).any()):
                raise ValueError(f"`capacity` must be at least 0, but got {capacity.min().item():g}")
        else:
            capacity = at_most(self._checked("k", capacity), tokens, x.device)
        if has_parts(x) or (self.softness is None and not looks and not isinstance(capacity, Tensor)):
            return capacity  # a hard mask leaves excluded tokens out by itself; parts cannot tell how many there are
        if not looks or (x.numel() and not x.detach().amin() > -torch.inf):
            tokens = (x != -torch.inf).sum(-2)
        if isinstance(tokens, Tensor):
            return torch.minimum(number_on(x.device, capacity).expand(tokens.shape), tokens)
        return capacity.clamp(max=tokens) if isinstance(capacity, Tensor) else capacity

    def extra_repr(self) -> str:
        return f"capacity={self.k}{self._shown_softness()}"


def check_gates(x: Any) -> None:
    """Checks for gates or logits with an axis of tokens."""
    check_scores(x, -1)
    if x.dim() < 2:
        raise ValueError(f"`x` must have shape (..., tokens, experts), but got {tuple(x.shape)}")
