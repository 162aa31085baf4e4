"""A small picture for the entry of each map, design and module, drawn from what it computes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # write files, open no window
import matplotlib.pyplot as plt
import torch
from torch import Tensor

import khot
from khot import nn

SCORES = torch.tensor([2.0, 1.4, 1.1, 0.2, -0.5, -1.3], dtype=torch.float64)
SOFTNESSES = ((0.1, "C0"), (0.5, "C1"), (2.0, "C2"))
RELAXED = (
    *("sigmoid_topk", "lapsum_topk", "normal_topk", "capped_softmax", "sparse_topk", "transport_topk"),
    *("successive_softmax_topk", "sparse_topk_magnitude", "sparse_topk_signed", "log_sigmoid_topk", "log_lapsum_topk"),
)
ALONG: dict[str, Callable[[Tensor, float], Tensor]] = {  # functions of scores and a softness
    **{name: lambda x, s, name=name: getattr(khot, name)(x, 2, s) for name in (*RELAXED, "straight_through_topk")},
    "capped_simplex_map": lambda x, s: khot.capped_simplex_map(x, 2, s, link=khot.Logistic()),
    "topk_threshold": lambda x, s: khot.topk_threshold(x, 2, s).unsqueeze(-1),
    "soft_count": lambda x, s: khot.soft_count(x, 0.5, s).reshape(*x.shape[:-1], -1),
    "soft_quantile": lambda x, s: khot.soft_quantile(x, 0.5, s).reshape(*x.shape[:-1], -1),
    **{name: getattr(khot, name) for name in ("soft_rank", "soft_sort", "permutahedron_rank", "permutahedron_sort")},
    "permutahedron_projection": lambda x, s: khot.permutahedron_projection(
        x, torch.tensor([2.0, 1.0, 0.0, 0.0], dtype=x.dtype), s
    ),
}
HARD: dict[str, Callable[[Tensor], Tensor]] = {  # functions of scores alone: from a row of tokens to a row of values
    "topk_mask": lambda x: khot.topk_mask(x, 3),
    "topk_indices": lambda x: torch.zeros_like(x).scatter(-1, khot.topk_indices(x, 3), 1.0),
    "straight_through_value": lambda x: khot.straight_through_value(khot.topk_mask(x, 3), khot.sigmoid_topk(x, 3)),
    "isotonic_l2": lambda x: khot.isotonic_l2(x),
    "isotonic_lp": lambda x: khot.isotonic_lp(x, khot.topk_mask(torch.arange(12.0).flip(0), 3).expand_as(x), 1.5, 1.0),
    "soft_permutation": lambda x: khot.soft_permutation(x[0], 0.3),
    "sorted_transport_topk": lambda x: khot.sorted_transport_topk(x[0], 4, 0.1),
    "TopK": nn.TopK(3),
    "TopKMask": nn.TopKMask(3),
    "BatchTopK": nn.BatchTopK(3),
    "JumpReLU": nn.JumpReLU(0.5),
    "GatherTopK": lambda x: nn.GatherTopK(3)(x[:, 0], x).values,
    "KHotGate": lambda x: nn.KHotGate(12, 4)(x),
    "ExpertChoice": nn.ExpertChoice(3),
    "TokenChoice": nn.TokenChoice(3),
    "route": lambda x: torch.zeros_like(x).scatter(-1, (found := nn.route(x, 3)).indices, found.values),
    "MagnitudeSparsity": nn.MagnitudeSparsity(0.25),
    "NMSparsity": nn.NMSparsity(2, 4),
    "topk_attention": lambda x: nn.topk_attention(x, x, torch.eye(8), 3),
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {  # of scores, per row
    "FenchelYoungTopKLoss": lambda x: khot.fenchel_young_topk_loss(x, _first_two(x), 2, reduction="none"),
    "TopKCrossEntropyLoss": lambda x: khot.topk_cross_entropy(
        x, torch.zeros(len(x), dtype=torch.long), p_k=[0.5, 0.5], reduction="none"
    ),
    "TopKMetricLoss": lambda x: khot.topk_metric_loss(x, _first_two(x), 2, reduction="none"),
}
DESIGNS = (
    *("ConditionalPoisson", "Sampford", "Pivotal", "Systematic", "Brewer", "ParetoSampling", "GumbelTopK"),
    *("PlackettLuce", "PhantomUnit", "RelaxedKHot", "RelaxedKHotStraightThrough"),
)


def draw(folder: Path) -> None:
    """Writes the pictures that the folder of the build lacks, or that are older than this file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        path = folder / f"{name}.png"
        if not path.exists() or path.stat().st_mtime < Path(__file__).stat().st_mtime:
            torch.manual_seed(0)
            figure().savefig(path, dpi=100)
            plt.close("all")


def _first_two(x: Tensor) -> Tensor:
    return torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=x.dtype).expand_as(x)


def _panels() -> tuple[plt.Figure, list[plt.Axes]]:
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.4), layout="constrained")
    return figure, list(axes)


def _line(axis: plt.Axes, function: Callable[[Tensor], Tensor], label: str, color: str) -> None:
    """The first entry of a function of the scores (s, 1, 0, -1), and its derivative in s as a dashed line."""
    s = torch.linspace(-3, 3, 301, dtype=torch.float64, requires_grad=True)
    rest = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).expand(301, 3)
    value = function(torch.cat([s.unsqueeze(-1), rest], -1))
    first = value[..., 0] if value.dim() > 1 else value
    (slope,) = torch.autograd.grad(first.sum(), s)
    axis.plot(s.detach(), first.detach(), color=color, label=label)
    axis.plot(s.detach(), slope.clamp(-3, 3), "--", color=color, linewidth=0.8)


def along(name: str) -> plt.Figure:
    """All entries against the softness, and the first entry along a line."""
    function = ALONG[name]
    figure, (left, right) = _panels()
    values = torch.stack([function(SCORES if name != "permutahedron_projection" else SCORES[:4], s) for s in _range()])
    for line, score in zip(values.T, SCORES, strict=False):
        left.plot(_range(), line, label=f"{score:g}")
    left.set(xscale="log", xlabel="softness", title="of scores 2, 1.4, 1.1, …")
    for softness, color in SOFTNESSES:
        _line(right, lambda x, softness=softness: function(x, softness), f"softness {softness:g}", color)
    right.set(xlabel="s", title="first of (s, 1, 0, -1); slope dashed")
    right.legend(fontsize="x-small")
    if name.startswith("log"):
        for axis in (left, right):
            axis.set_ylim(-6, 3)
    return figure


def _range() -> list[float]:
    return torch.logspace(-2, 2, 100, dtype=torch.float64).tolist()


def hard(name: str) -> plt.Figure:
    """A batch of rows as input, and what becomes of it."""
    x = torch.randn(8, 12)
    figure, (left, right) = _panels()
    result = HARD[name](x).detach()
    wide = max(x.abs().max().item(), 1e-9)
    shown = x[:1] if name in ("soft_permutation", "sorted_transport_topk") else x
    left.imshow(shown, cmap="RdBu_r", vmin=-wide, vmax=wide)
    wide = max(result.abs().max().item(), 1e-9)
    right.imshow(result, cmap="RdBu_r", vmin=-wide, vmax=wide)
    left.set(title="input", xticks=[], yticks=[])
    right.set(title=name, xticks=[], yticks=[])
    return figure


def loss(name: str) -> plt.Figure:
    """The loss, and its derivative, as the score of a relevant item grows."""
    figure, axis = plt.subplots(figsize=(4, 2.4), layout="constrained")
    _line(axis, LOSSES[name], "loss", "C0")
    axis.set(xlabel="score of an item that should be chosen", title="loss; slope dashed")
    return figure


def design(name: str) -> plt.Figure:
    """Inclusion probabilities or mean, and sixteen draws."""
    cls = getattr(khot, name)
    logits, k = torch.linspace(2, -2, 12), 4
    made = {
        "PhantomUnit": lambda: cls(khot.ConditionalPoisson, logits=torch.linspace(2, -2, 12)),
        "RelaxedKHot": lambda: cls(0.5, logits, k),
        "RelaxedKHotStraightThrough": lambda: cls(0.5, logits, k),
    }.get(name, lambda: cls(logits=logits, k=k))()
    figure, (left, right) = _panels()
    draws = made.sample((2000,))
    if name == "PlackettLuce":
        draws = torch.zeros(2000, 12).scatter(-1, draws, torch.arange(4.0, 0, -1).expand(2000, 4) / 4)
    left.bar(range(1, 13), (draws > 0 if name == "PlackettLuce" else draws).float().mean(0), color="0.5")
    left.set(title="mean of 2000 draws", xlabel="unit")
    right.imshow(draws[:16], cmap="Reds", vmin=0, vmax=1.4, aspect="auto")
    right.set(title="sixteen draws, one per row", xlabel="unit", xticks=[], yticks=[])
    return figure


def anneal() -> plt.Figure:
    """The softness, step by step."""
    figure, axis = plt.subplots(figsize=(4, 2.4), layout="constrained")
    for shape in ("linear", "geometric"):
        topk, values = nn.TopK(2, softness=1.0), []
        schedule = nn.Anneal(topk, "softness", end=0.01, steps=100, shape=shape)
        for _ in range(120):
            values.append(topk.softness)
            schedule.step()
        axis.plot(values, label=shape)
    axis.set(xlabel="step", ylabel="softness")
    axis.legend(fontsize="x-small")
    return figure


FIGURES: dict[str, Callable[[], plt.Figure]] = {
    **{name: partial(along, name) for name in ALONG},
    **{name: partial(hard, name) for name in HARD},
    **{name: partial(loss, name) for name in LOSSES},
    **{name: partial(design, name) for name in DESIGNS},
    "Anneal": anneal,
}
ALT = {
    **dict.fromkeys(ALONG, "Left: the entries against the softness. Right: the first entry on a line, and its slope."),
    **dict.fromkeys(HARD, "Left: an input, as colours. Right: the result."),
    **dict.fromkeys(LOSSES, "The loss, and its slope, against a score."),
    **dict.fromkeys(DESIGNS, "Left: the mean of many draws. Right: sixteen draws, one per row."),
    "Anneal": "The softness against the step, linear and geometric.",
}
