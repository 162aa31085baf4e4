"""Systematic sampling: one uniform number for all units, in a random or a given order."""

import torch
from torch import Size, Tensor

from khot._contents import can_look
from khot._validation import check_choice
from khot.laws import systematic as law
from khot.relaxations import sigmoid_topk
from khot.relaxations.hard import indices_of_largest

from .design import Relaxation, SamplingDesign
from .rows import by_rows, draw_by_rows
from .sizes import shared_k


class Systematic(SamplingDesign):
    r"""Draws k-hot vectors with exactly the given inclusion probabilities by systematic sampling.

    ``order="fixed"`` takes the units in the given order, with O(n) work per draw. Draws spread over the order as evenly
    as possible, and ``log_prob``, ``entropy`` and ``pairwise_inclusion`` are exact. At most n vectors are possible; for
    all others ``log_prob`` is ``-inf`` with gradient 0. ``order="random"`` shuffles the units for each draw; more
    vectors become possible, and their probabilities are unknown.

    ``mean`` is ``probs``. All results are differentiable in ``logits``, and in ``probs`` along changes that keep the
    sum, with kinks where partial sums of ``probs`` differ by an integer. Vectors with a probability below 16 eps of
    float64 count as impossible, because rounding produces such vectors.

    Arguments and errors are those of :class:`~khot.SamplingDesign`. ``order`` is ``"fixed"`` or
    ``"random"``.

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
        check_choice("order", order, ("fixed", "random"))
        self.order = order
        super().__init__(probs, logits, k, relaxation=relaxation, temperature=temperature, validate_args=validate_args)

    def _require_fixed_order(self, wanted: str) -> None:
        if self.order != "fixed":
            raise self._unavailable(wanted)

    def _pairwise_inclusion(self) -> Tensor:
        self._require_fixed_order("pairwise_inclusion")
        return by_rows(self, law.pairs_in_order, self._probs)

    def _mode(self) -> Tensor:
        """The vector of the longest interval in the given order."""
        self._require_fixed_order("log_prob")
        return law.mode_in_order(self._probs, self._k, self._kept)

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        draw = law.draw_in_order if self.order == "fixed" else law.draw_in_random_order
        return draw_by_rows(self, draw, shape, generator)

    def _sample_indices(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        """The positions; in the given order, by O(n) work per row of parameters and O(k log n) per draw."""
        k = shared_k(self, "sample_indices")
        if self.order != "fixed" or not can_look(self._wide):
            return super()._sample_indices(shape, generator)
        u = law.start_points(shape + self._probs.shape, self._wide.device, generator)
        indices = law.find(law.cuts_in_order(self._probs, self._k, self._kept).end, u, k)
        if (self._probs >= 1).any() or (indices.diff(dim=-1) <= 0).any():  # units as long as the distance of points
            chosen = law.choose(law.line(self._probs, self._k), u)
            indices = indices_of_largest(chosen.to(self.dtype), k)
        return indices

    def _log_prob(self, value: Tensor) -> Tensor:
        self._require_fixed_order("log_prob")
        return by_rows(self, law.log_prob_in_order, self._probs, value)

    def _entropy(self) -> Tensor:
        self._require_fixed_order("entropy")
        return by_rows(self, law.entropy_in_order, self._probs)
