"""A type checker knows khot's names and no others. Read by mypy alone, which complains of an ignore without need."""

import torch
from typing_extensions import assert_type

import khot
import khot.nn


def names_that_are_there() -> tuple[object, ...]:
    return khot.sigmoid_topk, khot.ConditionalPoisson, khot.nn.TopK, khot.nn.KHotGate


def results_have_types(x: torch.Tensor) -> tuple[torch.Tensor, float, torch.Tensor]:
    selection: khot.nn.Selection = khot.nn.TopK(2).select(x)
    schedule = khot.nn.Anneal(khot.nn.TopK(2, softness=1.0), "softness", end=0.1, steps=10)
    return selection.indices, schedule.value, khot.nn.topk_attention(x, x, x, 2)


def expansions_keep_their_class(
    gumbel: khot.GumbelTopK, relaxed: khot.RelaxedKHotStraightThrough, wrapped: khot.ReinMax
) -> None:
    assert_type(gumbel.expand((3,)), khot.GumbelTopK)
    assert_type(relaxed.expand((3,)), khot.RelaxedKHotStraightThrough)
    assert_type(wrapped.expand((3,)), khot.ReinMax)


def names_that_are_not() -> tuple[object, ...]:
    khot_has = khot.sigmoid_topkk  # type: ignore[attr-defined]
    nn_has = khot.nn.KHotGte  # type: ignore[attr-defined]
    return khot_has, nn_has
