"""Links of a user's own that are compact, with other ends than 0 and 1, against bisection."""

import pytest
import torch

from khot import Link, Logistic, capped_simplex_map
from tests.inputs import normal
from tests.loops import for_each


class Uniform(Link):
    """The distribution function of the uniform law between -1 and 1."""

    compact, reach = True, 2.0

    def value(self, z):
        return (0.5 * (z + 1)).clamp(0, 1)

    def complement(self, z):
        return (0.5 * (1 - z)).clamp(0, 1)

    def slope(self, z):
        return 0.5 * (z.abs() < 1).to(z.dtype)

    def inverse(self, p):
        return 2 * p - 1


class Smoothstep(Link):
    """A cubic from 0 at 0 to 1 at 5."""

    compact, reach, condition = True, 6.0, 3.0

    def value(self, z):
        u = (z / 5).clamp(0, 1)
        return u * u * (3 - 2 * u)

    def complement(self, z):
        return self.value(5 - z)

    def slope(self, z):
        u = (z / 5).clamp(0, 1)
        return 6 * u * (1 - u) / 5

    def inverse(self, p):
        return 5 * (0.5 - torch.sin(torch.asin(1 - 2 * p) / 3))


def by_bisection(x, k, scale, link):
    low, high = x.amin(-1) - 10 * scale, x.amax(-1) + 10 * scale
    for _ in range(200):
        t = 0.5 * (low + high)
        above = link.value((x - t.unsqueeze(-1)) / scale).sum(-1) > k
        low, high = torch.where(above, t, low), torch.where(above, high, t)
    return link.value((x - t.unsqueeze(-1)) / scale)


@for_each("link", [Uniform(), Smoothstep()])
@for_each("scale", [0.01, 0.3, 1.0, 10.0])
def test_values_at_any_sum(link, scale):
    x = normal(60, 6)
    for k in (1, 1.5, 2, 3, 5.2):
        y = capped_simplex_map(x, k, scale, link=link)
        torch.testing.assert_close(y, by_bisection(x, k, scale, link), rtol=0, atol=1e-12)
        leaf = x[:1].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, k=k: capped_simplex_map(x, k, scale, link=link), leaf)


@for_each("gap", [2.5, 4.0, 30.0])
def test_gaps(gap):
    x = torch.tensor([0.0, gap], dtype=torch.float64)
    torch.testing.assert_close(capped_simplex_map(x, 1, 1.0, link=Uniform()), (x > 0).double())


def test_a_class_is_not_a_link():
    with pytest.raises(TypeError, match=r"`link` must be .* the class Logistic: pass an instance, Logistic\("):
        capped_simplex_map(torch.zeros(3), 1, link=Logistic)
