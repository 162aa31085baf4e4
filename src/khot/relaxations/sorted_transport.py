r"""Sorted SOFT top-k, as a differentiable function of scores and epsilon.

The forward pass is the plan of :mod:`khot.kernels.transport`. The derivatives use the formulas given there, in
differentiable operations of x, T and the thresholds t. As t is itself an output of the function, derivatives of every
order follow. The function saves x and the thresholds.
"""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot._contents import checks_contents, looks_at_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_enough, check_k, check_rows, check_softness, checked_count, checked_int
from khot.kernels.exact.rows import in_rows_of
from khot.kernels.operators.autograd import move_batch_first, with_forward_mode
from khot.kernels.transport import sorted_transport, sorted_transport_derivative
from khot.kernels.transport.plan import (
    anchors,
    centred,
    derivative,
    outward_sums,
    padded,
    scores_and_plan,
    solve_dual,
    threshold_steps,
)

from .excluded import filled_below, may_have_excluded

MASS_TOLERANCE = {torch.float64: 1e-13}  # error of a column's sum; in coarser dtypes rounding is larger than 1e-9
MASS_TOLERANCE_COARSE = 1e-9
UNFELT = 2000.0  # distance of excluded entries below the others, in units of epsilon / 2, in addition to their width


class _SortedTransport(Function):
    """(x, T) -> (y, t) for x of shape (..., n) and float64 T = eps / 2 of shape (...), y of shape (..., k, n)."""

    @staticmethod
    def forward(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
        return sorted_transport(x, half, k, tol, max_iter, check)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, half, ctx.k, *_ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, half, output[1])
        ctx.save_for_forward(x, half, output[1])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_t: Tensor | None) -> tuple[Tensor | None, ...]:
        x, half, t = ctx.saved_tensors
        needs_half = ctx.needs_input_grad[1]
        plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        if plain and grad_y is not None and grad_t is None:
            grad_x, grad_half = sorted_transport_derivative(x, half, t, grad_y, needs_half)
            return grad_x, grad_half if needs_half else None, None, None, None, None
        scores, plan = _scores_and_plan(x, half, t)
        grad_plan = torch.zeros_like(plan) if grad_y is None else padded(grad_y, len(plan))
        of_t = None if grad_t is None else grad_t.movedim(-1, 0)
        grad_x, grad_half = derivative(plan, scores, half, grad_plan, of_t)
        return grad_x.to(x.dtype), grad_half if needs_half else None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        x, half = move_batch_first(info.batch_size, in_dims, args[:2])
        k, tol, max_iter, _ = args[2:]
        return _apply(x, half, k, tol, max_iter, False), (0, 0)


def _jvp(ctx: Any, saved: list[Tensor], dx: Tensor | None, dhalf: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    x, half, t = saved
    scores, plan = _scores_and_plan(x, half, t)
    moved = torch.zeros_like(plan)
    if dx is not None:
        moved = moved + anchors(plan) * (dx / half.unsqueeze(-1))
    if dhalf is not None:
        moved = moved - scores * (dhalf / half).unsqueeze(-1)
    dg = -solve_dual(plan, plan.sum(-1), centred(plan, moved).sum(-1)[:-1])
    dt = half * threshold_steps(dg)
    of_duals = torch.cat([dg, torch.zeros_like(plan[:1, ..., 0])]).unsqueeze(-1)
    dy = centred(plan, moved + of_duals)[: ctx.k].movedim(0, -2)
    # Forward mode requires the layouts of y and t.
    return dy.to(x.dtype).clone(memory_format=torch.contiguous_format), dt.movedim(0, -1).contiguous()


def _scores_and_plan(x: Tensor, half: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    x, t = x.double(), t.movedim(-1, 0)
    return scores_and_plan(x, half, t, outward_sums(len(t) + 1, x))


_apply = with_forward_mode(_SortedTransport, _jvp)


def _checked_tol(tol: float | None, dtype: torch.dtype) -> float:
    if tol is None:
        tol = MASS_TOLERANCE.get(dtype, MASS_TOLERANCE_COARSE)
        return float(tol)  # read before a Function reads it: see `Setting` in engine.py
    if isinstance(tol, bool) or not isinstance(tol, Real) or not 0 < float(tol) < math.inf:
        raise ValueError(f"`tol` must be None or a positive number, but got {tol}")
    return tol


@of_rows()
def sorted_transport_topk(
    x: Tensor, k: int, epsilon: float | Tensor = 0.1, *, dim: int = -1, tol: float | None = None, max_iter: int = 1000
) -> Tensor:
    r"""Relaxes the k largest entries, in order, by optimal transport (third argument: ``epsilon``; ``dim`` by keyword).

    .. math:: y &= n\,\Gamma_{\cdot,\,:k}, \quad C_{ij} = (x_i - (k - j))^2, \\
        \Gamma &= \arg\min_{\Gamma \ge 0} \langle C, \Gamma\rangle
        + \varepsilon {\textstyle\sum_{ij}} \Gamma_{ij} \log \Gamma_{ij}, \\
        \Gamma 1 &= \tfrac{1}{n} 1, \quad \Gamma^\top 1 = (\tfrac1n, \dots, \tfrac1n, \tfrac{n-k}{n})

    Column j is a soft indicator of the (j+1)-th largest entry: columns sum to 1, rows to at most 1, and ``y.mT @ x`` is
    a soft version of the k largest values. Tends to the hard indicators as ``epsilon -> 0``, to ``1 / n`` as it grows.
    Permutation-equivariant, invariant to ``x + c``; ``epsilon`` is absolute, see :func:`transport_topk`. Differentiable
    to any order in ``x`` and ``epsilon``, in reverse and forward mode.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        k: Number of columns, an int from 0 to the number of entries that are not excluded.
        epsilon: Positive softness.
        dim: Axis of the ground set.
        tol: Deviation of a column's sum from 1 at which to stop; by default about the rounding error of the dtype.
        max_iter: Number of Newton steps after which to stop with a RuntimeWarning.

    Returns:
        Tensor of the dtype and shape of ``x`` with an axis of length ``k`` appended, in ``[0, 1]``. It is computed in
        float64.

    Raises:
        ValueError: If ``k`` or ``epsilon`` is out of range, ``epsilon`` does not broadcast, or ``x`` contains NaN or
            ``inf``. See :mod:`khot.relaxations`.

    References:
        [1] Xie et al. (2020), "Differentiable Top-k with Optimal Transport", arXiv:2002.06504: sorted SOFT top-k.

    Example:
        >>> sorted_transport_topk(torch.tensor([0.0, 1.0, 2.0]), 2, 1.0)
        tensor([[0.0138, 0.2332],
                [0.2332, 0.5336],
                [0.7530, 0.2332]])
    """
    check_rows(x, dim)
    k = checked_int("k", k, "an int, the number of columns of the result")
    max_iter = checked_count("max_iter", max_iter)
    tol = _checked_tol(tol, x.dtype)
    rows = x.movedim(dim, -1)
    check_k(k, x, rows.shape[:-1], rows.shape[-1])
    check_softness("epsilon", epsilon, x, rows.shape[:-1])
    if k == 0:
        return x.unsqueeze(-1)[..., :0]
    return _columns(rows, k, epsilon, tol, max_iter).movedim(-1, dim % x.dim())


def _columns(x: Tensor, k: int, epsilon: float | Tensor, tol: float, max_iter: int) -> Tensor:
    """The plans of rows x (..., n), with columns as rows (..., k, n)."""
    half = in_rows_of(x, epsilon) / 2
    if not may_have_excluded(x):
        y: Tensor = _apply(x, half, k, tol, max_iter, checks_contents(x))[0]
        return y
    if looks_at_contents(x):
        check_enough(x, k)
    filled = filled_below(x, _reach(x, half))
    y, _ = _apply(filled.x, half, k, tol, max_iter, checks_contents(x))
    return y.masked_fill(filled.is_excluded.unsqueeze(-2), 0.0).to(x.dtype)


def _reach(x: Tensor, half: Tensor) -> Tensor:
    """The distance below the others at which an entry has no mass in any column (..., 1)."""
    finite = x.detach().double().nan_to_num(neginf=torch.nan)
    lowest, highest = finite.nan_to_num(nan=torch.inf).amin(-1), finite.nan_to_num(nan=-torch.inf).amax(-1)
    return ((highest - lowest).clamp(min=0) + UNFELT * half).unsqueeze(-1)
