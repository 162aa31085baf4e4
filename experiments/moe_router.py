"""Expert-choice routing: each expert picks k tokens of the batch, by a sparse relaxed top-k or a hard one.

    python experiments/moe_router.py --capacity 1

A router scores every token for every expert. Expert e takes the k = capacity * tokens / experts tokens that it scores
highest (expert-choice routing, Zhou et al., 2022), so that all experts carry the same load. A token gets

    sum over experts e of mask[token, e] * softmax(scores[token])[e] * expert_e(token).

No gradient flows through the hard mask: the router learns only through the softmax, or straight through the mask, as
if it were a relaxed one. A relaxed mask is itself differentiable. The mask of `sparse_topk` has exact zeros and ones,
so that few experts run on a token. Sander et al. (2023) route the tokens of a vision transformer by such a map, and
find a better accuracy than with hard top-k. Their router is expert choice as well: each of 32 experts takes k = 28 of
n = 400 tokens, with p = 2 and ten iterations of Dykstra's algorithm.

The tokens are generated. There are eight kinds, each with a centre and with a random network as the function to learn;
a token is its centre plus noise. Every expert is a small network. The networks without a router are as wide as one
expert, or as all experts together.

Protocol: weights, tokens, optimiser and steps are the same in every row. The softness of all maps was chosen among 0.1,
0.3 and 1 by the error of `sparse_topk`, p = 2, with hard masks, with seed 100.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot
from tqdm import tqdm

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import lapsum_topk, sparse_topk
from khot.nn import ExpertChoice

KINDS, EXPERTS = 8, 8
INPUTS, OUTPUTS, HIDDEN = 16, 4, 16
NOISE = 0.7
TOKENS, TEST_BATCHES = 256, 20
LEARNING_RATE = 3e-3
SOFTNESS = 0.3
HARD, STRAIGHT_THROUGH, SPARSE = "hard top-k", "hard top-k, straight-through", "sparse top-k, p = 2"
ONE_EXPERT, WIDE = "no router, one expert", "no router, all experts' width"
ERROR, HARD_ERROR = "error, %", "error with hard masks, %"
EXPERTS_RUN, DROPPED = "experts per token", "tokens without expert, %"
ROUTING = (HARD_ERROR, EXPERTS_RUN, DROPPED)


relaxed = partial(ExpertChoice, softness=SOFTNESS)
ROUTERS: dict[str, Callable[[int], ExpertChoice]] = {  # from the capacity of an expert
    HARD: ExpertChoice,
    STRAIGHT_THROUGH: partial(relaxed, relaxation=sparse_topk, straight_through=True),
    SPARSE: partial(relaxed, relaxation=sparse_topk),
    "sparse top-k, p = 4/3": partial(relaxed, relaxation=partial(sparse_topk, p=4 / 3)),
    "sigmoid top-k": relaxed,
    "LapSum top-k": partial(relaxed, relaxation=lapsum_topk),
}


class Networks(nn.Module):
    """Networks of one hidden layer, side by side: (tokens, INPUTS) to (tokens, networks, OUTPUTS)."""

    def __init__(self, networks: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(networks, INPUTS + 1, hidden) / INPUTS**0.5)
        self.second = nn.Parameter(torch.randn(networks, hidden + 1, OUTPUTS) / hidden**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.einsum("ti,nih->tnh", with_one(tokens), self.first).tanh()
        return torch.einsum("tnh,nho->tno", with_one(hidden), self.second)


def with_one(x: Tensor) -> Tensor:
    """Appends the input of the bias."""
    return torch.cat((x, torch.ones_like(x[..., :1])), -1)


class MixtureOfExperts(nn.Module):
    """A router with linear scores, and the experts. Here all run on every token; production code would skip zeros."""

    def __init__(self, choice: ExpertChoice) -> None:
        super().__init__()
        self.choice = choice
        self.experts = Networks(EXPERTS, HIDDEN)
        self.router = nn.Linear(INPUTS, EXPERTS)

    def route(self, tokens: Tensor) -> Tensor:
        """Weights of the experts, (tokens, EXPERTS)."""
        scores = self.router(tokens)
        return self.choice.mask(scores) * scores.softmax(-1)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.einsum("te,teo->to", self.route(tokens), self.experts(tokens))


class Batch(NamedTuple):
    """Tokens of several kinds."""

    kinds: Tensor  # (TOKENS,)
    tokens: Tensor  # (TOKENS, INPUTS)
    targets: Tensor  # (TOKENS, OUTPUTS)


class World:
    """The kinds of tokens: their centres and their functions."""

    def __init__(self) -> None:
        self.centres = torch.randn(KINDS, INPUTS)
        self.functions = Networks(KINDS, HIDDEN).requires_grad_(False)

    def batches(self, number: int) -> Iterator[Batch]:
        for _ in range(number):
            kinds = torch.randint(KINDS, (TOKENS,))
            tokens = self.centres[kinds] + NOISE * torch.randn(TOKENS, INPUTS)
            yield Batch(kinds, tokens, self.functions(tokens)[torch.arange(TOKENS), kinds])


def fit(model: nn.Module, world: World, steps: int, progress: tqdm) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for batch in world.batches(steps):
        loss = mse_loss(model(batch.tokens), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress.update()


def relative_error(model: nn.Module, batches: list[Batch]) -> float:
    """Squared error in percent of the variance of the targets."""
    targets = torch.cat([batch.targets for batch in batches])
    predicted = torch.cat([model(batch.tokens) for batch in batches])
    return 100 * (mse_loss(predicted, targets) / targets.var(0).mean()).item()


def score(model: MixtureOfExperts, batches: list[Batch]) -> dict[str, float]:
    weights = torch.cat([model.route(batch.tokens) for batch in batches])
    hardened = deepcopy(model)
    hardened.choice = ExpertChoice(int(model.choice.capacity))
    return {
        ERROR: relative_error(model, batches),
        HARD_ERROR: relative_error(hardened, batches),
        EXPERTS_RUN: (weights > 0).sum(-1).float().mean().item(),
        DROPPED: 100 * (weights == 0).all(-1).float().mean().item(),
    }


def taken_by_kind(model: MixtureOfExperts, batches: list[Batch]) -> Tensor:
    """The share of each kind of tokens in what an expert takes, (KINDS, EXPERTS)."""
    kinds = one_hot(torch.cat([batch.kinds for batch in batches]), KINDS).float()
    taken = kinds.T @ torch.cat([model.route(batch.tokens) for batch in batches])
    return taken / taken.sum(0)


def run_seed(seed: int, args: Namespace, table: Table, progress: tqdm) -> dict[str, Tensor]:
    """Adds a row for each model; returns what the experts of each router take, by kind."""
    world = World()
    test = list(world.batches(TEST_BATCHES))
    models: dict[str, Callable[[], nn.Module]] = {
        ONE_EXPERT: lambda: nn.Sequential(Networks(1, HIDDEN), nn.Flatten()),
        WIDE: lambda: nn.Sequential(Networks(1, EXPERTS * HIDDEN), nn.Flatten()),
    }
    k = round(args.capacity * TOKENS / EXPERTS)
    models |= {row: lambda make=make: MixtureOfExperts(make(k)) for row, make in ROUTERS.items()}
    taken = {}
    for row, make in models.items():
        pyro.set_rng_seed(seed)
        model = make()
        pyro.set_rng_seed(1_000_000 + seed)  # the same tokens in every row
        fit(model, world, args.steps, progress)
        with torch.no_grad():
            if isinstance(model, MixtureOfExperts):
                table.add(row, score(model, test))
                taken[row] = taken_by_kind(model, test)
            else:
                table.add(row, {ERROR: relative_error(model, test), **dict.fromkeys(ROUTING, float("nan"))})
    return taken


def draw_figure(table: Table, taken: dict[str, Tensor]) -> Figure:
    """The errors, and for three routers which kinds of tokens each expert takes, the experts ordered by kind."""
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=[1.8, 1, 1, 1])
    rows = list(table.scores)
    values = [table.values(row, ERROR) for row in rows]
    panels[0].barh(rows, [v.mean() for v in values], xerr=[v.std() for v in values], color="tab:blue")
    panels[0].invert_yaxis()
    panels[0].set(title="test error (mean and sd over the seeds)", xlabel=ERROR)
    for axes, row in zip(panels[1:], (HARD, STRAIGHT_THROUGH, SPARSE), strict=True):
        shares = taken[row][:, taken[row].argmax(0).argsort()]
        image = axes.imshow(shares.numpy(), cmap="viridis", vmin=0, vmax=1)
        axes.set_title(row, fontsize="medium")
        axes.set(xlabel="expert", ylabel="kind of token", xticks=[], yticks=[])
    figure.colorbar(image, ax=panels[1:], shrink=0.8, label="share of an expert's tokens")
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__)
    parser.add_argument("--capacity", type=float, default=1.0, help="experts per token, on average (%(default)s)")
    parser.add_argument("--steps", type=int, default=800, help="of training (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "steps": 2})
    if not 1 / TOKENS <= args.capacity / EXPERTS <= 1:
        parser.error(f"--capacity must be in ({EXPERTS / TOKENS}, {EXPERTS}), but is {args.capacity}")

    columns = {ERROR: ".1f", HARD_ERROR: ".1f", EXPERTS_RUN: ".2f", DROPPED: ".1f"}
    table = Table(f"{EXPERTS} experts that choose among {TOKENS} tokens of {KINDS} kinds", columns, HARD)
    first = None
    for seed, progress in each_seed(args, steps=(2 + len(ROUTERS)) * args.steps):
        taken = run_seed(seed, args, table, progress)
        first = first or taken
    table.find("sparse top-k routing beats hard top-k", SPARSE, HARD, ERROR, lower=True)
    table.find("sparse top-k routing beats straight-through", SPARSE, STRAIGHT_THROUGH, ERROR, lower=True)
    table.save(args, "moe_router")
    save_figure(draw_figure(table, first), args, "moe_router")
    return table


if __name__ == "__main__":
    main()
