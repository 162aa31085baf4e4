"""Fenchel-Young losses against 60-digit arithmetic and their theory, top-k cross-entropy against its definition."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, vmap
from torch.nn.functional import cross_entropy, log_softmax

from khot import (
    fenchel_young_topk_loss,
    knn_loss,
    lapsum_topk,
    normal_topk,
    sigmoid_topk,
    sparse_topk,
    sparse_topk_magnitude,
    sparse_topk_signed,
    successive_softmax_topk,
    topk_cross_entropy,
    topk_mask,
    topk_metric_loss,
    transport_topk,
)
from khot.losses import neighbours
from khot.nn import FenchelYoungTopKLoss, TopKCrossEntropyLoss
from tests.inputs import normal
from tests.loops import for_each
from tests.oracle import cases, tensor

EXPONENTS = {"2": 2.0, "3/2": 1.5, "4/3": 4 / 3}
KINDS = {"mask": sparse_topk, "magnitude": sparse_topk_magnitude, "signed": sparse_topk_signed}
FENCHEL_YOUNG = [
    case for name in ("sparse_topk_mask", "sparse_topk_magnitude") for case in cases(name) if "target" in case
]
SIGNED = [case for case in cases("sparse_topk_magnitude") if case.get("kind") == "signed_mask"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@for_each("case", FENCHEL_YOUNG)
def test_oracle(case, dtype):
    eps = torch.finfo(dtype).eps
    x, target = tensor(case["x"], dtype).requires_grad_(), tensor(case["target"], dtype)
    args = (case["k"], case["lam"], EXPONENTS[case["p"]], case.get("kind", "mask"))
    scale = 1 + abs(case["f"]) + abs(case["fy_full"])
    loss, paper = (fenchel_young_topk_loss(x, target, *args, unbounded=unbounded) for unbounded in (False, True))
    assert abs(loss.item() - case["fy_full"]) <= 64 * eps * scale
    assert abs(paper.item() - case["fy_paper"]) <= 64 * eps * scale
    y = KINDS[args[-1]](x, *args[:-1])
    for value in (loss, paper):
        assert torch.equal(torch.autograd.grad(value, x)[0], y - target)
    assert (y.double() - tensor(case["y"])).abs().max() <= 1e3 * eps * (1 + x[x.isfinite()].abs().max() / case["lam"])


@for_each("case", SIGNED)
def test_oracle_of_the_signed_map(case):
    """With target 0 the loss is the conjugate itself."""
    x, p = tensor(case["x"]), EXPONENTS[case["p"]]
    loss = fenchel_young_topk_loss(x, torch.zeros_like(x), case["k"], case["lam"], p, kind="signed")
    assert loss.item() == pytest.approx(case["f"], rel=1e-13)


def feasible(kind, n=6, k=2.5, seed=0, rows=4):
    """A target in the interior of the domain, made by another map than the one under test."""
    x = normal(rows, n, seed=seed)
    if kind == "mask":
        return sigmoid_topk(x, k)
    return 0.3 * x.tanh() if kind == "signed" else x


@pytest.mark.parametrize("p", [2.0, 1.5])
@pytest.mark.parametrize("kind", KINDS)
class TestFenchelYoung:
    def test_is_positive_and_zero_at_its_own_target(self, kind, p):
        x = 2 * normal(80, 6)
        loss = partial(fenchel_young_topk_loss, x, k=2.5, strength=0.7, p=p, kind=kind, reduction="none")
        assert (loss(feasible(kind, seed=100, rows=80)) > 0).all()
        own = loss(KINDS[kind](x, 2.5, 0.7, p))
        torch.testing.assert_close(own, torch.zeros_like(own), rtol=0, atol=1e-13)

    def test_is_convex(self, kind, p):
        target, a, b = feasible(kind, seed=7, rows=80), normal(80, 6), 3 * normal(80, 6, seed=50)
        left, right, middle = (
            fenchel_young_topk_loss(x, target, 2.5, 0.7, p, kind, "none") for x in (a, b, (a + b) / 2)
        )
        assert (middle <= (left + right) / 2 + 1e-13).all()

    @pytest.mark.slow
    def test_derivatives(self, kind, p):
        x, strength = normal(4, 6, seed=3).requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        target = feasible(kind)

        def loss(x, strength):
            return fenchel_young_topk_loss(x, target, 2.5, strength, p, kind, "none")

        assert gradcheck(loss, (x, strength), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(loss, (x, strength), check_fwd_over_rev=True, check_rev_over_rev=True)
        jacobian = jacrev(lambda x: KINDS[kind](x, 2.5, 0.7, p))(x[0].detach())
        for second in (hessian, lambda f: jacfwd(jacfwd(f))):
            found = second(lambda x: fenchel_young_topk_loss(x, target[0], 2.5, 0.7, p, kind))(x[0].detach())
            torch.testing.assert_close(found, jacobian)

    def test_derivative_in_the_target(self, kind, p):
        """Up to a constant for the mask, because its targets all have the same sum."""
        x, target = normal(4, 6, seed=3), feasible(kind).requires_grad_()

        def loss(target):
            if kind == "mask":
                target = target - target.mean(-1, keepdim=True) + 2.5 / 6
            return fenchel_young_topk_loss(x, target, 2.5, 0.7, p, kind, "none")

        assert gradcheck(loss, (target,))

    @for_each("unbounded", [False, True])
    def test_k_is_a_constant(self, kind, p, unbounded):
        """In derivatives of every order and mode: a part of the derivative in k would mislead who learns it."""
        x, target, k = normal(4, 6, seed=3).requires_grad_(), feasible(kind), torch.full((4,), 2.5).double()

        def loss(k):
            return fenchel_young_topk_loss(x, target, k, 0.7, p, kind, "sum", unbounded)

        (slope,) = torch.autograd.grad(loss(k.requires_grad_()), x, create_graph=True)
        for result in (loss(k), slope.square().sum()):
            assert torch.autograd.grad(result, k, retain_graph=True, allow_unused=True) == (None,)
        assert jacfwd(loss)(k.detach()).count_nonzero() == 0

    def test_batches_and_reductions(self, kind, p):
        x, target, strength = normal(4, 6, seed=3), feasible(kind), torch.linspace(0.5, 2, 4).double()
        none = fenchel_young_topk_loss(x, target, 2.5, strength, p, kind, "none")
        for i in range(4):
            single = fenchel_young_topk_loss(x[i], target[i], 2.5, strength[i].item(), p, kind)
            torch.testing.assert_close(none[i], single)
        k = torch.full((4,), 2.5).double()
        for reduction, expected in (("none", none), ("mean", none.mean()), ("sum", none.sum())):
            for size in (2.5, k):
                found = fenchel_young_topk_loss(x, target, size, strength, p, kind, reduction)
                torch.testing.assert_close(found, expected)
            module = FenchelYoungTopKLoss(2.5, strength=strength, p=p, kind=kind, reduction=reduction)
            torch.testing.assert_close(module(x, target), expected)
        mapped = vmap(lambda x, t, s: fenchel_young_topk_loss(x, t, 2.5, s, p, kind))(x, target, strength)
        torch.testing.assert_close(mapped, none)


class TestFenchelYoungDetails:
    def test_unbounded_targets(self):
        """The paper's setting: one-hot target, k = 3. No lower bound along the vector of ones."""
        x, target = normal(4, 8).requires_grad_(), torch.eye(8)[:4].double()
        loss = fenchel_young_topk_loss(x, target, 3, reduction="none", unbounded=True)
        shifted = fenchel_young_topk_loss(x - 10, target, 3, reduction="none", unbounded=True)
        torch.testing.assert_close(shifted, loss - 20)
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), x)[0], sparse_topk(x, 3) - target)
        y = sparse_topk(x, 3)
        torch.testing.assert_close(loss, (x * y).sum(-1) - y.square().sum(-1) / 2 - (x * target).sum(-1))

    def test_masked_items(self):
        x = torch.tensor([0.3, -math.inf, 1.0, -0.5], dtype=torch.float64, requires_grad=True)
        target = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64)
        loss = fenchel_young_topk_loss(x, target, 2, 2.0)
        rest = fenchel_young_topk_loss(x[[0, 2, 3]], target[[0, 2, 3]], 2, 2.0)
        torch.testing.assert_close(loss, rest)
        assert torch.autograd.grad(loss, x)[0][1] == 0
        with pytest.raises(ValueError, match="0 where `x` is -inf"):
            fenchel_young_topk_loss(x, torch.tensor([0.0, 1, 1, 0]).double(), 2)

    @for_each("p, dtype", [(2.0, torch.float64), (1.5, torch.float32), (2.0, torch.float16), (1.5, torch.bfloat16)])
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_output_of_the_map_is_a_target(self, kind, p, dtype):
        """At any scale of the scores, in every dtype, and in that of the map whatever the scores have."""
        for scale, n in ((1e-3, 50), (1.0, 4), (1.0, 600), (1e3, 50), (1e4, 600), (1e6, 4)):
            x = (scale * normal(6, n) + scale).clamp(-6e4, 6e4).to(dtype)
            for strength in {1.0, scale}:
                y = KINDS[kind](x, 0.3 * n, strength, p)
                fenchel_young_topk_loss(x, y, 0.3 * n, strength, p, kind)
                wide = fenchel_young_topk_loss(x.double(), y, 0.3 * n, strength, p, kind, "none")
                terms = ((x.double().abs() + strength) * y.double().abs()).sum(-1)
                assert (wide.abs() <= 8 * torch.finfo(dtype).eps * terms).all()

    @for_each("kind, unbounded, wrong", itertools.product(KINDS, (True, False), (math.nan, math.inf, -math.inf)))
    def test_targets_are_numbers(self, kind, unbounded, wrong):
        target = torch.tensor([[1.0, 1, 0, 0], [1, 0, 1, 0]])
        target[1, 3] = wrong
        with pytest.raises(ValueError, match=f"`target` must be finite, but contains {wrong}"):
            fenchel_young_topk_loss(normal(2, 4, dtype=torch.float32), target, 2, kind=kind, unbounded=unbounded)

    def test_targets_of_a_wrong_sum_are_found_in_every_dtype(self):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for off in (0.1, -0.1):
                target = topk_mask(normal(3, 50, dtype=dtype), 4)
                target[1, target[1].argmax()] += off if off < 0 else 0
                target[1, target[1].argmin()] += off if off > 0 else 0
                with pytest.raises(ValueError, match="`target` must sum to k"):
                    fenchel_young_topk_loss(normal(3, 50, dtype=dtype), target, 4)

    def test_half_types_and_integer_targets(self):
        x, target = normal(3, 9, dtype=torch.bfloat16), topk_mask(normal(3, 9), 4).long()
        loss = fenchel_young_topk_loss(x, target, 4)
        exact = fenchel_young_topk_loss(x.double(), target, 4)
        assert loss.dtype == torch.bfloat16 and abs(loss.item() - exact.item()) <= 2**-8 * exact.item()

    @pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-3), (torch.float64, 1e-5)], ids=str)
    def test_sums_are_those_of_the_domain_but_for_rounding(self, dtype, off):
        target = topk_mask(normal(3, 6, dtype=dtype, seed=1), 2)
        assert fenchel_young_topk_loss(normal(3, 6, dtype=dtype), target * (1 - torch.finfo(dtype).eps), 2).isfinite()
        with pytest.raises(ValueError, match="`target` must sum to k"):
            fenchel_young_topk_loss(normal(3, 6, dtype=dtype), target * (1 - off), 2)

    def test_module_learns_its_strength(self):
        module = FenchelYoungTopKLoss(2, strength=torch.nn.Parameter(torch.tensor(5.0)))
        module(normal(3, 5, dtype=torch.float32), topk_mask(normal(3, 5), 2)).backward()
        (parameter,) = module.parameters()
        assert parameter.grad.isfinite() and parameter.grad != 0
        assert "kind='mask'" in repr(module) and "unbounded" not in repr(module)
        assert "unbounded=True" in repr(FenchelYoungTopKLoss(2, unbounded=True))

    def test_magnitude_of_large_scores(self):
        target = torch.tensor([1.0, 0.0, 0.0])
        for size in (1.0, 1e10, 2e19):  # whose products with the maximiser no float32 holds
            x = torch.full((3,), size)
            loss = fenchel_young_topk_loss(x, target, 1, 1.0, 1.5, "magnitude")
            exact = fenchel_young_topk_loss(x.double(), target.double(), 1, 1.0, 1.5, "magnitude")
            torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
        assert fenchel_young_topk_loss(torch.full((3,), 1e30), target, 1, 1.0, 1.5, "magnitude") == math.inf

    @pytest.mark.parametrize(
        ("kind", "x", "target", "expected"),
        [
            ("magnitude", [3e20, 2e20, 1e20], None, 0.0),
            ("signed", [3e38, -3e38], [1.0, -1.0], 1.0),
            ("mask", [3e38, 3e38, 1e38], [1.0, 1.0, 0.0], 1.0),
        ],
    )
    def test_products_that_no_float32_holds(self, kind, x, target, expected):
        x = torch.tensor(x, requires_grad=True)
        target = KINDS[kind](x.detach(), 2) if target is None else torch.tensor(target)
        loss = fenchel_young_topk_loss(x, target, 2, kind=kind)
        assert loss == expected and not torch.autograd.grad(loss, x)[0].any()

    @pytest.mark.slow
    def test_compile(self, kind="magnitude"):
        """That of masks is compiled as a module, in tests/nn."""
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, t, s: fenchel_young_topk_loss(x, t, 2, s, kind=kind),
            backend="aot_eager",
            fullgraph=True,
            dynamic=True,
        )
        for shape in ((2, 5), (3, 7)):
            x, strength = normal(*shape).requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
            target = topk_mask(normal(*shape, seed=1), 2)
            pair = compiled(x, target, strength), fenchel_young_topk_loss(x, target, 2, strength, kind=kind)
            torch.testing.assert_close(*pair)
            torch.testing.assert_close(*(torch.autograd.grad(v, (x, strength)) for v in pair))

    @pytest.mark.parametrize(
        ("error", "match", "kwargs"),
        [
            (ValueError, "`target` must sum to k.*k=2 by up to 1; pass `unbounded=True`", {"target": torch.eye(4)[:2]}),
            (ValueError, r"`target` must lie in \[0, 1\]", {"target": torch.tensor([[2.0, 0, 0, 0]] * 2)}),
            (ValueError, r"`target` must lie in \[-1, 1\]", {"target": torch.full((2, 4), -1.5), "kind": "signed"}),
            (ValueError, "at most k", {"target": -torch.ones(2, 4), "kind": "signed"}),
        ],
    )
    def test_errors(self, error, match, kwargs):
        good = {"x": torch.zeros(2, 4), "target": torch.tensor([[1.0, 1, 0, 0]] * 2), "k": 2}
        with pytest.raises(error, match=match):
            fenchel_young_topk_loss(**{**good, **kwargs})


def defined(x, target, p_k, relaxation, softness):
    """-log sum_j p_k[j] y^(j+1)_target, one size and one row after the other."""
    return torch.stack(
        [
            -sum(p * relaxation(row, j + 1, softness)[t] for j, p in enumerate(p_k) if p).log()
            for row, t in zip(x, target, strict=True)
        ]
    )


MASKS = [lapsum_topk, sigmoid_topk, normal_topk, transport_topk, partial(sparse_topk, p=1.5), successive_softmax_topk]


class TestTopKCrossEntropy:
    @pytest.mark.parametrize("relaxation", MASKS, ids=lambda f: getattr(f, "__name__", "sparse_topk"))
    def test_definition(self, relaxation):
        x, target, p_k = normal(4, 6), torch.tensor([0, 5, 2, 2]), [0.5, 0.0, 0.3, 0.2]
        expected = defined(x, target, p_k, relaxation, 2.0)
        for weights in (p_k, torch.tensor(p_k, dtype=torch.float64)):
            for reduction, value in (("none", expected), ("mean", expected.mean()), ("sum", expected.sum())):
                torch.testing.assert_close(topk_cross_entropy(x, target, weights, relaxation, 2.0, reduction), value)
                module = TopKCrossEntropyLoss(weights, relaxation=relaxation, softness=2.0, reduction=reduction)
                torch.testing.assert_close(module(x, target), value)
        softness = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
        per_row = topk_cross_entropy(x, target, p_k, relaxation, softness, "none")
        torch.testing.assert_close(per_row[1], expected[1])
        torch.testing.assert_close(topk_cross_entropy(x[1], target[1], p_k, relaxation, 2.0), expected[1])

    def test_two_classes_and_top_one_are_cross_entropy(self):
        x, target = normal(20, 2), torch.arange(20) % 2
        torch.testing.assert_close(topk_cross_entropy(x, target, [1.0], sigmoid_topk, 0.5), cross_entropy(x, target))

    @pytest.mark.parametrize("relaxation", [lapsum_topk, sigmoid_topk])
    def test_far_below_the_threshold(self, relaxation):
        """Where the mask underflows, its logarithm and its gradient do not."""
        x = torch.tensor([[0.0, 3000.0, 3000.0]], requires_grad=True)
        loss = topk_cross_entropy(x, torch.tensor([0]), [0.5, 0.5], relaxation)
        grad = torch.autograd.grad(loss, x)[0]
        assert loss > 1000 and grad[0, 0] < -0.4 and grad.isfinite().all()
        for learnt in (False, True):  # a weight 0 that may be learnt does not decide what the others are scaled by
            weights = torch.tensor([1.0, 0.0], requires_grad=learnt)
            first = topk_cross_entropy(x, torch.tensor([0]), weights, relaxation)
            assert first > 2900 and first.isfinite()
            assert torch.autograd.grad(first, x)[0].isfinite().all()

    @pytest.mark.parametrize("relaxation", [lapsum_topk, sigmoid_topk])
    def test_excluded_targets_cost_infinitely_much_and_spoil_no_gradient(self, relaxation):
        x = normal(3, 5)
        x[0, 1] = x[1, 2] = -math.inf
        x.requires_grad_()
        losses = topk_cross_entropy(x, torch.tensor([1, 0, 4]), [0.5, 0.0, 0.5], relaxation, reduction="none")
        assert losses[0] == math.inf and losses[1:].isfinite().all()
        (grad,) = torch.autograd.grad(losses.sum(), x)
        assert torch.equal(grad[0], torch.zeros(5).double()) and grad.isfinite().all() and (grad[1:] != 0).any()

    def test_masks_without_a_logarithm_stay_finite(self):
        x = torch.tensor([[0.0, 3000.0, 3000.0]], requires_grad=True)
        loss = topk_cross_entropy(x, torch.tensor([0]), [1.0], sparse_topk)
        assert loss.item() == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))
        assert torch.equal(torch.autograd.grad(loss, x)[0], torch.zeros(1, 3))

    def test_sizes_of_weight_zero_are_not_evaluated(self):
        sizes = []

        def recording(x, k, softness):
            sizes.append(k.flatten().tolist())
            return sigmoid_topk(x, k, softness)

        x, target = normal(2, 6), torch.tensor([0, 3])
        topk_cross_entropy(x, target, [0.0, 0.7, 0.0, 0.0, 0.3], recording)
        topk_cross_entropy(x, target, torch.tensor([0.0, 0.7, 0.3], requires_grad=True), recording)
        assert sizes == [[2, 5], [1, 2, 3]]  # one call each; a weight that may be learnt is needed

    @pytest.mark.parametrize("relaxation", [lapsum_topk, sigmoid_topk])
    @pytest.mark.slow
    def test_derivatives(self, relaxation):
        x, target = normal(3, 6).requires_grad_(), torch.tensor([0, 5, 2])
        softness = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        p_k = torch.tensor([0.4, 0.0, 0.6], dtype=torch.float64, requires_grad=True)

        def loss(x, softness):
            return topk_cross_entropy(x, target, [0.5, 0.0, 0.5], relaxation, softness, "none")

        assert gradcheck(loss, (x, softness), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(loss, (x, softness))
        (grad,) = torch.autograd.grad(topk_cross_entropy(x, target, p_k, relaxation, reduction="sum"), p_k)
        masks = torch.stack([relaxation(x, j).gather(-1, target[:, None])[:, 0] for j in (1, 2, 3)])
        torch.testing.assert_close(grad, -(masks / (p_k @ masks)).sum(-1))
        mapped = vmap(lambda x, t: topk_cross_entropy(x, t, [0.5, 0.5], relaxation))(x, target)
        torch.testing.assert_close(mapped, topk_cross_entropy(x, target, [0.5, 0.5], relaxation, reduction="none"))

    @pytest.mark.slow
    def test_compile(self, relaxation=lapsum_topk):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, t, s: topk_cross_entropy(x, t, [0.5, 0.0, 0.5], relaxation, s),
            backend="aot_eager",
            fullgraph=True,
            dynamic=True,
        )
        for batch, n in ((2, 5), (3, 7)):
            x, target = normal(batch, n).requires_grad_(), torch.arange(batch)
            softness = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
            pair = compiled(x, target, softness), topk_cross_entropy(x, target, [0.5, 0.0, 0.5], relaxation, softness)
            torch.testing.assert_close(*pair)
            torch.testing.assert_close(*(torch.autograd.grad(v, (x, softness)) for v in pair))

    def test_training_lifts_the_target_into_the_top_k(self):
        """With weight on k = 3 only, gradient descent stops caring once the target is among the first three."""
        x = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0], requires_grad=True)
        optimiser = torch.optim.SGD([x], lr=1.0)
        for _ in range(50):
            optimiser.zero_grad()
            TopKCrossEntropyLoss([0.0, 0.0, 1.0], softness=0.2)(x, torch.tensor(4)).backward()
            optimiser.step()
        assert 4 in x.topk(3).indices and log_softmax(x, -1)[4] < -0.1

    def test_module_learns_its_softness(self):
        module = TopKCrossEntropyLoss([0.5, 0.5], softness=torch.nn.Parameter(torch.tensor(1.0)))
        module(normal(3, 5, dtype=torch.float32), torch.tensor([0, 1, 2])).backward()
        (parameter,) = module.parameters()
        assert parameter.grad.isfinite() and parameter.grad != 0
        assert "relaxation=lapsum_topk" in repr(module)


class TestKnnLoss:
    ARGUMENTS = (normal(3, 4), normal(5, 4, seed=1), torch.tensor([0, 1, 9]), torch.tensor([0, 1, 0, 1, 1]))

    @pytest.mark.parametrize("relaxation", [transport_topk, sparse_topk])
    def test_derivatives(self, relaxation):
        query, keys, *labels = self.ARGUMENTS
        softness, k = torch.tensor(7.0).double().requires_grad_(), torch.tensor([1.5, 2.0, 3.0]).double()
        leaves = (query.clone().requires_grad_(), keys.clone().requires_grad_(), softness, k.requires_grad_())
        loss = lambda q, x, s, k: knn_loss(q, x, *labels, k, s, relaxation, "none")  # noqa: E731
        assert gradcheck(loss, leaves) and gradgradcheck(loss, leaves)

    def test_far_neighbours_keep_their_gradient(self):
        """The only key of the label is a thousand softnesses beyond the threshold."""
        keys = torch.tensor([[0.0], [0.1], [100.0]], requires_grad=True)
        loss = knn_loss(torch.zeros(1, 1), keys, torch.tensor([1]), torch.tensor([0, 0, 1]), 1, 1.0)
        assert loss > 1000 and loss.isfinite()
        assert torch.autograd.grad(loss, keys)[0][2] > 100

    def test_features_far_from_the_origin(self):
        query, keys, *labels = (x.float() if x.is_floating_point() else x for x in self.ARGUMENTS)
        near = knn_loss(query, keys, *labels, 2, 1.0)
        torch.testing.assert_close(knn_loss(query + 1000, keys + 1000, *labels, 2, 1.0), near, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("has_float64", [True, False])
    def test_tight_clusters_far_apart(self, has_float64, monkeypatch):
        """Of which the squares of the norms are a million times the squared distances."""
        monkeypatch.setattr(neighbours, "has_float64", lambda x: has_float64)
        centres = torch.tensor([10.0, -10.0]).repeat(10)[:, None]
        query, keys = ((centres[:rows] + 0.01 * normal(rows, 4, seed=rows)).float() for rows in (6, 20))
        labels = torch.arange(6) % 3, torch.arange(20) % 3
        results = {}
        for dtype in (torch.float32, torch.float64):
            x = query.to(dtype).requires_grad_()
            loss = knn_loss(x, keys.to(dtype), *labels, 3, 1e-4)
            results[dtype] = loss.double(), torch.autograd.grad(loss, x)[0].double()
        torch.testing.assert_close(results[torch.float32], results[torch.float64], rtol=1e-4, atol=1e-4)
        assert results[torch.float64][1].abs().max() > 10

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        query, keys, *labels = (x.to(dtype) if x.is_floating_point() else x for x in self.ARGUMENTS)
        loss = knn_loss(query, keys, *labels, 2, 1.0)
        assert torch.equal(loss, knn_loss(query.float(), keys.float(), *labels, 2, 1.0).to(dtype))

    def test_autocast_does_not_reach_the_distances(self):
        """Of features far apart and of two keys near a query, whose distance is much smaller than their norms."""
        query = torch.full((1, 4), 30.0, requires_grad=True)
        keys = query.detach() * torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None]
        keys[0, 0], keys[1, 1], keys[3, 1] = 30.2, 30.1, -30.1
        call = partial(knn_loss, query, keys, torch.tensor([1]), torch.tensor([0, 1, 0, 1]), 1, 0.02)
        expected = call()
        with torch.autocast("cpu", torch.bfloat16):
            found = call()
        assert expected > 0.1 and torch.equal(found, expected)
        gradients = [torch.autograd.grad(loss, query)[0] for loss in (found, expected)]
        assert torch.equal(*gradients)

    def test_squared_distances_that_overflow(self):
        query, keys, *labels = (x.float() if x.is_floating_point() else x for x in self.ARGUMENTS)
        for a, b in ((1e20, 1.0), (1.0, 1e20), (1e20, 1e20)):
            with pytest.raises(ValueError, match="`query` and `keys` must have squared distances within .*float32"):
                knn_loss(a * query, b * keys, *labels, 2, 1.0)

    def test_no_neighbours(self):
        """A mean over no neighbours is undefined; the logarithm of k = 0 would make the loss minus infinity."""
        for k in (0, torch.tensor(0.0), torch.tensor([1.0, 0.0, 2.0])[: len(self.ARGUMENTS[0])]):
            with pytest.raises(ValueError, match="`k` must be positive"):
                knn_loss(*self.ARGUMENTS, k, 1.0)

    def test_compiles_and_maps(self):
        torch.compiler.reset()
        call = partial(knn_loss, k=2, softness=1.0)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*self.ARGUMENTS), call(*self.ARGUMENTS))
        batch = tuple(torch.stack((x, x.flip(0))) for x in self.ARGUMENTS)
        found = vmap(partial(call, reduction="none"))(*batch)
        torch.testing.assert_close(found, call(*batch, reduction="none"))

    def test_no_query_with_a_neighbour(self):
        query, keys, labels, others = self.ARGUMENTS
        query = query.clone().requires_grad_()
        loss = knn_loss(query, keys, labels + 100, others, 2, 1.0)
        assert loss == 0 and not torch.autograd.grad(loss, query)[0].any()


def metric_of_ranking(ranked, k, metric):
    """A metric at k of the relevance of items in the order of their scores."""
    hits = [float(value > 0) for value in ranked[:k]]
    if metric == "mrr":
        return max((hit / rank for rank, hit in enumerate(hits, 1)), default=0)
    return sum(hits) / {"recall": sum(value > 0 for value in ranked), "precision": k}[metric]


class TestTopKMetric:
    X, RELEVANCE = normal(60, 7), torch.randint(0, 4, (60, 7), generator=torch.Generator().manual_seed(0))
    METRICS = ("ndcg", "recall", "precision", "mrr", torch.tensor([0.5, 0.5, 0.2]))

    def test_hard_limits(self):
        """Those of NDCG are scikit-learn's, ties included; k may exceed n."""
        x, relevance = self.X, self.RELEVANCE * (self.RELEVANCE.sum(-1, keepdim=True) > 0) + (torch.arange(7) == 0)
        for k, scores in itertools.product((1, 3, 7, 9), (x, x.round())):
            expected = [ndcg_score(relevance[[i]].numpy(), scores[[i]].numpy(), k=k) for i in range(60)]
            found = topk_metric_loss(scores, relevance, k, softness=1e-6, reduction="none")
            np.testing.assert_allclose(1 - found, expected, rtol=0, atol=1e-12)
        ranked = relevance.gather(-1, x.argsort(-1, descending=True))
        for k, metric in itertools.product((1, 3, 7, 9), ("recall", "precision", "mrr")):
            expected = torch.tensor([metric_of_ranking(row.tolist(), k, metric) for row in ranked]).double()
            found = topk_metric_loss(x, relevance, k, metric, 1e-6, reduction="none")
            torch.testing.assert_close(1 - found, expected, rtol=0, atol=1e-6)

    def test_ties_are_averaged_over_their_orders(self):
        """Expected values are means over all orders of the three items of equal score."""
        x = torch.tensor([1.0, 1.0, 0.0, 1.0])
        for relevance, metric, k, expected in (
            ([1, 0, 1, 0], "mrr", 3, (1 + 1 / 2 + 1 / 3) / 3),
            ([1, 0, 1, 0], "recall", 1, 1 / 6),
            ([1, 1, 0, 0], "precision", 2, 2 / 3),
            ([1, 0, 0, 0], torch.tensor([3.0, 1.0]), 2, (1 + 1 / 3) / 3),
        ):
            found = topk_metric_loss(x, torch.tensor(relevance), k, metric, softness=1e-3)
            torch.testing.assert_close(1 - found, torch.tensor(expected))

    @pytest.mark.parametrize("relaxation", MASKS[::2], ids=lambda f: getattr(f, "__name__", "sparse_topk"))
    def test_is_a_share_of_what_is_possible(self, relaxation):
        """At every softness; gradients are finite, and 0 in rows where no item is relevant."""
        relevance = self.RELEVANCE.clone()
        relevance[:5] = 0
        for metric, softness, gain in itertools.product(self.METRICS, (1e-3, 1.0, 1e3), ("linear", "exp2")):
            x = self.X.float().requires_grad_()
            rows = topk_metric_loss(x, relevance, 3, metric, softness, relaxation, gain, "none")
            (grad,) = torch.autograd.grad(rows.sum(), x)
            assert ((rows >= 0) & (rows <= 1)).all() and grad.isfinite().all() and not grad[:5].any()
            mean = topk_metric_loss(x, relevance, 3, metric, softness, relaxation, gain)
            torch.testing.assert_close(mean, rows.sum() / (relevance > 0).any(-1).sum())

    def test_derivatives(self):
        x, softness = self.X[:4].clone().requires_grad_(), torch.full((4,), 0.7).double().requires_grad_()
        for metric in self.METRICS[1:4]:
            loss = partial(topk_metric_loss, relevance=self.RELEVANCE[:4], k=3, metric=metric, reduction="none")
            assert gradcheck(lambda x, s, f=loss: f(x, softness=s, relaxation=sigmoid_topk), (x, softness))
        discounts = torch.tensor([0.9, 0.5, 0.2]).double().requires_grad_()
        assert gradcheck(lambda d: topk_metric_loss(x, self.RELEVANCE[:4], 3, d, reduction="none"), (discounts,))

    def test_padding(self):
        """Scores of -inf with any relevance, up to rows that have no item at all."""
        x, relevance = self.X.clone(), self.RELEVANCE.float() + 1
        x[:, 5:], relevance[:, 5:], x[0], relevance[1, 6] = -torch.inf, -1.0, -torch.inf, torch.nan
        x.requires_grad_()
        for metric, k in itertools.product(self.METRICS[:4], (2, 6)):
            found = topk_metric_loss(x, relevance, k, metric, reduction="none")
            expected = topk_metric_loss(x[1:, :5], relevance[1:, :5], k, metric, reduction="none")
            torch.testing.assert_close(found[1:], expected)
            (grad,) = torch.autograd.grad(found.sum(), x)
            assert found[0] == 0 and grad.isfinite().all() and not grad[:, 5:].any() and not grad[0].any()

    def test_no_gain_overflows(self):
        x, relevance = self.X.half(), self.RELEVANCE
        for gain, scale in (("exp2", 1000), ("linear", 2.0**126)):
            found = topk_metric_loss(x.float(), relevance * scale, 3, gain=gain, reduction="none")
            assert ((found >= 0) & (found <= 1)).all()
        many = x.repeat(3000, 1), relevance.repeat(3000, 1)  # whose sum of losses no half holds
        assert topk_metric_loss(*many, 3) == topk_metric_loss(x, relevance, 3)

    def test_asks_for_the_masks_that_it_needs(self):
        """All in one call: one of recall, and those of a metric where the discount falls."""
        for metric, expected in zip(self.METRICS, ([1, 2, 3], [3], [3], [1, 2, 3], [2, 3]), strict=True):
            calls = []

            def watched(x, k, softness, calls=calls):
                calls.append(k[:, 0].tolist())
                return lapsum_topk(x, k, softness)

            topk_metric_loss(self.X, self.RELEVANCE, 3, metric, relaxation=watched)
            assert calls == [expected]
