"""How wrong and how noisy are the gradient estimators? The bias and variance toys of SIMPLE and SFESS against exact.

    python examples/compare_estimators.py

x is drawn from a conditional Poisson design, k = 5 of n = 10 with random logits. Estimates of the gradient of E[f(x)]
are compared with the exact one, which is a sum over all 252 subsets. The losses, with random b and A:

    linear     <b, x>
    distance   |x - b|², the loss of SIMPLE's toy. On binary x it equals a linear function, but its slope between them
               does not, and straight-through looks at slopes: it is biased
    quadratic  <x, Ax>, where units interact

Straight-through on this design is SIMPLE, the score function SFESS. For each loss there is a table and a figure.

Ahmed, Zeng, Niepert, Van den Broeck (2023), "SIMPLE: a gradient estimator for k-subset sampling".
"""

import argparse
from pathlib import Path

import torch

from khot import ConditionalPoisson, compare_estimators
from khot.diagnostics import Comparison

N, K = 10, 5


def main(arguments: list[str] | None = None) -> dict[str, Comparison]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=300, help="calls that each estimator is judged by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few repeats only")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the figures")
    args = parser.parse_args(arguments)

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the tensors are too small to share out
    design = ConditionalPoisson(logits=torch.randn(N), k=K)
    b, a = torch.randn(N), torch.randn(N, N)
    losses = {
        "linear": lambda x: x @ b,
        "distance": lambda x: (x - b).square().sum(-1),
        "quadratic": lambda x: (x @ a * x).sum(-1),
    }
    num_samples, repeats = ((1, 4), 5) if args.smoke else ((1, 2, 4, 8, 16, 32), args.repeats)
    args.out.mkdir(parents=True, exist_ok=True)
    comparisons = {}
    for name, loss in losses.items():
        comparison = compare_estimators(design, loss, num_samples=num_samples, num_repeats=repeats)
        figure = comparison.plot()
        figure.suptitle(f"{name} loss, k = {K} of n = {N}")
        figure.savefig(args.out / f"compare_estimators_{name}.png", dpi=150)
        print(f"\n{name} loss\n{comparison}")
        comparisons[name] = comparison
    print(f"\nfigures: {args.out}/compare_estimators_*.png")
    return comparisons


if __name__ == "__main__":
    main()
