"""The order maps of rows with entries far apart: an outlier costs nothing, whatever it is."""

import numpy as np
import torch

from khot import soft_permutation, soft_rank, soft_sort
from tests import order_reference
from tests.inputs import normal
from tests.loops import for_each

MAPS = [soft_rank, soft_sort, soft_permutation]
every_map = for_each("order_map", MAPS)
every_dtype = for_each("dtype", [torch.float32, torch.float64])
SINGLE, DOUBLE = torch.finfo(torch.float32), torch.finfo(torch.float64)


def compare(order_map, x, scale, descending=False, tolerance=None):
    """Values, and the derivatives with respect to x and the scale, of one row."""
    eps = torch.finfo(x.dtype).eps
    sign = -1.0 if descending else 1.0
    leaf, softness = x.clone().requires_grad_(), torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    y = order_map(leaf, softness, descending)
    g = normal(*y.shape, seed=5, dtype=x.dtype)
    grad_x, grad_scale = torch.autograd.grad(y, (leaf, softness), g)
    reference = getattr(order_reference, order_map.__name__)
    # descending maps are those of -x, except that sorted values change their sign
    flip = sign if order_map is soft_sort else 1.0
    expected = reference(sign * x.double().numpy(), scale, flip * g.double().numpy())
    value = (flip * expected.value).astype(np.float64)
    size = np.maximum(np.abs(value), 1 if order_map is not soft_sort else scale)
    tolerance = tolerance or 64 * eps
    error = np.abs(y.detach().double().numpy() - value)
    assert (error <= tolerance * size).all(), (y, value)
    wrong = np.abs(grad_x.double().numpy() - sign * expected.grad_x.astype(np.float64))
    assert (wrong <= tolerance * float(expected.size)).all(), (grad_x, expected.grad_x)
    wrong = abs(grad_scale.item() - float(expected.grad_scale))
    assert wrong <= 100 * tolerance * float(expected.size), (grad_scale, expected.grad_scale)


OUTLIERS = {
    "one": lambda dtype: [-1e17],
    "one above": lambda dtype: [1e17],
    "farther": lambda dtype: [-1e30],
    "least": lambda dtype: [torch.finfo(dtype).min],
    "greatest": lambda dtype: [torch.finfo(dtype).max],
    "both ends": lambda dtype: [torch.finfo(dtype).min, torch.finfo(dtype).max],
    "several": lambda dtype: [-1e17, -1e17, -1e30, 3e24, 1e9, torch.finfo(dtype).min],
    "ties": lambda dtype: [torch.finfo(dtype).min] * 3 + [torch.finfo(dtype).max] * 2,
    "neighbours": lambda dtype: [2.0**60, 2.0**60 * (1 + 4 * torch.finfo(dtype).eps), -(2.0**60)],
}


@every_map
@every_dtype
@for_each("name", OUTLIERS)
def test_outliers(order_map, dtype, name):
    row = torch.tensor([0.0, 3.0, 1.0, 1.25, *OUTLIERS[name](dtype)], dtype=dtype)
    for scale in (0.1, 2.0):
        for descending in (False, True):
            compare(order_map, row, scale, descending)


@every_map
@every_dtype
def test_outliers_among_many(order_map, dtype):
    row = normal(40, dtype=dtype)
    row[[3, 20, 21]] = torch.tensor([-1e17, 1e20, torch.finfo(dtype).min], dtype=dtype)
    compare(order_map, row, 0.3)


@every_map
def test_known_ranks(order_map):
    for outlier in (-1e17, -1e30, DOUBLE.min):
        x = torch.tensor([0, 3, 1, outlier], dtype=torch.float64)
        y = order_map(x, 0.1)
        rank = torch.tensor([2.0, 4.0, 3.0, 1.0], dtype=torch.float64)
        if order_map is soft_sort:
            expected = x.sort().values
        elif order_map is soft_rank:
            expected = rank
        else:
            expected = torch.nn.functional.one_hot(rank.long() - 1).double()
        torch.testing.assert_close(y, expected, rtol=1e-15, atol=1e-2)


@every_map
@every_dtype
@for_each("ratio", [1e3, 1e8, 1e17, 1e30])
def test_ratios_to_the_scale(order_map, dtype, ratio):
    """Ties and near ties stay accurate, however many scales away the other items are."""
    base = torch.tensor([0.5, -1.5, 0.5, 2.0, -0.75, 0.5, 2.0], dtype=dtype)
    compare(order_map, base, 1 / ratio)
    near = base.clone()
    near[2] = torch.nextafter(near[2], torch.tensor(1.0, dtype=dtype))
    compare(order_map, near, 1 / ratio)
    compare(order_map, near, torch.finfo(dtype).eps)


@every_map
@for_each(
    "x, scale",
    [
        ([1.7e308, -1.7e308, 1e308, 0.0], 1.0),
        ([1.7e308, -1.7e308, 1e308, 0.0], 1e308),
        ([1.7e308, -1.7e308, 1e308, 1e308, 0.0], 1e300),
        ([1e-300, -1e-300, 3e-308, 0.0], 1e-307),
    ],
)
def test_largest_and_smallest_doubles(order_map, x, scale):
    x = torch.tensor(x, dtype=torch.float64)
    leaf, softness = x.clone().requires_grad_(), torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    y = order_map(leaf, softness)
    g = normal(*y.shape, seed=5)
    if order_map is not soft_sort:  # derivatives are as large as 1 / scale
        g *= min(1.0, scale)
    expected = getattr(order_reference, order_map.__name__)(x.numpy(), scale, g.numpy())
    value = expected.value.clip(DOUBLE.min, DOUBLE.max).astype(np.float64)
    room = 64 * DOUBLE.eps * np.maximum(np.abs(value), 1 if order_map is not soft_sort else scale)
    there = np.abs(value) < DOUBLE.max  # sorted values spread beyond the items
    assert (np.abs(y.detach().numpy() - value)[there] <= room[there]).all()
    grads = torch.autograd.grad(y, (leaf, softness), g)
    assert not any(grad.isnan().any() for grad in grads)
    assert (np.abs(grads[0].numpy() - expected.grad_x.astype(np.float64)) <= 1e-13 * float(expected.size)).all()


@every_map
@every_dtype
def test_outliers_in_derivatives_of_every_kind(order_map, dtype):
    """Forward mode and second derivatives, which go another way than the first backward pass."""
    core = torch.tensor([0.0, 3.0, 1.0, 1.25], dtype=dtype)
    scale = torch.tensor(0.5, dtype=torch.float64)
    near, far = (torch.cat([core, torch.tensor([end], dtype=dtype)]) for end in (1e4, torch.finfo(dtype).max))
    direction = torch.tensor([1.0, -0.5, 0.25, 2.0, 0.0], dtype=dtype), torch.tensor(0.3, dtype=torch.float64)

    def loss(x, s):
        y = order_map(x, s)
        if order_map is soft_sort:
            y = y[:4]
        return (y * normal(*y.shape, seed=4, dtype=dtype)).sum()

    def derivatives(x):
        _, tangent = torch.func.jvp(loss, (x, scale), direction)
        gradient, change = torch.func.jvp(lambda x, s: torch.func.grad(loss, (0, 1))(x, s), (x, scale), direction)
        inputs = x.clone().requires_grad_(), scale.clone().requires_grad_()
        first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
        second = torch.autograd.grad(first[0][:4].square().sum() + first[1] ** 2, inputs)
        return (
            tangent,
            *(v[..., :4] for v in (*gradient[:1], *change[:1], second[0])),
            gradient[1],
            change[1],
            second[1],
        )

    for left, right in zip(derivatives(near), derivatives(far), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=1e-9)
