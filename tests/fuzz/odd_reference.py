r"""The sparse maps by absolute value and their derivatives, by bisection in float64 and independent of the library.

With a = abs(x): the signed mask is the mask of a, or where that would need a threshold below 0 the link itself. The
magnitudes have a threshold t = A - zeta * lambda * t^(p-1), A the smallest entry above it: bisection among the sorted
entries finds A, and bisection over the doubles zeta, in [0, 1].
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.fuzz import reference

FAR = 1e300


class Odd(NamedTuple):
    """A map of rows (rows, n), its derivatives contracted with a weight, and the sizes that errors are relative to.

    Attributes:
        y: Values.
        grad_x, grad_k, grad_softness: Derivatives of <weight, y>.
        value_size: (rows, n).
        size, size_k, size_softness: (rows,).
        kink: Distance from the nearest kink, in units of the link's argument.
        total: Sum of the link's values, at most k.
    """

    y: Tensor
    grad_x: Tensor
    grad_k: Tensor
    grad_softness: Tensor
    value_size: Tensor
    size: Tensor
    size_k: Tensor
    size_softness: Tensor
    kink: Tensor
    total: Tensor


def _power_slope(z: Tensor, q: float) -> Tensor:
    inside = (z > 0) & (z < 1)
    return torch.where(inside, q * torch.where(inside, z, 1.0) ** (q - 1), 0.0)


def signed(x: Tensor, k: Tensor, softness: Tensor, q: float, weight: Tensor) -> Odd:
    x, s, g = x.double(), softness.double(), weight.double()
    a, sign, link = x.abs(), x.sign(), reference.clipped_power(q)
    free_z = 0.5 * a / s.unsqueeze(-1) * 2
    free_total = link.value(free_z).sum(-1)
    free = free_total <= k
    at = reference.mask(link, a, k, s)
    z = torch.where(free.unsqueeze(-1), free_z, at.z)
    hard = at.hard & ~free
    y = torch.where(free.unsqueeze(-1), link.value(free_z), at.y)
    slope = _power_slope(z, q).masked_fill(hard.unsqueeze(-1), 0.0)
    total = slope.sum(-1)
    inward = g * sign
    mean = (inward * slope).sum(-1) / total.clamp(min=1e-300)
    mean = torch.where(free | (total == 0), 0.0, mean)
    grad_z = slope * (inward - mean.unsqueeze(-1))
    inner = z.clamp(0, 1)
    largest = g.abs().amax(-1)
    size = slope.amax(-1) * largest / s
    kink = torch.where(free, (free_z - 1).abs().amin(-1), at.kink)
    begins = ((free_total - k) / (k + 1e-300)).abs()  # to bind
    kink = torch.where(_power_slope(free_z, q).sum(-1) > 0, torch.minimum(kink, begins), kink)
    return Odd(
        sign * y,
        grad_z * sign / s.unsqueeze(-1),
        torch.where(free, 0.0, mean),
        -(grad_z * inner).sum(-1) / s,
        torch.ones_like(y),
        size,
        largest,
        (slope * inner).sum(-1) * largest / s,
        kink,
        torch.where(free, free_total, k),
    )


def _solve(a: Tensor, c: Tensor, q: float) -> Tensor:
    """u with u^q + c u = a: Newton's method from above for a convex function."""
    a, c = a / 16, c * 16.0 ** (1 / q - 1)  # away from the largest number
    u = torch.minimum(a / c.clamp(min=1e-320), a ** (1 / q))
    for _ in range(30):
        u = ((q - 1) / q * u**q + a / q) / (u ** (q - 1) + c / q).clamp(min=1e-320)
    return u * 16.0 ** (1 / q)


def _ratios(a: Tensor, at: Tensor, zeta: Tensor, s: Tensor, q: float) -> tuple[Tensor, Tensor]:
    """t, and z of all entries."""
    root = _solve(at, zeta * s, q)
    t = torch.where(zeta * s * root < 0.5 * at, at - zeta * s * root, root**q) if q != 1 else at / (1 + zeta * s)
    root = t ** (1 / q)
    z = (0.5 * a - 0.5 * at.unsqueeze(-1)) / s.unsqueeze(-1) * 2 / root.clamp(min=1e-320).unsqueeze(-1)
    return t, z + zeta.unsqueeze(-1)


def _enough(z: Tensor, k: Tensor, q: float) -> Tensor:
    capped = z >= 1
    return torch.where(capped, 0.0, z.clamp(min=0) ** q).sum(-1) + (capped.sum(-1) - k) >= 0


def magnitude(x: Tensor, k: Tensor, softness: Tensor, q: float, weight: Tensor) -> Odd:
    x, s, g = x.double(), softness.double(), weight.double()
    a = x.abs()
    nonzero = (a > 0).sum(-1)
    everything, none = k >= nonzero, k == 0
    items, n, zero = a.sort(-1, descending=True).values, a.shape[-1], torch.zeros_like(k)
    low, high = torch.full_like(k, -1, dtype=torch.int64), nonzero  # t is below item low, and not below item high
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        item = items.gather(-1, middle.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1)
        rises = _enough(_ratios(a, item, zero, s, q)[1], k, q)
        going = high - low > 1
        high, low = torch.where(going & rises, middle, high), torch.where(going & ~rises, middle, low)
    at = items.gather(-1, low.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    under = items.gather(-1, (low + 1).clamp(max=n - 1).unsqueeze(-1)).squeeze(-1).masked_fill(low + 1 >= nonzero, 0.0)
    selected = a >= at.unsqueeze(-1)

    def missing(tau: Tensor) -> Tensor:
        return ~_enough(torch.where(selected, _ratios(a, at, tau, s, q)[1], 0.0), k, q)

    zeta = reference.bisect(missing, zero, torch.full_like(k, 1.0))
    whole = (selected.sum(-1) == k) & ~everything & ~none
    room = (0.5 * at - 0.5 * under) / s * 2 / under.clamp(min=1e-320) ** (1 / q) - 1
    hard = whole & (room >= 0)
    t, z = _ratios(a, at, zeta, s, q)
    z = torch.where(selected, z, z.clamp(max=-1e-300))
    z = torch.where(hard.unsqueeze(-1), torch.where(selected, 2.0, -1.0), z)
    z = torch.where(everything.unsqueeze(-1), torch.where(a > 0, 2.0, -1.0), z)
    z = torch.where(none.unsqueeze(-1), -1.0, z)
    there = (a > 0) & ~hard.unsqueeze(-1)
    kink = torch.where(there, (z - 1).abs(), torch.inf).amin(-1)
    if q == 1:  # at 0, too: relative to the largest z, which is small where the strength is large, or to the entry
        reach = torch.maximum(z.abs() / z.amax(-1, keepdim=True).clamp(1e-300, 1), (a / t.unsqueeze(-1) - 1).abs())
        kink = torch.minimum(kink, torch.where(there, reach, torch.inf).amin(-1))
    kink = kink.masked_fill(everything | none, torch.inf)
    kink = torch.where(whole, torch.where(hard, room, torch.minimum(kink, -room)), kink)
    kink = kink.masked_fill((t < 1e-290) & ~everything & ~none, 0.0)  # t, or its scale, is no number here
    total = torch.where(everything, nonzero.double(), k)
    return _magnitude_at(x, t, z, at, zeta, s, q, g, kink, total)


def _magnitude_at(
    x: Tensor,
    t: Tensor,
    z: Tensor,
    at: Tensor,
    zeta: Tensor,
    strength: Tensor,
    q: float,
    weight: Tensor,
    kink: Tensor,
    total: Tensor,
) -> Odd:
    """The rest, in 80 bits, whose exponents hold whatever comes up on the way."""
    capped = (z >= 1) & (x != 0)
    column = strength.unsqueeze(-1)
    root = _solve(torch.where(capped, x.abs(), 1.0), column.expand_as(x), q)
    with np.errstate(all="ignore"):
        numbers = (x.abs(), x.sign(), root, column, t.unsqueeze(-1), at.unsqueeze(-1), zeta.unsqueeze(-1), weight)
        a, sign, root, s, t, at, zeta, g = (v.numpy().astype(np.longdouble) for v in numbers)
        kept, inside = capped.numpy(), ((z > 0) & (z < 1)).numpy()
        below = np.where(t > 0, t, 1.0) ** np.longdouble(1 / q)
        below *= (
            1 + (np.where(t > 0, t, 1.0) / below ** np.longdouble(q) - 1) / q
        )  # to make up for the rounding of 1 / q
        u = np.where(inside, (a - at) / s / below + zeta, z.clamp(0, 1).numpy())
        slope = np.where(inside, q * np.where(inside, u, 1.0) ** np.longdouble(q - 1), 0.0)
        power = root ** np.longdouble(q)  # of a root that is below all doubles, s times it is no number
        shrunk = a / (1 + s) if q == 1 else np.where(power > a / 2, a - s * root, power)
        y = np.where(kept, shrunk, t * u ** np.longdouble(q))
        lever = np.where(kept, shrunk if q == 1 else root, 0.0)
        steepness = root ** np.longdouble(q - 1)
        part = np.where(kept, steepness / (steepness + s / q), 0.0)
        ratio = np.where(t > 0, s * np.where(t > 0, t, 1.0) ** np.longdouble(1 / q - 1), 1.0)  # sigma / t
        weights = slope.sum(-1, keepdims=True) + ratio * np.where(inside, u ** np.longdouble(q), 0.0).sum(
            -1, keepdims=True
        )
        inward = g * sign
        pull = (inward * slope).sum(-1, keepdims=True) / np.where(weights > 0, weights, 1.0)
        pooled = slope * (inward - pull)
        largest = np.abs(g).max(-1, keepdims=True)
        numbers = (
            sign * y,
            (pooled / ratio + inward * part) * sign,
            (t * pull)[:, 0],
            -(pooled * u).sum(-1) * t[:, 0] / s[:, 0] - (inward * part * lever).sum(-1),
            np.where(kept, y, np.where(z.numpy() > 0, t, 0.0)),
            (((slope / ratio).max(-1, keepdims=True) + part.max(-1, keepdims=True)) * largest)[:, 0],
            (largest * t)[:, 0],
            (((slope * u).sum(-1) * t[:, 0] / s[:, 0] + (part * lever).sum(-1)) * largest[:, 0]),
        )
        return Odd(*(torch.from_numpy(v.astype(np.float64)) for v in numbers), kink, total)
