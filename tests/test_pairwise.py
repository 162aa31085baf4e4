"""The choice of cases in which all pairs of values meet."""

import itertools
from itertools import product

import pytest

from tests.pairwise import covering


def all_of(**levels):
    return [dict(zip(levels, values, strict=True)) for values in product(*levels.values())]


def pairs_of(cases):
    return {pair for case in cases for pair in itertools.combinations_with_replacement(sorted(case.items()), 2)}


@pytest.mark.parametrize(
    ("cases", "most"),
    [
        (all_of(a=range(2), b=range(2), c=range(2)), 5),
        (all_of(a=range(19), b=range(10), c=range(2)), 190),
        (all_of(a=range(4), b=range(4), c=range(3), d=range(2)), 18),
        ([case for case in all_of(a=range(6), b=range(6), c=range(2)) if case["a"] + case["b"] != 5], 32),
        (all_of(a=range(3), b=range(3)), 9),
    ],
)
def test_all_pairs_meet_in_few_cases(cases, most):
    taken = covering(cases)
    assert taken == sorted(set(taken)) and len(taken) <= most
    assert pairs_of(cases[i] for i in taken) == pairs_of(cases)
    assert covering(cases) == taken


def test_values_are_taken_equally_often():
    cases = all_of(member=range(12), check=range(20), backend=range(2))
    taken = [cases[i] for i in covering(cases)]
    for name, most in (("backend", 130), ("member", 22), ("check", 13)):
        counts = [sum(case[name] == value for case in taken) for value in {case[name] for case in cases}]
        assert max(counts) <= most, name


def test_nothing_to_pair():
    assert covering([]) == []
    assert covering(all_of(a=range(5))) == list(range(5))
    assert covering([{"a": 1, "b": 2}]) == covering([{}]) == [0]  # a test without parameters runs, too
