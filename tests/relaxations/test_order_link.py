"""Soft ranks, sorting and permutations with any link: those of Laplace's law by the fast way, others by definition."""

import pytest
import torch
from torch.func import hessian, vmap

from khot import Logistic, StudentT, soft_permutation, soft_rank, soft_sort
from khot.kernels.links.laplace import Laplace
from tests.inputs import normal
from tests.maps import OwnLogistic

MAPS = [soft_rank, soft_sort, soft_permutation]
LINKS = {"logistic": Logistic(), "cauchy": StudentT(1), "student_t": StudentT(2)}
SCALES = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
every_map = pytest.mark.parametrize("order_map", MAPS, ids=lambda order_map: order_map.__name__)
every_link = pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)


def with_excluded():
    x = normal(3, 6)
    x[0, [1, 3]] = x[1] = x[2, 0] = -torch.inf
    return x


@every_map
@pytest.mark.parametrize("descending", [False, True])
def test_laplace(order_map, descending):
    for x in (normal(3, 6), with_excluded()):
        found = order_map(x, SCALES, descending, link=Laplace())
        torch.testing.assert_close(found, order_map(x, SCALES, descending), rtol=1e-10, atol=1e-10)
        found = order_map(x, 0.7, descending, link=Laplace())
        torch.testing.assert_close(found, order_map(x, 0.7, descending), rtol=1e-10, atol=1e-10)


@every_link
def test_definitions(link):
    x, places = normal(3, 7), torch.arange(1, 8, dtype=torch.float64)

    def count_below(t):
        return link.value((t.unsqueeze(-1) - x.unsqueeze(-2)) / SCALES[:, None, None]).sum(-1)

    torch.testing.assert_close(soft_rank(x, SCALES, link=link), count_below(x) + 0.5)
    torch.testing.assert_close(count_below(soft_sort(x, SCALES, link=link)), (places - 0.5).expand(3, 7))
    matrix, ones = soft_permutation(x, SCALES, link=link), torch.ones(3, 7, dtype=torch.float64)
    assert (matrix >= 0).all()
    for axis in (-1, -2):
        torch.testing.assert_close(matrix.sum(axis), ones)
    for descending in (False, True):  # column by column the differences of masks
        tiny = soft_permutation(x, 1e-7, descending, link=link)
        torch.testing.assert_close(tiny, soft_permutation(x, 1e-7, descending), rtol=0, atol=1e-5)
        torch.testing.assert_close(soft_sort(x, SCALES, descending=True, link=link), -soft_sort(-x, SCALES, link=link))


@every_link
@pytest.mark.parametrize("n", [8, 120, 500])
@pytest.mark.parametrize("scale", [0.1, 1e3])
@pytest.mark.usefixtures("cpu_backend")
def test_small_entries_have_all_their_digits(link, n, scale):
    """The entries, about 1 / n, are differences of masks with entries up to 1."""
    x = normal(2, n).float()
    x[1] = 0.3
    found, exact = (soft_permutation(v, scale, link=link).double() for v in (x, x.double()))
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, exact, rtol=eps, atol=1e-12)
    for axis in (-1, -2):
        torch.testing.assert_close(found.sum(axis), torch.ones(2, n).double(), rtol=2 * eps, atol=0)


@pytest.mark.slow
@every_link
@every_map
def test_derivatives(order_map, link):
    for x in (normal(2, 4), with_excluded()[::2, :4]):
        possible = x > -torch.inf

        def of_possible(entries, scale, x=x, possible=possible):
            y = order_map(x.masked_scatter(possible, entries), scale, link=link)
            return torch.where(y == -torch.inf, 0.0, y)

        inputs = x[possible].clone().requires_grad_(), SCALES[1:].clone().requires_grad_()
        assert torch.autograd.gradcheck(of_possible, inputs) and torch.autograd.gradgradcheck(of_possible, inputs)
    row = with_excluded()[0]

    def loss(x):
        y = order_map(x, 0.7, link=link)
        return torch.where(y == -torch.inf, 0.0, y).square().sum()

    curvature = hessian(loss)(row)
    assert curvature.isfinite().all() and (curvature[row == -torch.inf] == 0).all()


@every_map
def test_transforms_dims_and_dtypes(order_map):
    x, link = with_excluded(), StudentT(2)
    expected = order_map(x, 0.7, link=link)
    torch.testing.assert_close(vmap(lambda x: order_map(x, 0.7, link=link))(x), expected)
    other = order_map(x.mT, 0.7, dim=0, link=link)
    torch.testing.assert_close(other if order_map is soft_permutation else other.mT, expected)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        low, exact = order_map(x.to(dtype), link=link), order_map(x.to(dtype).double(), link=link)
        assert low.dtype == dtype
        torch.testing.assert_close(low, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for shape in ((2, 0), (0, 3), (1, 1)):
        assert order_map(torch.zeros(shape), link=link).shape == order_map(torch.zeros(shape)).shape


@pytest.mark.slow
@pytest.mark.needs_torch("2.8")  # functools.partial in compiled functions
@every_map
def test_compile(order_map):
    x, link = with_excluded(), StudentT(2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: order_map(x, 0.7, link=link), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), order_map(x, 0.7, link=link))


@every_map
@pytest.mark.parametrize("far", [1e3, 1e300, 1.7e308])  # of the last, some are infinitely many scales apart
def test_far_entries(order_map, far):
    x = torch.tensor([far, -far, 0.9 * far, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(1e-3, dtype=torch.float64, requires_grad=True)
    for link in (*LINKS.values(), OwnLogistic()):
        y = order_map(x, scale, link=link)
        grads = torch.autograd.grad((y * normal(*y.shape, seed=1)).sum(), (x, scale))
        assert y.isfinite().all() and all(grad.isfinite().all() for grad in grads)


@every_map
def test_errors(order_map):
    for wrong in (torch.sigmoid, Logistic, "logistic"):
        with pytest.raises(TypeError, match="`link` must be a khot.relaxations.Link or None"):
            order_map(normal(3), link=wrong)
    with pytest.raises(ValueError, match="`x` must be finite or -inf"):
        order_map(normal(3) / 0, link=Logistic())
