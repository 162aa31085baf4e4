"""A router in which every token takes some experts, with losses and biases that balance their loads."""

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from khot._distributed.placements import is_dtensor
from khot._host import has_float64
from khot._torch_internals import after_backward, is_wrapped, outside_selective_checkpoints
from khot._validation import check_choice, check_scores, checked_count, checked_int, checked_positive, checked_real
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import sigmoid_topk, straight_through_value, topk_mask

from ._keeping import keep_largest
from ._masking import Masking, Relaxation, at_most, hard_mask, places_of_largest
from ._running_state import check_in_place, is_first_pass, write
from .expert_choice import NUMBER_OF_EXPERTS, check_gates
from .routing import (
    Groups,
    Scores,
    candidates,
    check_words,
    checked_groups,
    checked_indices,
    groups_of,
    is_closed,
    key_of_choice,
    log_scores_of,
    over_their_sum,
    probabilities,
    scores_of,
)
from .topk import Selection

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Call = tuple[Tensor, Tensor, bool]  # logits, mask, and whether a gradient is recorded


class TokenChoice(Masking):
    r"""Routing in which every token takes the k experts that suit it best.

    Takes logits ``(..., tokens, experts)`` and returns the weights of the experts, 0 for those not chosen: scores s of
    the logits x, by default their softmax, times a mask m, renormalised over the chosen experts,

    .. math:: w_e = m_e s_e / {\textstyle\sum_j} m_j s_j.

    ``module(x, indices=experts)`` takes these experts ``(..., tokens, k)`` instead of its own choice.

    With a ``bias``, the experts are chosen by s + bias, and weighed by s. The buffer ``bias`` is learned without a
    gradient [4]: training with gradients counts in the buffer ``load`` how often each expert is chosen, and
    :meth:`update_bias` moves the bias of experts with more choices than the mean down, and of the others up. A relaxed
    mask is then computed from s + bias, otherwise from the logits.

    :meth:`select` returns only the k weights and experts. :meth:`balance_loss` and :meth:`z_loss` refer to the last
    call in training, and leave out tokens such as padding whose logits are all ``-inf``; these need k = 0, which gives
    zeros. With a ``capacity``, every expert keeps at most that many tokens, those with the largest scores, and weights
    are renormalised over the experts that a token has left; a token without any gets 0. With another value of
    ``renormalize`` than "kept", an expert keeps the tokens with the largest weights, which are left unchanged. ``k``,
    ``capacity`` and ``softness`` may be assigned at any time. ``module(x, k)`` uses another k for this call, a number
    or one for each token.

    A float ``capacity`` is a factor [2]: 1.25 lets an expert keep 1.25 times the number of tokens that equal loads
    would give it, rounded up, :math:`\lceil 1.25\, kT / E \rceil` for T tokens and E experts. T counts the tokens of
    one leading index, such as one sequence of ``(batch, tokens, experts)``; if each token has its own k, kT is their
    sum.

    Args:
        k: Number of experts per token; for a relaxed mask the sum of its weights.
        softness, relaxation, straight_through, learn_softness: See :class:`TopKMask`.
        capacity: Largest number of tokens per expert, an int; a float is a factor of the equal load; None for no limit.
        renormalize: Over which experts the weights of a token sum to ``scale``: those that are "kept" within their
            capacity, or those that are "chosen", whether they are kept or not. None for the scores as they are.
        scores, groups, eps, scale: See :func:`route`.
        bias: Whether there is a bias, or the number of experts. If True, the first call in training or a loaded state
            gives the buffers their length.

    Attributes:
        k: Number of experts per token. It may be assigned at any time.
        capacity: Largest number of tokens per expert, or None. It may be assigned at any time.
        bias: A float32 buffer ``(experts,)``, 0 at first, or None.
        load: Number of choices of each expert since the last update, a float32 buffer that is not saved, or None.

    References:
        [1] Shazeer et al. (2017), "Outrageously large neural networks", arXiv:1701.06538.
        [2] Fedus, Zoph, Shazeer (2022), "Switch transformers", arXiv:2101.03961, Eq. (4).
        [3] Zoph et al. (2022), "ST-MoE", arXiv:2202.08906, Eq. (5).
        [4] Wang et al. (2024), "Auxiliary-loss-free load balancing for mixture-of-experts", arXiv:2408.15664.
        [5] DeepSeek-AI (2024), "DeepSeek-V3 technical report", arXiv:2412.19437, Eq. (17-20).

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
    bias: Tensor | None
    load: Tensor | None

    def __init__(
        self,
        k: float,
        *,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        straight_through: bool = False,
        learn_softness: bool = False,
        capacity: float | None = None,
        scores: Scores = "softmax",
        groups: Groups | None = None,
        renormalize: str | None = "kept",
        eps: float = 0.0,
        scale: float = 1.0,
        bias: bool | int = False,
    ) -> None:
        super().__init__(softness, relaxation, straight_through, learn_softness)
        check_words(scores, eps)
        check_choice("renormalize", renormalize, ("kept", "chosen"), optional=True)
        self.k, self.capacity, self.scores, self.renormalize = k, capacity, scores, renormalize
        self.groups = None if groups is None else checked_groups(groups)
        self.eps, self.scale = checked_real("eps", eps), checked_real("scale", scale)
        length = 0 if isinstance(bias, bool) else checked_count("bias", bias)
        for name in ("bias", "load"):
            start = None if bias is False else torch.zeros(length, dtype=torch.float32)
            self.register_buffer(name, start, persistent=name == "bias")
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

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name in ("bias", "load"):
            if getattr(self, name) is not None:
                self._overwrite(name, 0)

    def forward(self, x: Tensor, k: float | Tensor | None = None, indices: Tensor | None = None) -> Tensor:
        weights, _ = self._weights(x, k, indices)
        return weights.to(x.dtype)

    def select(self, x: Tensor, k: int | None = None, indices: Tensor | None = None) -> Selection:
        """Weights and indices of the experts of each token, ``(..., tokens, k)``, with increasing indices.

        With the default arguments, the weights of a token sum to 1 unless all its experts are full; relaxed ones are
        renormalised over the k.

        Args:
            x: Logits ``(..., tokens, experts)``.
            k: Number of experts for this call, an int; by default the module's.
            indices: Experts ``(..., tokens, k)`` that replace the choice, and are returned as they are.
        """
        check_scores(x, -1)
        if indices is None:
            size = checked_int("k", self.k if k is None else k, "an int for a selection, since all tokens get as many")
        else:
            indices = checked_indices(indices, k, x)
            size = indices.shape[-1]
        weights, mask = self._weights(x, size, indices)
        is_soft = self.softness is not None and not self.straight_through
        if indices is not None:
            places = indices
        elif is_soft:
            groups, wide = self._groups_of(x, size), x.to(compute_dtype(x))
            places = places_of_largest(key_of_choice(wide, size, self.scores, self._bias_of(x), groups), size)
        else:
            places = places_of_largest(mask.detach().to(weights.dtype), size)
        weights = weights.gather(-1, places)
        if is_soft and self.renormalize is not None:
            weights = self.scale * over_their_sum(weights, self.eps)
        return Selection(weights.to(x.dtype), places)

    def balance_loss(self, each: bool = False, group: "ProcessGroup | None" = None) -> Tensor:
        r"""How unevenly the last call in training loads the experts [2]: 1 for equal loads, at most their number.

        .. math:: E {\textstyle\sum_e} f_e P_e

        with E experts, :math:`f_e` the share of the choices that go to expert e, a constant, and :math:`P_e` its mean
        share :math:`s_e / \sum_j s_j` of the scores, which carries the gradient. The choices are those without the bias
        [5], unless ``indices`` were given. A usual weight in the total loss is 0.01.

        Raises RuntimeError if it needs a gradient but the call was made without one, as in the first pass of an
        activation checkpoint with ``use_reentrant=True``: pass ``use_reentrant=False``, or take the loss inside the
        block and return it.

        Args:
            each: Whether to take the mean of one loss for each sequence of ``(..., tokens, experts)``, without
                sequences that have no token, instead of the loss of all tokens together.
            group: Processes over which f is taken; all of them must call this method.
        """
        logits, mask = self._of_the_last_call()
        experts = logits.shape[-1]
        if not each:
            logits, mask = logits.reshape(-1, experts), mask.reshape(-1, experts)
        load = mask.sum(-2, dtype=logits.dtype)
        if group is not None:
            dist.all_reduce(load, group=group)
        share = load / load.sum(-1, keepdim=True).clamp(min=torch.finfo(load.dtype).tiny)
        tokens = (logits != -torch.inf).any(-1).sum(-1)
        scores = scores_of(logits, self.scores)
        scores = scores if self.scores == "softmax" else over_their_sum(scores)
        losses = experts * (share * scores.sum(-2) / tokens.clamp(min=1).unsqueeze(-1)).sum(-1)
        return losses.sum() / (tokens > 0).sum().clamp(min=1)

    def z_loss(self) -> Tensor:
        r"""The mean square of log sum exp of the logits of the last call in training [3], which keeps them small.

        Raises RuntimeError if it needs a gradient but the call was made without one, as :meth:`balance_loss`.
        """
        logits, _ = self._of_the_last_call()
        closed = is_closed(logits)
        logs = logits.masked_fill(closed, 0).logsumexp(-1, keepdim=True).masked_fill(closed, 0)
        return logs.square().sum() / closed.logical_not().sum().clamp(min=1)

    @torch.no_grad()
    def update_bias(self, rate: float = 1e-3, centre: bool = False, group: "ProcessGroup | None" = None) -> None:
        r"""Moves the bias towards equal loads [4], and sets the counts of choices to zero.

        .. math:: b_e \leftarrow b_e + \text{rate} \cdot \mathrm{sign}\bigl({\textstyle\sum_j} n_j / E - n_e\bigr)

        for the choices :math:`n_e` since the last update. Call it once for each step of the optimizer, before it. In an
        activation checkpoint, a compiled router counts its choices only with ``use_reentrant=False``.

        Args:
            rate: Size of the steps.
            centre: Whether to subtract the mean step from all steps, so that the mean of the bias does not change.
            group: Processes whose choices are added up; all of them must call this method.
        """
        if self.bias is None or self.load is None:
            raise RuntimeError("TokenChoice has no bias to update: make it with bias=True")
        load = self.load.clone()
        if group is not None:
            dist.all_reduce(load, group=group)
        step = checked_real("rate", rate) * (load.mean() - load).sign()
        self.bias += step - step.mean() if centre else step
        self.load.zero_()

    def _of_the_last_call(self) -> tuple[Tensor, Tensor]:
        """Logits and mask of the last call; in a block that a backward pass runs again, those of the second run."""
        call = self._last if is_first_pass() or self._recomputed is None else self._recomputed
        if call is None:
            raise RuntimeError("TokenChoice has no losses before its first call in training mode")
        if torch.is_grad_enabled() and not call[2]:
            raise RuntimeError(
                "the last call of TokenChoice recorded no gradient, which its losses need: it was made under no_grad, "
                "as the first pass of an activation checkpoint with use_reentrant=True is. Pass use_reentrant=False, "
                "or return the loss from inside the block; to monitor a loss without training, call it under no_grad"
            )
        return call[:2]

    def _remember(self, logits: Tensor, mask: Tensor) -> None:
        """Keeps the call for the losses; one that is run again only until the end of the backward pass."""
        if not torch.compiler.is_compiling() and is_wrapped(logits):  # no use outside a transform
            return
        call = logits, mask.detach(), torch.is_grad_enabled()
        if is_first_pass():
            self._last = call
        else:
            self._recomputed = call
            after_backward(self._forget)

    def _forget(self) -> None:
        self._recomputed = None

    def _count(self, mask: Tensor) -> None:
        """Adds the choices of this call to the load, only once for a block that runs again in a backward pass."""
        if self.load is None or not torch.is_grad_enabled():
            return
        if not is_first_pass() and (self._last is None or self._last[2]):
            return  # the first pass recorded gradients, and so counted; only in a reentrant checkpoint it did not
        check_in_place("TokenChoice", mask, self.load, "counts its choices", "make it without a bias")
        with outside_selective_checkpoints(), torch.no_grad():
            counts: Any = mask.detach().reshape(-1, mask.shape[-1]).sum(0, dtype=self.load.dtype)
            write(self.load, self.load + (counts.full_tensor() if is_dtensor(counts) else counts))

    def _bias_of(self, x: Tensor) -> Tensor | None:
        """The bias for these logits; made at the first call in training, before which there is none."""
        if self.bias is None or (self.bias.shape[0] == 0 and not self.training):
            return None
        if self.bias.shape[0] == 0:
            self._resize(x.shape[-1])
        elif self.bias.shape[0] != x.shape[-1]:
            raise ValueError(f"`x` must have the {self.bias.shape[0]} experts of the bias, but got {tuple(x.shape)}")
        return self.bias

    def _resize(self, experts: int) -> None:
        with nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False):
            for name in ("bias", "load"):
                setattr(self, name, getattr(self, name).new_zeros(experts))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        saved = state_dict.get(prefix + "bias")
        if self.bias is not None and isinstance(saved, Tensor) and 0 in (*saved.shape, *self.bias.shape):
            self._resize(saved.shape[0])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _groups_of(self, x: Tensor, k: Any) -> Groups | None:
        return None if self.groups is None else groups_of(self.groups, x.shape[-1], k)

    def _weights(self, x: Tensor, k: Any, indices: Tensor | None) -> tuple[Tensor, Tensor]:
        """The weights, and which experts are chosen."""
        check_scores(x, -1)
        capacity = self._number("capacity")
        if capacity is not None:
            check_gates(x)
        if indices is not None:
            indices = checked_indices(indices, k, x)
            k = indices.shape[-1]
        k = self._number("k") if k is None else k
        logits = x.to(compute_dtype(x))
        bias, groups = self._bias_of(x), self._groups_of(x, k)
        by_logits = indices is None and bias is None and groups is None and isinstance(self.scores, str)
        is_hard, by_logarithm = self.softness is None, self._takes_logarithms()
        is_simple = is_hard and capacity is None and by_logarithm and self.scores == "softmax"
        kept = keep_largest(logits, k, -1, self.by, for_softmax=is_simple) if is_hard and by_logits else None
        mask = kept.mask if kept else self._mask(logits, k, bias, groups, indices)
        if self.training:
            is_own = bias is None or indices is not None
            self._remember(logits, mask if is_own else self._mask(logits.detach(), k, None, groups))
            self._count(mask)
        if kept and is_simple and (k.all() if isinstance(k, Tensor) else k):
            weights = kept.values.softmax(-1)
        elif capacity is None:
            weights = self._weighed(logits, mask, by_logarithm)
        else:
            if isinstance(capacity, float) or (isinstance(capacity, Tensor) and capacity.is_floating_point()):
                capacity = _share_of(mask, capacity, k)
            weights = self._within(capacity, logits, mask)
        return (weights if self.scale == 1 else self.scale * weights), mask

    def _takes_logarithms(self) -> bool:
        """Whether the weights are a softmax of logarithms of the scores, which may underflow then."""
        return self.renormalize is not None and self.eps == 0 and isinstance(self.scores, str) and self.softness is None

    def _mask(
        self, logits: Tensor, k: Any, bias: Tensor | None, groups: Groups | None, indices: Tensor | None = None
    ) -> Tensor:
        """Which experts are chosen, hard, relaxed or straight-through."""
        hard = None
        if indices is not None:
            if self.softness is not None and not self.straight_through:
                raise ValueError("`indices` is a hard choice: it needs softness=None or straight_through=True")
            hard = torch.zeros_like(logits).scatter(-1, indices, 1).masked_fill(logits == -torch.inf, 0)
        elif self.softness is None or (self.straight_through and bias is not None):
            hard = hard_mask(key_of_choice(logits, k, self.scores, bias, groups), k, -1)
        if hard is not None and self.softness is None:
            return hard
        x = logits
        if bias is not None or groups is not None:
            c = candidates(logits, self.scores, bias, groups)
            x = logits.masked_fill(c == -torch.inf, -torch.inf) if bias is None else c
        mask = self._mask_of(x, k, -1)
        return mask if hard is None else straight_through_value(hard, mask)

    def _weighed(self, logits: Tensor, mask: Tensor, by_logarithm: bool) -> Tensor:
        """The weights of the chosen experts, without the factor."""
        if by_logarithm:
            return probabilities(log_scores_of(logits, self.scores).masked_fill(mask == 0, -torch.inf))
        weights = mask * scores_of(logits, self.scores)
        return weights if self.renormalize is None else over_their_sum(weights, self.eps)

    def _within(self, capacity: int | Tensor, logits: Tensor, mask: Tensor) -> Tensor:
        """The weights of the experts that have room for the token."""
        by_logarithm, is_softmax = self._takes_logarithms(), self.scores == "softmax"
        if self.renormalize != "kept":
            weights = self._weighed(logits, mask, by_logarithm)
            return weights * _room(mask.detach(), weights.detach(), capacity)
        fixed = logits.detach()
        if is_softmax:
            scores = _log_probabilities(fixed)
        else:  # named scores increase with the logits
            scores = fixed if isinstance(self.scores, str) else scores_of(fixed, self.scores)
        room = _room(mask.detach(), scores, capacity)
        if is_softmax and self.eps == 0:  # full experts are excluded first, or else other shares could underflow
            logits = logits.masked_fill(room == 0, -torch.inf)
        return self._weighed(logits, mask * room, by_logarithm and not is_softmax)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the last call, whose graph cannot be copied."""
        return self.__dict__ | {"_last": None, "_recomputed": None}

    def extra_repr(self) -> str:
        shown = {"capacity": None, "scores": "softmax", "groups": None, "renormalize": "kept", "eps": 0.0, "scale": 1.0}
        words = [f", {name}={getattr(self, name)!r}" for name in shown if getattr(self, name) != shown[name]]
        bias = "" if self.bias is None else f", bias={self.bias.shape[0] or True}"
        return f"k={self.k}{self._shown_softness()}{''.join(words)}{bias}"


def _log_probabilities(logits: Tensor) -> Tensor:
    """The logarithm of the softmax, which does not underflow; the smallest number in place of ``-inf``."""
    closed = is_closed(logits)
    return logits.masked_fill(closed, 0).log_softmax(-1).clamp(min=torch.finfo(logits.dtype).min)


def _share_of(mask: Tensor, factor: float | Tensor, k: float | Tensor) -> int | Tensor:
    """The factor times the load of an expert if all have the same, rounded up; one for each leading index."""
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
    """The share less a few rounding errors: 1.1 * 2 * 10 / 2 is 11.000000000000002, which must not become 12 tokens."""
    return share * (1 - 8 * torch.finfo(dtype).eps)


def _room(mask: Tensor, scores: Tensor, capacity: int | Tensor) -> Tensor:
    """Ones where an expert keeps tokens that chose it: the ``capacity`` tokens with the largest scores."""
    wanted, tokens = scores.masked_fill(mask == 0, -torch.inf), mask.shape[-2]
    if isinstance(capacity, Tensor):
        return topk_mask(wanted, capacity.clamp(max=tokens), dim=-2)
    return topk_mask(wanted, at_most(capacity, tokens, mask.device), dim=-2)
