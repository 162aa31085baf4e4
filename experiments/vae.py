"""Variational autoencoders with k-hot latent vectors: which way to draw and differentiate them gives the best bound?

    python experiments/vae.py                                        scikit-learn's digits, codes of ten vectors
    python experiments/vae.py --latents ten single                   both kinds of codes, in twice the time
    python experiments/vae.py --data mnist --data-dir DIR            MNIST, where you have its files

An image is encoded as k-hot vectors: ten of them with n = 10 and k = 5 ("ten"), or a single one with n = 100, k = 50
on digits and n = 1000, k = 500 otherwise ("single"). Given its code, the pixels of a digit are independent binomial
counts out of 16; those of the other data are binarised at 1/2. Both networks are perceptrons with one hidden layer.
Model and guide are Pyro's; the rows differ in the latent site alone, and all give the decoder hard k-hot vectors:

    Xie & Ermon      top-k of logits + Gumbel noise, gradient of k successive softmaxes of them
    Gumbel-sigma_k   the same draw, gradient of sigmoid_topk: RelaxedKHotStraightThrough in model and guide
    SIMPLE           StraightThrough on ConditionalPoisson
    pi-ST            StraightThrough on Pivotal, whose draws are scored by the ConditionalPoisson of the same marginals
    pi-ST2           ReinMax on the same

This is table 4 of "Differentiable top-k: from one-hot to k-hot" (2025), https://openreview.net/forum?id=HxLmtJYfBi,
which compares these on MNIST; its finding is that sampling based on the sigmoid top-k beats Xie and Ermon's.

Prior terms: "exact" is the Kullback-Leibler divergence from the uniform law on k-hot vectors. Of the two Gumbel rows,
whose draws have no tractable probability, it is that of the perturbed logits up to a shift, an upper bound, estimated
from the draws. Pivotal draws have none either: there it is that of the ConditionalPoisson of the same marginals, which
is also the law that test images are encoded by, so that the bound is one. "per-item" treats the entries as independent,
sum_i KL(Bernoulli(pi_i), Bernoulli(k / n)), and is added by a `pyro.factor`; it bounds nothing, but is one and the same
function of pi for all rows. Whatever a network was trained with, the table has the exact term in its -ELBO, a bound on
the negative log-likelihood of the hard model. It is looser in the Gumbel rows: there a finding about -ELBO is one about
what can be shown of these methods as well as about how well they learn.

Protocol: networks, optimiser, epochs, initial weights and minibatches are the same for every row. Scores are those of
the test images, the same for all seeds, with several draws of the code each.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro import poutine
from pyro.infer import SVI, TraceMeanField_ELBO
from torch import Tensor, nn
from torch.distributions import kl_divergence

from common import Table, each_seed, experiment_parser, minibatches, parse, save_figure
from image_data import Labelled, load_split
from khot import (
    ConditionalPoisson,
    Pivotal,
    ReinMax,
    RelaxedKHot,
    RelaxedKHotStraightThrough,
    StraightThrough,
    sigmoid_topk,
    straight_through_value,
    successive_softmax_topk,
    topk_mask,
)

HIDDEN, BATCH_SIZE, LEARNING_RATE = 128, 128, 5e-3
TEMPERATURE = 0.5  # of both Gumbel rows
SHOWN = 8  # images in the figure
LEVELS = {"digits": 16}  # of grey besides white; of other data 1
XIE_ERMON, GUMBEL, SIMPLE, FIRST, SECOND = "Xie & Ermon", "Gumbel-σ_k", "SIMPLE", "πST", "πST2"
BOUND, RECONSTRUCTION = "−ELBO, nats", "reconstruction, nats"


class Latent(NamedTuple):
    """A code of several k-hot vectors."""

    vectors: int
    n: int
    k: int


def latent_of(name: str, data: str) -> Latent:
    if name == "ten":
        return Latent(10, 10, 5)
    return Latent(1, 100, 50) if data == "digits" else Latent(1, 1000, 500)


class Method(NamedTuple):
    """The latent site: its law in the guide; in the model, of zero logits; what the decoder reads; the marginals.

    ``tested``, if not None, is the law that takes the guide's place in the tests, one that is scored by itself.
    """

    posterior: Callable[[Tensor, int], dist.TorchDistribution]
    prior: Callable[[Tensor, int], dist.TorchDistribution]
    read: Callable[[Tensor, int], Tensor] = lambda value, k: value
    marginals: Callable[[Tensor, int], Tensor] = sigmoid_topk
    tested: Callable[[Tensor, int], dist.TorchDistribution] | None = None


def uniform(zeros: Tensor, k: int) -> ConditionalPoisson:
    return ConditionalPoisson(logits=zeros, k=k)


def simple(logits: Tensor, k: int) -> StraightThrough:
    return StraightThrough(ConditionalPoisson(logits=logits, k=k))


def same_marginals(logits: Tensor, k: int) -> ConditionalPoisson:
    return ConditionalPoisson(probs=sigmoid_topk(logits, k), k=k)


def first_order(logits: Tensor, k: int) -> StraightThrough:
    return StraightThrough(Pivotal(logits=logits, k=k), log_prob=same_marginals(logits, k))


def second_order(logits: Tensor, k: int) -> ReinMax:
    return ReinMax(Pivotal(logits=logits, k=k), log_prob=same_marginals(logits, k))


def entropic(logits: Tensor, k: int) -> StraightThrough:
    return StraightThrough(same_marginals(logits, k))


def gumbel(logits: Tensor, k: int) -> RelaxedKHotStraightThrough:
    return RelaxedKHotStraightThrough(TEMPERATURE, logits=logits, k=k)


def perturbed(logits: Tensor, k: int) -> RelaxedKHot:
    """Logits plus Gumbel noise, up to a shift: the log-odds of a relaxed vector of temperature 1."""
    return RelaxedKHot(1.0, logits=logits, k=k)


def successive(value: Tensor, k: int) -> Tensor:
    """The top-k of a draw of `perturbed`, with the gradient of successive softmaxes of the perturbed logits."""
    relaxed = successive_softmax_topk(torch.logit(value), k, TEMPERATURE)
    return straight_through_value(topk_mask(value.detach(), k), relaxed)


METHODS = {
    XIE_ERMON: Method(perturbed, perturbed, read=successive),
    GUMBEL: Method(gumbel, gumbel),
    SIMPLE: Method(simple, uniform, marginals=lambda logits, k: ConditionalPoisson(logits=logits, k=k).mean),
    FIRST: Method(first_order, uniform, tested=entropic),
    SECOND: Method(second_order, uniform, tested=entropic),
}


class VAE(nn.Module):
    """Encoder, decoder, and the Pyro model and guide made of them."""

    def __init__(self, pixels: int, latent: Latent, method: Method, per_item: bool, levels: int = 1) -> None:
        super().__init__()
        self.latent, self.method, self.per_item, self.levels = latent, method, per_item, levels
        size = latent.vectors * latent.n
        self.encoder = nn.Sequential(nn.Linear(pixels, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, size))
        self.decoder = nn.Sequential(nn.Linear(size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, pixels))

    def sample_code(self, law: Callable[[Tensor, int], dist.TorchDistribution], logits: Tensor) -> Tensor:
        code = law(logits, self.latent.k).to_event(1)
        return pyro.sample("code", code.mask(False) if self.per_item else code)

    def model(self, images: Tensor | None, size: int = 1) -> Tensor:
        """Darkness in [0, 1] of the pixels, of given images ``(size, pixels)`` of grey levels or of the prior."""
        pyro.module("vae", self)
        vectors, n, k = self.latent
        with pyro.plate("images", size if images is None else len(images)):
            value = self.sample_code(self.method.prior, torch.zeros(vectors, n))
            logits = self.decoder(self.method.read(value, k).flatten(-2))
            pyro.sample("pixels", dist.Binomial(self.levels, logits=logits).to_event(1), obs=images)
        return torch.sigmoid(logits)

    def guide(self, images: Tensor) -> None:
        vectors, n, k = self.latent
        with pyro.plate("images", len(images)):
            logits = self.encoder(images / self.levels).unflatten(-1, (vectors, n))
            self.sample_code(self.method.posterior, logits)
            if self.per_item:
                items = dist.Bernoulli(self.method.marginals(logits, k), validate_args=False)
                divergence = kl_divergence(items, dist.Bernoulli(torch.tensor(k / n))).sum((-2, -1))
                pyro.factor("prior_term", divergence, has_rsample=True)


def grey_levels(data: Labelled, levels: int) -> Tensor:
    return (data.images.flatten(1) * levels).round()


def train(vae: VAE, images: Tensor, epochs: int, after_epoch: Callable[[], object]) -> None:
    pyro.clear_param_store()
    svi = SVI(vae.model, vae.guide, pyro.optim.Adam({"lr": LEARNING_RATE}), TraceMeanField_ELBO())
    for _ in range(epochs):
        for (batch,) in minibatches(BATCH_SIZE, images):
            svi.step(batch)
        after_epoch()


def reconstruct(vae: VAE, images: Tensor) -> tuple[Tensor, float]:
    """Darkness of the pixels, given one draw of the code, and -log p(image | code), mean over the images."""
    draw = poutine.trace(vae.guide).get_trace(images)
    trace = poutine.trace(poutine.replay(vae.model, trace=draw)).get_trace(images)
    trace.compute_log_prob()
    return trace.nodes["_RETURN"]["value"], -trace.nodes["pixels"]["log_prob"].mean().item()


@torch.no_grad()
def evaluate(vae: VAE, images: Tensor, draws: int) -> dict[str, float]:
    """Ends the training, and scores with the exact prior term, whatever the autoencoder was trained with."""
    vae.method = vae.method._replace(posterior=vae.method.tested or vae.method.posterior)
    vae.per_item = False
    bound = sum(TraceMeanField_ELBO().loss(vae.model, vae.guide, images) for _ in range(draws)) / draws
    reconstruction = sum(reconstruct(vae, images)[1] for _ in range(draws)) / draws
    return {BOUND: bound / len(images), RECONSTRUCTION: reconstruction}


class Panel(NamedTuple):
    """Pictures of one method: test images decoded again, and images of the prior."""

    reconstructions: Tensor  # (SHOWN, pixels)
    samples: Tensor


@torch.no_grad()
def draw_panel(vae: VAE, images: Tensor) -> Panel:
    return Panel(reconstruct(vae, images[:SHOWN])[0], vae.model(None, SHOWN))


def draw_figure(images: Tensor, panels: dict[str, Panel], title: str) -> Figure:
    """Left the reconstructions, right the samples; a row of pictures per method."""
    figure = Figure(figsize=(13, 1 + 0.75 * (1 + len(panels))), layout="constrained")
    figure.suptitle(title)
    side = round(images.shape[-1] ** 0.5)
    rows = {"test images": Panel(images[:SHOWN], torch.zeros(0, side**2)), **panels}
    axes = figure.subplots(len(rows), 2)
    for (name, panel), (left, right) in zip(rows.items(), axes, strict=True):
        for place, pictures in ((left, panel.reconstructions), (right, panel.samples)):
            place.set(xticks=[], yticks=[])
            if len(pictures):
                strip = pictures.view(-1, side, side).movedim(0, 1).flatten(1).numpy()
                place.imshow(strip, cmap="gray_r", vmin=0, vmax=1)
            else:
                place.axis("off")
        left.set_ylabel(name, rotation=0, ha="right", va="center")
    axes[0, 0].set_title("reconstructions, one draw of the code")
    axes[1, 1].set_title("samples of the prior")
    return figure


def add_findings(table: Table) -> None:
    paper = "(k-hot paper, table 4)"
    for row in (GUMBEL, FIRST, SECOND):
        table.find(f"{row} beats Xie & Ermon {paper}", row, XIE_ERMON, lower=True)
    table.find("second order beats plain straight-through", SECOND, FIRST, lower=True)


def compare(latent: str, prior: str, args: Namespace) -> tuple[Table, Figure]:
    """One table: all methods, one kind of code and one prior term; and the pictures of the first seed."""
    shape, levels = latent_of(latent, args.data), LEVELS.get(args.data, 1)
    title = f"{args.data}, {shape.vectors} × (n = {shape.n}, k = {shape.k}), {prior} prior term"
    table = Table(f"Test images of {title}", {BOUND: ".2f", RECONSTRUCTION: ".2f"}, XIE_ERMON)
    figure = None
    for seed, progress in each_seed(args, steps=len(METHODS) * args.epochs):
        split = load_split(args.data, seed, args.data_dir)
        images, test = grey_levels(split.train, levels), grey_levels(split.test, levels)
        panels = {}
        for row, method in METHODS.items():
            pyro.set_rng_seed(seed)
            vae = VAE(images.shape[-1], shape, method, prior == "per-item", levels)
            train(vae, images, args.epochs, progress.update)
            table.add(row, evaluate(vae, test, args.draws))
            panels[row] = draw_panel(vae, test)
        figure = figure or draw_figure(test / levels, panels, title)
    add_findings(table)
    return table, figure


def main(arguments: list[str] | None = None) -> dict[str, Table]:
    parser = experiment_parser(__doc__, data=("digits", "mnist", "fashion-mnist"))
    parser.add_argument("--latents", nargs="+", choices=("ten", "single"), default=["ten"])
    parser.add_argument("--priors", nargs="+", choices=("exact", "per-item"), default=["exact", "per-item"])
    parser.add_argument("--epochs", type=int, default=15, help="of training (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="of the code of a test image (default: %(default)s)")
    smoke = {"seeds": 2, "epochs": 1, "draws": 1, "priors": ["exact"]}
    args = parse(parser, arguments, smoke)

    tables = {}
    for latent in args.latents:
        for prior in args.priors:
            name = f"vae_{latent}_{prior.replace('-', '_')}"
            tables[name], figure = compare(latent, prior, args)
            tables[name].save(args, name)
            save_figure(figure, args, name)
    return tables


if __name__ == "__main__":
    main()
