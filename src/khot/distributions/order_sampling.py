"""Order sampling: takes the first k units in a random order. The base of two designs."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributions.utils import lazy_property
from torch.types import _size as SizeLike
from typing_extensions import Self

from khot._distributed.batch import SpreadBatch
from khot._distributed.shards import Shards, shards_of_rows, spread_over
from khot._torch_internals import is_tracing
from khot._validation import check_generator, checked_shape
from khot.kernels import order_sampling
from khot.kernels.order_sampling import depth_for
from khot.kernels.order_sampling.noises import LOGISTIC, Noise
from khot.kernels.random_numbers.philox import draw_seed, first_place
from khot.laws import order_sampling as law
from khot.laws import order_sampling_parts as law_of_parts
from khot.laws.conditional_poisson_parts import centre, has_spread, open_centre
from khot.relaxations import topk_mask
from khot.relaxations.in_parts import topk_mask_of_parts
from khot.relaxations.linked import link_of

from .design import SamplingDesign

SLAB = 2**13  # units of the rows that are integrated at a time; all their nodes take up to 150 MB


class OrderSampling(SamplingDesign):
    r"""Base of the designs that select the k smallest of independent ranks, one per unit.

    .. math:: Q_i = e^{E_i - \vartheta_i}, \quad x_i = 1 \text{ if } Q_i \text{ is among the } k \text{ smallest}

    with noise E of a given law, so a draw is noise and a top-k. The log-probability and the inclusion probabilities are
    integrals over one variable, computed by quadrature. A subclass defines the noise, and how the positions
    :math:`\vartheta` follow from its parameter.

    Compiled graphs contain each of the two integrals as one operator, whose derivative computes the integral again.

    On CUDA and ROCm tensors, and on a CPU with numba, a draw is one kernel, which makes the noise and selects by it,
    also with a k per row. On an accelerator, a small number of draws of more than 131072 units is left to torch.

    Sharded rows of a DTensor stay sharded in the members that :meth:`works_on_parts` names. For a draw, each process
    contributes the first k of its own units, whose ranks follow from the seed and their places in the row. Integrals
    are computed from sums over the processes.

    On a CPU with numba, both integrals and their gradients are loops over rows with negligible memory, unless positions
    that matter are more than 300 apart, as those of the least probable sets are. Elsewhere the integrals hold all units
    at all nodes of the quadrature, 80 or more, in several float64 numbers each: up to 20 KB per unit if gradients are
    needed. On a CPU without numba some rows are processed at a time, so that this is 150 MB, or one row.
    On an accelerator an integral and its gradient take at most 40 launches each for rows of one k that are neither
    many nor long, and positions that are finite and at most 160 apart; otherwise several hundred.
    """

    _noise: ClassVar[Noise]
    _knows_parts = True

    @lazy_property
    def _positions(self) -> Tensor:
        """The positions: ``inf`` for units that are always drawn, ``-inf`` for those that are never drawn."""
        raise NotImplementedError(f"{type(self).__name__} does not define `_positions`")

    @lazy_property
    def _centre(self) -> Tensor:
        if (shards := _shards()) is not None:
            return centre(self._positions.detach(), self.k, shards)
        return order_sampling.rank_centre(self._positions.detach(), self.size)

    @lazy_property
    def _rank_scale(self) -> Tensor:
        return order_sampling.rank_scale(self._positions.detach(), self._centre)

    @lazy_property
    def _inclusion(self) -> Tensor:
        def inclusion(positions: Tensor, k: Tensor) -> Tensor:
            return law.inclusion_probabilities(self._noise, positions, self._size_of(k), self._depth)

        positions = self._positions
        if (shards := _shards()) is not None:
            found = law_of_parts.inclusion_probabilities(self._noise, positions, self.k, self._open_centre, shards)
            return found.to(self.parameter.dtype)
        if law.is_fused(positions):
            return inclusion(positions, self.k).to(self.parameter.dtype)
        return self._in_slabs(inclusion, positions, largest=SLAB).to(self.parameter.dtype)

    @property
    def _depth(self) -> float:
        return depth_for(self.parameter.dtype)

    def expand(self, batch_shape: SizeLike, _instance: Any = None) -> Self:
        if self.spread is None and self.in_float32 is self and not is_tracing():
            _ = self._rank_scale if self._kernel(()) is None else self._centre  # once here, rather than for every copy
        return super().expand(batch_shape, _instance)

    @property
    def mean(self) -> Tensor:
        """Inclusion probabilities P(x_i = 1)."""
        return self._inclusion

    @property
    def mode(self) -> Tensor:
        """The k-hot vector of the k largest positions; the density of the noise is log-concave."""
        return topk_mask(self._positions, self.size).to(self.parameter.dtype)

    def sample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        check_generator(generator, self.parameter.device)
        if (shards := _shards()) is not None:
            return self._draw_parts(shards, sample_shape)
        kernel = self._kernel(sample_shape)
        if kernel is not None:
            return self._draw_with(kernel, sample_shape, generator)
        ranks = self._ranks(sample_shape, generator)
        return topk_mask(ranks.neg_(), self.size).to(self.parameter.dtype)

    def sample_indices(
        self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        check_generator(generator, self.parameter.device)
        k = self._require_shared_k("sample_indices")
        kernel = self._kernel(sample_shape)
        if kernel is None:
            ranks = self._ranks(sample_shape, generator)
        else:
            ranks = -self._draw_with(kernel, sample_shape, generator)
        return ranks.topk(k, largest=False, sorted=False).indices.sort(-1).values

    def _kernel(self, sample_shape: SizeLike) -> Callable[..., Tensor] | None:
        draws = math.prod(checked_shape("sample_shape", sample_shape))
        return order_sampling.order_draw.kernel(self._positions, draws)

    def _draw_with(
        self, kernel: Callable[..., Tensor], sample_shape: SizeLike, generator: torch.Generator | None
    ) -> Tensor:
        theta, dtype = self._positions.detach(), self.parameter.dtype
        seed, draws = draw_seed(theta.device, generator), math.prod(sample_shape)
        drawn = kernel(theta, self.k, self._centre, seed, first_place(), draws, dtype, self._noise.name)
        return drawn.view(self._extended_shape(sample_shape))

    def _ranks(self, sample_shape: SizeLike, generator: torch.Generator | None) -> Tensor:
        return order_sampling.draw_ranks(self._noise, self._rank_scale, self._extended_shape(sample_shape), generator)

    def works_on_parts(self, member: str) -> bool:
        if self.spread is None or not self.spread.is_cut or not self._positions_of_parts():
            return False
        if member in ("mean", "probs") and self._integrates(member):
            return self._has_spread
        return member in ("sample", "mode", "mean", "probs", "log_prob")

    def _positions_of_parts(self) -> bool:
        """Whether each process can compute the positions of its units without those of other units."""
        return not self.relaxes_logits or link_of(self.relaxation) is not None

    def _integrates(self, member: str) -> bool:
        """Whether this member, ``mean`` or ``probs``, is an integral over all units."""
        return member == "mean"

    @lazy_property
    def _has_spread(self) -> bool:
        """For a design with sharded rows: whether sums give its inclusion probabilities."""
        here, shards = cast(OrderSampling, self.parts_here), cast(SpreadBatch, self.spread).in_parts().shards
        with spread_over(shards):
            return has_spread(here._positions, here.k, here._open_centre, shards)

    @lazy_property
    def _open_centre(self) -> Tensor:
        """For sharded rows: the point around which their laws are expanded."""
        return open_centre(self._positions, self.k, cast(Shards, _shards()))

    def _draw_parts(self, shards: Shards, sample_shape: SizeLike) -> Tensor:
        """The local units of draws from sharded rows; each process offers its first k units."""
        theta, draws = self._positions.detach(), math.prod(checked_shape("sample_shape", sample_shape))
        seed = draw_seed(theta.device)
        ranks = order_sampling.ranks_of_parts(theta, self._centre, seed, first_place(), draws, self._noise.name)
        drawn = topk_mask_of_parts(ranks.neg_(), self.size, shards)
        return drawn.view(self._extended_shape(sample_shape)).to(self.parameter.dtype)

    def log_prob_of_parts(self, value: Tensor, shards: Shards) -> Tensor:
        t = self._open_centre if self._noise is LOGISTIC else None
        found = law_of_parts.log_prob(self._noise, self._positions, self.k, value, t, shards)
        return found.to(self.parameter.dtype)

    def _log_prob(self, value: Tensor) -> Tensor:
        def log_prob(positions: Tensor, k: Tensor, value: Tensor) -> Tensor:
            return law.log_prob(self._noise, positions, self._size_of(k), value, self._depth)

        positions = self._positions
        if law.is_fused(positions):
            return log_prob(positions, self.k, value).to(self.parameter.dtype)
        return self._in_slabs(log_prob, positions, value, largest=SLAB).to(self.parameter.dtype)


def _shards() -> Shards | None:
    """The processes that hold the other parts of the rows, if they are sharded."""
    return None if torch.compiler.is_compiling() else shards_of_rows()
