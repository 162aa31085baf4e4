"""The Triton pieces of links: each agrees with its link, and kernels of two links are two kernels."""

from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import pytest

from tests.backends import skip_without_triton

skip_without_triton()

import khot.kernels.links
from khot.kernels.links.base import Link
from khot.kernels.links.base_triton import CompactLink, SmoothLink, triton_link
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC, Logistic
from tests.kernels.kernel_links import LINKS

each_link = pytest.mark.parametrize("link", LINKS, ids=lambda link: link.kernel)
FILES = sorted(Path(khot.kernels.links.__file__).parent.glob("*_triton.py"))
MODULES = [import_module(f"khot.kernels.links.{file.stem}") for file in FILES if file.stem != "base_triton"]


def test_every_piece_is_of_a_link_under_test():
    pieces = [piece for module in MODULES for piece in module.KERNELS.values()]
    assert sorted(piece.name for piece in pieces) == sorted(str(link.kernel) for link in LINKS)
    assert {id(piece) for piece in pieces} == {id(triton_link(link)) for link in LINKS}


@each_link
def test_a_piece_says_of_its_link_what_the_link_says(link):
    piece = triton_link(link)
    assert isinstance(piece, CompactLink if link.compact else SmoothLink)
    assert (piece.name, piece.of) == (link.kernel, type(link))
    assert (piece.compact, piece.reaches_zero, piece.reach) == (link.compact, link.reaches_zero, link.reach)
    if link.compact:
        assert link.condition == link.q  # of which the kernels are told one number
    q, centre, spread = link.numbers
    assert (q, centre, spread) == (link.q, *map(float, link.start()))


def test_no_two_pieces_go_by_the_same_name():
    """It tells the kernels of one from those of the other."""
    assert len({repr(triton_link(link)) for link in LINKS}) == len(LINKS)


@pytest.mark.parametrize("field", [field.name for field in fields(SmoothLink) if field.name not in ("of", "name")])
def test_a_piece_with_another_function_or_number_has_another_name(field):
    piece, other = triton_link(LOGISTIC), triton_link(LAPLACE)
    changed = replace(piece, **{field: getattr(other, field)})
    differs = getattr(piece, field) != getattr(other, field)
    assert (repr(changed) != repr(piece)) == differs
    assert repr(replace(piece)) == repr(piece)


class FarLogistic(Logistic):
    reach = 1e6


def test_a_piece_with_another_reach_has_another_name():
    piece = triton_link(LOGISTIC)
    assert repr(replace(piece, of=FarLogistic)) != repr(piece)


def test_a_link_without_a_piece_gets_that_of_no_other():
    class Own(Logistic):
        pass

    class Claimed(Link):
        kernel = "logistic"
        value = complement = slope = inverse = None

    assert Own().kernel is None
    for link in (Own(), Claimed()):
        with pytest.raises(ImportError):
            triton_link(link)
