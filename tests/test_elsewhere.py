"""What khot does where docs/coming_from.md says that other libraries do something else; these need not be installed."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor, tensor
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint

from khot import (
    Brewer,
    ConditionalPoisson,
    GumbelTopK,
    ParetoSampling,
    Pivotal,
    PlackettLuce,
    RelaxedKHot,
    Sampford,
    Systematic,
    capped_softmax,
    perturbed_topk,
    sigmoid_topk,
    sparse_topk,
    topk_mask,
    topk_metric_loss,
)
from khot.nn import BatchTopK, KHotGate, NMSparsity, TokenChoice, TopK, topk_attention
from tests import gof
from tests.inputs import normal

SIX = tensor([0.15, 0.3, 0.45, 0.6, 0.7, 0.8], dtype=torch.float64)
FIVE = tensor([0.15, 0.25, 0.35, 0.5, 0.75], dtype=torch.float64)
CERTAIN = tensor([1.0, 0.8, 0.6, 0.4, 0.2], dtype=torch.float64)

METRICS = ("precision", "recall", "mrr", "ndcg")


def double(*values: float) -> Tensor:
    return tensor(values, dtype=torch.float64)


def draws(design, count: int = 10_000) -> Tensor:
    torch.manual_seed(0)
    return design.sample((count,)).double()


# torch.topk and torch.sort


def test_of_equal_scores_the_earlier_ones_are_kept():
    ones = torch.ones(300)
    for k in (3, 100, 299):
        assert topk_mask(ones, k).nonzero().flatten().tolist() == list(range(k))
        assert TopK(k).select(ones).indices.tolist() == list(range(k))
    assert topk_mask(tensor([-0.0, 0.0, 1.0, 0.0]), 2).tolist() == [1, 0, 1, 0], "zeros are equal, whatever their sign"
    with pytest.raises(ValueError, match="must not contain NaN"):
        topk_mask(tensor([1.0, math.nan]), 1)


def test_zeros_after_a_relu_give_the_outputs_of_torch_topk():
    """An autoencoder that is ported keeps other zeros, whose values are no different."""
    x = relu(normal(50, 300, dtype=torch.float32) - 1.5)
    values, indices = x.topk(100)
    there = torch.zeros_like(x).scatter(-1, indices, values)
    torch.testing.assert_close(TopK(100)(x), there, rtol=0, atol=0)
    earliest = (x == 0).cumsum(-1) <= 100 - (x > 0).sum(-1, keepdim=True)
    torch.testing.assert_close(topk_mask(x, 100), ((x > 0) | earliest).float(), rtol=0, atol=0)


def test_checkpoints_repeat_draws_from_the_default_generator():
    """Torch does not set back a generator of one's own, so the second run would draw something else."""
    logits = torch.zeros(200, requires_grad=True)

    def block(x: Tensor, generator: torch.Generator | None) -> Tensor:
        return x.exp() * ConditionalPoisson(logits=x.detach(), k=100).sample(generator=generator)

    for reentrant in (False, True):
        logits.grad = None
        y = checkpoint(block, logits, None, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(logits.grad != 0, y != 0)
        y = checkpoint(block, logits, torch.Generator(), use_reentrant=reentrant)
        with pytest.raises(RuntimeError, match="draw before the block"):
            y.sum().backward()


def test_queries_without_keys_are_zero():
    x = normal(1, 2, 4)
    open_keys = tensor([[True, True], [False, False]])
    assert topk_attention(x, x, x, 1, attn_mask=open_keys)[0, 1].tolist() == [0.0] * 4


def test_two_of_four_is_half():
    assert (NMSparsity(2, 4)(normal(64, 64)) != 0).double().mean() == 0.5


# Survey packages


def test_surveys_draw_with_the_probabilities_they_were_given():
    for probs in (SIX, FIVE, CERTAIN):
        k = round(probs.sum().item())
        for design in (
            Brewer(probs=probs),
            Sampford(probs=probs),
            Systematic(probs=probs),
            Systematic(probs=probs, order="random"),
            Pivotal(probs=probs),
        ):
            found = draws(design)
            gof.check_k_hot(found, k)
            gof.check_inclusion(found, probs)
            torch.testing.assert_close(design.mean, probs, rtol=1e-12, atol=0)


def test_two_units_in_turn_have_the_probabilities_of_successive_sampling():
    """Murthy's procedure: the second unit is drawn by the sizes of those that are left."""
    p = FIVE / FIVE.sum()
    exact = p + sum(torch.where(torch.arange(5) == i, 0.0, p[i] * p / (1 - p[i])) for i in range(5))
    design = GumbelTopK(logits=FIVE.log(), k=2)
    torch.testing.assert_close(design.mean, exact, rtol=1e-12, atol=0)
    torch.testing.assert_close(exact, double(0.1716, 0.2783, 0.3775, 0.5090, 0.6635), rtol=0, atol=5e-5)
    gof.check_inclusion(draws(design), exact)


def test_rows_of_systematic_samples_of_equal_probabilities_reach_the_last_units():
    probs = torch.full((11,), 4 / 11, dtype=torch.float64)
    for order in ("fixed", "random"):
        gof.check_inclusion(draws(Systematic(probs=probs, order=order)), probs)


def test_pareto_sampling_draws_every_sample():
    support = double(*[0.5] * 6)
    found = draws(ParetoSampling(probs=support, adjust=None))
    gof.check_inclusion(found, support)
    assert len(found.unique(dim=0)) == math.comb(6, 3)


def test_pivotal_samples_are_exactly_zero_or_one():
    gof.check_k_hot(draws(Pivotal(probs=double(*range(1, 7)) / 7)), 3)


def test_conditional_poisson_takes_certain_and_impossible_units_anywhere():
    for probs in (double(1, 0.5, 0.5), double(0.5, 0.5, 1), double(0.5, 0.5, 0.5, 0.5, 0, 0), double(1, 0.2, 0.3, 0.5)):
        design = ConditionalPoisson(probs=probs)
        torch.testing.assert_close(design.mean, probs, rtol=1e-12, atol=0)
        gof.check_inclusion(draws(design, 2000), probs)
    certain = double(1, 0.5, 0.5, 0.4, 0.6)
    pairs = ConditionalPoisson(probs=certain).pairwise_inclusion
    torch.testing.assert_close(pairs[0], certain, rtol=1e-12, atol=0)


def test_pairs_of_probabilities_that_differ_by_rounding():
    """0.1 + 0.2 is the number after 0.3: a quotient of differences would divide rounding by rounding."""
    for rest, pair in (((0.6, 0.8), 0.03472), ((0.5, 0.9), 0.02206), ((0.4, 0.7, 0.3), 0.04142)):
        near = ConditionalPoisson(probs=double(0.3, 0.1 + 0.2, *rest)).pairwise_inclusion
        equal = ConditionalPoisson(probs=double(0.3, 0.3, *rest)).pairwise_inclusion
        torch.testing.assert_close(near, equal, rtol=1e-12, atol=1e-14)
        assert abs(near[0, 1].item() - pair) < 1e-5


def test_brewers_method_draws_k_units_beside_a_rare_one():
    probs = double(9e-7, 0.5, 0.5, 0.4, 0.6 - 9e-7)
    gof.check_k_hot(draws(Brewer(probs=probs), 2000), 2)


def test_means_of_urns():
    """The noncentral hypergeometric distributions of Fisher and of Wallenius, by enumeration."""
    odds = double(1, 1, 1, 1, 1, 20)
    weights = {units: math.prod(odds[list(units)].tolist()) for units in combinations(range(6), 3)}
    fisher = sum(w for units, w in weights.items() if 5 in units) / sum(weights.values())
    wallenius = 1 - 5 / 25 * 4 / 24 * 3 / 23  # the large one is not among three draws
    for design, large in (
        (ConditionalPoisson(logits=odds.log(), k=3), fisher),
        (GumbelTopK(logits=odds.log(), k=3), wallenius),
    ):
        exact = double(*[(3 - large) / 5] * 5, large)
        torch.testing.assert_close(design.mean, exact, rtol=1e-12, atol=0)


def test_excluded_units_are_a_legal_parameter():
    logits = double(0, 1, -math.inf)
    exact = torch.softmax(logits, -1)
    for design in (ConditionalPoisson(logits=logits, k=1), GumbelTopK(logits=logits, k=1)):
        torch.testing.assert_close(design.mean, exact, rtol=1e-12, atol=0)
    for refusing in (ConditionalPoisson, GumbelTopK, PlackettLuce):
        with pytest.raises(ValueError, match="above -inf"):
            refusing(logits=logits, k=3)


# Relaxed maps


def test_masks_stay_below_one_and_depend_on_the_scale_of_the_scores():
    x = torch.arange(6.0)
    for softness in (0.05, 0.1, 0.5, 2.0):
        assert sigmoid_topk(x, 3, softness).max() <= 1
    wide, narrow = sigmoid_topk(100 * x + 7, 3, 50.0), sigmoid_topk(x, 3, 0.5)
    torch.testing.assert_close(wide, narrow, rtol=1e-5, atol=1e-6)
    assert (sigmoid_topk(100 * x + 7, 3, 0.5) - narrow).abs().max() > 0.2


def test_entmax_tends_to_softmax_and_refuses_the_limit():
    x = double(1, 2, 4)
    alpha = tensor(1.0001, dtype=torch.float64, requires_grad=True)
    y = sparse_topk(x, 1, 1 / (alpha.detach() - 1), p=1.0001)
    torch.testing.assert_close(y, torch.softmax(x, -1), rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match="1 < p <= 2"):
        sparse_topk(x, 1, 1.0, p=1.0)


def test_noise_of_a_perturbed_mask_moves_no_entry_on_average():
    """Equal scores have the mask k / n under noise of any mean."""
    torch.manual_seed(0)
    y = perturbed_topk(torch.zeros(4, dtype=torch.float64), 1, num_samples=40_000)
    limit = gof.Z_LIMIT * math.sqrt(0.25 * 0.75 / 40_000)
    assert (y - 0.25).abs().max() < limit


def test_masks_of_wide_scores_sum_to_k():
    y = capped_softmax(10 * normal(100, 64, dtype=torch.float32), 8, 0.1)
    torch.testing.assert_close(y.double().sum(-1), torch.full((100,), 8.0, dtype=torch.float64), rtol=1e-6, atol=0)


def test_each_draw_of_a_relaxed_choice_has_a_density():
    torch.manual_seed(0)
    for temperature in (0.1, 0.05, 0.005):
        relaxed = RelaxedKHot(temperature, logits=normal(10, dtype=torch.float32), k=1, validate_args=True)
        assert relaxed.log_prob(relaxed.sample((1000,))).isfinite().all()


# Autoencoders and routers


def test_batch_topk_rounds_the_number_of_entries():
    x = 0.01 + normal(100, 32).abs()
    assert [int((BatchTopK(k)(x) != 0).sum()) for k in (0.29, 0.57, 0.58, 1.15)] == [29, 57, 58, 115]


def test_threshold_of_batch_topk_is_right_after_one_batch():
    batches = [relu(normal(512, 32, seed=seed, dtype=torch.float32)) for seed in range(2)]
    topk = BatchTopK(4)
    with pytest.raises(RuntimeError, match="before it has been trained"):
        topk.to_jumprelu()
    smallest = topk(batches[0]).where(batches[0] > 0, torch.inf)
    assert topk.threshold == smallest[smallest > 0].min()
    assert topk.state_dict()["threshold"] == topk.threshold
    kept = (topk.to_jumprelu()(batches[1]) != 0).double().sum(-1)
    assert abs(kept.mean() - 4) < gof.Z_LIMIT * 2 * kept.std() / math.sqrt(512), "two samples"


def test_untrained_batch_topk_keeps_the_largest_entries_of_its_batch():
    with pytest.warns(RuntimeWarning, match="no threshold before it has been trained"):
        y = BatchTopK(2).eval()(relu(normal(64, 32)))
    assert (y != 0).sum() == 128


def test_balance_loss_is_one_at_equal_loads():
    logits = torch.zeros(6, 4)
    for token, experts in enumerate(combinations(range(4), 2)):
        logits[token, list(experts)] = 5.0
    router = TokenChoice(2)
    weights = router(logits)
    torch.testing.assert_close(router.balance_loss(), tensor(1.0))
    chosen = logits.masked_fill(weights == 0, -torch.inf)
    torch.testing.assert_close(weights, torch.softmax(chosen, -1))


def test_layers_that_use_half_of_their_experts_are_not_balanced_by_others():
    first = tensor([[9.0, 9.0, 0.0, 0.0]]).repeat(8, 1)
    losses = []
    for logits in (first, first.flip(-1)):
        router = TokenChoice(2)
        router(logits)
        losses.append(router.balance_loss().item())
    assert losses == pytest.approx([2.0, 2.0], rel=1e-3)


def test_closed_experts_lose_to_any_open_one():
    """With -inf, as transformers closes groups now: negative logits of open experts do not matter."""
    logits = tensor([[-3.0, -2.0, -torch.inf, -torch.inf, -9.0, -1.0]])
    assert TokenChoice(4).select(logits).indices.sort().values.tolist() == [[0, 1, 4, 5]]


def test_routers_draw_nothing_and_gates_draw_for_each_row():
    logits = 5 * normal(100, 4)
    for router in (TokenChoice(2), TokenChoice(2).eval()):
        torch.testing.assert_close(router(logits), router(logits), rtol=0, atol=0)
    torch.manual_seed(0)
    assert (KHotGate(20, 10)(torch.ones(50, 20)) != 0).unique(dim=0).shape[0] == 50


# Rankings


def test_rank_metrics_depend_on_the_order_alone_and_take_means_of_equal_scores():
    relevant = tensor([False, False, True])
    for x in (double(3, 2, 1), double(-1, -2, -3)):
        found = [1 - topk_metric_loss(x, relevant, 3, metric, softness=0.01) for metric in METRICS]
        torch.testing.assert_close(torch.stack(found), double(1 / 3, 1, 1 / 3, 0.5))
    for k in (3, 100):
        found = [
            1 - topk_metric_loss(torch.ones(300), torch.arange(300) < 100, k, metric, softness=0.01)
            for metric in ("precision", "ndcg")
        ]
        torch.testing.assert_close(torch.stack(found), tensor([1 / 3, 1 / 3]))
    x, relevance = double(3, 2, 1).repeat(2, 1), tensor([[1, 1, 0], [0, 0, 0]])
    assert topk_metric_loss(x, relevance, 2, "precision", softness=0.01) == pytest.approx(0), "a query without any"
    for metric in METRICS:  # of a constant model, the relevant row first
        assert 1 - topk_metric_loss(torch.ones(4), torch.arange(4) == 0, 1, metric) == pytest.approx(0.25)
    close = topk_metric_loss(double(100000.0, 100000.001), tensor([False, True]), 2, "mrr", softness=1e-6)
    assert close == pytest.approx(0), "further apart than numbers of float64"
    for gain in ("linear", "exp2"):
        perfect = topk_metric_loss(double(30, 20, 10, 0), double(3, 2, 1, 0), 4, "ndcg", softness=0.01, gain=gain)
        assert perfect == pytest.approx(0)


# Export


class Draw(torch.nn.Module):
    def __init__(self, design):
        super().__init__()
        self.design = design

    def forward(self, logits: Tensor) -> Tensor:
        return self.design(logits=logits, k=3).sample()


def test_an_exported_draw_of_plackett_luce_is_not_by_multinomial():
    """Whose conversion to ONNX draws with replacement."""
    program = torch.export.export(Draw(PlackettLuce), (torch.zeros(4, 8),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("multinomial" in name for name in names)
    torch.manual_seed(0)
    ranking = program.module()(torch.zeros(4, 8))
    assert all(len(set(row)) == 3 for row in ranking.tolist())
