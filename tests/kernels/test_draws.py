"""Draws from counters and a seed: their law, which the kernels' tests then need not look at, and the operators."""

import itertools

import pytest
import torch

from khot import sigmoid_topk
from khot.kernels.draws import pivotal_draw
from khot.kernels.order_sampling import LONG_DRAW, MANY_DRAWS, order_draw, rank_centre
from khot.kernels.order_sampling.noises import NOISES
from khot.kernels.random_numbers.philox import draw_seed, random_words
from khot.laws import order_sampling
from tests import gof

THETA = torch.tensor([[0.5, -1.0, 2.0, 0.0, -3.0, 1.0], [0.0, 5.0, 0.2, -0.4, 0.1, -8.0]], dtype=torch.float64)
K = torch.tensor([3, 2])
SEED = torch.tensor([0x123456789ABCDEF])


def k_hot(n, k):
    subsets = torch.tensor(list(itertools.combinations(range(n), k)))
    return torch.zeros(len(subsets), n, dtype=torch.float64).scatter_(-1, subsets, 1)


def test_philox():
    """Compares with the answer that its authors publish for counter and key 0."""
    words = random_words(torch.zeros(1).long(), 1, 1, 1)
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_every_draw_row_and_place_has_numbers_of_its_own():
    words = random_words(SEED, 3, 4, 5)
    assert all(word.shape == (3, 4, 5) and len(word.unique()) == 60 for word in words)
    fewer = random_words(SEED, 2, 3, 4)
    assert all(torch.equal(part, word[:2, :3, :4]) for part, word in zip(fewer, words, strict=True))


@pytest.mark.parametrize("noise", NOISES)
def test_law_of_order_sampling(noise):
    draws = order_draw(THETA, K, rank_centre(THETA, K), SEED, 20_000, torch.float64, noise)
    for row, k in enumerate(K.tolist()):
        support = k_hot(6, k)
        log_prob = order_sampling.log_prob(NOISES[noise], THETA[row], k, support)
        gof.check_sampler(draws[:, row], support, log_prob.exp())


@pytest.mark.parametrize("noise", NOISES)
def test_a_constant_changes_no_draw(noise):
    """Whether ranks are computed near 0 or near the k-th of them."""
    draws = [
        order_draw(theta, K, rank_centre(theta, K), SEED, 100, torch.float64, noise)
        for theta in (THETA, THETA + 256.0, THETA - 2.0**20)
    ]
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], draws[2])


def test_law_of_the_tournament():
    probs = torch.stack([sigmoid_topk(THETA[0], 3), torch.tensor([0.0, 1.0, 0.5, 0.5, 0.3, 0.7]).double()])
    draws = pivotal_draw(probs, torch.tensor([3, 3]), SEED, 6000, torch.float64)
    gof.check_k_hot(draws, 3)
    for row in (0, 1):
        gof.check_inclusion(draws[:, row], probs[row])
    equal = pivotal_draw(torch.full((1, 7), 3 / 7).double(), torch.tensor([3]), SEED, 10_000, torch.float64)
    gof.check_pairs(equal[:, 0], torch.full((7, 7), 1 / 7).double())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["order", "pivotal"])
def test_operators(kind):
    """The code for accelerators without Triton, and for compiled graphs on them."""
    seed = draw_seed(THETA.device)
    if kind == "order":
        operator, arguments = order_draw, (THETA, K, rank_centre(THETA, K), seed, 4, torch.float32, "logistic")
        registered = torch.ops.khot.order_draw.default
    else:
        operator, arguments = pivotal_draw, (sigmoid_topk(THETA, K), K, seed, 4, torch.float32)
        registered = torch.ops.khot.pivotal_draw.default
    value = operator(*arguments)
    assert value.shape == (4, 2, 6) and value.dtype == torch.float32
    gof.check_k_hot(value, K)
    torch.library.opcheck(registered, arguments)
    tensors, rest = arguments[: 3 + (kind == "order")], arguments[3 + (kind == "order") :]
    for randomness in ("different", "same"):

        def draw(*row, randomness=randomness):
            return operator(*row, draw_seed(THETA.device), *rest)

        mapped = torch.vmap(draw, in_dims=0, randomness=randomness)(*tensors[:-1])
        assert mapped.shape == (2, 4, 6)
        gof.check_k_hot(mapped.movedim(0, 1), K)


def test_seeds_come_from_the_generator():
    torch.manual_seed(3)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(first, draw_seed(torch.device("cpu"))) and not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["order", "pivotal"])
def test_parts_are_parts_of_the_whole(kind):
    """The numbers of a draw depend on its place, not on how many draws and rows there are."""
    n, rows = 6, 4
    theta = torch.randn(rows, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = torch.full((rows,), 3)
    if kind == "order":
        parameters, options = (theta, k, rank_centre(theta, k)), (torch.float64, "logistic")
        operator = order_draw
    else:
        parameters, options, operator = (sigmoid_topk(theta, 3), k), (torch.float64,), pivotal_draw
    whole = operator(*parameters, SEED, 5, *options)
    for draws, some in ((2, 3), (4, 1)):
        piece = operator(*(v[:some] for v in parameters), SEED, draws, *options)
        assert torch.equal(piece, whole[:draws, :some])


def test_few_long_rows_are_left_to_torch():
    def refusal(operator, n, draws):
        _, takes = operator.backends["triton"]
        return takes(THETA, n, 1, draws)

    assert "too few draws" in refusal(order_draw, LONG_DRAW + 1, MANY_DRAWS - 1)
    assert refusal(order_draw, LONG_DRAW + 1, MANY_DRAWS) is None and refusal(order_draw, LONG_DRAW, 1) is None
    assert "no room" in refusal(pivotal_draw, LONG_DRAW, 1000)
