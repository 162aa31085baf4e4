"""Variational autoencoders with k-hot codes: which way to draw and differentiate the codes gives the best bound?

    python experiments/vae.py                                        scikit-learn's digits, codes of ten vectors
    python experiments/vae.py --latents ten single                   both kinds of codes, in twice the time
    python experiments/vae.py --data mnist --data-dir DIR            MNIST, if you have its files

An image is encoded as k-hot vectors: ten of them with n = 10 and k = 5 ("ten"), or a single one with n = 100, k = 50
on digits and n = 1000, k = 500 otherwise ("single"). Given its code, the pixels of a digit are independent binomial
counts out of 16; those of other data are scored by the binary cross-entropy of their grey values in [0, 1]. Encoder and
decoder are perceptrons. Model and guide are Pyro's; the rows differ only in the latent site, and all give the decoder
hard k-hot vectors:

    Xie & Ermon      top-k of logits + Gumbel noise, gradient of k successive softmaxes of them
    NCPSS            iterated Poisson sampling at sigmoids scaled to sum to k, straight-through
    Gumbel-sigma_k   top-k as in the first row, gradient of sigmoid_topk: RelaxedKHotStraightThrough in model and guide
    SIMPLE           StraightThrough on ConditionalPoisson
    pi-ST            StraightThrough on Pivotal, whose draws are scored by the ConditionalPoisson of the same marginals
    pi-ST2           ReinMax on the same

This is table 4 of "Differentiable top-k: from one-hot to k-hot" (2025), https://openreview.net/forum?id=HxLmtJYfBi,
which compares these on MNIST; its finding is that sampling based on the sigmoid top-k beats Xie and Ermon's. On MNIST
the settings are the paper's: an encoder with hidden layers of 512 and 256, a decoder with 256 and 512, Adam at 1e-4.
Ours are: minibatches of 32, all temperatures 1, and when to stop, after 50 epochs at most. A single code is not trained
by Xie and Ermon's method there, with k = 500 softmaxes a step; the paper has no number for it either.

Prior terms: "exact" is the Kullback-Leibler divergence from the uniform law on k-hot vectors. Of the two Gumbel rows,
whose draws have no tractable probability, it is that of the perturbed logits up to a shift, an upper bound, estimated
from the draws. Pivotal and NCPSS's draws have none either: there it is that of the ConditionalPoisson of the same
marginals, which is also the law that test images are encoded by, so that the bound is one. The others are one and
the same function of the logits or of pi for all rows, added by a `pyro.factor`, and bound nothing: "softmax", the
paper's, is KL(softmax(logits), uniform on the n entries), summed over the vectors of a code; "softmax-averaged" is
their mean, which the paper's numbers suggest; "per-item" treats the entries as independent,
sum_i KL(Bernoulli(pi_i), Bernoulli(k / n)). Whatever a network was trained with, the table has the exact term in its
-ELBO, a bound on the negative log-likelihood of the hard model. It is looser in the Gumbel rows: there a finding about
-ELBO is one about what can be shown of these methods as well as about how well they learn. The loss as trained, which
is what the paper reports, is given beside it.

Protocol: networks, optimiser, initial weights and minibatches are the same for every row, and so is the end of the
training: the loss on the validation images has had no new minimum for some epochs, or all epochs are over. Scores are
those of the test images, the same for all seeds, with several draws of the code each.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor, nn
from torch.distributions import kl_divergence
from torch.types import _size as SizeLike

from common import Table, experiment_parser, minibatches, parse, save_figure
from feature_selection_methods import iterated_poisson, rescaled_sigmoid
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
from runs import Fitted, Result, Run, add_run_arguments, run_grid

CHUNK = 500  # images tested at once
SHOWN = 8  # images in the figure
WHITE = 255  # the largest of their bytes
EXACT, AVERAGED = "exact", "softmax-averaged"  # prior terms
XIE_ERMON, NCPSS, GUMBEL, SIMPLE, FIRST, SECOND = "Xie & Ermon", "NCPSS", "Gumbel-σ_k", "SIMPLE", "πST", "πST2"
TRAINED, BOUND, RECONSTRUCTION = "loss as trained, nats", "−ELBO, nats", "reconstruction, nats"
EPOCHS = "epochs"
PAPER = {
    "ten": {XIE_ERMON: "98.26", NCPSS: "82.88", SIMPLE: "81.73", FIRST: "82.78", SECOND: "86.83", GUMBEL: "82.06"},
    "single": {NCPSS: "66.25", SIMPLE: "out of memory", FIRST: "66.04", SECOND: "65.49", GUMBEL: "63.46"},
}

NOTE = (
    "The paper's numbers are those of its own prior term, even beside tables of the other one. The paper does not "
    "give minibatches, epochs or temperatures; these are our choices."
)
CUT = (
    "After 50 epochs, which are 84,000 steps at the paper's learning rate, the losses that are lowest at the end "
    "still fall by {} nats an epoch. The rows therefore compare methods with equal budgets rather than after "
    "convergence."
)
NO_BOUND = (
    "The paper's prior term refers to the softmax of the logits and not to a distribution over k-hot vectors. Models "
    "that were trained with it were therefore not trained for the −ELBO, which the paper does not mention."
)
TRIED = (
    "With a single code we come close to the paper, with ten codes we do not. We looked for the reason with one seed. "
    "In as many epochs, a learning rate of 1e-3 brings πST only to 96.57. If the prior term is averaged over the ten "
    "vectors instead of summed, and all else is the same, the losses are nearer to the paper's and almost in its "
    "order, with πST2 behind SIMPLE, Gumbel-σ_k, πST and NCPSS (see the table with the averaged term). So the paper "
    "may have averaged."
)
ONE_SEED = (
    "This table has one seed, which took more than two hours of one core. πST2 differs more from run to run than the "
    "other rows: an earlier run, with other draws, ended at 92.54 (πST at 89.84, Gumbel-σ_k at 85.92)."
)
TWO_SEEDS = (
    "This table has only two seeds, because each takes more than two hours of one core. A third would hardly decide "
    "the two open findings, whose differences are at most 1.5 standard errors."
)
FALLING = {  # as was seen
    ("ten", "softmax"): "0.2",
    ("ten", EXACT): "0.2",
    ("ten", AVERAGED): "0.2",
    ("single", "softmax"): "0.14",
    ("single", EXACT): "0.2 to 0.5",
}


class Settings(NamedTuple):
    """Of a data set.

    Attributes:
        hidden: Layers of the encoder.
        batch_size: Images in a minibatch.
        learning_rate: Adam's.
        epochs: At most.
        temperature: Of the Gumbel rows.
        levels: Of grey, besides white.
    """

    hidden: tuple[int, ...]
    batch_size: int
    learning_rate: float
    epochs: int
    temperature: float
    levels: int


DIGITS = Settings((128,), 128, 5e-3, 300, 0.5, 16)
THE_PAPERS = Settings((512, 256), 32, 1e-4, 50, 1.0, 1)


def settings_of(data: str) -> Settings:
    return DIGITS if data == "digits" else THE_PAPERS


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

    Laws take logits, k and the temperature of the relaxation. ``tested``, if not None, is the law that takes the
    guide's place in the tests, one that is scored by itself.
    """

    posterior: Callable[[Tensor, int, float], dist.TorchDistribution]
    prior: Callable[[Tensor, int, float], dist.TorchDistribution]
    read: Callable[[Tensor, int, float], Tensor] = lambda value, k, temperature: value
    marginals: Callable[[Tensor, int], Tensor] = sigmoid_topk
    tested: Callable[[Tensor, int, float], dist.TorchDistribution] | None = None


def uniform(zeros: Tensor, k: int, temperature: float) -> ConditionalPoisson:
    return ConditionalPoisson(logits=zeros, k=k)


def simple(logits: Tensor, k: int, temperature: float) -> StraightThrough:
    return StraightThrough(ConditionalPoisson(logits=logits, k=k))


def same_marginals(logits: Tensor, k: int) -> ConditionalPoisson:
    return ConditionalPoisson(probs=sigmoid_topk(logits, k), k=k)


def first_order(logits: Tensor, k: int, temperature: float) -> StraightThrough:
    return StraightThrough(Pivotal(logits=logits, k=k), log_prob=same_marginals(logits, k))


def second_order(logits: Tensor, k: int, temperature: float) -> ReinMax:
    return ReinMax(Pivotal(logits=logits, k=k), log_prob=same_marginals(logits, k))


def entropic(logits: Tensor, k: int, temperature: float) -> StraightThrough:
    return StraightThrough(same_marginals(logits, k))


class IteratedPoisson(Pivotal):
    """NCPSS's draws, whose inclusion probabilities are near those it is given."""

    def sample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        shape = self._extended_shape(sample_shape)
        return iterated_poisson(self.probs.detach().clamp(0, 1).expand(shape), self.k.unsqueeze(-1))


def ncpss(logits: Tensor, k: int, temperature: float) -> StraightThrough:
    probs = rescaled_sigmoid(logits, k)
    return StraightThrough(IteratedPoisson(probs=probs, k=k), log_prob=ConditionalPoisson(probs=probs, k=k))


def ncpss_entropic(logits: Tensor, k: int, temperature: float) -> StraightThrough:
    return StraightThrough(ConditionalPoisson(probs=rescaled_sigmoid(logits, k), k=k))


def gumbel(logits: Tensor, k: int, temperature: float) -> RelaxedKHotStraightThrough:
    return RelaxedKHotStraightThrough(temperature, logits=logits, k=k)


def perturbed(logits: Tensor, k: int, temperature: float) -> RelaxedKHot:
    """Logits plus Gumbel noise, up to a shift: the log-odds of a relaxed vector of temperature 1."""
    return RelaxedKHot(1.0, logits=logits, k=k)


def successive(value: Tensor, k: int, temperature: float) -> Tensor:
    """The top-k of a draw of `perturbed`, with the gradient of successive softmaxes of the perturbed logits."""
    relaxed = successive_softmax_topk(torch.logit(value), k, temperature)
    return straight_through_value(topk_mask(value.detach(), k), relaxed)


def simple_marginals(logits: Tensor, k: int) -> Tensor:
    return ConditionalPoisson(logits=logits, k=k).mean


METHODS = {
    SIMPLE: Method(simple, uniform, marginals=simple_marginals),
    FIRST: Method(first_order, uniform, tested=entropic),
    SECOND: Method(second_order, uniform, tested=entropic),
    GUMBEL: Method(gumbel, gumbel),
    NCPSS: Method(ncpss, uniform, marginals=rescaled_sigmoid, tested=ncpss_entropic),
    XIE_ERMON: Method(perturbed, perturbed, read=successive),
}


def softmax_term(method: Method, logits: Tensor, k: int) -> Tensor:
    """The k-hot paper's prior term: KL(softmax(logits), uniform on the entries)."""
    shares = dist.Categorical(logits=logits)
    return kl_divergence(shares, dist.Categorical(logits=torch.zeros_like(logits)))


def averaged_softmax_term(method: Method, logits: Tensor, k: int) -> Tensor:
    return softmax_term(method, logits, k) / logits.shape[-2]


def per_item_term(method: Method, logits: Tensor, k: int) -> Tensor:
    items = dist.Bernoulli(method.marginals(logits, k), validate_args=False)
    return kl_divergence(items, dist.Bernoulli(torch.tensor(k / logits.shape[-1]))).sum(-1)


PRIOR_TERMS = {"softmax": softmax_term, AVERAGED: averaged_softmax_term, "per-item": per_item_term}  # of a vector


def perceptron(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class VAE(nn.Module):
    """Encoder, decoder, and the Pyro model and guide made of them."""

    def __init__(self, pixels: int, latent: Latent, method: Method, prior: str, settings: Settings = DIGITS) -> None:
        super().__init__()
        self.latent, self.method, self.prior, self.settings = latent, method, prior, settings
        size = latent.vectors * latent.n
        self.encoder = perceptron((pixels, *settings.hidden, size))
        self.decoder = perceptron((size, *reversed(settings.hidden), pixels))

    def sample_code(self, law: Callable[[Tensor, int, float], dist.TorchDistribution], logits: Tensor) -> Tensor:
        code = law(logits, self.latent.k, self.settings.temperature).to_event(1)
        return pyro.sample("code", code if self.prior == EXACT else code.mask(False))

    def pixels(self, logits: Tensor) -> dist.TorchDistribution:
        if self.settings.levels == 1:  # grey values: the binary cross-entropy takes them all
            return dist.Bernoulli(logits=logits, validate_args=False).to_event(1)
        return dist.Binomial(self.settings.levels, logits=logits).to_event(1)

    def model(self, images: Tensor | None, size: int = 1) -> Tensor:
        """Darkness in [0, 1] of the pixels, of given images ``(size, pixels)`` of grey levels or of the prior."""
        pyro.module("vae", self)
        vectors, n, k = self.latent
        with pyro.plate("images", size if images is None else len(images)):
            value = self.sample_code(self.method.prior, torch.zeros(vectors, n))
            logits = self.decoder(self.method.read(value, k, self.settings.temperature).flatten(-2))
            pyro.sample("pixels", self.pixels(logits), obs=images)
        return torch.sigmoid(logits)

    def guide(self, images: Tensor) -> None:
        vectors, n, k = self.latent
        with pyro.plate("images", len(images)):
            logits = self.encoder(images / self.settings.levels).unflatten(-1, (vectors, n))
            self.sample_code(self.method.posterior, logits)
            if self.prior != EXACT:
                term = PRIOR_TERMS[self.prior](self.method, logits, k).sum(-1)
                pyro.factor("prior_term", term, has_rsample=True)


def grey_levels(data: Labelled, levels: int) -> Tensor:
    """Images as vectors of whole levels, or, where there is but one besides white, of the grey values themselves."""
    pixels = data.images.flatten(1)
    return pixels if levels == 1 else (pixels * levels).round()


@torch.no_grad()
def loss(vae: VAE, images: Tensor) -> float:
    """With the prior term of the autoencoder, per image."""
    losses = (TraceMeanField_ELBO().loss(vae.model, vae.guide, chunk) for chunk in images.split(CHUNK))
    return sum(losses) / len(images)


def train(run: Run, args: Namespace, vae: VAE, images: Tensor, validation: Tensor) -> Fitted:
    pyro.clear_param_store()
    optimizer = torch.optim.Adam(vae.parameters(), lr=vae.settings.learning_rate, fused=True)

    def train_epoch(epoch: int) -> None:
        for (batch,) in minibatches(vae.settings.batch_size, images):
            loss = TraceMeanField_ELBO().differentiable_loss(vae.model, vae.guide, batch) / len(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run.fit(vae, optimizer, train_epoch, lambda: loss(vae, validation), args.epochs, args.patience)


@torch.no_grad()
def reconstruct(vae: VAE, images: Tensor) -> tuple[Tensor, float]:
    """Darkness of the pixels, given one draw of the code, and -log p(image | code), mean over the images."""
    draw = poutine.trace(vae.guide).get_trace(images)
    trace = poutine.trace(poutine.replay(vae.model, trace=draw)).get_trace(images)
    return trace.nodes["_RETURN"]["value"], -trace.nodes["pixels"]["fn"].log_prob(images).mean().item()


def evaluate(vae: VAE, images: Tensor, draws: int) -> dict[str, float]:
    """Ends the training, and scores with the exact prior term, whatever the autoencoder was trained with."""
    trained = sum(loss(vae, images) for _ in range(draws)) / draws
    vae.method = vae.method._replace(posterior=vae.method.tested or vae.method.posterior)
    vae.prior = EXACT
    bound = sum(loss(vae, images) for _ in range(draws)) / draws
    sums = [len(chunk) * reconstruct(vae, chunk)[1] for chunk in images.split(CHUNK) for _ in range(draws)]
    return {TRAINED: trained, BOUND: bound, RECONSTRUCTION: sum(sums) / len(images) / draws}


def run_row(run: Run, args: Namespace) -> Result:
    """Scores, and pictures: test images decoded again, and images of the prior."""
    settings = settings_of(args.data)
    split = load_split(args.data, run.seed, args.data_dir, args.images)
    images, validation, test = (grey_levels(part, settings.levels) for part in split)
    vae = VAE(images.shape[-1], latent_of(args.latent, args.data), METHODS[run.row], args.prior, settings)
    fitted = train(run, args, vae, images, validation)
    scores = {**evaluate(vae, test, args.draws), EPOCHS: fitted.best + 1}
    with torch.no_grad():
        pictures = {"decoded": reconstruct(vae, test[:SHOWN])[0], "sampled": vae.model(None, SHOWN)}
    bytes_of = {name: (pixels * WHITE).round().int().tolist() for name, pixels in pictures.items()}
    return {"scores": scores, "seconds": sum(fitted.seconds), **bytes_of}


def draw_figure(results: dict[str, list[Result]], images: Tensor, title: str) -> Figure:
    """Left the reconstructions, right the samples; a row of pictures per method, of the first seed."""
    figure = Figure(figsize=(13, 1 + 0.75 * (1 + len(results))), layout="constrained")
    figure.suptitle(title)
    side = round(images.shape[-1] ** 0.5)
    pictures = {"test images": (images[:SHOWN], torch.zeros(0))}
    for row, of_seeds in results.items():
        pictures[row] = tuple(torch.tensor(of_seeds[0][name]) / WHITE for name in ("decoded", "sampled"))
    axes = figure.subplots(len(pictures), 2)
    for (name, strips), places in zip(pictures.items(), axes, strict=True):
        for place, strip in zip(places, strips, strict=True):
            place.set(xticks=[], yticks=[])
            if len(strip):
                pixels = strip.view(-1, side, side).movedim(0, 1).flatten(1).numpy()
                place.imshow(pixels, cmap="gray_r", vmin=0, vmax=1)
            else:
                place.axis("off")
        places[0].set_ylabel(name, rotation=0, ha="right", va="center")
    axes[0, 0].set_title("reconstructions, one draw of the code")
    axes[1, 1].set_title("samples of the prior")
    return figure


def add_findings(table: Table, prior: str) -> None:
    """The paper's are of the loss as trained, with its own prior term."""
    for column in (TRAINED, BOUND):
        paper = " (k-hot paper, table 4)" if column == TRAINED and prior in ("softmax", AVERAGED) else ""
        for row in (GUMBEL, FIRST, SECOND):
            for other in (XIE_ERMON, NCPSS):
                table.find(f"{row} beats {other}{paper}", row, other, column, lower=True)
        table.find("second order beats plain straight-through", SECOND, FIRST, column, lower=True)


def compare(latent: str, prior: str, args: Namespace) -> tuple[Table, Figure]:
    """One table: all methods, one kind of code and one prior term; and the pictures of the first seed."""
    args = Namespace(**{name: value for name, value in vars(args).items() if name not in ("latents", "priors")})
    args.latent, args.prior = latent, prior
    large = latent == "single" and args.data != "digits"
    rows = [row for row in METHODS if row != XIE_ERMON or not large]
    shape, settings = latent_of(latent, args.data), settings_of(args.data)
    title = f"{args.data}, {shape.vectors} × (n = {shape.n}, k = {shape.k}), {prior} prior term"
    columns = {TRAINED: ".2f", BOUND: ".2f", RECONSTRUCTION: ".2f", EPOCHS: ".0f"}
    table = Table(f"Test images of {title}", columns, FIRST, compared=(TRAINED, BOUND, RECONSTRUCTION))
    if args.data == "mnist":
        table.paper, table.notes = {"paper: loss, softmax term": PAPER[latent]}, [NOTE]
        if (latent, prior) in FALLING and args.epochs == THE_PAPERS.epochs:
            table.notes.append(CUT.format(FALLING[latent, prior]))
        if (latent, prior, args.seeds) == ("single", EXACT, 2):
            table.notes.append(TWO_SEEDS)
        if (latent, prior, args.seeds) == ("ten", AVERAGED, 1):
            table.notes.append(ONE_SEED)
        if (latent, prior) == ("ten", "softmax") and not args.smoke:
            table.notes.append(TRIED)
    if prior in ("softmax", AVERAGED):
        table.notes = [*table.notes, NO_BOUND]
    results = run_grid(args, f"vae_{latent}_{prior.replace('-', '_')}", rows, run_row)
    table.add_all(results)
    add_findings(table, prior)
    test = load_split(args.data, args.seed, args.data_dir, args.images).test
    return table, draw_figure(results, grey_levels(test, settings.levels) / settings.levels, title)


def main(arguments: list[str] | None = None) -> dict[str, Table]:
    parser = experiment_parser(__doc__, data=("digits", "mnist", "fashion-mnist"))
    add_run_arguments(parser)
    parser.add_argument(
        "--latents",
        nargs="+",
        choices=("ten", "single"),
        help="kinds of codes (default: ten; on other data than digits both)",
    )
    parser.add_argument("--priors", nargs="+", choices=(EXACT, *PRIOR_TERMS), default=[EXACT, "softmax"])
    parser.add_argument("--epochs", type=int, help="at most (default: 300 on digits, else 50)")
    parser.add_argument("--patience", type=int, default=20, help="epochs without a new minimum (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="of the code of a test image (default: %(default)s)")
    smoke = {"seeds": 2, "epochs": 1, "draws": 1, "priors": [EXACT], "latents": ["ten"]}
    args = parse(parser, arguments, smoke)

    args.epochs = args.epochs or settings_of(args.data).epochs
    args.latents = args.latents or (["ten"] if args.data == "digits" else ["ten", "single"])

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
