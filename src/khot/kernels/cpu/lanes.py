"""Vectors whose lanes are rows, for loops over the units of short rows: one number of each of ``LANES`` rows.

A loop over such vectors needs no sum across lanes and compiles quickly. Every lane computes exactly as the source says,
so that the result of a row depends neither on its place among the lanes nor on its neighbours. Vectors are in
arrays of shape ``(count * LANES,)`` and cannot leave compiled code.
"""

# mypy: disable-error-code="no-untyped-def"

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 8  # so many float64 numbers fill the widest vectors of today's processors

_vector, _index = ir.VectorType(ir.DoubleType(), LANES), ir.IntType(32)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__("lanes")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _vector)


_lanes = _Lanes()


def _define(symbol: Any, instruction: str) -> None:
    """Arithmetic of two vectors."""
    infer_global(symbol)(type("Lanewise", (ConcreteTemplate,), {"cases": [signature(_lanes, _lanes, _lanes)]}))
    lower_builtin(symbol, _Lanes, _Lanes)(lambda _, builder, __, args: getattr(builder, instruction)(*args))


for _symbol, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"),
                              (operator.truediv, "fdiv")):  # fmt: skip
    _define(_symbol, _instruction)


def _instruction_of(function: Any) -> Any:
    """An intrinsic, without the type that numba declares for it."""
    return intrinsic(function)


def _address(context, builder, kind, array, index):
    data = context.make_array(kind)(context, builder, array).data
    place = builder.gep(data, [builder.mul(index, index.type(LANES))])
    return builder.bitcast(place, _vector.as_pointer())


@_instruction_of
def at(context, x, i):
    """The i-th vector of an array."""

    def generate(context, builder, given, args):
        return builder.load(_address(context, builder, given.args[0], *args), align=8)

    return _lanes(x, types.int64), generate


@_instruction_of
def put(context, x, i, value):
    """Writes the i-th vector of an array."""

    def generate(context, builder, given, args):
        builder.store(args[2], _address(context, builder, given.args[0], *args[:2]), align=8)
        return context.get_dummy_value()

    return types.none(x, types.int64, _lanes), generate


@_instruction_of
def every(context, number):
    """A number in all lanes."""

    def generate(_, builder, __, args):
        nothing = ir.Constant(_vector, ir.Undefined)
        first = builder.insert_element(nothing, args[0], _index(0))
        return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_index, LANES), [0] * LANES))

    return _lanes(types.float64), generate


@_instruction_of
def if_positive(context, condition, x, y):
    """x in lanes with a positive condition, y in others."""

    def generate(_, builder, __, args):
        positive = builder.fcmp_ordered(">", args[0], ir.Constant(_vector, [0.0] * LANES))
        return builder.select(positive, args[1], args[2])

    return _lanes(_lanes, _lanes, _lanes), generate
