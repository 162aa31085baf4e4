"""Vectors whose lanes are rows, for loops over the units of short rows: one number of each of some rows.

A loop over such vectors needs no sum across lanes and compiles quickly. Every lane computes exactly as the source says,
so that the result of a row depends neither on its place among the lanes nor on its neighbours. Vectors are in arrays of
shape ``(count * lanes,)`` or ``(count, lanes)`` and cannot leave compiled code.
"""

# mypy: disable-error-code="no-untyped-def"

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES, SINGLE_LANES = 8, 16  # so many float64 or float32 numbers fill the widest vectors of today's processors

_index = ir.IntType(32)


class _Lanes(types.Type):
    def __init__(self, number: ir.Type, lanes: int) -> None:
        super().__init__(f"{lanes} lanes")
        self.vector, self.lanes = ir.VectorType(number, lanes), lanes


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: _Lanes) -> None:
        super().__init__(manager, kind, kind.vector)


_KINDS = {
    types.float64: _Lanes(ir.DoubleType(), LANES),
    types.float32: _Lanes(ir.FloatType(), SINGLE_LANES),
}


def _define(symbol: Any, instruction: str) -> None:
    """Arithmetic of two vectors."""
    cases = [signature(kind, kind, kind) for kind in _KINDS.values()]
    infer_global(symbol)(type("Lanewise", (ConcreteTemplate,), {"cases": cases}))
    lower_builtin(symbol, _Lanes, _Lanes)(lambda _, builder, __, args: getattr(builder, instruction)(*args))


for _symbol, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"),
                              (operator.truediv, "fdiv")):  # fmt: skip
    _define(_symbol, _instruction)


def _instruction_of(function: Any) -> Any:
    """An intrinsic, without the type that numba declares for it."""
    return intrinsic(function)


def address(context, builder, kind, array, index):
    """The place of a vector in an array."""
    data, lanes = context.make_array(kind)(context, builder, array).data, _KINDS[kind.dtype]
    place = builder.gep(data, [builder.mul(index, index.type(lanes.lanes))])
    return builder.bitcast(place, lanes.vector.as_pointer())


@_instruction_of
def at(context, x, i):
    """The i-th vector of an array."""

    def generate(context, builder, given, args):
        return builder.load(address(context, builder, given.args[0], *args), align=4)

    return _KINDS[x.dtype](x, types.int64), generate


@_instruction_of
def put(context, x, i, value):
    """Writes the i-th vector of an array."""

    def generate(context, builder, given, args):
        builder.store(args[2], address(context, builder, given.args[0], *args[:2]), align=4)
        return context.get_dummy_value()

    return types.none(x, types.int64, _KINDS[x.dtype]), generate


@_instruction_of
def every(context, number):
    """A number in all lanes."""
    kind = _KINDS[number]

    def generate(_, builder, __, args):
        nothing = ir.Constant(kind.vector, ir.Undefined)
        first = builder.insert_element(nothing, args[0], _index(0))
        return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_index, kind.lanes), [0] * kind.lanes))

    return kind(number), generate


@_instruction_of
def if_positive(context, condition, x, y):
    """x in lanes with a positive condition, y in others."""

    def generate(_, builder, __, args):
        positive = builder.fcmp_ordered(">", args[0], ir.Constant(condition.vector, [0.0] * condition.lanes))
        return builder.select(positive, args[1], args[2])

    return x(condition, x, x), generate
