"""Plackett-Luce: ordered draws without replacement, as indices in the order of choice."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import constraints
from torch.types import _size as SizeLike

from khot._contents import can_look, is_finite
from khot._shapes import broadcast_shapes
from khot._validation import as_int, check_flag, check_generator, check_strided, checked_shape
from khot.constraints import ranking
from khot.laws import plackett_luce as law

from ._arguments import Vector, broadcast_with_k, checked_param, checked_size, in_short
from .design import LISTED, MAX_SUPPORT
from .rows import DesignOfRows


class PlackettLuce(DesignOfRows):
    r"""Chooses k of n units one after another, each in proportion to its weight among the remaining units.

    .. math:: P(v_1, \dots, v_k) = \prod_{j=1}^{k}
        \frac{e^{\theta_{v_j}}}{\sum_{i \notin \{v_1, \dots, v_{j-1}\}} e^{\theta_i}}

    A value contains indices, long and of shape ``(..., k)``, in the order of choice; with ``k = n`` it is a ranking of
    all units. The set of chosen units has the law of :class:`~khot.GumbelTopK`, whose ``mean`` gives the inclusion
    probabilities; ``to_khot`` turns values into k-hot vectors. ``logits`` are the log-weights :math:`\theta`; adding a
    constant to a row changes nothing. Fitted to data through ``log_prob``, this is the usual model of rankings, or with
    k less than n of the first choices only.

    If rows differ in k, values are as wide as the largest k and contain -1 beyond the k of their row. Padded
    observations follow the same convention: ``PlackettLuce(logits, (choices >= 0).sum(-1)).log_prob(choices)``.

    ``log_prob`` takes O(n + k) steps and is differentiable to any order. No sum is computed by subtraction, so it is
    accurate for weights of any size. The choice of an excluded unit gives ``-inf``, with zero gradient; so does a value
    outside the support if validation is off. In Pyro, ``infer={"enumerate": "parallel"}`` enumerates a site.

    Args:
        logits: Log-weights ``(..., n)``; ``-inf`` excludes a unit.
        k: Number of choices, an int or an integer tensor that broadcasts with the batch shape of ``logits`` and may
            extend it. The largest entry of a tensor is the width of values, so its contents must be readable: under
            ``vmap`` and in compiled code k has to be an int.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If shapes or values are out of range, or a row has fewer than k units that are not excluded.
        NotImplementedError: If ``k`` is a tensor whose contents cannot be read.

    References:
        [1] Plackett (1975), "The analysis of permutations", Journal of the Royal Statistical Society C 24(2).
        [2] Luce (1959), "Individual choice behavior".
        [3] Yellott (1977), "The relationship between Luce's choice axiom, Thurstone's theory of comparative judgment,
            and the double exponential distribution", Journal of Mathematical Psychology 15(2): the sampler.

    Example:
        >>> law = PlackettLuce(torch.tensor([0.0, 0.0, 1.0]), k=2)
        >>> law.log_prob(torch.tensor([2, 0])).exp()
        tensor(0.2881)
        >>> law.mode, law.to_khot(law.mode)
        (tensor([2, 0]), tensor([1., 0., 1.]))
    """

    arg_constraints = {"logits": Vector(constraints.real), "k": constraints.nonnegative_integer}
    has_enumerate_support = True

    def __init__(self, logits: Tensor, k: int | Tensor, *, validate_args: bool | None = None) -> None:
        logits = checked_param("logits", logits)
        check_flag("validate_args", validate_args, optional=True)
        size = checked_size(k, logits)
        if isinstance(k, Tensor):
            logits, size = broadcast_with_k("logits", logits, size)
        self.logits, self.k = logits, size
        self._shared_k = None if isinstance(k, Tensor) else as_int(k)
        width = _largest(size) if self._shared_k is None else self._shared_k
        super().__init__(logits.shape[:-1], Size([width]), validate_args=validate_args)

    def _sources(self) -> list[Any]:
        return [self.logits] if self._shared_k is not None else [self.logits, self.k]

    def _fits(self) -> bool:
        if self._shared_k is None or self.arg_constraints is not PlackettLuce.arg_constraints:
            return False
        return is_finite(self.logits)

    def _validate_contents(self) -> None:
        n, k = self.n, self.k
        if not ((k >= 0) & (k <= n)).all():
            raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k from {k.min()} to {k.max()} with n={n}")
        if (self.logits == torch.inf).any():
            raise ValueError("`logits` must be less than inf: a unit that is sure to come first has no log-weight")
        possible = (self.logits > -torch.inf).sum(-1)
        if (possible < k).any():
            row = (possible < k).nonzero()[0]
            raise ValueError(
                f"`k` must not exceed the number of `logits` above -inf, but got k={k[tuple(row)]} in a row with "
                f"{possible[tuple(row)]} of them"
            )

    @property
    def n(self) -> int:
        """The number of units to choose from."""
        return self.logits.shape[-1]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(logits: {in_short(self.logits)}, k: {in_short(self.size)})"

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return ranking(self.n, self.size)

    @property
    def mode(self) -> Tensor:
        """The most probable choices: the largest log-weights in decreasing order, the earlier first among ties."""
        order = self.logits.detach().sort(dim=-1, descending=True, stable=True).indices
        return law.padded(order[..., : self.event_shape[0]], self.size)

    def sample(self, sample_shape: SizeLike = Size(), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws choices, ``sample_shape + batch_shape + (k,)``, by adding Gumbel noise to the log-weights.

        Args:
            sample_shape: Shape of the independent draws.
            generator: Source of randomness on the device of the parameters; by default torch's own.
        """
        check_generator(generator, self.logits.device)
        shape = Size(checked_shape("sample_shape", sample_shape) + self.batch_shape)
        return law.sample(self.logits.detach(), self.size, self.event_shape[0], shape, generator)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of indices ``(*sample_shape, *batch_shape, k)`` in the order of choice."""
        value = self._checked_value(value)
        return self._log_prob_of_any(value, lambda: torch.arange(self.event_shape[0], device=value.device))

    def _log_prob(self, value: Tensor) -> Tensor:
        value = value.expand(*broadcast_shapes(value.shape[:-1], self.batch_shape), -1)
        return law.log_prob(self.logits, self.size, value).to(self.logits.dtype)

    def to_khot(self, value: Tensor) -> Tensor:
        """The k-hot vectors ``(..., n)`` of values ``(..., k)``, in the dtype of ``logits``; -1 is ignored."""
        value = self._checked_value(value)
        wide = self.logits.new_zeros(*value.shape[:-1], self.n + 1)  # the last entry collects the -1s
        return wide.scatter(-1, torch.where(value < 0, self.n, value), 1.0)[..., : self.n]

    def entropy(self) -> Tensor:
        """Entropy in nats, ``(...)``, as a sum over all n! / (n - k)! values, if there are at most ``MAX_SUPPORT``."""
        entropy = self.logits.new_zeros(self.batch_shape, dtype=torch.float64)
        for k in self.sizes("entropy"):
            total: Tensor | float = 0.0
            for value in self._listed("entropy", k):
                log_prob = law.log_prob(self.logits, k, value)
                total = total - (log_prob.exp() * log_prob.masked_fill(log_prob == -torch.inf, 0.0)).sum(0)
            entropy = torch.where(self.k == k, total, entropy)
        return entropy.to(self.logits.dtype)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All n! / (n - k)! values in lexicographic order, along a new first dimension.

        Raises:
            NotImplementedError: If rows differ in ``k``.
            ValueError: If there are more than ``MAX_SUPPORT`` (1,000,000) values.
        """
        k = self._require_shared_k("enumerate_support")
        values = law.rankings(self.n, k, 0, self._count("enumerate_support", k), self.logits.device)
        values = values.view(len(values), *(1,) * len(self.batch_shape), k)
        return values.expand(-1, *self.batch_shape, -1) if expand else values

    def _checked_value(self, value: Any) -> Tensor:
        """The value in int64, after a check of its dtype and shape."""
        if not isinstance(value, Tensor):
            raise TypeError(f"`value` must be a tensor, but got {type(value).__name__}")
        check_strided("value", value)
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"`value` must hold indices in an integer dtype, but got {value.dtype}")
        if value.shape[-1:] != self.event_shape:
            width = self.event_shape[0]
            raise ValueError(f"`value` must have shape (..., {width}), but got {tuple(value.shape)}")
        return value.long()

    def _count(self, wanted: str, k: int) -> int:
        """The number of values of size k."""
        count = math.perm(self.n, k)
        if count > MAX_SUPPORT:
            raise ValueError(f"{wanted} lists at most {MAX_SUPPORT} values, but {self.n}! / {self.n - k}! = {count}")
        return count

    def _listed(self, wanted: str, k: int) -> Iterator[Tensor]:
        """All values of size k ``(values, *batch_shape, k)``, in chunks that fit into memory."""
        count, step = self._count(wanted, k), max(1, LISTED // max(1, self.logits.numel()))
        for start in range(0, count, step):
            value = law.rankings(self.n, k, start, min(start + step, count), self.logits.device)
            yield value.view(len(value), *(1,) * len(self.batch_shape), k).expand(-1, *self.batch_shape, -1)


def _largest(k: Tensor) -> int:
    if not can_look(k) or k.is_meta:
        raise NotImplementedError("PlackettLuce needs `k` as an int under vmap, in compiled code and on meta tensors")
    return int(k.max()) if k.numel() else 0
