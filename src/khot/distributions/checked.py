"""Checks of the parameters of a design and of the values given to it. Each error message says what to do."""

import math

import torch
from torch import Tensor
from torch.distributions import constraints

from khot._contents import can_look, is_finite, looks_at_contents
from khot.constraints import capped_simplex

from ._arguments import Vector
from .base import is_half
from .enumeration import EnumeratedDesign

SURE = 0.5  # a sum whose rounding is smaller fits only the nearest integer


class CheckedDesign(EnumeratedDesign):
    """A design whose parameters and values are checked."""

    arg_constraints = {
        "probs": Vector(constraints.unit_interval),
        "logits": Vector(constraints.real),
        "k": constraints.nonnegative_integer,
    }

    def _fits(self) -> bool:
        if self._shared_k is None or isinstance(self.temperature, Tensor):
            return False
        if self.arg_constraints is not CheckedDesign.arg_constraints:
            return False
        if self.parameter_name == "logits":
            return is_finite(self.parameter)
        return capped_simplex(self._shared_k).holds(self.parameter.detach())

    def _validate_range(self) -> None:
        if self.parameter_name == "probs" and self.parameter.numel():
            lowest, highest = (end.item() for end in self.parameter.detach().aminmax())
            if math.isnan(lowest) or math.isnan(highest):
                raise ValueError("`probs` must lie in [0, 1], but contain NaN")
            if not (lowest >= 0 and highest <= 1):
                raise ValueError(
                    f"`probs` must lie in [0, 1], but got entries from {lowest:.6g} to {highest:.6g}; give scores by "
                    "keyword, logits=scores"
                )

    def _validate_contents(self) -> None:
        n, k = self.event_shape[0], self.k
        if not ((k >= 0) & (k <= n)).all():
            raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k from {k.min()} to {k.max()} with n={n}")
        if isinstance(self.temperature, Tensor) and not ((self.temperature > 0) & self.temperature.isfinite()).all():
            raise ValueError(f"`temperature` must be positive and finite, but got {self.temperature}")
        if self.parameter_name == "probs":
            self._check_probs(
                self.parameter,
                "`probs`",
                "round or rescale it; for sums that are not integers, use PhantomUnit; give scores by keyword, "
                "logits=scores",
            )

    def _check_probs(self, probs: Tensor, name: str, advice: str) -> None:
        probs = probs.detach()
        simplex = capped_simplex(self.size)
        if not simplex.holds(probs):
            wrong = ~simplex.check(probs)
            row, k = probs[wrong][0], self.k[wrong][0]
            expected = f"each row of {name} must lie in [0, 1] and sum to its integer k, but"
            if row.isnan().any():
                raise ValueError(f"{expected} one contains NaN (shape {tuple(probs.shape)})")
            raise ValueError(
                f"{expected} got entries from {row.min():.6g} to {row.max():.6g} with the sum "
                f"{row.sum(dtype=torch.float64):.9g} for k={k} (shape {tuple(probs.shape)}); {advice}"
            )

    def _validate_infinite_logits(self) -> None:
        """Checks natural parameters: ``inf`` includes a unit, ``-inf`` excludes it, and k must allow both."""
        if self.parameter_name == "probs":
            return
        included, possible = (self.parameter == torch.inf).sum(-1), (self.parameter > -torch.inf).sum(-1)
        wrong = (included > self.largest_k) | (possible < self.k)
        if wrong.any():
            low, high = self.k[wrong][0], self.largest_k[wrong][0]
            raise ValueError(
                f"`k` must lie between the number of `logits` equal to inf, {included[wrong][0]}, "
                f"and that of those above -inf, {possible[wrong][0]}, but got k={low if low == high else (low, high)}"
            )

    def _validate_sample(self, value: Tensor) -> None:
        try:
            super()._validate_sample(value)
        except ValueError as error:
            if "support" not in str(error) or not can_look(value) or not ((value > 0) & (value < 1)).any():
                raise
            advice = "entries between 0 and 1 are relaxed: relax the model too (khot.infer.KHotReparam)"
            raise ValueError(f"{error}\n{advice}") from None

    def _sums_of(self, probs: Tensor) -> Tensor:
        return _sizes(probs.detach().sum(-1, dtype=torch.float64), probs.dtype, probs.shape[-1])


def _sizes(total: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    """The integers that the float64 sums of n rounded probabilities of a dtype represent."""
    k = total.nan_to_num().round().long()  # the checks report NaN
    if not looks_at_contents(total) or capped_simplex.rounding_of_sum(n, dtype, n) < SURE:
        return k
    for other in (k - 1, k + 1):
        doubtful = (other >= 0) & (other <= n) & capped_simplex(other.clamp(min=0)).is_sum(total, dtype, n)
        if doubtful.any():
            first = total[doubtful][0].item()
            raise ValueError(
                f"`k` must be given with `probs` in {dtype}: the sum {first:.9g} of the rounded entries fits the size "
                f"{other[doubtful][0]} as well as {k[doubtful][0]}; pass k=..., or `probs` in "
                f"{'float32' if is_half(dtype) else 'float64'}"
            )
    return k
