r"""Plackett-Luce: units are chosen one after another, each in proportion to its weight among the remaining units.

With log-weights :math:`\theta` and the choices :math:`v_1, \dots, v_k` in their order,

.. math:: \log P(v) = \sum_{j=1}^{k} \theta_{v_j} - \log D_j, \qquad D_j = \sum_{i \notin \{v_1, \dots, v_{j-1}\}}
    e^{\theta_i}.

While the chosen units have at most half of the total weight, :math:`D_j` is computed by subtracting their weights from
it. Otherwise subtraction would lose digits, all of them if a few units outweigh the others. Then the last term is the
log-softmax of :math:`v_k` among the units that no earlier choice took, and the other sums follow by adding one unit at
a time, :math:`D_j = D_{j+1} + e^{\theta_{v_j}}`. Both take O(n + k), in steps that are differentiable to any order.

Functions take log-weights ``(*batch, n)``, where ``-inf`` excludes a unit, indices ``(*sample, *batch, k)`` within the
range, and a size for each row, an int or a tensor ``(*batch)``. Entries beyond the size of a row are ignored.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from khot._contents import can_look
from khot.kernels.random_numbers import uniform

LOWEST = torch.finfo(torch.float64).min / 4  # replaces -inf, whose differences are undefined
MOST_TAKEN = 0.5  # share of the total weight up to which subtraction is used, with an error of a unit or two
LARGEST_SPREAD = 600.0  # e^-600 has full precision in float64


def log_prob(theta: Tensor, size: int | Tensor, value: Tensor) -> Tensor:
    """Log-probabilities ``(*sample, *batch)`` in float64 of choices without repetition, ``-inf`` for excluded units."""
    if value.shape[-1] == 0:
        return theta[..., :0].sum(-1).double().expand(value.shape[:-1])
    theta = theta.expand(*value.shape[:-1], theta.shape[-1])
    found = None
    if theta.device.type == "cpu" and can_look(theta, value):
        found = _while_few_are_taken(theta, size, value)
    return _one_by_one(theta, size, value) if found is None else found


def _while_few_are_taken(theta: Tensor, size: int | Tensor, value: Tensor) -> Tensor | None:
    """:func:`log_prob` if in all rows the choices have at most half of the weight and none is excluded, or None."""
    is_choice = _is_choice(size, value)
    if is_choice is not None:
        value = value.where(is_choice, 0)
    log_share = theta.log_softmax(-1).gather(-1, value).double()
    if log_share.numel() == 0 or not log_share.detach().min().item() > -torch.inf:
        return None
    if is_choice is not None:
        log_share = log_share.where(is_choice, -torch.inf)
    share = log_share.exp()
    taken = share.cumsum(-1)
    if not taken.detach()[..., -1].max().item() <= MOST_TAKEN:
        return None
    terms = log_share - torch.log1p(share - taken)
    if is_choice is not None:
        terms = terms.where(is_choice, 0.0)
    return terms.sum(-1)


def _is_choice(size: int | Tensor, value: Tensor) -> Tensor | None:
    """The places that are within the size of their row, if sizes differ."""
    if not isinstance(size, Tensor):
        return None
    return torch.arange(value.shape[-1], device=value.device) < size.unsqueeze(-1)


def _one_by_one(theta: Tensor, size: int | Tensor, value: Tensor) -> Tensor:
    """:func:`log_prob`, computed from the last choice to the first."""
    if not isinstance(size, Tensor):
        chosen, is_excluded = _log_weights_of(theta, value)
        earlier, of_last = chosen[..., :-1], chosen[..., -1:]
        left = theta.scatter(-1, value, torch.cat([torch.full_like(earlier, -torch.inf), of_last], -1))
        log_last, among_rest = _last_choice(left, value[..., -1:], of_last)
        terms = earlier - _log_sums(among_rest, earlier)
        return (terms.sum(-1) + log_last).masked_fill(is_excluded.any(-1), -torch.inf)
    size, place = size.unsqueeze(-1), torch.arange(value.shape[-1], device=value.device)
    at_last = (size - 1).clamp(min=0).expand(*value.shape[:-1], 1)
    last = value.take_along_dim(at_last, -1).clamp(min=0)  # meaningless if the size is 0
    value = torch.where(place < size, value, last)
    chosen, is_excluded = _log_weights_of(theta, value)
    of_last = chosen.take_along_dim(at_last, -1)
    left = theta.scatter(-1, value[..., :-1], -torch.inf).scatter(-1, last, of_last)  # again: padding may repeat it
    log_last, among_rest = _last_choice(left, last, of_last)
    is_earlier = (place < size - 1)[..., :-1]
    earlier = torch.where(is_earlier, chosen[..., :-1].double(), LOWEST)
    terms = (earlier - _log_sums(among_rest, earlier)).masked_fill(~is_earlier, 0.0)
    found = (terms.sum(-1) + log_last).masked_fill(size.squeeze(-1) == 0, 0.0)
    return found.masked_fill((is_excluded & (place < size)).any(-1), -torch.inf)


def _log_weights_of(theta: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The log-weights of the choices, with those of excluded units replaced by 0, and which units these are."""
    chosen = theta.gather(-1, value)
    is_excluded = chosen == -torch.inf
    return chosen.masked_fill(is_excluded, 0.0), is_excluded


def _last_choice(left: Tensor, last: Tensor, of_last: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability ``(...)`` of the last choice among what is left, and the logarithm of its D ``(..., 1)``."""
    log_last = left.log_softmax(-1).gather(-1, last).double()
    return log_last.squeeze(-1), of_last.double() - log_last


def _log_sums(log_last: Tensor, earlier: Tensor) -> Tensor:
    """Log D of the earlier choices, from that of the last one ``(..., 1)``."""
    return _log_cumulative_sums(torch.cat([log_last, earlier.double().flip(-1)], -1))[..., 1:].flip(-1)


def _log_cumulative_sums(x: Tensor) -> Tensor:
    """``log(cumsum(exp(x)))`` along the last axis, differentiable to any order; by plain sums if possible."""
    with torch.no_grad():
        highest = x.amax(-1, keepdim=True)
        spread = highest - x[..., :1]
    if can_look(spread) and x.device.type == "cpu" and spread.numel() and spread.max().item() < LARGEST_SPREAD:
        return (x - highest).exp().cumsum(-1).log() + highest
    step = 1
    while step < x.shape[-1]:  # each pass doubles the number of terms in a sum
        x = torch.cat([x[..., :step], _log_add_exp(x[..., step:], x[..., :-step])], -1)
        step *= 2
    return x


def _log_add_exp(x: Tensor, y: Tensor) -> Tensor:
    """Like torch's, whose second derivative overflows if the two are far apart and which has a kink at equality."""
    is_larger = x >= y
    distance = torch.where(is_larger, x - y, y - x)
    return torch.where(is_larger, x, y) - F.logsigmoid(distance)


def sample(
    theta: Tensor, size: int | Tensor, largest: int, shape: tuple[int, ...], generator: torch.Generator | None
) -> Tensor:
    """Choices ``(*shape, largest)``: the units of the largest scores with Gumbel noise, in decreasing order.

    The noise is in float64, because the largest values come from uniform numbers next to 1.
    """
    u = uniform((*shape, theta.shape[-1]), torch.float64, theta.device, generator)
    exponential = -u.clamp(min=torch.finfo(u.dtype).tiny).log()
    scores = theta.double() - exponential.log()
    return padded(scores.topk(largest, sorted=True).indices, size)


def padded(value: Tensor, size: int | Tensor) -> Tensor:
    """Choices with -1 beyond the size of their row."""
    if not isinstance(size, Tensor):
        return value
    return value.masked_fill(torch.arange(value.shape[-1], device=value.device) >= size.unsqueeze(-1), -1)


def rankings(n: int, k: int, start: int, stop: int, device: torch.device) -> Tensor:
    """The choices of k of n with ranks ``start`` to ``stop - 1`` in lexicographic order, ``(stop - start, k)``.

    Digit j of the rank, in a number system with the bases n, n - 1, ..., counts the remaining units below v_j.
    """
    rank = torch.arange(start, stop, device=device)
    digits = []
    for j in reversed(range(k)):
        digits.append(rank % (n - j))
        rank = rank // (n - j)
    value: list[Tensor] = []
    for digit in digits:  # the last choice first: an earlier one shifts those after it
        value = [digit, *(later + (later >= digit) for later in value)]
    return torch.stack(value, -1) if value else torch.zeros(stop - start, 0, dtype=torch.long, device=device)
