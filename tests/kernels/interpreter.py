"""A pytest plugin for a process in which Triton kernels are interpreted: ``TRITON_INTERPRET=1 pytest -p <this>``.

The interpreter takes a reduction with a combining function of its own one pair of entries at a time. The kernels' own
functions are sums, minima and maxima of tuples, which NumPy has.

Two things are as on a device here, which Triton's interpreter does otherwise: minima and maxima leave out NaN, and a
product that is directly added to something is not rounded before, in float64 only to a ``longdouble``.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps

from khot.kernels.count import triton_forest
from khot.kernels.gpu import plans, tools
from khot.kernels.threshold import triton_backward, triton_flagged, triton_forward, triton_gaps, triton_rows

np.seterr(all="ignore")  # infinities are meant

launches = 0
_launch = interpreter.GridExecutor.__call__


def _count_launch(self, *args, **kwargs):
    global launches
    launches += 1
    return _launch(self, *args, **kwargs)


interpreter.GridExecutor.__call__ = _count_launch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that is run to check kernels must reach one."""
    before = launches
    result = yield
    if item.get_closest_marker("interpreted"):
        assert launches > before, "no kernel ran"
    return result


# An operation takes the interpreter about as long for a thousand entries as for one.
plans.PROGRAMS = triton_rows.PROGRAMS = 8
plans.SPLIT_ABOVE, triton_forward.SAMPLE = 8500, 2**10
triton_rows.FLAGGED_PROGRAMS = 3
_flagged_tile = triton_rows.flagged_tile
triton_forward.flagged_tile = triton_backward.flagged_tile = lambda x: replace(_flagged_tile(x), width=1024)
triton_forest.FOREST = triton_forest.FEW_TREES = ((32, 16, 1024, 1, 2), (1024, 1, 1024, 1, 2), (1024, 1, 1024, 1, 2))

SUMS = [tools.add2, tools.add3, tools.add4]
EACH = {
    triton_gaps._larger_smaller_sum: (np.fmax.reduce, np.fmin.reduce, np.sum),
    triton_flagged._ends_of: (np.fmin.reduce, np.fmax.reduce),
}
_one_by_one = ReduceOps.generic_reduce


def _reduce(self, operands):
    functions = EACH.get(self.combine_fn, (np.sum,) * len(operands) if self.combine_fn in SUMS else None)
    if functions is None:
        return _one_by_one(self, operands)
    return [
        self.to_tensor(function(operand.handle.data, axis=self.axis, keepdims=self.keep_dims), operand.dtype)
        for function, operand in zip(functions, operands, strict=True)
    ]


ReduceOps.generic_reduce = _reduce


def _sort(x, dim=None, descending=False):
    """Bitonic sorts take the interpreter seconds."""
    ordered = np.sort(x.handle.data)
    return tl.tensor(interpreter.TensorHandle(ordered[::-1] if descending else ordered, x.handle.dtype), x.type)


tl.sort = _sort


Builder = interpreter.InterpreterBuilder
Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
_multiply = Builder.create_fmul
WIDER = {np.dtype(np.float32): np.float64, np.dtype(np.float64): np.longdouble}


def _multiply_and_remember(self, a, b):
    product = _multiply(self, a, b)
    product.factors = a.data, b.data
    return product


def _contracted(plain, product_sign, sum_sign):
    """An addition or subtraction in which the first of two products is contracted, with the signs of both numbers."""

    def operation(self, a, b):
        for product, other, signs in ((a, b, (1, sum_sign)), (b, a, (product_sign, 1))):
            wider = WIDER.get(product.data.dtype)
            if wider is not None and hasattr(product, "factors"):
                first, second = product.factors
                exact = signs[0] * first.astype(wider) * second + signs[1] * other.data.astype(wider)
                return interpreter.TensorHandle(exact.astype(product.data.dtype), product.dtype.scalar)
        return plain(self, a, b)

    return operation


Builder.create_fmul = _multiply_and_remember
Builder.create_fadd = _contracted(Builder.create_fadd, 1, 1)
Builder.create_fsub = _contracted(Builder.create_fsub, -1, -1)


# Rows of tests are too short for integers to overflow, of which each sum would be checked.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


# Types of tensors are made anew for every operation, which takes a third of the time.
def _once(plain, key_of):
    """A function that finds again what it has made for the same key; for the key None it makes it anew."""
    known = {}

    def function(*args):
        key = key_of(*args)
        if key is None:
            return plain(*args)
        if key not in known:
            known[key] = plain(*args)
        return known[key]

    return function


def _sizes(values, fields=None):
    sizes = (*(getattr(v, "value", v) for v in values),)
    return sizes if fields is None and all(type(v) is int for v in sizes) else None


interpreter._get_np_dtype = _once(interpreter._get_np_dtype, lambda type: type.scalar.name)
core.block_type.with_element_ty = _once(core.block_type.with_element_ty, lambda self, type: (*self.shape, type.name))
core._type_for_tuple_values = _once(core._type_for_tuple_values, _sizes)


_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor, *scope):
    """Triton 3.6 takes ``int`` of arrays with one entry, which NumPy 2.4 refuses."""
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.reshape(()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


_patch_lang = functools.cache(interpreter._patch_lang)


def _call_device_function(self, *args, **kwargs):
    """Patches the language for Triton's own functions once, and not again for others, for which each launch does."""
    if self.fn.__module__.startswith("triton."):
        _patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = _call_device_function
