"""A type checker knows khot's names and no others. Read by mypy alone, which complains of an ignore without need."""

import khot
import khot.nn


def names_that_are_there() -> tuple[object, ...]:
    return khot.sigmoid_topk, khot.ConditionalPoisson, khot.nn.TopK, khot.nn.KHotGate


def names_that_are_not() -> tuple[object, ...]:
    khot_has = khot.sigmoid_topkk  # type: ignore[attr-defined]
    nn_has = khot.nn.KHotGte  # type: ignore[attr-defined]
    return khot_has, nn_has
