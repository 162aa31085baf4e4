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
from khot.kernels.threshold.triton_gaps import relative_slopes
from khot.kernels.threshold.triton_rows import Tile
from khot.kernels.threshold.triton_search import _judge, first_guess
from tests.kernels.aot import TARGETS, NoDevice
from tests.kernels.kernel_links import LINKS


@triton.jit
def of_tile(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr, TILE: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), LINK)


@triton.jit
def of_tile_and_parameter(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr, TILE: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr), LINK)


@triton.jit
def of_slopes(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr, TILE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 32))
    FUNCTION(x, x, x, LINK)


@triton.jit
def of_values(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr, TILE: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr), LINK, False)


@triton.jit
def of_logarithms(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr, TILE: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr), LINK, True)


@triton.jit
def of_gap(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr, TILE: tl.constexpr):
    x, s = tl.load(x_ptr + tl.arange(0, 32))[None, None, :], tl.load(x_ptr + tl.arange(0, 1))
    FUNCTION(x, s, s, s, LINK)


@triton.jit
def of_sums(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr, TILE: tl.constexpr):
    s = tl.load(x_ptr + tl.arange(0, 1))
    FUNCTION(s.to(tl.int32), s, s, s, s.to(tl.int32), s, tl.load(x_ptr), LINK, TILE)


@triton.jit
def of_guess(x_ptr, FUNCTION: tl.constexpr, LINK: tl.constexpr, TILE: tl.constexpr):
    s, q = tl.load(x_ptr + tl.arange(0, 1)), tl.load(x_ptr)
    FUNCTION(s, s.to(tl.int32), s, s, s.to(tl.int32), s, s, q, (q, q), LINK, TILE)


FUNCTIONS = {  # with the kernel that calls it
    "is_below": (base_triton.is_below, of_tile),
    "tails_and_slopes": (base_triton.tails_and_slopes, of_tile_and_parameter),
    "log_short_tail": (base_triton.log_short_tail, of_tile_and_parameter),
    "log_derivative": (base_triton.log_derivative, of_slopes),
    "value": (base_triton.value, of_values),
    "log_value": (base_triton.value, of_logarithms),
    "relative_slopes": (relative_slopes, of_gap),
    "judge": (_judge, of_sums),
    "first_guess": (first_guess, of_guess),
}


def reason(error: BaseException) -> str:
    """What the innermost error says."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return str(error).strip().splitlines()[-1]


def outcome(name: str, link: TritonLink, dtype: tl.dtype) -> str:
    function, kernel = FUNCTIONS[name]
    tile = Tile(1, 1, 32, 1, dtype == tl.float32, dtype == tl.float64)
    try:
        return kernel.warmup(MockTensor(dtype), function, link, tile, grid=(1,)).hash
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
