"""Cases of PlackettLuce, whose values are indices, with logits and sizes that are spread."""

import pyro
import pytest
import torch
import torch.distributed as dist
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import khot
from khot import PlackettLuce
from tests.distributed.group import case
from tests.distributed.spread import P, R, S, assert_same, compare, spread
from tests.inputs import normal

PLACES = [[S(0)], [P], [S(1)], [S(2)], [S(0), S(1)], [S(0), S(2)]]
SHAPE, K = (3, 4, 6), 2  # on four ranks one has no rows
SIZES = torch.arange(12).view(3, 4) % 5


def generator(seed=7):
    return torch.Generator().manual_seed(seed + 100 * dist.get_rank())  # that of the first process counts


def value_of(k):
    """Values (2, *SHAPE[:-1], largest k), of one process."""
    return PlackettLuce(normal(*SHAPE), k).sample((2,), generator=torch.Generator().manual_seed(1))


@case
def methods_of_rankings():
    """Values and gradients; k is an int, the same tensor on all processes, or sharded as the rows are."""
    logits = normal(*SHAPE)
    cases = [(placements, K, None) for placements in PLACES]
    cases += [([S(0)], SIZES, None), ([S(0)], SIZES, [S(0)]), ([S(0), S(2)], SIZES, [S(0), R]), ([S(1)], SIZES, [R])]
    for placements, k, beside in cases:
        value = value_of(k)
        where = [placements, beside]
        for x in (value, value[0], *([value[0, :1]] if k is K else [])):  # the last one for all rows
            compare(lambda v, k, x=x: PlackettLuce(v, k).log_prob(x), [logits, k], where)
        spread_value = spread(value, [R] * len(placements))
        design = PlackettLuce(spread(logits, placements), k)
        assert_same(design.log_prob(spread_value), PlackettLuce(logits, k).log_prob(value), "the log-probability")
        compare(lambda v, k: PlackettLuce(v, k).entropy(), [logits, k], where)
        y, _ = compare(lambda v, k: PlackettLuce(v, k).mode, [logits, k], where, differentiable=False)
        assert y.device_mesh.ndim == len(placements) and not any(p.is_partial() for p in y.placements)
        compare(lambda v, k: PlackettLuce(v, k).to_khot(PlackettLuce(v, k).mode), [logits, k], where, False)
        compare(lambda v, k, x=value: PlackettLuce(v, k).to_khot(x), [logits, k], where, False)
        compare(lambda v, k, x=value: PlackettLuce(v, k).expand((2, *SHAPE[:-1])).log_prob(x), [logits, k], where)


@case
def draws_of_rankings_are_those_of_one_process():
    logits = normal(*SHAPE)
    for k in (K, SIZES):
        one = PlackettLuce(spread(logits, [R]), k).sample((5,), generator=generator())
        assert one.shape[:-1] == (5, *SHAPE[:-1]) and one.dtype == torch.long
        for placements in PLACES:
            design = PlackettLuce(spread(logits, placements), k)
            drawn = design.sample((5,), generator=generator())
            assert torch.equal(drawn.full_tensor(), one.full_tensor()), placements
            assert bool(design.support.check(drawn).full_tensor().all())
        assert not torch.equal(design.sample((5,), generator=generator(8)).full_tensor(), one.full_tensor())
    rows = PlackettLuce(spread(torch.zeros(64, 20), [S(0)]), 20).sample(generator=generator()).full_tensor()
    assert len({tuple(row.tolist()) for row in rows}) == 64  # no two rows share a stream


@case
def supports_of_rankings():
    logits = normal(*SHAPE)
    support = PlackettLuce(logits, K).enumerate_support()
    for placements in PLACES:
        for k in (K, torch.full((3, 4), K), spread(torch.full((3, 1), K), [R] * len(placements))):
            design = PlackettLuce(spread(logits, placements), k)
            assert_same(design.enumerate_support(), support, "the support")
            assert_same(design.enumerate_support(expand=False), support[:, :1, :1], "the support of one row")
    # On each process all rows have the same k, which differs between processes.
    sizes = spread(torch.arange(4), [S(0)])
    for design, members in (
        (PlackettLuce(spread(normal(4, 6), [S(0)]), sizes), ("enumerate_support",)),
        (khot.GumbelTopK(logits=spread(normal(4, 6), [S(0)]), k=sizes), ("enumerate_support", "sample_indices")),
    ):
        for member in members:
            with pytest.raises(NotImplementedError, match=r"same k in all rows, but got k in \[0, 1, 2, 3\]"):
                getattr(design, member)()


@case
def sizes_that_extend_the_batch():
    row, sizes = normal(4, 6), torch.tensor([[1], [2], [3]])
    for placements in ([R], [S(0)], [S(1)]):
        for design_class in (PlackettLuce, khot.GumbelTopK, khot.ConditionalPoisson, khot.Pivotal):
            one, several = (design_class(logits=v, k=sizes) for v in (row, spread(row, placements)))
            assert several.sample((2,)).shape == one.sample((2,)).shape == (2, 3, 4, *one.event_shape)
            assert_same(several.mode, one.mode, "the mode") if design_class is not khot.Pivotal else None
        compare(lambda v: PlackettLuce(v, sizes).entropy(), [row], [placements])
        compare(lambda v: khot.ConditionalPoisson(logits=v, k=sizes).entropy(), [row], [placements])


@case
def rankings_of_half_types():
    logits = normal(4, 8, dtype=torch.bfloat16)
    value = PlackettLuce(logits, 3).sample((5,))
    for placements in ([S(0)], [S(1)]):
        whole, here = PlackettLuce(logits, 3), PlackettLuce(spread(logits, placements), 3)
        assert_same(here.log_prob(value), whole.log_prob(value), "the log-probability", rtol=0.0, atol=0.0)
        assert here.to_khot(value).dtype == torch.bfloat16 and here.sample().dtype == torch.long
        assert_same(here.mode, whole.mode, "the mode")


@case
def collectives_of_rankings():
    """Whole rows need none, except the seed of a draw and the largest k; cut rows are gathered once."""
    value, whole, cut = spread(value_of(K), [R]), spread(normal(*SHAPE), [S(0)]), spread(normal(*SHAPE), [S(2)])
    with CommDebugMode() as counted:
        design = PlackettLuce(whole, K)
        _ = design.log_prob(value), design.mode, design.entropy(), design.to_khot(value), design.enumerate_support()
    assert counted.get_total_counts() == 0
    with CommDebugMode() as counted:
        design = PlackettLuce(cut, K)
        _ = design.log_prob(value), design.entropy()
    assert counted.get_total_counts() == 1


@case
def rankings_check_the_rows_that_are_here():
    logits = normal(4, 6)
    logits[0, 0] = torch.nan
    here = spread(logits, [S(0)])
    if here.to_local().isnan().any():
        with pytest.raises(ValueError, match="logits"):
            PlackettLuce(here, K)
    else:
        PlackettLuce(here, K)
    with pytest.raises(ValueError, match="logits"):  # cut rows are gathered
        PlackettLuce(spread(logits, [S(1)]), K)
    PlackettLuce(spread(logits, [S(1)]), K, validate_args=False)
    fine = spread(normal(4, 6), [S(0)])
    for bad, error, message in (
        (lambda: PlackettLuce(fine, 7), ValueError, "`k` must satisfy 0 <= k <= n"),
        (lambda: PlackettLuce(fine, torch.full((4,), 7)), ValueError, "`k` must satisfy 0 <= k <= n"),
        (lambda: PlackettLuce(normal(4, 6), spread(torch.ones(4).long(), [R])), TypeError, "must be a DTensor, too"),
        (lambda: PlackettLuce(fine, K).log_prob(torch.zeros(4, 2).long()), ValueError, "support"),
        (lambda: PlackettLuce(fine, K).log_prob(torch.zeros(4, 3).long()), ValueError, r"shape \(..., 2\)"),
    ):
        with pytest.raises(error, match=message):
            bad()
    unchecked = PlackettLuce(fine, K, validate_args=False)
    assert (unchecked.log_prob(torch.zeros(4, 2).long()).full_tensor() == -torch.inf).all()


@case
def rankings_in_plates():
    """Gradients of ELBOs, by draws and by enumeration, and log-probabilities of sites, are those of replicated logits.

    (The value of an ELBO is not: Pyro takes the item of a sum, of which each process has a part.)
    """
    logits = normal(4, 5)

    def model(leaf):
        with pyro.plate("rows", 4):
            pyro.sample("choice", PlackettLuce(leaf, K))

    for elbo, infer in (
        (Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1), {}),
        (TraceEnum_ELBO(max_plate_nesting=1), {"enumerate": "parallel"}),
    ):

        def guide(leaf, infer=infer):
            with pyro.plate("rows", 4):
                pyro.sample("choice", PlackettLuce(leaf.square(), K), infer=infer)

        found = []
        for placements in ([R], [S(0)], [S(1)]):
            leaf = spread(logits, placements, True)
            torch.manual_seed(5)
            elbo.differentiable_loss(model, guide, leaf).backward()
            site = pyro.poutine.trace(model).get_trace(leaf)
            found.append((leaf.grad.full_tensor(), site.log_prob_sum().detach().full_tensor()))
        assert found[0][0].any()
        for several in found[1:]:
            torch.testing.assert_close(several, found[0], rtol=1e-9, atol=1e-11)


@case
def score_functions_of_rankings():
    logits, cost = normal(4, 6), normal(6, seed=2)
    results = []
    for placements in ([R], [S(0)], [S(1)]):
        leaf = spread(logits, placements, True)
        design = PlackettLuce(leaf, K)
        surrogate = khot.score_function(
            design, lambda v, d=design: (d.to_khot(v) * spread(cost, [R])).sum(-1), 8, generator=generator()
        )
        assert isinstance(surrogate, DTensor)
        surrogate.sum().backward()
        results.append((surrogate.detach().full_tensor(), leaf.grad.full_tensor()))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-8, atol=1e-10)
