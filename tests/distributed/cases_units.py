"""Cases of draws of designs whose rows are cut, and of their checks: each rank holds some of the units."""

import itertools
from functools import partial

import pytest
import torch

import khot
from khot.distributions import ConditionalPoisson, GumbelTopK, ParetoSampling
from khot.kernels import backend
from tests.distributed.group import case
from tests.distributed.spread import P, R, S, masked, spread
from tests.inputs import normal

CUT_IN_TWO = [[S(0), S(2)], [S(1), S(2)]]
CUT_IN_FOUR = [[S(2)], [P, S(2)], [S(2), S(2)]]


def draws(design, seed=3):
    return design.sample((2, 2), generator=torch.Generator().manual_seed(seed)).full_tensor()


@case
def draws_of_cut_rows_are_those_of_whole_ones():
    """In the kernels' arithmetic and in that of plain torch; k is the same in all rows, or each has its own."""
    cases = [(GumbelTopK, n, where) for n, where in itertools.product((7, 10), CUT_IN_TWO + CUT_IN_FOUR)]
    cases += [(GumbelTopK, 1000, CUT_IN_FOUR[0]), (ParetoSampling, 10, CUT_IN_TWO[0]), (ParetoSampling, 7, [S(2)])]
    for design_class, n, placements in cases:
        k = 2 if placements == [S(2)] else torch.tensor([[1, 2], [n, 3], [0, n - 1]])
        one, cut = (design_class(logits=spread(masked(n), where), k=k) for where in ([R], placements))
        x = draws(one)
        assert torch.equal(draws(cut), x) and cut.works_on_parts("sample"), (design_class, n, placements)
        assert (x.sum(-1) == torch.as_tensor(k).expand(3, 2)).all() and (x[:, :, 0, 0, : n // 2] == 0).all()
    assert not torch.equal(draws(cut, seed=4), x)
    with backend("torch"):
        one, cut = (GumbelTopK(logits=spread(masked(10), where), k=2) for where in ([R], [S(2)]))
        assert torch.equal(draws(cut), draws(one))


@case
def draws_of_cut_probabilities():
    probs = khot.sigmoid_topk(normal(3, 9), 3)
    probs[0] = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0, 1])
    for design_class in (ParetoSampling, partial(ParetoSampling, adjust="exact"), GumbelTopK):
        one, cut = (design_class(probs=spread(probs, where)) for where in ([R], [S(1)]))
        assert torch.equal(draws(cut), draws(one)) and torch.equal(cut.k.full_tensor(), one.k.full_tensor())


@case
def bad_cut_designs_raise_on_all_ranks():
    logits, probs = normal(4, 9), khot.sigmoid_topk(normal(4, 9), 3)
    logits[1, 0], probs[2, 8] = torch.nan, 0.0
    for design_class in (GumbelTopK, ParetoSampling):
        with pytest.raises(ValueError, match="logits"):
            design_class(logits=spread(logits, [S(1)]), k=2)
        with pytest.raises(ValueError, match="each row of `probs` must lie"):
            design_class(probs=spread(probs, [S(1)]))
        with pytest.raises(ValueError, match="k=10 with n=9"):
            design_class(logits=spread(normal(4, 9), [S(1)]), k=10)
    with pytest.raises(ValueError, match="`k` must lie between the number of `logits` equal to inf"):
        GumbelTopK(logits=spread(torch.full((4, 9), -torch.inf), [S(1)]), k=2)
    for design_class in (GumbelTopK, ConditionalPoisson):
        design, unchecked = (
            design_class(logits=spread(normal(4, 9), [S(1)]), k=2, validate_args=checks) for checks in (True, False)
        )
        for x in (torch.ones(4, 9), torch.full((4, 9), 2 / 9), torch.ones(4, 8), torch.ones(3, 9)):
            with pytest.raises(ValueError, match="support|shape"):
                design.log_prob(x.double())
        assert (unchecked.log_prob(torch.ones(4, 9).double()).full_tensor() == -torch.inf).all()
