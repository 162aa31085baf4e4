"""What is special of single modules: masked entries, thresholds, dead units, parametrised weights, divergences."""

import itertools
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize

import khot
from khot.kernels import backend
from khot.nn import BatchTopK, ExpertChoice, JumpReLU, KHotGate, NMSparsity, TopK, TopKCrossEntropyLoss, TopKMask
from tests.inputs import normal


def test_excluded_entries_are_zero_and_get_no_gradient():
    x = torch.tensor([1.0, -torch.inf, 0.5, -0.2], requires_grad=True)
    for module in (TopK(2), TopK(2, softness=0.5), TopK(2, softness=0.5, straight_through=True)):
        y = module(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert y[1] == 0 and y.isfinite().all() and grad[1] == 0 and grad.isfinite().all()


def test_hard_mask_passes_the_gradient_of_what_is_kept():
    x = normal(3, 6).requires_grad_()
    (grad,) = torch.autograd.grad(TopK(2)(x).sum(), x)
    assert torch.equal(grad, khot.topk_mask(x, 2))


def test_learned_softness_moves_and_stays_positive():
    module = TopKMask(2, softness=0.5, learn_softness=True)
    torch.testing.assert_close(module.softness, torch.tensor(0.5))
    optimizer = torch.optim.SGD(module.parameters(), 100.0)
    for sign in (1, -1):
        optimizer.zero_grad()
        (sign * module(torch.tensor([1.0, 0.2, 0.0, -1.0])).square().sum()).backward()
        optimizer.step()
        assert module.softness > 0 and module.softness != 0.5


class TestBatchTopK:
    def test_keeps_k_a_row_on_average(self):
        x = normal(5, 3, 7)
        y = BatchTopK(2.5)(x)
        assert (y != 0).sum() == round(2.5 * 15)
        assert x[y != 0].min() > x[y == 0].max()

    def test_relaxed_mask_has_the_sum(self):
        module, x = BatchTopK(1.5, softness=0.5), normal(4, 6)
        torch.testing.assert_close((module(x) / x).sum().item(), 6.0)

    def test_threshold_is_the_moving_average_of_the_smallest_that_was_kept(self):
        module, threshold = BatchTopK(1, momentum=0.2), None
        for step in range(4):
            x = normal(3, 5, seed=step, dtype=torch.float32)
            smallest = x.flatten().sort(descending=True).values[2]
            threshold = smallest if threshold is None else 0.8 * threshold + 0.2 * smallest
            module(x)
            torch.testing.assert_close(module.threshold, threshold)
        x = normal(9, 5, seed=7, dtype=torch.float32)
        expected = torch.where(x > threshold, x, 0.0)
        assert torch.equal(module.eval()(x), expected)
        assert torch.equal(module.to_jumprelu()(x), expected)

    def test_evaluation_keeps_about_as_many(self):
        torch.manual_seed(0)
        module = BatchTopK(8)
        for _ in range(200):
            module(torch.randn(64, 100).relu())
        kept = (module.eval()(torch.randn(2000, 100).relu()) > 0).sum(-1).float().mean()
        assert abs(kept / 8 - 1) < 0.03

    @pytest.mark.parametrize("options", [{}, {"softness": 0.5}, {"softness": 0.5, "straight_through": True}])
    def test_evaluation_before_training_keeps_the_largest_of_its_batch(self, options):
        """As in the sanity check of a trainer: warns once, and leaves the state unchanged."""
        module, x = BatchTopK(1.5, **options, n=5).eval(), normal(4, 5)
        with pytest.warns(RuntimeWarning, match="before it has been trained") as caught:
            y = module(x)
            module(x)
        assert len(caught) == 1
        assert torch.equal(y, BatchTopK(1.5)(x))
        assert module.threshold == 0 and not module.idle.any()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with pytest.warns(RuntimeWarning, match="before it has been trained"):
            assert torch.equal(compiled(x), y)
        with pytest.raises(RuntimeError, match="no threshold before it has been trained"):
            module.to_jumprelu()
        module.threshold = 0.3
        assert torch.equal(module(x), torch.where(x > module.threshold, x, 0.0))
        assert torch.equal(compiled(x), module(x))

    def test_a_straight_through_mask_takes_one_topk(self):
        """The kept entries are found only once, for both the mask and the threshold."""
        module, x = BatchTopK(2, softness=0.5, straight_through=True), normal(9, 6)
        with backend("torch"), torch.profiler.profile() as profile:  # which has a sort for every mask
            module(x)
        assert sum(event.count for event in profile.key_averages() if event.key in ("aten::topk", "aten::sort")) == 1

    def test_batches_that_keep_nothing_leave_the_threshold(self):
        module = BatchTopK(0.2)
        module(torch.ones(0, 4))
        module(torch.tensor([1.0, 2.0]))  # rounds to no entry
        assert module.num_batches_tracked == 0
        module(torch.tensor([[1.0, 2.0]] * 5))
        assert module.threshold == 2.0

    def test_auxiliary_loss_reaches_dead_units_alone(self):
        module = BatchTopK(1, n=4, dead_after=4)
        x = torch.tensor([[3.0, 0.5, 0.2, 0.4], [2.0, 0.1, 0.3, 0.2]], requires_grad=True)

        def error(z):
            return (z - 1).square().sum()

        assert module.auxiliary_loss(x, error) == 0
        for _ in range(2):
            module(x)
        loss = module.auxiliary_loss(x, error)  # the best of units 1 to 3: 0.5 and 0.3
        torch.testing.assert_close(loss, torch.tensor(6 + 0.5**2 + 0.7**2))
        (grad,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(grad, torch.tensor([[0, -1.0, 0, 0], [0, 0, -1.4, 0]]))
        for k, share in ((None, 1.0), (2, 1.0), (4, 3 / 4)):
            scaled = module.auxiliary_loss(x, error, k, scaled=True)
            torch.testing.assert_close(scaled, share * module.auxiliary_loss(x, error, k))
        module(x.detach().flip(-1))
        assert module.idle.tolist() == [2, 6, 6, 0]  # rows
        assert module.dead.tolist() == [False, True, True, False] and BatchTopK(1).dead is None

    def test_errors(self):
        with pytest.raises(ValueError, match="`n`, the number of units"):
            BatchTopK(1).auxiliary_loss(torch.ones(3), torch.sum)
        with pytest.raises(ValueError, match="`x` must have n=3 units"):
            BatchTopK(1, n=3)(torch.ones(2, 4))
        with pytest.raises(ValueError, match="0 < k <= n, but got k=5 with n=4"):
            BatchTopK(5)(torch.ones(2, 4))


@pytest.mark.parametrize("by", ["value", "magnitude"])
def test_a_threshold_keeps_nan_as_those_of_torch_do(by):
    """So that a diverged model does not look like one without activations."""
    x = torch.tensor([[1.0, torch.nan, 3.0, 0.2]], requires_grad=True)
    expected = torch.tensor([[1.0, torch.nan, 3.0, 0.0]])
    batch = BatchTopK(2, by=by).eval()
    batch.threshold = 0.5
    for module in (JumpReLU(0.5), JumpReLU(0.5, learn_threshold=True), batch, torch.func.vmap(batch)):
        y = module(x)
        torch.testing.assert_close(y, expected, equal_nan=True)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.tensor([[1.0, 1.0, 1.0, 0.0]]))


class TestJumpReLU:
    def test_gradients(self):
        x = torch.tensor([0.2, 0.45, 0.55, 2.0], requires_grad=True)
        module = JumpReLU(0.5, learn_threshold=True, bandwidth=0.2)
        grad, pseudo = torch.autograd.grad(module(x).sum(), (x, module.threshold))
        assert grad.tolist() == [0, 0, 1, 1]
        torch.testing.assert_close(pseudo, torch.tensor([-0.5 / 0.2 * 2]))

    def test_pseudo_derivative_is_that_of_the_mean(self):
        """For many entries it is the slope of the mean of y in the threshold, -t p(t)."""
        x = torch.linspace(-1, 3, 400_001, dtype=torch.float64)  # of density 1/4
        module = JumpReLU(0.5, learn_threshold=True, bandwidth=0.01).double()
        (pseudo,) = torch.autograd.grad(module(x).mean(), module.threshold)
        assert pseudo.item() == pytest.approx(-0.5 / 4, rel=1e-3)

    def test_infinite_thresholds_keep_all_or_nothing(self):
        """Infinity times the distance 0 of an entry that is not near would be NaN."""
        threshold, x = torch.tensor([0.0, torch.inf, -torch.inf]), torch.tensor([2.0, 2.0, 2.0], requires_grad=True)
        for words in ({"learn_threshold": True}, {"through_input": True}):
            module = JumpReLU(threshold, **words)
            y = module(x)
            y.sum().backward()
            assert y.tolist() == [2, 0, 2] and x.grad.tolist() == [1, 0, 1]
            x.grad = None
        with pytest.raises(TypeError, match=r"`x` must be a torch\.Tensor, but got list"):
            module.count([1.0])

    def test_a_penalty_on_the_count_trains_the_threshold(self):
        """And the entries near it, if they are to be trained; a gradient of NaN or beside the threshold shows."""
        values, near = [[0.2, 0.45, 0.55, 2.0], [-torch.inf, 0.5, torch.nan, torch.inf]], [[0, 1, 1, 0], [0, 1, 0, 0]]
        x, near = torch.tensor(values, dtype=torch.bfloat16, requires_grad=True), torch.tensor(near)
        for through_input in (False, True):
            module = JumpReLU(torch.full((4,), 0.5), learn_threshold=True, bandwidth=0.2, through_input=through_input)
            count = module.count(x)
            assert count.dtype == torch.float32 and count.tolist() == [2, 2]  # of entries that the module does not zero
            grads = torch.autograd.grad(count @ torch.tensor([1.0, 3.0]), (x, module.threshold), allow_unused=True)
            expected = near * torch.tensor([[1.0], [3.0]]) / 0.2
            torch.testing.assert_close(grads[1], -expected.sum(0))
            assert through_input or grads[0] is None
            if through_input:
                torch.testing.assert_close(grads[0].float(), expected)
                grad, pseudo = torch.autograd.grad(module(x[:1]).sum(), (x, module.threshold))
                torch.testing.assert_close(grad[0].float(), (x[0] > 0.5).float() - pseudo, rtol=2**-8, atol=0)
        fixed = JumpReLU(0.5, bandwidth=0.2, through_input=True)
        (grad,) = torch.autograd.grad(fixed.count(x).sum(), x)
        assert torch.equal(grad != 0, near > 0) and "through_input=True" in repr(fixed)
        wide = torch.full((3000,), 1.0, dtype=torch.bfloat16)
        assert fixed.count(wide) == torch.func.vmap(fixed.count)(wide.view(1, -1)) == 3000

    @pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
    def test_a_number_is_rounded_only_to_the_dtype_of_the_threshold(self, default):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            fixed, learned = JumpReLU(0.3), JumpReLU(0.3, learn_threshold=True)
            batch, wide = BatchTopK(1), JumpReLU(0.3, learn_threshold=True).double()
            batch.threshold = wide.threshold = 0.3
        finally:
            torch.set_default_dtype(before)
        dtypes = torch.promote_types(default, torch.float32), default, torch.float32, torch.float64
        for module, dtype in zip((fixed, learned, batch, wide), dtypes, strict=True):
            assert torch.equal(module.threshold.detach(), torch.tensor(0.3, dtype=dtype).expand(module.threshold.shape))
            assert module.threshold.dtype == dtype


class TestNMSparsity:
    @pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (0, 2), (2, 2)])
    def test_exactly_n_of_every_m(self, n, m):
        for module in (
            NMSparsity(n, m),
            NMSparsity(n, m, softness=0.5, straight_through=True),
            NMSparsity(n, m, softness=0.5).eval(),
        ):
            kept = module(normal(3, 5, 16)).view(3, 5, -1, m) != 0
            assert (kept.sum(-1) == n).all()

    def test_as_a_parametrisation(self):
        layer = torch.nn.Linear(8, 6)
        dense = layer.weight.detach().clone()
        parametrize.register_parametrization(layer, "weight", NMSparsity(2, 4, softness=0.1, straight_through=True))
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(normal(9, 8, dtype=torch.float32)).square().sum().backward()
            assert layer.parametrizations.weight.original.grad.all()
            optimizer.step()
        assert ((layer.weight.view(6, 2, 4) != 0).sum(-1) == 2).all()
        layer.weight = dense
        assert torch.equal(layer.parametrizations.weight.original, dense)
        parametrize.remove_parametrizations(layer, "weight")
        assert ((layer.weight.view(6, 2, 4) != 0).sum(-1) == 2).all()

    def test_learned_scores_decide(self):
        scores = normal(2, 8)
        module, weight = NMSparsity(softness=0.5, straight_through=True, scores=scores), normal(2, 8, seed=1)
        expected = khot.topk_mask(scores.view(2, 2, 4), 2).view(2, 8)
        assert torch.equal(module(weight) != 0, expected != 0)
        (grad,) = torch.autograd.grad(module(weight).sum(), module.scores)
        assert grad.any()

    def test_errors(self):
        with pytest.raises(ValueError, match="`m` must divide the last axis"):
            NMSparsity()(torch.ones(3, 6))
        with pytest.raises(ValueError, match="`scores` must have the shape"):
            NMSparsity(softness=1.0, scores=torch.ones(4))(torch.ones(3, 4))


def test_expert_choice_gives_every_expert_its_load():
    y = ExpertChoice(3)(normal(2, 10, 4))
    assert ((y != 0).sum(-2) == 3).all()
    with pytest.raises(ValueError, match=r"\(..., tokens, experts\)"):
        ExpertChoice(3)(torch.ones(4))


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), np.array(2)], ids=repr)
def test_calls_take_a_size_of_numpy(two):
    x = normal(8, 5)
    for module in (TopK(1), TopKMask(1), ExpertChoice(1), KHotGate(5, 1).eval()):
        assert torch.equal(module(x, two), module(x, 2))
    assert khot.constraints.k_hot(1, two).check(TopKMask(2)(x)).all()


@pytest.mark.parametrize("options", [{}, {"softness": 0.5}, {"softness": 0.5, "straight_through": True}], ids=str)
def test_expert_choice_takes_the_tokens_there_are(options):
    """Of a short batch and of a padded one, with the capacity of the module and with one of the call."""
    x, router = normal(5, 3), ExpertChoice(8, **options)
    assert torch.equal(router(x), ExpertChoice(5, **options)(x))
    assert torch.equal(router(x, 7), ExpertChoice(5, **options)(x))
    torch.testing.assert_close(router(x, torch.tensor([2, 9, 5])), router(x, torch.tensor([2, 5, 5])))
    padded = x.index_fill(-2, torch.tensor([0, 1, 3]), -torch.inf)
    padded[0, :2] = 1.0
    for capacity in (3, torch.tensor([3, 3, 3])):
        found = router(padded, capacity)
        torch.testing.assert_close((found / padded.clamp(min=-99)).sum(-2), torch.tensor([3.0, 3, 2]).double())
        mapped = torch.func.vmap(router, (0, None))(padded[None], capacity)  # where nobody can look
        torch.testing.assert_close(mapped[0], found)
    with pytest.raises(ValueError, match="`capacity` must be at least 0, but got -1"):
        router(x, torch.tensor([1, 2, -1]))
    with pytest.raises(ValueError, match=r"`capacity` must broadcast to the batch shape \(3,\), but got shape \(2,\)"):
        router(x, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="`x` must not contain NaN"):
        router(x.index_fill(-1, torch.tensor(1), torch.nan))


def test_expert_choice_does_not_rename_the_errors_of_a_relaxation():
    def relaxation(x, k, softness):
        raise ValueError("`k` must be prime")

    with pytest.raises(ValueError, match="^`k` must be prime$"):
        ExpertChoice(2, softness=0.5, relaxation=relaxation)(normal(5, 3))


class TestKHotGate:
    def test_draws_are_independent_and_k_hot(self):
        gate = KHotGate(6, 2)
        y = gate(torch.ones(200, 3, 6))
        assert (y.sum(-1) == 2).all() and len(y.reshape(-1, 6).unique(dim=0)) == math.comb(6, 2)

    def test_evaluation_keeps_the_largest_logits(self):
        gate = KHotGate(4, 2).eval()
        gate.logits.data = torch.tensor([0.1, 3.0, -1.0, 0.2])
        assert gate(torch.ones(3, 4)).tolist() == [[0, 1, 0, 1]] * 3

    def test_evaluation_of_a_learned_size(self):
        gate = KHotGate(4).eval()
        gate.logits.data = torch.tensor([0.1, 3.0, -9.0, 2.2])  # 2.4 in the mean
        assert gate(torch.ones(4)).tolist() == [0, 1, 0, 1]

    def test_learns_what_matters(self):
        torch.manual_seed(0)
        gate, weight = KHotGate(6, 2), torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
        optimizer = torch.optim.Adam(gate.parameters(), 0.1)
        for _ in range(60):
            optimizer.zero_grad()
            (-gate(weight.expand(16, 6)).sum(-1).mean() + 0.01 * gate.kl()).backward()
            optimizer.step()
        assert torch.equal(gate.eval()(torch.ones(6)), weight)

    def test_learns_its_size(self):
        torch.manual_seed(0)
        gate, price = KHotGate(6), torch.tensor([-1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
        optimizer = torch.optim.Adam(gate.parameters(), 0.2)
        for _ in range(60):
            optimizer.zero_grad()
            gate(price.expand(16, 6)).sum(-1).mean().backward()
            optimizer.step()
        assert torch.equal(gate.eval()(torch.ones(6)), (price < 0).float())

    @pytest.mark.parametrize("design", [khot.ConditionalPoisson, khot.Sampford])
    @pytest.mark.parametrize("k", [2, 0, 4])
    def test_kl_of_a_given_size(self, k, design):
        gate = KHotGate(4, k).double()
        gate.logits.data = normal(4)
        law = gate.law()
        q = law.log_prob(law.enumerate_support())
        torch.testing.assert_close(gate.kl(), (q.exp() * (q + math.log(math.comb(4, k)))).sum())

    @pytest.mark.parametrize("shift", [0.0, 0.7, -1.3])
    def test_kl_of_a_learned_size(self, shift):
        """The divergence to equal logits with the same probabilities of the two sizes, by enumeration."""
        gate = KHotGate(4).double()
        gate.logits.data = normal(4) + shift
        law, expected = gate.law(), 0.0
        value = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)), dtype=torch.float64)
        value = value[law.support.check(value)]
        q, size = law.log_prob(value).exp(), value.sum(-1).long()
        for row, one in zip(q, size, strict=True):
            prior = q[size == one].sum() / math.comb(4, int(one))
            expected = expected + row * (row / prior).log()
        torch.testing.assert_close(gate.kl(), expected)
        assert torch.autograd.grad(gate.kl(), gate.logits)[0].isfinite().all()

    def test_kl_has_a_finite_gradient_at_an_integer_size(self):
        gate = KHotGate(4)
        assert torch.autograd.grad(gate.kl(), gate.logits)[0].isfinite().all()

    def test_design_without_entropy(self):
        with pytest.raises(NotImplementedError, match="ConditionalPoisson"):
            KHotGate(4, 2, design=khot.Pivotal).kl()

    def test_errors(self):
        with pytest.raises(ValueError, match="`x` must have shape"):
            KHotGate(4, 2)(torch.ones(5))
        with pytest.raises(ValueError, match="0 <= k <= n"):
            KHotGate(4, 5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TopK(2, straight_through=True), ValueError, "`straight_through` needs a `softness`"),
        (lambda: TopK(2, learn_softness=True), ValueError, "`learn_softness` needs a `softness`"),
        (lambda: TopK(2, softness=1.0, relaxation="sigmoid"), TypeError, "`relaxation` must be a function"),
        (lambda: TopK(2, dim=1.5), TypeError, "`dim` must be an int or a tuple"),
        (lambda: TopK(2, dim=()), TypeError, "`dim` must be an int or a tuple"),
        *((lambda m=m: BatchTopK(1, momentum=m), ValueError, "0 < momentum <= 1") for m in (0.0, -1, 2, math.nan)),
        (lambda: BatchTopK(1, n=0), ValueError, "`n` must be at least 1"),
        (lambda: BatchTopK(1, n=3, dead_after=1.5), TypeError, "`dead_after` must be an int"),
        (lambda: JumpReLU(0.0, learn_threshold=True, bandwidth=0.0), ValueError, "`bandwidth` must be positive"),
        (lambda: NMSparsity(scores=torch.ones(4)), ValueError, "`scores` need a `softness`"),
        (lambda: NMSparsity(softness=1.0, scores=[1.0]), TypeError, "`scores` must be a torch.Tensor, but got list"),
        (lambda: KHotGate(0), ValueError, "`n` must be at least 1"),
        (lambda: KHotGate(4, 2, design="design"), TypeError, "`design` must be a function of logits and k"),
        (lambda: KHotGate(4, 2, estimator=3), TypeError, "`estimator` must be a function"),
        (lambda: TopKCrossEntropyLoss([1.0], reduction="all"), ValueError, "`reduction` must be"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.slow
def test_imports_without_pyro():
    code = """
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name == "pyro":
                    raise ModuleNotFoundError("No module named 'pyro'", name=name)

        sys.meta_path.insert(0, Absent())
        import torch, khot
        assert "khot.nn" not in sys.modules
        assert khot.nn.TopK(1)(torch.tensor([1.0, 2.0])).tolist() == [0, 2]
        try:
            khot.nn.KHotGate
        except ModuleNotFoundError as error:
            assert "pip install pyro-ppl" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_is_not_part_of_a_star_import():
    """There it would hide torch's."""
    assert "nn" not in khot.__all__
    with pytest.raises(AttributeError, match="no attribute 'TopL'"):
        _ = khot.nn.TopL
    for name in {*khot.nn.__all__} - {*khot.__all__}:
        with pytest.raises(AttributeError, match=f"from khot.nn import {name}$"):
            getattr(khot, name)
    for package in (khot.constraints, khot.sklearn):
        for name in package.__all__:
            with pytest.raises(AttributeError, match=f"from {package.__name__} import {name}$"):
                getattr(khot, name)


def test_too_few_entries_that_are_not_excluded():
    """Every mask raises the same error; if contents cannot be checked, an excluded entry is still not marked."""
    x = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf], [1.0, 2.0, 3.0, 4.0]])
    options = ({}, {"softness": 0.5}, {"softness": 0.5, "straight_through": True})
    for module in (make(3, **option) for make in (TopK, TopKMask) for option in options):
        with pytest.raises(ValueError, match="`k` must .* of entries above -inf, .*2.*k=(3|tensor)"):
            module(x)
        with pytest.raises(ValueError, match="`k` must .* of entries above -inf, .*2.*k=(3|tensor)"):
            module(x, torch.tensor([3, 2]))
        assert (module(x, torch.tensor([2, 3])) != 0).sum() >= 5
    expected = torch.tensor([[1.0, 0, 1, 0], [0, 1, 1, 1]])
    assert torch.equal(torch.func.vmap(TopKMask(3))(x), expected)
    assert torch.equal(torch.func.vmap(TopK(3))(x) != 0, expected != 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: TopK(), TypeError, r"^TopK\.__init__"),
        (lambda: TopKMask(), TypeError, r"^TopKMask\.__init__"),
        (lambda: KHotGate(2)(torch.ones(3, 5)), ValueError, r"KHotGate\(5, 2\) lets 2 of 5 inputs through"),
        (lambda: KHotGate(4, 2)(torch.ones(3, 5)), ValueError, r"KHotGate\(n=4, k=2\)"),
        (lambda: ExpertChoice(1)(torch.ones(3, 2, dtype=torch.cfloat)), TypeError, "must have a floating-point dtype"),
    ],
)
def test_errors_say_what_to_write(call, error, message):
    with pytest.raises(error, match=message):
        call()
