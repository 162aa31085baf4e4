"""Logits of given inclusion probabilities, and systems with the covariance, in both CPU backends."""

import pytest
import torch
from torch import Tensor

from khot import sigmoid_topk
from khot.kernels import backend
from khot.kernels.count import covariance_inverse, inclusion_inverse
from khot.kernels.operators.platforms import HAS_NUMBA
from khot.kernels.threshold import solve_threshold
from khot.laws import conditional_poisson as law
from khot.laws.inverse import solve_logits
from tests.inputs import normal

needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
BACKENDS = ["torch", pytest.param("numba", marks=[needs_numba, pytest.mark.slow])]
INF = float("inf")


def relaxed(n: int, k: int, scale: float, rows: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, log-odds of those that sum to k exactly, and sizes; the last row has nearly certain units."""
    x = scale * normal(rows, n, seed=n + k)
    x[-1] *= 8
    probs = sigmoid_topk(x, k)
    log_odds = probs.logit()
    return probs, log_odds - solve_threshold(log_odds, k)[..., None], torch.full((rows,), k)


@pytest.mark.slow
@needs_numba
@pytest.mark.parametrize("n, k", [(2, 1), (3, 2), (6, 1), (6, 3), (6, 5), (9, 4), (34, 1), (34, 30)])
def test_loops_solve_what_they_say(n: int, k: int) -> None:
    _, log_odds, sizes = (x[:-1] for x in relaxed(n, k, 1.0, rows=5))
    b = normal(4, n, seed=1)
    if 1 < k < n - 1:
        log_odds[0, 1], log_odds[1, 2] = -INF, INF
        log_odds = log_odds - solve_threshold(log_odds, sizes)[..., None]
    logits, _, errors = inclusion_inverse.loop(log_odds + 0.1, sizes, 1e-14)  # a constant does not matter
    assert (errors <= 1e-13).all()
    with backend("torch"):
        torch.testing.assert_close(law.inclusion_log_odds(logits, sizes), log_odds, rtol=1e-12, atol=1e-12)
        covariance = law.covariance(logits, sizes)
    free, variance = logits.isfinite(), covariance.diagonal(dim1=-2, dim2=-1)
    b = b.masked_fill(~free, 0.0)
    # What b has of a sum is taken off evenly, or by variances.
    for rounding, share in ((0.0, free.double()), (INF, variance)):
        v = covariance_inverse.loop(logits, b, sizes, 1e-13, rounding)
        right = b - share * (b.sum(-1, keepdim=True) / share.sum(-1, keepdim=True))
        torch.testing.assert_close((covariance @ v[..., None]).squeeze(-1), right, rtol=1e-10, atol=1e-10)
        assert (v[~free] == 0).all() and (variance * v).sum(-1).abs().max() < 1e-10


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("n, k", [(2, 1), (10, 1), (10, 5), (32, 30), (33, 7), (100, 50), (400, 3)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_solutions_are_as_exact_as_the_probabilities(name: str, n: int, k: int, scale: float) -> None:
    probs, log_odds, sizes = relaxed(n, k, scale)
    with backend(name):
        logits = solve_logits(probs, k)
        found = law.inclusion_log_odds(logits, sizes)
    size = 1 + logits.masked_fill(logits.isinf(), 0.0).abs().amax(-1, keepdim=True)
    assert torch.equal(found.isinf(), logits.isinf())
    assert ((found - log_odds)[found.isfinite()].abs() <= (1e-13 * size).expand_as(found)[found.isfinite()]).all()
    assert logits.masked_fill(logits.isinf(), 0.0).mean(-1).abs().max() <= 1e-13 * size.max()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "n, k, scale", [(2, 1, 1.0), (10, 5, 1.0), (10, 5, 6.0), (32, 2, 3.0), (40, 20, 3.0), (200, 9, 2.0)]
)
def test_gradients_solve_the_system(name: str, n: int, k: int, scale: float) -> None:
    probs, _, _ = relaxed(n, k, scale)
    probs, g = probs[:-1].requires_grad_(), normal(19, n, seed=4)
    with backend(name):
        logits = solve_logits(probs, k)
        (v,) = torch.autograd.grad(logits, probs, g)
    back = law.covariance(logits.detach(), k) @ v[..., None]
    terms = law.covariance(logits.detach(), k).abs() @ v.abs()[..., None]
    assert ((back.squeeze(-1) - g + g.mean(-1, keepdim=True)).abs() <= 1e-12 * (1 + terms.squeeze(-1))).all()
    parts = (probs * (1 - probs)).detach() * v
    assert (parts.sum(-1).abs() <= 1e-12 * parts.abs().sum(-1)).all()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("n", [8, 60])
def test_units_that_are_certain_or_nearly_so(name: str, n: int) -> None:
    """Rows of all kinds in one batch, sizes row by row; what a kernel leaves is done by the others' way."""
    x = normal(6, n, seed=5)
    x[0, 0], x[0, 1], x[1] = INF, -INF, 40 * x[1]
    x[2], x[3, : n // 2] = 300 * x[2], x[3, : n // 2] - 1e3
    k = torch.tensor([2, 3, n // 2, n // 2, 1, n - 1])
    probs = sigmoid_topk(x, k)
    with backend(name):
        probs.requires_grad_()
        logits = solve_logits(probs, k)
        (gradient,) = torch.autograd.grad(logits.masked_fill(logits.isinf(), 0.0).sum(), probs)
    mean = law.inclusion_probabilities(logits.detach(), k)
    torch.testing.assert_close(mean, probs.detach(), rtol=1e-11, atol=1e-13)
    assert logits[0, 0] == INF and logits[0, 1] == -INF and gradient.isfinite().all()


@pytest.mark.slow
@needs_numba
def test_backends_agree_on_rare_units() -> None:
    """Gradients of units whose probabilities are many orders of magnitude apart, each to its own relative accuracy."""
    for n in (12, 80):
        x = torch.cat((normal(6, seed=6), normal(n - 6, seed=7) - torch.linspace(0, 30, n - 6)))
        probs = sigmoid_topk(x, 3).requires_grad_()
        found = []
        for name in ("torch", "numba"):
            with backend(name):
                logits = solve_logits(probs, 3)
                found.append(torch.autograd.grad(logits[::2].sum(), probs)[0])
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@needs_numba
@pytest.mark.parametrize("n, k, rows", [(12, 5, 200), (90, 20, 60)])
def test_results_do_not_depend_on_the_number_of_threads(n: int, k: int, rows: int) -> None:
    probs, g, found = sigmoid_topk(normal(rows, n), k).requires_grad_(), normal(rows, n, seed=1), []
    threads = torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        logits = solve_logits(probs, k)
        found.append((logits.detach(), *torch.autograd.grad(logits, probs, g)))
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0]) and torch.equal(other[1], found[0][1])


@pytest.mark.slow
@needs_numba
@pytest.mark.parametrize("n", [5, 20])
def test_rows_without_a_choice_and_rows_with_nan(n: int) -> None:
    """In loops; without them, what asks for logits looks at these rows first."""
    log_odds, k = normal(3, n), torch.tensor([0, n, 2])
    log_odds[2, 1] = torch.nan
    with backend("numba"):
        logits, _, errors = inclusion_inverse.loop(log_odds, k, 1e-14)
    assert (logits[0] == -INF).all() and (logits[1] == INF).all()
    assert errors[0] == 0 and errors[1] == 0 and errors[2].isnan()


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_not_a_number_is_not_lost(name: str) -> None:
    """A cotangent of NaN or infinity gives no finite gradient in its row, and does not touch other rows."""
    probs, g = relaxed(9, 4, 1.0, rows=4)[0].requires_grad_(), normal(4, 9, seed=1)
    g[1, 2], g[2, 0] = torch.nan, INF
    with backend(name):
        (gradient,) = torch.autograd.grad(solve_logits(probs, 4), probs, g)
    assert gradient.isfinite().all(-1).tolist() == [True, False, False, True]
    assert gradient[1].isnan().all()
