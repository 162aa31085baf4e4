"""Compiles the device functions that choose by the name of a link or a noise: ``python -m tests.kernels.ladders``.

Each in a kernel of its own, with every name that it knows and with others, for a device that is not here. Prints a line
for each: function, name, and whether it compiled or why not.
"""

import sys
import warnings

import triton
import triton.language as tl
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from khot.kernels.capped_simplex import triton_backward as gradient_triton
from khot.kernels.capped_simplex import triton_root as threshold_triton
from khot.kernels.links import tails_triton as links_triton
from khot.kernels.order_draw import triton_backend as order_draw_triton
from tests.kernels.aot import TARGETS, NoDevice

exp_noise, nearest, merge = order_draw_triton._exp_noise, gradient_triton._nearest, gradient_triton._merge
quantile = threshold_triton._quantile


@triton.jit
def of_one(x_ptr, FUNCTION: tl.constexpr, NAME: tl.constexpr):
    FUNCTION(tl.load(x_ptr + tl.arange(0, 32)), NAME)


@triton.jit
def of_two(x_ptr, FUNCTION: tl.constexpr, NAME: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 32))
    FUNCTION(x, x, NAME)


@triton.jit
def of_three(x_ptr, FUNCTION: tl.constexpr, NAME: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 32))
    FUNCTION(x, x, x, NAME)


@triton.jit
def of_values(x_ptr, FUNCTION: tl.constexpr, NAME: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 32))
    FUNCTION(x, x, NAME, False)


@triton.jit
def of_logarithms(x_ptr, FUNCTION: tl.constexpr, NAME: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 32))
    FUNCTION(x, x, NAME, True)


@triton.jit
def of_sums(x_ptr, FUNCTION: tl.constexpr, NAME: tl.constexpr):
    x = tl.load(x_ptr)
    FUNCTION(x, x, x, x, x, x, NAME, False)


@triton.jit
def of_tails(x_ptr, FUNCTION: tl.constexpr, NAME: tl.constexpr):
    x = tl.load(x_ptr)
    FUNCTION(x.to(tl.int32), x, x, x, x.to(tl.int32), x, x, NAME, tl.float32)


@triton.jit
def of_tile(x_ptr, FUNCTION: tl.constexpr, NAME: tl.constexpr):
    x, s = tl.load(x_ptr + tl.arange(0, 32)), tl.load(x_ptr)
    FUNCTION(x, s, s, s, s, s, s, s, s, NAME)


SMOOTH, COMPACT = ("logistic", "laplace", "normal"), ("clip", "clip_power", "exp")
UNKNOWN = ("cauchy", "Logistic", "")
# Function, the kernel that calls it, the names that it knows, and those of others that it must refuse.
LADDERS = {
    "tails": (links_triton.tails, of_one, SMOOTH, (*UNKNOWN, *COMPACT)),
    "shifted_tails": (links_triton.shifted_tails, of_two, SMOOTH, (*UNKNOWN, *COMPACT)),
    "shift_factor": (links_triton.shift_factor, of_one, SMOOTH + COMPACT, UNKNOWN),
    "below_cap": (links_triton.below_cap, of_one, COMPACT, (*UNKNOWN, *SMOOTH)),
    "uncapped": (links_triton.uncapped, of_two, COMPACT, (*UNKNOWN, *SMOOTH)),
    "value": (links_triton.value, of_values, SMOOTH + COMPACT, UNKNOWN),
    "log_value": (links_triton.value, of_logarithms, SMOOTH[:2], (*UNKNOWN, *COMPACT, "normal")),
    "slopes": (links_triton.slopes, of_three, SMOOTH + COMPACT, UNKNOWN),
    "log_slope_ratio": (links_triton.log_slope_ratio, of_one, SMOOTH[:2], (*UNKNOWN, *COMPACT, "normal")),
    "tail_sums": (links_triton.tail_sums, of_two, SMOOTH + COMPACT, UNKNOWN),
    "nearest": (nearest, of_one, SMOOTH + COMPACT, UNKNOWN),
    "merge": (merge, of_sums, SMOOTH + COMPACT, UNKNOWN),
    "judge": (threshold_triton.judge, of_tails, SMOOTH + COMPACT, UNKNOWN),
    "quantile": (quantile, of_three, SMOOTH + COMPACT, UNKNOWN),
    "first_guess": (threshold_triton.first_guess, of_tile, SMOOTH + COMPACT, UNKNOWN),
    "exp_noise": (exp_noise, of_two, ("logistic", "log_exponential", "log_uniform"), ("gumbel", "uniform", "")),
}


def reason(error: BaseException) -> str:
    """What the innermost error says."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return str(error).strip().splitlines()[-1]


def main() -> None:
    driver.set_active(NoDevice(TARGETS["sm_90"]))
    for ladder, (function, kernel, known, unknown) in LADDERS.items():
        for name in (*known, *unknown):
            try:
                kernel.warmup(MockTensor(tl.float32), function, name, grid=(1,))
                outcome = "compiled"
            except CompilationError as error:
                outcome = reason(error)
            print(f"{ladder}({name!r}): {'known' if name in known else 'unknown'}, {outcome}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
