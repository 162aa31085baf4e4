"""Every public map by a call of one argument, for what is promised of all of them: tracing, compiling, exporting."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from tests.maps import Cauchy


class NamedCauchy(Cauchy, name="tests.named_cauchy"):
    """A user's link that can be exported, with an attribute that is part of its value."""

    def __init__(self, width: float = 1.0) -> None:
        self.width = width

    def value(self, z: Tensor) -> Tensor:
        return super().value(z / self.width)

    def slope(self, z: Tensor) -> Tensor:
        return super().slope(z / self.width) / self.width

    def inverse(self, p: Tensor) -> Tensor:
        return super().inverse(p) * self.width


@dataclass(frozen=True)
class AnyMap:
    """A public map under test.

    Attributes:
        name: Identifier of the test: that of the function, and what is special about the call.
        call: From x (..., n), n >= 4, and a softness, a number or a tensor of the batch shape.
        differentiable: Whether the result has a gradient.
        slow: Whether the quick tests do without it.
    """

    name: str
    call: Callable[[Tensor, float | Tensor], Tensor]
    differentiable: bool = True
    slow: bool = False


def quick_first(cases: dict[str, Any]) -> list[Any]:
    """The values of a dictionary for ``parametrize``: the quick tests have to do with the first."""
    marks = [[], *([pytest.mark.slow] for _ in cases)]
    return [pytest.param(case, id=name, marks=mark) for (name, case), mark in zip(cases.items(), marks, strict=False)]


def weights(x: Tensor) -> Tensor:
    """Of the permutahedron and the isotonic maps, descending."""
    return torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device)


def twos(x: Tensor) -> Tensor:
    return torch.full(x.shape[:-1], 2, device=x.device)


def isotonic_l2(x: Tensor, s: float | Tensor) -> Tensor:
    return khot.isotonic_l2(x, weights(x) * (s.unsqueeze(-1) if isinstance(s, Tensor) else s))


def dual_isotonic_lp(x: Tensor, s: float | Tensor) -> Tensor:
    return khot.isotonic_lp(x, weights(x), 1.5, s, "dual", kind="magnitude")


def straight_through_lapsum(x: Tensor, s: float | Tensor) -> Tensor:
    return khot.straight_through_topk(x, 2, s, relaxation=khot.lapsum_topk)


MAPS = [
    AnyMap("sigmoid_topk", lambda x, s: khot.sigmoid_topk(x, 2.5, s)),
    AnyMap("log_sigmoid_topk", lambda x, s: khot.log_sigmoid_topk(x, 2.5, s)),
    AnyMap("lapsum_topk", lambda x, s: khot.lapsum_topk(x, 3, s)),
    AnyMap("log_lapsum_topk", lambda x, s: khot.log_lapsum_topk(x, 3, s), slow=True),
    AnyMap("normal_topk", lambda x, s: khot.normal_topk(x, 3, s), slow=True),
    AnyMap("transport_topk", lambda x, s: khot.transport_topk(x, 2, s)),
    AnyMap("capped_softmax", lambda x, s: khot.capped_softmax(x, 2.5, s)),
    AnyMap("capped_simplex_map", lambda x, s: khot.capped_simplex_map(x, 2.5, s, link=NamedCauchy(0.7))),
    AnyMap("capped_simplex_map_student_t", lambda x, s: khot.capped_simplex_map(x, 2.5, s, link=khot.StudentT(2))),
    AnyMap("sparse_topk_two", lambda x, s: khot.sparse_topk(x, 2.5, s)),
    AnyMap("sparse_topk_any_p", lambda x, s: khot.sparse_topk(x, 3, s, p=1.5)),
    AnyMap("sparse_topk_magnitude_two", lambda x, s: khot.sparse_topk_magnitude(x, 2.5, s)),
    AnyMap("sparse_topk_magnitude_any_p", lambda x, s: khot.sparse_topk_magnitude(x, 2.5, s, 1.7), slow=True),
    AnyMap("sparse_topk_signed", lambda x, s: khot.sparse_topk_signed(x, 2.5, s, 1.5)),
    AnyMap("sorted_transport_topk", lambda x, s: khot.sorted_transport_topk(x, 2, s)),
    AnyMap("soft_rank", khot.soft_rank),
    AnyMap("soft_sort", khot.soft_sort, slow=True),
    AnyMap("soft_permutation", partial(khot.soft_permutation, descending=True)),
    AnyMap("isotonic_l2", isotonic_l2),
    AnyMap("isotonic_l2_dykstra", lambda x, s: khot.isotonic_l2(x, weights(x), "dykstra"), slow=True),
    AnyMap("isotonic_lp", lambda x, s: khot.isotonic_lp(x, weights(x), 1.5, s)),
    AnyMap("isotonic_lp_dual", dual_isotonic_lp, slow=True),
    AnyMap("permutahedron_projection", lambda x, s: khot.permutahedron_projection(x, weights(x), s)),
    AnyMap("permutahedron_rank", khot.permutahedron_rank),
    AnyMap("permutahedron_sort", khot.permutahedron_sort, slow=True),
    AnyMap("successive_softmax_topk", lambda x, s: khot.successive_softmax_topk(x, 2, s)),
    AnyMap("rescaled_sigmoid_topk", lambda x, s: khot.rescaled_sigmoid_topk(x, 2.5, s)),
    AnyMap("straight_through_topk", lambda x, s: khot.straight_through_topk(x, 2, s)),
    AnyMap("straight_through_topk_lapsum", straight_through_lapsum, slow=True),
    AnyMap("topk_mask", lambda x, s: khot.topk_mask(x, 2), differentiable=False),
    AnyMap("topk_mask_tensor_k", lambda x, s: khot.topk_mask(x, twos(x)), differentiable=False),
]
