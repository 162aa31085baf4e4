"""What every relaxed top-k mask promises, checked for each member of the registry, and three members that break it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.func import hessian, jacfwd, jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from khot import topk_mask
from tests.backends import USUAL, in_turn
from tests.inputs import normal
from tests.maps import ODD_MAPS, RELAXATIONS, RelaxationCase, members, only_for

INF = float("inf")


def reference(case, x, k, softness):
    """The mask of one row by Brent's method in NumPy."""
    x = x.double().numpy()
    span = 1e5 * softness + np.ptp(x)
    t = scipy.optimize.brentq(
        lambda t: case.cdf((x - t) / softness).sum() - k, x.min() - span, x.max() + span, xtol=1e-14
    )
    return torch.from_numpy(case.cdf((x - t) / softness))


def check_value(case):
    for seed, (n, k, softness) in enumerate(
        [(1, 0.4, 1.0), (2, 1, 0.3), (7, 2.7, 0.5), (50, 25, 0.1), (50, 3, 3.0), (300, 0.01, 1.0)]
    ):
        x = normal(n, seed=seed)
        expected = reference(case, x, k, softness)
        torch.testing.assert_close(case.map(x, k, softness), expected, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(case.map(x.float(), k, softness).double(), expected, rtol=2e-5, atol=1e-6)
        if case.log:
            torch.testing.assert_close(case.log(x, k, softness), expected.log(), rtol=1e-10, atol=1e-12)


def check_shape_dtype_range_and_sum(case):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = normal(2, 3, 40, dtype=dtype)
        y = case.map(x, 7)
        assert y.shape == x.shape and y.dtype == dtype and ((y >= 0) & (y <= 1)).all()
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
        torch.testing.assert_close(y.double().sum(-1), torch.full((2, 3), 7.0).double(), rtol=tolerance, atol=0)


def check_sum_of_long_float32_rows(case):
    k = torch.tensor([10.0, 1e4, 99_990.0], dtype=torch.float64)
    y = case.map(normal(3, 10**5, dtype=torch.float32), k)
    torch.testing.assert_close(y.double().sum(-1), k, rtol=1e-6, atol=0)


def check_half_types_are_rounded_results(case):
    for dtype in (torch.float16, torch.bfloat16):
        x = normal(4, 30, dtype=dtype)
        single = case.map(x.float(), 4.5, 0.5).double()
        error = (case.map(x, 4.5, 0.5).double() - single).abs()
        assert (error <= (torch.finfo(dtype).eps * single.abs()).clamp(min=torch.finfo(dtype).smallest_normal)).all()
        torch.testing.assert_close(
            single, case.map(x.double(), 4.5, 0.5), rtol=1e-5, atol=torch.finfo(torch.float32).eps
        )


def check_batch_equals_loop(case):
    x = normal(2, 3, 6)
    k, softness = 6 * torch.rand(2, 3, dtype=torch.float64), 0.1 + torch.rand(3, dtype=torch.float64)
    batched = case.map(x, k, softness)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(batched[i, j], case.map(x[i, j], k[i, j].item(), softness[j].item()))
    torch.testing.assert_close(case.map(x, 2), case.map(x, torch.tensor(2)))  # an integer tensor is as good
    torch.testing.assert_close(case.map(x, torch.tensor([[1], [2]])), case.map(x, torch.tensor([[1.0] * 3, [2.0] * 3])))


def check_equivariance_order_and_shift(case):
    x = normal(5, 40)
    permutation = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    y = case.map(x, 11.5, 0.7)
    torch.testing.assert_close(case.map(x[:, permutation], 11.5, 0.7), y[:, permutation])
    assert (y.gather(-1, x.argsort(-1)).diff(dim=-1) >= 0).all()
    torch.testing.assert_close(case.map(x + 12.5, 11.5, 0.7), y)
    torch.testing.assert_close(case.map(3 * x, 11.5, 2.1), y)


def check_offset_in_float32(case):
    """The offset rounds the input; on the rounded input, float32 agrees with float64."""
    x = (normal(4, 200, dtype=torch.float32) + 1e4).requires_grad_()
    wide = x.detach().double().requires_grad_()
    g = normal(4, 200, dtype=torch.float32, seed=1)
    y, exact = case.map(x, 20, 0.5), case.map(wide, 20, 0.5)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)
    grad, exact_grad = torch.autograd.grad(y, x, g)[0], torch.autograd.grad(exact, wide, g.double())[0]
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-4, atol=1e-5)


def check_limits_of_softness(case):
    x = normal(3, 12)
    torch.testing.assert_close(case.map(x, 5, 1e-9), topk_mask(x, 5), rtol=0, atol=1e-6)
    torch.testing.assert_close(case.map(x, 5, 1e9), torch.full_like(x, 5 / 12), rtol=0, atol=1e-6)


def check_limits_of_k(case):
    x = normal(3, 6).requires_grad_()
    k = torch.tensor([0.0, 6.0, 2.0], dtype=torch.float64, requires_grad=True)
    softness = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    y = case.map(x, k, softness)
    torch.testing.assert_close(y[0], torch.zeros(6).double(), rtol=0, atol=1e-20)
    torch.testing.assert_close(y[1], torch.ones(6).double(), rtol=0, atol=1e-20)
    for number, row in ((0, y[0]), (6, y[1])):
        torch.testing.assert_close(case.map(x[0], number), row, rtol=0, atol=1e-20)
    gx, gk, gs = torch.autograd.grad((y * normal(3, 6, seed=3)).sum(), (x, k, softness))
    assert gx.isfinite().all() and gk.isfinite().all() and gs.isfinite()
    assert (gx[:2].abs() <= 1e-20).all()
    # d y / d k sums to 1 also at the limits, unless nothing is between 0 and 1 there.
    limits = (float(not (case.compact and case.zeros)), float(not case.compact))
    expected = torch.tensor([*limits, 1.0], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(case.map(x, k).sum(), k)[0], expected)


@only_for(lambda case: not case.compact)  # a compact link has no tails
def check_wide_gap(case):
    """Where k is an integer and the k-th gap many temperatures wide, only the tails on both sides fix the threshold."""
    x = torch.tensor([0.0, -1.0, -0.3, 60.0, 61.5], dtype=torch.float64)
    k = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y = case.map(x, k)
    (grad_k,) = torch.autograd.grad(y.sum(), k)
    torch.testing.assert_close(grad_k.item(), 1.0)
    if case.symmetric:
        complement = case.map(-x, 3)
        torch.testing.assert_close(y[:3].sum(), complement[3:].sum(), rtol=1e-9, atol=0)
        for distance in (80.0, 2000.0):  # beyond 1500 even the tails underflow
            far = torch.tensor([0.0, distance], dtype=torch.float64)
            torch.testing.assert_close(
                jacfwd(lambda k, far=far: case.map(far, k))(k.detach() - 1), torch.full((2,), 0.5).double()
            )


@only_for(lambda case: case.compact and case.zeros)
def check_exact_zeros_and_ones(case):
    """A compact link gives them, and no derivative there; where all entries are such the threshold has no place."""
    x = torch.tensor([0.0, -1.0, -0.3, 60.0, 61.5, 1.6], dtype=torch.float64, requires_grad=True)
    k, softness = torch.tensor(2.0, dtype=torch.float64, requires_grad=True), torch.ones((), requires_grad=True)
    for size, sure in ((2.0, range(6)), (2.7, (1, 2, 3, 4))):
        y = case.map(x, k + (size - 2), softness)
        hard = topk_mask(x, 2)
        assert all(y[i] == hard[i] for i in sure)
        jacobians = [torch.autograd.grad(y[i], (x, k, softness), retain_graph=True) for i in sure]
        assert all((grad == 0).all() for grads in jacobians for grad in grads)
    y = case.map(x, k, softness)
    grads = torch.autograd.grad(y.square().sum(), (x, k, softness), create_graph=True)
    assert all((grad == 0).all() for grad in grads)


def check_ties(case):
    x = torch.tensor([[1.0, 2, 2, 2, 0, 1], [3, 3, 3, 3, 3, 3]], dtype=torch.float64, requires_grad=True)
    for softness in (1e-6, 0.1, 10.0):
        y = case.map(x, 2, softness)
        for group in ([1, 2, 3], [0, 5]):
            assert (y[0, group] == y[0, group[0]]).all()
        torch.testing.assert_close(y[1], torch.full((6,), 1 / 3).double())
        torch.testing.assert_close(y.sum(-1), torch.full((2,), 2.0).double())
        assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()


def assert_finite_to_third_order(grads, inputs, finite):
    """Of large cotangents, too, whose products with distances as good as infinite overflow."""
    for last in (False, True):
        total = 1000 * sum(grad.square().sum() for grad in grads)
        grads = torch.autograd.grad(total, inputs, create_graph=not last)
        assert all(grad.isfinite().all() for grad in grads) and (grads[0][~finite] == 0).all()


def check_masked_items(case):
    x = torch.tensor(
        [[0.3, -INF, 1.0, -0.5, -INF, 0.1], [INF, 0.2, -INF, 0.4, 0.0, INF]], dtype=torch.float64, requires_grad=True
    )
    k = torch.tensor([1.7, 3.2], dtype=torch.float64, requires_grad=True)
    softness = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    finite = x.detach().isfinite()
    y = case.map(x, k, softness)
    assert torch.equal(y[~finite], torch.where(x.detach()[~finite] > 0, 1.0, 0.0).double())
    for row, selected in ((0, 0), (1, 2)):
        rest = case.map(x[row, finite[row]], k[row] - selected, softness)
        torch.testing.assert_close(y[row, finite[row]], rest)
    g = normal(2, 6, seed=1)
    grads = torch.autograd.grad((y * g).sum(), (x, k, softness), create_graph=True)
    assert all(grad.isfinite().all() for grad in grads) and (grads[0][~finite] == 0).all()
    assert_finite_to_third_order(grads, (x, k, softness), finite)
    for function in filter(None, (case.map, case.log)):
        _, change = torch.func.jvp(
            lambda s, f=function: f(x.detach(), k.detach(), s), (softness.detach(),), (1e3 + 0 * softness.detach(),)
        )
        assert change.isfinite().all() and (change[~finite] == 0).all()
    if case.log:
        logs = case.log(x, k, softness)
        assert torch.equal(logs[~finite], torch.where(x.detach()[~finite] > 0, 0.0, -INF).double())
        for create_graph in (False, True):
            grads = torch.autograd.grad(
                logs[finite].sum(), (x, k, softness), retain_graph=True, create_graph=create_graph
            )
            assert all(grad.isfinite().all() for grad in grads) and (grads[0][~finite] == 0).all()
        assert_finite_to_third_order(grads, (x, k, softness), finite)
    everything = torch.tensor([-INF, 2.0, -INF, 1.0])
    assert torch.equal(case.map(everything, 2), torch.tensor([0.0, 1, 0, 1]))
    for infeasible in (3, torch.tensor(2.5)):
        with pytest.raises(ValueError, match="entries above -inf, 2"):
            case.map(everything, infeasible)
    with pytest.raises(ValueError, match=r"\+inf entries, 2"):
        case.map(x[1], 1.5)


def check_extreme_inputs(case):
    base = normal(1, 50, seed=2)
    rows = torch.cat(
        [
            1e4 * base,
            1e-8 * base,
            base + 1e4,
            torch.zeros(1, 50).double(),
            1e30 * base,
            torch.cat([base[:, 1:], 1e6 + base[:, :1]], 1),
            torch.full((1, 50), -INF, dtype=torch.float64).index_fill(1, torch.tensor([7]), 0.3),
        ]
    )
    which, sizes = torch.arange(7).repeat_interleave(3), torch.tensor([0.3, 9.0, 49.999]).repeat(7)
    sizes[-3:] = torch.tensor([0.3, 0.5, 1.0])  # where all but one entry are masked
    for dtype in (torch.float32, torch.float64):
        g = base.to(dtype)
        x = rows[which].to(dtype).unsqueeze(1).repeat(1, 3, 1).requires_grad_()
        k, softness = sizes.clone().unsqueeze(1).requires_grad_(), torch.tensor([1e-4, 1.0, 1e4], requires_grad=True)
        y = case.map(x, k, softness)
        torch.testing.assert_close(y.double().sum(-1), sizes.double().unsqueeze(1).expand(-1, 3), rtol=2e-6, atol=0)
        grads = torch.autograd.grad((y * g).sum(), (x, k, softness))
        assert y.isfinite().all() and all(grad.isfinite().all() for grad in grads)
        x = rows[:-1].to(dtype).requires_grad_()
        for number in softness.tolist():  # without a gradient for the softness: the short way
            plain = case.map(x, 9.0, number)
            assert torch.autograd.grad((plain * g).sum(), x)[0].isfinite().all()


def check_empty_and_non_contiguous(case):
    for shape in ((0, 5), (3, 0, 5)):
        x = torch.zeros(shape, requires_grad=True)
        y = case.map(x, 2)
        y.sum().backward()
        assert y.shape == shape and x.grad.shape == shape
    assert case.map(torch.zeros(2, 0), 0).shape == (2, 0)
    x = normal(6, 8).T[::2, 1:]
    assert not x.is_contiguous()
    torch.testing.assert_close(case.map(x, 2.5), case.map(x.contiguous(), 2.5))
    expanded = normal(1, 6).expand(4, 6).detach().requires_grad_()
    case.map(expanded, 2).square().sum().backward()
    torch.testing.assert_close(expanded.grad[0], expanded.grad[3])


def check_inputs_untouched(case):
    x, k, softness = normal(3, 5), torch.tensor([1.0, 2, 3]), torch.tensor(0.5)
    kept = copy.deepcopy((x, k, softness))
    x.requires_grad_()
    case.map(x, k, softness).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, k, softness), strict=True))


def arguments():
    x = normal(2, 4).requires_grad_()
    k = torch.tensor([1.7, 2.6], dtype=torch.float64, requires_grad=True)
    return x, k, torch.tensor(0.7, dtype=torch.float64, requires_grad=True)


def check_derivatives(case):
    for function in filter(None, (case.map, case.log)):
        assert gradcheck(
            function, arguments(), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
        )
        assert gradcheck(lambda x, function=function: function(x, 2.2, 0.7), arguments()[:1], check_batched_grad=True)
        if case.smooth:
            assert gradgradcheck(function, arguments(), check_fwd_over_rev=True, check_rev_over_rev=True)


def check_first_derivative_takes_both_ways_alike(case):
    """Without create_graph and a gradient for the softness the backward pass is another piece of code."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x, k, softness = (a.detach().to(dtype).requires_grad_() for a in arguments())
        g = normal(2, 4, seed=5, dtype=dtype)
        short = torch.autograd.grad(case.map(x, k, softness.detach()), (x, k), g)
        long = torch.autograd.grad(case.map(x, k, softness), (x, k), g, create_graph=True)
        for a, b in zip(short, long, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=tolerance, atol=tolerance)


def check_jacobian(case):
    x = normal(8)
    jacobian = jacrev(lambda x: case.map(x, 3.3, 0.4))(x)
    torch.testing.assert_close(jacobian, jacobian.T)
    torch.testing.assert_close(jacobian.sum(0), torch.zeros(8).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(jacfwd(lambda x: case.map(x, 3.3, 0.4))(x), jacobian)
    assert torch.linalg.eigvalsh(jacobian).min() > -1e-12


def check_functional_transforms(case):
    def loss(x):
        return (case.map(x, 2.2, 0.5) ** 2).sum()

    x = normal(5)
    if case.smooth:
        second = hessian(loss)(x)
        for outer, inner in ((jacrev, jacrev), (jacfwd, jacfwd), (jacrev, jacfwd)):
            torch.testing.assert_close(outer(inner(loss))(x), second)
        torch.testing.assert_close(jacfwd(hessian(loss))(x), jacrev(jacrev(jacrev(loss)))(x))
    k, softness = torch.tensor([1.0, 2.5, 0.3]).double(), torch.tensor([0.5, 1.0, 2.0]).double()
    rows = normal(3, 5)
    torch.testing.assert_close(vmap(case.map)(rows, k, softness), case.map(rows, k, softness))
    torch.testing.assert_close(vmap(lambda k: case.map(x, k, 0.5))(k), case.map(x.expand(3, 5), k, 0.5))
    torch.testing.assert_close(
        vmap(lambda x: case.map(x, 2, 0.5), in_dims=1, out_dims=1)(rows.T), case.map(rows, 2, 0.5).T
    )
    jacobians = vmap(jacrev(case.map))(rows, k, softness)
    torch.testing.assert_close(jacobians[1], jacrev(case.map)(rows[1], k[1], softness[1]))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, normal(5, seed=1))
        tangent = forward_ad.unpack_dual(case.map(dual, 2.2, 0.5)).tangent
    torch.testing.assert_close(tangent, jacfwd(lambda x: case.map(x, 2.2, 0.5))(x) @ normal(5, seed=1))


def check_autocast(case):
    x = normal(3, 50, dtype=torch.float32).requires_grad_()
    expected = case.map(x, 5)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = case.map(x, 5)
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], grad, rtol=1e-5, atol=1e-7)


def check_saves_x_and_numbers_per_row(case):
    x, saved = normal(20, 1000, dtype=torch.bfloat16).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        case.map(x, torch.full((20,), 7.0, requires_grad=True), torch.tensor(0.3, requires_grad=True))
    others = [t for t in saved if t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()]
    assert len(others) < len(saved) and sum(t.numel() for t in others) <= 100


class _Forbid(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in func.name() for name in ("sort", "topk", "kthvalue")), func
        return func(*args, **(kwargs or {}))


def check_does_not_sort(case):
    with _Forbid():
        case.map(normal(2, 5000).requires_grad_(), 7).sum().backward()


def check_errors(case):
    x, softness = normal(3, 5), case.softness
    for error, match, args in [
        (ValueError, "`x` must not contain NaN.*row 1", (torch.tensor([[1.0, 2.0], [1.0, torch.nan]]), 1)),
        (ValueError, r"0 <= k <= n, but got k=-1 with n=5 \(`x` of shape \(3, 5\)\)", (x, -1)),
        (ValueError, "0 <= k <= n, but got k=5.5 with n=5", (x, 5.5)),
        (ValueError, "0 <= k <= n, but got k=nan", (x, float("nan"))),
        (ValueError, "0 <= k <= n.*k=-0.5 with n=5.*row 1", (x, torch.tensor([1.0, -0.5, 2.0]))),
        (ValueError, r"`k` of shape \(2,\) must broadcast to the batch shape \(3,\)", (x, torch.tensor([1.0, 2.0]))),
        (ValueError, rf"`{softness}` must be positive and finite, but got 0", (x, 1, 0.0)),
        (ValueError, rf"`{softness}` must be positive and finite, but got -1", (x, 1, torch.tensor([1.0, -1.0, 1.0]))),
        (ValueError, rf"`{softness}` must be positive and finite, but got inf", (x, 1, INF)),
        (ValueError, rf"`{softness}` of shape \(4,\)", (x, 1, torch.ones(4))),
        (ValueError, "n=0", (torch.zeros(2, 0), 1)),
    ]:
        with pytest.raises(error, match=match):
            case.map(*args)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


COSTLY = (check_derivatives, check_extreme_inputs)
INTERPRETED = (
    check_shape_dtype_range_and_sum,
    check_half_types_are_rounded_results,
    check_offset_in_float32,
    check_wide_gap,
    check_exact_zeros_and_ones,
    check_masked_items,
    check_first_derivative_takes_both_ways_alike,
)


@pytest.mark.parametrize(
    ("case", "check", "cpu_backend"),
    in_turn(members(RELAXATIONS, CHECKS, COSTLY, INTERPRETED), len(CHECKS)),
    indirect=["cpu_backend"],
)
def test_contract(case: RelaxationCase, check, cpu_backend):
    check(case)


CHECKS_OF_ANY_MAP = [
    check_half_types_are_rounded_results,
    check_batch_equals_loop,
    check_empty_and_non_contiguous,
    check_inputs_untouched,
    check_derivatives,
    check_first_derivative_takes_both_ways_alike,
    check_functional_transforms,
    check_autocast,
    check_saves_x_and_numbers_per_row,
    check_does_not_sort,
    check_errors,
]


@pytest.mark.parametrize(
    ("case", "check", "cpu_backend"),
    in_turn(members(ODD_MAPS, CHECKS_OF_ANY_MAP, COSTLY), len(CHECKS_OF_ANY_MAP)),
    indirect=["cpu_backend"],
)
def test_contract_of_odd_maps(case: RelaxationCase, check, cpu_backend):
    check(case)


# One of each operator; others have their links to themselves, and all else in common.
COMPILED = [RELAXATIONS[0].map, RELAXATIONS[0].log, *(case.map for case in ODD_MAPS[::2])]


@pytest.mark.slow
def test_compiles_into_one_graph(cpu_backend):
    for function in COMPILED if cpu_backend == USUAL else COMPILED[:1]:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for batch, n in ((2, 5), (3, 7)):
            inputs = normal(batch, n), torch.full((batch,), 1.5), torch.tensor(0.7)
            for leaf in inputs:
                leaf.requires_grad_()
            check_equal_with_gradients(compiled(*inputs), function(*inputs), inputs)
        with pytest.raises(ValueError, match="0 <= k <= n.*k=9 with n=5"):
            compiled(normal(2, 5), torch.tensor([1.0, 9.0]), torch.tensor(1.0))


@pytest.mark.slow
def test_compiles_with_numbers_and_under_vmap():
    torch._dynamo.reset()
    function = RELAXATIONS[0].map
    compiled = torch.compile(lambda x, k: function(x, k, 0.5), backend="aot_eager", fullgraph=True, dynamic=True)
    for shape, k in (((2, 5), 2), ((3, 7), 3)):
        x = normal(*shape).requires_grad_()
        check_equal_with_gradients(compiled(x, k), function(x, k, 0.5), (x,))
    batched = torch.compile(vmap(lambda x, k: function(x, k, 0.5)), backend="aot_eager", fullgraph=True)
    x, k = normal(3, 5), torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(batched(x, k), function(x, k, 0.5))


def check_equal_with_gradients(actual, expected, inputs):
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), inputs) for y in (actual, expected)))


def scaled_softmax(x, k, temperature=1.0, dim=-1):
    """Sums to k, and leaves the unit interval."""
    return k * torch.softmax(x / temperature, dim)


def detached_threshold(x, k, temperature=1.0, dim=-1):
    """The right value, with a gradient that forgets that the threshold moves."""
    y = RELAXATIONS[0].map(x.detach(), k, temperature, dim=dim)
    return torch.sigmoid(x / temperature + (y.logit() - x / temperature).detach())


def plain_residual(x, k, temperature=1.0, dim=-1):
    """Bisection on ``sum(y) - k``, which has no digits left in a wide gap."""
    x = x.movedim(dim, -1)
    low, high = x.amin(-1) - 50 * temperature, x.amax(-1) + 50 * temperature
    for _ in range(60):
        middle = (low + high) / 2
        above = torch.sigmoid((x - middle.unsqueeze(-1)) / temperature).sum(-1) > k
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    y = torch.sigmoid((x - low.unsqueeze(-1)) / temperature)
    slope = (y * (1 - y)).sum(-1)  # carries the derivatives of the threshold
    threshold = low + temperature * ((y.sum(-1) - k) - (y.sum(-1) - k).detach()) / slope.detach()
    return torch.sigmoid((x - threshold.unsqueeze(-1)) / temperature).movedim(-1, dim)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (scaled_softmax, check_shape_dtype_range_and_sum),
        (detached_threshold, check_derivatives),
        (plain_residual, check_wide_gap),
    ],
)
def test_contract_rejects(wrong, check):
    with pytest.raises((AssertionError, GradcheckError)):
        check(replace(RELAXATIONS[0], map=wrong, log=None))
