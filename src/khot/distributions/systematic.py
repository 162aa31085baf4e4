r"""Systematic sampling: one uniform number for all units, in random or in given order.

In the given order the units lie one after the other on a line, unit i on :math:`[V_{i-1}, V_i)` with V the cumulative
sum of the probabilities, and the points u, u + 1, u + 2, ... choose those they fall on, u uniform on [0, 1). With
:math:`F_i + f_i = V_i` the integer and the fractional part, :math:`F_i + [u < f_i]` of the first i units are chosen.

Hence the closed forms below. The f_i cut [0, 1) into intervals, each with a vector of its own whose probability is its
length. x has partial sums :math:`s_i`, each of which demands :math:`u < f_i` (if it is :math:`F_i + 1`),
:math:`u \ge f_i` (if it is :math:`F_i`), or is impossible. Two units are chosen together as far as their intervals
overlap modulo 1.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.types import _size as SizeLike

from khot._validation import can_look, check_generator
from khot.kernels import random_numbers
from khot.kernels.tournament import balance
from khot.relaxations import sigmoid_topk

from ._arguments import checked_order
from .design import Relaxation, SamplingDesign, positions

TOLERANCE = 16 * torch.finfo(torch.float64).eps  # fractional parts of partial sums closer than this count as equal


class Systematic(SamplingDesign):
    r"""Draws k-hot vectors with exactly the given inclusion probabilities by systematic sampling.

    ``order="fixed"`` takes the units in the given order, O(n) work per draw: draws spread over the order as evenly as
    can be, and ``log_prob``, ``entropy`` and ``pairwise_inclusion`` are exact. At most n vectors are possible; at all
    others ``log_prob`` is ``-inf`` with gradient 0. ``order="random"`` shuffles the units for each draw; more vectors
    become possible, and their probabilities are unknown. On a CPU many rows, some at a time, take at most 16 times the
    memory of float32 parameters; one long row, of whose partial sums there are about ten in float64, 24 times, and
    ``log_prob`` 30 times.

    ``mean`` is ``probs``. Everything computed is differentiable in ``probs``, along changes that keep the sum, and in
    ``logits``, with kinks where partial sums of ``probs`` differ by an integer. Vectors with a probability below 16 eps
    of float64 count as impossible: rounding makes such vectors.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum.
        logits: Real scores ``(..., n)``.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape. Required with ``logits``.
        order: ``"fixed"`` or ``"random"``.
        relaxation: Map ``relaxation(logits, k, temperature)`` to the inclusion probabilities.
        temperature: Softness of the relaxation.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.

    References:
        [1] Madow (1949), "On the theory of systematic sampling, II", Annals of Mathematical Statistics 20(3).
        [2] Tillé (2006), "Sampling Algorithms", chapter 7.

    Example:
        >>> design = Systematic(probs=torch.tensor([0.5, 0.25, 0.5, 0.75]))
        >>> design.log_prob(torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]])).exp()
        tensor([0.2500, 0.2500, 0.0000])
    """

    _settings = ("order",)
    _complete_with = "order='fixed'"

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        k: int | Tensor | None = None,
        *,
        order: str = "fixed",
        relaxation: Relaxation = sigmoid_topk,
        temperature: float | Tensor = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        self.order = checked_order(order)
        super().__init__(probs, logits, k, relaxation=relaxation, temperature=temperature, validate_args=validate_args)

    @property
    def pairwise_inclusion(self) -> Tensor:
        """Matrix ``(..., n, n)`` of E[x_i x_j], with ``mean`` on the diagonal."""
        line = self._line("pairwise_inclusion")
        start = pad(line.fraction[..., :-1], (1, 0))
        end = line.fraction + (line.whole - pad(line.whole[..., :-1], (1, 0)))
        start, end = torch.where(line.certain, 0, start), torch.where(line.certain, 1, end)  # 0 <= start <= end < 2
        pairs = torch.zeros((), dtype=start.dtype, device=start.device)
        for turn in (-1, 0, 1):
            first_end = torch.minimum(end.unsqueeze(-1), end.unsqueeze(-2) + turn)
            last_start = torch.maximum(start.unsqueeze(-1), start.unsqueeze(-2) + turn)
            pairs = pairs + (first_end - last_start).clamp(min=0)
        off_diagonal = ~torch.eye(self.event_shape[0], dtype=torch.bool, device=start.device)
        return (pairs * off_diagonal + torch.diag_embed(self.probs.double())).to(self.probs.dtype)

    @property
    def mode(self) -> Tensor:
        """The vector of the longest interval in the given order."""
        line = self._line("log_prob")
        cuts, length = _intervals(line.fraction)
        u = cuts.gather(-1, length.argmax(-1, keepdim=True))
        return _choose(line, u).to(self.probs.dtype)

    def sample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        check_generator(generator, self.parameter.device)
        draw = _draw_in_order if self.order == "fixed" else _draw_in_random_order
        with torch.no_grad():
            return self._draw_by_rows(partial(draw, generator=generator), sample_shape, self.probs.detach())

    def sample_indices(
        self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """The draws of ``sample`` as the k positions of the ones, ``sample_shape + batch_shape + (k,)``, long.

        In the given order O(n) work for each row of parameters and O(k log n) for each draw.
        """
        check_generator(generator, self.parameter.device)
        k = self._require_shared_k("sample_indices")
        if self.order != "fixed" or not can_look(self.parameter):
            return super().sample_indices(sample_shape, generator=generator)
        with torch.no_grad():
            line, shape = self._line("sample"), self._extended_shape(sample_shape)
            u = _uniform(shape, self.parameter.device, generator)
            indices = _find(line, u, k)
            if line.certain.any() or (indices.diff(dim=-1) <= 0).any():  # units as long as the distance of the points
                indices = positions(_choose(line, u), k)
        return indices

    def _log_prob(self, value: Tensor) -> Tensor:
        self._require_fixed_order("log_prob")
        return self._by_rows(_log_prob_in_order, self.probs, value).to(self.probs.dtype)

    def entropy(self) -> Tensor:
        self._require_fixed_order("entropy")
        return self._by_rows(_entropy_in_order, self.probs).to(self.probs.dtype)

    def _line(self, wanted: str) -> "_Line":
        self._require_fixed_order(wanted)
        return _line_in_order(self.k, self.probs)

    def _require_fixed_order(self, wanted: str) -> None:
        if self.order != "fixed":
            raise self._unavailable(wanted)


class _Line(NamedTuple):
    """The ends of the units' intervals; tensors of the shape of ``probs``, float64 but for the first."""

    certain: Tensor  # bool: units of probability 1, chosen in any case; they have no length on the line
    units: Tensor  # number of units with a length up to this one
    k: Tensor  # the whole length, (..., 1)
    whole: Tensor  # the end is whole + fraction
    fraction: Tensor  # in [0, 1]


def _lay_out(probs: Tensor, k: Tensor) -> _Line:
    certain = probs >= 1
    probs = torch.where(certain, 0, probs)
    k = (k - certain.sum(-1)).unsqueeze(-1).double()
    end = probs.cumsum(-1)
    # The fractions of a long row would lose the digits that the sums drop: these, summed up, and what the whole then
    # lacks to k are added to the fractions.
    dropped = (probs - (end - pad(end[..., :-1], (1, 0)))).cumsum(-1)
    lacking = k - end[..., -1:] - dropped[..., -1:]
    dropped = dropped + lacking * (end / end[..., -1:].clamp(min=torch.finfo(end.dtype).tiny))
    whole = end.detach().floor()
    fraction = end - whole + dropped.detach()
    carry = fraction.detach().floor()
    units = (probs > 0).double().cumsum(-1)
    last = units == units[..., -1:]
    return _Line(certain, units, k, torch.where(last, k, whole + carry), torch.where(last, 0, fraction - carry))


def _line_in_order(k: Tensor, probs: Tensor) -> _Line:
    line = _lay_out(balance(probs, k), k)
    return line._replace(fraction=_join(line.fraction))


def _uniform(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """One number for each draw of each row, in the place of the units."""
    return random_numbers.uniform((*shape[:-1], 1), torch.float64, device, generator)


def _draw_in_order(k: Tensor, probs: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    return _choose(_line_in_order(k, probs), _uniform(torch.Size((draws, *probs.shape)), probs.device, generator))


def _draw_in_random_order(k: Tensor, probs: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    shape = torch.Size((draws, *probs.shape))
    order = random_numbers.shuffled(shape, probs.device, generator)
    line = _lay_out(balance(probs, k).expand(shape).gather(-1, order), k)
    shuffled = _choose(line, _uniform(shape, probs.device, generator))
    return torch.empty_like(shuffled).scatter(-1, order, shuffled)


def _log_prob_in_order(k: Tensor, probs: Tensor, value: Tensor) -> Tensor:
    line = _line_in_order(k, probs)
    excess = (value.double() - line.certain.double()).cumsum(-1) - line.whole
    below, above = excess == 1, excess == 0
    upper = torch.where(below, line.fraction, 1).amin(-1)
    lower = torch.where(above, line.fraction, 0).amax(-1)
    possible = (below | above).all(-1) & (upper > lower) & (value >= line.certain.double()).all(-1)
    return torch.where(possible, upper - lower, 1).log().masked_fill(~possible, -torch.inf)


def _entropy_in_order(k: Tensor, probs: Tensor) -> Tensor:
    _, length = _intervals(_line_in_order(k, probs).fraction)
    return -(length * torch.where(length > 0, length, 1).log()).sum(-1)


def _join(fraction: Tensor) -> Tensor:
    """Makes fractions equal that differ by rounding, from 0 and 1 too."""
    ordered, order = fraction.detach().sort(-1)
    first = ordered - pad(ordered[..., :-1], (1, 0)) > TOLERANCE  # of those that are one
    position = torch.where(first, torch.arange(1, ordered.shape[-1] + 1, device=ordered.device), 0).cummax(-1).values
    joined = pad(ordered, (1, 0)).gather(-1, position)
    joined = torch.where((1 - ordered[..., -1:] <= TOLERANCE) & (position == position[..., -1:]), 1.0, joined)
    return fraction + (torch.empty_like(joined).scatter(-1, order, joined) - fraction).detach()


def _intervals(fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Left ends and lengths of the intervals of u, those without a length included."""
    cuts = pad(fraction, (1, 0)).sort(-1).values
    return cuts, pad(cuts[..., 1:], (0, 1), value=1.0) - cuts


def _choose(line: _Line, u: Tensor) -> Tensor:
    count = (line.whole + (u < line.fraction)).cummax(-1).values
    # At most one more for each unit and k in the end, also where rounding would have it otherwise.
    count = line.units + (count - line.units).clamp(max=0).cummin(-1).values
    count = torch.maximum(torch.minimum(count, line.k), line.k - line.units[..., -1:] + line.units)
    return (count > pad(count[..., :-1], (1, 0))) | line.certain


def _find(line: _Line, u: Tensor, k: int) -> Tensor:
    """The units that the points u, u + 1, ... fall on, ``(*sample, *batch, k)``: the first ones that end beyond."""
    end = (line.whole + line.fraction).cummax(-1).values.view(-1, line.whole.shape[-1])
    below_k = k * (1 - torch.finfo(u.dtype).eps)  # also where u + k - 1 rounds up
    points = (u + torch.arange(k, dtype=u.dtype, device=u.device)).clamp(max=below_k)
    rows, draws = len(end), math.prod(u.shape) // max(1, len(end))
    by_row = points.view(draws, rows, k).transpose(0, 1).reshape(rows, draws * k)
    found = torch.searchsorted(end, by_row, right=True)
    return found.view(rows, draws, k).transpose(0, 1).reshape(points.shape)
