"""Designs that are spread over processes: the local design, of whole rows or of parts of them."""

from typing import cast

import torch
from torch import Tensor
from torch.distributions.utils import lazy_property
from typing_extensions import Self

from khot._distributed.batch import SpreadBatch
from khot._distributed.shards import Shards
from khot._torch_internals import instance_of, may_record
from khot.constraints import capped_simplex

from .base import KHotDistribution
from .rows import DesignOfRows


class SpreadDesign(DesignOfRows):
    """A design, of vectors or of rankings, whose parameter may be a DTensor; see :mod:`.spread`."""

    _knows_parts = False  # whether sharded rows stay sharded
    _check_rows_here: bool | None  # the argument validate_args

    def _validate_spread(self, validate_args: bool | None) -> bool:
        """Checks the rows of this process, if designs are checked at all; the whole parameter is then not checked.

        For rows that stay sharded this takes one collective. If something is wrong, all processes know, and they gather
        the rows for the message.
        """
        KHotDistribution.__init__(self, *self._shapes(), validate_args=False)
        spread = cast(SpreadBatch, self.spread)
        if self._knows_parts and spread.is_cut:
            fits = not self.checks_rows_here or self.parts_here._parts_fit(spread.in_parts().shards)
            self._derived = None
            if fits:
                return False
        rows: SpreadDesign = self.rows_here
        KHotDistribution.__init__(rows, *rows._shapes(), validate_args=validate_args)
        self._derived = None  # the local rows; a subclass may have more to compute from them
        return False

    @property
    def checks_rows_here(self) -> bool:
        """Whether the local part of a spread design, and values given to it, are validated."""
        default = bool(type(self)._validate_args)
        return default if self._check_rows_here is None else self._check_rows_here

    def _parts_fit(self, shards: Shards) -> bool:
        """Whether the parameter, of which this is a part, will pass all checks."""
        x, total = self.parameter.detach(), torch.zeros((), dtype=torch.float64)
        if self.parameter_name == "probs":
            regular = (x >= 0) & (x <= 1)
            total = x.sum(-1, dtype=torch.float64)
        else:
            regular = ~x.isnan()
        counts = (~regular).sum(-1), (x == torch.inf).sum(-1), (x > -torch.inf).sum(-1)
        wrong, included, possible, total = shards.sum(*counts, total.expand(self.batch_shape))
        fits = (wrong == 0) & (self.k >= 0) & (self.k <= shards.n)
        if self.parameter_name == "probs":
            fits &= capped_simplex(self.size).is_sum(total, x.dtype, shards.n)
        elif not self.relaxes_logits:
            fits &= (included <= self.k) & (possible >= self.k)
        if isinstance(self.temperature, Tensor):
            fits &= (self.temperature > 0) & self.temperature.isfinite()
        return bool(fits.all())

    @lazy_property
    def rows_here(self) -> Self:
        """For a design whose parameter is a DTensor: the design of the rows of this process, in plain tensors."""
        new = self._part_of(cast(SpreadBatch, self.spread))
        if self._check_rows_here is not None:
            new._validate_args = self._check_rows_here
        return new

    def rows_of_one_size(self, wanted: str) -> Self:
        """The same, if k is equal in the rows of all processes; a k that is spread takes a collective to compare.

        Raises:
            NotImplementedError: If rows differ in k; the message names ``wanted``.
        """
        rows: Self = self.rows_here
        if self._shared_k is None and not self.size_varies:
            rows._shared_k = self._require_shared_k(wanted)
        return rows

    @lazy_property
    def parts_here(self) -> Self:
        """The same for sharded rows, as a design of the units of this process: for members that work on parts.

        They are to be called where ``shards_of_rows`` provides the processes that hold the other parts.
        """
        new = self._part_of(cast(SpreadBatch, self.spread).in_parts())
        new._validate_args = False
        return new

    def _part_of(self, spread: SpreadBatch) -> Self:
        attributes = self.__getstate__() | {"spread": None}
        with torch.set_grad_enabled(may_record()):  # cached tensors keep their graph for later gradients
            for name, value in attributes.items():
                if isinstance(value, Tensor):
                    attributes[name] = spread.here(name, value)
        new = instance_of(type(self), attributes)
        super(SpreadDesign, new).__init__(*new._shapes(), validate_args=False)
        del new._validate_args
        return new

    def holds_parts(self, value: Tensor, shards: Shards) -> Tensor:
        """Which values ``(..., m)``, of which this process has a part, are in the support; equal on all processes."""
        wrong, total = shards.sum(((value != 0) & (value != 1)).sum(-1), value.sum(-1, dtype=torch.float64))
        return (wrong == 0) & (total == self.k)

    def some_parts(self, value: Tensor, inside: Tensor, shards: Shards) -> Tensor:
        """The values, with k-hot ones in place of those that are not ``inside`` the support."""
        unit = shards.first + torch.arange(value.shape[-1], device=value.device)
        return torch.where(inside.unsqueeze(-1), value, (unit < self.k.unsqueeze(-1)).to(value.dtype))

    def log_prob_of_parts(self, value: Tensor, shards: Shards) -> Tensor:
        """Log-probability of k-hot values ``(*sample_shape, *batch_shape, m)``, of which this process has a part."""
        raise self._unavailable("log_prob")

    def works_on_parts(self, member: str) -> bool:
        """Whether this member of a design with sharded rows works without whole rows.

        All processes must ask together, as this may take collectives, and get the same answer.
        """
        return False
