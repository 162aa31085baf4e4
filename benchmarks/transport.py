"""sorted_transport_topk against 200 plain Sinkhorn iterations with implicit differentiation, forward + backward.

Run `python benchmarks/transport.py`. Each case is first compared with the solution in float64, to which Sinkhorn's
iteration, in float64 too, was run until its own marginals were right to 1e-12. The target is to be 10 times faster at
n = 1000, k = 10, and no less accurate. Three Sinkhorns: in the log domain, which any epsilon allows, in the published
layout and in one that torch reduces faster; and with the kernel exp(-C / epsilon), which underflows for small epsilon
(then it is left out).
"""

from collections.abc import Callable
from typing import Any

import torch
from timing import arguments, interleaved, write_csv
from torch import Tensor
from torch.autograd import Function

from khot import sorted_transport_topk

ITERATIONS = 200
CASES = [
    (batch, n, k, epsilon, dtype)
    for batch, n, k in [(1, 1000, 10), (64, 1000, 10), (64, 100, 5)]
    for epsilon in (0.1, 1.0, 10.0)
    for dtype in (torch.float32, torch.float64)
]


def problem(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cost (batch, k + 1, n) and the sums over the items (k + 1, 1), with rows of mass 1."""
    anchors = torch.arange(k, -1, -1, dtype=x.dtype)[:, None]
    sums = torch.ones_like(anchors)
    sums[-1] = x.shape[-1] - k
    return (x[:, None, :] - anchors).square(), sums


def log_sinkhorn(x: Tensor, k: int, epsilon: float, tol: float = 0.0, max_iter: int = ITERATIONS) -> Tensor:
    """The plan (batch, k + 1, n) by iterations in the log domain, until the marginals are right to ``tol``."""
    cost, sums = problem(x, k)
    scores, log_sums = cost / -epsilon, sums.log()
    g = torch.zeros_like(scores[..., :1])
    for _ in range(max_iter):
        f = -torch.logsumexp(scores + g, -2, keepdim=True)
        total = torch.logsumexp(scores + f, -1, keepdim=True)
        if tol and bool(((total + g).exp() - sums).abs().max() < tol):
            break
        g = log_sums - total
    return (scores + f + g).exp()


def published_sinkhorn(x: Tensor, k: int, epsilon: float) -> Tensor:
    """:func:`log_sinkhorn` in the published layout, (batch, n, k + 1)."""
    cost, sums = problem(x, k)
    scores, log_sums = cost.mT.contiguous() / -epsilon, sums.mT.log()
    g = torch.zeros_like(scores[:, :1])
    for _ in range(ITERATIONS):
        f = -torch.logsumexp(scores + g, -1, keepdim=True)
        g = log_sums - torch.logsumexp(scores + f, -2, keepdim=True)
    return (scores + f + g).exp().mT


def kernel_sinkhorn(x: Tensor, k: int, epsilon: float) -> Tensor:
    """The plan (batch, k + 1, n) by matrix-vector products with exp(-C / epsilon)."""
    cost, sums = problem(x, k)
    kernel = (cost / -epsilon).exp()
    v = torch.ones_like(kernel[..., :1])
    for _ in range(ITERATIONS):
        u = 1 / (kernel.mT @ v)
        v = sums / (kernel @ u)
    return kernel * u.mT * v


class ImplicitSinkhorn(Function):
    """Sinkhorn's plan with the derivative of Xie et al., theorem 3: one (k x k) system; saves the plan."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int, epsilon: float, solver: Callable[..., Tensor]) -> Tensor:
        plan = solver(x, k, epsilon)
        ctx.save_for_backward(x, plan)
        ctx.epsilon = epsilon
        return plan[:, :-1].mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, plan = ctx.saved_tensors
        inner, weighted = plan[:, :-1], plan[:, :-1] * grad.mT
        mean = weighted.sum(-2, keepdim=True)
        right = weighted.sum(-1, keepdim=True) - inner @ mean.mT
        schur = torch.diag_embed(inner.sum(-1)) - inner @ inner.mT
        shift = torch.linalg.solve(schur, right)
        grad_scores = weighted - inner * (shift + mean - (inner * shift).sum(-2, keepdim=True))
        anchors = torch.arange(inner.shape[-2], 0, -1, dtype=x.dtype)[:, None]
        return 2 / ctx.epsilon * (anchors * grad_scores).sum(-2), None, None, None


def sinkhorn_topk(x: Tensor, k: int, epsilon: float, solver: Callable[..., Tensor] = log_sinkhorn) -> Tensor:
    return ImplicitSinkhorn.apply(x, k, epsilon, solver)


METHODS: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "sorted_transport_topk": sorted_transport_topk,
    "published log Sinkhorn": lambda x, k, epsilon: sinkhorn_topk(x, k, epsilon, published_sinkhorn),
    "log Sinkhorn": sinkhorn_topk,
    "kernel Sinkhorn": lambda x, k, epsilon: sinkhorn_topk(x, k, epsilon, kernel_sinkhorn),
}


def errors(x: Tensor, k: int, epsilon: float, grad: Tensor) -> dict[str, tuple[float, float]]:
    """Largest error of value and gradient of each method on the first row; asserts that ours is right."""
    x, grad = x[:1], grad[:1]
    wide = x.double().requires_grad_()
    exact = sinkhorn_topk(wide, k, epsilon, lambda *a: log_sinkhorn(*a, tol=1e-12, max_iter=100_000))
    (exact_grad,) = torch.autograd.grad(exact, wide, grad.double())
    found = {}
    for name, method in METHODS.items():
        leaf = x.clone().requires_grad_()
        y = method(leaf, k, epsilon)
        try:
            (gx,) = torch.autograd.grad(y, leaf, grad)
        except RuntimeError:  # a singular system, of a plan without meaning
            gx = torch.full_like(leaf, torch.nan)
        found[name] = (
            (y - exact).abs().max().item(),
            (gx - exact_grad).abs().max().item() / exact_grad.abs().max().item(),
        )
    ours = found["sorted_transport_topk"]
    tolerance = 1e-8 if x.dtype == torch.float64 else 1e-5
    assert ours[0] < tolerance and ours[1] < 10 * tolerance, found
    return found


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "transport_cpu.csv")
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    print(
        f"{'batch':>5} {'n':>5} {'k':>4} {'epsilon':>7} {'dtype':<8} "
        f"{'method':<24}{'median':>11}   /ours  error y   error grad"
    )
    for batch, n, k, epsilon, dtype in CASES:
        x, grad = torch.randn(batch, n, dtype=dtype), torch.randn(batch, n, k, dtype=dtype)
        found = errors(x, k, epsilon, grad)
        leaf = x.clone().requires_grad_()

        def both(method, leaf=leaf, grad=grad, k=k, epsilon=epsilon):
            return torch.autograd.grad(method(leaf, k, epsilon), leaf, grad)

        usable = {name: m for name, m in METHODS.items() if found[name][1] < torch.inf}
        timings = interleaved({name: lambda m=m: both(m) for name, m in usable.items()}, options.seconds, rounds=5)
        for name, timing in timings.items():
            ratio = timing.median / timings["sorted_transport_topk"].median
            label = str(dtype).removeprefix("torch.")
            print(
                f"{batch:>5} {n:>5} {k:>4} {epsilon:>7} {label:<8} "
                f"{name:<24}{timing.median * 1e3:>8.2f} ms{ratio:>7.1f}x"
                f"  {found[name][0]:.0e}     {found[name][1]:.0e}"
            )
            rows.append(
                {
                    "batch": batch, "n": n, "k": k, "epsilon": epsilon, "dtype": label, "method": name,
                    "median_ms": f"{timing.median * 1e3:.3f}", "p20_ms": f"{timing.low * 1e3:.3f}",
                    "p80_ms": f"{timing.high * 1e3:.3f}", "error_y": f"{found[name][0]:.1e}",
                    "error_grad": f"{found[name][1]:.1e}",
                }
            )  # fmt: skip
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
