"""What a step costs under each estimator, in multiples of the same step with one-hot draws.

Run `python benchmarks/estimator_steps.py`. A step constructs the design from new logits, takes four draws (none for
`enumerated`), evaluates the loss of each draw x, |W x|² with W of eight rows, and backpropagates to the logits. It is
compared with torch's OneHotCategoricalStraightThrough on the same logits, with as many draws and the same loss. All are
timed in turns in one process, so that ratios are right even on a busy machine. `unordered_set` and `enumerated` are
left out where C(n, k) is large.
"""

from collections.abc import Callable

import torch
from timing import arguments, interleaved, write_csv
from torch import Tensor
from torch.distributions import OneHotCategoricalStraightThrough

from khot import (
    IMLE,
    ConditionalPoisson,
    PerturbedTopK,
    Pivotal,
    RelaxedKHotStraightThrough,
    enumerated,
    pathwise,
    reinmax,
    score_function,
    straight_through,
    unordered_set,
)

SHAPES = [(64, 12, 3), (64, 100, 10), (16, 1000, 50)]
DRAWS, FEATURES = 4, 8
REFERENCE = "one-hot straight-through"

Loss = Callable[[Tensor], Tensor]
Estimate = Callable[[Tensor, int, Loss], Tensor]
ESTIMATES: dict[str, Estimate] = {
    REFERENCE: lambda x, k, f: pathwise(OneHotCategoricalStraightThrough(logits=x), f, DRAWS),
    "straight_through, Pivotal": lambda x, k, f: straight_through(Pivotal(logits=x, k=k), f, DRAWS),
    "straight_through, ConditionalPoisson": lambda x, k, f: straight_through(poisson(x, k), f, DRAWS),
    "reinmax, Pivotal": lambda x, k, f: reinmax(Pivotal(logits=x, k=k), f, DRAWS),
    "reinmax, ConditionalPoisson": lambda x, k, f: reinmax(poisson(x, k), f, DRAWS),
    "RelaxedKHotStraightThrough": lambda x, k, f: pathwise(RelaxedKHotStraightThrough(0.5, x, k), f, DRAWS),
    "IMLE": lambda x, k, f: pathwise(IMLE(x, k), f, DRAWS),
    "PerturbedTopK, 100 perturbations": lambda x, k, f: pathwise(PerturbedTopK(x, k), f, DRAWS),
    "score_function, leave_one_out": lambda x, k, f: score_function(poisson(x, k), f, DRAWS, baseline="leave_one_out"),
    "unordered_set": lambda x, k, f: unordered_set(poisson(x, k), f, DRAWS),
    "enumerated": lambda x, k, f: enumerated(poisson(x, k), f),
}
LARGEST_N = {"unordered_set": 12, "enumerated": 12}


def poisson(logits: Tensor, k: int) -> ConditionalPoisson:
    return ConditionalPoisson(logits=logits, k=k)


def step(estimate: Estimate, logits: Tensor, k: int, f: Loss) -> Tensor:
    return torch.autograd.grad(estimate(logits, k, f).sum(), logits)[0]


def main() -> None:
    options = arguments(__doc__, "estimator_steps.csv")
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    for batch, n, k in SHAPES:
        logits, weight = torch.randn(batch, n, requires_grad=True), torch.randn(n, FEATURES)

        def loss(x: Tensor, weight: Tensor = weight) -> Tensor:
            return (x @ weight).square().sum(-1)

        calls = {
            name: lambda estimate=estimate, logits=logits, k=k, loss=loss: step(estimate, logits, k, loss)
            for name, estimate in ESTIMATES.items()
            if n <= LARGEST_N.get(name, n)
        }
        timings = interleaved(calls, options.seconds)
        for name, timing in timings.items():
            ratio = timing.median / timings[REFERENCE].median
            print(f"({batch}, {n}), k = {k:<4}{name:<40}{timing.median * 1e3:>9.3f} ms{ratio:>9.1f}", flush=True)
            rows.append(
                {
                    "batch": batch, "n": n, "k": k, "estimator": name, "median_ms": f"{timing.median * 1e3:.4f}",
                    "p20_ms": f"{timing.low * 1e3:.4f}", "p80_ms": f"{timing.high * 1e3:.4f}",
                    "of one-hot": f"{ratio:.2f}",
                }
            )  # fmt: skip
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
