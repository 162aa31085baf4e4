"""Compiles what mask kernels ask of a link, for every link: ``python -m tests.kernels.link_functions``.

In float32 and float64, for a device that is not here: the logarithms, which some links lack, in kernels of their own.
Prints a line for each: kernel, dtype, link, and a hash of what is compiled or why it did not compile.
"""

import sys
import warnings

import triton
import triton.language as tl
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from khot.kernels.links.base_triton import (
    TritonLink,
    is_below,
    log_derivative,
    log_short_tail,
    tails_and_slopes,
    triton_link,
    value,
)
from khot.kernels.threshold.triton_gaps import relative_slopes
from khot.kernels.threshold.triton_rows import Tile
from khot.kernels.threshold.triton_search import _judge, first_guess
from tests.kernels.aot import TARGETS, NoDevice
from tests.kernels.kernel_links import LINKS


@triton.jit
def functions(x_ptr, LINK: tl.constexpr, TILE: tl.constexpr):
    x, q, s = tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr), tl.load(x_ptr + tl.arange(0, 1))
    i = s.to(tl.int32)
    is_below(x, LINK)
    tails_and_slopes(x, q, LINK)
    log_short_tail(x, q, LINK)
    value(x, q, LINK, False)
    relative_slopes(x[None, None, :], s, s, s, LINK)
    _judge(i, s, s, s, i, s, q, LINK, TILE)
    first_guess(s, i, s, s, i, s, s, q, (q, q), LINK, TILE)


@triton.jit
def log_value(x_ptr, LINK: tl.constexpr, TILE: tl.constexpr):
    value(tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr), LINK, True)


@triton.jit
def log_slope(x_ptr, LINK: tl.constexpr, TILE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 32))
    log_derivative(x, x, x, LINK)


KERNELS = {"functions": functions, "log_value": log_value, "log_derivative": log_slope}


def reason(error: BaseException) -> str:
    """What the innermost error says."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return str(error).strip().splitlines()[-1]


def outcome(name: str, link: TritonLink, dtype: tl.dtype) -> str:
    tile = Tile(1, 1, 32, 1, dtype == tl.float32, dtype == tl.float64)
    try:
        return KERNELS[name].warmup(MockTensor(dtype), link, tile, grid=(1,)).hash
    except CompilationError as error:
        return reason(error)


def main() -> None:
    driver.set_active(NoDevice(TARGETS["sm_90"]))
    for name in KERNELS:
        for dtype in (tl.float32, tl.float64):
            for link in map(triton_link, LINKS):
                print(f"{name} {dtype} {link!r}: {outcome(name, link, dtype)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
