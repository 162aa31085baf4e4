"""The state of modules in training stacks, each against plain training on the same rows.

Activation checkpoints, accumulated gradients, averages of states, models without data at first, copies, inference mode
and padding; DistributedDataParallel is in ``tests/distributed/cases_stacks.py``.
"""

import copy
import io
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import khot
from khot.nn import BatchTopK, JumpReLU, NMSparsity, TokenChoice, TopK, TopKMask
from tests.inputs import normal
from tests.loops import for_each
from tests.modules import MODULES, ModuleCase, N

BATCHES = normal(4, 6, N, dtype=torch.float32)
CUMULATIVE = ModuleCase("batch_topk_cumulative", partial(BatchTopK, 2, momentum=None), None)
STATEFUL = [case for case in (*MODULES, CUMULATIVE) if case.target is None and case.make().state_dict()]
each = pytest.mark.parametrize("case", STATEFUL, ids=lambda case: case.name)


def network(case):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N, N), case.make(), nn.Linear(N, 1))


def train(model, batches=BATCHES, call=lambda model, x: model(x), together=2):
    """Steps of Adam, each of the gradients of some batches, all of which go forward before the first goes backward."""
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    torch.manual_seed(1)
    for at in range(0, len(batches), together):
        optimizer.zero_grad()
        losses = [(call(model, x.clone().requires_grad_()) - 1).square().mean() for x in batches[at : at + together]]
        for loss in losses:
            loss.backward()
        optimizer.step()
    return model


def assert_same_state(model, other):
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def save_all(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def save_masks(context, operation, *args, **kwargs):
    is_mask = "khot" in str(operation) or "where" in str(operation)
    return CheckpointPolicy.MUST_SAVE if is_mask else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not_reentrant": {"use_reentrant": False},
    "saves_all": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, save_all)},
    "saves_masks": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, save_masks)},
}


@each
@for_each("options", CHECKPOINTS.values())
def test_activation_checkpoints(case, options):
    """Rows count once, although a block runs twice; two batches are under way at the same time."""
    model = train(network(case), call=lambda model, x: checkpoint(model, x, **options))
    assert_same_state(model, train(network(case)))


@pytest.mark.parametrize(
    "make", [partial(BatchTopK, 2, n=N), partial(TopK, 2, softness=0.5, n=N)], ids=["batch", "row"]
)
def test_a_checkpoint_of_a_graph(make):
    """The graph does not know that it runs a second time."""
    torch.compiler.reset()
    model, plain = make(), make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for x in BATCHES:
        x = x.clone().requires_grad_()
        checkpoint(compiled, x, use_reentrant=False).sum().backward()
        plain(x)
    assert_same_state(model, plain)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("options", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_losses_of_a_router_in_a_checkpoint(options, inside):
    """Their gradient is right, whether the block returns them or not, or there is an error."""
    router = TokenChoice(2, softness=0.5)

    def block(x):
        weights = router(x)
        return weights, (router.balance_loss() + router.z_loss() if inside else 0 * weights.sum())

    def gradient(run):
        leaves = [x.clone().requires_grad_() for x in BATCHES[:2]]
        losses = []
        for x in leaves:
            weights, penalty = run(x)
            penalty = penalty if inside else router.balance_loss() + router.z_loss()
            losses.append(weights.square().sum() + penalty)
        for loss in losses:
            loss.backward()
        return [x.grad for x in leaves]

    def run_again(x):
        return checkpoint(block, x, **options)

    if options["use_reentrant"] and not inside:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            gradient(run_again)
        with torch.no_grad():
            assert router.balance_loss() > 0  # to watch it
    else:
        torch.testing.assert_close(gradient(run_again), gradient(block))
    assert router._recomputed is None  # which would keep the activations of the block


@each
def test_averages_of_states(case):
    """By hand over all entries of the state, as many trainers do, and by torch: an evaluation with the mean state."""
    model = network(case)
    by_torch = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    by_hand = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in BATCHES:
        train(model, batch[None])
        by_torch.update_parameters(model)
        for name, value in model.state_dict().items():
            by_hand[name] = 0.9 * by_hand[name] + 0.1 * value
    averaged = network(case)
    averaged.load_state_dict(by_hand)
    whole = {name: value.to(model.state_dict()[name].dtype) for name, value in by_hand.items()}
    torch.testing.assert_close(dict(averaged.state_dict()), whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not untrained
        y = averaged.eval()(BATCHES[0])
        assert y.isfinite().all() and by_torch.eval()(BATCHES[0]).isfinite().all()
    if isinstance(averaged[1], BatchTopK) and averaged[1].cap is None and averaged[1].by == "value":
        hidden = averaged[0](BATCHES[0])
        torch.testing.assert_close(averaged[1](hidden), JumpReLU(by_hand["1.threshold"])(hidden))


@each
def test_models_without_data_at_first(case):
    """Memory from ``to_empty``, with whatever was in it, then ``reset_parameters`` of every module, as FSDP does."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(N, N), case.make(), nn.Linear(N, 1))
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 12345)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_same_state(train(model), train(network(case)))


def test_first_values_that_are_not_known():
    with torch.device("meta"):
        modules = JumpReLU(torch.zeros(N)), NMSparsity(softness=1.0, scores=torch.zeros(2, N))
    for module in modules:
        with pytest.raises(RuntimeError, match="given as a tensor without data"):
            module.reset_parameters()


def test_a_fixed_pattern_is_found_again():
    module, weight = NMSparsity(), normal(3, N)
    module.freeze(weight)
    module.reset_parameters()
    assert "frozen" in repr(module) and torch.equal(module(-weight.flip(-1)) != 0, NMSparsity()(weight.flip(-1)) != 0)
    assert torch.equal(module(weight) != 0, module.pattern)


@each
def test_training_goes_on_from_copies(case):
    model, file = train(network(case), BATCHES[:2]), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = network(case)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(model)
    for other in (loaded, copied):
        assert_same_state(other, model)
    train(model, BATCHES[2:])
    for other in (loaded, copied):
        assert_same_state(train(other, BATCHES[2:]), model)


@each
def test_inference_mode(case):
    """Training mode without gradients adapts running state, in inference mode too; training can go on afterwards."""
    model, plain = network(case), network(case)
    for mode, each_model in ((torch.inference_mode, model), (torch.no_grad, plain)):
        torch.manual_seed(0)
        with mode():
            each_model(BATCHES[3])
    assert_same_state(model, plain)
    assert_same_state(train(model), train(plain))


PADDED = {
    "topk": partial(TopK, 2, n=N),
    "topk_relaxed": partial(TopK, 2, softness=0.5, n=N),
    "mask": partial(TopKMask, 2, n=N),
    "batch": partial(BatchTopK, 2, n=N),
    "batch_relaxed": partial(BatchTopK, 1.5, softness=0.5, n=N),
    "batch_straight": partial(BatchTopK, 1.5, softness=0.5, straight_through=True, n=N),
    "batch_capped": partial(BatchTopK, 2, cap=3, n=N),
}


CALLS = [(name, call) for name in PADDED for call in ("plain", "size_of_each_row")]
CALLS += [(name, "compiled") for name in ("topk_relaxed", "batch", "batch_capped")]


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_padding_counts_for_nothing(name, call):
    """Rows of -inf change neither the other rows nor the state."""
    module, plain = PADDED[name](), PADDED[name]()
    runs = module
    if call == "compiled":
        torch.compiler.reset()
        runs = torch.compile(module, fullgraph=True, backend="eager")
    for x in BATCHES:
        padded = torch.cat([x[:4], torch.full((3, N), -torch.inf), x[4:]])
        sizes = torch.tensor([2] * 4 + [0] * 3 + [2] * 2)
        own_size = call == "size_of_each_row" or not isinstance(module, BatchTopK)
        found = runs(padded, sizes) if own_size else runs(padded)
        torch.testing.assert_close(found[[0, 1, 2, 3, 7, 8]], plain(x, 2) if own_size else plain(x))
        assert not found[4:7].any()
    assert_same_state(module, plain)


def test_states_of_objects_that_are_no_modules():
    """A baseline and a step that go on from a saved state, as numbers and tensors that any loader takes."""
    design = khot.ConditionalPoisson(logits=torch.zeros(4), k=2)

    def use(thing, times):
        for step in range(times):
            torch.manual_seed(step)
            if isinstance(thing, khot.MovingAverage):
                khot.score_function(design, lambda x: x @ torch.arange(4.0), baseline=thing)
            else:
                logits = torch.zeros(5, requires_grad=True)
                (khot.IMLE(logits=logits, k=2, step=thing).rsample() @ torch.arange(5.0)).backward()

    for thing, fresh in (
        (khot.MovingAverage(0.8), khot.MovingAverage()),
        (khot.AdaptiveStep(2.0, 0.1, decay=0.5), khot.AdaptiveStep()),
    ):
        use(thing, 3)
        file = io.BytesIO()
        torch.save(thing.state_dict(), file)
        file.seek(0)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        for each_thing in (thing, fresh):
            use(each_thing, 2)
        assert vars(fresh) == vars(thing)


def test_a_moving_baseline_in_a_checkpoint_is_an_error():
    """Its mean has moved before the second pass, and knows the draws."""
    baseline = khot.MovingAverage()

    def block(logits):
        design = khot.ConditionalPoisson(logits=logits, k=2)
        return khot.score_function(design, lambda x: x[..., 0], 4, baseline=baseline)

    surrogate = checkpoint(block, torch.zeros(4, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="outside the checkpoint"):
        surrogate.backward()
