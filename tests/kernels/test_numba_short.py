"""Masks of short rows in numba and their derivatives, which are computed side by side.

Rows do not see each other, and few are left to the loop over rows.
"""

import math

import numpy as np
import pytest
import torch

from khot.kernels.links.base import Link
from khot.kernels.links.clipped_power import clipped_power
from tests.inputs import normal
from tests.kernels.kernel_links import LINKS

pytest.importorskip("numba", reason="numba is not installed")

from khot.kernels.cpu.short_rows import LANES
from khot.kernels.links.base_numba import variant_of
from khot.kernels.threshold import exact, numba_backend
from khot.kernels.threshold.numba_short import SHORT

CASES = [(link, "mask") for link in (*LINKS, clipped_power(1.1))]
CASES += [(link, "log_mask") for link in LINKS if link.has_kernel(log=True)]
each_case = pytest.mark.parametrize(
    ("link", "kind"), CASES, ids=lambda value: variant_of(value) if isinstance(value, Link) else value
)
SIZES = (1, 2, 10, 17, SHORT)


def rows_of(n, rows=3 * LANES + 5):
    """Rows of many kinds: wide and narrow, with ties, excluded items and gaps of hundreds of scales."""
    x, softness = normal(rows, n, dtype=torch.float32), 10.0 ** (torch.arange(rows) % 5 - 3).double()
    x[1::5] = x[1::5].round()
    x[2::5] *= 100
    x[3::5] = x[3::5].masked_fill(normal(len(x[3::5]), n, seed=1) > 1, -torch.inf)
    finite = (x > -torch.inf).sum(-1)
    k = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * finite
    k = torch.where(torch.arange(rows) % 3 > 0, k.round(), k)
    x[-1], k[-1], softness[-1] = normal(n, seed=3), 0.3, 1.0  # in the block that is filled up; scaled to its small sum
    return x, k, softness


def solved(link, kind, x, k, softness):
    return numba_backend.mask(x, k, softness, *link.key, kind, "softness", True, True)


def derivatives(link, kind, x, softness, at, grad):
    """dL/dx, dL/dk, dL/ds, and which rows are computed rather than left to the other loop."""
    loop, left = numba_backend._loops(link, x, kind).short_derivative, np.ones(len(x), np.bool_)
    found = torch.full_like(x, math.nan), *torch.full((2, len(x)), math.nan, dtype=torch.float64)
    given = (x.numpy().ravel(), False), softness.numpy(), tuple(v.numpy() for v in at), grad.numpy().ravel()
    count = loop(0, *x.shape, *given, (found[0].numpy().ravel(), found[1].numpy(), found[2].numpy()), left, link.q)
    assert count == left.sum()
    return *found, torch.from_numpy(~left)


@each_case
def test_a_row_does_not_depend_on_its_neighbours_or_its_place(link, kind):
    """Bit by bit, in any order, after other rows, and with items that are excluded."""
    for n in SIZES:
        x, k, softness = rows_of(n)
        found, grad = solved(link, kind, x, k, softness), normal(*x.shape, dtype=torch.float32, seed=3)
        moves = derivatives(link, kind, x, softness, found[1:], grad)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        shifted = torch.cat([order[:7], torch.arange(len(x))])
        for which, start in ((order, 0), (shifted, 7), (torch.arange(LANES), 0)):
            again = solved(link, kind, x[which], k[which], softness[which])
            for one, other in zip(again, found, strict=True):
                assert torch.equal(one[start:], other[which[start:]])
            *again, done = derivatives(link, kind, x[which], softness[which], again[1:], grad[which])
            assert torch.equal(done[start:], moves[-1][which[start:]])
            for one, other in zip(again, moves, strict=False):
                assert torch.equal(one[start:][done[start:]], other[which[start:]][done[start:]])
        if n < SHORT:
            wider = torch.nn.functional.pad(x, (1, SHORT - n - 1), value=-torch.inf)
            y, *at = solved(link, kind, wider, k, softness)
            assert torch.equal(y[:, 1 : n + 1], found[0])
            assert all(map(torch.equal, at, found[1:]))
            pushes = torch.nn.functional.pad(grad, (1, SHORT - n - 1), value=1.0)
            grad_x, *others, done = derivatives(link, kind, wider, softness, at, pushes)
            assert torch.equal(done, moves[-1])
            for one, other in zip((grad_x[:, 1 : n + 1], *others), moves, strict=False):
                assert torch.equal(one[done], other[done])


@each_case
def test_values_are_those_of_double_precision(link, kind):
    eps = np.finfo(np.float32).eps
    for n in SIZES:
        x, k, softness = rows_of(n)
        y, *_ = solved(link, kind, x, k, softness)
        expected, *_ = exact.mask(x.double(), k, softness, *link.key, kind, "softness", True, True)
        size = 1 + torch.where(expected.isfinite(), expected.abs(), 0.0) if kind == "log_mask" else max(1.0, link.q)
        wrong = (y.double() - expected).abs() > 64 * eps * size
        assert not bool((wrong & (y != expected)).any()), (n, y[wrong.any(-1)], expected[wrong.any(-1)])


@pytest.mark.parametrize("link", [link for link, kind in CASES if kind == "mask"], ids=variant_of)
def test_small_entries_beside_a_large_one_count(link):
    """Added one by one to a number near 1, each of them would be rounded up, or away."""
    far = torch.linspace(1, 40, 40 * LANES)[:, None]
    one = torch.ones(1, dtype=torch.float64)
    y = solved(link, "mask", torch.cat((torch.zeros_like(far), -far.expand(-1, SHORT - 1)), -1), one, one)[0]
    assert (y.double().sum(-1) - 1).abs().max() < 7e-7


@each_case
def test_derivatives_are_those_of_double_precision(link, kind):
    """Of rows that are not left: up to the rounding of z, by which slopes far out change in proportion."""
    eps = np.finfo(np.float32).eps
    for n in SIZES:
        x, k, softness = rows_of(n)
        grad, (_, *at) = normal(*x.shape, dtype=torch.float32, seed=3), solved(link, kind, x, k, softness)
        *found, done = derivatives(link, kind, x, softness, at, grad)
        assert n == 1 or done.sum() > 5
        expected = exact.mask_derivative(x.double(), softness, *at, grad.double(), *link.key, kind, True)
        z = ((x.double() - at[0].unsqueeze(-1)) / softness.unsqueeze(-1) - at[1].unsqueeze(-1)).nan_to_num(0, 0, 0)
        least = 1e-30 / softness
        if link.compact:  # near kinks slopes change by more, and at a cap they end
            done &= ((z - 1).abs() > 16 * eps).all(-1)
            least += eps * link.q**2 * (z.abs().amax(-1) + at[1].abs()) * grad.abs().amax(-1) / softness
        of_scale = (z * expected[0]).abs().sum(-1) + expected[2].abs()
        sizes = expected[0].abs().amax(-1), grad.abs().sum(-1) + expected[1].abs(), of_scale
        for one, other, size in zip(found, expected, sizes, strict=True):
            wrong = (one - other).abs().view(len(x), -1).amax(-1) > 256 * eps * max(1.0, link.q) * size + least
            assert not bool((wrong & done).any()), (n, one[wrong & done], other[wrong & done])


@each_case
def test_few_rows_are_left_to_the_other_loop(link, kind, monkeypatch):
    left, run = [], numba_backend.over_rows

    def counted(loop, rows, *arguments):
        left.append(run(loop, rows, *arguments))
        return left[-1]

    monkeypatch.setattr(numba_backend, "over_rows", counted)
    for n in (10, 17, SHORT):
        x, k, softness = rows_of(n, rows=600)
        solved(link, kind, x, k, softness)
        assert left[0] <= 6
        left.clear()


def test_rows_without_a_threshold_are_left():
    link, x = LINKS[0], normal(LANES, 5, dtype=torch.float32)
    k, softness = (torch.ones(LANES, dtype=torch.float64) for _ in range(2))
    loop = numba_backend._loops(link, x, "mask").short_mask
    x[1, 3], x[2, :2], x[3] = torch.nan, torch.inf, -torch.inf
    k[4], k[5], k[6], softness[7], softness[8] = -0.5, 5.5, math.nan, 1e-30, math.inf
    x[9, 1] = torch.inf
    left, (anchor, offset) = np.zeros(LANES, np.bool_), np.zeros((2, LANES))
    y = np.empty(x.shape, np.float32)
    given = (x.numpy().ravel(), False), k.numpy(), softness.numpy(), y.ravel(), (anchor, offset), left
    assert loop(0, LANES, 5, *given, link.numbers) == left.sum()
    assert left.nonzero()[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
