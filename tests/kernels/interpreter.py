"""A pytest plugin for a process in which Triton kernels are interpreted: ``TRITON_INTERPRET=1 pytest -p <this>``.

The interpreter takes a reduction with a combining function of its own one pair of entries at a time. The kernels' own
functions are sums, minima and maxima of tuples, which NumPy has.
"""

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps

from khot.kernels import dispatch, links_triton, threshold_triton

np.seterr(all="ignore")  # infinities are meant

# An operation takes the interpreter about as long for a thousand entries as for one.
dispatch.FOREST = ((32, 16, 1024, 1, 2), (1024, 1, 1024, 1, 2), (1024, 1, 1024, 1, 2))

SUMS = [
    links_triton.add2,
    links_triton.add3,
    links_triton.add4,
]
EACH = {threshold_triton._merge_spans: (np.sum, np.sum, np.sum, np.min, np.max)}
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

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor, *scope):
    """Triton 3.6 takes ``int`` of arrays with one entry, which NumPy 2.4 refuses."""
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.reshape(()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy
