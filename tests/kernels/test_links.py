"""Every link by itself: tails, logarithms and inverse against SciPy, the root finder's sums against plain ones."""

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch.autograd import gradcheck

from khot.kernels.links.base import Link
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from khot.kernels.links.clipped_power import ClippedPower, clipped_power
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC, Logistic
from khot.kernels.links.normal import NORMAL

SMOOTH = {"logistic": (Logistic(), scipy.stats.logistic), "laplace": (LAPLACE, scipy.stats.laplace)}
SMOOTH |= {"normal": (NORMAL, scipy.stats.norm)}
COMPACT = {f"clipped power {p:.4g}": (ClippedPower(p), scipy.stats.beta(1 / (p - 1), 1)) for p in (2, 1.7, 1.5, 4 / 3)}
ALL = SMOOTH | COMPACT


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
def test_values_and_slopes_of_plain_sums(link, law, dtype):
    z = 2 * torch.randn(3, 200, generator=torch.Generator().manual_seed(0), dtype=dtype)
    z[0, :2] = torch.tensor([torch.inf, -torch.inf])
    value, slope = link.value_and_slope(z)
    tolerance = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(value, link.value(z), rtol=tolerance, atol=0)
    torch.testing.assert_close(slope, link.slope(z), rtol=0, atol=tolerance)


def test_one_link_for_every_p():
    assert clipped_power(1.25) is clipped_power(1.25) and clipped_power(1.25).q == 4
    assert Link.find(*clipped_power(1.25).key) == clipped_power(1.25)
    assert ClippedPower(1 + 1 / 3).q == 3 and ClippedPower(1.7).q == pytest.approx(1 / 0.7)
