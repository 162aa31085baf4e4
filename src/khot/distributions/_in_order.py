"""The shared part of designs that process the units in an order; if the order is given, their law is known."""

from types import ModuleType

from torch import Tensor

from .design import SamplingDesign


class DesignInOrder(SamplingDesign):
    """Processes the units in the given order, ``order="fixed"``, or shuffles them for each draw, ``order="random"``."""

    _settings = ("order",)
    _complete_with = "order='fixed'"
    _law: ModuleType  # of khot.laws, with log_prob_in_order, entropy_in_order and pairs_in_order
    order: str

    @property
    def pairwise_inclusion(self) -> Tensor:
        """Matrix ``(..., n, n)`` of E[x_i x_j], with ``mean`` on the diagonal."""
        self._require_fixed_order("pairwise_inclusion")
        return self._by_rows(self._law.pairs_in_order, self.probs).to(self.probs.dtype)

    def _log_prob(self, value: Tensor) -> Tensor:
        self._require_fixed_order("log_prob")
        return self._by_rows(self._law.log_prob_in_order, self.probs, value).to(self.probs.dtype)

    def entropy(self) -> Tensor:
        self._require_fixed_order("entropy")
        return self._by_rows(self._law.entropy_in_order, self.probs).to(self.probs.dtype)

    def _require_fixed_order(self, wanted: str) -> None:
        if self.order != "fixed":
            raise self._unavailable(wanted)
