"""Compiles the CPU loops before they are needed: ``python -m khot.warmup [name ...]``.

A loop is compiled at its first call, which takes a second or a few, and stored in the user's cache folder for later
processes. This module calls functions and designs once with small tensors of each dtype that has its own loops. It is
meant for container images and clusters, where the cache folder (``KHOT_CACHE_DIR``) is part of the image or shared.
Without names it compiles all loops; in an installation without numba there is nothing to compile.

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

from khot import distributions, relaxations

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
    "topk_threshold",
)
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


def _call_design(name: str, x: Tensor) -> None:
    design = getattr(distributions, name)(logits=x, k=2)
    value, results = design.sample(), [design.mean]
    with contextlib.suppress(NotImplementedError):  # raised by a design without log_prob
        results.append(design.log_prob(value))
    _differentiated(torch.stack([result.square().sum() for result in results]))


CALLS: dict[str, Callable[[Tensor], None]] = {
    **{name: functools.partial(_call_mask, name) for name in MASKS},
    **{name: functools.partial(_call_with_size, name) for name in OF_WHOLE_SIZES},
    **{name: functools.partial(_call_function, name) for name in OF_SCORES},
    **{name: functools.partial(_call_design, name) for name in DESIGNS},
}


def warm_up(*names: str) -> None:
    """Compiles the loops of these functions and designs, or of everything in ``CALLS`` if no name is given.

    Raises:
        ValueError: If a name is not that of a function or design with loops.
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
    parser.add_argument("names", nargs="*", metavar="name", help="functions or designs, such as sigmoid_topk; else all")
    names = parser.parse_args(arguments).names
    start = time.perf_counter()
    try:
        warm_up(*names)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(f"compiled in {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
