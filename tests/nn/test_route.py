"""Routers: `route` and the same words in `TokenChoice`, against the formulas of published models, and their limits."""

import copy
import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from khot import sigmoid_topk, topk_mask
from khot.nn import Selection, TokenChoice, route
from tests.inputs import normal

TOKENS, E, K, C = 40, 16, 4, 2.5
B = normal(E, seed=1, scale=0.05)
TABLE = normal(TOKENS, E, seed=2).topk(K).indices.sort(-1).values


def rows(ties=False):
    x = normal(TOKENS, E, scale=2.0)
    x = (4 * x).round() / 4 if ties else x
    return x.index_put((torch.arange(0, TOKENS, 2), torch.arange(0, TOKENS, 2) % E), torch.tensor(-torch.inf).double())


def chosen(c, x, k=K):
    """The mask of the k largest, among open experts."""
    return topk_mask(c.detach().masked_fill(x == -torch.inf, -torch.inf), k)


def share(s, eps=0.0):
    return s / (s.sum(-1, keepdim=True) + eps)


def in_groups(c, number, kept, best, fill):
    """c with ``fill`` in the groups that are not kept."""
    members = c.view(-1, number, E // number)
    score = members.sort(-1, descending=True).values[..., :best].sum(-1)
    keep = topk_mask(score.detach(), kept).bool().unsqueeze(-1)
    return members.where(keep, torch.tensor(fill).double()).view(-1, E)


def soft_sqrt(x):
    return x.exp().log1p().clamp(min=1e-300).sqrt()


def v3(x):
    s = x.sigmoid()
    return C * share(s * chosen(in_groups(s + B, 4, 2, 2, -torch.inf), x), 1e-20)


def v2(x):
    p = x.softmax(-1)
    return C * p * chosen(in_groups(p, 4, 2, 1, 0.0), x)


def given(x):
    return torch.zeros_like(x).scatter(-1, TABLE, 1)


V3 = {"scores": "sigmoid", "bias": B, "groups": (4, 2), "eps": 1e-20, "scale": C}
PLAIN = {"renormalize": False}
MODELS = {
    "Mixtral": ({}, lambda x: share(x.softmax(-1) * chosen(x, x))),
    "gpt-oss": ({}, lambda x: x.masked_fill(chosen(x, x) == 0, -torch.inf).softmax(-1)),
    "OLMoE": (PLAIN, lambda x: x.softmax(-1) * chosen(x, x)),
    "privacy filter": ({"scale": 1 / K}, lambda x: share(x.softmax(-1) * chosen(x, x)) / K),
    "DeepSeek-V2": ({"groups": (4, 2, 1), "scale": C, **PLAIN}, v2),
    "Mistral-4": (
        {"groups": (4, 2), "eps": 1e-20, "scale": C},
        lambda x: C * share(x.softmax(-1) * chosen(in_groups(x.softmax(-1), 4, 2, 2, 0.0), x), 1e-20),
    ),
    "Ernie-4.5": ({"bias": B}, lambda x: share(x.softmax(-1) * chosen(x.softmax(-1) + B, x))),
    "LongCat": ({"bias": B, "scale": C, **PLAIN}, lambda x: C * x.softmax(-1) * chosen(x.softmax(-1) + B, x)),
    "Flint": ({"scores": "sigmoid"}, lambda x: share(x.sigmoid() * chosen(x, x))),
    "Llama-4": ({"scores": "sigmoid", **PLAIN}, lambda x: x.sigmoid() * chosen(x, x)),
    "MiniMax-M2": ({"scores": "sigmoid", "bias": B}, lambda x: share(x.sigmoid() * chosen(x.sigmoid() + B, x))),
    "LFM2": (
        {"scores": "sigmoid", "bias": B, "eps": 1e-6},
        lambda x: share(x.sigmoid() * chosen(x.sigmoid() + B, x), 1e-6),
    ),
    "DeepSeek-V3": (V3, v3),
    "DeepSeek-V4": (
        {"scores": "sqrtsoftplus", "bias": B, "eps": 1e-20, "scale": C},
        lambda x: C * share(soft_sqrt(x) * chosen(soft_sqrt(x) + B, x), 1e-20),
    ),
    "DeepSeek-V4, first layers": (
        {"scores": "sqrtsoftplus", "indices": TABLE, "scale": C},
        lambda x: C * share(soft_sqrt(x) * given(x)),
    ),
    "Kolibri": (
        {"scores": "sigmoid", "indices": lambda x: route(x, K, scores=lambda y: y, bias=B).indices},
        lambda x: share(x.sigmoid() * chosen(x + B, x)),
    ),
    "a function": (
        {"scores": lambda x: (x / 2).exp(), "bias": B, "groups": (8, 3)},
        lambda x: share((x / 2).exp() * chosen(in_groups((x / 2).exp() + B, 8, 3, 2, -torch.inf), x)),
    ),
}


def call(words, x):
    """The words with what a model computes first."""
    return {name: value(x) if name == "indices" and callable(value) else value for name, value in words.items()}


def dense(selection, like):
    return torch.zeros_like(like).scatter(-1, selection.indices, selection.values)


def module(words, k=K, **options):
    """The module with these words of `route`, and its call."""
    words = dict(words)
    bias, indices = words.pop("bias", None), words.pop("indices", None)
    if not words.pop("renormalize", True):
        words["renormalize"] = None
    router = TokenChoice(k, **words, bias=bias is not None, **options)
    if bias is not None:
        router._resize(E)
        router.bias.copy_(bias)
    return router, lambda x: router(x, indices=indices(x.detach()) if callable(indices) else indices)


def test_routers_of_models():
    """The weights as a dense matrix, and their gradient, of rows with closed experts and ties."""
    for (name, (words, formula)), ties in itertools.product(MODELS.items(), (False, True)):
        x, direction = rows(ties).requires_grad_(), normal(TOKENS, E, seed=3)
        expected = formula(x)
        found = route(x, **{"k": K} | call(words, x.detach()))
        assert found.values.shape == found.indices.shape == (TOKENS, K)
        _, forward = module(words)
        grads = []
        for y in (expected, dense(found, x), forward(x)):
            torch.testing.assert_close(y, expected, rtol=2e-7, atol=1e-8, msg=name)  # the bias of a module is float32
            grads.append(torch.autograd.grad((y * direction).sum(), x)[0].nan_to_num(0))
        torch.testing.assert_close(grads[1:], grads[:1] * 2, rtol=1e-6, atol=1e-8, msg=name)
        if "indices" not in words:
            assert (found.indices.diff(dim=-1) > 0).all()
            half = route(x.detach().bfloat16(), K, **words)
            single = route(x.detach().bfloat16().float(), K, **words)
            assert torch.equal(half.values, single.values.bfloat16()) and torch.equal(half.indices, single.indices)


def test_shared_experts_in_the_sum():
    """Inkling's: experts that every token takes are appended to the choice."""
    x = rows()
    own = route(x[:, :12], K, scores="sigmoid", bias=B[:12]).indices
    both = torch.cat([own, torch.tensor([12, 13]).expand(TOKENS, 2)], -1)
    s = x.sigmoid()
    mask = torch.zeros_like(x).scatter(-1, both, 1)
    torch.testing.assert_close(dense(route(x, indices=both, scores="sigmoid"), x), share(s * mask))


def growing(x):
    return (x / 4).exp()


WORDS = [{}, PLAIN, {"scores": "sigmoid"}, {"scores": "sqrtsoftplus", "eps": 0.1}, {"scores": growing}]


def assert_same(found, expected):
    assert torch.equal(found.values, expected.values) and torch.equal(found.indices, expected.indices)


def test_limits():
    """What should change nothing does so to the last bit, also where scores underflow, saturate or tie."""
    for words, x in itertools.product(WORDS, (rows(), rows(ties=True), 30 * rows().float())):
        expected = route(x, K, **words)
        own = expected.indices
        for other in (
            *({"bias": torch.full((E,), value)} for value in (0.0, 12.0, -0.3)),
            *({"groups": groups} for groups in ((1, 1), (1, 1, 5), (4, 4), (16, 16))),
        ):
            assert_same(route(x, K, **words, **other), expected)
        assert_same(route(x, **words, indices=own), expected)
        assert_same(route(x, K, **words, indices=own.int()), expected)
        assert_same(route(x, 3, **words, groups=(4, 4), scale=torch.ones(3)), route(x, 3, **words))
        router, _ = module(words)
        biased, _ = module(words | {"bias": torch.full((E,), 12.0)})
        plain = router(x)
        assert torch.equal(router(x, indices=own), plain) and torch.equal(biased(x), plain)
        assert torch.equal(router.balance_loss(), biased.balance_loss())
        torch.testing.assert_close(dense(expected, x), plain)
        assert_same(router.select(x, indices=own), router.select(x))


def test_equal_groups():
    """Of groups with the same experts in another order, the earlier one is kept."""
    group, order = normal(50, 4, seed=4).float(), torch.tensor([2, 0, 3, 1])
    x = torch.cat([group, group[:, order]], -1)
    for best in (2, 3, 4):
        assert (route(x, 1, scores="sigmoid", groups=(2, 1, best)).indices < 4).all()


def test_few_and_all_experts():
    x = rows()
    for words in (*WORDS, V3 | {"groups": None}):
        none = route(x, 0, **words)
        assert none.values.shape == none.indices.shape == (TOKENS, 0)
        every = route(x, E, **words)
        assert torch.equal(every.indices, torch.arange(E).expand(TOKENS, E))
        if words.get("renormalize", True) and not words.get("eps"):
            torch.testing.assert_close(every.values.sum(-1), torch.full((TOKENS,), words.get("scale", 1.0)).double())


def test_weights_come_from_the_scores_alone():
    """A sigmoid of 1e-8 beside a bias of 12, and scores below the smallest float."""
    x = torch.tensor([-18.4, -18.3, 0.0, 0.0])
    values, indices = route(x, 2, scores="sigmoid", bias=torch.tensor([12.0, 12.0, 0.0, 0.0]), renormalize=False)
    assert indices.tolist() == [0, 1]
    torch.testing.assert_close(values, x[:2].double().sigmoid().float(), rtol=1e-5, atol=0)
    for scores in ("softmax", "sigmoid", "sqrtsoftplus"):
        low = torch.tensor([-300.0, -301.0, 0.0, 0.0]).requires_grad_()
        values = route(low, scores=scores, indices=torch.tensor([0, 1])).values
        ratio = torch.tensor([0.5 if scores == "sqrtsoftplus" else 1.0, 0.0]).softmax(0)
        torch.testing.assert_close(values, ratio)
        assert torch.autograd.grad(values[0], low)[0][:2].abs().min() > 0.1


def test_closed_experts():
    """Weights of 0 and finite gradients, for tokens without experts, and for those with fewer than k."""
    x = normal(3, E).float()
    x[0] = -torch.inf
    x[1, 2:] = -torch.inf
    x.requires_grad_()
    for words in (*WORDS, V3, {"bias": torch.full((E,), -torch.inf).index_fill(0, torch.arange(7), 0)}):
        values, indices = route(x, K, **words)
        assert not values[0].any() and (values[1] > 0).sum() <= 2 and (values[2] > 0).all()
        assert (indices.diff(dim=-1) > 0).all()
        (grad,) = torch.autograd.grad((1e4 * values[:, 0]).sum(), x)
        assert grad.isfinite().all() and not grad[0].any()


def test_derivatives_to_second_order():
    x = normal(2, 6).requires_grad_()
    for scores in ("softmax", "sigmoid", "sqrtsoftplus"):
        for words in ({}, PLAIN, {"eps": 0.1, "scale": torch.tensor([2.0, 0.5]).double()}):
            options = {"scores": scores, "groups": (3, 2), "bias": B[:6], **words}
            f = lambda x, options=options: route(x, 2, **options).values  # noqa: E731
            assert gradcheck(f, x) and gradgradcheck(f, x)
    scale = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, scale: route(x, 2, scale=scale).values, (x, scale))
    bias = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(route(x, 2, bias=bias).values.sum(), bias, allow_unused=True) == (None,)


GRAPHS = {"V3": V3 | {"bias": B.float()}, "function": {"scores": torch.exp, "groups": (4, 2), **PLAIN}}
each_graph = pytest.mark.parametrize("words", GRAPHS.values(), ids=GRAPHS.keys())


@each_graph
def test_graphs(words):
    x = rows().float()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: tuple(route(x, K, **words)), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 17):
        leaves = [x[:tokens].clone().requires_grad_() for _ in range(2)]
        (values, indices), expected = compiled(leaves[0]), route(leaves[1], K, **words)
        assert torch.equal(indices, expected.indices)
        torch.testing.assert_close(values, expected.values)
        grads = [
            torch.autograd.grad(y.square().sum(), z)[0] for y, z in zip((values, expected[0]), leaves, strict=True)
        ]
        torch.testing.assert_close(*grads)


def test_batches_and_transforms():
    x = rows().float()
    for words in (*WORDS, *GRAPHS.values()):
        expected, batches = route(x, K, **words), x.view(2, -1, E)
        for found in (
            torch.func.vmap(lambda x, words=words: route(x, K, **words))(batches),
            route(batches, K, **words),
        ):
            assert_same(Selection(*(y.flatten(0, 1) for y in found)), expected)
        with torch.device("meta"):  # a default device decides nothing
            assert_same(route(x, K, **words), expected)
    assert route(x.to("meta"), K, scores="sigmoid", groups=(4, 2)).values.shape == (TOKENS, K)


class Router(torch.nn.Module):
    def __init__(self, words):
        super().__init__()
        self.words = words

    def forward(self, x):
        return tuple(route(x, K, **self.words))


@each_graph
def test_exports(words):
    x = rows().float()
    axes = ({0: torch.export.Dim("tokens", min=2, max=1000)},)
    program = torch.export.export(Router(words), (x,), dynamic_shapes=axes).module()
    for tokens in (3, TOKENS):
        values, indices = program(x[:tokens])
        assert torch.equal(indices, route(x[:tokens], K, **words).indices)
        torch.testing.assert_close(values, route(x[:tokens], K, **words).values)


X = normal(3, 8)


WRONG = [
    (TypeError, "`logits` must be a torch.Tensor", {"logits": [1.0]}),
    (TypeError, "`logits` must have a floating-point", {"logits": X.long()}),
    (ValueError, r"`logits` must have shape \(..., experts\)", {"logits": torch.tensor(1.0)}),
    (ValueError, "`logits` must not contain NaN", {"logits": X * torch.nan}),
    (TypeError, "`k` must be an int", {"k": None}),
    (TypeError, "`k` must be an int", {"k": torch.tensor([1, 2, 3])}),
    (TypeError, "`k` must be an int", {"k": 2.0}),
    (ValueError, r"`k` must lie in \[0, 8\]", {"k": 9}),
    (ValueError, r"`k` must lie in \[0, 8\]", {"k": -1}),
    (ValueError, "`scores` must be 'softmax', 'sigmoid' or 'sqrtsoftplus'", {"scores": "tanh"}),
    (ValueError, r"`scores` must return a tensor of shape \(3, 8\)", {"scores": lambda x: x.sum(-1)}),
    (TypeError, "`bias` must be a torch.Tensor", {"bias": 1.0}),
    (ValueError, "`bias` must broadcast", {"bias": torch.zeros(7)}),
    (TypeError, "`groups` must be", {"groups": 4}),
    (TypeError, "`groups` must be", {"groups": (4, 2.0)}),
    (ValueError, "`groups` must satisfy 1 <= kept <= number", {"groups": (4, 5)}),
    (ValueError, "`groups` must satisfy 1 <= kept <= number", {"groups": (4, 2, 0)}),
    (ValueError, "`groups` must divide the 8 experts", {"groups": (3, 2)}),
    (ValueError, "`groups` must not score more experts", {"groups": (4, 2, 3)}),
    (ValueError, "`k` must not exceed the 2 experts", {"groups": (4, 1), "k": 3}),
    (TypeError, "`indices` must be a tensor of int64", {"indices": [[0, 1]] * 3}),
    (TypeError, "`indices` must be a tensor of int64", {"indices": X[:, :2]}),
    (ValueError, r"`indices` must have shape \(..., k\)", {"indices": torch.zeros(3, 3).long()}),
    (ValueError, r"`indices` must lie in \[0, 7\]", {"indices": torch.tensor([7, 8])}),
    (ValueError, "`indices` must broadcast", {"indices": torch.zeros(4, 2).long()}),
    (ValueError, "`indices` replaces the choice", {"indices": torch.tensor([0, 1]), "bias": torch.zeros(8)}),
    (ValueError, "`indices` replaces the choice", {"indices": torch.tensor([0, 1]), "groups": (4, 2)}),
    (TypeError, "`renormalize` must be True or False", {"renormalize": None}),
    (ValueError, "`eps` must be finite and at least 0", {"eps": -1.0}),
    (TypeError, "`eps` must be a real number", {"eps": "1"}),
    (TypeError, "`scale` must be a real number", {"scale": "1"}),
    (ValueError, "`scale` must broadcast", {"scale": torch.ones(3)}),
]


def test_bad_arguments():
    for error, match, arguments in WRONG:
        with pytest.raises(error, match=match):
            route(**({"logits": X, "k": 2} | arguments))


class TestTokenChoice:
    """The words of `route` in a module, and the state of its bias."""

    def test_capacity(self):
        """Places go to the largest scores and weights are renormalised over what is kept, or neither."""
        x, capacity = normal(20, 8), 5
        named = (("softmax", x.softmax(-1)), ("sigmoid", x.sigmoid()), (torch.exp, x.exp()))
        for renormalize, (scores, s) in itertools.product(("kept", "chosen", None), named):
            mask = topk_mask(s, 3)
            weights = s * mask if renormalize is None else share(s * mask)
            by = s if renormalize == "kept" else weights
            room = topk_mask(by.masked_fill(mask == 0, -1), capacity, dim=0) * mask
            assert (room.sum(0) == capacity).any() and (mask.sum(0) > capacity).any()
            left = share(s * room).nan_to_num(0) if renormalize == "kept" else weights * room
            router = TokenChoice(3, capacity=capacity, scores=scores, renormalize=renormalize, scale=2.0)
            torch.testing.assert_close(router(x), 2 * left)

    def test_relaxed(self):
        """The relaxed mask is that of s + bias, where there is a bias, times the scores."""
        x, s = normal(5, 8), normal(5, 8).sigmoid()
        words = {"softness": 0.2, "scores": "sigmoid"}
        torch.testing.assert_close(TokenChoice(2, **words)(x), share(s * sigmoid_topk(x, 2, 0.2)))
        router = TokenChoice(2, **words, bias=8)
        router.bias.copy_(normal(8, seed=1))
        expected = s * sigmoid_topk(s + router.bias, 2, 0.2)
        torch.testing.assert_close(router(x), share(expected))
        torch.testing.assert_close(router.load, sigmoid_topk(s + router.bias, 2, 0.2).sum(0).float())
        router.straight_through = True
        hard = topk_mask(s + router.bias, 2)
        torch.testing.assert_close(router(x), share(s * hard))
        leaf = x.clone().requires_grad_()
        for y in (router(leaf), router(leaf, indices=hard.nonzero()[:, 1].view(5, 2))):
            torch.testing.assert_close(y, share(s * hard))
            assert torch.autograd.grad(y[:, 0].sum(), leaf)[0].all()
        grouped = TokenChoice(2, softness=0.2, groups=(4, 2))(x)
        assert ((grouped > 0).sum(-1) == 4).all()
        with pytest.raises(ValueError, match="`indices` is a hard choice"):
            TokenChoice(2, softness=0.2)(x, indices=torch.tensor([0, 1]))

    def test_bias_follows_the_load(self):
        x = normal(3, 30, E)
        router = TokenChoice(K, scores="sigmoid", bias=True)
        assert router.eval()(x).any() and router.bias.shape == (0,)  # no bias yet
        router.train()
        for _ in range(2):
            router(x)
        mask = topk_mask(x, K).sum((0, 1)).float()
        assert torch.equal(router.load, 2 * mask)
        with torch.no_grad():
            router(x)
        router.eval()(x)
        router.train()(x, indices=torch.tensor([0, 1]))
        assert torch.equal(router.load, 2 * mask + torch.eye(E)[:2].sum(0) * 90)
        with torch.no_grad():
            router.load.copy_(2 * mask)
        before = router.bias.clone()
        router.update_bias(0.1)
        step = 0.1 * (mask.mean() - mask).sign()
        torch.testing.assert_close(router.bias, before + step)
        assert not router.load.any() and list(router.state_dict()) == ["bias"]
        router(x)
        router.update_bias(0.1, centre=True)
        torch.testing.assert_close(router.bias.mean(), step.mean())
        for _ in range(300):
            router(x)
            load = router.load.clone()
            router.update_bias(0.002, centre=True)
        assert load.max() < 1.1 * load.mean() < mask.max() / 1.2  # equal at last, as they were not
        s = x.sigmoid()
        expected = share(s * topk_mask(s + router.bias, K))
        torch.testing.assert_close(router.eval()(x), expected)
        with pytest.raises(RuntimeError, match="no bias to update: make it with bias=True"):
            TokenChoice(2).update_bias()
        with pytest.raises(ValueError, match="`x` must have the 16 experts of the bias"):
            router(x[..., :5])

    def test_losses(self):
        x = normal(3, 10, E).requires_grad_()
        router = TokenChoice(K, scores="sigmoid", bias=E)
        router.bias[:3] = 10
        router(x)
        s = x.sigmoid()
        f, p = topk_mask(s, K) / K, share(s)
        torch.testing.assert_close(router.balance_loss(), E * (f.mean((0, 1)) * p.mean((0, 1))).sum())
        of_each = E * (f.mean(1) * p.mean(1)).sum(-1)
        torch.testing.assert_close(router.balance_loss(each=True), of_each.mean())
        padded = torch.full((4, 12, E), -torch.inf).double()
        padded[:3, :10] = x
        router(padded, torch.where(padded[..., 0] > -torch.inf, K, 0))
        torch.testing.assert_close(router.balance_loss(each=True), of_each.mean())

    def test_state(self):
        """A bias of any length is loaded into a module that has none yet, and the other way round."""
        trained, fresh = TokenChoice(2, bias=True), TokenChoice(2, bias=True)
        trained(X)
        trained.update_bias()
        first = fresh.state_dict()
        fresh.load_state_dict(trained.state_dict())
        assert torch.equal(fresh.bias, trained.bias) and fresh.load.shape == (8,)
        assert torch.equal(copy.deepcopy(trained.bfloat16()).bias, fresh.bias) and fresh.bias.dtype == torch.float32
        fresh.load_state_dict(first)
        assert fresh.bias.shape == (0,) and repr(fresh) == "TokenChoice(k=2, bias=True)"
        trained.reset_parameters()
        assert not trained.bias.any()
        with torch.device("meta"):
            empty = TokenChoice(2, bias=8)
        empty.to_empty(device="cpu").reset_parameters()
        assert torch.equal(empty.bias, torch.zeros(8)) and torch.equal(empty.load, torch.zeros(8))
        with pytest.raises(RuntimeError, match="size mismatch"):
            TokenChoice(2, bias=4).load_state_dict(fresh.state_dict() | {"bias": torch.zeros(8)})
        text = repr(TokenChoice(2, scores="sigmoid", groups=(4, 2), renormalize=None, eps=1e-20, scale=2.5, bias=8))
        assert text == (
            "TokenChoice(k=2, scores='sigmoid', groups=(4, 2), renormalize=None, eps=1e-20, scale=2.5, bias=8)"
        )

    def test_choices_count_once_in_checkpoints(self):
        torch.compiler.reset()
        for is_reentrant, is_graph in ((False, False), (True, False), (False, True)):
            router = TokenChoice(2, bias=True)
            run = torch.compile(router, fullgraph=True, backend="aot_eager") if is_graph else router
            leaves = [X.clone().requires_grad_() for _ in range(2)]  # both forward passes before the backward passes
            losses = [checkpoint(run, x, use_reentrant=is_reentrant).square().sum() for x in leaves]
            for loss in losses:
                loss.backward()
            assert torch.equal(router.load, 2 * topk_mask(X, 2).sum(0).float())

    def test_transforms(self):
        router = TokenChoice(2, bias=8)
        with pytest.raises(RuntimeError, match="counts its choices in place"):
            torch.func.vmap(router)(X.view(3, 1, 8))
        assert torch.equal(torch.func.vmap(router.eval())(X.view(3, 1, 8)).view(3, 8), router(X))

    def test_bad_arguments(self):
        for error, name, words in (
            (ValueError, "renormalize", {"renormalize": False}),
            (ValueError, "scores", {"scores": "relu"}),
            (ValueError, "eps", {"eps": -1}),
            (TypeError, "scale", {"scale": torch.ones(2)}),
            (ValueError, "groups", {"groups": (2, 3)}),
            (TypeError, "bias", {"bias": torch.zeros(8)}),
            (ValueError, "bias", {"bias": 0}),
        ):
            with pytest.raises(error, match=f"`{name}` must"):
                TokenChoice(2, **words)
        with pytest.raises(ValueError, match="`k` must not exceed the 4 experts"):
            TokenChoice(5, groups=(4, 2))(X)
        with pytest.raises(ValueError, match=r"`indices` must have shape"):
            TokenChoice(5)(X, 3, indices=torch.tensor([1, 2]))
