"""Schedules of numbers of modules: their values, their state, and what they refuse."""

import copy
from functools import partial

import numpy as np
import pytest
import torch

from khot import topk_mask
from khot.nn import Anneal, BatchTopK, ExpertChoice, FenchelYoungTopKLoss, JumpReLU, TopK, TopKCrossEntropyLoss
from tests.inputs import normal


def values(schedule, steps):
    found = [getattr(schedule.module, schedule.name)]
    for _ in range(steps):
        schedule.step()
        found.append(getattr(schedule.module, schedule.name))
    return found


def test_linear():
    assert values(Anneal(TopK(2, softness=1.0), "softness", end=0.5, steps=2), 3) == pytest.approx(
        [1.0, 0.75, 0.5, 0.5]
    )
    assert values(Anneal(TopK(2, softness=1.0), "softness", end=1, steps=2, start=3), 2) == pytest.approx([3, 2, 1])


def test_geometric():
    schedule = Anneal(TopK(2, softness=8.0), "softness", end=0.001, steps=100, shape="geometric")
    found = torch.tensor(values(schedule, 100))
    torch.testing.assert_close(found[1:] / found[:-1], torch.full((100,), (0.001 / 8) ** 0.01))
    assert found[-1] == torch.tensor(0.001)


def test_whole_numbers_stay_whole():
    """Hard masks need integers; a module with a real k gets real numbers."""
    assert values(Anneal(TopK(10), "k", end=4, steps=4), 4) == [10, 8, 7, 6, 4]
    assert values(Anneal(ExpertChoice(4), "capacity", end=np.int64(2), steps=2), 2) == [4, 3, 2]
    assert values(Anneal(BatchTopK(3.0), "k", end=2, steps=2), 2) == [3, 2.5, 2]
    assert values(Anneal(BatchTopK(3), "k", end=2.0, steps=2), 2) == [3, 2.5, 2]


def test_learned_numbers_move_too():
    softness = TopK(2, softness=1.0, learn_softness=True)
    schedule = Anneal(softness, "softness", end=0.25, steps=2, shape="geometric")
    schedule.step()
    torch.testing.assert_close(softness.softness, torch.tensor(0.5))
    threshold = JumpReLU(0.0)
    Anneal(threshold, "threshold", end=1.0, steps=2).step()
    assert threshold.threshold == 0.5


def test_state_continues_a_schedule():
    first, second = TopK(8, softness=1.0), TopK(8, softness=1.0)
    schedule = Anneal(first, "softness", end=0.1, steps=10)
    values(schedule, 4)
    resumed = Anneal(second, "softness", end=0.3, steps=3)
    resumed.load_state_dict(copy.deepcopy(schedule.state_dict()))
    assert second.softness == first.softness
    assert values(resumed, 6) == values(schedule, 6)
    assert repr(resumed) == repr(schedule)
    assert repr(schedule) == "Anneal(TopK, 'softness', end=0.1, steps=10, start=1.0, shape='linear')"


def test_a_graph_trains_with_numbers_assigned_in_inference_mode():
    x, target = normal(3, 8), topk_mask(normal(3, 8), 2)
    for module, names, arguments in (
        (TopK(3, softness=0.5), ("k", "softness"), (x,)),
        (FenchelYoungTopKLoss(3), ("k", "strength"), (x, target)),
    ):
        torch.compiler.reset()
        with torch.inference_mode():
            for name in names:
                setattr(module, name, 2)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        grads = []
        for call in (compiled, module):
            leaf = x.clone().requires_grad_()
            grads.append(torch.autograd.grad(call(leaf, *arguments[1:]).sum(), leaf)[0])
        torch.testing.assert_close(*grads)


def test_a_parameter_replaces_an_assigned_number():
    x, compiled = normal(3, 8), partial(torch.compile, fullgraph=True, backend="aot_eager")
    for module, name, target in (
        (FenchelYoungTopKLoss(3, strength=1.0), "strength", topk_mask(normal(3, 8), 3)),
        (TopKCrossEntropyLoss([0.0, 1.0]), "softness", torch.tensor([0, 3, 7])),
    ):
        torch.compiler.reset()
        setattr(module, name, 2.0)
        setattr(module, name, torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64)))
        torch.testing.assert_close(compiled(module)(x, target), module(x, target))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Anneal(2, "k", 1, 2), TypeError, "`module` must be a torch.nn.Module"),
        (lambda: Anneal(TopK(2), "temperature", 1, 2), TypeError, "TopK has no 'temperature'"),
        (lambda: Anneal(TopK(2), "softness", 1.0, 2), TypeError, "`start` must be given"),
        (lambda: Anneal(TopK(2), "k", 1, 0), ValueError, "`steps` must be at least 1"),
        (lambda: Anneal(TopK(2), "k", 1, 2.5), TypeError, "`steps` must be an int"),
        (lambda: Anneal(TopK(2), "k", "1", 2), TypeError, "`end` must be a real number"),
        (lambda: Anneal(TopK(2), "k", 1.5, 2), TypeError, "`k` must be an int for a hard mask"),
        (lambda: Anneal(TopK(2, softness=1.0), "softness", 0.0, 2), ValueError, "`softness` must be positive"),
        (lambda: Anneal(TopK(2), "k", 0, 2, shape="geometric"), ValueError, "`start` and `end` must be positive"),
        (lambda: Anneal(TopK(2), "k", 1, 2, shape="cosine"), ValueError, "`shape` must be 'linear' or 'geometric'"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_refused_schedule_leaves_the_module():
    module = TopK(3, softness=1.0)
    with pytest.raises(ValueError, match="softness"):
        Anneal(module, "softness", end=0.5, steps=3, start=-1.0)
    assert module.softness == 1.0
