"""Order sampling in few large operations: accuracy, derivatives, batch shapes, and which rows are left to others."""

import pytest
import torch

from khot.kernels import backend
from khot.kernels.order_sampling import noises
from khot.laws import order_at_once, order_inclusion_at_once
from khot.laws import order_sampling as law
from tests.loops import for_each

NOISES = {"logistic": noises.LOGISTIC, "log_exponential": noises.LOG_EXPONENTIAL}
every_noise = pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
AS_ON_ACCELERATORS = dict.fromkeys(NOISES.values(), (2**26, 2**26))


@pytest.fixture(autouse=True)
def _torch_of_an_accelerator(monkeypatch):
    monkeypatch.setattr(order_inclusion_at_once, "MOST", AS_ON_ACCELERATORS)
    monkeypatch.setattr(order_at_once, "FARTHEST", (160.0, 160.0))
    with backend("torch"):
        yield


def rows(kind, n, k):
    theta = torch.randn(3, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {
        "flat": 0.01 * theta,
        "usual": theta,
        "wide": 12 * theta,
        "peaked": theta + 25 * (torch.arange(n) < k),
        "tied": theta.round(),
        "apart": torch.linspace(-40, 40, n, dtype=torch.float64) + 0.1 * theta,
    }[kind]


def values(theta, k):
    """The most probable values, and random ones."""
    generator = torch.Generator().manual_seed(1)
    noisy = torch.stack([theta + scale * torch.randn(theta.shape, generator=generator) for scale in (0.0, 2.0, 1e3)])
    return torch.zeros_like(noisy).scatter(-1, noisy.topk(k).indices, 1.0)


def found(noise, theta, k, value):
    """Both functions and their derivatives."""
    x = theta.clone().requires_grad_()
    log_prob, probs = law.log_prob(noise, x, k, value), law.inclusion_probabilities(noise, x, k)
    vector = torch.arange(theta.shape[-1], dtype=torch.float64).sin()
    of_log_prob = torch.autograd.grad(log_prob.sum(), x)[0]
    return log_prob, probs, of_log_prob, torch.autograd.grad((probs * vector).sum(), x)[0]


def refuse(monkeypatch):
    """Leaves all rows to the path that takes every row."""
    monkeypatch.setattr(order_at_once, "is_ordinary", lambda *_: False)
    monkeypatch.setattr(order_inclusion_at_once, "is_ordinary", lambda *_: False)


@every_noise
@pytest.mark.parametrize("kind", ["flat", "usual", "wide", "peaked", "tied", "apart"])
@for_each("n, k", [(2, 1), (9, 4), (60, 1), (60, 59), (100, 10)])
def test_agrees_with_loops(noise, kind, n, k):
    """All tolerances are those of the loops in numba; without numba, this compares with ranges found by trial."""
    theta = rows(kind, n, k)
    value = values(theta, k)
    assert order_at_once.log_prob(noise, theta, k, value) is not None
    assert order_inclusion_at_once.inclusion(noise, theta, k) is not None
    with backend("auto"):
        expected = found(noise, theta, torch.full((3,), k), value)
    torch.testing.assert_close(found(noise, theta, k, value), expected, rtol=1e-12, atol=1e-12)


@every_noise
def test_small_probabilities(noise):
    """Those of logistic noise have their own relative accuracy; all are at least 0."""
    theta = rows("apart", 9, 4)
    probs = order_inclusion_at_once.inclusion(noise, theta, 4)
    expected = law.inclusion_probabilities(noise, theta, torch.full((3,), 4))
    rtol = 1e-11 if noise is noises.LOGISTIC else 0
    torch.testing.assert_close(probs, expected, rtol=rtol, atol=0 if rtol else 1e-14)
    assert probs.min() >= 0


@every_noise
def test_long_rows(noise, monkeypatch):
    theta = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    at_once = found(noise, theta, 5, values(theta, 5))
    with monkeypatch.context() as patch:
        refuse(patch)
        expected = found(noise, theta, 5, values(theta, 5))
    torch.testing.assert_close(at_once, expected, rtol=1e-11, atol=1e-12)


@every_noise
@pytest.mark.parametrize(("of_theta", "of_value"), [((), (4, 2)), ((2, 3), (5, 2, 3)), ((2, 3), (3,))])
def test_batch_shapes(noise, of_theta, of_value, monkeypatch):
    theta = torch.randn(*of_theta, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()  # in float32
    value = torch.rand(*of_value, 6, generator=torch.Generator().manual_seed(1)).argsort(-1).lt(2).float()

    def both():
        results = law.log_prob(noise, theta, 2, value), law.inclusion_probabilities(noise, theta, 2)
        return *results, *(torch.autograd.grad(y.sin().sum(), theta)[0] for y in results)

    at_once = both()
    with monkeypatch.context() as patch:
        refuse(patch)
        expected = both()
    torch.testing.assert_close(at_once, expected, rtol=1e-6, atol=1e-12)


@every_noise
def test_higher_derivatives(noise):
    theta = rows("usual", 5, 2)[:2].requires_grad_()
    value = values(theta.detach(), 2)[-1]
    for function in (
        lambda t: order_at_once.log_prob(noise, t, 2, value),
        lambda t: order_inclusion_at_once.inclusion(noise, t, 2),
    ):
        assert torch.autograd.gradcheck(function, theta, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, theta)


@every_noise
def test_pieces_change_nothing(noise, monkeypatch):
    theta = rows("usual", 20, 4)
    whole = found(noise, theta, 4, values(theta, 4))
    monkeypatch.setattr(order_inclusion_at_once, "ELEMENTS", (1, 1))
    torch.testing.assert_close(found(noise, theta, 4, values(theta, 4)), whole, rtol=0, atol=1e-14)


@every_noise
@pytest.mark.parametrize("why", ["certain", "far", "per row", "none", "all"])
def test_other_rows(noise, why):
    """What is left to the path that takes every row."""
    theta, k = rows("usual", 5, 2), {"per row": torch.tensor([1, 2, 3]), "none": 0, "all": 5}.get(why, 2)
    theta[0, 0] = {"certain": torch.inf, "far": 1e4}.get(why, 0.0)
    assert order_at_once.log_prob(noise, theta, k, values(rows("usual", 5, 2), 2)) is None
    assert order_inclusion_at_once.inclusion(noise, theta, k) is None


@every_noise
def test_transforms_are_left_to_others(noise):
    theta = rows("usual", 5, 2)
    value = values(theta, 2)[-1]
    for function in (
        lambda t: law.log_prob(noise, t, 2, value[0]),
        lambda t: law.inclusion_probabilities(noise, t, 2),
    ):
        expected = torch.stack([function(t) for t in theta])
        torch.testing.assert_close(torch.func.vmap(function)(theta), expected, rtol=1e-12, atol=1e-12)
        x, tangent = theta[0], theta[1]
        forward = torch.func.jvp(function, (x,), (tangent,))[1]
        reverse = torch.autograd.functional.vjp(function, x, torch.ones_like(expected[0]))[1] @ tangent
        torch.testing.assert_close(forward.sum(), reverse, rtol=1e-11, atol=1e-11)


@every_noise
def test_kept_numbers_belong_to_no_mode(noise):
    """Numbers that were computed in inference mode serve calls with gradients."""
    n = 13  # of no other test
    theta = rows("usual", n, 2)
    with torch.inference_mode():
        found_there = law.inclusion_probabilities(noise, theta, 2), law.log_prob(noise, theta, 2, values(theta, 2))
    log_prob, probs, *_ = found(noise, theta, 2, values(theta, 2))
    assert torch.equal(probs, found_there[0]) and torch.equal(log_prob, found_there[1])
