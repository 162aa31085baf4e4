"""Six ways to learn which k pixels to look at: the estimators of the k-hot paper side by side.

    python experiments/feature_selection_methods.py                                scikit-learn's digits
    python experiments/feature_selection_methods.py --data mnist --data-dir DIR    MNIST, where you have its files

One k-hot mask for all images is learned together with a classifier that sees the masked pixels only. Every image of a
minibatch is masked by a draw of its own, and the cross-entropy is the loss; the rows differ in how a mask is drawn from
the logits, and what gradient it carries back to them:

    Xie & Ermon      top-k of logits + Gumbel noise, gradient of successive_softmax_topk of the same
    NCPSS            iterated Poisson sampling at rescaled_sigmoid_topk, straight-through
    SIMPLE           StraightThrough on ConditionalPoisson
    Gumbel-sigma_k   top-k of logits + Gumbel noise, gradient of sigmoid_topk of the same
    pi-ST            StraightThrough on Pivotal, whose inclusion probabilities are sigmoid_topk
    pi-ST2           ReinMax on the same

This is table 3 of "Differentiable top-k: from one-hot to k-hot" (2025), https://openreview.net/forum?id=HxLmtJYfBi,
which compares them on MNIST; its findings are that second-order and Gumbel-sigma_k beat plain straight-through. The
settings here are our own. NCPSS is that of Pervez et al. (2023), "Scalable subset sampling with neural conditional
Poisson networks".

Protocol: classifier, optimiser, epochs, initial weights and minibatches are the same for every row. The images are
tested through the one mask of the k largest logits, with the classifier that was trained along. The test images are the
same for all seeds; each seed leaves other images out of the training. No setting was chosen by the scores.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common import Table, each_seed, experiment_parser, minibatches, parse, save_figure
from feature_selection import BATCH_SIZE, MASK_LR, WEIGHTS_LR, centred, make_classifier
from image_data import Labelled, load_split
from khot import (
    ConditionalPoisson,
    Pivotal,
    ReinMax,
    RelaxedKHotStraightThrough,
    StraightThrough,
    rescaled_sigmoid_topk,
    straight_through_value,
    successive_softmax_topk,
    topk_mask,
)

TEMPERATURE = 0.5  # of both Gumbel rows
SIZES = {"digits": 10}  # k; of other data 50
XIE_ERMON, NCPSS, SIMPLE, GUMBEL, FIRST, SECOND = "Xie & Ermon", "NCPSS", "SIMPLE", "Gumbel-σ_k", "πST", "πST2"
ACCURACY, LOSS = "accuracy, %", "loss"

Mask = Callable[[Tensor, int, int], Tensor]  # (logits, k, draws) -> (draws, n)


def iterated_poisson(probs: Tensor, k: int) -> Tensor:
    """k-hot vectors ``(..., n)``: independent draws, of which surplus ones are thinned and missing ones drawn anew.

    The sampler of NCPSS (Pervez et al., 2023). Each round draws Poisson samples among the units that may change, with
    probabilities in proportion to ``probs`` (to add) or ``1 - probs`` (to take away) that sum to the surplus, until
    exactly k are left. The inclusion probabilities are near ``probs``, but not equal to them; the designs of khot have
    them exactly.
    """
    value = torch.bernoulli(probs)
    while True:
        surplus = value.sum(-1, keepdim=True) - k
        if not surplus.any():
            return value
        weights = torch.where(surplus > 0, value * (1 - probs), (1 - value) * probs) * (surplus != 0)
        # Where rounding leaves too few units with a weight, all that may change have one.
        weights = weights + 1e-6 * torch.where(surplus > 0, value, 1 - value) * (surplus != 0)
        share = surplus.abs() * weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        value = (value - torch.bernoulli(share.clamp(max=1))).abs()


def ncpss(logits: Tensor, k: int, draws: int) -> Tensor:
    probs = rescaled_sigmoid_topk(logits, k)
    value = iterated_poisson(probs.detach().clamp(0, 1).expand(draws, -1), k)
    return straight_through_value(value, probs)


def xie_ermon(logits: Tensor, k: int, draws: int) -> Tensor:
    law = RelaxedKHotStraightThrough(TEMPERATURE, logits, k, relaxation=successive_softmax_topk)
    return law.rsample((draws,))


METHODS: dict[str, Mask] = {
    XIE_ERMON: xie_ermon,
    NCPSS: ncpss,
    SIMPLE: lambda logits, k, draws: StraightThrough(ConditionalPoisson(logits=logits, k=k)).rsample((draws,)),
    GUMBEL: lambda logits, k, draws: RelaxedKHotStraightThrough(TEMPERATURE, logits, k).rsample((draws,)),
    FIRST: lambda logits, k, draws: StraightThrough(Pivotal(logits=logits, k=k)).rsample((draws,)),
    SECOND: lambda logits, k, draws: ReinMax(Pivotal(logits=logits, k=k)).rsample((draws,)),
}


class Selection(NamedTuple):
    """Logits of the mask, and the classifier of the pixels that it leaves."""

    logits: Tensor
    classifier: nn.Module


def train(
    data: Labelled,
    mask: Callable[[Tensor, int], Tensor],
    first: Tensor,
    epochs: int,
    after_epoch: Callable[[Tensor], object],
    penalty: Callable[[Tensor], Tensor | float] = lambda logits: 0.0,
) -> Selection:
    """Learns logits, from ``first`` on, and a classifier of what ``mask(logits, draws)`` leaves of the images."""
    logits = first.clone().requires_grad_()
    classifier = make_classifier(len(logits))
    groups = [{"params": classifier.parameters(), "lr": WEIGHTS_LR}, {"params": [logits], "lr": MASK_LR}]
    optimizer = torch.optim.Adam(groups)
    for _ in range(epochs):
        for images, labels in minibatches(BATCH_SIZE, *data):
            loss = cross_entropy(classifier(images * mask(logits, len(images))), labels) + penalty(logits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        after_epoch(logits.detach().clone())
    return Selection(logits.detach(), classifier)


@torch.no_grad()
def evaluate(selection: Selection, k: int, data: Labelled) -> dict[str, float]:
    """Scores with the one mask of the k largest logits."""
    scores = selection.classifier(data.images * topk_mask(selection.logits, k))
    accuracy = (scores.argmax(-1) == data.labels).float().mean()
    return {ACCURACY: 100 * accuracy.item(), LOSS: cross_entropy(scores, data.labels).item()}


def run_seed(seed: int, args: Namespace, table: Table, after_epoch: Callable[[], object]) -> dict[str, Tensor]:
    """Adds a row for each method; returns the masks."""
    split = centred(load_split(args.data, seed, args.data_dir))
    masks = {}
    for row, method in METHODS.items():
        pyro.set_rng_seed(seed)
        first = torch.zeros(split.train.images.shape[-1])

        def mask(logits: Tensor, draws: int, method: Mask = method) -> Tensor:
            return method(logits, args.k, draws)

        selection = train(split.train, mask, first, args.epochs, lambda logits: after_epoch())
        table.add(row, evaluate(selection, args.k, split.test))
        masks[row] = topk_mask(selection.logits, args.k)
    return masks


def draw_figure(masks: list[dict[str, Tensor]], k: int) -> Figure:
    """How often each pixel was chosen, over the seeds."""
    figure = Figure(figsize=(13, 2.8), layout="constrained")
    figure.suptitle(f"the {k} pixels chosen, mean over {len(masks)} seeds")
    panels = figure.subplots(1, len(METHODS))
    for panel, row in zip(panels, METHODS, strict=True):
        share = torch.stack([chosen[row] for chosen in masks]).mean(0)
        side = round(len(share) ** 0.5)
        image = panel.imshow(share.view(side, side).numpy(), cmap="viridis", vmin=0, vmax=1)
        panel.set(title=row, xticks=[], yticks=[])
    figure.colorbar(image, ax=panels, shrink=0.8)
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__, data=("digits", "mnist", "fashion-mnist"))
    parser.add_argument("--k", type=int, help="number of pixels (default: 10 of the digits, else 50)")
    parser.add_argument("--epochs", type=int, default=60, help="of training (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "epochs": 1})
    args.k = args.k or SIZES.get(args.data, 50)

    title = f"Test scores with {args.k} pixels, {args.data}"
    table = Table(title, {ACCURACY: ".1f", LOSS: ".3f"}, FIRST)
    masks = []
    for seed, progress in each_seed(args, steps=len(METHODS) * args.epochs):
        masks.append(run_seed(seed, args, table, progress.update))
    for row in (SECOND, GUMBEL):
        table.find(f"{row} beats plain straight-through (k-hot paper, table 3)", row, FIRST)
    for row in (SECOND, GUMBEL):
        table.find(f"{row} has a lower loss than plain straight-through", row, FIRST, LOSS, lower=True)
    table.save(args, "feature_selection_methods")
    save_figure(draw_figure(masks, args.k), args, "feature_selection_methods")
    return table


if __name__ == "__main__":
    main()
