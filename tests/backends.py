"""The backends of a CPU that tests run in, and which of them a user has without asking."""

from khot.kernels.operators.platforms import HAS_NUMBA

USUAL = "numba" if HAS_NUMBA else "torch"
BACKENDS = ["numba", "torch"] if HAS_NUMBA else ["torch"]
