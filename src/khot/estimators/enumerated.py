"""The exact expectation and its exact gradient, by summing over all k-hot vectors."""

import math
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor
from torch.distributions import Distribution
from torch.utils.checkpoint import checkpoint

from khot._tracing import is_tracing, one_operation, shape_of
from khot._validation import check_count
from khot.constraints import k_hot
from khot.distributions.design import MAX_SUPPORT
from khot.kernels.subsets import k_hot_vectors

from ._convention import Loss, check_call, declares, evaluate

Stretch = Callable[[], Tensor]  # makes a part of the support, (m, *1 for each batch dimension, n)


@declares(unbiased=True)
def enumerated(design: Distribution, f: Loss, num_samples: int = 1, chunk_size: int = 4096) -> Tensor:
    r"""The exact E[f(x)] with its exact gradient, for small C(n, k).

    .. math:: E[f(x)] = \sum_x p(x) f(x)

    The vectors are listed, scored and summed up ``chunk_size`` at a time, and forward and backward take no more memory
    than one such chunk needs. For that the backward pass evaluates f once more: f has to be a function of its argument
    and of parameters alone. Derivatives of every order are exact.

    Args:
        design: A distribution over vectors with ``log_prob`` and ``enumerate_support``.
        f: Maps values ``(m, *batch_shape, n)`` to losses ``(m, *batch_shape)``, for any m.
        num_samples: Taken for the sake of the common calling convention; the result does not depend on it.
        chunk_size: Number of vectors that f gets at a time.

    Returns:
        Tensor of shape ``batch_shape``, E[f(x)].

    Raises:
        TypeError: If ``design`` is no distribution, ``chunk_size`` no int, or f returns no floating-point tensor.
        ValueError: If there are more than a million vectors, ``chunk_size`` < 1, or f returns the wrong shape.
        NotImplementedError: If ``design`` has no ``log_prob``, or its rows differ in k.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> exact = enumerated(ConditionalPoisson(logits=logits, k=2), lambda x: x[..., 0] * x[..., 1])
        >>> exact, torch.autograd.grad(exact, logits)[0]
        (tensor(0.1667, grad_fn=<...>), tensor([ 0.0833,  0.0833, -0.0833, -0.0833]))
    """
    check_call(design, num_samples)
    check_count("chunk_size", chunk_size)
    stretches = list(_stretches(design, chunk_size))

    def part(stretch: Stretch) -> Tensor:
        values = stretch().expand(-1, *design.batch_shape, -1)
        return _surrogate(design, values, evaluate(f, values))

    if len(stretches) == 1:
        return part(stretches[0])
    design.log_prob(stretches[0]()[:1])  # what the design computes once, it shall not compute inside of a checkpoint
    parts = (checkpoint(part, stretch, use_reentrant=False) for stretch in stretches)
    total = next(parts)
    for more in parts:
        total = total + more
    return total


def _surrogate(design: Distribution, values: Tensor, losses: Tensor) -> Tensor:
    """The part of the expectation that the values contribute."""
    return (design.log_prob(values).exp() * losses).sum(0)


def _stretches(design: Distribution, chunk_size: int) -> Iterator[Stretch]:
    """The support in parts of at most ``chunk_size`` vectors."""
    if not isinstance(design.support, k_hot):
        support = design.enumerate_support(expand=False)
        count = shape_of(support)[0]
        for start in range(0, count, chunk_size):
            yield partial(support.narrow, 0, start, min(chunk_size, count - start))
        return
    n, sizes = design.event_shape[0], _sizes(design.support)
    count = sum(math.comb(n, k) for k in sizes)
    if count > MAX_SUPPORT:
        terms = " + ".join(f"C({n}, {k})" for k in sizes)
        raise ValueError(
            f"enumerated sums over at most {MAX_SUPPORT} vectors, but {terms} = {count}; score_function draws some"
        )
    mean = design.mean.detach()
    for k in sizes:
        count = math.comb(n, k)
        for start in range(0, count, chunk_size):
            yield partial(_listed, k, start, min(start + chunk_size, count), mean)


@one_operation
def _listed(k: int, start: int, stop: int, like: Tensor) -> Tensor:
    *batch_shape, n = like.shape
    return k_hot_vectors(n, k, start, stop, like).view(-1, *(1,) * len(batch_shape), n)


def _sizes(support: k_hot) -> range:
    if is_tracing() and isinstance(support.k, Tensor):
        raise RuntimeError("enumerated, in a trace, needs k as a number: tensors may hold other sizes when it runs")
    lower, upper = (k.unique().tolist() or [0] if isinstance(k, Tensor) else [k] for k in (support.k, support.upper))
    if len(lower) > 1 or len(upper) > 1:
        raise NotImplementedError(f"enumerated needs the same k in all rows, but got k in {sorted({*lower, *upper})}")
    return range(lower[0], upper[0] + 1)
