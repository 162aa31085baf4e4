"""Routers of mixtures of experts: experts that choose tokens, and tokens that choose experts."""

import math
from typing import Any

import torch
from torch import Tensor

from khot._contents import looks_at_contents
from khot._host import has_float64
from khot._torch_internals import after_backward, is_wrapped
from khot._validation import (
    check_scores,
    check_strided,
    checked_int,
    checked_positive,
    expanded,
    in_wide_dtype,
    tensors_among,
)
from khot.kernels.exact.rows import compute_dtype, number_on
from khot.relaxations import sigmoid_topk, topk_mask

from ._keeping import keep_largest
from ._masking import Masking, Relaxation, at_most, checked_size, has_parts, places_of_largest
from ._running_state import is_first_pass
from .topk import Selection, TopK

_Call = tuple[Tensor, Tensor, bool]  # logits, mask, and whether a gradient is recorded
NUMBER_OF_EXPERTS = "; the number of experts is no argument, since the logits have it"


class ExpertChoice(TopK):
    """Routing in which every expert takes the tokens that it wants most, so that all experts have the same load.

    Takes gates ``(..., tokens, experts)`` and keeps the ``capacity`` largest in each column: the result is the gates
    times a mask along the tokens. A token may go to several experts, or to none. ``relaxation=sparse_topk`` has zeros
    and a gradient. If there are fewer tokens than its capacity, an expert takes all: a last batch may be shorter, and
    ``-inf`` excludes tokens such as padding. ``capacity`` and ``softness`` may be assigned at any time.
    ``module(x, k)`` uses another capacity for this call, a number or a tensor ``(..., experts)``. :meth:`select`
    returns only the gates and indices of the selected tokens, ``(..., capacity, experts)``.

    Args:
        capacity: Number of tokens per expert; for a relaxed mask the sum of its weights.
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
            k: Capacity for this call, an int; by default that of the module.
        """
        _check_gates(x)
        capacity = self._checked("k", self.k if k is None else k)
        return super().select(x, min(capacity, x.shape[-2]))

    def _capacity_for(self, x: Tensor, capacity: float | Tensor) -> float | Tensor:
        """The capacity, limited to the number of tokens that each expert can take."""
        _check_gates(x)
        check_scores(x, -2)
        tokens: Any = x.shape[-2]
        looks = not has_parts(x) and looks_at_contents(*tensors_among(x, capacity))
        if isinstance(capacity, Tensor):
            self._check_each(capacity, x)
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

    def _check_each(self, capacity: Tensor, x: Tensor) -> None:
        """Checks one capacity for each expert, of an integer type if the mask is hard."""
        if self.softness is None and (capacity.is_floating_point() or capacity.dtype == torch.bool):
            raise TypeError(f"`capacity` must be an int or an integer tensor for a hard mask, but got {capacity.dtype}")
        expanded("capacity", capacity, x.shape[:-2] + x.shape[-1:])

    def extra_repr(self) -> str:
        return f"capacity={self.k}{self._shown_softness()}"


def _check_gates(x: Any) -> None:
    check_strided("x", x)
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"`x` must have shape (..., tokens, experts), but got {got}")


class TokenChoice(Masking):
    r"""Routing in which every token takes the k experts that suit it best.

    Takes logits ``(..., tokens, experts)`` and returns the weights of the experts, 0 for those not chosen: the softmax
    of the logits times a mask m, renormalised over the chosen experts,

    .. math:: w_e = m_e e^{x_e} / {\textstyle\sum_j} m_j e^{x_j}.

    :meth:`select` returns only the k weights and experts. :meth:`balance_loss` and :meth:`z_loss` refer to the last
    call in training, and leave out tokens such as padding whose logits are all ``-inf``; these need k = 0, which gives
    zeros. With a ``capacity``, every expert keeps at most that many tokens, those with the largest probabilities, and
    weights are renormalised over the experts that a token has left; a token without any gets 0. ``k``, ``capacity``
    and ``softness`` may be assigned at any time. ``module(x, k)`` uses another k for this call, a number or one for
    each token.

    A float is a capacity factor [2]: 1.25 lets an expert keep 1.25 times the number of tokens that equal loads would
    give it, rounded up, :math:`\lceil 1.25\, kT / E \rceil` for T tokens and E experts. The tokens are those of one
    leading index, of one sequence in ``(batch, tokens, experts)``; with a k for each token, kT is their sum.

    Args:
        k: Number of experts per token; for a relaxed mask the sum of its weights.
        softness: None for the hard mask.
        relaxation: Relaxed mask, called as ``relaxation(x, k, softness)``.
        straight_through: Whether a hard mask gets the gradient of the relaxed one.
        learn_softness: Whether the softness is a parameter.
        capacity: Largest number of tokens per expert, an int; a float is a factor of the equal load; None for no limit.

    Attributes:
        k: Number of experts per token. It may be assigned at any time.
        capacity: Largest number of tokens per expert, or None. It may be assigned at any time.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    References:
        [1] Shazeer et al. (2017), "Outrageously large neural networks", arXiv:1701.06538.
        [2] Fedus, Zoph, Shazeer (2022), "Switch transformers", arXiv:2101.03961, Eq. (4).
        [3] Zoph et al. (2022), "ST-MoE", arXiv:2202.08906, Eq. (5).

    Example:
        >>> router = TokenChoice(2)
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 3.0]])  # two tokens, three experts
        >>> router(logits)
        tensor([[0.7311, 0.2689, 0.0000],
                [0.0000, 0.5000, 0.5000]])
        >>> router.select(logits).indices
        tensor([[0, 1],
                [1, 2]])
    """

    _numbers = ("k", "_softness", "capacity")
    _what_others_take = NUMBER_OF_EXPERTS
    k: float
    capacity: float | None

    def __init__(
        self,
        k: float,
        *,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        straight_through: bool = False,
        learn_softness: bool = False,
        capacity: float | None = None,
    ) -> None:
        super().__init__(softness, relaxation, straight_through, learn_softness)
        self.k, self.capacity = k, capacity
        self._last: _Call | None = None  # for the losses
        self._recomputed: _Call | None = None  # the same for losses in a block that a backward pass runs again

    def _checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """The checked ``k``, capacity (which may be None), or softness."""
        if name != "capacity":
            return super()._checked(name, value, learned)
        if value is None:
            return None
        if isinstance(value, float):
            return float(checked_positive("capacity", value, torch.Size()))
        capacity = checked_int("capacity", value, "an int, a float as a factor of the equal load, or None")
        if capacity < 1:
            raise ValueError(f"`capacity` must be at least 1, but got {value}")
        return capacity

    def forward(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        return self._weights(x, self._number("k") if k is None else k).to(x.dtype)

    def select(self, x: Tensor, k: int | None = None) -> Selection:
        """Weights and indices of the experts of each token, ``(..., tokens, k)``, with increasing indices.

        The weights of a token sum to 1 unless all its experts are full; relaxed ones are renormalised over the k.

        Args:
            x: Logits ``(..., tokens, experts)``.
            k: Number of experts for this call, an int; by default that of the module.
        """
        check_scores(x, -1)
        k = checked_int("k", self.k if k is None else k, "an int for a selection, since all tokens get the same number")
        weights, indices = self._weights(x, k), places_of_largest(x.detach(), k)
        weights = weights.gather(-1, indices)
        if self.softness is not None and not self.straight_through:
            weights = _over_their_sum(weights)
        return Selection(weights.to(x.dtype), indices)

    def balance_loss(self) -> Tensor:
        r"""How unevenly the last call in training loads the experts [2]: 1 for equal loads, at most their number.

        .. math:: E {\textstyle\sum_e} f_e P_e

        with E experts, :math:`f_e` the share of the choices that go to expert e, a constant, and :math:`P_e` its mean
        probability, which carries the gradient. A usual weight in the total loss is 0.01.

        Raises RuntimeError if it needs a gradient but the call was made without one, as in the first pass of an
        activation checkpoint with ``use_reentrant=True``: pass ``use_reentrant=False``, or take the loss inside the
        block and return it.
        """
        logits, mask, _ = self._of_the_last_call()
        experts = logits.shape[-1]
        load = mask.reshape(-1, experts).sum(0, dtype=logits.dtype)
        share = load / load.sum().clamp(min=torch.finfo(load.dtype).tiny)
        tokens = _is_closed(logits).logical_not().sum().clamp(min=1)
        return experts * (share * _probabilities(logits).reshape(-1, experts).sum(0) / tokens).sum()

    def z_loss(self) -> Tensor:
        r"""The mean square of log sum exp of the logits of the last call in training [3], which keeps them small.

        Raises RuntimeError if it needs a gradient but the call was made without one, as :meth:`balance_loss`.
        """
        logits, *_ = self._of_the_last_call()
        closed = _is_closed(logits)
        logs = logits.masked_fill(closed, 0).logsumexp(-1, keepdim=True).masked_fill(closed, 0)
        return logs.square().sum() / closed.logical_not().sum().clamp(min=1)

    def _of_the_last_call(self) -> "_Call":
        """The last call; in a block that is run again, that of the second run."""
        call = self._last if is_first_pass() or self._recomputed is None else self._recomputed
        if call is None:
            raise RuntimeError("TokenChoice has no losses before its first call in training mode")
        if torch.is_grad_enabled() and not call[2]:
            raise RuntimeError(
                "the last call of TokenChoice recorded no gradient, which its losses need: it was made under no_grad, "
                "as the first pass of an activation checkpoint with use_reentrant=True is. Pass use_reentrant=False, "
                "or return the loss from inside the block; a loss that is only watched can be taken under no_grad"
            )
        return call

    def _remember(self, logits: Tensor, mask: Tensor) -> None:
        """Keeps the call for the losses; one that is run again only until the end of the backward pass."""
        call = logits, mask.detach(), torch.is_grad_enabled()
        if is_first_pass():
            self._last = call
        else:
            self._recomputed = call
            after_backward(self._forget)

    def _forget(self) -> None:
        self._recomputed = None

    def _weights(self, x: Tensor, k: float | Tensor) -> Tensor:
        check_scores(x, -1)
        logits, capacity = x.to(compute_dtype(x)), self._number("capacity")
        is_simple = self.softness is None and capacity is None
        kept = keep_largest(logits, k, -1, self.by, for_softmax=is_simple) if self.softness is None else None
        mask = kept.mask if kept else self._mask_of(logits, k, -1)
        if self.training and (torch.compiler.is_compiling() or not is_wrapped(x)):  # no use outside a transform
            self._remember(logits, mask)
        if kept and is_simple and (k.all() if isinstance(k, Tensor) else k):
            return kept.values.softmax(-1)
        if is_simple:
            return _probabilities(logits.masked_fill(mask.logical_not(), -torch.inf))
        if capacity is not None:  # full experts are excluded before the softmax, or else other shares could underflow
            if isinstance(capacity, float) or (isinstance(capacity, Tensor) and capacity.is_floating_point()):
                capacity = _share_of(mask, capacity, k)
            room = _room(mask.detach(), _log_probabilities(logits.detach()), capacity)
            mask, logits = mask * room, logits.masked_fill(room == 0, -torch.inf)
        return _over_their_sum(mask * _probabilities(logits))

    def __getstate__(self) -> dict[str, Any]:
        """The state without the last call, whose graph cannot be copied."""
        return self.__dict__ | {"_last": None, "_recomputed": None}

    def extra_repr(self) -> str:
        return f"k={self.k}{self._shown_softness()}" + (
            f", capacity={self.capacity}" if self.capacity is not None else ""
        )


def _over_their_sum(weights: Tensor) -> Tensor:
    """The weights of each token, which then sum to 1; zeros for a token without experts."""
    total = weights.sum(-1, keepdim=True)
    # Zeros are divided by 1, since a gradient divided by the smallest number may be infinite.
    return weights / total.clamp(min=torch.finfo(weights.dtype).tiny).masked_fill(total == 0, 1)


def _is_closed(logits: Tensor) -> Tensor:
    """Which tokens have no expert, (..., tokens, 1): those whose logits are all ``-inf``."""
    return (logits == -torch.inf).all(-1, keepdim=True)


def _probabilities(logits: Tensor) -> Tensor:
    """The softmax, and zeros for a token without an expert, where a softmax and its gradient are NaN."""
    closed = _is_closed(logits)
    return logits.masked_fill(closed, 0).softmax(-1).masked_fill(closed, 0)


def _log_probabilities(logits: Tensor) -> Tensor:
    """The logarithm of the softmax, which tells small probabilities apart; the smallest number in place of ``-inf``."""
    closed = _is_closed(logits)
    return logits.masked_fill(closed, 0).log_softmax(-1).clamp(min=torch.finfo(logits.dtype).min)


def _share_of(mask: Tensor, factor: float | Tensor, k: float | Tensor) -> int | Tensor:
    """The factor times the load of an expert if all have the same, rounded up; one for each leading index."""
    _check_gates(mask)
    tokens, experts = mask.shape[-2:]
    if not (isinstance(factor, Tensor) or isinstance(k, Tensor) or torch.compiler.is_compiling()):
        return math.ceil(_rounded_down(factor * k * tokens / experts, torch.float64))
    dtype = torch.float64 if has_float64(mask) else torch.float32
    k, factor = (
        value.detach().to(mask.device, dtype)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=dtype, device=mask.device)
        for value in (k, factor)
    )
    choices = k * tokens if k.dim() == 0 else k.expand(mask.shape[:-1]).sum(-1, keepdim=True)
    share = factor * choices / experts
    return _rounded_down(share, dtype).ceil().long()


def _rounded_down(share: Any, dtype: torch.dtype) -> Any:
    """Less by a few roundings: 1.1 * 2 * 10 / 2 is 11.000000000000002, which does not mean 12 tokens."""
    return share * (1 - 8 * torch.finfo(dtype).eps)


def _room(mask: Tensor, log_probabilities: Tensor, capacity: int | Tensor) -> Tensor:
    """Ones where an expert keeps tokens that chose it: the ``capacity`` tokens with the largest probabilities."""
    _check_gates(mask)
    wanted, tokens = log_probabilities.masked_fill(mask == 0, -torch.inf), mask.shape[-2]
    if isinstance(capacity, Tensor):
        return topk_mask(wanted, capacity.clamp(max=tokens), dim=-2)
    return topk_mask(wanted, at_most(capacity, tokens, mask.device), dim=-2)
