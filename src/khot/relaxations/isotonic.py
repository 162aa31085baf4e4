r"""Isotonic optimisation with exact derivatives, to which soft top-k, ranking and sorting on permutahedra reduce.

The solvers of :mod:`khot.kernels.isotonic` return the solution and, as integers, the blocks in which it is constant.
Given the blocks, a value is a quotient of sums over its block if p = 2. Otherwise it is the root of an increasing
function, which two Newton steps from the solution express with derivatives that are exact to third order. These
formulas carry the derivatives in plain torch operations: to any order, in both modes, batched and compiled.
"""

import torch
from torch import Tensor

from khot._contents import checks_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_choice, check_floating, check_softness, checked_count
from khot.kernels.exact.rows import in_rows_of
from khot.kernels.isotonic import isotonic
from khot.kernels.isotonic.exact import Objective, block_sums
from khot.kernels.operators.autograd import with_derivatives_of

from .sparse import check_exponent


def solve_blocks(s: Tensor, w: Tensor, strength: Tensor, names: str, p: float) -> tuple[Tensor, Tensor]:
    """``isotonic_lp(s, w, p, strength)`` and its blocks, as constants; s and w have one shape, strength is (..., 1)."""
    names = names if checks_contents(s) else ""
    solution, blocks = isotonic(s.detach(), w.detach(), strength.detach().squeeze(-1), p, False, False, 0, names)
    return solution, blocks


def of_pooled(s: Tensor, w: Tensor, strength: Tensor, p: float, v: Tensor, blocks: Tensor) -> Tensor:
    """sign(s - v) abs((s - v) / strength)^(q - 1), differentiable, with v near ``isotonic_lp(s, w, p, strength)``.

    The s and v of a block may be measured from its middle, which keeps the digits of their differences.
    """
    objective, power = Objective(s, w, strength, p, magnitude=False), 1 / (p - 1)
    z = (s - _newton(objective, v, blocks)) / strength
    zero = z == 0
    return torch.where(zero, z, z.abs().masked_fill(zero, 1).pow(power).copysign(z))


def column(strength: float | Tensor, x: Tensor) -> Tensor:
    """The strength of each row as a float64 tensor (..., 1)."""
    return in_rows_of(x, strength).unsqueeze(-1)


def _solve(objective: Objective, dual: bool, max_iter: int) -> Tensor:
    values = objective.s, objective.w, objective.strength.squeeze(-1)
    names = "s,w" if checks_contents(objective.s) else ""
    solution, blocks = isotonic(*(v.detach() for v in values), objective.p, objective.magnitude, dual, max_iter, names)
    if objective.p == 2:
        linear, constant = objective.quadratic()
        v = block_sums(constant, blocks) / block_sums(linear, blocks)
    else:
        v = _newton(objective, solution, blocks)
    return with_derivatives_of(solution, v)


def _newton(objective: Objective, v: Tensor, blocks: Tensor) -> Tensor:
    size = block_sums(torch.ones_like(v), blocks)
    v = block_sums(v, blocks) / size
    for _ in range(2):
        value, slope = objective.derivatives(v)
        value, slope = block_sums(value, blocks), block_sums(slope, blocks)
        flat = slope == 0  # where w = 0 and v = s
        follow = block_sums(objective.s, blocks) / size
        v = torch.where(flat, with_derivatives_of(v.detach(), follow), v - value / slope.masked_fill(flat, 1))
    return v


def _checked(s: Tensor, w: Tensor, max_iter: int) -> tuple[Tensor, int]:
    """Checks types and shapes; w is expanded to the shape of s."""
    max_iter = checked_count("max_iter", max_iter)
    for name, value in (("s", s), ("w", w)):
        check_floating(name, value)
    if s.dim() == 0:
        raise ValueError("`s` must have at least one dimension, but got a scalar")
    try:
        return w.expand(s.shape), max_iter
    except RuntimeError:
        raise ValueError(f"`w` of shape {tuple(w.shape)} must broadcast to `s` of shape {tuple(s.shape)}") from None


def _is_dual(solver: str, dual: str) -> bool:
    check_choice("solver", solver, ("pav", dual))
    return solver == dual


@of_rows(rows=("s", "w"))
def isotonic_l2(s: Tensor, w: Tensor | None = None, solver: str = "pav", *, max_iter: int = 1000) -> Tensor:
    r"""Projects onto decreasing sequences.

    .. math:: v = \arg\min_{v_1 \ge \dots \ge v_n} \tfrac12 \|s - w - v\|^2

    For s and w in descending order, ``s - v`` is the Euclidean projection of s onto the permutahedron of w [1].
    Differentiable in ``s`` and ``w`` to any order. The map is piecewise linear: its derivative averages over the blocks
    of equal values that were pooled.

    Args:
        s: Finite values with ``n`` entries along the last axis.
        w: Finite values that broadcast to ``s``; by default zeros, which gives the isotonic regression of ``s``.
        solver: ``"pav"`` is exact. With numba, it runs as a compiled loop on a CPU; otherwise it takes log2(n) batched
            levels. ``"dykstra"`` alternates projections onto the odd and the even constraints [2, algorithm 1], for all
            rows and pairs at once; it needs about as many sweeps as the square of the length of the longest block.
        max_iter: Number of sweeps after which Dykstra's algorithm returns the last iterate with a RuntimeWarning, if it
            is not exact by then.

    Returns:
        Tensor like ``s``.

    Raises:
        ValueError: If shapes do not fit, ``solver`` is unknown, ``max_iter`` is below 1, or contents are not finite.
            See :mod:`khot.relaxations`.

    References:
        [1] Blondel, Teboul, Berthet, Djolonga (2020), "Fast Differentiable Sorting and Ranking", Propositions 3 and 4.
        [2] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective".

    Example:
        >>> isotonic_l2(torch.tensor([1.0, 3.0, 2.0, 0.0]))
        tensor([2., 2., 2., 0.])
    """
    w, max_iter = _checked(s, torch.zeros_like(s) if w is None and isinstance(s, Tensor) else w, max_iter)
    objective = Objective(s.double(), w.double(), column(1.0, s), 2.0, magnitude=False)
    return _solve(objective, _is_dual(solver, "dykstra"), max_iter).to(s.dtype)


@of_rows(rows=("s", "w"))
def isotonic_lp(
    s: Tensor,
    w: Tensor,
    p: float,
    strength: float | Tensor,
    solver: str = "pav",
    *,
    kind: str = "mask",
    max_iter: int = 1000,
) -> Tensor:
    r"""Solves the isotonic problem of top-k operators with a p-norm regulariser.

    .. math:: v = \arg\min_{v_1 \ge \dots \ge v_n} & \sum_i \lambda^{q-1} w_i\,\varphi(v_i)
        + \tfrac1q |s_i - v_i|^q, \\ & \tfrac1p + \tfrac1q = 1

    with :math:`\varphi(v) = v` (``kind="mask"``) or :math:`\tfrac12 v^2` (``"magnitude"``), and :math:`\lambda` the
    ``strength``. Let s be the scores in descending order (for magnitudes, their absolute values), and w be k ones
    followed by zeros. Then :math:`((s - v)/\lambda)^{q-1}` is the sparse top-k mask, or the absolute values of the
    sparse top-k magnitudes [1, section 5]. For masks with p = 2, v is ``isotonic_l2(s, strength * w)``. Differentiable
    in ``s``, ``w`` and ``strength``, in reverse and forward mode, exactly to third order wherever the derivatives
    exist.

    Args:
        s: Finite values with ``n`` entries along the last axis.
        w: Finite values that broadcast to ``s``; nonnegative for magnitudes.
        p: Norm of the regulariser, ``1 < p <= 2``.
        strength: Positive softness.
        solver: ``"pav"`` pools blocks, to machine precision. ``"dual"`` is block coordinate ascent on the multipliers
            of the odd and of the even constraints [1, appendix A.8]; for p = 2 this is Dykstra's algorithm.
        kind: ``"mask"`` or ``"magnitude"``.
        max_iter: Number of sweeps after which the dual ascent returns the last iterate with a RuntimeWarning, if it is
            not exact by then.

    Returns:
        Tensor like ``s``.

    Raises:
        ValueError: If an argument is out of range or shapes do not fit. See :mod:`khot.relaxations`.

    References:
        [1] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective".

    Example:
        >>> s = torch.tensor([1.5, 1.0, 0.0])
        >>> (s - isotonic_lp(s, torch.tensor([1.0, 0.0, 0.0]), 4 / 3, 1.0)) ** 3
        tensor([0.8993, 0.1007, 0.0000])
    """
    w, max_iter = _checked(s, w, max_iter)
    check_softness("strength", strength, s, s.shape[:-1], advice="")
    check_exponent(p)
    check_choice("kind", kind, ("mask", "magnitude"))
    objective = Objective(s.double(), w.double(), column(strength, s), float(p), kind == "magnitude")
    return _solve(objective, _is_dual(solver, "dual"), max_iter).to(s.dtype)
