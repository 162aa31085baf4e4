"""k_hot and capped_simplex: membership, the two transforms, and inference on a site that lives there."""

import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.ops.stats import effective_sample_size
from torch.autograd.functional import jacobian
from torch.distributions import biject_to, constraints, transform_to

from khot.constraints import capped_simplex, k_hot, ranking
from tests.loops import for_each
from tests.registry import CONSTRAINTS

float64 = torch.float64
SIZES = [2, 1.3, torch.tensor([1.0, 2.5, 3.999], dtype=float64), torch.tensor(2).expand(3)]


@pytest.fixture(autouse=True)
def fresh_pyro():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


def tensor(values, dtype=float64):
    return torch.tensor(values, dtype=dtype)


@for_each("case", CONSTRAINTS)
def test_contract(case):
    inside, outside = (tensor([*rows.values()], case.dtype) for rows in (case.inside, case.outside))
    k = [*case.inside]
    for i, size in enumerate(k):
        constraint = case.make(size)
        assert constraint.check(inside[i]) and not constraint.check(outside[i])
        assert constraint.check(inside[i].expand(2, 4, 3)).shape == (2, 4) and constraint.event_dim == 1
        assert repr(constraint).endswith(f"{size})")
        twin = pickle.loads(pickle.dumps(constraint))
        assert twin.check(inside[i]) and not twin.check(outside[i])
    if case.public.is_discrete:
        k = [int(size) for size in k]
    rows = case.make(torch.tensor(k))  # one k for each row
    assert rows.check(inside).all() and not rows.check(outside).any()


def test_k_hot_membership():
    rows = tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0], [0.5, 0.5, 1], [1, 1, math.nan], [2, 0, 0], [1, 1 - 1e-9, 0]])
    assert k_hot(2).check(rows).tolist() == [True, False, False, False, False, False, False]
    assert k_hot(1, 2).check(rows).tolist() == [True, False, True, False, False, False, False]
    assert k_hot(torch.tensor([2, 3, 2])).check(rows[:3]).tolist() == [True, True, False]
    assert k_hot(torch.tensor([0, 3]), torch.tensor([1, 3])).check(rows[[2, 1]]).tolist() == [True, True]
    assert k_hot(2).check(rows[:1].half()).tolist() == [True]
    assert k_hot(2).is_discrete and k_hot(2).event_dim == 1
    assert repr(k_hot(2)) == "k_hot(2)" and repr(k_hot(2, 3)) == "k_hot(2, 3)"


def test_k_hot_refuses_a_range_that_falls():
    with pytest.raises(ValueError, match="`upper` must"):
        k_hot(3, 2)


def test_capped_simplex_membership():
    rows = tensor([[1, 1, 0], [0.5, 0.7, 0.8], [0.5, 0.7, 0.801], [1.2, 0.3, 0.5], [math.nan, 1, 1], [-0.1, 1, 1.1]])
    assert capped_simplex(2).check(rows).tolist() == [True, True, False, False, False, False]
    assert capped_simplex(2.001).check(rows).tolist() == [False, False, True, False, False, False]
    assert capped_simplex(torch.tensor([2, 1])).check(rows[:2]).tolist() == [True, False]
    assert not capped_simplex(2).is_discrete and capped_simplex(2).event_dim == 1
    assert constraints.independent(capped_simplex(2), 1).check(rows[:2].unsqueeze(0)).tolist() == [True]
    for k in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="0 <= k <= n"):
            capped_simplex(k)


ODD_ENTRIES = (0.0, -0.0, 1.0, 2.0, -1.0, 0.5, 1.0 + 1e-9, 1e-320, math.nan, math.inf, -math.inf)


@pytest.mark.usefixtures("cpu_backend")
@for_each("dtype", [torch.float16, torch.float32, torch.float64])
@for_each(
    "constraint", [k_hot(2), k_hot(0), k_hot(1, 2), k_hot(torch.tensor(2)), capped_simplex(2), capped_simplex(1.5)]
)
def test_one_look_at_all_values_agrees_with_a_look_at_each(constraint, dtype):
    rows = torch.cartesian_prod(*[tensor(ODD_ENTRIES, dtype)] * 3)
    expected = constraint.check(rows)
    assert [constraint.holds(row) for row in rows] == expected.tolist()
    assert constraint.holds(rows[expected]) and not constraint.holds(rows) and constraint.holds(rows[:0])
    assert constraint.holds(rows[expected].T.contiguous().T)


@for_each("dtype", [torch.bool, torch.uint8, torch.int64])
def test_one_look_at_values_of_other_dtypes(dtype):
    rows = tensor([[1, 1, 0], [1, 1, 1]], dtype)
    assert k_hot(2).holds(rows[0]) and not k_hot(2).holds(rows)


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@for_each("n", [3, 1000, 100_000])
def test_capped_simplex_tolerates_rounding_and_no_more(dtype, n):
    torch.manual_seed(0)
    weight = torch.rand(n, dtype=float64) + 0.5
    k = round(n / 3)
    value = (weight * (k / weight.sum())).to(dtype)
    assert capped_simplex(k).check(value)
    assert capped_simplex(k).check(torch.full((n,), k / n, dtype=float64).to(dtype))  # all of which round the same way
    rounding = torch.finfo(dtype).eps * k  # twice what the sum can move
    assert not capped_simplex(k + 0.5 + rounding).check(value)
    assert not capped_simplex(k - 0.5 - rounding).check(value)


@for_each("k", SIZES)
def test_transform_to(k):
    transform = transform_to(capped_simplex(k))
    x = torch.randn(3, 5, dtype=float64)
    y = transform(x)
    assert capped_simplex(k).check(y).all()
    torch.testing.assert_close(transform(transform.inv(y)), y)
    torch.testing.assert_close(transform.inv(y), y.logit())
    assert not transform.bijective and transform.event_dim == 1
    assert transform.forward_shape(x.shape) == transform.inverse_shape(y.shape) == x.shape


@for_each("k", SIZES)
def test_biject_to(k):
    transform = biject_to(capped_simplex(k))
    u = 2 * torch.randn(3, 4, dtype=float64)
    y = transform(u)
    assert transform.bijective and capped_simplex(k).check(y).all() and transform.codomain.check(y).all()
    torch.testing.assert_close(transform.inv(y), u)
    assert transform.forward_shape(u.shape) == y.shape and transform.inverse_shape(y.shape) == u.shape
    jac = jacobian(lambda v: transform(v)[..., :-1].sum(0), u).movedim(1, 0)  # (3, 4, 4): rows do not interact
    log_det = transform.log_abs_det_jacobian(u, y)
    torch.testing.assert_close(log_det, jac.det().abs().log(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(transform.inv.log_abs_det_jacobian(y, u), -log_det)
    assert torch.autograd.gradcheck(lambda v: transform.log_abs_det_jacobian(v, y), u.requires_grad_())


def test_log_det_in_both_tails():
    # k = 1 of 4, scores (60, 30, -40, 0): the threshold is at 45, so that log d = -(15, 15, 85, 45) up to e^-15.
    transform = biject_to(capped_simplex(1))
    u = tensor([60.0, 30.0, -40.0]).requires_grad_()
    log_det = transform.log_abs_det_jacobian(u, transform(u))
    assert log_det.item() == pytest.approx(-160 - (math.log(2) - 15), abs=1e-5)
    (grad,) = torch.autograd.grad(log_det, u)
    torch.testing.assert_close(grad, tensor([-1.5, -0.5, 1.0]), rtol=0, atol=1e-5)
    far = tensor([1e4, 0.0, -1e4], torch.float32).requires_grad_()
    log_det = transform.log_abs_det_jacobian(far, transform(far))
    (grad,) = torch.autograd.grad(log_det, far)
    assert log_det.isfinite() and grad.isfinite().all()


def test_tensor_k_enlarges_the_batch():
    k = torch.tensor([1, 2, 3])
    for transform, x in (
        (transform_to(capped_simplex(k)), torch.randn(5)),
        (biject_to(capped_simplex(k)), torch.randn(4)),
    ):
        y = transform(x)
        assert y.shape == transform.forward_shape(x.shape) == (3, 5)
        torch.testing.assert_close(y.sum(-1), k.float())


def test_independent_rows():
    constraint = constraints.independent(capped_simplex(2), 1)
    u = torch.randn(7, 3, 4, dtype=float64)
    for registry in (transform_to, biject_to):
        transform = registry(constraint)
        y = transform(u)
        assert constraint.check(y).shape == (7,) and constraint.check(y).all()
    log_det = transform.log_abs_det_jacobian(u, y)
    torch.testing.assert_close(log_det, biject_to(capped_simplex(2)).log_abs_det_jacobian(u, y).sum(-1))


def test_equality_cache_and_copies():
    for registry in (transform_to, biject_to):
        transform = registry(capped_simplex(2))
        assert transform == registry(capped_simplex(2)) == registry(capped_simplex(torch.tensor(2)))
        assert transform != registry(capped_simplex(3))
        cached = transform.with_cache()
        assert cached == transform and cached.with_cache() is cached
        u = torch.randn(4)
        y = cached(u)
        assert cached(u) is y and cached.inv(y) is u
        for twin in (copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
            assert twin == transform
    assert transform_to(capped_simplex(2)) != biject_to(capped_simplex(2))
    assert capped_simplex(1.5).check(pickle.loads(pickle.dumps(biject_to(capped_simplex(1.5))))(torch.zeros(3)))


def test_boundary_and_wrong_sums_raise():
    for registry in (transform_to, biject_to):
        for bad, match in (
            ([1.0, 1.0, 0.0], "interior, 0 < y < 1, but got values from 0 to 1"),
            ([0.5, 0.5, math.nan], "interior"),
            ([0.5, 0.5, 0.5], "must sum to k=2"),
        ):
            with pytest.raises(ValueError, match=match):
                registry(capped_simplex(2)).inv(tensor(bad))
        for k in (0, 3, torch.tensor([1, 3])):
            with pytest.raises(ValueError, match=r"needs 0 < k < n.* with n=3"):
                registry(capped_simplex(k)).inv(tensor([0.5, 0.7, 0.8]))
            with pytest.raises(ValueError, match=r"needs 0 < k < n.* with n=3"):
                registry(capped_simplex(k))(torch.zeros(3 if registry is transform_to else 2))


@for_each("constraint", [k_hot(1), k_hot(0, 1), capped_simplex(1), ranking(3, 1)])
def test_a_scalar_is_no_vector(constraint):
    with pytest.raises(ValueError, match="`value` must consist of vectors, but got a scalar"):
        constraint.check(torch.tensor(1.0))


@for_each("registry", [transform_to, biject_to])
def test_no_transform_of_a_scalar(registry):
    transform = registry(capped_simplex(0.5))
    for map_ in (transform, transform.inv):
        with pytest.raises(ValueError, match="must consist of vectors, but got a scalar"):
            map_(torch.tensor(0.5))
    for shape_of in (transform.forward_shape, transform.inverse_shape):
        with pytest.raises(ValueError, match="at least one dimension, but got that of a scalar"):
            shape_of(torch.Size())
    with pytest.raises(ValueError, match="must consist of vectors, but got a scalar"):
        pyro.param("probs", torch.tensor(0.5), constraint=capped_simplex(0.5))


def test_pyro_param():
    init = tensor([0.5, 0.7, 0.8])
    torch.testing.assert_close(pyro.param("probs", init, constraint=capped_simplex(2)), init)
    optimiser = torch.optim.Adam([pyro.param("probs").unconstrained()], lr=0.1)
    for _ in range(200):
        loss = (pyro.param("probs") - tensor([0.2, 0.9, 0.9])).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    torch.testing.assert_close(pyro.param("probs").detach(), tensor([0.2, 0.9, 0.9]), rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match="interior"):
        pyro.param("edge", tensor([0.0, 1.0, 1.0]), constraint=capped_simplex(2))


class BetaSlice(dist.TorchDistribution):
    """Density on the capped simplex in R³ proportional to the product of y^(a-1) (1-y)^(b-1) over the coordinates."""

    arg_constraints = {}
    support = capped_simplex(1.4)
    a = tensor([2.0, 1.0, 3.0])
    b = tensor([1.5, 2.0, 1.0])

    def __init__(self):
        super().__init__(torch.Size(), torch.Size([3]))

    def sample(self, sample_shape=()):
        return biject_to(self.support)(torch.randn(*sample_shape, 2, dtype=float64))

    def log_prob(self, value):
        return (torch.xlogy(self.a - 1, value) + torch.xlogy(self.b - 1, 1 - value)).sum(-1)

    def moments(self):
        """E[y] and E[y²] by the midpoint rule in the first two coordinates."""
        grid = (torch.arange(2000, dtype=float64) + 0.5) / 2000
        y = torch.stack(torch.broadcast_tensors(grid[:, None], grid, 1.4 - grid[:, None] - grid), -1)
        y = y[((y > 0) & (y < 1)).all(-1)]
        weight = self.log_prob(y).exp()
        return (weight @ torch.cat([y, y.square()], -1)) / weight.sum()


@pytest.mark.slow
def test_nuts_recovers_a_known_posterior():
    def model():
        pyro.sample("y", BetaSlice())

    mcmc = MCMC(NUTS(model), num_samples=500, warmup_steps=100, disable_progbar=True)
    mcmc.run()
    y = mcmc.get_samples()["y"]
    assert capped_simplex(1.4).check(y).all()
    statistics = torch.cat([y, y.square()], -1)
    error = statistics.std(0) / effective_sample_size(statistics[None]).sqrt()
    assert ((statistics.mean(0) - BetaSlice().moments()).abs() < 4 * error).all()


@pytest.mark.slow
def test_autonormal_recovers_a_known_posterior():
    # A normal pushed onto the capped simplex: the guide can represent it exactly.
    target = dist.TransformedDistribution(
        dist.Normal(tensor([0.5, -1.0, 0.2]), tensor([0.5, 1.0, 0.3])).to_event(1), [biject_to(capped_simplex(2.2))]
    )

    def model():
        pyro.sample("y", target)

    guide = AutoNormal(model)
    optimiser = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1 / 400)})
    svi = SVI(model, guide, optimiser, Trace_ELBO(num_particles=30, vectorize_particles=True))
    for _ in range(400):
        svi.step()
    with torch.no_grad(), pyro.plate("draws", 2000):
        y = guide()["y"]
    exact = target.sample((200_000,))
    for statistic in (lambda y: y, torch.square):
        error = statistic(y).std(0) / math.sqrt(len(y))
        assert ((statistic(y).mean(0) - statistic(exact).mean(0)).abs() < 4 * error).all()
