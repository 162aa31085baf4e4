r"""Newton's method for the logits of given inclusion probabilities, and systems in the covariance of the k-hot vector.

The method works on the log-odds of the inclusion probabilities, which are nearly linear in the logits. A step solves

.. math:: D^{-1} C v = \operatorname{logit} \pi - \operatorname{logit} \pi(\theta), \quad D = \operatorname{diag} C,

with C the covariance of the k-hot vector at the current logits. Its off-diagonal entries are negative and its rows sum
to 0: C is the Laplacian of a graph. The eigenvalues of :math:`D^{-1} C` lie in [0, 2]; only constants have eigenvalue
0, and in long rows the others cluster at 1. So conjugate gradients take few products ``C v``. Each is a backward pass
through the inclusion probabilities, without an n x n matrix.

Most of this is rarely needed: there is an explicit map M that nearly inverts the log-odds of inclusion, with
an error of the order of the inverse square of :math:`\operatorname{tr} D`. The iteration

.. math:: \theta_m = M(a_m), \quad a_{m+1} = a_m + \operatorname{logit} \pi - \operatorname{logit} \pi(\theta_m)

reduces the error by the same factor in every step. For other families M is the identity. The derivative of M is a
preconditioner of C.

The same holds for other families of designs whose Jacobian C of the inclusion probabilities is such a Laplacian, with
another scale in place of the log-odds, and D its slope. If the size may vary in a range, no constants have eigenvalue
0, and all of this holds without the projections that remove constants.

Most rows with a range need only the iteration, with an M that knows the mean and the variance of the size. The others
use Newton's method.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .conditional_poisson import inclusion_log_odds, size_probabilities, slopes
from .size_range import SizeRange
from .tilted_tree import Size

ACCEPTED = 1e-11  # error of the scores, relative to the largest logit, at which rounding ends the progress
MOST_SHIFT = 60.0  # largest shift of the logits with which a guess compensates for the excluded sizes
SHIFT_STEPS = 22  # bisections, to about 3e-5
FAST = 0.3  # error factor per step; a slower iteration gives way to Newton's method, a step of which costs ten of its
NEARLY = 10.0  # times the goal: an error that rounding may leave in an iteration
MARGIN = 100.0  # factor by which a predicted error must be small enough
MAX_STEPS = 100
MAX_HALVINGS = 30
MAX_CG_STEPS = 2000
NO_SUM = 1e3  # times the accuracy and the size of the terms: a sum below this is rounding
SMALL = 1e-3  # part of the weight of a row: a unit below it hardly affects the others
NEGLIGIBLE = 1e-20  # part of it below which a unit does not affect the others at all
CG_FORCING = 1e-4  # accuracy of a Newton step, and thus the factor by which the error falls near the solution


def centred(x: Tensor, interior: Tensor, weight: Tensor | None = None) -> Tensor:
    """Subtracts a constant from the interior so that the (weighted) sum is 0; zero elsewhere."""
    weight = interior.double() if weight is None else weight
    x = x.masked_fill(~interior, 0.0)
    mean = (weight * x).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return (x - mean).masked_fill(~interior, 0.0)


def interior_of(x: Tensor, interior: Tensor, weight: Tensor | None = None) -> Tensor:
    """Zero outside the interior; constants stay, because they are not in the null space of C if the size varies."""
    return x.masked_fill(~interior, 0.0)


def without_mean(b: Tensor, interior: Tensor, rounding: float, centre: Callable[..., Tensor] = centred) -> Tensor:
    """b, and 0 outside the interior, without its mean, unless its sum is only rounding, relative to its entries.

    The sum is rounding for the gradient of a function that no constant changes. For a unit of small probability, by
    which the solution of a system divides, such a mean may exceed its own entry.
    """
    b = b.masked_fill(~interior, 0.0)
    has_sum = b.sum(-1, keepdim=True).abs() > rounding * b.abs().sum(-1, keepdim=True)
    return torch.where(has_sum, centre(b, interior), b)


class Family(NamedTuple):
    """Designs with one parameter per unit, and what the solution needs to know about them."""

    scores: Callable[[Tensor, Any], Tensor]  # inclusion probabilities at (logits, k), on a scale that is nearly linear
    from_log_odds: Callable[[Tensor], Tensor]  # to that scale
    slope: Callable[[Tensor], Tensor]  # derivative of a probability with respect to its score
    guess: Callable[[Tensor], Tensor] = lambda scores: scores  # approximate logits for these scores
    goal: float = 1e-14  # error of the scores, relative to the largest logit
    further: float = 1.0  # the iteration continues to this times the goal, if rounding lets it
    centre: Callable[..., Tensor] = centred  # removes the null space of C


def _logistic_slope(log_odds: Tensor) -> Tensor:
    return torch.sigmoid(log_odds) * torch.sigmoid(-log_odds)


def _without_correlation(log_odds: Tensor) -> Tensor:
    r"""Approximate logits for given log-odds of inclusion.

    Given its own value, the count of the others is nearly normal, which adds :math:`(2 p_i - 1) / 2 d_i` to the
    log-odds of a unit, with d_i the variance of the others' count. Adding a quarter to d_i keeps this bounded.
    """
    p, q = torch.sigmoid(log_odds), torch.sigmoid(-log_odds)
    variance = p * q
    others = variance.sum(-1, keepdim=True) - variance + 0.25
    return torch.where(log_odds.isfinite(), log_odds + (q - p) / (2 * others), log_odds)


CONDITIONAL_POISSON = Family(
    inclusion_log_odds, lambda log_odds: log_odds, _logistic_slope, _without_correlation, further=0.01
)
RANGE = CONDITIONAL_POISSON._replace(guess=lambda scores: scores, further=1.0, centre=interior_of)


def solve_scores(target: Tensor, k: Size, family: Family) -> Tensor:
    """Logits ``(*batch, n)`` whose inclusion probabilities have the log-odds ``target``; infinite where these are.

    Raises:
        RuntimeError: If the iteration does not converge.
    """
    interior = target.isfinite()
    target = torch.where(interior, family.from_log_odds(target.masked_fill(~interior, 0.0)), target)
    logits, lost = _iterate(target, k, family)
    if lost.any():
        size, start = k, logits[lost]
        if isinstance(k, SizeRange):
            size, start = SizeRange(*(cast(Tensor, end)[lost] for end in k)), target[lost]
        elif isinstance(k, Tensor):
            size = k[lost]
        logits = logits.clone()
        logits[lost] = _newton(start, target[lost], size, family)
    return torch.where(interior, family.centre(logits, interior), target)


def _iterate(target: Tensor, k: Size, family: Family) -> tuple[Tensor, Tensor]:
    """Logits from the iteration with M, each row for as long as it gains enough, and the rows that are not solved."""
    guess = guess_in_range(target, k) if isinstance(k, SizeRange) else family.guess
    aim, goal = target, family.further * family.goal
    r, error = _residual(target, k, family, guess(aim))
    going = error > goal
    for _ in range(MAX_STEPS):
        if not going.any():
            break
        new_aim = aim + r
        new_r, new_error = _residual(target, k, family, guess(new_aim))
        better = going & (new_error < error)
        left = new_error * (new_error / error) * MARGIN  # after the next step, which gains as much again
        done = left <= goal
        going = better & ~done & (new_error <= FAST * error) & (new_error > goal)
        new_aim, new_error = torch.where(done[..., None], new_aim + new_r, new_aim), torch.where(done, left, new_error)
        aim, r = (torch.where(better[..., None], new, old) for new, old in ((new_aim, aim), (new_r, r)))
        error = torch.where(better, new_error, error)
    return guess(aim), ~(error <= NEARLY * family.goal)


def _newton(logits: Tensor, target: Tensor, k: Size, family: Family) -> Tensor:
    """Logits from Newton's method, with halved steps where the error does not fall."""
    interior, residual = target.isfinite(), partial(_residual, target, k, family)
    r, error = residual(logits)
    for _ in range(MAX_STEPS):
        if (error <= family.goal).all():
            break
        scores = target - r
        weight = family.slope(scores)
        b = weight * family.centre(r, interior, weight)
        step = solve_system(logits, b, k, family, CG_FORCING, NO_SUM * family.goal)
        for _ in range(MAX_HALVINGS):
            new_r, new_error = residual(logits + step)
            worse = ~(new_error < error)
            if not (worse & (error > ACCEPTED)).any():
                break
            step = torch.where(worse[..., None], step / 2, step)
        if worse.all():
            break
        logits = torch.where(worse[..., None], logits, logits + step)
        r, error = torch.where(worse[..., None], r, new_r), torch.where(worse, error, new_error)
    if not (error <= max(ACCEPTED, family.goal)).all():
        raise RuntimeError(f"no logits found for these probabilities: they are off by {error.max():.1e} (relative)")
    return logits


def _residual(target: Tensor, k: Size, family: Family, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The distance of the scores from the target, and its largest entry in each row, relative to the largest logit."""
    interior = target.isfinite()
    r = (target - family.scores(logits, k)).masked_fill(~interior, 0.0)
    return r, r.abs().amax(-1) / (1 + logits.masked_fill(~interior, 0.0).abs().amax(-1))


def guess_in_range(log_odds: Tensor, sizes: SizeRange) -> Callable[[Tensor], Tensor]:
    r"""A map from log-odds of inclusion to approximate logits, for log-odds near ``log_odds``.

    At ``log_odds`` themselves, the result is a common shift of these, for which the size has the mean that they give to
    independent units. The shift changes the probabilities of the sizes by :math:`e^{cs}`. The c with the right mean is
    found by bisection to a few digits, which is enough for a start. From there on C is approximated by
    :math:`D + (V / S - 1) D 1 1^T D / S`, with V the variance of the size and S the trace of D, that of independent
    units. The inverse adds :math:`(1 / V - 1 / S) \langle D, r \rangle` to a change r of the log-odds. The correction
    for the correlation at a fixed size, for which V = 0, is applied in proportion.
    """
    p, interior = torch.sigmoid(log_odds), log_odds.isfinite()
    weight, mean = p * torch.sigmoid(-log_odds), p.sum(-1)
    law = size_probabilities(log_odds, sizes)
    size = torch.arange(law.shape[-1], dtype=law.dtype, device=law.device)
    low, high = torch.full_like(mean, -MOST_SHIFT), torch.full_like(mean, MOST_SHIFT)
    for _ in range(SHIFT_STEPS):
        middle = (low + high) / 2
        shifted = (law.log() + middle[..., None] * size).softmax(-1)
        less = (shifted * size).sum(-1) < mean
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    tiny = torch.finfo(law.dtype).tiny  # for rows in which all units are certain
    variance = (shifted * (size - mean[..., None]).square()).sum(-1, keepdim=True).clamp(min=tiny)
    trace = weight.sum(-1, keepdim=True).clamp(min=tiny)

    def guess(scores: Tensor) -> Tensor:
        change = torch.where(interior, scores - log_odds, 0.0)
        of_sizes = (1 / variance - 1 / trace) * (weight * change).sum(-1, keepdim=True)
        correlation = centred(_without_correlation(scores) - scores, interior, weight) * (1 - variance / trace)
        return log_odds + low[..., None] + change + of_sizes + correlation

    return guess


def solve_system(logits: Tensor, b: Tensor, k: Size, family: Family, tolerance: float, rounding: float) -> Tensor:
    """v with C v = b over the finite logits, by conjugate gradients, preconditioned by D; v has mean 0 weighted by D.

    b sums to 0 over a row of a single size, up to the rounding of terms that may be much larger. No v can remove such a
    remainder, so it is removed from b and from the preconditioned residual z.

    If units of small weight have large entries of b, a norm would only measure their v, so these units pass their
    entries on to the others beforehand. Units of negligible weight, which no others depend on, get their v afterwards.
    """
    scores, pulled_back = slopes(family.scores, logits, k)
    weight = family.slope(scores)  # D, to the relative accuracy of every entry; the derivative of the scores is D^-1 C
    interior, total = weight > 0, weight.sum(-1, keepdim=True)
    common, inverse = weight > NEGLIGIBLE * total, torch.where(interior, 1 / weight, 0.0)

    def product(v: Tensor) -> Tensor:
        return pulled_back(weight * v)

    def preconditioned(r: Tensor) -> Tensor:
        return family.centre(inverse * r, common, weight)

    b = without_mean(b, logits.isfinite(), rounding, family.centre)
    small, alone = weight <= SMALL * total, family.centre(inverse * b, interior, weight)
    b = weight * alone
    of_small, of_others = ((alone * b).masked_fill(x, 0.0).sum(-1, keepdim=True) for x in (~small, small))
    passed_on = of_small > of_others
    v, r = torch.where(small & passed_on, alone, 0.0), b
    if passed_on.any():
        r = weight * family.centre(inverse * (b - product(v)), interior, weight)
    z = preconditioned(r)
    d, rz = z, (r * z).sum(-1, keepdim=True)
    # What is passed on may be only rounding, so no goal may be relative to it.
    goal = tolerance**2 * torch.where(passed_on, torch.maximum(rz, of_others), rz)
    wanted = b.isfinite().all(-1, keepdim=True)
    for _ in range(MAX_CG_STEPS):
        active = wanted & ~(rz <= goal)
        if not active.any():
            return family.centre(v + torch.where(common, z, inverse * r), interior, weight)
        c = product(d)
        step = torch.where(active, rz / (d * c).sum(-1, keepdim=True), 0.0)
        v, r = v + step * d, r - step * c
        z = preconditioned(r)
        previous, rz = rz, torch.where(active, (r * z).sum(-1, keepdim=True), rz)
        d = z + torch.where(active, rz / previous, 0.0) * d
    raise RuntimeError("conjugate gradients on the Jacobian of the inclusion probabilities did not converge")
