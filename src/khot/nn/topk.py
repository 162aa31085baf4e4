"""The k largest entries, as a module: a mask, scores times a mask, and tokens chosen by experts."""

from typing import Any

import torch
from torch import Tensor

from khot._validation import check_strided, expanded, is_int, looks_at_contents, tensors_among
from khot.relaxations import sigmoid_topk

from ._masking import Masking, Relaxation, check_axes, checked_size, has_parts, keep_masked


class TopKMask(Masking):
    """The mask of the k largest entries: hard, relaxed, or hard with the gradient of the relaxed one.

    ``k`` and ``softness`` may be assigned at any time. Changing them does not compile a compiled module anew each time:
    the first change does, later ones do not. A call can have its own k, ``module(x, k)``: a number, or a tensor with
    one for each row, of an integer type if the mask is hard.

    Args:
        k: Number of entries; for a relaxed mask the sum, which need not be an integer.
        softness: Third argument of the relaxation; None for the hard mask, which has no gradient.
        relaxation: Relaxed mask, called as ``relaxation(x, k, softness)``.
        dim: Axis of the ground set, or axes that are one ground set together.
        straight_through: Whether the value is hard, and the gradient that of the relaxed mask.
        learn_softness: Whether the softness is a parameter, ``exp(log_softness)``, that starts at ``softness``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or has no meaning without a softness; when it is called, if a row
            has fewer than ``k`` entries above ``-inf``.

    Example:
        >>> TopKMask(2)(torch.tensor([0.3, 2.0, -1.0, 0.9]))
        tensor([0., 1., 0., 1.])
    """

    def __init__(
        self,
        k: float,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        dim: int | tuple[int, ...] = -1,
        straight_through: bool = False,
        learn_softness: bool = False,
    ) -> None:
        super().__init__(softness, relaxation, straight_through, learn_softness)
        check_axes(dim)
        self.k, self.dim = k, dim

    def checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """Also that k is an int where the softness becomes None."""
        value = super().checked(name, value, learned)
        if name == "_softness" and value is None and hasattr(self, "k") and not is_int(self.k):
            raise ValueError(f"`softness` can be None, the hard mask, with an int `k` only, but k={self.k}")
        return value

    def mask(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        """The mask of these scores."""
        return self.mask_of(x, self.number("k") if k is None else k, self.dim)

    def forward(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        return self.mask(x, k)

    def extra_repr(self) -> str:
        return f"k={self.k}, dim={self.dim}{self.shown_softness()}"


class TopK(TopKMask):
    """Keeps the k largest entries and sets the others to 0: the entries times the mask of :class:`TopKMask`.

    Gradients reach the entries that are kept; with a softness, the others as well, through the mask. An entry of
    ``-inf`` is never kept, and gives 0.

    Args:
        k: As of :class:`TopKMask`, like all that follow.
        softness: None for the hard mask.
        relaxation: Relaxed mask.
        dim: Axis, or axes, of the ground set.
        straight_through: Whether a hard mask gets the gradient of the relaxed one.
        learn_softness: Whether the softness is a parameter.

    References:
        [1] Makhzani, Frey (2014), "k-sparse autoencoders", arXiv:1312.5663.

    Example:
        >>> TopK(2)(torch.tensor([0.3, 2.0, 0.1, 0.9]))
        tensor([0.0000, 2.0000, 0.0000, 0.9000])
    """

    def __init__(
        self,
        k: float,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        dim: int | tuple[int, ...] = -1,
        straight_through: bool = False,
        learn_softness: bool = False,
    ) -> None:
        super().__init__(k, softness, relaxation, dim, straight_through, learn_softness)

    def forward(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        k = self.number("k") if k is None else k
        return keep_masked(x, lambda scores: self.mask(scores, k))[0]


class ExpertChoice(TopK):
    """Routing in which every expert takes the tokens that it wants most, so that all have the same load.

    Takes gates ``(..., tokens, experts)`` and keeps in each column the ``capacity`` largest: gates times a mask along
    the tokens. A token may go to several experts, or to none. ``relaxation=sparse_topk`` has zeros and a gradient.
    ``capacity`` and ``softness`` may be assigned at any time; ``module(x, k)`` takes another capacity for this call, a
    number or a tensor ``(..., experts)``.

    Args:
        capacity: Number of tokens for each expert; for a relaxed mask the sum of its weights.
        softness: None for the hard mask.
        relaxation: Relaxed mask, called as ``relaxation(x, k, softness)``.
        straight_through: Whether a hard mask gets the gradient of the relaxed one.
        learn_softness: Whether the softness is a parameter.

    References:
        [1] Zhou et al. (2022), "Mixture-of-experts with expert choice routing", arXiv:2202.09368.

    Example:
        >>> gates = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])  # three tokens, two experts
        >>> ExpertChoice(1)(gates)
        tensor([[0.9000, 0.0000],
                [0.0000, 0.0000],
                [0.0000, 0.7000]])
    """

    def __init__(
        self,
        capacity: float,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        straight_through: bool = False,
        learn_softness: bool = False,
    ) -> None:
        super().__init__(capacity, softness, relaxation, -2, straight_through, learn_softness)

    def checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """``k``, under the name of ``capacity``, or the softness."""
        if name == "k":
            return checked_size("capacity", value, whole=self._softness is None)
        return super().checked(name, value, learned)

    @property
    def capacity(self) -> float:
        """Number of tokens for each expert, which may be assigned at any time."""
        return self.k

    @capacity.setter
    def capacity(self, value: float) -> None:
        self.k = value

    def forward(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        check_strided("x", x)
        if x.dim() < 2:
            raise ValueError(f"`x` must have shape (..., tokens, experts), but got {tuple(x.shape)}")
        capacity = self.number("k") if k is None else k
        if isinstance(capacity, Tensor):
            self._check_each(capacity, x)
        else:
            capacity = self.checked("k", capacity)
            if capacity > x.shape[-2]:
                raise ValueError(
                    f"`capacity` must satisfy 0 <= capacity <= tokens, but got capacity={capacity} with {x.shape[-2]} "
                    f"tokens (`x` of shape {tuple(x.shape)}); a batch with fewer tokens takes one of its own, "
                    f"module(x, {x.shape[-2]})"
                )
        if not has_parts(x) and looks_at_contents(*tensors_among(x, capacity)):
            _check_open_tokens(x, capacity)
        return super().forward(x, capacity)

    def _check_each(self, capacity: Tensor, x: Tensor) -> None:
        """One capacity for each expert, of an integer type where the mask is hard."""
        if self.softness is None and (capacity.is_floating_point() or capacity.dtype == torch.bool):
            raise TypeError(f"`capacity` must be an int or an integer tensor for a hard mask, but got {capacity.dtype}")
        expanded("capacity", capacity, x.shape[:-2] + x.shape[-1:])

    def extra_repr(self) -> str:
        return f"capacity={self.k}{self.shown_softness()}"


def _check_open_tokens(x: Tensor, capacity: float | Tensor) -> None:
    """Every expert has as many tokens above ``-inf`` as it shall take; NaN is for later checks to find."""
    tokens = (x != -torch.inf).sum(-2)
    capacity = torch.as_tensor(capacity, device=x.device).expand(tokens.shape)
    wrong = ~((capacity >= 0) & (capacity <= tokens))
    if not bool(wrong.any()):
        return
    size, fewest = capacity[wrong][0].item(), tokens[wrong][0].item()
    advice = ""
    if size > fewest:
        own = f"(x > -torch.inf).sum(-2).clamp(max={size:g})"
        advice = f"; experts with fewer tokens take a capacity each, as in module(x, {own})"
    raise ValueError(
        f"`capacity` must satisfy 0 <= capacity <= tokens, but got capacity={size:g} for an expert with {fewest} of "
        f"{x.shape[-2]} tokens above -inf{advice}"
    )
