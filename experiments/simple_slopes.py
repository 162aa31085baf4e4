"""SIMPLE as published against straight-through on the exact law: is a lower loss due to its draws, or to its slopes?

    python experiments/simple_slopes.py                                        scikit-learn's digits
    python experiments/simple_slopes.py --data mnist --data-dir DIR            MNIST, where you have its files

The code that goes with SIMPLE (Ahmed et al., 2023; version 2) takes scores s as log-probabilities. It draws by Gumbel
top-k of the scores, a law with other inclusion probabilities than the conditional Poisson law, and differentiates the
marginals of the conditional Poisson law with log-odds s - log(1 - exp(-|s|)), the second term of them held constant. In
an autoencoder with one code of n = 100 and k = 10 it has been seen ahead of StraightThrough(ConditionalPoisson) after
250 steps, with one seed and one learning rate. The rows change one thing at a time:

    exact                    StraightThrough on ConditionalPoisson with log-odds s
    exact, steeper           the same with log-odds 2 s, an effective temperature of 1/2
    Gumbel draws             draws by Gumbel top-k of s, slopes of "exact"
    published slopes         draws of "exact", slopes of the published code
    published                draws and slopes of the published code

Autoencoder, optimiser and prior term (KL of the softmax of the scores) are those of vae.py on MNIST.

Protocol: networks, initial weights, minibatches and steps are the same for every row. Each trains with two learning
rates, and of each seed the one with the lower loss on the validation images is tested: scores are those of the test
images, the same for all seeds. The learning rates were fixed beforehand.
"""

from argparse import Namespace

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.types import _size as SizeLike

from common import Table, experiment_parser, parse, save_figure
from image_data import load_split
from khot import ConditionalPoisson, StraightThrough, topk_mask
from runs import Result, Run, add_run_arguments, run_grid
from vae import THE_PAPERS, VAE, Latent, Method, grey_levels, loss, train, uniform

LATENT = Latent(1, 100, 10)
BATCH_SIZE = 128
RATES = (1e-3, 3e-4)
EARLY, LOSS, RATE = "validation, first epoch", "test loss, nats", "learning rate"
EXACT, STEEPER, DRAWS, SLOPES, PUBLISHED = "exact", "exact, steeper", "Gumbel draws", "published slopes", "published"


class GumbelDraws(StraightThrough):
    """Draws by Gumbel top-k of ``scores``, with the gradient of the inclusion probabilities of ``design``."""

    def __init__(self, scores: Tensor, design: ConditionalPoisson) -> None:
        super().__init__(design)
        self.scores = scores.detach()

    def rsample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        scores = self.scores.expand(*sample_shape, *self.scores.shape)
        gumbel = -torch.empty_like(scores).exponential_().log()
        return self.attach_gradient(topk_mask(scores + gumbel, LATENT.k))


class ExactDraws(StraightThrough):
    """Draws of the law with log-odds ``scores``, with the gradient of the inclusion probabilities of ``design``."""

    def __init__(self, scores: Tensor, design: ConditionalPoisson) -> None:
        super().__init__(design)
        self.drawn_from = ConditionalPoisson(logits=scores.detach(), k=LATENT.k)

    def rsample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        return self.attach_gradient(self.drawn_from.sample(sample_shape))


def published_design(scores: Tensor, k: int) -> ConditionalPoisson:
    """The law whose inclusion probabilities the published code differentiates."""
    away = scores.detach().abs().clamp(min=1e-6)
    return ConditionalPoisson(logits=scores - torch.log(-torch.expm1(-away)), k=k)


def exact_design(scores: Tensor, k: int) -> ConditionalPoisson:
    return ConditionalPoisson(logits=scores, k=k)


METHODS = {
    EXACT: Method(lambda scores, k, temperature: StraightThrough(exact_design(scores, k)), uniform),
    STEEPER: Method(lambda scores, k, temperature: StraightThrough(exact_design(2 * scores, k)), uniform),
    DRAWS: Method(lambda scores, k, temperature: GumbelDraws(scores, exact_design(scores, k)), uniform),
    SLOPES: Method(lambda scores, k, temperature: ExactDraws(scores, published_design(scores, k)), uniform),
    PUBLISHED: Method(lambda scores, k, temperature: GumbelDraws(scores, published_design(scores, k)), uniform),
}
TRAININGS = {f"{row}, {rate:g}": (row, rate) for row in METHODS for rate in RATES}


def run_row(run: Run, args: Namespace) -> Result:
    """Losses on the validation images after each epoch, and on the test images at the end."""
    row, rate = TRAININGS[run.row]
    split = load_split(args.data, run.seed, args.data_dir, args.images)
    images, validation, test = (grey_levels(part, 1) for part in split)
    settings = THE_PAPERS._replace(batch_size=BATCH_SIZE, learning_rate=rate)
    vae = VAE(images.shape[-1], LATENT, METHODS[row], "softmax", settings)
    fitted = train(run, args, vae, images, validation)
    tested = sum(loss(vae, test) for _ in range(args.draws)) / args.draws
    return {"losses": fitted.losses, "test": tested, "seconds": sum(fitted.seconds)}


def better_rates(results: dict[str, list[Result]], row: str) -> list[tuple[float, Result]]:
    """For each seed the learning rate with the lower last validation loss, and its result."""
    pairs = [[(rate, result) for result in results.get(f"{row}, {rate:g}", [])] for rate in RATES]
    return [min(of_seed, key=lambda pair: pair[1]["losses"][-1]) for of_seed in zip(*pairs, strict=True)]


def draw_figure(results: dict[str, list[Result]], title: str) -> Figure:
    """Validation loss by epoch, at the better learning rate, by seed."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(METHODS):
        for seed, (_, result) in enumerate(better_rates(results, row)):
            epochs = range(1, len(result["losses"]) + 1)
            axes.plot(epochs, result["losses"], color=f"C{number}", label=None if seed else row, alpha=0.7)
    axes.set(title=title, xlabel="epoch", ylabel="validation loss, nats")
    axes.legend()
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__, data=("digits", "mnist", "fashion-mnist"))
    add_run_arguments(parser)
    parser.add_argument("--epochs", type=int, default=20, help="of training (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="of the code of a test image (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "epochs": 1, "draws": 1})
    args.patience = None

    title = f"One code of n = {LATENT.n}, k = {LATENT.k}, {args.data}, softmax prior term"
    columns = {LOSS: ".2f", EARLY: ".2f", RATE: ".1e"}
    table = Table(f"{title}; minibatches of {BATCH_SIZE}", columns, EXACT, compared=(LOSS, EARLY))
    results = run_grid(args, "simple_slopes", list(TRAININGS), run_row)
    for row in METHODS:
        for rate, result in better_rates(results, row):
            table.add(row, {LOSS: result["test"], EARLY: result["losses"][0], RATE: rate})
    table.add_time(results)
    for column in (LOSS, EARLY):
        for row in (PUBLISHED, DRAWS, SLOPES, STEEPER):
            table.find(
                f"“{row}” has a lower loss than straight-through on the exact law", row, EXACT, column, lower=True
            )
    table.save(args, "simple_slopes")
    save_figure(draw_figure(results, title), args, "simple_slopes")
    return table


if __name__ == "__main__":
    main()
