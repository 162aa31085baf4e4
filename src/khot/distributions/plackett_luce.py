"""Plackett-Luce: ordered draws without replacement, as indices in the order of choice."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import constraints

from khot._contents import can_look
from khot._shapes import broadcast_shapes
from khot._validation import check_flag, check_strided
from khot.constraints import ranking
from khot.laws import plackett_luce as law

from ._arguments import Vector, check_sizes, checked_param, in_rows, with_size
from .base import KHotDistribution, lazy
from .design import LISTED, MAX_SUPPORT
from .entry import entry
from .sizes import shared_k, sizes_of


class PlackettLuce(KHotDistribution):
    r"""Chooses k of n units one after another, each in proportion to its weight among the remaining units.

    .. math:: P(v_1, \dots, v_k) = \prod_{j=1}^{k}
        \frac{e^{\theta_{v_j}}}{\sum_{i \notin \{v_1, \dots, v_{j-1}\}} e^{\theta_i}}

    A value contains indices, long and of shape ``(..., k)``, in the order of choice; with ``k = n`` it is a ranking of
    all units. The set of chosen units has the distribution :class:`~khot.GumbelTopK`, whose ``mean`` gives the
    inclusion probabilities; ``to_khot`` turns values into k-hot vectors. ``logits`` are the log-weights :math:`\theta`;
    adding a constant to a row changes nothing. Fitted to data through ``log_prob``, this is the usual model of
    rankings, or with k less than n of the first choices only.

    If rows differ in k, values are as wide as the largest k and contain -1 beyond the k of their row. Padded
    observations follow the same convention: ``PlackettLuce(logits, (choices >= 0).sum(-1)).log_prob(choices)``.

    ``log_prob`` takes O(n + k) steps and is differentiable to any order. No sum is computed by subtraction, so it is
    accurate for weights of any size. The choice of an excluded unit gives ``-inf``, with zero gradient; so does a value
    outside the support if validation is off. In Pyro, ``infer={"enumerate": "parallel"}`` enumerates a site.

    Args:
        logits: Log-weights ``(..., n)``; ``-inf`` excludes a unit.
        k: Number of choices, an int or an integer tensor that broadcasts with the batch shape of ``logits`` and may
            extend it. The largest entry of a tensor is the width of values, so its contents must be readable: under
            ``vmap`` k has to be an int.
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
        >>> ranking = PlackettLuce(torch.tensor([0.0, 0.0, 1.0]), k=2)
        >>> ranking.log_prob(torch.tensor([2, 0])).exp()
        tensor(0.2881)
        >>> ranking.mode, ranking.to_khot(ranking.mode)
        (tensor([2, 0]), tensor([1., 0., 1.]))
    """

    arg_constraints = {"logits": Vector(constraints.real), "k": constraints.nonnegative_integer}
    has_enumerate_support = True

    def __init__(self, logits: Tensor, k: int | Tensor, *, validate_args: bool | None = None) -> None:
        logits = checked_param("logits", logits)
        check_flag("validate_args", validate_args, optional=True)
        self.parameter, self._low = logits, size = with_size("logits", logits, k)
        self.parameter_name, self.dtype = "logits", logits.dtype
        self._shared_k = None if isinstance(size, Tensor) else size
        width = _largest(size) if isinstance(size, Tensor) else size
        super().__init__(logits.shape[:-1], Size([width]), validate_args=validate_args)

    def _validate_contents(self) -> None:
        k = self._k
        check_sizes(k, self._n)
        if (self._wide == torch.inf).any():
            raise ValueError("`logits` must be less than inf: a unit that is sure to come first has no log-weight")
        possible = (self._wide > -torch.inf).sum(-1)
        if (possible < k).any():
            row = (possible < k).nonzero()[0]
            raise ValueError(
                f"`k` must not exceed the number of `logits` above -inf, but got k={k[tuple(row)]} in a row with "
                f"{possible[tuple(row)]} of them"
            )

    @property
    def k(self) -> Tensor:
        """The number of choices of each row."""
        return in_rows(self._low, self.parameter)

    @lazy
    def _k(self) -> Tensor:
        return self.k

    @property
    def _size(self) -> int | Tensor:
        return self._low

    @property
    def _n(self) -> int:
        """The number of units to choose from."""
        return self.parameter.shape[-1]

    @lazy
    def _support(self) -> constraints.Constraint:
        return ranking(self._n, self._size)

    def _rounded(self, result: Tensor) -> Tensor:
        return result if result.dtype == torch.long else super()._rounded(result)

    def _mode(self) -> Tensor:
        """The largest log-weights in decreasing order, the earlier first among ties."""
        order = self._wide.detach().sort(dim=-1, descending=True, stable=True).indices
        return law.padded(order[..., : self.event_shape[0]], self._size)

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        return law.sample(self._wide.detach(), self._size, self.event_shape[0], shape + self.batch_shape, generator)

    def _score(self, value: Tensor) -> Tensor:
        return super()._score(self._checked_value(value))

    def _value(self, like: Tensor) -> Tensor:
        return torch.arange(self.event_shape[0], device=like.device)

    def _log_prob(self, value: Tensor) -> Tensor:
        value = value.expand(*broadcast_shapes(value.shape[:-1], self.batch_shape), -1)
        return law.log_prob(self._wide, self._size, value)

    @entry
    def to_khot(self, value: Tensor) -> Tensor:
        """The k-hot vectors ``(..., n)`` of values ``(..., k)``, in the dtype of ``logits``; -1 is ignored."""
        value = self._checked_value(value)
        wide = self._wide.new_zeros(*value.shape[:-1], self._n + 1, dtype=self.dtype)  # the last entry collects the -1s
        return wide.scatter(-1, torch.where(value < 0, self._n, value), 1.0)[..., : self._n]

    def _entropy(self) -> Tensor:
        """The entropy, as a sum over all n! / (n - k)! values, if there are at most ``MAX_SUPPORT``."""
        entropy = self._wide.new_zeros(self.batch_shape, dtype=torch.float64)
        for k in sizes_of(self, "entropy"):
            total: Tensor | float = 0.0
            for value in self._listed("entropy", k):
                log_prob = law.log_prob(self._wide, k, value)
                total = total - (log_prob.exp() * log_prob.masked_fill(log_prob == -torch.inf, 0.0)).sum(0)
            entropy = torch.where(self._k == k, total, entropy)
        return entropy

    def _enumerated_support(self, expand: bool) -> Tensor:
        """All n! / (n - k)! values, at most ``MAX_SUPPORT``, in lexicographic order."""
        k = shared_k(self, "enumerate_support")
        values = law.rankings(self._n, k, 0, self._count("enumerate_support", k), self._wide.device)
        values = values.view(len(values), *(1,) * len(self.batch_shape), k)
        return values.expand(-1, *self.batch_shape, -1) if expand else values

    def _checked_value(self, value: Any) -> Tensor:
        """The value in int64, after a check of its dtype and shape."""
        if not isinstance(value, Tensor):
            raise TypeError(f"`value` must be a tensor, but got {type(value).__name__}")
        check_strided("value", value)
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"`value` must contain indices of an integer dtype, but got {value.dtype}")
        if value.shape[-1:] != self.event_shape:
            width = self.event_shape[0]
            raise ValueError(f"`value` must have shape (..., {width}), but got {tuple(value.shape)}")
        return value.long()

    def _count(self, wanted: str, k: int) -> int:
        """The number of values of size k."""
        count = math.perm(self._n, k)
        if count > MAX_SUPPORT:
            raise ValueError(f"{wanted} lists at most {MAX_SUPPORT} values, but {self._n}! / {self._n - k}! = {count}")
        return count

    def _listed(self, wanted: str, k: int) -> Iterator[Tensor]:
        """All values of size k ``(values, *batch_shape, k)``, in chunks that fit into memory."""
        count, step = self._count(wanted, k), max(1, LISTED // max(1, self._wide.numel()))
        for start in range(0, count, step):
            value = law.rankings(self._n, k, start, min(start + step, count), self._wide.device)
            yield value.view(len(value), *(1,) * len(self.batch_shape), k).expand(-1, *self.batch_shape, -1)


def _largest(k: Tensor) -> int:
    if not can_look(k) or k.is_meta:
        raise NotImplementedError("PlackettLuce needs `k` as an int under vmap and for tensors without contents")
    return int(k.max()) if k.numel() else 0
