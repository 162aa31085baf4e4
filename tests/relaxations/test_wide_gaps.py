"""First derivatives where k is the number of items above a gap that takes the digits of the scores from z."""

import math
from functools import partial

import pytest
import torch

from khot import (
    capped_simplex_map,
    capped_softmax,
    lapsum_topk,
    log_lapsum_topk,
    log_sigmoid_topk,
    normal_topk,
    sigmoid_topk,
    sparse_topk,
    topk_threshold,
    transport_topk,
)
from tests.loops import for_each
from tests.maps import Cauchy

NEAR = [0.0637, 0.9967, -0.7975]
COTANGENT = [0.3, -1.0, 2.0]
DTYPES = [torch.float32, torch.float64]
each_dtype = for_each("dtype", DTYPES)


def masked_row(dtype, far, mirrored=False):
    """Three items, and one so far below them as users mask with; or all of it upside down."""
    sign = -1.0 if mirrored else 1.0
    low = torch.finfo(dtype).min if far == "min" else float(far)
    return sign * torch.tensor([low, *NEAR], dtype=dtype)


def side_shares(dtype, rate=1.0):
    """Of the near items, whose share is half of the whole; the tails on both sides of the gap have equal sums."""
    return 0.5 * torch.softmax(-rate * torch.tensor(NEAR, dtype=torch.float64), -1).to(dtype)


@each_dtype
@for_each("far", [-1e4, -1e9, -1e18, "min"])
@for_each("mirrored", [False, True])
@for_each("function, rate", [(sigmoid_topk, 1.0), (lapsum_topk, 1.0), (transport_topk, 2.0)])
def test_shares_of_exponential_tails(dtype, far, mirrored, function, rate):
    x = masked_row(dtype, far, mirrored).requires_grad_()
    k = torch.tensor(1.0 if mirrored else 3.0, dtype=torch.float64, requires_grad=True)
    expected = torch.cat((torch.tensor([0.5], dtype=dtype), side_shares(dtype, rate)))
    g = torch.tensor([0.7, *COTANGENT], dtype=dtype)
    (of_k,) = torch.autograd.grad((function(x, k, 1.0) * g).sum(), k)
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(of_k.item(), (expected * g).double().sum().item(), rtol=tolerance, atol=tolerance)
    (of_x,) = torch.autograd.grad(topk_threshold(x, k, 1.0, relaxation=function), x)
    torch.testing.assert_close(of_x, expected, rtol=tolerance, atol=tolerance)
    moved = torch.autograd.functional.jvp(lambda v: function(x.detach(), v, 1.0), k.detach(), torch.ones_like(k))[1]
    torch.testing.assert_close(moved, expected, rtol=tolerance, atol=tolerance)


def test_compiled_derivatives_are_those_of_eager_mode():
    gap, ordinary = masked_row(torch.float32, -1e9), torch.tensor([0.0, *NEAR])
    x, k = torch.stack([gap, ordinary]).requires_grad_(), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([0.0, *COTANGENT])

    def loss(x, k):
        return sum((function(x, k, 1.0) * g).sum() for function in (sigmoid_topk, log_lapsum_topk))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*(torch.autograd.grad(of(x, k), (x, k)) for of in (compiled, loss)))


@each_dtype
@for_each("far", [-1e9, -1e18, "min"])
@for_each("function", [log_sigmoid_topk, log_lapsum_topk])
def test_logarithms_of_certain_items(dtype, far, function):
    x, k = masked_row(dtype, far), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([0.0, *COTANGENT], dtype=dtype)
    (of_k,) = torch.autograd.grad((function(x, k) * g).sum(), k)
    expected = (side_shares(torch.float64) * torch.tensor(COTANGENT, dtype=torch.float64)).sum().item()
    torch.testing.assert_close(of_k.item(), expected, rtol=0, atol=20 * torch.finfo(dtype).eps)


@each_dtype
def test_gradient_of_log_odds_of_a_masked_item(dtype):
    """Checks log y of the item below the gap, which follows the threshold."""
    x = masked_row(dtype, -1e9).requires_grad_()
    (of_x,) = torch.autograd.grad(log_sigmoid_topk(x, 3)[0], x)
    expected = torch.cat((torch.tensor([0.5], dtype=dtype), -side_shares(dtype)))
    torch.testing.assert_close(of_x, expected, rtol=0, atol=20 * torch.finfo(dtype).eps)


@each_dtype
@for_each("far", [-1e4, -1e9, -1e18, "min"])
def test_lighter_tails_leave_the_nearest_item_alone(dtype, far):
    x, k = masked_row(dtype, far).requires_grad_(), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    for function, expected in ((normal_topk, [0.5, 0.0, 0.0, 0.5]), (capped_softmax, [0.0, 0.0, 0.0, 1.0])):
        (of_x,) = torch.autograd.grad(topk_threshold(x, k, 1.0, relaxation=function), x)
        torch.testing.assert_close(of_x, torch.tensor(expected, dtype=dtype), rtol=0, atol=1e-6)
        (of_k,) = torch.autograd.grad(function(x, k, 1.0)[3], k)
        torch.testing.assert_close(of_k.item(), expected[3], rtol=0, atol=1e-6)


@each_dtype
@for_each("far", [-1e4, -1e9, -1e18])
@for_each("mirrored", [False, True])
@for_each("function, rate", [(sigmoid_topk, 1.0), (lapsum_topk, 1.0), (transport_topk, 2.0)])
@for_each("softness", [1.0, 3.0])
def test_thresholds_by_the_softness(dtype, far, mirrored, function, rate, softness):
    """t is the middle of the far item and -c log sum exp(-x / c) of the near ones, c the scale of the tails."""
    x = masked_row(dtype, far, mirrored)
    near = torch.tensor(NEAR, dtype=dtype).double()
    s = torch.tensor(softness, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(topk_threshold(x, 1 if mirrored else 3, s, relaxation=function), s)
    middle = -0.5 * (s / rate) * torch.logsumexp(-near * rate / s, -1)
    (expected,) = torch.autograd.grad(-middle if mirrored else middle, s)
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@each_dtype
@for_each("far", [-1e4, -1e9, -1e18, "min"])
def test_thresholds_of_lighter_tails_by_the_softness(dtype, far):
    """In the middle of the gap with the normal law but for ties, whose number counts; at its end in capped softmax."""
    s = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    x = masked_row(dtype, far)
    gap = NEAR[2] - x[0].double().item()
    for row, expected in ((x, 0.0), (torch.cat((x, x[3:])), -2 * math.log(2) / gap)):
        k = len(row) - 1
        (found,) = torch.autograd.grad(topk_threshold(row, k, s, relaxation=normal_topk), s)
        assert found.item() == pytest.approx(expected, rel=1e-4, abs=1e-9)
        (found,) = torch.autograd.grad(topk_threshold(row, k, s, relaxation=capped_softmax), s)
        assert found.item() == pytest.approx(0, abs=1e-6)


@each_dtype
@for_each("function", [sigmoid_topk, log_sigmoid_topk, normal_topk, capped_softmax])
def test_rows_in_one_batch_do_not_touch_each_other(dtype, function):
    """A row in a wide gap, one without, and one that is all chosen."""
    ordinary = torch.tensor([0.3, *NEAR], dtype=dtype)
    rows = torch.stack((masked_row(dtype, -1e9), ordinary, ordinary.masked_fill(ordinary < 0, -torch.inf)))
    g = torch.tensor([0.0, *COTANGENT], dtype=dtype)

    def gradients(x):
        x, k = x.clone().requires_grad_(), torch.full(x.shape[:-1], 3.0, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad((function(x, k) * g.masked_fill(x.detach() == -torch.inf, 0)).sum(), (x, k))

    together, alone = gradients(rows), zip(*(gradients(row) for row in rows), strict=True)
    for value, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(value, torch.stack(expected), rtol=1e-5, atol=1e-6)


@each_dtype
def test_shares_where_everything_is_masked_or_chosen(dtype):
    """At k = n the shares are those of e^-x, at k = 0 those of e^x, to the last digits."""
    x = torch.tensor(NEAR, dtype=dtype)
    for size, sign in ((0.0, 1.0), (3.0, -1.0)):
        k = torch.tensor(size, dtype=torch.float64, requires_grad=True)
        (of_k,) = torch.autograd.grad((sigmoid_topk(x, k) * torch.tensor(COTANGENT, dtype=dtype)).sum(), k)
        expected = (torch.softmax(sign * x.double(), -1) * torch.tensor(COTANGENT, dtype=torch.float64)).sum().item()
        torch.testing.assert_close(of_k.item(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


def second_derivatives(function, x, size, dtype=torch.float64):
    """Of <g, y>, by the derivative that is taken first and the one that is taken of it, among x, k and the scale."""
    dtypes = (dtype, torch.float64, torch.float64)
    leaves = [torch.tensor(v, dtype=t, requires_grad=True) for v, t in zip((x, size, 1.0), dtypes, strict=True)]
    loss = (function(*leaves) * torch.tensor(COTANGENT, dtype=dtype)).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    second = {}
    for one, value in zip("xks", first, strict=True):
        for number in value.reshape(-1).unbind():
            found = torch.autograd.grad(number, leaves, retain_graph=True, materialize_grads=True)
            for other, part in zip("xks", found, strict=True):
                second.setdefault(one + other, []).append(part.reshape(-1).double())
    return {key: torch.stack(value).squeeze() for key, value in second.items()}


MAPS = {
    "sigmoid": sigmoid_topk,
    "log_sigmoid": log_sigmoid_topk,
    "transport": transport_topk,
    "lapsum": lapsum_topk,
    "log_lapsum": log_lapsum_topk,
    "capped_softmax": capped_softmax,
    "normal": normal_topk,
    "cauchy": partial(capped_simplex_map, link=Cauchy()),
}


@for_each("name", MAPS)
@for_each("x", [NEAR, [0.0637, 0.0637, -0.7975]])
@for_each("size", [0.0, 3.0])
@each_dtype
def test_second_derivatives_of_nothing_and_of_all_are_finite(name, x, size, dtype):
    """The derivatives in x of those in k are the limits; those in k are 0, but for logarithms."""
    found = second_derivatives(MAPS[name], x, size, dtype)
    assert all(bool(value.isfinite().all()) for value in found.values())
    if name in ("sigmoid", "lapsum", "transport", "capped_softmax"):
        assert found["kk"] == 0
    if name in ("sigmoid", "lapsum", "transport"):
        near = second_derivatives(MAPS[name], x, abs(size - 1e-6))
        torch.testing.assert_close(found["kx"], near["kx"], rtol=0, atol=3e-5)


@each_dtype
@for_each("function", [sigmoid_topk, log_sigmoid_topk, normal_topk])
def test_second_derivatives_of_rows_at_either_end_and_between(function, dtype):
    """Each as if it were alone, with masked items and in forward mode, too."""
    x = torch.tensor([[*NEAR, -torch.inf]] * 3, dtype=dtype)
    k, g = torch.tensor([0.0, 1.3, 3.0], dtype=torch.float64), torch.tensor([*COTANGENT, 0.0], dtype=dtype)

    def loss(x, k):
        return (function(x, k, 1.0) * g).masked_fill(x == -torch.inf, 0).sum()

    together = torch.func.jacfwd(torch.func.grad(lambda k: loss(x, k)))(k).diagonal()
    for row, size, value in zip(x, k, together, strict=True):
        (first,) = torch.autograd.grad(loss(row, size.requires_grad_()), size, create_graph=True)
        torch.testing.assert_close(value, torch.autograd.grad(first, size)[0])
        assert value.isfinite()


@for_each("p", [1.05, 1.2, 4 / 3, 1.5, 1.9, 2.0])
@for_each("x, size", [([0.5] * 3, 3.0), ([1.5, 0.5, 0.5], 1.0), ([0.0, 1.0, 1.0], 2.0)])
def test_sparse_masks_of_zeros_and_ones_have_no_derivative_of_any_order(p, x, size):
    leaves = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (x, size, 1.0)]
    y = sparse_topk(*leaves, p=p)
    first = torch.autograd.grad((y * torch.tensor(COTANGENT, dtype=torch.float64)).sum(), leaves, create_graph=True)
    for value in first:
        if value.requires_grad:
            second = torch.autograd.grad(value.sum(), leaves, retain_graph=True, materialize_grads=True)
            assert all(bool((v == 0).all()) for v in second)


@for_each("size", [1e-280, 1e-200, 1e155, 1e170, 1e200, 1e280])
def test_mixed_second_derivatives_at_any_scale(size):
    """The map is one of x / s: d2L/dk ds times s is the same for all s, in either order."""

    def mixed(size):
        x = (size * torch.tensor(NEAR, dtype=torch.float64)).requires_grad_()
        k, s = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.3, size))
        loss = (sigmoid_topk(x, k, s) * torch.tensor(COTANGENT, dtype=torch.float64)).sum()
        of_k, of_s = torch.autograd.grad(loss, (k, s), create_graph=True)
        return [torch.autograd.grad(a, b, retain_graph=True)[0].item() * size for a, b in ((of_k, s), (of_s, k))]

    expected = mixed(1.0)
    torch.testing.assert_close(mixed(size), expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(expected[0], expected[1], rtol=1e-12, atol=0)


@for_each("function", [log_sigmoid_topk, log_lapsum_topk])
def test_gradients_of_logarithms_overflow_as_their_sum_does(function):
    """dL/dk is -inf, not the sum of infinities of both signs, which is NaN."""
    x = torch.tensor([1.0, 0.9, 0.0, -0.1], dtype=torch.float64)
    k = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    cotangent = torch.tensor([1.0, -2.0, 500.0, -700.0], dtype=torch.float64)
    assert torch.autograd.grad(function(x, k, 1e-4), k, cotangent)[0] == -torch.inf
