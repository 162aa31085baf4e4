"""Compiles what mask kernels ask of a link, for every link: ``python -m tests.kernels.link_functions``.

Each function in a kernel of its own, in float32 and float64, for a device that is not here. Prints a line for each:
function, dtype, link, and a hash of the compiled kernel or why it did not compile.
"""

import sys
import warnings

import triton
import triton.language as tl
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from khot.kernels.links import base_triton
from khot.kernels.links.base_triton import TritonLink, triton_link
from khot.kernels.threshold.triton_backward import _merge
from khot.kernels.threshold.triton_root import first_guess, judge
from tests.kernels.aot import TARGETS, NoDevice
from tests.kernels.kernel_links import LINKS


@triton.jit
def of_tile(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), LINK)


@triton.jit
def of_tile_and_parameter(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr), LINK)


@triton.jit
def of_tile_and_nearest(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr), tl.load(x_ptr), LINK)


@triton.jit
def of_values(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr), LINK, False)


@triton.jit
def of_logarithms(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr), LINK, True)


@triton.jit
def of_merged(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr):
    x = tl.load(x_ptr)
    FUNCTION(x, x, x, x, x, x, x, x, LINK, False)


@triton.jit
def of_sums(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr):
    x = tl.load(x_ptr)
    FUNCTION(x.to(tl.int32), x, x, x, x.to(tl.int32), x, x, LINK, x.dtype)


@triton.jit
def of_guess(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr):
    x, s = tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr)
    FUNCTION(x, s, s, s, s, s, s, s, s, s, s, LINK)


FUNCTIONS = {  # with the kernel that calls it
    "nearest_of": (base_triton.nearest_of, of_tile),
    "bounded": (base_triton.bounded, of_tile),
    "log_derivative": (base_triton.log_derivative, of_tile),
    "tail_sums": (base_triton.tail_sums, of_tile_and_parameter),
    "slopes": (base_triton.slopes, of_tile_and_nearest),
    "value": (base_triton.value, of_values),
    "log_value": (base_triton.value, of_logarithms),
    "merge": (_merge, of_merged),
    "judge": (judge, of_sums),
    "first_guess": (first_guess, of_guess),
}


def reason(error: BaseException) -> str:
    """What the innermost error says."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return str(error).strip().splitlines()[-1]


def outcome(name: str, link: TritonLink, dtype: tl.dtype) -> str:
    function, kernel = FUNCTIONS[name]
    try:
        return kernel.warmup(MockTensor(dtype), function, link, grid=(1,)).hash
    except CompilationError as error:
        return reason(error)


def main() -> None:
    driver.set_active(NoDevice(TARGETS["sm_90"]))
    for name in FUNCTIONS:
        for dtype in (tl.float32, tl.float64):
            for link in map(triton_link, LINKS):
                print(f"{name} {dtype} {link!r}: {outcome(name, link, dtype)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
