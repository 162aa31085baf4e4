"""Draws scores, mask, draws and gradient, and every relaxed map: against softness, along a line, as plan, as order.

    python docs/gallery.py            writes docs/gallery/*.png

After figures 3 and 4 of "Differentiable top-k: from one-hot to k-hot", 1 and 3 of Sander et al. (2023), 3 and 7 of Xie
et al. (2020), and 2 to 4 of LapSum.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # write files, open no window
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

import khot

SCORES = torch.tensor([2.0, 1.4, 1.1, 0.2, -0.5, -1.3], dtype=torch.float64)
SIZE = 2
MASKS: dict[str, Callable[..., Tensor]] = {
    "sigmoid_topk": khot.sigmoid_topk,
    "lapsum_topk": khot.lapsum_topk,
    "normal_topk": khot.normal_topk,
    "capped_softmax": khot.capped_softmax,
    "sparse_topk, p = 2": khot.sparse_topk,
    "sparse_topk, p = 4/3": partial(khot.sparse_topk, p=4 / 3),
    "transport_topk": khot.transport_topk,
    "successive_softmax_topk": khot.successive_softmax_topk,
}
VALUES: dict[str, Callable[..., Tensor]] = {
    "sparse_topk_magnitude, p = 2": khot.sparse_topk_magnitude,
    "sparse_topk_magnitude, p = 4/3": partial(khot.sparse_topk_magnitude, p=4 / 3),
    "sparse_topk_signed, p = 2": khot.sparse_topk_signed,
}
COLORS = plt.get_cmap("viridis")(torch.linspace(0, 0.9, len(SCORES)).numpy())


def panels(count: int, columns: int, width: float = 3.2, height: float = 2.6):
    rows = -(-count // columns)
    size = (width * columns, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for spare in axes.flat[count:]:
        spare.set_axis_off()
    return figure, list(axes.flat[:count])


def overview() -> plt.Figure:
    """From scores to a mask, to k-hot draws, and back to the scores by a gradient: the picture of the README."""
    torch.manual_seed(0)
    n, k = 12, 4
    scores = torch.tensor([-0.2, 1.6, 0.3, -1.4, 0.9, -0.7, 2.3, 0.1, -2.0, 1.2, -0.4, 0.5], dtype=torch.float64)
    weights = scores.flip(0)
    leaf = scores.clone().requires_grad_()

    def design() -> khot.ConditionalPoisson:
        return khot.ConditionalPoisson(probs=khot.sigmoid_topk(leaf, k, 0.5))

    def loss(x: Tensor) -> Tensor:
        return (x @ weights - 1).square()

    figure, grid = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
    axes = grid.flat
    items = torch.arange(1, n + 1).numpy()
    axes[0].bar(items, scores.numpy(), color="0.4")
    axes[0].set(title="1. scores of twelve items")
    _draw_masks(axes[1], items, scores, k)
    axes[2].imshow(
        design().sample((16,)).numpy(), cmap="Reds", vmin=0, vmax=1.4, aspect="auto", extent=(0.5, n + 0.5, 16, 0)
    )
    axes[2].set(title="3. sixteen draws, four ones each", yticks=[], ylabel="one draw per line")
    _draw_gradients(axes[3], items, leaf, design, loss)
    for axis in axes:
        axis.set(xlim=(0.4, n + 0.6), xticks=[1, 4, 8, 12], xlabel="item")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Choose 4 of 12 items x so that the expected loss E[(w·x − 1)²] is small", fontsize="x-large")
    return figure


def _draw_masks(axis: plt.Axes, items: np.ndarray, scores: Tensor, k: int) -> None:
    for softness, color, size in ((0.05, "#9ecae1", 5), (0.5, "#2171b5", 9), (2.0, "#08306b", 5)):
        mask = khot.sigmoid_topk(scores, k, softness)
        axis.plot(items, mask.numpy(), "o", color=color, markersize=size, label=f"temperature {softness:g}")
    axis.set(title=f"2. masks: in [0, 1], sum {k}", ylim=(-0.05, 1.5))
    axis.legend(fontsize="small", frameon=False, loc="upper right")


def _draw_gradients(
    axis: plt.Axes,
    items: np.ndarray,
    leaf: Tensor,
    design: Callable[[], khot.ConditionalPoisson],
    loss: Callable[[Tensor], Tensor],
) -> None:
    def gradient(estimator: Callable[..., Tensor], **settings: int) -> Tensor:
        return torch.autograd.grad(estimator(design(), loss, **settings), leaf)[0]

    axis.bar(items, gradient(khot.enumerated).numpy(), color="0.8", label="exact")
    for estimator, color, shift in ((khot.straight_through, "tab:blue", -0.15), (khot.score_function, "tab:red", 0.15)):
        estimates = torch.stack([gradient(estimator, num_samples=64) for _ in range(200)]).numpy()
        label = f"{estimator.__name__}, 64 draws"
        axis.errorbar(items + shift, estimates.mean(0), estimates.std(0), fmt=".", color=color, label=label)
    axis.axhline(0, color="0.4", linewidth=0.5)
    axis.set(title="4. gradient in the scores", ylim=(-1, 1.6))
    axis.legend(fontsize="small", frameon=False, loc="upper left")


def against_softness() -> plt.Figure:
    """Each entry of a map as the softness grows: from the hard top-k to k/n."""
    softness = torch.logspace(-2, 2, 200, dtype=torch.float64)
    maps = MASKS | VALUES
    figure, axes = panels(len(maps), 4)
    for axis, (name, function) in zip(axes, maps.items(), strict=True):
        values = torch.stack([function(SCORES, SIZE, s.item()) for s in softness])
        for line, color, score in zip(values.T, COLORS, SCORES, strict=True):
            axis.plot(softness, line, color=color, label=f"x = {score:g}")
        axis.set(title=name, xscale="log", xlabel="softness")
        if name in MASKS:
            axis.axhline(SIZE / len(SCORES), color="0.7", linewidth=0.8, linestyle=":")
    axes[0].legend(fontsize="x-small")
    figure.suptitle(f"k = {SIZE} of n = {len(SCORES)}")
    return figure


def along_a_line() -> plt.Figure:
    """The first entry of the map at x = (s, 1, 0, -1), and its derivative in s, for three degrees of softness."""
    line = torch.linspace(-3, 3, 601, dtype=torch.float64)
    maps = MASKS | VALUES
    figure, axes = panels(len(maps), 4)
    rest = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    for axis, (name, function) in zip(axes, maps.items(), strict=True):
        for softness, color in ((0.1, "C0"), (0.5, "C1"), (2.0, "C2")):

            def first(s: Tensor, function=function, softness=softness) -> Tensor:
                return function(torch.cat([s.unsqueeze(-1), rest.expand(*s.shape, 3)], -1), SIZE, softness)[..., 0]

            s = line.clone().requires_grad_()
            value = first(s)
            (slope,) = torch.autograd.grad(value.sum(), s)
            axis.plot(line, value.detach(), color=color, label=f"softness {softness:g}")
            axis.plot(line, slope.clamp(-3, 3), color=color, linestyle="--", linewidth=0.8)
        axis.set(title=name, xlabel="s")
    axes[0].legend(fontsize="x-small")
    figure.suptitle(f"first entry at x = (s, 1, 0, -1), k = {SIZE} (dashed: derivative, cut at 3)")
    return figure


def transport() -> plt.Figure:
    """Sorted SOFT plans as epsilon falls, and the arrows along which a loss on the mask moves the scores."""
    scores = torch.linspace(-1, 1, 12, dtype=torch.float64) ** 3
    scores = scores[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    figure, axes = panels(8, 4)
    for axis, epsilon in zip(axes[:4], (10.0, 1.0, 0.1, 0.01), strict=True):
        plan = khot.sorted_transport_topk(scores, 4, epsilon)
        axis.imshow(plan.T.numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axis.set(title=f"sorted_transport_topk, ε = {epsilon:g}", xlabel="item", ylabel="rank")
    target = torch.zeros_like(scores)
    target[scores.argsort()[:4]] = 1  # the four smallest are to become the largest
    for axis, epsilon in zip(axes[4:], (10.0, 1.0, 0.1, 0.01), strict=True):
        leaf = scores.clone().requires_grad_()
        mask = khot.transport_topk(leaf, 4, epsilon)
        (gradient,) = torch.autograd.grad((mask - target).square().sum(), leaf)
        arrows = -gradient / gradient.abs().max().clamp(min=1e-300)
        axis.scatter(scores, mask.detach(), c=["C3" if t else "C0" for t in target], zorder=2)
        still = torch.zeros_like(arrows)
        axis.quiver(scores, mask.detach(), arrows, still, angles="xy", scale_units="xy", scale=2, width=0.006)
        axis.set(title=f"transport_topk, ε = {epsilon:g}", xlabel="score, and where −gradient moves it", ylabel="mask")
        axis.set_xlim(-1.6, 1.6)
    figure.suptitle("red: items that should be among the four largest")
    return figure


def order() -> plt.Figure:
    """Soft ranks and sorted values along a line, and soft permutations as the scale grows."""
    line = torch.linspace(-3, 3, 301, dtype=torch.float64)
    rest = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).expand(301, 3)
    x = torch.cat([line.unsqueeze(-1), rest], -1)
    figure, axes = panels(9, 3)
    for column, scale in enumerate((0.05, 0.3, 1.0)):
        for row, (name, function) in enumerate((("soft_rank", khot.soft_rank), ("soft_sort", khot.soft_sort))):
            axis = axes[3 * row + column]
            axis.plot(line, function(x, scale))
            axis.set(title=f"{name}, scale {scale:g}", xlabel="s, x = (s, 1, 0, -1)")
        axis = axes[6 + column]
        scores = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        axis.imshow(khot.soft_permutation(scores, scale).numpy(), cmap="viridis", vmin=0, vmax=1)
        axis.set(title=f"soft_permutation, scale {scale:g}", xlabel="position", ylabel="item")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "gallery", help="folder for the figures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for draw in (overview, against_softness, along_a_line, transport, order):
        figure = draw()
        figure.savefig(out / f"{draw.__name__}.png", dpi=100)
        plt.close(figure)
        print(out / f"{draw.__name__}.png")


if __name__ == "__main__":
    main()
