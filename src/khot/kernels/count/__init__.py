r"""The law of a sum of independent Bernoulli units, and of units given their number of ones B.

For logits :math:`\theta` and a count k, the units have log-odds :math:`z_i = \theta_i - t`, with a *tilt* t such that
about k ones are expected. Given B = k the law of the units does not depend on it. If B may lie in a range, the law of
the sizes under the tilt has weights that undo it.

There are three ways to compute the law of B, for rows of different lengths:

=================  ===========================  =====================================================================
way                time of a row of n units     where it is used, and why
=================  ===========================  =====================================================================
table of counts    n k, eight rows at a time    loops on a CPU, rows with ``n k <= TABLE``: nothing is summed across the
                                                lanes of a vector, and nothing has to be chosen
characteristic     n times 4 to 32 nodes        loops on a CPU, longer rows of one size
function
product tree       n log² n                     rows of more than ``LONGEST`` units; plain torch and accelerators;
                                                derivatives of every order; rows that loops leave
=================  ===========================  =====================================================================

Operations for units given B = k; :mod:`khot.laws` computes in torch operations what no loop takes:

* ``bernoulli_count``: the tilt, the total weight of all draws, and P(x_i = 1 | B = k) with its complement, each of the
  two with its own relative accuracy;
* ``bernoulli_count_derivative``: :math:`J^T g`, where J is the Jacobian of these probabilities, which is the covariance
  of x given B = k;
* ``bernoulli_count_log_prob`` and ``bernoulli_count_log_prob_derivative``: for values given B = k;
* ``bernoulli_count_draw``, of :mod:`khot.laws.unit_by_unit`: exact draws given B = k.

For the inverse, from probabilities to logits: ``inclusion_inverse``, the logits for which the units given B = k have
these log-odds; and ``covariance_inverse``, v with C v = b, where C is the covariance given B = k, a graph's Laplacian.

For the product tree: ``pair_merge`` and ``pair_split``, the convolution of pairs and its adjoint; ``forest_roots``,
``forest_outsides`` and ``forest_bends``, the lowest levels of a tree at a time, which pays only on an accelerator.
:mod:`.pairs` and :mod:`.forest` make differentiable functions of them, and :mod:`.tree` builds the tree.

Logits are float64; ``-inf`` and ``inf`` fix a unit. Rows that cannot have k ones give NaN, as do those that a loop
leaves to other code.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..registry import Operation, Operator, only_if
from . import reference_tree, torch_pairs

TABLE = 20_000  # units times counts of rows for which a table of counts is the fastest way
TABLE_OF_DRAWS = 50_000  # the same for draws
TABLE_OF_INVERSE = 200_000  # the same for inverses, which without a table are iterations in plain torch
LONGEST = 2**14  # units of a row; the product tree is faster in rows at least a few times as long

short_rows = only_if(
    lambda logits, n, *_: n <= LONGEST, f"the product tree is faster for rows of more than {LONGEST} units"
)


class _Loop(Operation):
    """A function of this name in numba, ``loop``, for plain calls from laws that have checked that it takes them."""

    def __init__(self, name: str, module: str, takes: Callable[..., str | None] = lambda *asked: None) -> None:
        super().__init__(__name__, name)
        self.backend("numba", module=module, takes=takes)

    @cached_property
    def loop(self) -> Callable[..., Any]:
        loop: Callable[..., Any] = self.load("numba")
        return loop


bernoulli_count = _Loop("bernoulli_count", ".numba_backend", short_rows)
bernoulli_count_derivative = _Loop("bernoulli_count_derivative", ".numba_backend")
bernoulli_count_log_prob = _Loop("bernoulli_count_log_prob", ".numba_backend")
bernoulli_count_log_prob_derivative = _Loop("bernoulli_count_log_prob_derivative", ".numba_backend")
inclusion_inverse = _Loop("inclusion_inverse", ".numba_inverse", short_rows)
covariance_inverse = _Loop("covariance_inverse", ".numba_inverse")

FOREST_LEVELS = 10  # levels of the trees that a program holds
TRITON_WIDTH = 1024  # widest child of a node above these that is convolved directly; beyond it the FFT is faster


def roots_shape(leaf: Tensor, bound: int, levels: int) -> tuple[int, int, int]:
    """The shape of the roots of the trees over ``2**levels`` of the leaves ``(2, n, R)`` each."""
    n, rows = leaf.shape[1:]
    return (1 if n <= 2**levels else min(2**levels, bound) + 1), -(-n // 2**levels), rows


def _narrow(x: Tensor, width: int) -> str | None:
    if x.dtype != torch.float64:
        return "its kernels are for float64"
    return None if width <= TRITON_WIDTH else f"the FFT is faster for children wider than {TRITON_WIDTH}"


def _like_bends(leaf: Tensor, u: Tensor, g: Tensor, k: Tensor, bound: int, levels: int, with_roots: bool) -> Any:
    return leaf.new_empty(roots_shape(leaf, bound, levels) if with_roots else 0), torch.empty_like(leaf)


def _operator(
    definition: Callable[..., Any],
    fake: Callable[..., Any],
    module: str,
    asks: Callable[..., tuple[Any, ...]] = lambda x, *_: (x,),
    takes: Callable[..., str | None] = lambda *asked: None,
) -> Operator:
    """An operation of the name of its definition, which only autograd Functions call."""
    operator = Operator(definition.__name__, definition, fake=fake, asks=asks, batch=False)
    operator.backend("triton", module=module, takes=takes)
    return operator


pair_merge = _operator(
    torch_pairs.pair_merge,
    lambda x, start, length: x.new_empty(length, *x.shape[2:]),
    ".triton_pairs",
    lambda x, *_: (x, x.shape[0]),
    _narrow,
)
pair_split = _operator(
    torch_pairs.pair_split,
    lambda g, x, start: torch.empty_like(x, memory_format=torch.contiguous_format),
    ".triton_pairs",
    lambda g, x, start: (x, x.shape[0]),
    _narrow,
)
forest_roots = _operator(
    reference_tree.forest_roots,
    lambda leaf, k, bound, levels: leaf.new_empty(roots_shape(leaf, bound, levels)),
    ".triton_forest",
)
forest_outsides = _operator(reference_tree.forest_outsides, lambda leaf, *_: torch.empty_like(leaf), ".triton_forest")
forest_bends = _operator(reference_tree.forest_bends, _like_bends, ".triton_forest")

# Draws the units of whole trees, given how many ones each has; without it a tree draws level by level.
forest_draw = Operation(__name__, "launch_draw")
forest_draw.backend("triton", module=".triton_draw")
