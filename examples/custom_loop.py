"""Where to put k of n possible stations so that most customers are near one? A plain torch loop, without Pyro.

    python examples/custom_loop.py --k 8

The share of customers within reach of a station has no gradient in the choice x, so the score function it is: all it
asks of the loss is its value at k-hot vectors. The loop is that of any other torch model; the estimator stands where
the loss would be.
"""

import argparse

import torch
from torch import Tensor

from khot import ConditionalPoisson, score_function, topk_mask

SITES, CUSTOMERS, RADIUS = 80, 1000, 0.2


def learn(reach: Tensor, k: int, steps: int, num_samples: int) -> Tensor:
    """The k stations of largest inclusion probability after training."""

    def uncovered(x: Tensor) -> Tensor:  # (num_samples, SITES) -> (num_samples,)
        return (x @ reach == 0).float().mean(-1)

    logits = torch.zeros(SITES, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for step in range(steps):
        design = ConditionalPoisson(logits=logits, k=k)
        loss = score_function(design, uncovered, num_samples, baseline="leave_one_out")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 5) == 0:
            print(f"step {step:4}: {1 - loss.item():6.1%} covered on average by a draw")
    return topk_mask(logits.detach(), k)


def greedy(reach: Tensor, k: int) -> Tensor:
    """Takes the station that covers most of the customers left, k times: at least 63 % of what can be covered."""
    chosen, left = torch.zeros(SITES), torch.ones(CUSTOMERS)
    for _ in range(k):
        best = (reach @ left).argmax()
        chosen[best] = 1
        left = left * (1 - reach[best])
    return chosen


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--k", type=int, default=8, help="number of stations")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--samples", type=int, default=256, help="draws for each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    args = parser.parse_args(arguments)

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the tensors are too small to share out
    sites, customers = torch.rand(SITES, 2), torch.rand(CUSTOMERS, 2)
    reach = (torch.cdist(sites, customers) < RADIUS).float()  # (SITES, CUSTOMERS)
    choices = {
        "learned": learn(reach, args.k, 5 if args.smoke else args.steps, args.samples),
        "greedy": greedy(reach, args.k),
        "random": topk_mask(torch.rand(SITES), args.k),
    }
    covered = {name: (chosen @ reach > 0).float().mean().item() for name, chosen in choices.items()}
    print("\n" + "\n".join(f"{name:>8}: {share:6.1%} of the customers covered" for name, share in covered.items()))
    return covered


if __name__ == "__main__":
    main()
