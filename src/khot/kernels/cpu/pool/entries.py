"""Compiled loops as machine code that other threads call without the GIL: one function pointer, arguments in memory.

numba calls a loop only from Python. Its machine code takes numbers in registers and arrays member by member. An entry
``entry(data, first, last)`` reads them from memory, calls the loop for the rows [first, last), and adds the result to
the data. It is made once for each loop and types of arguments, in some milliseconds.
"""

# mypy: disable-error-code="no-untyped-call"

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core.compiler_lock import global_compiler_lock

HEADER = struct.Struct("qq")  # the sum of the loop's results, and the number of calls that ended in an error
INT = ir.IntType(64)
ENTRY = ir.FunctionType(ir.VoidType(), [INT] * 3)  # data, first, last
CODES: dict[Any, str] = {types.int64: "q", types.uint64: "Q", types.float64: "d", types.boolean: "q"}  # as in struct


class Entry(NamedTuple):
    """The entry of a loop for arguments of given types; ``owner`` keeps the machine code alive."""

    address: int
    layout: struct.Struct
    owner: Any

    def pack(self, arguments: Sequence[Any]) -> bytearray | None:
        """The data for these arguments, which must outlive it; None for an integer of more than 64 bits."""
        data = bytearray(self.layout.size)
        try:
            self.layout.pack_into(data, 0, 0, 0, *_numbers(arguments))
        except struct.error:
            return None
        return data


def entry_of(kernel: Any, arguments: Sequence[Any]) -> Entry | None:
    """The entry of a compiled loop; None for a Python function, or for arguments that ``_code`` does not know."""
    key = kernel, tuple([_kind(value) for value in arguments])
    try:
        return _entries[key]
    except KeyError:
        return _entries.setdefault(key, _compiled(kernel, (types.int64, types.int64, *map(typeof, arguments))))


_entries: dict[tuple[Any, ...], Entry | None] = {}


def _kind(value: Any) -> Any:
    """A key for the type of an argument."""
    if isinstance(value, np.ndarray):
        return value.dtype.num, value.ndim, value.flags.c_contiguous, value.flags.writeable
    return tuple([_kind(part) for part in value]) if isinstance(value, tuple) else type(value)


def _numbers(arguments: Sequence[Any]) -> list[Any]:
    """Arguments as numbers of 8 bytes; arrays as in numba: two owners, size, item size, address, shape, strides."""
    numbers: list[Any] = []
    for value in arguments:
        if isinstance(value, np.ndarray):
            address = value.__array_interface__["data"][0]
            numbers += (0, 0, value.size, value.itemsize, address, *value.shape, *value.strides)
        elif isinstance(value, tuple):
            numbers += _numbers(value)
        else:
            numbers.append(value)
    return numbers


def _code(kind: types.Type) -> str:
    """How arguments of a type are packed; empty for other types, such as tuples with booleans, which are not words."""
    if isinstance(kind, types.Array):
        return "q" * (5 + 2 * kind.ndim)
    if isinstance(kind, types.BaseTuple):
        parts: Any = kind
        codes = ["" if part is types.boolean else _code(part) for part in parts]
        return "" if "" in codes else "".join(codes)
    return CODES.get(kind, "")


@global_compiler_lock
def _compiled(kernel: Any, signature: tuple[types.Type, ...]) -> Entry | None:
    codes = [_code(kind) for kind in signature[2:]]
    if not hasattr(kernel, "overloads") or "" in codes:
        return None
    kernel.compile(signature)
    loop = kernel.overloads[signature]
    name = f"entry.{loop.fndesc.llvm_func_name}"
    library = kernel.targetctx.codegen().create_library(name)
    library.add_ir_module(_module(name, kernel.targetctx, loop, codes))
    library.finalize()
    layout = struct.Struct(HEADER.format + "".join(codes))
    return Entry(library.get_pointer_to_function(name), layout, (library, loop))


def _module(name: str, context: Any, loop: Any, codes: Sequence[str]) -> Any:
    """The entry as LLVM code."""
    module = context.create_module(name)
    function = ir.Function(module, ENTRY, name)
    build = ir.IRBuilder(function.append_basic_block())
    data, first, last = function.args
    words = build.inttoptr(data, INT.as_pointer())
    total, errors = (build.gep(words, [INT(place)]) for place in range(2))

    signature, values, place = loop.signature, [first, last], HEADER.size // 8
    for kind, code in zip(signature.args[2:], codes, strict=True):
        at = build.gep(words, [INT(place)])
        if kind is types.boolean:
            values.append(build.trunc(build.load(at), ir.IntType(1)))
        else:
            values.append(build.load(build.bitcast(at, context.get_value_type(kind).as_pointer())))
        place += len(code)

    # numba's convention: it returns a status, and writes the result and an exception to the first two arguments.
    kind = context.call_conv.get_function_type(signature.return_type, signature.args)
    address = loop.library.get_pointer_to_function(loop.fndesc.llvm_func_name)
    result, exception = (build.alloca(argument.pointee) for argument in kind.args[:2])
    arguments = context.get_arg_packer(signature.args).as_arguments(build, values)
    status = build.call(build.inttoptr(INT(address), kind.as_pointer()), [result, exception, *arguments])
    with build.if_else(build.icmp_signed("!=", status, status.type(0))) as (failed, done):
        with failed:
            build.atomic_rmw("add", errors, INT(1), "seq_cst")
        with done:
            build.atomic_rmw("add", total, build.load(result), "seq_cst")
    build.ret_void()
    return module
