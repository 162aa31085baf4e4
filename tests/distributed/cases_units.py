"""Cases of order sampling designs whose rows are cut: each rank holds some of the units."""

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import khot
from khot.distributions import ConditionalPoisson, GumbelTopK, ParetoSampling, SequentialPoisson
from khot.kernels import backend
from khot.laws import conditional_poisson_parts
from tests.distributed.group import case
from tests.distributed.spread import P, R, S, compare, mesh_of, spread
from tests.inputs import normal

CUT_IN_TWO = [[S(0), S(2)], [S(1), S(2)]]
CUT_IN_FOUR = [[S(2)], [P, S(2)], [S(2), S(2)]]
BY_SUMS = [
    GumbelTopK,
    ParetoSampling,
    ConditionalPoisson,
    partial(ParetoSampling, adjust=None),
]  # mean, too


def masked(n):
    """Logits (3, 2, n) with excluded units, whole shards of them, an included one, and equal ones."""
    logits = normal(3, 2, n)
    logits[0, 0, : n // 2] = -torch.inf
    logits[0, 1, n // 3] = torch.inf
    logits[1, 0] = 0.0
    logits[1, 1, n // 2 :] = -torch.inf
    return logits


def draws(design, seed=3):
    return design.sample((2, 2), generator=torch.Generator().manual_seed(seed)).full_tensor()


@case
def draws_of_cut_rows_are_those_of_whole_ones():
    """In the kernels' arithmetic and in that of plain torch; k is the same in all rows, or each has its own."""
    cases = [(GumbelTopK, n, where) for n, where in itertools.product((7, 10), CUT_IN_TWO + CUT_IN_FOUR)]
    cases += [(GumbelTopK, 1000, CUT_IN_FOUR[0]), (ParetoSampling, 10, CUT_IN_TWO[0]), (ParetoSampling, 7, [S(2)])]
    for design_class, n, placements in [*cases, (SequentialPoisson, 10, [S(2)])]:
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
    for design_class in (ParetoSampling, partial(ParetoSampling, adjust="exact"), SequentialPoisson, GumbelTopK):
        one, cut = (design_class(probs=spread(probs, where)) for where in ([R], [S(1)]))
        assert torch.equal(draws(cut), draws(one)) and torch.equal(cut.k.full_tensor(), one.k.full_tensor())


@case
def laws_of_cut_rows():
    """Values and gradients of what sums give, against whole rows."""
    for n, design_class in [(7, c) for c in BY_SUMS] + [(1000, c) for c in BY_SUMS[:3]]:
        logits = normal(3, n)
        sizes = torch.tensor([2, n // 2, 1])
        value = khot.topk_mask(normal(2, 3, n, seed=2), sizes)
        design = design_class(logits=spread(logits, [S(1)]), k=sizes)
        assert design.works_on_parts("log_prob") and design.works_on_parts("mean")
        placements = [S(0), S(1)] if design_class is ParetoSampling else [S(1)]
        compare(lambda v, c=design_class, k=sizes, x=value: c(logits=v, k=k).log_prob(x), [logits], [placements])
        if design_class in BY_SUMS[1:3] or (n == 7 and design_class is GumbelTopK):
            y, _ = compare(lambda v, c=design_class, k=sizes: c(logits=v, k=k).mean, [logits], [placements])
            assert list(y.placements) == placements
    with patch.object(conditional_poisson_parts, "SLAB", 4):  # of so many units more are taken some at a time
        compare(lambda v: ConditionalPoisson(logits=v, k=2).entropy(), [normal(3, 10)], [[S(1)]])
    softness = torch.tensor([0.5, 1.0, 2.0]).double()
    relaxed = lambda v, t: ParetoSampling(logits=v, k=2, temperature=t).mean  # noqa: E731 - of two leaves
    compare(relaxed, [normal(3, 7), softness], [[S(1)], [R]])
    one_row, x = normal(7), khot.topk_mask(normal(7, seed=2), 2)
    compare(lambda v: GumbelTopK(logits=v, k=2).log_prob(x), [one_row], [[S(0)]])
    probs = lambda v: ParetoSampling(probs=khot.sigmoid_topk(v, 2)).mean  # noqa: E731 - of this place
    compare(probs, [normal(3, 7)], [[S(1)]])


@case
def limits_of_laws_of_cut_rows():
    """Certain units, no choice, values that cannot be, wide gaps, and too little spread, of which rows are gathered."""
    logits, n = masked(9), 9
    sizes = torch.tensor([[2, 3], [9, 4], [0, 3]])  # of row (1, 1) all that are possible
    value = khot.topk_mask(logits, sizes)
    impossible = khot.topk_mask(-logits, sizes)
    logits[2, 1, :3] += 2000.0
    apart = 30.0 * torch.arange(n).double().expand(3, 2, n)
    for design_class in BY_SUMS[:3]:
        for x in (value, impossible):
            compare(lambda v, c=design_class, x=x: c(logits=v, k=sizes).log_prob(x), [logits], [[S(2)]])
        for scores in (logits, apart) if design_class is GumbelTopK else [logits]:
            compare(lambda v, c=design_class: c(logits=v, k=sizes).mean, [scores], [[S(2)]])
    assert not GumbelTopK(logits=spread(apart, [S(2)]), k=3).works_on_parts("mean")


class Exchanged(TorchDispatchMode):
    """Shapes of the tensors that this process gives to collectives."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            tensors = torch.utils._pytree.tree_leaves(args)
            self.shapes += [tuple(v.shape) for v in tensors if isinstance(v, torch.Tensor)]
        return function(*args, **(kwargs or {}))


@case
def what_is_exchanged_of_cut_rows():
    """Few collectives, and never a tensor with an axis of the length of a row or of a part of it."""
    n, k = 1000, 20
    logits = normal(2, n)
    value = khot.topk_mask(normal(2, n, seed=2), k)
    most = {"sample": (9, 11, 0), "log_prob": (14, 32, 17), "mean": (90, 35, 16)}
    for place, design_class in enumerate(BY_SUMS[:3]):
        for name, limits in most.items():
            if limits[place] == 0:  # it gathers
                continue
            given, x = spread(logits, [S(1)], True), spread(value, [S(1)])
            with Exchanged() as exchanged, CommDebugMode() as counted:
                design = design_class(logits=given, k=k)
                y = design.sample() if name == "sample" else design.mean if name == "mean" else design.log_prob(x)
                if name != "sample" and (design_class, name) != (GumbelTopK, "mean"):  # whose backward takes seconds
                    y.to_local().sum().backward()
            assert counted.get_total_counts() <= limits[place], (design_class, name, counted.get_comm_counts())
            lengths = {length for shape in exchanged.shapes for length in shape}
            assert not lengths & {n, n // mesh_of(1).size()} and exchanged.shapes, (design_class, name, lengths)


@case
def bad_cut_designs_raise_on_all_ranks():
    logits, probs = normal(4, 9), khot.sigmoid_topk(normal(4, 9), 3)
    logits[1, 0], probs[2, 8] = torch.nan, 0.0
    for design_class in (GumbelTopK, ParetoSampling, SequentialPoisson):
        with pytest.raises(ValueError, match="logits"):
            design_class(logits=spread(logits, [S(1)]), k=2)
        with pytest.raises(ValueError, match="each row of `probs` must lie"):
            design_class(probs=spread(probs, [S(1)]))
        with pytest.raises(ValueError, match="k=10 with n=9"):
            design_class(logits=spread(normal(4, 9), [S(1)]), k=10)
    with pytest.raises(ValueError, match="`k` must lie between the number of infinite"):
        GumbelTopK(logits=spread(torch.full((4, 9), -torch.inf), [S(1)]), k=2)
    for design_class in (GumbelTopK, ConditionalPoisson):
        design, unchecked = (
            design_class(logits=spread(normal(4, 9), [S(1)]), k=2, validate_args=checks) for checks in (True, False)
        )
        for x in (torch.ones(4, 9), torch.full((4, 9), 2 / 9), torch.ones(4, 8)):
            with pytest.raises(ValueError, match="support|shape"):
                design.log_prob(x.double())
        assert (unchecked.log_prob(torch.ones(4, 9).double()).full_tensor() == -torch.inf).all()
