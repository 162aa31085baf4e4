"""Helps to choose a gradient estimator for a design: measures bias, variance and cost against the exact gradient."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from khot._validation import check_function, checked_index, described
from khot.distributions import PhantomUnit, SamplingDesign
from khot.distributions.design import MAX_SUPPORT
from khot.estimators import enumerated, reinmax, score_function, straight_through, unordered_set

__all__ = ["compare_estimators"]


def __dir__() -> list[str]:
    return __all__


Loss = Callable[[Tensor], Tensor]
Estimator = Callable[..., Tensor]

ESTIMATORS: dict[str, Estimator] = {  # compared by default, the recommended ones first
    "reinmax": reinmax,
    "leave_one_out": partial(score_function, baseline="leave_one_out"),
    "straight_through": straight_through,
    "score_function": score_function,
    "unordered_set": unordered_set,
}
PANELS = {
    "bias": "bias (dashed: its standard error)",
    "variance": "variance",
    "cosine": "cosine to the exact gradient",
    "seconds": "seconds for each call",
}


@dataclass(frozen=True)
class Report:
    r"""Measurements of one estimator's gradient g, from ``num_repeats`` calls with the mean :math:`\bar g`.

    Attributes:
        design: Name of the design.
        estimator: Name of the estimator.
        num_samples: Number of draws in each call.
        bias: Length of the difference between :math:`\bar g` and the exact gradient.
        bias_error: Standard error of ``bias``: its root mean square if the estimator is unbiased.
        variance: :math:`E|g - E g|^2`, the sum of the variances of all entries.
        cosine: Mean cosine of the angle between g and the exact gradient, where neither is 0.
        signal_to_noise: Length of :math:`\bar g` over the root of ``variance``; infinite if there is no noise.
        seconds: Median time of a call with its backward pass.
    """

    design: str
    estimator: str
    num_samples: int
    bias: float
    bias_error: float
    variance: float
    cosine: float
    signal_to_noise: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare_estimators`: ``print`` shows it as a table, ``plot()`` as a figure.

    Attributes:
        rows: One :class:`Report` for each design, estimator and number of samples.
        skipped: Combinations that could not be compared, and why.
    """

    rows: list[Report]
    skipped: list[str]

    def __str__(self) -> str:
        head = ("design", "estimator", "samples", "bias ± s.e.", "variance", "cosine", "signal/noise", "ms/call")
        body = [
            (
                row.design,
                row.estimator,
                str(row.num_samples),
                f"{row.bias:.2g} ± {row.bias_error:.2g}",
                f"{row.variance:.3g}",
                f"{row.cosine:.3f}",
                f"{row.signal_to_noise:.3g}",
                f"{row.seconds * 1e3:.2f}",
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        lines = []
        for cells in (head, *body):
            names = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
            numbers = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
            lines.append("  ".join(names + numbers))
        return "\n".join([*lines, *(f"skipped: {line}" for line in self.skipped)])

    def plot(self) -> Any:
        """A matplotlib figure: bias, variance, cosine and time against the number of samples.

        The standard error of the bias is dashed; a bias at or below this line is not significant.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            message = "plot needs matplotlib, which is not installed: pip install matplotlib"
            raise ModuleNotFoundError(message, name=error.name) from error
        figure = Figure(figsize=(10, 7), layout="constrained")
        panels = figure.subplots(2, 2).flat
        several = len({row.design for row in self.rows}) > 1
        for panel, (name, title) in zip(panels, PANELS.items(), strict=True):
            for design, estimator in dict.fromkeys((row.design, row.estimator) for row in self.rows):
                rows = [row for row in self.rows if (row.design, row.estimator) == (design, estimator)]
                sizes, label = [row.num_samples for row in rows], f"{design}, {estimator}" if several else estimator
                (line,) = panel.plot(sizes, [getattr(row, name) for row in rows], marker="o", label=label)
                if name == "bias":
                    panel.plot(sizes, [row.bias_error for row in rows], linestyle="dashed", color=line.get_color())
            panel.set(title=title, xlabel="samples for each call")
            panel.set_xscale("log", base=2)
            if name != "cosine":
                panel.set_yscale("log", nonpositive="mask")
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return figure


def compare_estimators(
    design: SamplingDesign | Mapping[str, SamplingDesign],
    f: Loss,
    estimators: Mapping[str, Estimator] | None = None,
    num_samples: int | Iterable[int] = (1, 4),
    num_repeats: int = 300,
    exact: Tensor | Mapping[str, Tensor] | None = None,
) -> Comparison:
    """Measures bias, variance, direction and cost of gradient estimators, to help choose one.

    More draws reduce the variance of an estimator, but never its bias. So prefer ReinMax if its bias is small compared
    with the exact gradient, and otherwise the leave-one-out score function, which is unbiased. Straight-through is the
    cheapest, and is exact for linear f. The gradients of ReinMax and straight-through depend on f between the k-hot
    vectors.

    Estimated is the gradient of E[f(x)], summed over the batch, with respect to the parameter of the design, ``probs``
    or ``logits``. The sum of ``probs`` is fixed, so only the part that does not change it counts. The exact
    gradient is computed by :func:`~khot.enumerated` unless it is given. Draws come from torch's global generator.

    Args:
        design: A design, or designs by name.
        f: Maps values ``(num_samples, *batch_shape, n)`` to losses ``(num_samples, *batch_shape)``.
        estimators: Functions ``estimator(design, f, num_samples)`` by name. By default ReinMax, the score function with
            leave-one-out baseline, straight-through, the score function without baseline, unordered set.
        num_samples: Number of draws in each call, or several such numbers.
        num_repeats: Number of calls of each estimator.
        exact: Exact gradient of the shape of the design's parameter, by name if ``design`` is; for designs without
            log_prob and for large C(n, k).

    Returns:
        A :class:`Comparison`. Combinations that are not supported, such as too few samples, or pathwise estimators of a
        loss without a gradient, are listed as skipped.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If no estimator supports any of the designs and numbers of samples.
        NotImplementedError: If an exact gradient is neither given nor found by enumeration.

    Example:
        >>> design = ConditionalPoisson(logits=torch.zeros(4), k=2)
        >>> comparison = compare_estimators(design, lambda x: x[..., 0], num_samples=2, num_repeats=10)
        >>> [row.estimator for row in comparison.rows if row.cosine > 1 - 1e-6]  # f is linear
        ['straight_through']
    """
    designs = design if isinstance(design, Mapping) else {type(design).__name__: design}
    references = exact if isinstance(exact, Mapping) else dict.fromkeys(designs, exact)
    functions: Any = ESTIMATORS if estimators is None else estimators
    sizes = _checked_sizes(num_samples)
    check_function("f", f, "the values")
    if checked_index("num_repeats", num_repeats) < 2:
        raise ValueError(f"`num_repeats` must be at least 2, but got {num_repeats}")
    if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
        raise TypeError(f"`estimators` must be a dictionary of functions by name, but got {functions!r}")
    if unknown := set(references) - set(designs):
        raise ValueError(f"`exact` must have the names of the designs, {sorted(designs)}, but has {unknown}")
    comparison = Comparison([], [])
    for name, member in designs.items():
        settings = product(functions.items(), sizes)
        _add_reports(comparison, name, member, f, settings, num_repeats, references.get(name))
    if not comparison.rows:
        raise ValueError("\n".join(["there is nothing to compare:", *comparison.skipped]))
    return comparison


def _add_reports(
    comparison: Comparison,
    design_name: str,
    member: SamplingDesign,
    f: Loss,
    settings: Iterable[tuple[tuple[str, Estimator], int]],
    num_repeats: int,
    exact: Tensor | None,
) -> None:
    """Adds the results of one design, for pairs of an estimator and a number of samples."""
    design = _differentiable(member)
    exact = _exact_gradient(design, f) if exact is None else _flat(exact, member)
    for (name, estimator), size in settings:
        one = partial(_gradient, design, f, estimator, size)
        try:
            one()  # not timed, because first calls are slow
        except (NotImplementedError, ValueError) as error:
            comparison.skipped.append(f"{name} on {design_name} with num_samples={size}: {error}")
            continue
        judged = _judge([one() for _ in range(num_repeats)], exact)
        comparison.rows.append(Report(design_name, name, size, **judged))


def _checked_sizes(num_samples: Any) -> list[int]:
    """One number of samples, or several."""
    is_single = isinstance(num_samples, (str, Mapping)) or (isinstance(num_samples, Tensor) and num_samples.dim() == 0)
    sizes = list(num_samples) if isinstance(num_samples, Iterable) and not is_single else [num_samples]
    return [checked_index("num_samples", size) for size in sizes]  # the estimators check that they are large enough


def _differentiable(design: Any) -> SamplingDesign:
    """The design, or a copy of it, whose parameter requires a gradient."""
    if not isinstance(design, SamplingDesign):
        raise TypeError(
            f"`design` must be a khot.distributions.SamplingDesign, but got {described(design, SamplingDesign)}"
        )
    if not design.parameter.requires_grad:
        design = copy.deepcopy(design)
        design.parameter.requires_grad_()
    return design


@torch.enable_grad()
def _gradient(design: SamplingDesign, f: Loss, estimator: Estimator, num_samples: int) -> tuple[Tensor, float]:
    """One estimate on the CPU, and the seconds that it took."""
    design = copy.copy(design)  # without values computed from its parameter so far, which are part of the cost
    start = time.perf_counter()
    surrogate = estimator(design, f, num_samples)
    gradient = None
    if surrogate.requires_grad:
        (gradient,) = torch.autograd.grad(surrogate.sum(), design.parameter, allow_unused=True)
    if gradient is None:
        raise ValueError("its result has no gradient: it differentiates f, and autograd finds no x in the losses")
    gradient = _flat(gradient, design)
    return gradient, time.perf_counter() - start


def _flat(gradient: Any, design: SamplingDesign) -> Tensor:
    """The gradient as a vector, without the part that would change a fixed sum."""
    if not isinstance(gradient, Tensor) or gradient.is_complex():
        got = gradient.dtype if isinstance(gradient, Tensor) else type(gradient).__name__
        raise TypeError(f"`exact` must be a real tensor, the gradient of the design's parameter, but got {got}")
    if gradient.shape != design.parameter.shape:
        raise ValueError(
            f"`exact` must have the shape of the design's parameter, {tuple(design.parameter.shape)}, "
            f"but has {tuple(gradient.shape)}"
        )
    gradient = gradient.detach().double().cpu()
    if design.parameter_name == "probs" and not isinstance(design, PhantomUnit):
        gradient = gradient - gradient.mean(-1, keepdim=True)
    return gradient.flatten()


def _exact_gradient(design: SamplingDesign, f: Loss) -> Tensor:
    n, sizes = design.event_shape[0], range(0)
    if design.k.numel():
        sizes = range(int(design.k.max()), int(design.largest_k.max()) + 1)
    count = sum(math.comb(n, k) for k in sizes)
    if count > MAX_SUPPORT:
        terms = " + ".join(f"C({n}, {k})" for k in sizes)
        raise NotImplementedError(
            f"{terms} = {count} vectors are too many to enumerate. Pass the exact gradient as `exact`"
        )
    try:
        return _gradient(design, f, enumerated, 1)[0]
    except NotImplementedError as error:
        raise NotImplementedError(f"{error}. Pass the exact gradient as `exact`") from error


def _judge(estimates: list[tuple[Tensor, float]], exact: Tensor) -> dict[str, float]:
    gradients, seconds = torch.stack([gradient for gradient, _ in estimates]), [spent for _, spent in estimates]
    mean, variance = gradients.mean(0), gradients.var(0).sum().item()
    return {
        "bias": (mean - exact).norm().item(),
        "bias_error": math.sqrt(variance / len(gradients)),
        "variance": variance,
        "cosine": (gradients @ exact / (gradients.norm(dim=-1) * exact.norm())).nanmean().item(),
        "signal_to_noise": _quotient(mean.norm().item(), math.sqrt(variance)),
        "seconds": torch.tensor(seconds).median().item(),
    }


def _quotient(signal: float, noise: float) -> float:
    """The quotient; infinite without noise, and NaN if there is no signal either."""
    if noise > 0:
        return signal / noise
    return math.inf if signal > 0 else math.nan
