"""Trains a recommender for recall@20 itself, and compares it with cross-entropy and top-k cross-entropy.

    python experiments/recommender.py

Generated data: the score of an item for a user is a product of six factors, plus the popularity of the item, plus
Gumbel noise, and each user has chosen the 30 items of the highest scores. 60 % of the choices are for training, 20 %
for validation and 20 % for tests. The model is a matrix factorisation with a bias for each item. It recommends 20 items
that the user has not chosen in the training data. The losses of a user with the scores x are

* cross-entropy: the mean of -log softmax(x) over the chosen items;
* top-k cross-entropy: `topk_cross_entropy` of a chosen item, drawn anew in each step, with k = 20;
* recall@20: `topk_metric_loss` of the chosen items.

Three rows go on from the result of cross-entropy, at a tenth of the learning rate: with recall@20, with top-k
cross-entropy, and with the same loss. "Popularity" recommends what most users have chosen.

Protocol: the optimiser, the learning rate, the number of steps and, for each seed, the initial weights are the same for
every loss, and so is the choice of the step: that of the highest recall@20 of validation choices. Weight decay (0.1 to
3) and softness (0.3 to 10) were chosen among four to fourteen pairs for each loss, by that recall on seeds 100 and 101.
"""

from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import topk_cross_entropy, topk_mask, topk_metric_loss

USERS, ITEMS, FACTORS, CHOSEN, K = 500, 600, 6, 30, 20
EVERY = 10  # steps from one evaluation to the next
METRICS = {"recall@20, %": "recall", "NDCG@20, %": "ndcg"}
POPULARITY, CROSS_ENTROPY, TOPK, METRIC = "popularity", "cross-entropy", "top-k cross-entropy", "recall@20"
THEN = "cross-entropy, then "


class Choices(NamedTuple):
    """Which items each user has chosen: bools (users, items) that exclude each other."""

    training: Tensor
    validation: Tensor
    test: Tensor


def generate(seed: int) -> Choices:
    generator = torch.Generator().manual_seed(1000 + seed)  # not the seed of the weights, which would be the factors
    users, items = (torch.randn(size, FACTORS, generator=generator) for size in (USERS, ITEMS))
    popularity = torch.randn(ITEMS, generator=generator)
    noise = -torch.rand(USERS, ITEMS, generator=generator).log().neg().log()
    chosen = topk_mask(users @ items.T / FACTORS**0.5 * 1.5 + popularity + noise, CHOSEN).bool()
    part = torch.rand(USERS, ITEMS, generator=generator)
    return Choices(chosen & (part < 0.6), chosen & (part >= 0.6) & (part < 0.8), chosen & (part >= 0.8))


def cross_entropy(scores: Tensor, chosen: Tensor) -> Tensor:
    return -(scores.log_softmax(-1) * chosen).sum() / chosen.sum()


def of_size_k(softness: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Top-k cross-entropy of one item for each user."""
    weights = [0.0] * (K - 1) + [1.0]

    def loss(scores: Tensor, chosen: Tensor) -> Tensor:
        target = torch.multinomial(chosen.float(), 1).squeeze(-1)
        return topk_cross_entropy(scores, target, weights, softness=softness)

    return loss


def of_recall(softness: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, chosen: topk_metric_loss(scores, chosen, K, "recall", softness)


class Training(NamedTuple):
    """How a row is trained."""

    loss: Callable[[Tensor, Tensor], Tensor]
    decay: float
    rate: float = 0.03
    begins_with: str | None = None  # another row


ROWS = {
    CROSS_ENTROPY: Training(cross_entropy, 1.0),
    TOPK: Training(of_size_k(0.3), 1.0),
    METRIC: Training(of_recall(1.0), 1.0),
    THEN + METRIC: Training(of_recall(1.0), 1.0, 0.003, CROSS_ENTROPY),
    THEN + TOPK: Training(of_size_k(1.0), 1.0, 0.003, CROSS_ENTROPY),
    THEN + CROSS_ENTROPY: Training(cross_entropy, 1.0, 0.003, CROSS_ENTROPY),
}
CLAIMS = (  # that the first has a higher recall@20 than the second
    (METRIC, CROSS_ENTROPY),
    (METRIC, TOPK),
    (TOPK, CROSS_ENTROPY),
    (THEN + METRIC, THEN + CROSS_ENTROPY),
    (THEN + TOPK, THEN + CROSS_ENTROPY),
)


class Factorisation(nn.Module):
    """Scores (users, items)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (nn.Parameter(0.1 * torch.randn(size, FACTORS)) for size in (USERS, ITEMS))
        self.bias = nn.Parameter(torch.zeros(ITEMS))

    def forward(self) -> Tensor:
        return self.users @ self.items.T + self.bias


def metric(scores: Tensor, known: Tensor, chosen: Tensor, name: str = "recall") -> float:
    """In percent, of the recommended items that are not known; users without a chosen one do not count."""
    new = scores.detach().double().masked_fill(known, -torch.inf)
    return 100 * (1 - topk_metric_loss(new, chosen, K, name, softness=1e-9).item())


def fit(model: Factorisation, training: Training, choices: Choices, steps: int, progress: tqdm) -> list[float]:
    """Trains the model, and keeps the step with the highest recall of validation choices; returns the recalls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.rate, weight_decay=training.decay)
    recalls, best = [metric(model(), choices.training, choices.validation)], deepcopy(model.state_dict())
    for step in range(1, steps + 1):
        loss = training.loss(model(), choices.training)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            recalls.append(metric(model(), choices.training, choices.validation))
            if recalls[-1] > max(recalls[:-1]):
                best = deepcopy(model.state_dict())
        progress.update()
    model.load_state_dict(best)
    return recalls


def run_seed(seed: int, args: Namespace, table: Table, progress: tqdm) -> dict[str, list[float]]:
    """Adds a row for each training; returns the recalls of validation choices over time."""
    choices, models, recalls = generate(seed), {}, {}
    for row, training in ROWS.items():
        torch.manual_seed(seed)
        models[row] = deepcopy(models[training.begins_with]) if training.begins_with else Factorisation()
        recalls[row] = fit(models[row], training, choices, args.steps, progress)
    scores = {POPULARITY: choices.training.sum(0).float().expand(USERS, -1)}
    scores |= {row: model() for row, model in models.items()}
    known = choices.training | choices.validation
    for row, values in scores.items():
        table.add(row, {name: metric(values, known, choices.test, word) for name, word in METRICS.items()})
    return recalls


def draw_figure(recalls: dict[str, list[float]]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for row, values in recalls.items():
        axes.plot(range(0, EVERY * len(values), EVERY), values, label=row)
    axes.set(xlabel="step", ylabel="validation recall@20, %, of the first seed")
    axes.legend()
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of training (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "steps": 10})

    title = f"Recommending {K} of {ITEMS} items to {USERS} users, generated choices"
    table = Table(title, dict.fromkeys(METRICS, ".1f"), CROSS_ENTROPY)
    first = {}
    for seed, progress in each_seed(args, steps=len(ROWS) * args.steps):
        recalls = run_seed(seed, args, table, progress)
        first = first or recalls
    for better, worse in CLAIMS:
        table.find(f"“{better}” gives a higher recall@20 than “{worse}”", better, worse)
    table.save(args, "recommender")
    save_figure(draw_figure(first), args, "recommender")
    return table


if __name__ == "__main__":
    main()
