"""``torch.jit.trace`` of every map, design, estimator and loss: a trace is right for other inputs of its shape.

Traced at one input, the result and its gradient are those of eager mode at inputs that take other steps, with the same
random numbers; and nothing warns.
"""

import itertools
import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import (
    MCMC,
    NUTS,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    JitTraceMeanField_ELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    config_enumerate,
)
from pyro.infer.autoguide import init_to_sample
from pyro.ops.provenance import detach_provenance, get_provenance, track_provenance
from torch.distributions import biject_to, kl_divergence, transform_to
from torch.fx.experimental.proxy_tensor import make_fx

import khot
from khot import (
    ConditionalPoisson,
    GumbelTopK,
    Pivotal,
    RelaxedKHot,
    RelaxedKHotStraightThrough,
    Sampford,
    StraightThrough,
    perturbed_topk,
    sigmoid_topk,
)
from khot._tracing import broadcast_shapes
from khot.constraints import capped_simplex
from khot.relaxations import Link
from tests.maps import ODD_MAPS, RELAXATIONS, Cauchy
from tests.registry import DESIGNS, ESTIMATORS, FUNCTIONS, PERTURBED, PHANTOM, reinmax_on

X = torch.tensor([0.4, -1.2, 0.9, 0.1, -0.3, 1.5], dtype=torch.float64)
FIRST = (torch.zeros_like(X), X)  # what is traced at: ties, and an ordinary row
THEN = (X.flip(-1), 30 * X, torch.zeros_like(X))
VALUES = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 1, 0]], dtype=torch.float64)
LABEL = torch.tensor(2)
WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.3, 0.0, 1.0], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated:DeprecationWarning")


def trace(function, *inputs, check=False):
    return torch.jit.trace(function, inputs, check_trace=check)


def outcome(function, *inputs):
    """Result and gradients, with the same random numbers each time; None where eager mode has an error."""
    torch.manual_seed(1)
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    y = function(*inputs)
    if not y.requires_grad:
        return (y,)
    weight = torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).cos().view(y.shape)
    wanted = [x for x in inputs if x.requires_grad]
    return y.detach(), *torch.autograd.grad((y * weight).sum(), wanted, materialize_grads=True)


def check_trace(function, first=FIRST, then=THEN):
    runs = [x if isinstance(x, tuple) else (x,) for x in then]
    expected = [outcome(function, *x) for x in runs]
    for x in first:
        traced = trace(function, *(x if isinstance(x, tuple) else (x,)))
        for inputs, wanted in [(runs[-1], expected[-1]), *zip(runs, expected, strict=True)]:  # the second is optimised
            torch.testing.assert_close(outcome(traced, *inputs), wanted, rtol=1e-9, atol=1e-11)


def descending(x):
    return torch.arange(x.shape[-1], 0, -1, dtype=x.dtype) / 3


MAPS = {case.name: case.map for case in [*RELAXATIONS, *ODD_MAPS]}
MAPS |= {f"log_{case.name}": case.log for case in RELAXATIONS if case.log}
MAPS = {name: lambda x, s, map=map: map(x, 2.0, s) for name, map in MAPS.items()}
MAPS |= {
    "soft_rank": khot.soft_rank,
    "soft_sort": khot.soft_sort,
    "soft_permutation": khot.soft_permutation,
    "soft_count": lambda x, s: khot.soft_count(x, x.detach(), s),
    "soft_quantile": lambda x, s: khot.soft_quantile(x, 0.3, s),
    "permutahedron_rank": khot.permutahedron_rank,
    "permutahedron_sort": khot.permutahedron_sort,
    "permutahedron_projection": lambda x, s: khot.permutahedron_projection(x, descending(x.detach()), s),
    "isotonic_l2": lambda x, s: khot.isotonic_l2(x) * s,
    "isotonic_lp": lambda x, s: khot.isotonic_lp(x, descending(x.detach()), 1.5, s),
    "successive_softmax_topk": lambda x, s: khot.successive_softmax_topk(x, 2, s),
    "sorted_transport_topk": lambda x, s: khot.sorted_transport_topk(x, 2, s),
    "straight_through_topk": lambda x, s: khot.straight_through_topk(x, 2, s),
    "perturbed_topk": lambda x, s: perturbed_topk(x, 2, s.detach(), num_samples=5),
    "topk_mask": lambda x, s: khot.topk_mask(x, 2) * s,
}


@pytest.mark.parametrize("name", MAPS)
def test_maps(name):
    softness = torch.tensor(0.7, dtype=torch.float64)
    check_trace(MAPS[name], [(x, softness) for x in FIRST], [(x, 0.3 * softness) for x in THEN])


def test_maps_by_name():
    """Every public map stands above."""
    public = {name for name in khot.relaxations.__all__ if name[0].islower()} - {"straight_through_value"}
    assert not {name for name in public if not any(name in tested for tested in MAPS)} - {"topk_threshold"}
    relaxed, hard = khot.topk_threshold, partial(khot.topk_threshold, relaxation=khot.topk_mask)
    check_trace(lambda x: relaxed(x, 2.5, 0.7), [(x,) for x in FIRST], [(x,) for x in THEN])
    check_trace(lambda x: hard(x, 2), [(x,) for x in FIRST], [(x,) for x in THEN])


def test_a_sum_that_is_an_input():
    first, other = torch.tensor(2.0, dtype=torch.float64), torch.tensor(4.5, dtype=torch.float64)
    for case in RELAXATIONS:
        check_trace(lambda x, k, case=case: case.map(x, k), [(x, first) for x in FIRST], [(x, other) for x in THEN[:2]])


def outputs_of(case, given):
    """What a design computes from its parameter, with k = 2, by name."""

    def make(x):
        return case.make(logits=x, k=2) if given == "logits" else case.make(probs=sigmoid_topk(x, 2))

    outputs = {
        "mean": lambda x: make(x).mean,
        "variance": lambda x: make(x).variance,
        "sample": lambda x: make(x).sample((3,)),
        "one_sample": lambda x: make(x).sample(),
        "sample_indices": lambda x: make(x).sample_indices((3,)),
        "enumerate_support": lambda x: make(x).enumerate_support(),
        "expanded": lambda x: make(x).expand((2,)).sample((3,)),
    }
    if case.has_log_prob:
        outputs |= {"log_prob": lambda x: make(x).log_prob(VALUES), "mode": lambda x: make(x).mode}
    if case.has_entropy:
        outputs["entropy"] = lambda x: make(x).entropy()
    if case.has_pairwise:
        outputs["pairwise_inclusion"] = lambda x: make(x).pairwise_inclusion
        outputs["covariance_matrix"] = lambda x: make(x).covariance_matrix
    for estimator in ESTIMATORS:
        if estimator.wrap is reinmax_on and given == "probs" and case.takes_relaxation:
            continue  # which of them has no relaxation
        outputs[estimator.name] = lambda x, e=estimator: e.wrap(make(x), log_prob="none").rsample((3,))
    return outputs


# Shows that probabilities are traced; all else is computed in one way, whatever a design was made from.
FROM_PROBS = {"mean", "sample", "log_prob", "straight_through", "reinmax"}
QUICK = {"logits": {"log_prob", "mean", "sample", "straight_through"}, "probs": {"sample"}}


def outputs_of_designs():
    """Each design with each output; few of them in the quick tests."""
    return [
        pytest.param(
            case,
            output,
            id=f"{case.name}-{given}-{name}",
            marks=[] if name in QUICK[given] else pytest.mark.slow,
        )
        for case in DESIGNS
        for given in ("logits", "probs")
        for name, output in outputs_of(case, given).items()
        if given == "logits" or name in FROM_PROBS
    ]


every_output = pytest.mark.parametrize(("case", "output"), outputs_of_designs())


@every_output
def test_designs(case, output):
    check_trace(output, FIRST[:1] if case.name == "pareto_exact" else FIRST)


@pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
def test_sizes_that_are_inputs(case):
    """k as a tensor of the batch, traced at small numbers."""

    def function(logits, k):
        design = case.make(logits=logits, k=k)
        parts = [design.mean, design.sample()]
        if case.has_log_prob:
            parts.append(design.log_prob(khot.topk_mask(logits, k)).unsqueeze(-1))
        return torch.cat(parts, -1)

    logits = torch.stack((X, X.flip(-1)))
    check_trace(function, [(logits, torch.tensor([1, 1]))], [(logits.cos(), torch.tensor([3, 5]))])


@pytest.mark.parametrize("name", ["mean", "sample", "log_prob", "entropy", "mode"])
def test_phantom_unit(name):
    """Whose size depends on its contents."""
    wanted = {"sample": lambda design: design.sample((3,)), "entropy": lambda design: design.entropy()}
    wanted["log_prob"] = lambda design: design.log_prob(design.sample((3,)))
    output = wanted.get(name, lambda design: getattr(design, name))
    check_trace(lambda x: output(PHANTOM.make(logits=x, k=None)), then=THEN[::2])


def relaxed_score(x):
    design = RelaxedKHot(0.5, logits=x, k=2)
    return design.log_prob(design.rsample((3,)))


OTHERS = {
    "relaxed": lambda x: RelaxedKHot(0.5, logits=x, k=2).rsample((3,)),
    "relaxed_log_prob": relaxed_score,
    "relaxed_straight_through": lambda x: RelaxedKHotStraightThrough(0.5, logits=x, k=2).rsample((3,)),
    "kl": lambda x: kl_divergence(Pivotal(logits=x, k=2, order="fixed"), ConditionalPoisson(logits=0.3 * x, k=2)),
    "kl_enumerated": lambda x: kl_divergence(Sampford(logits=x, k=2), Sampford(logits=0.3 * x, k=2)),
    "transform_to": lambda x: transform_to(capped_simplex(2))(x),
    "biject_to": lambda x: (lambda t: t.log_abs_det_jacobian(x, t(x)))(biject_to(capped_simplex(2))),
    "inverse_transform": lambda x: transform_to(capped_simplex(2)).inv(sigmoid_topk(x, 2)),
    "fenchel_young_topk_loss": lambda x: khot.fenchel_young_topk_loss(x, VALUES[0], 2),
    "topk_cross_entropy": lambda x: khot.topk_cross_entropy(x, LABEL, p_k=[0.5, 0.5]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    smooth = name in ("inverse_transform",)  # of values inside the capped simplex only
    check_trace(OTHERS[name], then=THEN[2:] if smooth else THEN)


PROGRAMS = {"jit": trace, "make_fx": lambda function, x: make_fx(lambda x: function(x))(x)}
every_program = pytest.mark.parametrize("write", PROGRAMS.values(), ids=PROGRAMS)


@every_program
@pytest.mark.parametrize("law", [RelaxedKHot, RelaxedKHotStraightThrough])
@pytest.mark.parametrize("validate_args", [False, True])
def test_a_trace_at_a_remembering_draw_scores_other_data(write, law, validate_args):
    """A draw stores its scores, and a trace with the draw as its input must not treat them as constants."""
    design = law(0.5, logits=X, k=2, validate_args=validate_args)
    first, other = (RelaxedKHot.rsample(design) for _ in range(2))
    if law is RelaxedKHotStraightThrough:
        first, other = first._unquantize, other._unquantize
    written = write(design.log_prob, first)
    assert (design.log_prob(first) - design.log_prob(other)).abs() > 1e-6
    for value in (other, other.clone(), first):
        torch.testing.assert_close(written(value), design.log_prob(value), rtol=1e-9, atol=1e-9)


SIZES = {"number": 2, "scalar": torch.tensor(2.5), "rows": torch.tensor([2.0, 3.5], dtype=torch.float64)}


@every_program
@pytest.mark.parametrize("k", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("registry", [transform_to, biject_to], ids=["transform_to", "biject_to"])
def test_transforms(write, registry, k):
    def function(x):
        transform = registry(capped_simplex(k))
        y = transform(x)
        density = transform.log_abs_det_jacobian(x, y) if transform.bijective else y.sum(-1)
        return torch.cat((y, density.unsqueeze(-1), transform.inv(y.clone()).sum(-1, keepdim=True)), -1)

    written = write(function, X)
    for x in (X.flip(-1), torch.zeros_like(X)):
        torch.testing.assert_close(written(x), function(x), rtol=1e-9, atol=1e-11)
    trace(function, X, check=True)


@pytest.mark.parametrize("k", SIZES.values(), ids=SIZES)
def test_pyro_traces_parameters_and_potentials_on_the_capped_simplex(k):
    """JitTrace_ELBO with a constrained param, and NUTS that compiles its potential."""
    batch = k.shape if isinstance(k, torch.Tensor) else ()

    def model():
        with pyro.plate_stack("rows", batch):
            y = pyro.sample("y", RelaxedKHot(0.7, logits=torch.zeros(*batch, 4, dtype=torch.float64), k=k))
            pyro.factor("data", -(y[..., 0] - 0.3).square())

    def guide():
        start = torch.full((*batch, 4), 0.5, dtype=torch.float64) * torch.as_tensor(k).double().unsqueeze(-1) / 2
        probs = pyro.param("probs", start, constraint=capped_simplex(k))
        with pyro.plate_stack("rows", batch):
            pyro.sample("y", RelaxedKHot(0.7, logits=probs.log(), k=k))

    pyro.clear_param_store()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        losses = []
        for objective in (Trace_ELBO(), JitTrace_ELBO()):
            guide()
            objective.loss_and_grads(model, guide)  # a first call looks around
            pyro.set_rng_seed(0)
            losses.append(float(objective.loss_and_grads(model, guide)))
        kernel = NUTS(model, jit_compile=True, ignore_jit_warnings=True, init_strategy=init_to_sample)
        mcmc = MCMC(kernel, num_samples=3, warmup_steps=2, disable_progbar=True)
        mcmc.run()
    pyro.clear_param_store()
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert capped_simplex(k).check(mcmc.get_samples()["y"]).all()


@pytest.mark.parametrize(("case", "output"), outputs_of_designs())
def test_programs_of_make_fx(case, output):
    """Right for other data than those that it was written at."""
    written = make_fx(lambda x: output(x))(X)
    for x in THEN:
        torch.manual_seed(1)
        found = written(x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, output(x), rtol=1e-9, atol=1e-11)


ADAPTIVE = [case for case in PERTURBED if case.name == "imle_adaptive"]
OTHER_PERTURBED = [case for case in PERTURBED if case not in ADAPTIVE]


def drawn_by(case):
    return lambda x: case.make(logits=x, k=2, log_prob="none").rsample((3,))


@pytest.mark.parametrize("case", OTHER_PERTURBED, ids=lambda case: case.name)
def test_perturbed(case):
    check_trace(drawn_by(case))


@pytest.mark.parametrize("case", ADAPTIVE, ids=lambda case: case.name)
def test_steps_that_adapt(case):
    """The traced step continues from one backward pass to the next; the first shows that it is right."""
    traced = trace(drawn_by(case), X)
    torch.testing.assert_close(outcome(traced, THEN[0]), outcome(drawn_by(case), THEN[0]))


def loss(x):
    return (x[..., 0] - 0.3).square() + x[..., 1] * x[..., 2] + x @ WEIGHTS


@pytest.mark.parametrize(
    ("case", "design"),
    [
        pytest.param(case, design, id=f"{case.name}-{design.__name__}")
        for design in (ConditionalPoisson, Sampford, GumbelTopK)
        for case in FUNCTIONS
        if not (case.needs_relaxation and design is GumbelTopK)
    ],
)
def test_functions(case, design):
    check_trace(lambda x: case.estimate(design(logits=x, k=2), loss, 3))


SHAPES = [(), (1,), (3,), (2, 1), (2, 3), (0,), (1, 0), (4, 1, 3)]


@pytest.mark.parametrize(("first", "second"), [*itertools.product(SHAPES, SHAPES)])
def test_shapes_broadcast_as_in_torch(first, second):
    shapes = torch.Size(first), torch.Size(second), torch.Size((1,))
    try:
        expected = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="do not broadcast"):
            broadcast_shapes(*shapes)
    else:
        assert broadcast_shapes(*shapes) == expected


def test_draws_are_fresh():
    for case in DESIGNS:
        traced = trace(lambda x, case=case: case.make(logits=x, k=3).sample((20,)), X)
        torch.manual_seed(0)
        assert not torch.equal(traced(X), traced(X)), case.name


def test_traces_are_checked():
    """Torch's default: trace twice and compare."""
    for case in DESIGNS:
        trace(lambda x, case=case: case.make(logits=x, k=3).mean, X, check=True)
    trace(lambda x: sigmoid_topk(x, 2), X, check=True)


def test_validation_may_be_on():
    with pyro.validation_enabled(True):
        for case in DESIGNS:
            if case.has_log_prob:
                check_trace(lambda x, case=case: case.make(logits=x, k=2).log_prob(VALUES), FIRST[:1], THEN[:1])
        traced = trace(lambda x, value: Pivotal(logits=x, k=2, order="fixed").log_prob(value), X, VALUES[0])
        with pytest.raises(Exception, match="within the support"):  # checked when it runs
            traced(X, torch.ones_like(X))


def test_second_derivatives():
    def function(x):
        return (
            GumbelTopK(logits=x, k=2).log_prob(VALUES[0])
            + sigmoid_topk(x, 2)[0]
            + ConditionalPoisson(logits=x, k=2).entropy()
        )

    traced = trace(function, X)
    for x in THEN:
        torch.testing.assert_close(*(torch.autograd.functional.hessian(f, x) for f in (traced, function)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of torch.autograd about itself
def test_gradients_inside_of_a_trace():
    def function(x):
        x = 1.0 * x
        y = Sampford(logits=x, k=2).log_prob(VALUES).sum() + (sigmoid_topk(x, 2) * WEIGHTS).sum()
        return torch.autograd.grad(y, x, create_graph=True)[0]

    traced = trace(function, X.clone().requires_grad_())
    for x in THEN:
        torch.testing.assert_close(outcome(traced, x), outcome(function, x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_random_gradients_inside_of_a_trace_are_refused():
    def function(x):
        x = 1.0 * x
        return torch.autograd.grad(perturbed_topk(x, 2) @ WEIGHTS, x)[0]

    with pytest.raises(RuntimeError, match=r"perturbed_topk draws random numbers: take its gradient outside"):
        trace(function, X.clone().requires_grad_())


class ShiftedCauchy(Cauchy):
    def __init__(self, shift):
        self.shift = shift


def test_what_would_be_a_constant_is_refused():
    def function(x):
        return khot.capped_simplex_map(x, 2, link=ShiftedCauchy(x.sum()))

    assert issubclass(ShiftedCauchy, Link)
    with pytest.raises(RuntimeError, match="treat the tensors in .*ShiftedCauchy.* as constants"):
        trace(function, X)

    def sizes(x, k):
        return khot.enumerated(ConditionalPoisson(logits=x, k=k), loss)

    with pytest.raises(RuntimeError, match="enumeration needs `k` as an int"):
        trace(sizes, X, torch.tensor(2))


ELBOS = {
    "trace": (Trace_ELBO, JitTrace_ELBO),
    "graph": (TraceGraph_ELBO, JitTraceGraph_ELBO),
    "enum": (TraceEnum_ELBO, JitTraceEnum_ELBO),
    "mean_field": (TraceMeanField_ELBO, JitTraceMeanField_ELBO),
}
GUIDES = {
    "gumbel": lambda logits: StraightThrough(GumbelTopK(logits=logits, k=3)),
    "conditional_poisson": lambda logits: ConditionalPoisson(logits=logits, k=3),
    "given_probs": lambda logits: StraightThrough(ConditionalPoisson(probs=sigmoid_topk(logits, 3))),
    "pivotal": lambda logits: StraightThrough(Pivotal(logits=logits, k=3, order="fixed")),
    "reinmax": lambda logits: reinmax_on(ConditionalPoisson(logits=logits, k=3)),
    "relaxed": lambda logits: RelaxedKHot(0.5, logits=logits, k=3),
}


@pytest.mark.parametrize(
    ("guide", "elbo"),
    [
        pytest.param(guide, elbo, id=f"{guide}-{elbo}", marks=[] if (i - j) % 4 == 0 else pytest.mark.slow)
        for i, guide in enumerate(GUIDES)
        for j, elbo in enumerate(ELBOS)
    ],
)
def test_pyro(elbo, guide):
    """Losses and gradients of the traced ELBO at parameters and data far from those it was traced at."""
    make, enumerates = GUIDES[guide], elbo == "enum" and guide == "conditional_poisson"

    def model(data):
        prior = torch.zeros_like(X)
        law = RelaxedKHot(0.5, logits=prior, k=3) if guide == "relaxed" else ConditionalPoisson(logits=prior, k=3)
        x = pyro.sample("x", law)
        pyro.sample("y", dist.Normal(x @ WEIGHTS, 0.5), obs=data)

    def guide_law(data):
        pyro.sample("x", make(pyro.param("logits", torch.zeros_like(X))))

    if enumerates:
        guide_law = config_enumerate(guide_law)
    found: list[list] = [[], []]
    with pyro.validation_enabled(False), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of Pyro about itself
        for which, kind in enumerate(ELBOS[elbo]):
            pyro.clear_param_store()
            objective = kind(max_plate_nesting=0) if enumerates else kind()
            for turn, (logits, data) in enumerate([(0 * X, 0.5), (0 * X, 0.5), (3 * X, -2.0), (X.flip(-1), 1.0)]):
                guide_law(None)
                with torch.no_grad():
                    pyro.param("logits").copy_(logits)
                pyro.param("logits").grad = None
                pyro.set_rng_seed(1)
                data = torch.tensor(data, dtype=torch.float64)
                if elbo == "mean_field":  # which traces whenever it is called, and has drawn twice before it draws
                    for _ in range(1 if which else 3):
                        value = objective.differentiable_loss(model, guide_law, data)
                    value.backward()
                else:
                    value = objective.loss_and_grads(model, guide_law, data)
                if turn > 0:  # the first call looks around, which takes random numbers
                    found[which].append((torch.as_tensor(value).detach(), pyro.param("logits").grad.clone()))
    pyro.clear_param_store()
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)


def check_override(function):
    """A subclass that overrides torch's functions gets the result and its gradient, and knows what they depend on."""
    expected, x = outcome(function, X), X.clone().requires_grad_()

    def unwrapped(x):
        y = function(track_provenance(1.0 * x, frozenset({"x"})))
        assert get_provenance(y) == {"x"}
        return detach_provenance(y)

    torch.testing.assert_close(outcome(unwrapped, x.detach()), expected)


@pytest.mark.parametrize("name", MAPS)
def test_maps_of_tensors_that_track_provenance(name):
    check_override(lambda x: MAPS[name](x, torch.tensor(0.7, dtype=torch.float64)))


@every_output
def test_designs_of_tensors_that_track_provenance(case, output):
    check_override(output)


@pytest.mark.parametrize("name", OTHERS)
def test_others_of_tensors_that_track_provenance(name):
    check_override(OTHERS[name])


@pytest.mark.parametrize("case", PERTURBED, ids=lambda case: case.name)
def test_perturbed_of_tensors_that_track_provenance(case):
    check_override(lambda x: case.make(logits=x, k=2, log_prob="none").rsample((3,)))


def test_trace_graph_elbo_through_a_relaxation():
    """The parameters of one site depend on another: its gradient goes through what made them."""

    def law(x):
        return StraightThrough(Pivotal(probs=sigmoid_topk(x, 3), order="fixed"))

    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros_like(X), 1.0).to_event(1))
        pyro.sample("x", law(z + X))

    def guide():
        z = pyro.sample("z", dist.Normal(pyro.param("loc", 0.1 * X), 0.01).to_event(1))
        pyro.sample("x", law(0.5 * z))

    gradients = []
    for kind in (Trace_ELBO, TraceGraph_ELBO):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        kind().loss_and_grads(model, guide)
        gradients.append(pyro.param("loc").grad.clone())
    pyro.clear_param_store()
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=0)
