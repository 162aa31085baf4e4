"""A type checker knows khot's names and no others. Read by mypy alone, which complains of an ignore without need."""

import torch

import khot
import khot.nn


def names_that_are_there() -> tuple[object, ...]:
    return khot.sigmoid_topk, khot.ConditionalPoisson, khot.nn.TopK, khot.nn.KHotGate


def results_have_types(x: torch.Tensor) -> tuple[torch.Tensor, float, torch.Tensor]:
    selection: khot.nn.Selection = khot.nn.TopK(2).select(x)
    schedule = khot.nn.Anneal(khot.nn.TopK(2, 1.0), "softness", end=0.1, steps=10)
    return selection.indices, schedule.value, khot.nn.topk_attention(x, x, x, 2)


def names_that_are_not() -> tuple[object, ...]:
    khot_has = khot.sigmoid_topkk  # type: ignore[attr-defined]
    nn_has = khot.nn.KHotGte  # type: ignore[attr-defined]
    return khot_has, nn_has
