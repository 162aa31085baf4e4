"""Hard masks by counting: against a stable sort, in every backend, of equal scores the earlier ones."""

import itertools

import pytest
import torch

from khot import topk_indices, topk_mask, topk_threshold
from khot.distributions import ConditionalPoisson, GumbelTopK, Sampford
from khot.kernels import backend, selection
from khot.kernels.operators.platforms import HAS_NUMBA
from khot.nn import (
    BatchTopK,
    ExpertChoice,
    GatherTopK,
    KHotGate,
    MagnitudeSparsity,
    NMSparsity,
    TokenChoice,
    TopK,
    TopKMask,
    topk_attention,
)
from tests.inputs import normal

INF = torch.inf
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("cpu_backend")


needs_loops = pytest.mark.skipif(not HAS_NUMBA, reason="without loops, modules multiply by the mask")


def keep(x, *arguments):
    return selection.keep_largest.load("numba")(x, *arguments)


def expected(x, k):
    """The k first of each row in a stable order."""
    place = x.double().argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return (place < torch.as_tensor(k).unsqueeze(-1)).to(x.dtype)


def positions(x, k, starts, lengths):
    """The positions of the k first of each part in a stable order, without ``-inf``, then -1."""
    found = torch.full((len(x), k), -1)
    for row, place, start, length in zip(x.double(), found, starts, lengths, strict=True):
        order = row.argsort(descending=True, stable=True)
        allowed = (order >= start) & (order < start + length) & (row[order] > -INF)
        first = order[allowed][:k].sort().values
        place[: len(first)] = first
    return found


def with_infinities(x):
    return x.masked_fill(normal(*x.shape, seed=7) > 0.7, INF).masked_fill(normal(*x.shape, seed=8) > 0.7, -INF)


def tiny(x):
    """Denormal numbers of every float dtype but bfloat16, both zeros among them."""
    return x * 1e-41


ROWS = {
    "normal": lambda x: x,
    "far": lambda x: 1e4 + x,
    "heavy": lambda x: 10 * x**3,
    "integers": torch.round,
    "signed_zeros": lambda x: torch.where(x > 1, x, torch.where(x > 0, 0.0, -0.0)),
    "constant": torch.ones_like,
    "infinities": with_infinities,
    "all_infinite": lambda x: torch.where(x > 0, INF, -INF),
    "masked": lambda x: x.masked_fill(x > 0.5, -1e9),
    "two_clusters": lambda x: x.sign() * 1e3 + x,
    "powers": lambda x: x.sign() * 2.0 ** torch.arange(-40, x.shape[-1] - 40).clamp(max=40),
    "tiny": tiny,
    "rounded_far": lambda x: (1e4 + x).round(),
}


def in_turn():
    """All rows in all dtypes; in Triton's interpreter, rows in one of them, in turn."""
    for i, (kind, (place, dtype)) in enumerate(itertools.product(ROWS, enumerate(DTYPES))):
        marks = [pytest.mark.interpreted] if place == i // len(DTYPES) % len(DTYPES) else []
        yield pytest.param(kind, dtype, id=f"{kind}-{dtype}", marks=marks)


@pytest.mark.parametrize(("kind", "dtype"), list(in_turn()))
def test_the_first_of_a_stable_order(kind, dtype):
    x = ROWS[kind](normal(6, 37)).to(dtype)
    for k in (0, 1, 12, 36, 37):
        assert torch.equal(topk_mask(x, k), expected(x, k)), k
    k = torch.tensor([0, 3, 37, 36, 20, 1])
    assert torch.equal(topk_mask(x, k), expected(x, k))
    starts, lengths, whole = torch.tensor([0, -3, 5, 36, 40, 2]), torch.tensor([37, 10, 2**62, 5, 3, 0]), torch.zeros(6)
    for k in (0, 1, 12, 50):
        assert torch.equal(topk_indices(x, k), positions(x, k, whole, whole + 37)), k
        assert torch.equal(topk_indices(x, k, starts=starts, lengths=lengths), positions(x, k, starts, lengths)), k


@pytest.mark.interpreted
@pytest.mark.parametrize("n", [1, 31, 65, 300, 1000])
def test_lengths(n):
    for x in (normal(3, n).float(), normal(3, n).round()):
        for k in (n // 3, torch.tensor([0, n, n // 2])):
            assert torch.equal(topk_mask(x, k), expected(x, k))


@pytest.mark.parametrize(("n", "dtype"), [(8192, torch.float64), (70_000, torch.float32), (70_000, torch.float16)])
def test_long_rows(n, dtype):
    """Of which a sample gives the first guesses, where a loop counts; half of a sorted row is no typical sample."""
    x = normal(4, n).to(dtype)
    x[1], x[2], x[3] = x[1].sort().values, x[2].round(), 0.0
    x[3, n // 3 :: 2] = INF
    starts, whole = torch.tensor([0, 9, n // 3, -9]), torch.zeros(4)
    for k in (1, n // 50, n // 2, n - 1):
        assert torch.equal(topk_mask(x, k), expected(x, k))
        assert torch.equal(topk_indices(x, k), positions(x, k, whole, whole + n))
        assert torch.equal(topk_indices(x, k, starts=starts), positions(x, k, starts, whole + 2 * n))


def test_every_bit_pattern_of_a_half():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[~x.isnan()][torch.randperm(63_490, generator=torch.Generator().manual_seed(0))]
    for k in (1000, 30_000, 31_744, 31_746, 63_489):
        assert torch.equal(topk_mask(x, k), expected(x, k))


@pytest.mark.parametrize("n", [pytest.param(40, marks=pytest.mark.interpreted), 9000])
def test_ties_go_from_the_left(n):
    x = torch.zeros(2, n)
    x[1, ::3] = 1.0
    for k in (1, n // 4, n // 2):
        mask = topk_mask(x, k)
        assert mask[0, :k].all() and not mask[0, k:].any()
    kept = topk_mask(x, n // 2)[1].nonzero().flatten()  # all the ones, and the first of the zeros
    ones = x[1].nonzero().flatten()
    zeros = (x[1] == 0).nonzero().flatten()[: n // 2 - len(ones)]
    assert torch.equal(kept, torch.cat((ones, zeros)).sort().values)


def first(n, k):
    return (torch.arange(n) < k).float()


def test_ties_of_designs_and_modules_go_from_the_left():
    x, mask = torch.full((2, 8), 0.7), first(8, 3).expand(2, 8)
    for design in (ConditionalPoisson(logits=x, k=3), GumbelTopK(logits=x, k=3), Sampford(probs=x * 0 + 3 / 8)):
        assert torch.equal(design.mode, mask), design
    assert torch.equal(TopKMask(3)(x), mask) and torch.equal(TopK(3)(x), x * mask)
    assert torch.equal(ExpertChoice(3)(x.T), x.T * mask.T)
    assert torch.equal(NMSparsity(2, 4)(x), x * first(4, 2).repeat(2))
    assert torch.equal(BatchTopK(3)(x), x * first(16, 6).view(2, 8))
    assert torch.equal(KHotGate(8, 3).eval()(x), x * mask)


def test_ties_of_selections_and_routers_go_from_the_left():
    x = torch.full((2, 8), 0.7)
    assert TopK(3).select(x).indices.tolist() == [[0, 1, 2]] * 2
    assert GatherTopK(3)(x, x.unsqueeze(-1)).indices.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(TokenChoice(2)(x), first(8, 2).expand(2, 8) / 2)
    assert TokenChoice(2).select(x).indices.tolist() == [[0, 1]] * 2
    assert TokenChoice(1, capacity=1)(x)[:, 0].tolist() == [1, 0]
    assert torch.equal(TopK(3, by="magnitude")(-x), -x * first(8, 3))
    assert torch.equal(MagnitudeSparsity(0.25)(x), x * first(16, 4).view(2, 8))
    assert torch.equal(NMSparsity(1, 2, dim=0)(x), x * torch.tensor([[1.0], [0.0]]))
    assert topk_attention(torch.ones(1, 2), torch.ones(4, 2), torch.eye(4), 2).tolist() == [[0.5, 0.5, 0, 0]]


@needs_loops
@pytest.mark.parametrize(
    ("kind", "n"), [*itertools.product(ROWS, [3, 8, 37]), ("normal", 70_000), ("infinities", 70_000), ("tiny", 70_000)]
)
def test_what_is_kept(kind, n):
    """As entries, marks and the smallest positive one; of magnitudes, too, where ``-inf`` excludes an entry."""
    x = ROWS[kind](normal(4, n))
    for by_magnitude in (False, True):
        scores = x.abs().masked_fill(x == -INF, -INF) if by_magnitude else x
        for k in (1, n // 2, n):
            marked = (expected(scores, k) != 0) & (scores > -INF)
            is_wrong = (scores > -INF).sum(-1) < k
            for size in (k, torch.tensor(k).expand(4)):
                found = keep(x, size, by_magnitude, 0.0)
                if is_wrong.any():
                    assert found is None
                    continue
                y, kept, smallest = found
                assert torch.equal(kept, marked) and torch.equal(y, x.masked_fill(~marked, 0.0))
                assert torch.equal(smallest, scores.masked_fill(~marked | (scores <= 0), INF).amin(-1))
                filled = keep(x, size, by_magnitude, -INF)
                assert torch.equal(filled[0], x.masked_fill(~marked, -INF)) and torch.equal(filled[1], kept)


@needs_loops
@pytest.mark.parametrize("n", [4, 7, 20])
def test_what_is_kept_of_rows_with_a_fault(n):
    x = normal(3, n)
    for wrong in (x.index_fill(1, torch.tensor([1]), torch.nan), x.index_fill(1, torch.arange(3), -INF)):
        assert keep(torch.cat((x, wrong)), n - 2, False, 0.0) is None
    for size in (-1, n + 1, -(2**70), 2**64 + 1, torch.tensor([1, n + 1, 1]), torch.tensor([1, -1, 1])):
        assert keep(x, size, False, 0.0) is None


@pytest.mark.parametrize("make", [lambda: TopK(3), lambda: TopK(3, by="magnitude"), lambda: BatchTopK(3)])
def test_the_short_way_of_modules_is_the_long_one(make):
    """Values, and derivatives of both orders; under a transform the way is long."""
    x, module = normal(4, 9).requires_grad_(), make()
    y = module(x)
    (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    with backend("torch"):
        long = make()(x)
    assert torch.equal(y, long)
    torch.testing.assert_close(grad, 3 * long.detach() ** 2)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 6 * long.detach())


def test_ties_of_every_layout_go_from_the_left():
    x = normal(3, 4, 5).round()
    for dim in (0, 1, -1):
        mask = expected(x.movedim(dim, -1), 2).movedim(-1, dim)
        assert torch.equal(topk_mask(x, 2, dim=dim), mask)
        assert torch.equal(topk_mask(x.mT.contiguous().mT, 2, dim=dim), mask)  # not contiguous
        assert torch.equal(topk_mask(x.repeat_interleave(2, 1)[:, ::2], 2, dim=dim), mask)
    joint = expected(x.flatten(1), 7).view(3, 4, 5)
    assert torch.equal(topk_mask(x, 7, dim=(1, 2)), joint)
    assert torch.equal(topk_mask(x.expand(2, 3, 4, 5), 7, dim=(-2, -1)), joint.expand(2, 3, 4, 5))


def test_k_for_each_row():
    x = normal(2, 3, 9).round()
    for k in (torch.tensor([[1], [4]]), torch.tensor([0, 9, 5]), torch.tensor(4), torch.tensor([[[3]]])[0]):
        for size in (k, k.int(), k.to(torch.uint8)):
            assert torch.equal(topk_mask(x, size), expected(x, k.expand(2, 3)))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,), (2, 0, 3)])
def test_empty(shape):
    x = torch.zeros(shape)
    mask = topk_mask(x, torch.zeros(shape[:-1], dtype=torch.long))
    assert mask.shape == shape and not mask.any()
    assert topk_mask(x, 0).shape == shape


@pytest.mark.interpreted
def test_what_positions_promise():
    x = torch.tensor([0.0, 0, 0, 0, 0, 1, 0, 0])
    assert topk_indices(x, 3).tolist() == [0, 1, 5]
    short = topk_indices(x, 10, lengths=torch.tensor(2), fill=8, dtype=torch.int32)
    assert short.dtype == torch.int32 and short.tolist() == [0, 1] + [8] * 8
    starts = torch.tensor([[6], [7]], dtype=torch.uint8)
    assert topk_indices(x.expand(2, 3, 8), 1, starts=starts).tolist() == [[[6]] * 3, [[7]] * 3]
    for shape in ((0, 4), (3, 0), (0,), (2, 0, 3)):
        found = topk_indices(torch.zeros(shape), 2)
        assert found.shape == (*shape[:-1], 2) and (found == -1).all()
    x[2] = torch.nan
    assert topk_indices(x, 1, starts=torch.tensor(3)).tolist() == [5]
    with pytest.raises(ValueError, match="NaN"):
        topk_indices(x, 1)


def test_nothing_unsound_happens_unchecked():
    """NaN and sizes out of range, where nobody looks: the call ends, with zeros and ones."""
    x = normal(4, 300)
    x[1, ::2], x[2] = torch.nan, torch.nan
    mask = selection.topk_mask(x, torch.tensor([-5, 200, 100, 301]), False)
    assert ((mask == 0) | (mask == 1)).all() and not mask[0].any() and mask[3].all()
    for k in (1, 200, 400):
        found = selection.topk_indices(x, k, *selection.bounds_of(x), True, -1, False)
        assert ((found >= -1) & (found < 300)).all()


def test_inputs_are_left_alone_and_no_gradient_flows():
    x, k = normal(3, 9).requires_grad_(), torch.tensor([1, 2, 3])
    copy, sizes = x.detach().clone(), k.clone()
    mask = topk_mask(x, k)
    assert not mask.requires_grad and torch.equal(x, copy) and torch.equal(k, sizes)
    mask.add_(1)  # not a view into which nobody may write
    assert torch.equal(torch.func.grad(lambda x: (topk_mask(x, 2) * x).sum())(copy), topk_mask(copy, 2))
    _, tangent = torch.func.jvp(lambda x: topk_mask(x, 2), (copy,), (copy,))
    assert not tangent.any()


def test_vmap():
    x, k = normal(3, 4, 9).round(), torch.tensor([1, 2, 3])
    mask = expected(x, k.unsqueeze(-1))
    assert torch.equal(torch.vmap(topk_mask)(x, k), mask)
    assert torch.equal(torch.vmap(lambda x: topk_mask(x, 2), 1, 1)(x), topk_mask(x, 2))
    assert torch.equal(torch.vmap(lambda k: topk_mask(x, k))(k)[1], topk_mask(x, 2))


@pytest.mark.slow
def test_compiled():
    x = normal(4, 9).round().float()
    torch._dynamo.reset()
    compiled = torch.compile(topk_mask, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (x, x.repeat(1, 3)):
        for k in (2, 3, torch.tensor([0, 1, 9, 5])):
            assert torch.equal(compiled(rows, k), expected(rows, k))
    with pytest.raises(ValueError, match="NaN"):
        compiled(x / 0, 2)


def test_exported_programs_need_no_operator_of_this_library():
    class Mask(torch.nn.Module):
        def forward(self, x, k):
            return topk_mask(x, 2) + topk_mask(x, k)

    x, k = normal(3, 9).round(), torch.tensor([1, 4, 0])
    program = torch.export.export(Mask(), (x, k))
    assert not any("khot" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x, k), topk_mask(x, 2) + topk_mask(x, k))


def test_the_middle_of_the_gap():
    x = with_infinities(normal(3, 40).round())
    ordered = x.sort(-1, descending=True).values
    for k in (1, 7, 20, 39):
        last, following = ordered[:, k - 1], ordered[:, k]
        middle = torch.where(last == INF, following, (last + following) / 2)
        assert torch.equal(topk_threshold(x, k, relaxation=topk_mask), middle)
