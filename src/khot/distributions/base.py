"""What designs, relaxed laws and the estimators that wrap designs have in common: the checks of shapes and values."""

from typing import cast

from pyro.distributions import TorchDistribution
from torch import Size, Tensor
from torch.distributions.constraints import Constraint
from torch.types import _size as SizeLike

from khot._validation import checked_shape


class KHotDistribution(TorchDistribution):
    """A distribution over vectors of n units, whose shapes and values are checked in one place."""

    def _extended_shape(self, sample_shape: SizeLike = Size()) -> Size:
        return Size(checked_shape("sample_shape", sample_shape) + self.batch_shape + self.event_shape)

    def _validate_sample(self, value: Tensor) -> None:
        """As in torch; where rows differ in k, a value for several of them, as in enumeration over k, must fit one."""
        try:
            super()._validate_sample(value)
        except ValueError as error:
            if "within the support" not in str(error):
                raise
            fits = cast(Constraint, self.support).check(value)
            if not (fits.long().sum_to_size(value.shape[:-1]) > 0).all():
                raise
