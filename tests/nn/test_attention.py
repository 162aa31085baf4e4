"""Attention to k keys: masks, sizes of rows and heads, dtypes, derivatives, graphs and errors."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import scaled_dot_product_attention

import khot
from khot.nn import topk_attention
from tests.inputs import normal

Q, K, V = normal(2, 3, 5, 4), normal(2, 3, 5, 4, seed=1), normal(2, 3, 5, 6, seed=2)
ALLOWED = normal(2, 1, 5, 5, seed=3) > -0.3
ALLOWED[..., 0] = True
SOFTNESS = pytest.mark.parametrize("softness", [None, 0.4])


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": ALLOWED}, {"attn_mask": normal(5, 5, seed=4)}, {"scale": 0.3}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_all_keys_are_torch_s_attention(options):
    torch.testing.assert_close(topk_attention(Q, K, V, 5, **options), scaled_dot_product_attention(Q, K, V, **options))


def weights_of(k, softness=None, **options):
    """With unit vectors as values, the output shows the weights."""
    return topk_attention(Q, K, torch.eye(5).double().expand(2, 3, 5, 5), k, softness=softness, **options)


def test_a_query_has_k_keys_or_all_that_it_may_have():
    assert ((weights_of(2) > 0).sum(-1) == 2).all()
    causal = weights_of(3, is_causal=True)
    assert ((causal > 0).sum(-1) == torch.tensor([1, 2, 3, 3, 3])).all() and not causal.triu(1).any()
    masked = weights_of(3, attn_mask=ALLOWED)
    assert torch.equal((masked > 0).sum(-1), ALLOWED.sum(-1).clamp(max=3).expand(2, 3, 5))
    both = weights_of(3, attn_mask=ALLOWED, is_causal=True)
    assert torch.equal((both > 0).sum(-1), ALLOWED.tril().sum(-1).clamp(max=3).expand(2, 3, 5))
    heads = weights_of(torch.tensor([[1], [2], [5]]))
    assert ((heads > 0).sum(-1) == torch.tensor([[1], [2], [5]])).all()
    for weights in (causal, masked, both, heads):
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5).double())


def test_relaxed_weights_have_the_mask():
    scores = (Q @ K.mT / 2).masked_fill(~ALLOWED, -torch.inf)
    sizes = ALLOWED.sum(-1).clamp(max=2).expand(2, 3, 5)
    for relaxation in (khot.sigmoid_topk, khot.lapsum_topk, khot.sparse_topk):
        expected = (scores + relaxation(scores, sizes, 0.4).log()).softmax(-1)
        torch.testing.assert_close(weights_of(2, 0.4, relaxation=relaxation, attn_mask=ALLOWED), expected)


@SOFTNESS
def test_a_query_without_keys_gets_nothing(softness):
    none = ALLOWED.clone()
    none[0, 0, 2] = False
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    out = topk_attention(*leaves, 2, softness=softness, attn_mask=none)
    assert not out[0, :, 2].any() and out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.square().sum(), leaves))


@SOFTNESS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_rounding_of_single(softness, dtype):
    half = [x.to(dtype) for x in (Q, K, V)]
    out = topk_attention(*half, 2, softness=softness, is_causal=True)
    assert torch.equal(out, topk_attention(*(x.float() for x in half), 2, softness=softness, is_causal=True).to(dtype))


@SOFTNESS
def test_derivatives(softness):
    leaves = [x[0, 0].clone().requires_grad_() for x in (Q, K, V)]
    call = lambda q, k, v: topk_attention(q, k, v, 2, softness=softness, is_causal=True)  # noqa: E731
    assert gradcheck(call, leaves) and gradgradcheck(call, leaves)


@SOFTNESS
def test_graphs_and_transforms(softness):
    torch.compiler.reset()
    call = lambda q, k, v: topk_attention(q, k, v, 2, softness=softness, is_causal=True)  # noqa: E731
    expected = call(Q, K, V)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(Q, K, V), expected)
    torch.testing.assert_close(torch.func.vmap(call)(Q, K, V), expected)


def test_dropout():
    torch.manual_seed(0)
    rows = topk_attention(torch.zeros(1, 4), torch.zeros(1000, 4), torch.ones(1000, 1), 1000, dropout_p=0.3)
    assert abs(rows.item() - 1) < 6 * (0.3 / 0.7 / 1000) ** 0.5 and rows.item() != 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": [1.0]}, TypeError, "`query` must be a torch.Tensor, but got list"),
        ({"key": K.float()}, TypeError, "`key` must have the dtype"),
        ({"key": K[..., :3]}, ValueError, "`key` must have the 4 features"),
        ({"value": V[..., :4, :]}, ValueError, "`value` must have the 5 tokens"),
        (
            {"key": K[:, :2], "value": V[:, :2]},
            ValueError,
            r"leading axes that broadcast.*\(2, 3\), \(2, 2\), \(2, 2\).*repeat_interleave",
        ),
        ({"value": torch.cat([V, V])}, ValueError, r"leading axes that broadcast.*\(2, 3\), \(2, 3\), \(4, 3\)"),
        ({"k": 0}, ValueError, "`k` must be positive"),
        ({"k": 2.5}, TypeError, "`k` must be an int"),
        ({"k": torch.tensor(2.0)}, TypeError, "`k` must be an int or an integer tensor"),
        ({"k": torch.tensor([0])}, ValueError, "`k` must be positive"),
        ({"k": torch.ones(4, dtype=torch.long)}, ValueError, "`k` must broadcast"),
        ({"softness": -1.0}, ValueError, "`softness` must be positive"),
        ({"relaxation": "sigmoid"}, TypeError, "`relaxation` must be a function"),
        ({"attn_mask": torch.ones(5, 5).long()}, TypeError, "`attn_mask` must be"),
        ({"attn_mask": torch.ones(4, 5)}, ValueError, "`attn_mask` must broadcast"),
        (
            {"query": Q[:, :1], "attn_mask": torch.ones(2, 2, 5, 5)},
            ValueError,
            r"`attn_mask` must broadcast to \(2, 3, 5, 5\)",
        ),
        ({"is_causal": 1}, TypeError, "`is_causal` must be True or False"),
        ({"dropout_p": 1.5}, ValueError, "`dropout_p` must satisfy"),
        ({"scale": "1"}, TypeError, "`scale` must be a real number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error, message):
    arguments = {"query": Q, "key": K, "value": V, "k": 2}
    with pytest.raises(error, match=message):
        topk_attention(**arguments | change)
