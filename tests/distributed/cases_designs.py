"""Cases of designs whose parameter is spread, and of estimators on them."""

import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import khot
from khot.distributions import ConditionalPoisson, PhantomUnit, Pivotal
from khot.kernels import backend
from tests.distributed.group import case
from tests.distributed.spread import P, R, S, assert_same, compare, first_rank_first, spread
from tests.inputs import normal
from tests.registry import DESIGNS, PHANTOM, reinmax_on

PLACES = [[S(0)], [P], [S(1)], [S(0), S(1)], [R, S(0)], [S(2)]]
SHAPE, K = (3, 4, 6), 2  # on four ranks one has no rows


def methods(member, design):
    """What a design has, by name; those of the wrapped one for the phantom unit."""
    yield "mean", lambda d: d.mean
    yield "variance", lambda d: d.variance
    if member.has_log_prob:
        yield "mode", lambda d: d.mode
    if member.has_log_prob:
        yield "log_prob", lambda d: d.log_prob(khot.topk_mask(normal(2, *SHAPE, seed=3), K))
    if member.has_entropy:
        yield "entropy", lambda d: d.entropy()
    if member.has_pairwise:
        yield "pairwise_inclusion", lambda d: d.pairwise_inclusion
        yield "covariance_matrix", lambda d: d.covariance_matrix


@case
def every_method_of_every_design():
    logits = normal(*SHAPE)
    cases = [(member, [S(0)]) for member in [*DESIGNS, PHANTOM]]
    cases += itertools.product([DESIGNS[0], DESIGNS[1], PHANTOM], PLACES[3:])
    for member, placements in cases:
        design = member.make(logits=logits, k=K)
        for name, method in methods(member, design):
            if member is PHANTOM and name == "log_prob":
                continue
            differentiable = name != "mode"
            make = lambda v, m=member, f=method: f(m.make(logits=v, k=K))  # noqa: E731 - of this turn
            y, _ = compare(make, [logits], [placements], differentiable, rtol=1e-7, atol=1e-9)
            assert y.device_mesh.ndim == len(placements) and not any(p.is_partial() for p in y.placements)


@case
def designs_made_from_probabilities():
    logits = normal(*SHAPE)
    for member, placements in itertools.product(DESIGNS, ([S(0)], [S(2)])):
        if member.exact_probs:
            probs = lambda v, m=member: m.make(probs=khot.sigmoid_topk(v, K)).mean  # noqa: E731
            compare(probs, [logits], [placements], rtol=1e-6, atol=1e-8)
    sizes = torch.arange(12).view(3, 4) % 5
    for where in (None, [S(0)], [R]):
        compare(lambda v, k: ConditionalPoisson(logits=v, k=k).entropy(), [logits, sizes], [[S(0)], where])


@case
def designs_of_half_types():
    """Also of rows that are cut, whose rounded probabilities need a size as those of whole rows do.

    Each rank has a row, since it checks those that it has.
    """
    logits = normal(4, 8, dtype=torch.bfloat16)
    for placements in ([S(0)], [S(1)]):
        for member in (ConditionalPoisson, Pivotal, khot.GumbelTopK):
            for name, parameter in (("logits", logits), ("probs", khot.sigmoid_topk(logits, 3))):
                here, whole = member(**{name: spread(parameter, placements)}, k=3), member(**{name: parameter}, k=3)
                value = here.sample((2,)).full_tensor()
                assert value.dtype == torch.bfloat16 and bool((value.sum(-1) == 3).all())
                torch.testing.assert_close(here.mean.full_tensor(), whole.mean)
        probs = spread(khot.sigmoid_topk(torch.zeros(4, 3000, dtype=torch.bfloat16), 1000), placements)
        with pytest.raises(ValueError, match="`k` must be given with `probs` in torch.bfloat16"):
            khot.ParetoSampling(probs=probs)
        drawn = khot.ParetoSampling(probs=probs, k=1000).sample((2,)).full_tensor()
        assert bool((drawn.sum(-1, dtype=torch.float64) == 1000).all())


@case
def totals_of_populations():
    """Of two variables at once, with variances from pairs in closed form, from enumerated ones, and without pairs."""
    logits, y = normal(*SHAPE), normal(2, *SHAPE, seed=1) + 5
    designs = {member.name: partial(member.make, k=K) for member in DESIGNS if member.name in ("sampford", "brewer")}
    designs |= {"pivotal": partial(Pivotal, k=K), "phantom_unit": partial(PHANTOM.make, k=K)}
    for make, (where, of_y) in itertools.product(designs.values(), (([S(0)], [S(1)]), ([S(2)], None))):

        def estimates(v, y, make=make):
            design = make(logits=v)
            return torch.stack(khot.horvitz_thompson(design, khot.topk_mask(v.detach(), design.k), y))

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "horvitz_thompson approximates")
            compare(estimates, [logits, y], [where, of_y], rtol=1e-7, atol=1e-9)


@case
def draws_are_those_of_one_process():
    logits = normal(*SHAPE)
    cases = [("auto", member) for member in [*DESIGNS, PHANTOM]] + [("torch", member) for member in DESIGNS[::3]]
    for backend_name, member in cases:
        with backend(backend_name):
            with first_rank_first():
                member.make(logits=logits, k=K).sample((5,))
            one = draws_of(member, logits, [R])
            assert one.shape == (5, *SHAPE)
            for placements in PLACES if backend_name == "auto" else PLACES[3:]:
                y = draws_of(member, logits, placements)
                assert torch.equal(y, one), (backend_name, member.name, placements)
            if member is not PHANTOM:
                assert (one.sum(-1) == K).all()
            assert not torch.equal(one, draws_of(member, logits, [S(0)], seed=8))
    equal_rows = draws_of(DESIGNS[0], torch.zeros(64, 20).double(), [S(0)])
    assert len({half.flatten().numpy().tobytes() for half in equal_rows.split(16, 1)}) == 4  # no shards share a stream


def draws_of(member, logits, placements, seed=7):
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank())  # that of the first process counts
    return member.make(logits=spread(logits, placements), k=K).sample((5,), generator=generator).full_tensor()


@case
def draws_of_kernels_are_those_of_plain_tensors():
    if not khot.kernels.operators.platforms.HAS_NUMBA:
        return
    logits = normal(*SHAPE)
    for design_class in (ConditionalPoisson, Pivotal, khot.GumbelTopK, khot.ParetoSampling):
        plain = design_class(logits=logits, k=K).sample((5,), generator=torch.Generator().manual_seed(7))
        generator = torch.Generator().manual_seed(7)
        y = design_class(logits=spread(logits, [S(0)]), k=K).sample((5,), generator=generator)
        assert torch.equal(y.full_tensor(), plain), design_class
        assert y.placements[0] == S(1) and not y.requires_grad


@case
def other_calls_of_a_design():
    logits = normal(*SHAPE)
    design = Pivotal(logits=spread(logits, [S(0)]), k=K)
    indices = design.sample_indices((3,))
    assert indices.shape == (3, 3, 4, K) and indices.dtype == torch.long
    support = design.enumerate_support(expand=False)
    assert torch.equal(support.full_tensor(), Pivotal(logits=logits, k=K).enumerate_support(expand=False))
    assert design.enumerate_support().shape == (15, *SHAPE)
    assert design.expand((2, 3, 4)).sample().shape == (2, *SHAPE)
    assert design.shape() == SHAPE and "Pivotal" in repr(design)
    one_row = ConditionalPoisson(logits=spread(logits[0, 0], [R]), k=K)
    assert one_row.sample((2,)).shape == (2, 6) and one_row.entropy().shape == ()
    with CommDebugMode() as mode:
        _ = design.mean, design.variance
    assert mode.get_total_counts() == 0


@case
def designs_check_the_rows_that_are_here():
    logits = normal(4, 6)
    logits[0, 0] = torch.nan
    here = spread(logits, [S(0)])
    if here.to_local().isnan().any():
        with pytest.raises(ValueError, match="logits"):
            Pivotal(logits=here, k=K)
    else:
        Pivotal(logits=here, k=K)
    with pytest.raises(ValueError, match="k"):
        Pivotal(logits=spread(normal(4, 6), [S(0)]), k=7)
    with pytest.raises(ValueError, match="support"):
        ConditionalPoisson(logits=spread(normal(4, 6), [R]), k=K).log_prob(torch.ones(4, 6).double())


@case
def estimators_on_spread_designs():
    logits, weight = normal(4, 6), normal(4, 6, seed=2)
    members = [m for m in DESIGNS if m.name in ("conditional_poisson", "pivotal_random", "gumbel_topk")]
    for member, wrap in itertools.product([*members, PHANTOM], (khot.StraightThrough, reinmax_on)):
        results = []
        for placements in ([R], [S(0)], [S(1)]):
            leaf = spread(logits, placements, True)
            estimator = wrap(member.make(logits=leaf, k=K), log_prob="none")
            x = estimator.rsample((3,), generator=torch.Generator().manual_seed(3))
            loss = (x * spread(weight, [R])).square().sum()
            loss.backward()
            results.append((x.detach().full_tensor(), leaf.grad.full_tensor()))
        assert results[0][1].any(), member.name
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-7, atol=1e-9)


@case
def score_functions_of_spread_designs():
    logits, weight = normal(4, 6), normal(4, 6, seed=2)
    for design_class, baseline in (
        (ConditionalPoisson, "none"),
        (khot.GumbelTopK, "leave_one_out"),
        (khot.ParetoSampling, "none"),
    ):
        results = []
        for placements in ([R], [S(0)], [S(1)]):
            leaf = spread(logits, placements, True)
            surrogate = khot.score_function(
                design_class(logits=leaf, k=K),
                lambda x: (x * spread(weight, [R])).sum(-1).square(),
                8,
                baseline=baseline,
                generator=torch.Generator().manual_seed(3),
            )
            assert isinstance(surrogate, DTensor)
            surrogate.sum().backward()
            results.append((surrogate.detach().full_tensor(), leaf.grad.full_tensor()))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-8, atol=1e-10)


@case
def a_phantom_unit_over_ranks():
    logits = normal(5, 6)
    one, two = (PhantomUnit(Pivotal, logits=v) for v in (logits, spread(logits, [S(0)])))
    assert_same(two.mean, one.mean, "the mean")
    x = two.sample((100,)).full_tensor()
    sizes = one.mean.sum(-1)
    assert ((x.sum(-1) == sizes.floor()) | (x.sum(-1) == sizes.ceil())).all()
