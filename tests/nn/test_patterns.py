"""Sparse weights as parametrisations: axes of groups, shares of a whole weight, and patterns that are fixed."""

import copy
import io

import pytest
import torch
from torch.nn.utils import parametrize

import khot
from khot.nn import Anneal, MagnitudeSparsity, NMSparsity
from tests.inputs import normal

MAKERS = [
    lambda: NMSparsity(2, 4),
    lambda: NMSparsity(2, 4, softness=0.5),
    lambda: MagnitudeSparsity(0.5, strength=0.1),
]
W = normal(3, 8)


def sparse_linear(sparsity):
    layer = torch.nn.Linear(8, 3)
    return parametrize.register_parametrization(layer, "weight", sparsity)


def test_groups_along_the_input_channels_of_a_convolution():
    layer = torch.nn.Conv2d(8, 5, 3)
    parametrize.register_parametrization(layer, "weight", NMSparsity(2, 4, dim=1))
    kept = (layer.weight != 0).view(5, 2, 4, 3, 3)
    assert (kept.sum(2) == 2).all()
    expected = NMSparsity(2, 4)(layer.parametrizations.weight.original.movedim(1, -1)).movedim(-1, 1)
    assert torch.equal(layer.weight, expected)
    assert layer(torch.ones(1, 8, 4, 4)).isfinite().all()
    assert repr(layer.parametrizations.weight[0]) == "NMSparsity(n=2, m=4, dim=1)"
    with pytest.raises(ValueError, match="`m` must divide axis 1, but got m=4"):
        NMSparsity(2, 4, dim=1)(torch.ones(4, 6, 3))
    with pytest.raises(ValueError, match="`dim` must be an axis of the weight"):
        NMSparsity(2, 4, dim=2)(torch.ones(4, 4))


def test_learned_scores_along_another_axis():
    scores = normal(8, 3, seed=4)
    module = NMSparsity(2, 4, softness=0.5, straight_through=True, scores=scores, dim=0)
    assert torch.equal(module(W.T) != 0, khot.topk_mask(scores.T.reshape(3, 2, 4), 2).reshape(3, 8).T != 0)


def test_a_share_of_the_weights_that_falls():
    layer = sparse_linear(MagnitudeSparsity(1.0))
    schedule = Anneal(layer.parametrizations.weight[0], "density", end=0.25, steps=3)
    found = []
    for _ in range(4):
        found.append(int((layer.weight != 0).sum()))
        schedule.step()
    assert found == [24, 18, 12, 6]


def test_relaxed_magnitudes_have_their_share_in_evaluation():
    module = MagnitudeSparsity(0.25, strength=0.5, p=4 / 3)
    soft = khot.sparse_topk_magnitude(W.flatten(), 6, 0.5, 4 / 3).view_as(W)
    torch.testing.assert_close(module(W), soft)
    hard = module.eval()(W)
    assert (hard != 0).sum() == 6 and torch.equal(hard[hard != 0], soft[hard != 0])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_fixed_pattern_stays(make, at_once):
    layer = sparse_linear(make())
    module, dense = layer.parametrizations.weight[0], layer.parametrizations.weight.original
    module.freeze(dense if at_once else None)
    assert "frozen" in repr(module)
    pattern = layer.weight != 0
    assert torch.equal(pattern, module._pattern_of(dense.detach()))
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        layer(normal(9, 8, seed=step, dtype=torch.float32)).square().sum().backward()
        assert not dense.grad[~pattern].any() and dense.grad[pattern].all()
        optimizer.step()
    assert torch.equal(layer.weight != 0, pattern)
    dense.data.mul_(torch.where(pattern, 1e-6, 1.0))  # the others are larger now
    assert torch.equal(layer.weight != 0, pattern)
    module.unfreeze()
    assert "frozen" not in repr(module) and not torch.equal(layer.weight != 0, pattern)


@pytest.mark.parametrize("make", MAKERS)
def test_states_have_the_pattern(make):
    layer, file = sparse_linear(make()), io.BytesIO()
    before = copy.deepcopy(layer.state_dict())
    for parametrization in layer.parametrizations.weight:
        parametrization.freeze()
    assert torch.equal(layer(torch.eye(8)), copy.deepcopy(layer)(torch.eye(8)))
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    for assign in (False, True):
        fresh = sparse_linear(make())
        fresh.load_state_dict(before)  # of a time before there were patterns
        fresh.load_state_dict(state, assign=assign)
        fresh.parametrizations.weight.original.data.uniform_(1, 2)
        assert torch.equal(fresh.weight != 0, layer.weight != 0)
    with pytest.raises(RuntimeError, match="Missing key.*pattern"):
        fresh.load_state_dict(before)


@pytest.mark.parametrize("make", [NMSparsity, lambda: MagnitudeSparsity(0.5)], ids=["two_of_four", "magnitude"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_pattern_follows_the_weight(make, assign):
    """A module on an accelerator loads a state from the memory of the host."""
    module, frozen = make().to("meta"), make()
    frozen.freeze(W)
    module.load_state_dict(frozen.state_dict(), assign=assign)
    assert module(W.to("meta")).is_meta and module.pattern.is_meta


@pytest.mark.parametrize("make", [*MAKERS, lambda: MagnitudeSparsity(0.5)])
@pytest.mark.parametrize("how", ["at_once", "in_a_call", "loaded"])
def test_a_pattern_of_inference_mode_can_be_trained(make, how):
    module, x, state = make(), W.clone().requires_grad_(), {"pattern": make()._pattern_of(W)}
    with torch.inference_mode():
        if how == "loaded":
            module.load_state_dict(state)
        else:
            module.freeze(W if how == "at_once" else None)
        module(W)
    y = module(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], module.pattern.double())


def test_a_fixed_pattern_in_half_precision_and_in_a_graph():
    torch.compiler.reset()
    layer = sparse_linear(NMSparsity(2, 4))
    layer.parametrizations.weight[0].freeze()
    x = normal(2, 8, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    layer.parametrizations.weight.original.data.uniform_(1, 2)
    torch.testing.assert_close(compiled(x), layer(x))
    assert layer.bfloat16().weight.dtype == torch.bfloat16
    assert layer.parametrizations.weight[0].pattern.dtype == torch.bool
    with pytest.raises(ValueError, match="`weight` must have the shape"):
        layer.parametrizations.weight[0](torch.ones(2, 4))


def test_transposable_tiles_are_the_best_of_all():
    """Against all matrices of 16 bits, of which 90 have two ones in every row and column; ties, the scale, and axes."""
    bits = (torch.arange(2**16)[:, None] >> torch.arange(16) & 1).view(-1, 4, 4)
    patterns = bits[((bits.sum(1) == 2) & (bits.sum(2) == 2)).all(-1)]
    assert len(patterns) == 90
    module, weight = NMSparsity(transposable=True), normal(8, 12)
    for scale in (1.0, 1e300, 1e-320):
        tiles = weight.mul(scale).view(2, 4, 3, 4).movedim(2, 1)
        kept = module(weight * scale).view(2, 4, 3, 4).movedim(2, 1)
        assert ((kept != 0).sum(-1) == 2).all() and ((kept != 0).sum(-2) == 2).all()
        best = torch.einsum("rcij,pij->rcp", tiles.div(scale).abs(), patterns.double()).amax(-1)
        torch.testing.assert_close(kept.div(scale).abs().sum((-1, -2)), best, rtol=1e-2 if scale < 1 else 1e-12, atol=0)
    for dim, shape in ((0, (8, 4, 3)), (1, (8, 4, 3)), (2, (4, 3, 8))):
        of_convolution = NMSparsity(dim=dim, transposable=True)(normal(*shape)) != 0
        for axis in {dim, 1 if dim == 0 else 0}:
            assert (of_convolution.movedim(axis, -1).unflatten(-1, (-1, 4)).sum(-1) == 2).all()
    module.n = 1
    assert ((module(torch.ones(4, 4)) != 0) == torch.eye(4).flip(1).bool().flip(1)).all() and "transposable" in repr(
        module
    )


def test_magnitudes_compete_along_axes():
    weight = normal(4, 3, 2, 2)
    for strength in (None, 0.3):
        module = MagnitudeSparsity(0.5, strength=strength, dim=(1, 2, 3)).eval()
        for channel, alone in zip(module(weight), weight, strict=True):
            torch.testing.assert_close(channel, MagnitudeSparsity(0.5, strength=strength).eval()(alone))
    assert repr(MagnitudeSparsity(0.5, dim=-1)) == "MagnitudeSparsity(density=0.5, dim=(-1,))"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NMSparsity(2, 8, transposable=True), ValueError, "`m` must be at most 4"),
        (lambda: NMSparsity(transposable=True, softness=1.0), ValueError, "`transposable` patterns are hard"),
        (lambda: NMSparsity(transposable=True)(torch.ones(6, 4)), ValueError, "`transposable` needs a second axis"),
        (lambda: NMSparsity(transposable=1), TypeError, "`transposable` must be True or False"),
        (lambda: MagnitudeSparsity(0.5, dim=0.5), TypeError, "`dim` must be an int"),
        (lambda: MagnitudeSparsity(1.5), ValueError, "`density` must satisfy"),
        (lambda: MagnitudeSparsity("1"), TypeError, "`density` must be a real number"),
        (lambda: MagnitudeSparsity(0.5, strength=0.0), ValueError, "`strength` must be positive"),
        (lambda: MagnitudeSparsity(0.5, strength=1.0, p=3.0), ValueError, "`p` must"),
        (lambda: NMSparsity(dim=0.5), TypeError, "`dim` must be an int"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()
