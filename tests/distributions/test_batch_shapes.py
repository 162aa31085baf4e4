"""Shapes given to laws of any kind: of samples and expansions; and a k with more dimensions than the logits."""

import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate

from khot import (
    ConditionalPoisson,
    PhantomUnit,
    RelaxedKHot,
    RelaxedKHotStraightThrough,
    Sampford,
    StraightThrough,
    sigmoid_topk,
)
from khot.distributions import relaxed_khot
from tests import gof
from tests.inputs import LOGITS
from tests.loops import for_each
from tests.registry import DESIGNS, ESTIMATORS, PERTURBED, PHANTOM

RELAXED = {"relaxed": RelaxedKHot, "relaxed_straight_through": RelaxedKHotStraightThrough}


def wrapped(case, logits, k):
    return case.wrap(ConditionalPoisson(logits=logits, k=k))


LAWS = {
    **{case.name: case.make for case in [*DESIGNS, *PERTURBED, PHANTOM]},
    **{name: partial(cls, 0.5) for name, cls in RELAXED.items()},
    **{case.name: partial(wrapped, case) for case in ESTIMATORS},
}
every_law = for_each("make", LAWS.values())
BAD_SHAPES = [
    (ValueError, (-1,)),
    (ValueError, (2, -3)),
    (ValueError, torch.Size((-1,))),
    (TypeError, "a"),
    (TypeError, 3),
    (TypeError, (2.5,)),
    (TypeError, None),
    (TypeError, torch.ones(2)),
]


@every_law
def test_bad_shapes_name_the_argument(make):
    law = make(logits=LOGITS.expand(3, 5), k=2)
    calls = [law.sample]
    calls += [law.rsample] if law.has_rsample else [law.sample_indices] if make is not LAWS["phantom_unit"] else []
    for error, shape in BAD_SHAPES:
        for call in calls:
            with pytest.raises(error, match="`sample_shape` must be a tuple of non-negative ints, but got"):
                call(shape)
        with pytest.raises(error, match="`batch_shape` must be a tuple of non-negative ints, but got"):
            law.expand(shape)
    for shape in ((2,), (), (3, 2), (1,)):
        with pytest.raises(ValueError, match=r"`batch_shape` must be a shape that \(3,\) expands to, but got \("):
            law.expand(shape)


@every_law
def test_good_shapes(make):
    law = make(logits=LOGITS.expand(3, 5), k=2)
    for shape in ((), [2], (np.int64(2),), torch.Size((2, 0))):
        assert law.sample(shape).shape == (*shape, 3, 5)
    assert law.expand([4, 3]).batch_shape == (4, 3) and law.expand((0, 3)).sample().shape == (0, 3, 5)


K = torch.tensor([[1], [2], [4]])
EXTENDED = {name: make for name, make in LAWS.items() if name != "phantom_unit"}


@for_each("make", EXTENDED.values())
def test_k_extends_the_batch(make):
    for logits, shape in ((LOGITS, (3, 1)), (LOGITS.expand(2, 5), (3, 2))):
        law, row_by_row = make(logits=logits, k=K), [make(logits=logits, k=int(k)) for k in K]
        assert law.batch_shape == shape and law.event_shape == (5,)
        value = law.rsample((40,)) if law.has_rsample else law.sample((40,))
        assert value.shape == (40, *shape, 5) and law.support.check(value).all()
        assert law.expand((2, *shape)).sample().shape == (2, *shape, 5)
        for method in ("mean", "variance"):
            try:
                expected = torch.stack([getattr(row, method).expand(shape[1], 5) for row in row_by_row])
            except NotImplementedError:
                continue
            torch.testing.assert_close(getattr(law, method), expected)
        try:
            log_prob = law.log_prob(value)
        except NotImplementedError:
            continue
        assert log_prob.shape == (40, *shape)
        source = relaxed_khot._RELAXED.find(value)
        scored = (value if source is None else source.made_from).detach().expand(40, *shape, 5).unbind(1)
        parts = [row.log_prob(part) for row, part in zip(row_by_row, scored, strict=True)]
        torch.testing.assert_close(log_prob, torch.stack(parts, 1), rtol=1e-5, atol=1e-5)


@for_each("case", DESIGNS)
def test_inferred_shapes_and_gradients_of_an_extended_batch(case):
    logits = LOGITS.clone().requires_grad_()
    design = case.make(logits=logits, k=K)
    assert type(design).infer_shapes(logits=(5,), k=(3, 1)) == ((3, 1), (5,))
    (gradient,) = torch.autograd.grad((design.mean * LOGITS).sum(), logits)
    singly = sum((case.make(logits=logits, k=int(k)).mean * LOGITS).sum() for k in K)
    torch.testing.assert_close(gradient, torch.autograd.grad(singly, logits)[0])
    with pytest.raises(ValueError, match=r"`k` must broadcast with the batch shape \(3,\).*but got shape \(2, 2\)"):
        case.make(logits=LOGITS.expand(3, 5), k=torch.ones(2, 2, dtype=torch.long))
    probs = sigmoid_topk(LOGITS, 2)
    assert case.make(probs=probs, k=torch.tensor([2, 2])).batch_shape == (2,)
    with pytest.raises(ValueError, match="probs"):
        case.make(probs=probs, k=torch.tensor([2, 3]), validate_args=True)


PRIOR = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
SEEN = torch.tensor([[1.0, 0, 1, 0, 0], [1, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0, 1, 0, 1, 0]], dtype=torch.float64)
SCORED = [case for case in DESIGNS if case.has_log_prob]


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
def test_enumeration_over_k_equals_brute_force(case, fresh_pyro):
    """A mixture over the size, of one vector and of several in a plate, with validation on."""
    support = case.make(logits=LOGITS, k=2).enumerate_support()
    seen = [x.double() for x in SEEN if case.make(logits=LOGITS, k=int(x.sum())).log_prob(x) > -torch.inf]

    @config_enumerate
    def model(data):
        z = pyro.sample("z", dist.Categorical(PRIOR))
        with pyro.plate("rows", len(data)):
            pyro.sample("x", case.make(logits=LOGITS, k=z + 1), obs=data)

    @config_enumerate
    def mixture(data):
        with pyro.plate("rows", len(data)):
            z = pyro.sample("z", dist.Categorical(PRIOR))
            pyro.sample("x", case.make(logits=LOGITS, k=z + 1), obs=data)

    def log_joint(x):
        k = int(x.sum())
        return PRIOR[k - 1].log() + case.make(logits=LOGITS, k=k).log_prob(x)

    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    pairs = support[case.make(logits=LOGITS, k=2).log_prob(support) > -torch.inf]
    expected = PRIOR[1].log() + sum(case.make(logits=LOGITS, k=2).log_prob(x) for x in pairs)
    assert elbo.loss(model, lambda data: None, pairs) == pytest.approx(-expected.item(), rel=1e-10)
    expected = sum(log_joint(x) for x in seen)
    assert elbo.loss(mixture, lambda data: None, torch.stack(seen)) == pytest.approx(-expected.item(), rel=1e-10)
    with pytest.raises(ValueError, match="within the support"):  # of no size
        elbo.loss(mixture, lambda data: None, torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("wrap", [lambda design: design, StraightThrough], ids=["design", "straight_through"])
def test_a_guide_of_one_size_for_a_model_of_several(wrap, fresh_pyro):
    """The size is summed out in the model, the vector drawn in the guide."""

    @config_enumerate
    def model():
        z = pyro.sample("z", dist.Categorical(PRIOR))
        pyro.sample("x", ConditionalPoisson(logits=LOGITS, k=z + 1), infer={"enumerate": None})

    def guide():
        logits = pyro.param("logits", lambda: torch.zeros(5, dtype=torch.float64))
        pyro.sample("x", wrap(ConditionalPoisson(logits=logits, k=2)))

    elbo = TraceEnum_ELBO(max_plate_nesting=0)
    loss = elbo.loss(model, guide)
    x = ConditionalPoisson(logits=LOGITS, k=2).enumerate_support()
    possible = -(PRIOR[1].log() + ConditionalPoisson(logits=LOGITS, k=2).log_prob(x)) - math.log(10)
    assert (possible - loss).abs().min() < 1e-10
    assert np.isfinite(SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo).step())


def test_draws_of_a_size_that_is_drawn(fresh_pyro):
    def model():
        with pyro.plate("rows", 2000):
            z = pyro.sample("z", dist.Categorical(PRIOR))
            return z, pyro.sample("x", Sampford(logits=LOGITS, k=z + 1))

    z, x = model()
    gof.check_k_hot(x, z + 1)
    assert np.isfinite(Trace_ELBO().loss(model, model))


WAY_OUT = r"khot.infer.subset_categorical\(design\).*khot.infer.subset_vector"


@pytest.mark.parametrize("case", [*SCORED, PHANTOM], ids=lambda case: case.name)
def test_posteriors_over_subsets_name_the_way_out(case, fresh_pyro):
    """Pyro constructs the design's class with one logit for each k-hot vector and no other argument."""
    data = torch.tensor(0.3, dtype=torch.float64)

    @config_enumerate
    def model():
        x = pyro.sample("x", case.make(logits=LOGITS, k=2))
        pyro.sample("y", dist.Normal(x @ LOGITS, 1.0), obs=data)

    elbo = TraceEnum_ELBO(max_plate_nesting=0)
    for call in (elbo.compute_marginals, elbo.sample_posterior):
        with pytest.raises((TypeError, ValueError), match=WAY_OUT):
            call(model, lambda: None)


def test_bad_designs_of_a_phantom_unit():
    for design_class in (None, 3, torch.nn.Linear):
        with pytest.raises(TypeError, match="`design_class` must be a class of sampling designs"):
            PhantomUnit(design_class, logits=LOGITS)
