"""Masks in numba: the pieces of links, which rows are left to torch, and the same results with them and without."""

import functools
import itertools

import numpy as np
import pytest
import torch

from khot.kernels import backend, threshold
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.links.logistic import LOGISTIC
from khot.relaxations import capped_simplex_map, log_lapsum_topk, log_sigmoid_topk, sigmoid_topk
from tests.inputs import normal
from tests.kernels.kernel_links import LINKS
from tests.loops import for_each

pytest.importorskip("numba", reason="numba is not installed")

from khot.kernels.cpu.loops import kernel, specialised
from khot.kernels.links.base_numba import numba_link, variant_of
from khot.kernels.threshold import numba_backend

REALS = {np.float32: torch.float32, np.float64: torch.float64}
POWERS = [clipped_power(p) for p in (4 / 3, 1.25, 1.1)]  # the last one is steep
ALL = [*LINKS, *POWERS]
each_link = pytest.mark.parametrize("link", ALL, ids=lambda link: variant_of(link))
each_piece = pytest.mark.parametrize(  # in either dtype in turn: oracles and fuzz have both
    ("link", "real"),
    list(zip(ALL, itertools.cycle(REALS), strict=False)),
    ids=lambda value: getattr(value, "__name__", None) or variant_of(value),
)


COLUMNS = {"value": 0, "slope": 1, "log_value": 2, "log_derivative": 3, "terms": slice(4, 7), "quantile": 7}


@functools.cache
def over_items(link, real):
    """All functions of the piece for all items of an array, in columns: one loop, as each takes long to compile."""
    with specialised(f"test {variant_of(link)} {real.__name__}"):
        piece = numba_link(type(link), variant_of(link), real)
        value, slope, terms, quantile = piece.value, piece.slope, piece.terms, piece.quantile
        log_value, log_derivative = piece.log_value or value, piece.log_derivative or slope

        def run(first, last, z, q, out):
            for i in range(first, last):
                out[i, 0], out[i, 1] = value(z[i], q), slope(z[i], q)
                out[i, 2], out[i, 3] = log_value(z[i], q), log_derivative(z[i], q)
                out[i, 4], out[i, 5], out[i, 6] = terms(z[i], q)
                out[i, 7] = quantile(z[i], q) if 0 < z[i] < 1 else z[i]
            return 0

        return kernel(run)


def values_of(link, real, name, z):
    out = np.empty((len(z), 8), real)
    over_items(link, real)(0, len(z), z.numpy(), float(link.q), out)
    return torch.from_numpy(out).double()[:, COLUMNS[name]]


def grid(dtype):
    """Signed sizes from tiny to those at which exponentials underflow, and around the kinks of compact links."""
    sizes = torch.logspace(-6, 2.8, 200, dtype=torch.float64)
    near = torch.linspace(-0.5, 1.5, 81, dtype=torch.float64)
    return torch.cat([sizes, -sizes, near, torch.zeros(1, dtype=torch.float64)]).to(dtype)


def assert_relative(found, expected, z, dtype, condition):
    """To rounding of z and of log F; what nearly underflows, to the smallest number."""
    limits = torch.finfo(dtype)
    rounding = 2 + condition + z.double().square().clamp(max=2000) + expected.abs().log().abs().clamp(max=700)
    bound = 4 * limits.eps * rounding * expected.abs().clamp(min=limits.tiny) + 2 * limits.tiny
    assert ((found - expected).abs() <= bound).all()


@each_piece
def test_a_piece_agrees_with_its_link(link, real):
    z = grid(REALS[real])
    exact = z.double()
    names = {"value": link.value, "slope": link.slope}
    if link.has_kernel(log=True):
        names |= {"log_value": link.log_value, "log_derivative": link.log_derivative}
    for name, function in names.items():
        assert_relative(values_of(link, real, name, z), function(exact), z, z.dtype, link.condition)


@each_piece
def test_terms_add_up_to_the_sums_of_the_link(link, real):
    z = grid(REALS[real])
    above, tail, slope = values_of(link, real, "terms", z).unbind(-1)
    value = link.value(z.double())
    is_above = value >= 1 if link.compact else z > 0
    tails = torch.where(is_above, link.complement(z.double()), value)
    expected = is_above.sum().double(), tails.sum(), link.slope(z.double()).sum()
    for one, other in zip((above.sum().double(), tail.sum().double(), slope.sum().double()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=20 * torch.finfo(z.dtype).eps, atol=20 * torch.finfo(z.dtype).eps)


@each_link
def test_pieces_have_one_name_whoever_asks_first(link):
    """Names are part of the machine code on disk."""
    make = functools.partial(numba_link.__wrapped__, type(link), variant_of(link), np.float64)
    with specialised("somebody"):
        inside = make()
    assert inside.value.py_func.__qualname__ == make().value.py_func.__qualname__


@each_piece
def test_quantile_is_that_of_the_link(link, real):
    p = torch.tensor([1e-6, 0.1, 0.4, 0.5, 0.7, 0.999], dtype=REALS[real])
    found, expected = values_of(link, real, "quantile", p), link.inverse(p.double())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# ---- Rows that are left to torch


def left_of(x, k, scale, link, log=False):
    """How many rows the loops leave, forward and backward."""
    rows, counts = x.reshape(-1, x.shape[-1]), []
    run = numba_backend.over_rows

    def counted(*arguments):
        counts.append(run(*arguments))
        return counts[-1]

    numba_backend.over_rows = counted
    try:
        leaf, kind = rows.clone().requires_grad_(), "log_mask" if log else "mask"
        y, *_ = threshold.mask(rows, *numbers(rows, k, scale), *link.key, kind, "scale", True, True)
        _, anchor, offset = threshold.mask(rows, *numbers(rows, k, scale), *link.key, "mask", "scale", True, False)
        threshold.mask_derivative(leaf, numbers(rows, scale)[0], anchor, offset, y, *link.key, kind, True)
    finally:
        numba_backend.over_rows = run
    return counts


def numbers(x, *values):
    return [torch.full(x.shape[:1], float(value), dtype=torch.float64) for value in values]


@each_piece
def test_ordinary_rows_are_not_left(link, real):
    dtype = REALS[real]
    for n, k in ((2, 1), (10, 5), (100, 3), (1000, 500)):
        assert left_of(normal(20, n, dtype=dtype), k, 1.0, link) == [0, 0, 0]
    x = normal(20, 100, dtype=dtype)
    assert left_of(x + 1e4, 7, 0.5, link) == [0, 0, 0]
    assert left_of(x.masked_fill(normal(20, 100, seed=1) > 1, -torch.inf), 7, 1.0, link) == [0, 0, 0]
    assert left_of(x, 0, 1.0, link)[0] == left_of(x, 100, 1.0, link)[0] == 0


def rare_rows(dtype):
    x = normal(9, 40, dtype=dtype)
    x[0, :5], x[0, 5:] = 3000.0, -3000.0  # a gap in which all tails underflow
    x[1] *= 1e25 if dtype == torch.float32 else 1e200  # squares overflow
    x[2, 3] = torch.finfo(dtype).max
    x[3, :8] = -torch.inf
    x[4, 4] = torch.inf
    x[5] = 1.0
    x[6, :5], x[6, 5:] = 1.0, -1.0
    x[7] *= 1e-30
    return x


@each_piece
def test_rare_rows_are_those_of_the_torch_backend(link, real):
    dtype = REALS[real]
    rows, eps = rare_rows(dtype), torch.finfo(dtype).eps
    sizes, scales = torch.cartesian_prod(*torch.tensor([[5, 5.5, 1], [1, 0.01, 1e-20]]).double()).T
    x, sizes, scales = rows.repeat(9, 1), sizes.repeat_interleave(9), scales.repeat_interleave(9)
    results = []
    for name in ("numba", "torch"):
        with backend(name):
            leaves = [v.clone().requires_grad_() for v in (x, sizes, scales)]
            y = capped_simplex_map(*leaves, link=link)
            results.append([y, *torch.autograd.grad(y[:, ::3].sum(), leaves)])
    (y, *grads), (expected, *others) = results
    spread = 1 + rows[rows.isfinite()].abs().median() / scales.unsqueeze(-1)
    assert ((y - expected).abs() <= 64 * eps * (1 + spread * expected.abs())).all()
    assert all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(y.double().sum(-1), sizes, rtol=1e-6, atol=0)
    for grad, other in zip(grads[:2], others[:2], strict=True):
        torch.testing.assert_close(grad[scales == 1], other[scales == 1], rtol=2000 * eps, atol=2000 * eps)


def test_errors_name_the_row_of_the_whole_batch():
    x = normal(5, 6)
    x[3, 2] = torch.nan
    for k in (2, torch.tensor(2.0)):
        with pytest.raises(ValueError, match="`x` must not contain NaN, but row 3 of the flattened batch does"):
            sigmoid_topk(x, k)
    x[3] = -torch.inf
    with pytest.raises(ValueError, match=r"`k` must lie between .* \(row 3 of the batch\)"):
        sigmoid_topk(x, 2)


# ---- The short way of plain calls


@for_each("function", [sigmoid_topk, log_sigmoid_topk, log_lapsum_topk])
@for_each("dtype", REALS.values())
def test_the_short_way_is_the_long_one(function, dtype):
    x, grad = normal(3, 4, 20, dtype=dtype).requires_grad_(), normal(3, 4, 20, dtype=dtype, seed=1)
    short, long = function(x, 5, 0.5), function(x, torch.tensor(5.0), torch.tensor(0.5))
    assert torch.equal(short, long)
    assert torch.equal(*(torch.autograd.grad(y, x, grad, retain_graph=True)[0] for y in (short, long)))
    second = [
        torch.autograd.grad(torch.autograd.grad(y, x, grad, create_graph=True)[0].square().sum(), x)[0]
        for y in (short, long)
    ]
    torch.testing.assert_close(*second, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-6)


def test_the_short_way_gives_gradients_for_many_cotangents_at_once():
    x, grads = normal(3, 10).requires_grad_(), normal(5, 3, 10, seed=1)
    y = sigmoid_topk(x, 4)
    together = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)[0]
    for grad, found in zip(grads, together, strict=True):
        torch.testing.assert_close(found, torch.autograd.grad(y, x, grad, retain_graph=True)[0])


def test_the_short_way_of_views_leaves_and_parameters():
    x = torch.nn.Parameter(normal(6, 10))
    expected = sigmoid_topk(x.detach().clone(), 4)
    assert torch.equal(sigmoid_topk(x, 4), expected) and sigmoid_topk(x, 4).requires_grad
    assert torch.equal(sigmoid_topk(x[1:3], 4), expected[1:3])
    assert torch.equal(sigmoid_topk(x[:, None].expand(6, 2, 10), 4)[:, 1], expected)
    assert torch.equal(sigmoid_topk(x.detach().T.contiguous(), 4, dim=0), expected.T)
    with torch.no_grad():
        assert not sigmoid_topk(x, 4).requires_grad
    expanded = torch.autograd.grad(sigmoid_topk(x, 4).sum(-1)[0], x)[0]  # a cotangent of stride 0
    torch.testing.assert_close(expanded, torch.zeros_like(x), rtol=0, atol=1e-6)


@for_each("log", [False, True])
@for_each("dtype", REALS.values())
def test_results_do_not_depend_on_where_arrays_lie(dtype, log):
    """Close together, the sums of a row are to be taken in the same order as far apart."""
    x, cotangent, memory = normal(13, dtype=dtype), normal(13, seed=1, dtype=dtype), torch.empty(2000, dtype=dtype)
    anchor, offset, grad_k = torch.zeros(3, 1, dtype=torch.float64)
    loop = numba_backend._loops(LOGISTIC, x, "log_mask" if log else "mask").derivative
    size = x.itemsize
    found = []
    for apart in (13, 16, 24, 40, 1000):
        starts = [0, 13, 13 + apart]
        for start, values in zip(starts, (x, cotangent), strict=False):
            memory[start : start + 13] = values
        of_x, of_cotangent, of_result = (memory.data_ptr() + start * size for start in starts)
        place, results = (anchor.numpy(), offset.numpy()), (of_result, grad_k.numpy(), np.empty(0))
        loop(0, 1, 13, (of_x, False), np.ones(1), place, of_cotangent, results, np.ones(1, np.bool_), float(LOGISTIC.q))
        found.append((memory[starts[2] : starts[2] + 13].tolist(), grad_k.item()))
    assert found[1:] == found[:1] * 4
