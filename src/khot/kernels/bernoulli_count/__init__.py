r"""Independent Bernoulli units, given how many of them are ones, by passes over the units of a row.

For logits :math:`\theta` and a count k, units of log-odds :math:`z_i = (\theta_i - a) + b`, with an anchor a and an
offset b such that k ones are about what is expected, and B their number:

* ``bernoulli_count``: the tilt (a, b), P(B = k), and P(x_i = 1 | B = k) with its complement, each of the two to its
  own relative accuracy;
* ``bernoulli_count_derivative``: :math:`J^T g`, J the Jacobian of these probabilities, which is the covariance of x
  given B = k, or of their log-odds;
* ``bernoulli_count_log_prob`` and ``bernoulli_count_log_prob_derivative``: of values given B = k;
* ``bernoulli_count_draw``: exact draws given B = k.

And draws of which one unit is marked with the weight :math:`|x_i - p_i|`, for Sampford's design, with chances p that
add up to k: ``marked_count``, ``marked_count_log_prob``, ``marked_count_log_prob_derivative``, ``marked_count_draw``.

A row costs O(n w) time and O(sqrt(n) w) memory, where w counts a few standard deviations of B, and nothing is kept of
what the recursions make. If B has a variance of 16 or more, the first two take O(n) time, by the characteristic
function of B. A row of more than ``LONGEST`` units takes the product tree. Logits are float64, of which
``-inf`` and ``inf`` fix a unit; rows where nothing has k ones give NaN.
"""

import torch

from ..registry import DrawOperator, Operator, only_if
from . import reference, reference_marked

LONGEST = 2**14  # units of a row; the product tree is faster from a few times that on


_short_rows = only_if(
    lambda logits, *_: logits.shape[-1] <= LONGEST, f"the product tree is faster for rows of more than {LONGEST} units"
)


bernoulli_count = Operator(
    "bernoulli_count",
    reference.bernoulli_count,
    fake=lambda logits, k: (
        logits.new_empty(len(logits), 2),
        logits.new_empty(len(logits), 2),
        torch.empty_like(logits),
        torch.empty_like(logits),
    ),
    batch=False,
)
bernoulli_count.backend("numba", module=".numba_backend", takes=_short_rows)

bernoulli_count_derivative = Operator(
    "bernoulli_count_derivative",
    reference.bernoulli_count_derivative,
    fake=lambda logits, *_: torch.empty_like(logits),
    batch=False,
)
bernoulli_count_derivative.backend("numba", module=".numba_backend", takes=_short_rows)

bernoulli_count_log_prob = Operator(
    "bernoulli_count_log_prob",
    reference.bernoulli_count_log_prob,
    fake=lambda logits, tilt, log_count, value: logits.new_empty(value.shape[:-1]),
    batch=False,
)
bernoulli_count_log_prob.backend("numba", module=".numba_backend")

bernoulli_count_log_prob_derivative = Operator(
    "bernoulli_count_log_prob_derivative",
    reference.bernoulli_count_log_prob_derivative,
    fake=lambda value, g, complement, inclusion: torch.empty_like(inclusion),
    batch=False,
)
bernoulli_count_log_prob_derivative.backend("numba", module=".numba_backend")

bernoulli_count_draw = DrawOperator("bernoulli_count_draw", reference.bernoulli_count_draw)
bernoulli_count_draw.backend("numba", module=".numba_backend", takes=_short_rows)

marked_count = Operator(
    "marked_count",
    reference_marked.marked_count,
    fake=lambda probs, k, with_slope: (
        torch.empty_like(probs),
        probs.new_empty(len(probs)),
        torch.empty_like(probs),
    ),
    batch=False,
)
marked_count.backend("numba", module=".numba_marked", takes=_short_rows)

marked_count_log_prob = Operator(
    "marked_count_log_prob",
    reference_marked.marked_count_log_prob,
    fake=lambda balanced, log_total, value: balanced.new_empty(value.shape[:-1]),
    batch=False,
)
marked_count_log_prob.backend("numba", module=".numba_marked")

marked_count_log_prob_derivative = Operator(
    "marked_count_log_prob_derivative",
    reference_marked.marked_count_log_prob_derivative,
    fake=lambda probs, *_: torch.empty_like(probs),
    batch=False,
)
marked_count_log_prob_derivative.backend("numba", module=".numba_marked")

marked_count_draw = DrawOperator("marked_count_draw", reference_marked.marked_count_draw)
marked_count_draw.backend("numba", module=".numba_marked", takes=_short_rows)
