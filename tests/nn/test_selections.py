"""Entries, tokens and experts that are chosen, with their places: TopK.select, GatherTopK and the routers."""

import copy

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import khot
from khot.nn import ExpertChoice, GatherTopK, TokenChoice, TopK
from tests.inputs import normal

OPTIONS = [{}, {"softness": 0.5}, {"softness": 0.5, "straight_through": True}]
X = normal(4, 6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_a_selection_is_what_the_module_keeps(options, dim):
    module = TopK(3, **options, dim=dim)
    values, indices = module.select(X)
    assert values.shape == indices.shape and values.shape[dim] == 3 and indices.dtype == torch.int64
    assert (indices.diff(dim=dim) > 0).all()
    torch.testing.assert_close(values, module(X).gather(dim, indices))
    hard = torch.zeros_like(X).scatter(dim, indices, 1.0)
    assert torch.equal(hard, khot.topk_mask(X, 3, dim=dim))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_a_selection_are_those_of_the_entries(options):
    module, x = TopK(2, **options), X.clone().requires_grad_()
    values, indices = module.select(x)
    cotangent = normal(4, 2, seed=5)
    (found,) = torch.autograd.grad((values * cotangent).sum(), x)
    (expected,) = torch.autograd.grad((module(x).gather(-1, indices) * cotangent).sum(), x)
    torch.testing.assert_close(found, expected)
    if not options.get("straight_through"):
        assert gradcheck(lambda x: module.select(x).values, x) and gradgradcheck(lambda x: module.select(x).values, x)


def test_selections_of_several_axes_of_magnitudes_and_of_ties():
    values, indices = TopK(4, dim=(0, 1)).select(X)
    assert torch.equal(X.flatten()[indices], values) and (indices.diff() > 0).all()
    values, indices = TopK(2, by="magnitude").select(torch.tensor([0.5, -3.0, 1.0]))
    assert (values.tolist(), indices.tolist()) == ([-3, 1], [1, 2])
    assert TopK(2).select(torch.ones(3, 5)).indices.tolist() == [[0, 1]] * 3
    assert TopK(0).select(X).values.shape == (4, 0)
    assert TopK(2).select(X, 3).values.shape == (4, 3)


def test_selections_under_transforms_and_in_graphs():
    torch.compiler.reset()
    module = TopK(2, softness=0.5)
    expected = module.select(X)
    for found in (
        torch.func.vmap(module.select)(X),
        torch.compile(module.select, fullgraph=True, backend="aot_eager")(X),
    ):
        torch.testing.assert_close(tuple(found), tuple(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_selections_in_half_precision(dtype):
    values, indices = TopK(2, softness=0.5).select(X.to(dtype))
    single = TopK(2, softness=0.5).select(X.to(dtype).float())
    assert torch.equal(values, single.values.to(dtype)) and torch.equal(indices, single.indices)


def test_errors_of_selections():
    for call in (lambda: TopK(2.5, softness=0.5).select(X), lambda: TopK(2).select(X, torch.tensor([1, 2, 1, 2]))):
        with pytest.raises(TypeError, match="`k` must be an int for a selection"):
            call()
    with pytest.raises(ValueError, match="`k` must satisfy 0 <= k <= n"):
        TopK(7).select(X)
    with pytest.raises(ValueError, match="entries above -inf"):
        TopK(3).select(torch.tensor([1.0, -torch.inf, -torch.inf, 2.0]))


class TestGatherTopK:
    TOKENS = normal(4, 6, 3, seed=2)

    def test_scores_have_the_gradient_of_the_relaxed_mask(self):
        module, scores, tokens = (
            GatherTopK(2, softness=0.5),
            X.clone().requires_grad_(),
            self.TOKENS.clone().requires_grad_(),
        )
        values, indices = module(scores, tokens)
        cotangent = normal(4, 2, 3, seed=7)
        found = torch.autograd.grad((values * cotangent).sum(), (scores, tokens))
        places = indices.unsqueeze(-1).expand(-1, -1, 3)
        spread = torch.zeros_like(tokens).scatter(-2, places, cotangent)
        relaxed = khot.sigmoid_topk(scores, 2, 0.5).unsqueeze(-1)
        (of_scores,) = torch.autograd.grad((relaxed * tokens.detach() * spread).sum(), scores)
        torch.testing.assert_close(found, (of_scores, spread))

    def test_the_rest_is_a_weighted_mean(self):
        scores, tokens = X.clone(), self.TOKENS
        scores[1] = torch.tensor([1.0, -torch.inf, 2.0, -torch.inf, -torch.inf, -torch.inf])  # nothing is left
        module = GatherTopK(2, rest=True)
        values, indices = module(scores, tokens)
        assert torch.equal(values[:, :2], GatherTopK(2)(scores, tokens).values) and indices.shape == (4, 2)
        for row, place, of_row, found in zip(scores, indices.tolist(), tokens, values[:, 2], strict=True):
            others = [i for i in range(6) if i not in place and row[i] > -torch.inf]
            expected = row[others].softmax(-1) @ of_row[others] if others else torch.zeros(3)
            torch.testing.assert_close(found, expected.double())
        assert gradcheck(
            lambda s, t: module(s, t).values, (X.clone().requires_grad_(), tokens.clone().requires_grad_())
        )
        assert module(X, tokens, 6).values[:, 6].eq(0).all() and module(X, tokens, 0).values.shape == (4, 1, 3)
        assert repr(module) == "GatherTopK(k=2, rest=True)"

    def test_without_a_softness_tokens_have_the_only_gradient(self):
        scores, tokens = X.clone().requires_grad_(), self.TOKENS.clone().requires_grad_()
        grads = torch.autograd.grad(GatherTopK(2)(scores, tokens).values.sum(), (scores, tokens), allow_unused=True)
        assert grads[0] is None and (grads[1].sum((1, 2)) == 6).all()

    def test_state_copies_graphs_and_transforms(self):
        torch.compiler.reset()
        module, fresh = (
            GatherTopK(2, softness=0.5, learn_softness=True),
            GatherTopK(2, softness=0.1, learn_softness=True),
        )
        fresh.load_state_dict(module.state_dict())
        torch.testing.assert_close(fresh.softness, module.softness)
        expected = tuple(module(X, self.TOKENS))
        for call in (
            copy.deepcopy(module),
            torch.func.vmap(module),
            torch.compile(module, fullgraph=True, backend="aot_eager"),
            torch.export.export(module, (X, self.TOKENS)).module(),
        ):
            torch.testing.assert_close(tuple(call(X, self.TOKENS)), expected)
        assert repr(module) == "GatherTopK(k=2, softness=0.5, relaxation=sigmoid_topk, straight_through=True, " + (
            "learn_softness=True)"
        )

    def test_half_precision_of_either(self):
        for scores, tokens in ((X.half(), self.TOKENS.float()), (X.float(), self.TOKENS.bfloat16())):
            assert GatherTopK(2, softness=0.5)(scores, tokens).values.dtype == tokens.dtype

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`tokens` must have shape \(4, 6, d\)"):
            GatherTopK(2)(X, self.TOKENS[:, :5])
        with pytest.raises(TypeError, match="`k` must be an int"):
            GatherTopK(2.5, softness=0.5)
        with pytest.raises(ValueError, match="`k` must be at least 0"):
            GatherTopK(-1)
        with pytest.raises(ValueError, match="`k` must satisfy"):
            GatherTopK(7)(X, self.TOKENS)
        module = GatherTopK(2)
        with pytest.raises(ValueError, match="`softness` cannot be assigned"):
            module.softness = 0.5


class TestTokenChoice:
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_weights_sum_to_one_and_a_selection_has_them(self, options):
        router = TokenChoice(2, **options)
        weights = router(X)
        torch.testing.assert_close(weights.sum(-1), torch.ones(4).double())
        values, indices = router.select(X)
        of_chosen = weights.gather(-1, indices)  # of a relaxed mask, the others have a share, too
        torch.testing.assert_close(values, of_chosen / of_chosen.sum(-1, keepdim=True))
        if not options.get("straight_through"):
            x = X.clone().requires_grad_()
            assert gradcheck(router, x) and gradgradcheck(router, x)

    def test_straight_through_reaches_the_other_experts(self):
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(TokenChoice(2, softness=0.5, straight_through=True)(x)[:, 0].sum(), x)
        assert grad.all()

    def test_losses_are_those_of_the_papers(self):
        router = TokenChoice(2)
        with pytest.raises(RuntimeError, match="before its first call in training mode"):
            router.balance_loss()
        router.eval()(X)
        with pytest.raises(RuntimeError, match="before its first call in training mode"):
            router.z_loss()
        x = X.clone().requires_grad_()
        router.train()(x.view(2, 2, 6))
        chosen = khot.topk_mask(X, 2)
        share, probability = chosen.mean(0) / 2, X.softmax(-1).mean(0)
        torch.testing.assert_close(router.balance_loss(), 6 * (share * probability).sum())
        torch.testing.assert_close(router.z_loss(), X.exp().sum(-1).log().square().mean())
        (grad,) = torch.autograd.grad(router.balance_loss() + router.z_loss(), x)
        assert grad.all()
        even = TokenChoice(1)
        even(torch.eye(3))
        torch.testing.assert_close(even.balance_loss(), torch.tensor(1.0))

    def test_capacity_is_clamped_and_changes(self):
        router = TokenChoice(1, capacity=9)
        assert torch.equal(router(X), TokenChoice(1)(X))
        router.capacity = 1
        assert ((router(X) > 0).sum(-2) <= 1).all() and (
            router(torch.ones(4, 2)).sum(-1) == torch.tensor([1, 0, 0, 0])
        ).all()
        router.capacity = None
        assert torch.equal(router(X), TokenChoice(1)(X))
        for wrong, error in ((0, ValueError), (0.0, ValueError), ("1", TypeError)):
            with pytest.raises(error, match="`capacity` must be"):
                router.capacity = wrong

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_a_float_is_a_factor_of_the_equal_load(self, options):
        """As in Switch: rounded up, and for each sequence."""
        x = normal(3, 20, 4)
        of_each = torch.tensor([[2] * 20, [1] * 20, [3] * 10 + [0] * 10])
        for factor, k, loads in (
            (1.25, 2, [13] * 3),  # 12.5 of 20 * 2 choices for 4 experts
            (1.1, 2, [11] * 3),  # 11.000000000000002 in floating-point numbers
            (2.0, 2, [20] * 3),
            (0.3, of_each, [3, 2, 3]),  # of 40, 20 and 30 choices
        ):
            router, found = TokenChoice(2, capacity=factor, **options), []
            for row, load in enumerate(loads):
                k_of_row = k[row] if isinstance(k, torch.Tensor) else k
                found.append(TokenChoice(2, capacity=load, **options)(x[row], k_of_row))
            torch.testing.assert_close(router(x, k), torch.stack(found))
            torch.testing.assert_close(torch.func.vmap(router)(x, of_each), router(x, of_each))
        assert "capacity=1.25" in repr(TokenChoice(2, capacity=1.25))

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("gap", [200.0, 1e30])  # the second choices have tiny probabilities, or 0 in float32
    def test_a_full_expert_leaves_its_weight_to_one_that_suits_far_less(self, options, gap):
        """And an expert keeps the token that it suits best, however small the probabilities are."""
        x = (torch.tensor([[1.0, 0.0, -1.0], [1.0, 0.5, -1.0]]) * gap).requires_grad_()
        weights = TokenChoice(2, capacity=1, **options)(x)
        torch.testing.assert_close(weights, torch.eye(2, 3))
        (grad,) = torch.autograd.grad(weights[:, 1].sum(), x)
        assert grad.isfinite().all()

    def test_one_k_for_each_token_and_excluded_experts(self):
        k = torch.tensor([1, 2, 3, 6])
        assert ((TokenChoice(2)(X, k) > 0).sum(-1) == k).all()
        masked = X.masked_fill(torch.arange(6) < 2, -torch.inf)
        weights = TokenChoice(2)(masked)
        assert not weights[:, :2].any() and weights.isfinite().all()

    @pytest.mark.parametrize("options", [*OPTIONS, {"capacity": 2}, {"softness": 0.5, "capacity": 2}], ids=str)
    @pytest.mark.parametrize("padding", [False, True])
    def test_tokens_without_experts_get_zeros(self, options, padding):
        """Also with a large incoming gradient, and in a graph that cannot look at the contents."""
        x, k = X.float(), torch.tensor([0, 1, 0, 2])
        if padding:
            x[k == 0] = -torch.inf
        for router in (TokenChoice(2, **options), torch.compile(TokenChoice(2, **options), backend="aot_eager")):
            leaf = x.clone().requires_grad_()
            weights = router(leaf, k)
            (grad,) = torch.autograd.grad(1e4 * weights[:, 0].sum(), leaf)
            torch.testing.assert_close(weights.sum(-1), (k > 0).float())
            assert grad.isfinite().all() and not grad[k == 0].any()
            for loss in (router.balance_loss(), router.z_loss()):
                assert torch.autograd.grad(loss, leaf)[0].isfinite().all()
        if not padding:
            leaf = x.clone().requires_grad_()
            weights = TokenChoice(0, **options)(leaf)
            assert not weights.any() and not torch.autograd.grad(1e4 * weights[:, 0].sum(), leaf)[0].any()

    def test_losses_leave_padding_out(self):
        padded, router = torch.cat([X, torch.full((3, 6), -torch.inf).double()]), TokenChoice(2)
        router(X)
        expected = router.balance_loss(), router.z_loss()
        router(padded, torch.tensor([2] * 4 + [0] * 3))
        torch.testing.assert_close((router.balance_loss(), router.z_loss()), expected)

    def test_copies_have_no_losses(self):
        router = TokenChoice(2)
        router(X.clone().requires_grad_())
        twin = copy.deepcopy(router)
        with pytest.raises(RuntimeError):
            twin.balance_loss()


def test_expert_choice_selects_with_places():
    gates = normal(2, 7, 3)
    router = ExpertChoice(2)
    values, indices = router.select(gates)
    assert values.shape == indices.shape == (2, 2, 3)
    torch.testing.assert_close(values, router(gates).gather(-2, indices))
    assert router.select(gates[:, :1]).values.shape == (2, 1, 3)
    padded = gates.index_fill(-2, torch.arange(6), -torch.inf)
    assert ((router.select(padded).values != 0).sum(-2) == 1).all()
