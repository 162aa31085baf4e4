"""The exact expectation and its exact gradient, by summing over all k-hot vectors."""

import torch
from torch import Tensor
from torch.distributions import Distribution

from khot._validation import check_generator, checked_count
from khot.distributions.design import MAX_SUPPORT

from ._convention import Loss, checked_call, declares, evaluate
from .support import Support
from .wrapper import scores_of, wide


@declares(unbiased=True)
def enumerated(
    design: Distribution,
    f: Loss,
    num_samples: int = 1,
    chunk_size: int = 4096,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""The exact E[f(x)] with its exact gradient, for small C(n, k), or several latents with few combinations.

    .. math:: E[f(x)] = \sum_x p(x) f(x)

    The vectors are listed, scored and summed ``chunk_size`` at a time, and both passes need no more memory than one
    such chunk does. For this, the backward pass evaluates f once more, so f must be a function of its argument and of
    parameters only. Derivatives of every order are exact.

    Args:
        design: A distribution over vectors with ``log_prob`` and ``enumerate_support``, or several of them made
            independent by ``to_event``, whose values are all combinations.
        f: Maps values ``(m, *batch_shape, *event_shape)`` to losses ``(m, *batch_shape)``, for any m.
        num_samples: Ignored; accepted so that all estimators can be called in the same way.
        chunk_size: Number of vectors that f gets at a time.
        generator: Ignored, like ``num_samples``.

    Returns:
        Tensor of shape ``batch_shape``, E[f(x)].

    Raises:
        ValueError: If there are more than a million vectors.
        NotImplementedError: If ``design`` has no ``log_prob``, or rows of its batch differ in k.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> exact = enumerated(ConditionalPoisson(logits=logits, k=2), lambda x: x[..., 0] * x[..., 1])
        >>> exact, torch.autograd.grad(exact, logits)[0]
        (tensor(0.1667, grad_fn=<...>), tensor([ 0.0833,  0.0833, -0.0833, -0.0833]))
    """
    checked_call(design, f, num_samples)
    check_generator(generator)
    return _total(design, f, checked_count("chunk_size", chunk_size))


def _total(design: Distribution, f: Loss, chunk_size: int) -> Tensor:
    """The sum over the support, a chunk at a time."""
    support = Support(design, f"enumerated sums over at most {MAX_SUPPORT} vectors")
    starts = range(0, support.count, chunk_size)
    dtype = torch.float64

    def part(start: int) -> Tensor:
        nonlocal dtype
        values = support.values(start, min(start + chunk_size, support.count))
        values = values.expand(-1, *design.batch_shape, *design.event_shape)
        contribution, dtype = _surrogate(design, values, evaluate(f, values, design))
        return contribution

    if len(starts) == 1:
        return part(0).to(dtype)
    scores_of(design, support.values(0, 1))  # computed once, outside the checkpoint
    from torch.utils.checkpoint import checkpoint  # imports SymPy in torch 2.6

    parts = (checkpoint(part, start, use_reentrant=False) for start in starts)
    total = next(parts)
    for more in parts:
        total = total + more
    return total.to(dtype)


def _surrogate(design: Distribution, values: Tensor, losses: Tensor) -> tuple[Tensor, torch.dtype]:
    """The contribution of the values to the expectation, at least in float32, and the dtype of the final result."""
    log_prob, dtype = scores_of(design, values)
    return (log_prob.exp() * wide(losses)).sum(0), torch.promote_types(dtype, losses.dtype)
