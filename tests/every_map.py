"""Every public map as a function of one argument, for what all of them promise: tracing, compiling, exporting."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import khot
from tests.maps import ODD_MAPS, RELAXATIONS, publics


def with_sum(k: int | float) -> Callable[..., Tensor]:
    """How to call a mask that sums to k."""
    return lambda function, x, softness: function(x, k, softness)


@dataclass(frozen=True)
class AnyMap:
    """A public map under test.

    Attributes:
        public: The map.
        form: How it is called: from the map, x (..., n), n >= 4, and a softness, a number or of the batch shape.
        detail: What is special about the call.
        differentiable: Whether the result has a gradient.
        slow: Whether the quick tests do without it.
    """

    public: Callable[..., Tensor]
    form: Callable[..., Tensor] = lambda function, x, softness: function(x, softness)
    detail: str = ""
    differentiable: bool = True
    slow: bool = False

    @property
    def name(self) -> str:
        return "_".join(filter(None, (self.public.__name__, self.detail)))

    @property
    def call(self) -> Callable[[Tensor, float | Tensor], Tensor]:
        function, form = self.public, self.form
        return lambda x, softness: form(function, x, softness)


def weights(x: Tensor) -> Tensor:
    """Of the permutahedron and the isotonic maps, descending."""
    return torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device)


def levels(x: Tensor) -> Tensor:
    """Of quantiles, in (0, 1)."""
    return torch.arange(1, 8, 3, dtype=x.dtype, device=x.device) / 8


def twos(x: Tensor) -> Tensor:
    return torch.full(x.shape[:-1], 2, device=x.device)


def column(softness: float | Tensor) -> float | Tensor:
    return softness.unsqueeze(-1) if isinstance(softness, Tensor) else softness


MAPS = [
    AnyMap(khot.sigmoid_topk, with_sum(2.5)),
    AnyMap(khot.log_sigmoid_topk, with_sum(2.5)),
    AnyMap(khot.lapsum_topk, with_sum(3)),
    AnyMap(khot.log_lapsum_topk, with_sum(3), slow=True),
    AnyMap(khot.normal_topk, with_sum(3), slow=True),
    AnyMap(khot.transport_topk, with_sum(2)),
    AnyMap(khot.capped_softmax, with_sum(2.5)),
    AnyMap(khot.capped_simplex_map, lambda f, x, s: f(x, 2.5, s, link=khot.Logistic())),
    AnyMap(khot.sparse_topk, with_sum(2.5), "two"),
    AnyMap(khot.sparse_topk, lambda f, x, s: f(x, 3, s, p=1.5), "any_p"),
    AnyMap(khot.sparse_topk_magnitude, with_sum(2.5), "two"),
    AnyMap(khot.sparse_topk_magnitude, lambda f, x, s: f(x, 2.5, s, 1.7), "any_p", slow=True),
    AnyMap(khot.sparse_topk_signed, lambda f, x, s: f(x, 2.5, s, 1.5)),
    AnyMap(khot.sorted_transport_topk, with_sum(2)),
    AnyMap(khot.soft_rank),
    AnyMap(khot.soft_sort, slow=True),
    AnyMap(khot.soft_permutation, lambda f, x, s: f(x, s, descending=True)),
    AnyMap(khot.soft_count, lambda f, x, s: f(x, levels(x), s)),
    AnyMap(khot.soft_quantile, lambda f, x, s: f(x, levels(x), s)),
    AnyMap(khot.isotonic_l2, lambda f, x, s: f(x, weights(x) * column(s))),
    AnyMap(khot.isotonic_l2, lambda f, x, s: f(x, weights(x), "dykstra"), "dykstra", slow=True),
    AnyMap(khot.isotonic_lp, lambda f, x, s: f(x, weights(x), 1.5, s)),
    AnyMap(khot.isotonic_lp, lambda f, x, s: f(x, weights(x), 1.5, s, "dual", kind="magnitude"), "dual", slow=True),
    AnyMap(khot.permutahedron_projection, lambda f, x, s: f(x, weights(x), s)),
    AnyMap(khot.permutahedron_projection, lambda f, x, s: f(x, weights(x), s, p=1.5), "any_p", slow=True),
    AnyMap(khot.permutahedron_rank),
    AnyMap(khot.permutahedron_sort, slow=True),
    AnyMap(khot.successive_softmax_topk, with_sum(2)),
    AnyMap(khot.topk_threshold, with_sum(2.5)),
    AnyMap(khot.topk_threshold, lambda f, x, s: f(x, 2, relaxation=khot.topk_mask), "hard", slow=True),
    AnyMap(khot.straight_through_topk, with_sum(2)),
    AnyMap(khot.straight_through_topk, lambda f, x, s: f(x, 2, s, relaxation=khot.lapsum_topk), "lapsum", slow=True),
    AnyMap(khot.topk_mask, lambda f, x, s: f(x, 2), differentiable=False),
    AnyMap(khot.topk_mask, lambda f, x, s: f(x, twos(x)), "tensor_k", differentiable=False),
    AnyMap(khot.topk_indices, lambda f, x, s: f(x, 3, starts=twos(x) - 1, lengths=twos(x)), differentiable=False),
]
# A mask that has its entry among the relaxations need not have one here.
_CALLED = set(publics(MAPS))
MAPS += [AnyMap(mask, with_sum(2.5)) for mask in dict.fromkeys(publics(RELAXATIONS, ODD_MAPS)) if mask not in _CALLED]
# Without two solvers that others have in all but their steps, of which there are thousands.
SHORT = [case for case in MAPS if case.detail not in ("dual", "dykstra")]
