"""Compiles the CPU loops before they are needed: ``python -m khot.warmup [name ...]``.

A loop is compiled at its first call, which takes a second or a few, and stored in the user's cache folder for later
processes. This module calls functions, designs and modules once with small tensors of each dtype that has its own
loops. It is meant for container images and clusters, where the cache folder (``KHOT_CACHE_DIR``) is part of the image
or shared. Without names it compiles all loops. A design includes what its :class:`~khot.ReinMax` needs, whether it is
given by ``logits`` or by ``probs``. In an installation without numba there is nothing to compile.

Example:
    $ KHOT_CACHE_DIR=/opt/khot python -m khot.warmup sigmoid_topk ConditionalPoisson
"""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from khot import distributions, estimators, nn, relaxations

__all__ = ["main", "warm_up"]

MASKS = (
    "sigmoid_topk",
    "lapsum_topk",
    "normal_topk",
    "capped_softmax",
    "sparse_topk",
    "sparse_topk_signed",
    "sparse_topk_magnitude",
    "transport_topk",
    "log_sigmoid_topk",
    "log_lapsum_topk",
)
RELAXATIONS = "sigmoid_topk", "lapsum_topk", "normal_topk", "capped_softmax", "sparse_topk"
OF_WHOLE_SIZES = "topk_mask", "sorted_transport_topk", "successive_softmax_topk"
OF_SCORES = (
    "soft_rank",
    "soft_sort",
    "soft_permutation",
    "permutahedron_rank",
    "permutahedron_sort",
    "isotonic_l2",
)
DESIGNS = (
    "Brewer",
    "ConditionalPoisson",
    "GumbelTopK",
    "ParetoSampling",
    "Pivotal",
    "Sampford",
    "SequentialPoisson",
    "Systematic",
)
ORDERED = "Pivotal", "Systematic"  # designs that take the units in a random or a fixed order
MODULES = "TopK", "BatchTopK"
SHAPES = (4, 8), (2, 300)  # short and long rows may use different loops


def _differentiated(y: Tensor) -> None:
    if y.requires_grad:
        y.square().sum().backward()


def _call_mask(name: str, x: Tensor) -> None:
    for k in (2, torch.full(x.shape[:-1], 2.5, dtype=torch.float64)):  # a number, and one for each row
        _differentiated(getattr(relaxations, name)(x, k))


def _call_with_size(name: str, x: Tensor) -> None:
    _differentiated(getattr(relaxations, name)(x, 2))


def _call_function(name: str, x: Tensor) -> None:
    _differentiated(getattr(relaxations, name)(x))


def _call_threshold(x: Tensor) -> None:
    for name in RELAXATIONS:
        _differentiated(relaxations.topk_threshold(x, 2, relaxation=getattr(relaxations, name)))


def _call_module(name: str, x: Tensor) -> None:
    _differentiated(getattr(nn, name)(2)(x))


def _call_design(name: str, x: Tensor) -> None:
    kind = getattr(distributions, name)
    designs = [kind(logits=x, k=2), kind(probs=relaxations.sigmoid_topk(x, 2))]
    if name in ORDERED:
        designs += [kind(logits=x, k=2, order=order) for order in ("random", "fixed")]
    for design in designs:
        value, results = design.sample(), [design.mean]
        with contextlib.suppress(NotImplementedError):  # raised by a design without log_prob
            results.append(design.log_prob(value))
        with contextlib.suppress(NotImplementedError):  # raised by a design that ReinMax does not support
            results.append(estimators.ReinMax(design).rsample())
        _differentiated(torch.stack([result.square().sum() for result in results]))


CALLS: dict[str, Callable[[Tensor], None]] = {
    **{name: functools.partial(_call_mask, name) for name in MASKS},
    **{name: functools.partial(_call_with_size, name) for name in OF_WHOLE_SIZES},
    **{name: functools.partial(_call_function, name) for name in OF_SCORES},
    "topk_threshold": _call_threshold,
    **{name: functools.partial(_call_design, name) for name in DESIGNS},
    **{name: functools.partial(_call_module, name) for name in MODULES},
}


def warm_up(*names: str) -> None:
    """Compiles the loops of these functions, designs and modules, or of everything in ``CALLS`` if no name is given.

    Raises:
        ValueError: If a name is not that of a function, design or module with loops.
    """
    if unknown := sorted(set(names) - CALLS.keys()):
        raise ValueError(f"names must be among {', '.join(CALLS)}, but got {', '.join(unknown)}")
    for name in names or CALLS:
        for dtype in (torch.float32, torch.float64):
            for shape in SHAPES:
                scores = torch.linspace(-1, 1, shape[0] * shape[1], dtype=dtype).view(shape).sin()
                CALLS[name](scores.requires_grad_())


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m khot.warmup", description="Compile khot's loops for this CPU.")
    what = "functions, designs or modules, such as sigmoid_topk; else all"
    parser.add_argument("names", nargs="*", metavar="name", help=what)
    names = parser.parse_args(arguments).names
    start = time.perf_counter()
    try:
        warm_up(*names)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(f"compiled in {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
