"""What the nearest function of other libraries takes, forward and backward, where they are installed.

    pip install entmax torchsort softtorch; python benchmarks/peer_times.py

One thread, 16 rows of 1000 scores, k = 10, in milliseconds of processor time and in multiples of `torch.softmax`. Ranks
have no k. Of a distribution, the call is a straight-through draw with its gradient. The result of softtorch's `topk` is
summed to a mask. The calls take turns in one process, so that other work on the machine slows all of them alike.
"""

import time
from collections.abc import Callable
from importlib import metadata

import pyro.distributions as dist
import torch
from timing import arguments, interleaved, optional, write_csv
from torch import Tensor

import khot

ROWS, N, K = 16, 1000, 10
Map = Callable[[Tensor], Tensor]

OWN: dict[str, Map] = {
    "sigmoid_topk": lambda x: khot.sigmoid_topk(x, K),
    "sparse_topk": lambda x: khot.sparse_topk(x, K),
    "lapsum_topk": lambda x: khot.lapsum_topk(x, K),
    "permutahedron_rank": khot.permutahedron_rank,
    "ConditionalPoisson": lambda x: khot.StraightThrough(khot.ConditionalPoisson(logits=x, k=K)).rsample(),
    "Pivotal": lambda x: khot.StraightThrough(khot.Pivotal(logits=x, k=K)).rsample(),
}


def peers() -> dict[tuple[str, str], Map]:
    """Library and function to a map of the scores."""
    found: dict[tuple[str, str], Map] = {
        ("torch", "softmax"): lambda x: x.softmax(-1),
        ("pyro-ppl", "OneHotCategoricalStraightThrough"): lambda x: dist.OneHotCategoricalStraightThrough(
            logits=x
        ).rsample(),
    }
    if entmax := optional("entmax"):
        found["entmax", "budget_bisect"] = lambda x: entmax.budget_bisect(x, K)
    if torchsort := optional("torchsort"):
        found["torchsort", "soft_rank"] = torchsort.soft_rank
    if softtorch := optional("softtorch"):
        found["softtorch", "topk"] = lambda x: softtorch.topk(x, K, softness=1.0)[1].sum(-2)
        found["softtorch", 'topk(method="softsort")'] = lambda x: softtorch.topk(x, K, method="softsort", softness=1.0)[
            1
        ].sum(-2)
    return found


def step(function: Map, leaf: Tensor, grad: Tensor) -> None:
    leaf.grad = None
    function(leaf).backward(grad)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "peer_times.csv")
    torch.set_num_threads(options.threads or 1)
    torch.manual_seed(0)
    leaf, grad = torch.randn(ROWS, N).requires_grad_(), torch.randn(ROWS, N)
    functions = peers() | {("khot", name): function for name, function in OWN.items()}
    calls = {name: lambda function=function: step(function, leaf, grad) for name, function in functions.items()}
    timings = interleaved(calls, options.seconds, clock=time.process_time)
    softmax = timings["torch", "softmax"].low
    rows = [
        {
            "library": library,
            "version": metadata.version(library),
            "function": function,
            "ms": f"{1e3 * timing.low:.3f}",
            "of softmax": f"{timing.low / softmax:.1f}",
        }
        for (library, function), timing in timings.items()
    ]
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
