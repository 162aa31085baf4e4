"""Operators refer to a link by two numbers: those of the library are part of graphs, and others end them."""

import copy
import pickle
from functools import partial

import pytest
import torch

from khot import capped_simplex_map, sparse_topk, topk_threshold, transport_topk
from khot.kernels.links.base import Link
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from khot.kernels.links.clipped_power import ClippedPower, clipped_power
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC, Logistic
from khot.kernels.links.normal import NORMAL
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import Cauchy

# Stored programs contain these numbers: they never change.
BUILT_IN = {
    (0, 1.0): LOGISTIC,
    (1, 1.0): LAPLACE,
    (2, 1.0): NORMAL,
    (3, 1.0): clipped_power(2),
    (3, 3.0): clipped_power(4 / 3),
    (3, 1 / (1.7 - 1)): clipped_power(1.7),
    (4, 1.0): CAPPED_EXPONENTIAL,
}


@for_each("key, link", BUILT_IN.items())
def test_two_numbers_make_the_link_again(key, link):
    assert link.key == key
    for other in (Link.find(*key), copy.deepcopy(link), pickle.loads(pickle.dumps(link))):
        assert other == link and hash(other) == hash(link) and other.key == link.key
        assert type(other) is type(link) and other.q == link.q


def test_links_of_the_library_that_differ_are_not_equal():
    links = [*BUILT_IN.values(), ClippedPower(1.3)]
    assert len(set(links)) == len(links) == len({link.key for link in links})
    assert Logistic() == LOGISTIC and LOGISTIC != 0


class Steep(Logistic):
    def __init__(self, steepness=2.0):
        self.steepness = steepness

    def value(self, z):
        return super().value(self.steepness * z)

    def complement(self, z):
        return super().complement(self.steepness * z)

    def slope(self, z):
        return self.steepness * super().slope(self.steepness * z)

    def inverse(self, p):
        return super().inverse(p) / self.steepness

    log_value, log_complement, log_slope = Link.log_value, Link.log_complement, Link.log_slope
    slope_at, value_and_slope = Link.slope_at, Link.value_and_slope


def test_another_link_is_found_while_it_lives():
    """A subclass of one of the library is another link, and may change."""
    link, x = Steep(2.0), normal(2, 5)
    assert link.link_id is None and link.kernel is None and Link.find(*link.key) is link
    assert link != Steep(2.0) and link != copy.copy(link) and link == link
    torch.testing.assert_close(capped_simplex_map(x, 2, link=link), capped_simplex_map(x, 2, 0.5, link=LOGISTIC))
    link.steepness = 1.0
    torch.testing.assert_close(capped_simplex_map(x, 2, link=link), capped_simplex_map(x, 2, link=LOGISTIC))
    key = link.key
    del link
    with pytest.raises(ValueError, match="this program contains a link that no longer exists"):
        Link.find(*key)


def check_compiled(function, **options):
    """Values and gradients, over calls with other numbers, which may come as symbols."""
    torch._dynamo.reset()
    fast = torch.compile(function, **{"backend": "eager", **options})
    x = normal(3, 6).requires_grad_()
    for number in (0.5, 0.25, 0.75):
        y, expected = fast(x, number), function(x, number)
        torch.testing.assert_close(y, expected)
        grad, expected = (torch.autograd.grad(v.square().sum(), x)[0] for v in (y, expected))
        torch.testing.assert_close(grad, expected)


def made_inside(x, a):
    return sum(capped_simplex_map(x, 3, a, link=link) for link in (Logistic(), ClippedPower(1.5)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (made_inside, {"backend": "aot_eager"}),
        (lambda x, a: sparse_topk(x, 2.5, p=1 + a), {}),
        (lambda x, a: topk_threshold(x, 2.5, a, relaxation=transport_topk), {}),
    ],
    ids=["made inside", "exponent", "transport"],
)
def test_links_of_the_library_are_part_of_a_graph(function, options):
    check_compiled(function, fullgraph=True, **options)


OWN = Cauchy()
WITH_OWN = {
    "threshold and mask": lambda x, a: (
        topk_threshold(2 * x, 2, a, relaxation=partial(capped_simplex_map, link=OWN)).exp().unsqueeze(-1)
        * capped_simplex_map(2 * x, 3, a, link=OWN)
    ),
    "made inside": lambda x, a: capped_simplex_map(x, 3, a, link=Cauchy()) + 1,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's, which hides it unless it is an error
@pytest.mark.parametrize("function", WITH_OWN.values(), ids=WITH_OWN)
def test_a_graph_ends_at_another_link(function):
    check_compiled(function)


@pytest.mark.slow
@pytest.mark.needs_torch("2.8")  # which shows the reason
@for_each("function", WITH_OWN.values())
def test_a_graph_that_must_not_end_says_why(function):
    torch._dynamo.reset()
    why = "graphs contain links of khot only: without fullgraph=True"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=why):
        torch.compile(function, backend="eager", fullgraph=True)(normal(3, 6), 0.5)


class Program(torch.nn.Module):
    def forward(self, x):
        return capped_simplex_map(x, 2, link=OWN)


STRICT = pytest.param(True, marks=[pytest.mark.slow, pytest.mark.needs_torch("2.8")])  # earlier, errors have no message


@pytest.mark.parametrize("strict", [False, STRICT])
def test_an_exported_program_with_another_link_is_an_error(strict):
    with pytest.raises(Exception, match="an exported program contains links of khot only"):
        torch.export.export(Program(), (normal(3, 6),), strict=strict)
