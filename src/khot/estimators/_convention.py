"""The calling convention of the estimators for custom loops: ``surrogate = estimator(design, f, num_samples=1)``.

Each has three steps. Draw: ``values`` of shape ``(S, *batch_shape, *event_shape)``, where the event is a vector
``(n,)``, or several vectors if the law was made independent by ``to_event``. Evaluate: ``losses = f(values)``,
``(S, *batch_shape)``. Estimate: a pure function ``_surrogate(design, values, losses, ...)`` of shape ``batch_shape``,
whose gradient estimates that of E[f(x)]. A test can sum this function over all possible values.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.distributions import Distribution

from khot._torch_internals import version_of
from khot._validation import check_function, checked_index, described
from khot.distributions.entry import entry

Loss = Callable[[Tensor], Tensor]
Estimator = TypeVar("Estimator", bound=Callable[..., Tensor])


def declares(*, unbiased: bool, min_samples: int = 1) -> Callable[[Estimator], Estimator]:
    """Gives an estimator its attributes.

    Args:
        unbiased: Whether the expected gradient is exact for every f and every k-hot design that it takes.
        min_samples: The smallest allowed ``num_samples``.
    """

    def mark(estimator: Estimator) -> Estimator:
        estimator = entry(estimator)
        vars(estimator).update(unbiased=unbiased, min_samples=min_samples)
        return estimator

    return mark


def checked_call(design: Any, f: Any, num_samples: Any, min_samples: int = 1, needed_by: str = "") -> int:
    """``num_samples`` as an int of at least ``min_samples``, after checks of ``design`` and f.

    ``needed_by`` says what needs more than one, such as "with baseline='leave_one_out'".
    """
    check_design(design)
    check_function("f", f, "the values")
    count = checked_index("num_samples", num_samples)
    if count < min_samples:
        needed_by = f" {needed_by}" if needed_by else ""
        raise ValueError(f"`num_samples` must be at least {min_samples}{needed_by}, but got {num_samples}")
    return count


def check_design(design: Any) -> None:
    """Checks that ``design`` is a distribution over one or several vectors."""
    if not isinstance(design, Distribution):
        raise TypeError(f"`design` must be a torch or Pyro distribution, but got {described(design, Distribution)}")
    if not design.event_shape:
        raise ValueError("`design` must be a distribution of vectors, with event_shape (n,), but got event_shape ()")


def evaluate(f: Loss, values: Tensor, design: Distribution, *, reads_values_again: bool = True) -> Tensor:
    """``f(values)``, after checks that it is one real number per event and that f did not change ``values``."""
    version = version_of(values)
    losses: Any = f(values)
    if reads_values_again and version_of(values) != version:
        raise ValueError("`f` must not change its argument in place: the estimator needs the values that were drawn")
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        got = f"dtype {losses.dtype}" if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(f"`f` must return a floating-point tensor, but got {got}")
    shape = values.shape[: values.dim() - len(design.event_shape)]
    if losses.shape != shape:
        one = "vector" if len(design.event_shape) == 1 else f"event of shape {tuple(design.event_shape)}"
        raise ValueError(
            f"`f` must return one loss for each {one}, of shape (num_samples, *batch_shape) = "
            f"{tuple(shape)} for values of shape {tuple(values.shape)}, but got {tuple(losses.shape)}"
        )
    return losses
