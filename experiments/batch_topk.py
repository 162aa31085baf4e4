"""Does a sparse autoencoder with BatchTopK keep k units active on new images? Compares it with torch.topk.

    python experiments/batch_topk.py

The encoder and the decoder are linear, with 64 units, of which an image uses 8 on average. In training the 8 B largest
activations of a batch of B images are kept. Afterwards the activations above a threshold are kept, so that images do
not depend on each other. The rows differ in the threshold:

    torch.topk and scatter   the k B-th largest activation of all B training images, once training has ended
    BatchTopK                the running threshold that the module has at that moment
    BatchTopK, calibrated    the same after 500 more batches, of validation images and without training

Initial weights, batches and optimiser are the same in all rows, and therefore the losses must be. A running threshold
can be wrong for two reasons: it lags behind while activations still change, and images that the encoder was not fitted
to may exceed it more often. The learning rate falls to 0 to avoid the first. To study the second, there are two data
sets: the images as they are, and "moved" images, which are shifted by up to a pixel at random, in training and in
tests. They are much harder to memorise.

"Active units" are means over all steps of training, and over the test images. "Off k" is the distance of the latter
from 8.

Bussmann, Leask, Nanda (2024), "BatchTopK sparse autoencoders", arXiv:2412.06410.
"""

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import pad

from common import Table, each_seed, experiment_parser, parse, save_figure
from image_data import load_split
from khot.nn import BatchTopK

UNITS, K, BATCH_SIZE, LEARNING_RATE = 64, 8, 128, 3e-3
CALIBRATION = 500  # batches
FIXED, MOVED = "fixed", "moved"
BY_HAND, MODULE, CALIBRATED = "torch.topk and scatter", "BatchTopK", "BatchTopK, calibrated"
LOSS, ACTIVE, HELD_OUT, OFF, ERROR = (
    "training loss",
    "active units, training",
    "active units, test",
    "off k, %",
    "error",
)


def moves(images: Tensor, kind: str) -> Tensor:
    """Images ``(count, 1, height, width)`` as rows, moved to each of nine places, ``(places, count, pixels)``."""
    if kind == FIXED:
        return images.flatten(1)[None]
    height, width = images.shape[-2:]
    wide = pad(images, (1, 1, 1, 1))
    places = [wide[..., top : top + height, left : left + width] for top in range(3) for left in range(3)]
    return torch.stack(places).flatten(2)


def load_parts(seed: int, kind: str, args: Namespace) -> list[Tensor]:
    """Rows for training, validation and tests, centred by the first."""
    images = torch.cat([part.images for part in load_split(args.data, 0, args.data_dir)])
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))]
    sixth = len(images) // 6
    parts = [moves(part, kind).flatten(0, 1) for part in images.split([len(images) - 2 * sixth, sixth, sixth])]
    return [part - parts[0].mean(0) for part in parts]


def kept_by_hand(activations: Tensor) -> Tensor:
    values, places = activations.flatten().topk(K * len(activations))
    return torch.zeros_like(activations).flatten().scatter(0, places, values).view_as(activations)


class Autoencoder(nn.Module):
    """An autoencoder that is linear except for the rectifier and ``activation``."""

    def __init__(self, pixels: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(pixels, UNITS), nn.Linear(UNITS, pixels)
        self.activation = activation

    def activations(self, images: Tensor) -> Tensor:
        return self.encoder(images).relu()

    @torch.no_grad()
    def exact_threshold(self, images: Tensor) -> Tensor:
        """What K activations of these images exceed, on average."""
        return self.activations(images).flatten().topk(K * len(images)).values.amin()


class Fit(NamedTuple):
    """The model, mean loss of the last tenth of the steps, active units of all, and running and exact thresholds."""

    model: Autoencoder
    loss: float
    active: float
    curve: list[tuple[int, float, float]]


def draw_batch(images: Tensor) -> Tensor:
    return images[torch.randint(len(images), (BATCH_SIZE,))]


def squared_error(reconstruction: Tensor, images: Tensor) -> Tensor:
    """Summed over the pixels, mean over the images."""
    return (reconstruction - images).square().sum(-1).mean()


def fit(activation: Callable[[Tensor], Tensor], images: Tensor, steps: int, tick: Callable[[], object]) -> Fit:
    model = Autoencoder(images.shape[-1], activation)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    losses, active, curve = [], [], []
    for step in range(steps):
        batch = draw_batch(images)
        code = activation(model.activations(batch))
        loss = squared_error(model.decoder(code), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        active.append((code != 0).sum(-1).float().mean().item())
        if isinstance(activation, BatchTopK) and step % max(1, steps // 50) == 0:
            curve.append((step, activation.threshold.item(), model.exact_threshold(images).item()))
        tick()
    last = losses[-max(1, steps // 10) :]
    return Fit(model, sum(last) / len(last), sum(active) / steps, curve)


@torch.no_grad()
def calibrate(activation: BatchTopK, model: Autoencoder, images: Tensor) -> BatchTopK:
    """The module with a threshold for these images: the threshold moves in training mode, without any learning."""
    activation = copy.deepcopy(activation).train()
    for _ in range(CALIBRATION):
        activation(model.activations(draw_batch(images)))
    return activation


@torch.no_grad()
def evaluate(fitted: Fit, threshold: Tensor, images: Tensor) -> dict[str, float]:
    activations = fitted.model.activations(images)
    code = torch.where(activations > threshold, activations, 0.0)
    size = (code != 0).sum(-1).float().mean().item()
    error = squared_error(fitted.model.decoder(code), images).item()
    return {
        LOSS: fitted.loss, ACTIVE: fitted.active, HELD_OUT: size, OFF: 100 * abs(size / K - 1), ERROR: error,
    }  # fmt: skip


def run_seed(seed: int, kind: str, args: Namespace, table: Table, tick: Callable[[], object]) -> Fit:
    """Adds a row for each way; returns the fit of the module."""
    train, validation, test = load_parts(seed, kind, args)
    torch.manual_seed(seed)
    by_hand = fit(kept_by_hand, train, args.steps, tick)
    table.add(BY_HAND, evaluate(by_hand, by_hand.model.exact_threshold(train), test))
    torch.manual_seed(seed)
    topk = BatchTopK(K)
    fitted = fit(topk, train, args.steps, tick)
    table.add(MODULE, evaluate(fitted, topk.threshold, test))
    table.add(CALIBRATED, evaluate(fitted, calibrate(topk, fitted.model, validation).threshold, test))
    return fitted


def draw_figure(fits: dict[str, Fit], tables: dict[str, Table]) -> Figure:
    """Running and exact threshold by step, of the first seed; and active units of test images, of all seeds."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    *panels, right = figure.subplots(1, 3)
    for axes, (kind, fitted) in zip(panels, fits.items(), strict=True):
        steps, running, exact = zip(*fitted.curve, strict=True)
        axes.plot(steps, exact, color="black", label="exact, all training images")
        axes.plot(steps, running, "--", color="tab:red", label="running")
        axes.set(title=f"threshold, {kind} images", xlabel="step", ylim=(0, None))
        axes.legend()
    for kind, marker in ((FIXED, "o"), (MOVED, "s")):
        sizes = [tables[kind].values(row, HELD_OUT) for row in (BY_HAND, MODULE, CALIBRATED)]
        places = [place + 0.15 * (kind == MOVED) for place, column in enumerate(sizes) for _ in column]
        right.plot(places, [size for column in sizes for size in column], marker, alpha=0.6, label=f"{kind} images")
    right.axhline(K, color="0.5", linestyle=":")
    right.axhspan(0.97 * K, 1.03 * K, color="0.9", zorder=0)
    right.set_xticks(range(3), ["torch.topk", "BatchTopK", "calibrated"])
    right.set(title="active units of test images")
    right.legend()
    return figure


def main(arguments: list[str] | None = None) -> dict[str, Table]:
    parser = experiment_parser(__doc__, data=("digits", "mnist", "fashion-mnist"))
    parser.add_argument("--steps", type=int, default=1500, help="of the optimiser (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "steps": 5})

    formats = {LOSS: ".4f", ACTIVE: ".3f", HELD_OUT: ".3f", OFF: ".1f", ERROR: ".4f"}
    tables = {
        kind: Table(f"{K} of {UNITS} units, {args.data}, {kind}", formats, reference=BY_HAND) for kind in (FIXED, MOVED)
    }
    first: dict[str, Fit] = {}
    for seed, progress in each_seed(args, steps=2 * len(tables) * args.steps):
        for kind, table in tables.items():
            fitted = run_seed(seed, kind, args, table, progress.update)
            first.setdefault(kind, fitted)
    for kind, table in tables.items():
        table.find(
            "calibration on validation images brings active units nearer to k", CALIBRATED, MODULE, OFF, lower=True
        )
        table.save(args, f"batch_topk_{kind}")
    save_figure(draw_figure(first, tables), args, "batch_topk")
    return tables


if __name__ == "__main__":
    main()
