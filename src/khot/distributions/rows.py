"""The rows of a design: expanding them, selecting some, and processing many of them slab by slab."""

import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.types import _size as SizeLike
from typing_extensions import Self

from khot._contents import can_look
from khot.kernels.exact.row_slabs import MOST_SLABS, by_rows
from khot.laws.kept import Kept

from .base import KHotDistribution, instance_of

WHOLE = 2**17  # units of rows that are processed as a whole, so that nothing is computed twice
SLAB = 2**14  # beyond that, units that are scored or drawn at a time: about 2 MB


class DesignOfRows(KHotDistribution):
    """A design as a set of tensors, each of which starts with the batch shape.

    Attributes:
        k: The number of ones of each row, or the smallest if it varies.
        largest_k: The largest number of ones of each row.
        temperature: The softness of the relaxation.
        kept: Intermediate values that methods share and compute once.
    """

    k: Tensor
    largest_k: Tensor
    temperature: float | Tensor
    kept: Kept
    size_varies = False  # whether draws of one row may differ in their number of ones, from `k` to `largest_k`
    _shared_k: int | None  # the k of all rows, if it was given as an int
    _has_own_probs: ClassVar[bool] = False

    @property
    def size(self) -> int | Tensor:
        """``k`` as an int if it is known to be the same in all rows, otherwise as the tensor ``k``."""
        return self.k if self._shared_k is None else self._shared_k

    def sizes(self, wanted: str) -> list[int]:
        """The different k of the rows in increasing order; ``[0]`` if there are no rows.

        Raises:
            NotImplementedError: If the contents of k cannot be read; the message names ``wanted``.
        """
        if self._shared_k is not None:
            return [operator.index(self._shared_k)]
        if not can_look(self.k):
            raise NotImplementedError(f"{wanted} needs `k` as an int under vmap and in compiled code")
        return cast(list[int], self.k.unique().tolist() or [0])

    def _require_shared_k(self, wanted: str, advice: str = "") -> int:
        if self._shared_k is None:
            sizes = self.sizes(wanted)
            if len(sizes) != 1:
                advice = f"; {advice}" if advice else ""
                raise NotImplementedError(f"{wanted} needs the same k in all rows, but got k in {sizes}{advice}")
            return sizes[0]
        return operator.index(self._shared_k)

    @property
    def relaxes_logits(self) -> bool:
        """Whether ``probs`` is the relaxation of given ``logits``, rather than given or defined by the design."""
        return self.parameter_name == "logits" and not self._has_own_probs

    def _size_of(self, k: Tensor) -> int | Tensor:
        """The k of some rows, as an int if it is one."""
        return k if self._shared_k is None else self._shared_k

    def expand(self, batch_shape: SizeLike, _instance: Any = None) -> Self:
        new = super().expand(batch_shape, _instance)
        if new.batch_shape != self.batch_shape:
            new.kept = Kept()
        return new

    def _sources(self) -> list[Any]:
        sizes = [] if self._shared_k is not None else [self.k, self.largest_k]
        return [self.parameter, self.temperature, *sizes]

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles: the parameter without computed values, whose graph cannot be copied."""
        lazy = self._lazy - {self.parameter_name}
        return {name: value for name, value in super().__getstate__().items() if name not in lazy} | {"kept": Kept()}

    def in_float64(self) -> Self:
        """This design with a parameter in float64, so that results are not rounded."""
        if self.parameter.dtype == torch.float64:
            return self
        tensors = [(name, value) for name, value in self.__getstate__().items() if isinstance(value, Tensor)]
        wide = {name: value.double() for name, value in tensors if value.is_floating_point()}
        return instance_of(type(self), self.__getstate__() | wide)

    def _by_rows(self, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """``function(probs, k, *others, kept=self.kept)`` for tensors ``(..., n)``; many rows go slab by slab."""
        probs, *others = arguments
        if probs.numel() <= WHOLE:
            return function(probs, self.k, *others, kept=self.kept)
        return self._in_slabs(function, *arguments, largest=SLAB, most=MOST_SLABS)

    def _in_slabs(
        self, function: Callable[..., Tensor], *arguments: Tensor, largest: int, most: int | None = None
    ) -> Tensor:
        """``function(probs, k, *others)``; many rows are processed in slabs of ``largest`` units, at most ``most``."""

        def of_rows(probs: Tensor, *others_and_k: Tensor) -> tuple[Tensor]:
            *others, k = others_and_k
            return (function(probs, k.squeeze(-1), *others),)

        return by_rows(of_rows, largest, *arguments, self.k.unsqueeze(-1), most=most)[0]

    def _draw_by_rows(self, function: Callable[..., Tensor], sample_shape: SizeLike, *options: Any) -> Tensor:
        """Draws ``function(probs, k, draws, *options)``, ``(draws, *probs.shape)``, reshaped as ``sample`` requires."""
        shape, draws = self._extended_shape(sample_shape), math.prod(sample_shape)

        def of_rows(probs: Tensor, k: Tensor, kept: "Kept | None" = None) -> Tensor:
            return function(probs, k, draws, *options, kept=kept).movedim(0, -2)

        drawn = self._by_rows(of_rows, self.probs.detach())
        return drawn.movedim(-2, 0).reshape(shape).to(self.parameter.dtype)
