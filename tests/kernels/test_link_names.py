"""What a link is called in graphs: its value, the same in every process, or a name that no other process knows."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch

from khot import _torch_internals, capped_simplex_map, sparse_topk
from khot.kernels.links.base import Link
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from khot.kernels.links.clipped_power import ClippedPower, clipped_power
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC, Logistic
from khot.kernels.links.normal import NORMAL
from tests.inputs import normal
from tests.maps import Cauchy


class Steep(Logistic):
    """Without a name of its own: a subclass does not inherit one."""

    def __init__(self, steepness=2.0, **others):
        self.steepness = steepness
        for name, value in others.items():
            setattr(self, name, value)

    def value(self, z):
        return super().value(self.steepness * z)

    def complement(self, z):
        return super().complement(self.steepness * z)

    def slope(self, z):
        return self.steepness * super().slope(self.steepness * z)

    def inverse(self, p):
        return super().inverse(p) / self.steepness

    log_value, log_complement, log_slope = Link.log_value, Link.log_complement, Link.log_slope
    slope_at, tail_and_slope = Link.slope_at, Link.tail_and_slope


class NamedSteep(Steep, name="tests.steep"):
    pass


BUILT_IN = {
    "logistic": LOGISTIC,
    "laplace": LAPLACE,
    "normal": NORMAL,
    "capped_exponential": CAPPED_EXPONENTIAL,
    "clipped_power(q=1)": clipped_power(2),
    "clipped_power(q=3)": clipped_power(4 / 3),
    f"clipped_power(q={1 / (1.7 - 1)!r})": clipped_power(1.7),
}


@pytest.mark.parametrize(("name", "link"), BUILT_IN.items(), ids=BUILT_IN)
def test_built_in_links_are_called_by_their_value(name, link):
    assert link.key == name
    assert Link.find(name) == link and type(Link.find(name)) is type(link)
    assert vars(Link.find(name)) == vars(link)


@pytest.mark.parametrize(
    "link", [*BUILT_IN.values(), Steep(0.1), NamedSteep(2.0), Cauchy()], ids=lambda link: type(link).__name__
)
def test_names_do_not_change_where_dynamo_lists_no_attributes(link, monkeypatch):
    """As before torch 2.12, where only attributes that occur in the code of the class are found."""
    name = link.key
    monkeypatch.setattr(_torch_internals, "_LISTS_ATTRIBUTES", False)
    monkeypatch.setattr(_torch_internals, "_is_traced_by_dynamo", lambda: True)
    assert link.key == name


@pytest.mark.slow
def test_the_names_are_those_of_another_process():
    """Where other links were made first, in another order."""
    code = """
from khot.kernels.links.clipped_power import ClippedPower
others = [ClippedPower(p) for p in (1.1, 2.0, 1.9)]
from khot.kernels.links.base import Link
print([Link.find(name).key for name in %r])
"""
    names = [*BUILT_IN, clipped_power(1.0000001).key]
    result = subprocess.run([sys.executable, "-c", code % names], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == repr(names)


@pytest.mark.parametrize(
    "link",
    [*BUILT_IN.values(), ClippedPower(1.3), Steep(0.1), NamedSteep(1e-300), Steep(2, tag="it's (a=1)"), Cauchy()],
    ids=lambda link: type(link).__name__,
)
def test_equal_links_are_the_same_link(link):
    for other in (copy.deepcopy(link), copy.copy(link), pickle.loads(pickle.dumps(link)), Link.find(link.key)):
        assert other == link and hash(other) == hash(link) and other.key == link.key
        assert type(other) is type(link) and vars(other) == vars(link)


def test_links_that_differ_have_other_names():
    class Steep(globals()["Steep"]):  # of the same name, and another class
        pass

    links = [Steep(2.0), globals()["Steep"](2.0), globals()["Steep"](2.0 + 2**-51), NamedSteep(2.0), NamedSteep("2.0")]
    links += [NamedSteep((1, 2.0)), NamedSteep((1.0, 2.0)), NamedSteep(((1,), 2.0)), NamedSteep(math.inf), Cauchy()]
    links += [NamedSteep(-math.inf), NamedSteep(None), NamedSteep(True), NamedSteep(1), LOGISTIC, clipped_power(1.7)]
    assert len({link.key for link in links}) == len(links) == len(set(links))
    for link in links:
        assert vars(Link.find(link.key)) == vars(link)
    assert LOGISTIC != "logistic"


def test_a_link_that_changes_changes_its_name():
    link, x = NamedSteep(2.0), normal(2, 5)
    before = capped_simplex_map(x, 2, link=link)
    link.steepness = 1.0
    assert link == NamedSteep(1.0)
    torch.testing.assert_close(capped_simplex_map(x, 2, link=link), capped_simplex_map(x, 2, link=LOGISTIC))
    torch.testing.assert_close(capped_simplex_map(x, 2, 0.5, link=link), before)


class Slotted(Steep):
    __slots__ = ("offset",)


def test_a_link_whose_value_is_no_constant_goes_by_its_identity():
    x = normal(2, 5)
    slotted, other = Slotted(2.0), Slotted(2.0)
    slotted.offset, other.offset = 1, 2
    for link in (Steep(torch.tensor(2.0)), Steep([2.0]), Steep(math.nan), slotted):
        assert Link.find(link.key) is link
        assert link != copy.deepcopy(link)
    assert slotted != other
    tensor = Steep(torch.tensor(2.0).double())
    torch.testing.assert_close(capped_simplex_map(x, 2, link=tensor), capped_simplex_map(x, 2, 0.5, link=LOGISTIC))
    key = tensor.key
    del tensor
    with pytest.raises(ValueError, match="no longer exists"):
        Link.find(key)


def test_one_name_one_class():
    with pytest.raises(ValueError, match=r"`name` of a link must be unique, but 'tests.steep' is the name of .*Named"):

        class Again(Steep, name="tests.steep"):
            pass

    with pytest.raises(ValueError, match="'logistic' is the name of"):

        class Other(Link, name="logistic"):
            pass

    for wrong in ("", "a(b", "a b", "1a", "a."):
        with pytest.raises(ValueError, match="`name` of a link must be an identifier"):

            class Odd(Steep, name=wrong):
                pass

    with pytest.raises(TypeError, match="`name` of a link must be a str, but got 3"):

        class Number(Steep, name=3):
            pass


def test_unknown_names_say_what_to_import():
    for name in ("tests.nowhere", "tests.nowhere(a=1)", Steep(1.0).key.replace("@", "@0")):
        with pytest.raises(ValueError, match=r"no link is registered as .* to be imported"):
            Link.find(name)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **{"backend": "eager", **options})  # names are made in tracing


def check_compiled(function, arguments, **options):
    """Values and gradients, over calls with other arguments, which may come as symbols."""
    fast = compiled(function, **options)
    x = normal(3, 6).requires_grad_()
    for argument in arguments:
        y, expected = fast(x, argument), function(x, argument)
        torch.testing.assert_close(y, expected)
        grad, expected = (torch.autograd.grad(v.square().sum(), x)[0] for v in (y, expected))
        torch.testing.assert_close(grad, expected)


OUTSIDE = Steep(3.0)
TENSOR = Steep(torch.tensor(2.0, dtype=torch.float64))
INSIDE = {
    "constant": lambda x, a: sum(
        capped_simplex_map(x, 3, link=link) for link in (Logistic(), ClippedPower(1.5), Steep(2.0))
    ),
    "sparse": lambda x, a: sparse_topk(x, 2.5, p=1 + a),
    "argument": lambda x, a: capped_simplex_map(x, 3, link=Steep(a)),
    "registered": lambda x, a: capped_simplex_map(x, 3, link=NamedSteep(a)),
    "outside": lambda x, a: capped_simplex_map(x, 3, a, link=OUTSIDE),
    "tensor": lambda x, a: capped_simplex_map(x, 3, a, link=TENSOR),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dynamic"), [*((name, True) for name in INSIDE), ("argument", None)])
def test_links_compile_wherever_they_are_made(name, dynamic):
    backend = "aot_eager" if name == "argument" else "eager"  # numbers that are symbols reach operators
    check_compiled(INSIDE[name], (0.5, 0.25), dynamic=dynamic, backend=backend)


@pytest.mark.slow
def test_a_link_that_changes_is_compiled_anew():
    link, x = Steep(2.0), normal(2, 5)
    fast = compiled(lambda x: capped_simplex_map(x, 2, link=link))
    torch.testing.assert_close(fast(x), capped_simplex_map(x, 2, 0.5, link=LOGISTIC))
    link.steepness = 4.0
    torch.testing.assert_close(fast(x), capped_simplex_map(x, 2, 0.25, link=LOGISTIC))


@pytest.mark.needs_torch("2.9")  # earlier, the compiler fails with an error of its own
def test_a_tensor_in_a_link_made_inside_is_an_error_that_says_so():
    with pytest.raises(Exception, match="made inside a compiled function must have plain numbers"):
        compiled(lambda x: capped_simplex_map(x, 2, link=Steep(torch.ones(()))))(normal(2, 5))
