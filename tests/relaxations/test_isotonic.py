"""Isotonic optimisation: objectives by a generic solver, exact derivatives, the sparse top-k reductions."""

from fractions import Fraction

import numpy as np
import pytest
import scipy.optimize
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev, vmap

from khot import isotonic_l2, isotonic_lp
from tests.inputs import normal
from tests.oracle import EPS, cases, tensor


def problem(*shape):
    return normal(*shape), normal(*shape, seed=1).abs()


@pytest.mark.parametrize("kind", ["mask", "magnitude"])
@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3])
def test_minimises_the_documented_objective(p, kind):
    s, w = problem(7)
    strength, q = 0.4, p / (p - 1)

    def objective(v):
        phi = v if kind == "mask" else v**2 / 2
        return np.sum(strength ** (q - 1) * w.numpy() * phi + np.abs(s.numpy() - v) ** q / q)

    order = scipy.optimize.LinearConstraint(-np.diff(np.eye(7), axis=0), lb=0)
    start = np.sort(s.numpy())[::-1]
    best = scipy.optimize.minimize(objective, start, constraints=[order], method="SLSQP", options={"ftol": 1e-15})
    v = isotonic_lp(s, w, p, strength, kind=kind)
    assert (v.diff() <= 0).all()
    assert objective(v.numpy()) <= best.fun + 1e-12
    torch.testing.assert_close(v, torch.from_numpy(best.x), rtol=0, atol=2e-3)


def test_l2_is_the_projection_onto_decreasing_sequences():
    s, w = normal(3, 60), normal(3, 60, seed=1)
    for offset in (w, None):
        target = s - w if offset is not None else s
        expected = [scipy.optimize.isotonic_regression(row, increasing=False).x for row in target.numpy()]
        for solver in ("pav", "dykstra"):
            v = isotonic_l2(s, offset, solver)
            torch.testing.assert_close(v, torch.from_numpy(np.stack(expected)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(isotonic_lp(s, w, 2, 0.7), isotonic_l2(s, 0.7 * w))
    torch.testing.assert_close(isotonic_l2(s.float(), w.float()), isotonic_l2(s, w).float())


@pytest.mark.parametrize(("p", "kind"), [(2.0, "mask"), (2.0, "magnitude"), (4 / 3, "mask"), (1.5, "magnitude")])
@pytest.mark.slow
def test_derivatives(p, kind):
    s, w = problem(2, 4)
    strength = torch.tensor([0.4, 1.1], dtype=torch.float64)
    inputs = [v.requires_grad_() for v in (s, w, strength)]

    def solve(s, w, strength):
        return isotonic_lp(s, w, p, strength, kind=kind)

    assert gradcheck(solve, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(solve, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)
    # The other solver differs in how it finds the blocks only.
    left, right = (
        torch.autograd.grad(isotonic_lp(s, w, p, strength, solver, kind=kind).square().sum(), inputs)
        for solver in ("pav", "dual")
    )
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize(("p", "kind"), [(4 / 3, "mask"), (1.5, "magnitude")])
def test_third_derivatives(p, kind):
    """The value is what Newton's steps carry: one too few, or a frozen slope, shows at this order first."""
    s, w = (torch.tensor(v, dtype=torch.float64) for v in ([1.2, 1.1, 0.2], [3.0, 0.1, 0.1]))
    strength = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    direction = torch.tensor([0.7, -0.2, 1.0], dtype=torch.float64)

    def along(step):
        return (isotonic_lp(s + step * direction, w, p, strength * (1 + step), kind=kind) * direction).sum()

    def derivative(step, order):
        value = along(step)
        for _ in range(order):
            (value,) = torch.autograd.grad(value, step, create_graph=True)
        return value

    assert isotonic_lp(s, w, p, strength, kind=kind).unique().numel() < 3  # something is pooled
    for order in (1, 2, 3):
        assert gradcheck(
            lambda step, order=order: derivative(step, order - 1), torch.zeros((), dtype=torch.float64).requires_grad_()
        )


def test_derivative_where_nothing_is_pooled_and_weights_vanish():
    s = torch.tensor([3.0, 2.0, 2.0, 1.0], dtype=torch.float64)
    w = torch.tensor([0.1, 0.0, 0.0, 0.0], dtype=torch.float64)
    for p in (2.0, 1.5, 4 / 3):
        for kind in ("mask", "magnitude"):
            jacobian = jacrev(lambda s, p=p, kind=kind: isotonic_lp(s, w, p, 0.5, kind=kind))(s)
            assert torch.equal(jacobian - torch.diag(jacobian.diag()), torch.zeros(4, 4).double())
            torch.testing.assert_close(jacobian.diag()[1:], torch.ones(3).double())


@pytest.mark.slow
def test_functional_transforms():
    s, w = problem(3, 6)
    for function in (isotonic_l2, lambda s, w: isotonic_lp(s, w, 1.5, 0.5)):
        torch.testing.assert_close(vmap(function)(s, w), function(s, w))
        torch.testing.assert_close(vmap(jacrev(function))(s, w)[1], jacfwd(function)(s[1], w[1]))


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        ("mask", "pav"),
        ("mask", "dual"),
        ("magnitude", "pav"),
        pytest.param("magnitude", "dual", marks=pytest.mark.slow),
    ],
)
def test_reduction_of_sparse_topk(name, solver):
    """z = ((s - v) / strength)^(q - 1) is the sparse top-k of the oracles, values and gradients."""
    checked = 0
    for case in cases(f"sparse_topk_{name}"):
        x, n = tensor(case["x"]), case["n"]
        if case.get("kind", name) != name or case["k"] != int(case["k"]) or not x.isfinite().all():
            continue
        if solver == "dual" and (n > (4 if name == "magnitude" else 5) or case["lam"] < 0.1):
            continue
        checked += 1
        p, sign = float(Fraction(case["p"])), x.sign() if name == "magnitude" else torch.ones(n)
        leaf = (sign * x).requires_grad_()
        strength = torch.tensor(case["lam"], dtype=torch.float64, requires_grad=True)
        s, order = leaf.sort(descending=True)
        v = isotonic_lp(s, (torch.arange(n) < case["k"]).double(), p, strength, solver, kind=name, max_iter=2000)
        z = ((s - v) / strength).clamp(min=0) ** (1 / (p - 1))
        y = torch.zeros_like(z).scatter(-1, order, z)
        size = (1 + leaf.abs().max() / strength).item()
        expected = sign * tensor(case["y"])
        assert (y - expected).abs().max() <= 64 * EPS * size * (1 + expected.max()), case["id"]
        if case["lam"] < 1e-2:  # s - v has lost the digits that the gradient divides by the strength
            continue
        grads = torch.autograd.grad(y, (leaf, strength), sign * tensor(case["g"]))
        for grad, reference in zip(grads, (sign * tensor(case["vjp_x"]), tensor([case["vjp_lam"]])), strict=True):
            assert ((grad - reference).abs() <= 1e-10 * (1 + reference.abs())).all(), case["id"]
    assert checked >= (4 if solver == "dual" else 20)


def test_empty_ties_and_extremes():
    for shape in ((0, 4), (3, 0), (1,)):
        s = torch.ones(shape, requires_grad=True)
        isotonic_l2(s).sum().backward()
        assert torch.equal(s.grad, torch.ones(shape))
    torch.testing.assert_close(isotonic_l2(torch.full((2, 5), 3.0)), torch.full((2, 5), 3.0))
    base = normal(2, 40)
    for s in (1e4 * base, 1e-8 * base, base + 1e4, 0 * base, 1e30 * base):
        for p, kind in ((2.0, "mask"), (4 / 3, "mask"), (1.1, "mask"), (4 / 3, "magnitude"), (2.0, "magnitude")):
            leaf = s.expand(3, 2, 40).clone().requires_grad_()
            strength = torch.tensor([[1e-4], [1.0], [1e4]])
            v = isotonic_lp(leaf, torch.ones(40).double(), p, strength, kind=kind)
            (grad,) = torch.autograd.grad(v.square().sum(), leaf)
            assert v.isfinite().all() and grad.isfinite().all(), (p, kind)
            assert (v.diff(dim=-1) <= 1e-12 * s.abs().max()).all()


def test_weights_of_magnitudes_are_not_negative():
    with pytest.raises(ValueError, match="`w` must not be negative.*-1"):
        isotonic_lp(normal(4), -torch.ones(4), 2, 1.0, kind="magnitude")


def test_too_few_sweeps_are_not_silent():
    x = normal(2, 100)
    x[1] = x[0].sort(descending=True).values
    with pytest.warns(RuntimeWarning, match="1 of 2 rows still rise by up to .* after the last of max_iter=1 "):
        v = isotonic_l2(x, solver="dykstra", max_iter=1)
    assert torch.equal(v[1], x[1])
