r"""A sequence of softmaxes, each of which lowers the weights that earlier ones have chosen, and its first derivative.

A row of x has weights :math:`w = e^{x / T}` up to a factor. A round adds its shares p to y and lowers the weights,

.. math:: p = w / S, \qquad S = \textstyle\sum_i w_i, \qquad y \mathrel{+}= p, \qquad w \leftarrow w q^{1/T},
    \qquad q = 1 - p.

The derivative goes backwards through the rounds. With :math:`a = dL / d \log w` of the weights after a round and
g = dL/dy,

.. math:: d = g - a / (T q), \qquad a \leftarrow a + p \circ (d - \langle p, d \rangle), \qquad dL/dx = a / T.

At most one weight exceeds half of S. Its q is the sum of the others divided by S, and in its entry of the last formula
:math:`d - \langle p, d \rangle = (q g - a / T) - \sum_{i\,\mathrm{other}} p_i d_i` with its own q and g, so no digits
are lost where a softmax saturates.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..registry import Backends

MOST_WEIGHTS = 2**22  # of all rounds of a row, which a thread keeps for the derivative


class Rounds(NamedTuple):
    """All rounds of rows of x (rows, n), in float32 or float64, with T in float64 and k in int64 (rows,).

    Attributes:
        forward: ``(x, temperature, k, most)`` with the largest k: y, and which rows (bool) it has left, because their
            weights become too small.
        backward: ``(x, temperature, k, most, grad)``: dL/dx, for the same rows.
    """

    forward: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, int, Tensor], Tensor]


def _keeps_weights(x: Tensor, most: int) -> str | None:
    if most == 0:
        return "there are no rounds"
    if most * x.shape[-1] > MOST_WEIGHTS:
        return f"a thread has no room for more than {MOST_WEIGHTS} weights of a row in all rounds"
    return None


# Calls that no backend takes are composed of torch operations in the map.
rounds = Backends(__name__, "ROUNDS")
rounds.backend("numba", module=".numba_backend", takes=_keeps_weights)
