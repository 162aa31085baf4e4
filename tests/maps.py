"""The relaxed maps under test, with the traits that their contract reads: a new member needs one entry."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from khot import (
    capped_simplex_map,
    capped_softmax,
    lapsum_topk,
    log_lapsum_topk,
    log_sigmoid_topk,
    normal_topk,
    sigmoid_topk,
    sparse_topk,
    sparse_topk_magnitude,
    sparse_topk_signed,
    transport_topk,
)
from khot.relaxations import Link


def behind(member: Any) -> Any:
    """The function or class that a member of a registry calls, without the arguments of a partial."""
    return behind(member.func) if isinstance(member, partial) else member


def publics(*registries: Iterable[Any]) -> list[Any]:
    """The public names that have an entry in these registries."""
    entries = [case.public for cases in registries for case in cases]
    return [public for entry in entries for public in (entry if isinstance(entry, tuple) else (entry,))]


def only_for(applies: Callable[..., bool]) -> Callable[[Any], Any]:
    """Marks a check that concerns only some members, so that the others have no idle test of it."""

    def mark(check: Any) -> Any:
        check.applies = applies
        return check

    return mark


def applies(check: Any, *cases: Any) -> bool:
    """Whether a check is about a member, or a combination of members of several families."""
    return getattr(check, "applies", lambda *cases: True)(*cases)


def members(
    cases: list[Any],
    checks: list[Any],
    costly: tuple[Any, ...] = (),
    interpreted: tuple[Any, ...] = (),
) -> list[Any]:
    """Each case with each check that applies, for ``parametrize``.

    Args:
        cases: Members of a family.
        checks: What to check of them.
        costly: Checks that the quick tests leave to the first case.
        interpreted: Checks that also run in Triton's interpreter, for the cases that say so.
    """
    for check in checks:
        assert any(applies(check, case) for case in cases), f"{check.__name__} applies to no member"
    return [
        pytest.param(
            case,
            check,
            id=f"{case.name}-{check.__name__.removeprefix('check_')}",
            marks=[
                *([pytest.mark.slow] if check in costly and case is not cases[0] else []),
                *([pytest.mark.interpreted] if check in interpreted and case.interpreted else []),
            ],
        )
        for case in cases
        for check in checks
        if applies(check, case)
    ]


@dataclass(frozen=True)
class RelaxationCase:
    """A relaxed top-k mask under test.

    Attributes:
        name: Identifier of the test.
        map: Called as ``map(x, k, softness, dim=...)``.
        cdf: The link function on float64 NumPy arrays, from another source than the library's.
        softness: What the map calls its softness.
        log: The logarithm of the map, if there is one.
        smooth: Whether the map is twice differentiable everywhere.
        symmetric: Whether F(-z) = 1 - F(z).
        compact: Whether F reaches 1, so that entries are exactly that, and without derivative.
        zeros: Whether a compact link reaches 0, too.
        interpreted: Whether part of the contract also runs in Triton's interpreter.
    """

    name: str
    map: Callable[..., Tensor]
    cdf: Callable[[Any], Any]
    softness: str = "temperature"
    log: Callable[..., Tensor] | None = None
    smooth: bool = True
    symmetric: bool = True
    compact: bool = False
    zeros: bool = True
    interpreted: bool = False

    @property
    def public(self) -> tuple[Callable[..., Tensor], ...]:
        return behind(self.map), *([self.log] if self.log else [])


def clipped_power(z: Any, p: float) -> Any:
    return np.clip(z, 0, 1) ** (1 / (p - 1))


def sparse(name: str, p: float, interpreted: bool = False) -> RelaxationCase:
    return RelaxationCase(
        name,
        partial(sparse_topk, p=p),
        partial(clipped_power, p=p),
        softness="strength",
        symmetric=p == 2,
        compact=True,
        interpreted=interpreted,
    )


class Cauchy(Link):
    """A link that the library does not ship, with tails far heavier than any that it does."""

    def value(self, z: Tensor) -> Tensor:
        return torch.atan2(torch.ones_like(z), -z) / torch.pi

    def complement(self, z: Tensor) -> Tensor:
        return self.value(-z)

    def slope(self, z: Tensor) -> Tensor:
        return 1 / (torch.pi * (1 + z * z))

    def inverse(self, p: Tensor) -> Tensor:
        return torch.tan(torch.pi * (p - 0.5))


class OwnLogistic(Link):
    """A link with light tails as a user writes it, with nothing but what a link must have."""

    def value(self, z: Tensor) -> Tensor:
        return z.sigmoid()

    def complement(self, z: Tensor) -> Tensor:
        return (-z).sigmoid()

    def slope(self, z: Tensor) -> Tensor:
        return z.sigmoid() * (-z).sigmoid()

    def inverse(self, p: Tensor) -> Tensor:
        return p.logit()


RELAXATIONS = [
    RelaxationCase("sigmoid_topk", sigmoid_topk, scipy.special.expit, log=log_sigmoid_topk, interpreted=True),
    RelaxationCase(
        "capped_simplex_map", partial(capped_simplex_map, link=Cauchy()), scipy.stats.cauchy.cdf, softness="scale"
    ),
    RelaxationCase("lapsum_topk", lapsum_topk, scipy.stats.laplace.cdf, softness="scale", log=log_lapsum_topk),
    RelaxationCase("normal_topk", normal_topk, scipy.special.ndtr, softness="scale"),
    RelaxationCase("transport_topk", transport_topk, lambda z: scipy.special.expit(2 * z), softness="epsilon"),
    RelaxationCase(
        "capped_softmax",
        capped_softmax,
        lambda z: np.exp(np.minimum(z, 0)),
        smooth=False,
        symmetric=False,
        compact=True,
        zeros=False,
    ),
    sparse("sparse_topk", p=2),
    sparse("sparse_topk_any_p", p=1.7, interpreted=True),
]


ODD_MAPS = [
    RelaxationCase(
        f"{function.__name__}_{name}",
        partial(function, p=p),
        partial(clipped_power, p=p),
        softness="strength",
        compact=True,
    )
    for function, name, p in (
        (sparse_topk_magnitude, "two", 2.0),
        (sparse_topk_magnitude, "any_p", 1.7),
        (sparse_topk_signed, "two", 2.0),
        (sparse_topk_signed, "four_thirds", 4 / 3),
    )
]
