"""Which k of n possible stations serve the most customers? A plain torch loop, without Pyro.

    python experiments/custom_loop.py --k 8

The share of customers within reach of a station has no gradient in the choice x. The score function needs only values
of the loss at k-hot vectors. The loop is that of any other torch model, with the estimator in place of the loss.

Each seed is a different map of sites and customers. The k sites of largest inclusion probability are compared with
random ones and with the greedy choice, which adds, k times, the station that covers most of the remaining customers.
The greedy choice covers at least 63 % of what can be covered.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import ConditionalPoisson, score_function, topk_mask

SITES, CUSTOMERS, RADIUS = 80, 1000, 0.2
LEARNING_RATE = 0.05
LEARNED, GREEDY, RANDOM = "learned", "greedy", "random"
COVERED = "customers covered, %"


class World(NamedTuple):
    """A map, and who is near what."""

    sites: Tensor  # (SITES, 2)
    customers: Tensor  # (CUSTOMERS, 2)
    reach: Tensor  # (SITES, CUSTOMERS) of zeros and ones


def make_world() -> World:
    sites, customers = torch.rand(SITES, 2), torch.rand(CUSTOMERS, 2)
    return World(sites, customers, (torch.cdist(sites, customers) < RADIUS).float())


def covered(x: Tensor, reach: Tensor) -> Tensor:
    """The share of customers near a station: (..., SITES) to (...)."""
    return (x @ reach > 0).float().mean(-1)


def learn(reach: Tensor, args: Namespace, after_step: Callable[[], object]) -> tuple[Tensor, list[float]]:
    """The k sites of largest inclusion probability after training, and what a draw covered in each step, in %."""
    logits = torch.zeros(SITES, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    curve = []
    for _ in range(args.steps):
        design = ConditionalPoisson(logits=logits, k=args.k)
        loss = score_function(design, lambda x: 1 - covered(x, reach), args.samples, baseline="leave_one_out")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(100 * (1 - loss.item()))
        after_step()
    return topk_mask(logits.detach(), args.k), curve


def greedy(reach: Tensor, k: int) -> Tensor:
    chosen, left = torch.zeros(SITES), torch.ones(CUSTOMERS)
    for _ in range(k):
        best = (reach @ left).argmax()
        chosen[best] = 1
        left = left * (1 - reach[best])
    return chosen


def draw_figure(world: World, chosen: Tensor, curves: list[list[float]], table: Table) -> Figure:
    """The first seed's map with the stations learned, and what the draws of all seeds cover."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.3])
    near = chosen @ world.reach > 0
    for customers, colour, label in ((near, "tab:blue", "customers near one"), (~near, "0.75", "others")):
        left.scatter(*world.customers[customers].T.numpy(), s=4, color=colour, label=label)
    left.scatter(*world.sites.T.numpy(), marker="x", color="black", s=18, linewidths=0.8, label="sites")
    left.scatter(*world.sites[chosen == 1].T.numpy(), marker="*", s=180, color="tab:red", label="stations")
    left.set(title="stations learned, first seed", xticks=[], yticks=[], aspect="equal")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4, fontsize=8)
    lines = right.plot(torch.tensor(curves).T.numpy(), color="tab:red", linewidth=0.9)
    lines[0].set_label("a draw, on average, by seed")
    for row, style in ((GREEDY, "dashed"), (RANDOM, "dotted")):
        right.axhline(table.values(row, COVERED).mean(), color="black", linestyle=style, label=f"{row}, mean")
    right.set(title="learning", xlabel="step", ylabel=COVERED)
    right.legend(loc="lower right")
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__)
    parser.add_argument("--k", type=int, default=8, help="number of stations (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="of training (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=256, help="draws for each step (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "steps": 5})
    if not 0 < args.k < SITES:
        parser.error(f"--k must lie between 0 and {SITES}, but is {args.k}")

    table = Table(f"{args.k} of {SITES} sites", {COVERED: ".1f"}, GREEDY)
    curves, first = [], None
    for _, progress in each_seed(args, steps=args.steps):
        world = make_world()
        chosen, curve = learn(world.reach, args, progress.update)
        choices = {LEARNED: chosen, GREEDY: greedy(world.reach, args.k), RANDOM: topk_mask(torch.rand(SITES), args.k)}
        for row, choice in choices.items():
            table.add(row, {COVERED: 100 * covered(choice, world.reach).item()})
        curves.append(curve)
        first = first or (world, chosen)
    table.find("learned stations cover more than random ones", LEARNED, RANDOM)
    table.find("learned stations cover more than greedy ones", LEARNED, GREEDY)
    table.save(args, "custom_loop")
    save_figure(draw_figure(*first, curves, table), args, "custom_loop")
    return table


if __name__ == "__main__":
    main()
