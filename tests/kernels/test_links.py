"""Every link by itself: tails, logarithms and inverse against SciPy, the root finder's sums against plain ones."""

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch.autograd import gradcheck

from khot import capped_simplex_map
from khot.kernels.links.base import Link
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from khot.kernels.links.clipped_power import ClippedPower, clipped_power
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC, Logistic
from khot.kernels.links.normal import NORMAL
from khot.kernels.links.student_t import StudentT

SMOOTH = {"logistic": (Logistic(), scipy.stats.logistic), "laplace": (LAPLACE, scipy.stats.laplace)}
SMOOTH |= {"normal": (NORMAL, scipy.stats.norm)}
HEAVY = {"student_t_1": (StudentT(1), scipy.stats.cauchy)}  # SciPy's t rounds 1e-9 to 0 for df = 1
HEAVY |= {f"student_t_{df}": (StudentT(df), scipy.stats.t(df)) for df in (2, 4)}
COMPACT = {f"clipped power {p:.4g}": (ClippedPower(p), scipy.stats.beta(1 / (p - 1), 1)) for p in (2, 1.7, 1.5, 4 / 3)}
ALL = SMOOTH | HEAVY | COMPACT


def each(links):
    return pytest.mark.parametrize(("link", "law"), links.values(), ids=links)


def points(link):
    if link.compact:
        return torch.cat([torch.linspace(-0.7, 1.7, 41), torch.tensor([0.0, 1.0, 1e-9, 1 - 2**-20])]).double()
    return torch.cat([torch.linspace(-30, 30, 81), torch.tensor([0.0, 1e-9, -1e-9])]).double()


@each(ALL)
def test_value_complement_slope_and_inverse(link, law):
    z = points(link)
    for ours, theirs in (
        (link.value(z), law.cdf(z)),
        (link.complement(z), law.sf(z)),
        (link.slope(z), np.where((z == 0) | (z == 1), 0, law.pdf(z)) if link.compact else law.pdf(z)),
    ):
        torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=2e-12, atol=0)
    p = torch.tensor([1e-12, 1e-3, 0.3, 0.5, 0.9, 1 - 1e-6]).double()
    quantile = link.inverse(p)  # scipy 1.12 loses digits there
    tail = torch.where(p <= 0.5, link.value(quantile), link.complement(quantile))
    torch.testing.assert_close(tail, torch.minimum(p, 1 - p), rtol=1e-9, atol=0)


@each(SMOOTH | COMPACT)
def test_moments_are_where_the_first_guess_starts(link, law):
    assert link.moments == (pytest.approx(law.mean()), pytest.approx(law.var()))
    assert link.start() == link.moments


@each(ALL)
def test_a_start_without_moments_has_the_quantiles_of_a_normal_law(link, law, monkeypatch):
    monkeypatch.setattr(type(link), "moments", None)
    centre, spread = (v.item() for v in link.start())
    lower, median, upper = law.ppf(scipy.stats.norm.cdf([-1, 0, 1]))
    assert centre == pytest.approx(median, abs=1e-12) and spread == pytest.approx(((upper - lower) / 2) ** 2)


def test_capped_exponential():
    z = torch.tensor([-700.0, -3.0, -1e-9, 0.0, 2.0]).double()
    law, link = scipy.stats.expon(), CAPPED_EXPONENTIAL  # of -z
    torch.testing.assert_close(link.value(z), torch.from_numpy(law.sf(-z)), rtol=2e-12, atol=0)
    torch.testing.assert_close(link.complement(z), torch.from_numpy(law.cdf(-z)), rtol=2e-12, atol=0)
    torch.testing.assert_close(link.slope(z), torch.from_numpy(np.where(z < 0, law.pdf(-z), 0)), rtol=2e-12, atol=0)
    torch.testing.assert_close(link.log_value(z), z.clamp(max=0))
    torch.testing.assert_close(link.value(link.inverse(p := torch.tensor([1e-300, 0.2]).double())), p)
    assert link.moments == (-law.mean(), law.var())


def log_laplace(z):
    return np.where(z <= 0, np.minimum(z, 0) - np.log(2), np.log1p(-0.5 * np.exp(-np.maximum(z, 0))))


LOGARITHMS = {  # of F and of F', where SciPy's distributions underflow
    "logistic": (LOGISTIC, scipy.special.log_expit, lambda z: scipy.special.log_expit(z) + scipy.special.log_expit(-z)),
    "laplace": (LAPLACE, log_laplace, lambda z: -np.abs(z) - np.log(2)),
    "normal": (NORMAL, scipy.special.log_ndtr, scipy.stats.norm.logpdf),
}


@pytest.mark.parametrize(("link", "log_cdf", "log_pdf"), LOGARITHMS.values(), ids=LOGARITHMS)
def test_logarithms_where_all_underflows(link, log_cdf, log_pdf):
    z = torch.tensor([-900.0, -800.0, -799.5, -3.0, 0.2, 4.0, 820.0], dtype=torch.float64)
    torch.testing.assert_close(link.log_value(z), torch.from_numpy(log_cdf(z.numpy())), rtol=1e-12, atol=0)
    torch.testing.assert_close(link.log_complement(z), torch.from_numpy(log_cdf(-z.numpy())), rtol=1e-12, atol=0)
    torch.testing.assert_close(link.log_slope(z), torch.from_numpy(log_pdf(z.numpy())), rtol=1e-12, atol=1e-12)
    decay = link.log_decay(z[:1], torch.tensor([-3.0, 0.0]).double())
    expected = log_pdf(np.array([-903.0, -900.0])) - log_pdf(np.array([-900.0]))
    torch.testing.assert_close(decay, torch.from_numpy(expected), rtol=1e-10, atol=0)
    hazard = log_pdf(z.numpy()) - np.where(z > 0, log_cdf(-z.numpy()), log_cdf(z.numpy()))
    torch.testing.assert_close(link.log_hazard(z)[[0, 6]], torch.from_numpy(hazard)[[0, 6]], rtol=1e-9, atol=1e-9)


@each(ALL)
def test_derivatives(link, law):
    z = points(link)[:40]
    z = z[(z != 0) & (z != 1)].requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(link.value(z).sum(), z)[0], link.slope(z).detach(), rtol=1e-9, atol=0
    )
    assert gradcheck(link.slope, z)


@each(ALL | {"capped exponential": (CAPPED_EXPONENTIAL, None)})
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_tails_and_slopes(link, law, dtype):
    z = 2 * torch.randn(3, 200, generator=torch.Generator().manual_seed(0), dtype=dtype)
    z[0, :2] = torch.tensor([torch.inf, -torch.inf])
    tail, slope = link.tail_and_slope(z)
    tolerance = {"rtol": 100 * torch.finfo(dtype).eps, "atol": 0}
    torch.testing.assert_close(tail, torch.where(z > 0, link.complement(z), link.value(z)), **tolerance)
    torch.testing.assert_close(slope, link.slope(z), **tolerance)


def test_one_link_for_every_p():
    assert clipped_power(1.25) is clipped_power(1.25) and clipped_power(1.25).q == 4
    assert Link.find(clipped_power(1.25).key) == clipped_power(1.25)
    assert ClippedPower(1 + 1 / 3).q == 3 and ClippedPower(1.7).q == pytest.approx(1 / 0.7)


def tail_of_t(df, a):
    """F(-a) by the angle whose tangent is sqrt(df) / a, its logarithm, and that of the density."""
    angle = np.arctan2(np.sqrt(df), a)
    s = np.sin(angle / 2)
    tail = {1: angle / np.pi, 2: s**2, 4: s**4 * (3 - 2 * s**2)}[df]
    log_tail = {1: np.log(angle / np.pi), 2: 2 * np.log(s), 4: 4 * np.log(s) + np.log(3 - 2 * s**2)}[df]
    density = np.log(scipy.stats.t(df).pdf(0)) + (df + 1) * np.log(np.sin(angle))
    return tail, log_tail, density


@each(HEAVY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_heavy_tails_keep_their_digits(link, law, dtype):
    """Down to where they underflow, and in logarithms beyond."""
    a = torch.tensor([0.0, 1e-20, 1e-3, 0.5, 3.0, 1e4, 1e8, 1e15, 1e30, 1e37], dtype=dtype)
    tail, log_tail, log_density = (torch.from_numpy(v) for v in tail_of_t(link.df, a.double().numpy()))
    limits = torch.finfo(dtype)
    close = {"rtol": 20 * limits.eps, "atol": limits.tiny, "check_dtype": False}
    for ours, expected in (
        (link.value(-a), tail),
        (link.complement(a), tail),
        (link.value(a), 1 - tail),
        (link.complement(-a), 1 - tail),
        (link.slope(a), log_density.exp()),
        (link.log_value(-a), log_tail),
        (link.log_complement(a), log_tail),
        (link.log_value(a), torch.log1p(-tail)),
        (link.log_slope(-a), log_density),
        (link.log_derivative(-a), (log_density - log_tail).exp()),
        (link.log_derivative(a), log_density.exp() / (1 - tail)),
    ):
        assert ours.dtype == dtype and ours.isfinite().all()
        # Exponentials of logarithms in the expectations lose as many digits as these have in front of the point.
        tolerance = close | {"rtol": max(close["rtol"], 1e-13)}
        torch.testing.assert_close(ours.double(), expected, **tolerance)
    infinite = torch.tensor([-torch.inf, torch.inf], dtype=dtype)
    assert link.value(infinite).tolist() == [0, 1] and link.complement(infinite).tolist() == [1, 0]
    assert link.log_value(infinite).tolist() == [-torch.inf, 0] and link.log_derivative(infinite).tolist() == [0, 0]
    assert link.slope(infinite).tolist() == [0, 0] and link.log_slope(infinite).tolist() == [-torch.inf, -torch.inf]


@each(HEAVY)
def test_inverse_of_small_and_of_middling_probabilities(link, law):
    p = torch.tensor([1e-300, 1e-100, 1e-16, 1e-5, 0.2, 0.4999, 0.5, 0.5001, 0.9, 1 - 2**-50], dtype=torch.float64)
    z = link.inverse(p)
    torch.testing.assert_close(link.value(z), p, rtol=1e-14, atol=0)
    torch.testing.assert_close(link.slope_at(p), link.slope(z), rtol=1e-13, atol=0)
    p.requires_grad_()
    slope = torch.autograd.grad(link.inverse(p).sum(), p)[0]
    torch.testing.assert_close((slope * link.slope(z))[1:], torch.ones(9).double(), rtol=1e-9, atol=0)


@each(HEAVY)
def test_derivatives_at_the_median(link, law):
    z = torch.tensor([0.0, -0.3, 0.7], dtype=torch.float64, requires_grad=True)
    for function, derivative in ((link.value, link.slope), (link.log_value, link.log_derivative)):
        torch.testing.assert_close(torch.autograd.grad(function(z).sum(), z)[0], derivative(z).detach())
        assert gradcheck(derivative, z)


@pytest.mark.parametrize("df", [0, 3, 5, -1])
def test_other_degrees_of_freedom_are_refused(df):
    with pytest.raises(ValueError, match=f"`df` must be 1, 2 or 4, for which F is elementary, but got {df}"):
        StudentT(df)
    for wrong in (float(df), True, "2", None, torch.tensor(2)):
        with pytest.raises(TypeError, match="`df` must be an int, but got"):
            StudentT(wrong)


class RaisedCosine(Link):
    """A compact link with only what a user must define."""

    compact = True
    reach = 1.0

    def value(self, z):
        return torch.sin(0.5 * torch.pi * z.clamp(0, 1)).square()

    def complement(self, z):
        return torch.cos(0.5 * torch.pi * z.clamp(0, 1)).square() * (z < 1)

    def slope(self, z):
        return 0.5 * torch.pi * torch.sin(torch.pi * z.clamp(0, 1)) * ((z > 0) & (z < 1))

    def inverse(self, p):
        return torch.asin(p.sqrt()) * (2 / torch.pi)


@pytest.mark.parametrize(
    "scale", [pytest.param(0.05, marks=pytest.mark.slow), 1.0, pytest.param(20.0, marks=pytest.mark.slow)]
)
def test_a_compact_link_of_a_user(scale):
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    link = RaisedCosine()
    for k in (0.2, 7.0, 29.5):
        y = capped_simplex_map(x, k, scale, link=link)
        torch.testing.assert_close(y.sum(-1), torch.full((4,), k, dtype=torch.float64), rtol=1e-13, atol=1e-13)
        assert gradcheck(lambda x, k=k: capped_simplex_map(x, k, scale, link=link), x[:1, :6] if k < 6 else x[:1])
