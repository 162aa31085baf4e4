"""The fused integrals as differentiable functions of the positions.

Plain first derivatives are cheap: they use numbers that are already there, or one product with the Jacobian. Everything
else, and rows that a loop leaves, use the ``exact`` function that is passed in, which consists of differentiable
operations.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from khot._shapes import broadcast_shapes
from khot._torch_internals import for_transforms, no_view

from ..operators.autograd import by_formula, wants_gradient
from . import integrals

Exact = Callable[..., Tensor]


def fused_log_prob(theta: Tensor, k: Tensor, value: Tensor, noise: str, depth: float, exact: Exact) -> Tensor:
    """Log-probabilities ``(*sample, *batch)`` of ``value``, a constant; ``exact`` takes any rows, sizes and values."""
    with_slopes = wants_gradient(theta)

    def found(theta: Tensor) -> tuple[Tensor, Tensor]:
        found, slopes = integrals.find(theta).log_prob(theta, k, value, noise, depth, with_slopes)
        left = found == torch.inf
        if left.any():
            shape = broadcast_shapes(theta.shape, value.shape)
            few = (x.detach().expand(shape[: len(shape) - less])[left] for x, less in ((theta, 0), (k, 1), (value, 0)))
            found[left], of_few = _value_and_slopes(exact, *few)
            if with_slopes:
                slopes[left] = of_few
        return no_view(found), slopes

    def pull_back(grad: Tensor, theta: Tensor, slopes: Tensor) -> Tensor:
        return (grad.unsqueeze(-1) * slopes).sum_to_size(theta.shape).to(theta.dtype)

    return by_formula(lambda t: exact(t, k, value), found, pull_back, theta)


def _value_and_slopes(exact: Exact, theta: Tensor, k: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    with for_transforms():
        found, pull_back = torch.func.vjp(lambda t: exact(t, k, value), theta.double())[:2]
        return found, pull_back(torch.ones_like(found))[0]


def fused_inclusion(theta: Tensor, k: Tensor, noise: str, depth: float, exact: Exact) -> Tensor:
    """Inclusion probabilities ``(*batch, n)``; ``exact`` takes any rows and their sizes."""
    sizes = k.expand(theta.shape[:-1]).reshape(-1).contiguous()

    def found(theta: Tensor) -> tuple[Tensor, ...]:
        rows = _rows(theta)
        probs, when, given = integrals.find(rows).inclusion(rows, sizes, noise, depth)
        left = when[:, 0].isnan()
        if left.any():
            probs[left] = exact(rows[left], sizes[left])
        return no_view(probs.view(theta.shape)), when, given

    def pull_back(grad: Tensor, theta: Tensor, when: Tensor, given: Tensor) -> Tensor:
        rows, vectors = _rows(theta), _rows(grad)
        product = integrals.find(rows).product(rows, sizes, when, given, vectors, noise, depth)
        left = when[:, 0].isnan()
        if left.any():
            with for_transforms():
                exact_rows = torch.func.vjp(lambda t: exact(t, sizes[left]), rows[left])[1]
                product[left] = exact_rows(vectors[left])[0]
        return cast(Tensor, product.view(theta.shape).to(theta.dtype))

    return by_formula(lambda t: exact(t, k), found, pull_back, theta)


def _rows(x: Tensor) -> Tensor:
    return x.detach().double().reshape(-1, x.shape[-1]).contiguous()
