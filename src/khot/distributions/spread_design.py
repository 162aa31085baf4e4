"""Designs that are spread over processes: the design of what this process has, whole rows or parts of them."""

from typing import Self, cast

import torch
from torch import Tensor
from torch.distributions.utils import lazy_property

from khot._distributed.batch import SpreadBatch
from khot._distributed.shards import Shards
from khot.constraints import capped_simplex

from .base import KHotDistribution
from .rows import DesignOfRows


class SpreadDesign(DesignOfRows):
    """A design whose parameter may be a DTensor, see :mod:`.spread`."""

    _knows_parts = False  # whether rows that are cut stay so
    _check_rows_here: bool | None  # the argument validate_args

    def _validate_spread(self, validate_args: bool | None) -> bool:
        """Checks the rows that this process has, if any design is checked; the whole is then not looked at.

        Of rows that stay cut it is one collective, unless something is wrong, which all processes see: they gather the
        rows for the message.
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
        self._derived = None  # the rows here, of which, as of parts, a subclass may have more to tell
        return False

    @property
    def checks_rows_here(self) -> bool:
        """Whether what this process has of a spread design is validated, and values given to it are."""
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
        """Of a design whose parameter is a DTensor: that of the rows that this process has, in plain tensors."""
        new = self._part_of(cast(SpreadBatch, self.spread))
        if self._check_rows_here is not None:
            new._validate_args = self._check_rows_here
        return new

    @lazy_property
    def parts_here(self) -> Self:
        """The same of cut rows, as a design of the units that this process has: for members that work on parts.

        They are to be called where ``shards_of_rows`` tells who has the other parts.
        """
        new = self._part_of(cast(SpreadBatch, self.spread).in_parts())
        new._validate_args = False
        return new

    def _part_of(self, spread: SpreadBatch) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__getstate__() | {"spread": None})
        with torch.enable_grad():  # cached tensors keep their graph for later gradients
            for name, value in new.__dict__.items():
                if isinstance(value, Tensor):
                    new.__dict__[name] = spread.here(name, value)
        super(SpreadDesign, new).__init__(*new._shapes(), validate_args=False)
        new.__dict__.pop("_validate_args", None)
        return new

    def holds_parts(self, value: Tensor, shards: Shards) -> Tensor:
        """Which values ``(..., m)`` are in the support, of which this process has a part; all find the same."""
        wrong, total = shards.sum(((value != 0) & (value != 1)).sum(-1), value.sum(-1, dtype=torch.float64))
        return (wrong == 0) & (total == self.k)

    def some_parts(self, value: Tensor, inside: Tensor, shards: Shards) -> Tensor:
        """The values, k-hot ones in the place of those that are not ``inside`` the support."""
        unit = shards.first + torch.arange(value.shape[-1], device=value.device)
        return torch.where(inside.unsqueeze(-1), value, (unit < self.k.unsqueeze(-1)).to(value.dtype))

    def log_prob_of_parts(self, value: Tensor, shards: Shards) -> Tensor:
        """Log-probability of k-hot values ``(*sample_shape, *batch_shape, m)``, of which this process has a part."""
        raise self._unavailable("log_prob")

    def works_on_parts(self, member: str) -> bool:
        """Whether this member, of a design whose rows are cut, needs no whole rows.

        All processes ask, as it may take collectives, and get the same answer.
        """
        return False
