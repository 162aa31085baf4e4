r"""Conditional Poisson samples with unit i and without it, coupled so that they differ in only one other unit.

Let w be the weights. A sample of k units with i has k - 1 others, and one without i has k. Both are drawn unit by unit
from the others. With r units still to choose, unit u is taken with probability :math:`q_u(r) = w_u e_{r-1} / e_r`,
where :math:`e_{r-1}` is an elementary symmetric polynomial of the weights after u, and :math:`e_r` one of these weights
and that of u. This grows with r (Newton's inequalities). So with the same uniform number for both, the sample with more
units to choose takes u whenever the other one does. The first unit that it takes alone makes the numbers left to choose
equal, and the samples agree from then on. That unit is the partner of i: the two samples are one swap of the pair
apart.

Given one of the two samples, its partner for i is thus found by a walk over the units with the hazards

.. math:: h_u = 1 - \frac{1 - q_u(r)}{1 - q_u(r - 1)} \text{ at units that are out, if i is in}, \qquad
    h_u = 1 - \frac{q_u(r - 1)}{q_u(r)} \text{ at units that are in, if i is out}

where r is the number of units that the sample without i still has to choose, u included.
"""

import torch
from torch import Tensor

from khot._tracing import one_operation


@one_operation
def partner_law(logits: Tensor, value: Tensor, largest_k: int) -> Tensor:
    """The law of the partner j of each unit i, given a sample: P(j | i, x), 0 unless x_i and x_j differ.

    Takes O(n² k) time for each row, and O(n²) for each sample.

    Args:
        logits: Float64 natural parameters ``(*batch, n)``; units of infinite ones neither have nor are partners.
        value: k-hot vectors ``(*sample, *batch, n)``.
        largest_k: The largest number of ones in a row.

    Returns:
        Tensor ``(*sample, *batch, n, n)``, float64, i before j; rows sum to 1, or to 0 if there is no partner.
    """
    n = logits.shape[-1]
    free = logits.isfinite()
    value = value.double() * free
    left = value.flip(-1).cumsum(-1).flip(-1).long()  # ones at u and after it
    itself = torch.eye(n, dtype=torch.bool, device=logits.device)
    log_weight = logits.masked_fill(~free, -torch.inf).unsqueeze(-2).masked_fill(itself, -torch.inf)  # (*batch, i, u)
    before = itself.long().cumsum(-1) - itself.long()  # [i, u]: i < u
    # Logarithms of e_r of the weights at u and after it, without that of i, for r = -1, 0, ..., largest_k.
    log_esp = log_weight.new_full((*log_weight.shape[:-1], largest_k + 2), -torch.inf)
    log_esp[..., 1] = 0.0
    survival = []
    for u in range(n - 1, -1, -1):
        after, log_esp = log_esp, torch.logaddexp(log_esp, _shifted(log_esp) + log_weight[..., u, None])
        r = left[..., u, None] + value.long() * before[:, u]  # the number that the sample without i has to choose
        survival.append(_survival(log_esp, after, r, value, value[..., u, None]))
    alone = torch.stack(survival[::-1], -1)  # (*sample, *batch, i, u)
    reached = torch.cat((torch.ones_like(alone[..., :1]), alone[..., :-1].cumprod(-1)), -1)
    return (reached * (1 - alone)) * free.unsqueeze(-1)


def _survival(log_esp: Tensor, after: Tensor, r: Tensor, value: Tensor, at_u: Tensor) -> Tensor:
    """1 - h_u for each i, ``(*sample, *batch, n)``; 1 where the walk does not go or there is nothing to decide."""

    def log(table: Tensor, size: Tensor) -> Tensor:
        return table.expand(*size.shape, -1).gather(-1, (size + 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)

    if_in = log(after, r) - log(log_esp, r) + log(log_esp, r - 1) - log(after, r - 1)
    if_out = log(after, r - 2) - log(after, r - 1) + log(log_esp, r) - log(log_esp, r - 1)
    ratio = torch.where(value == 1, if_in, if_out).nan_to_num(nan=0.0, posinf=0.0)
    return torch.where(value == at_u, 1.0, ratio.clamp(max=0.0).exp())


def _shifted(log_esp: Tensor) -> Tensor:
    return torch.nn.functional.pad(log_esp[..., :-1], (1, 0), value=-torch.inf)
