r"""Independent units given that ``size`` of them have come: their inclusion probabilities, and their covariance times g.

By recursions over the units, forwards over those up to one and backwards over those after it,

.. math:: P(N_{j+1} = m) = q_j P(N_j = m) + p_j P(N_j = m - 1),

all of whose terms are positive: every probability is accurate relative to itself, as long as N = ``size`` is no
event of probability 1e-300. With sums of g over those that have come in the place of 1 they give E[x_i G].
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from ..numba_tools import per_row, summed


@per_row
def _step(p, q, before, after, size):
    """after[m] = q before[m] + p before[m - 1]."""
    after[0] = q * before[0]
    for m in range(1, size + 1):
        after[m] = q * before[m] + p * before[m - 1]


@per_row
def _step_sums(p, q, g, before, sums, after, size):
    """The same for sums of g over those that have come."""
    after[0] = q * sums[0]
    for m in range(1, size + 1):
        after[m] = q * sums[m] + p * (sums[m - 1] + g * before[m - 1])


@summed
def _dot(a, b, count):
    total = 0.0
    for m in range(count):
        total += a[m] * b[m]
    return total


@per_row
def masses(p, q, units, size, upto, after, came, missing):
    """P(i has come | N = size) and its complement for all units; returns P(N = size).

    ``upto`` has room for ``(units + 1, size + 1)`` numbers, ``after`` for two times ``size + 1``, in reversed order:
    after[m] = P(as many more come as size - m are missing).
    """
    upto[0, : size + 1] = 0.0
    upto[0, 0] = 1.0
    for j in range(units):
        _step(p[j], q[j], upto[j], upto[j + 1], size)
    total = upto[units, size]
    now, later = after[0], after[1]
    later[: size + 1] = 0.0
    later[size] = 1.0
    for j in range(units - 1, -1, -1):
        came[j] = p[j] * _dot(upto[j], later[1:], size) / total
        missing[j] = q[j] * _dot(upto[j], later, size + 1) / total
        _step_back(p[j], q[j], later, now, size)
        now, later = later, now
    return total


@per_row
def _step_back(p, q, later, now, size):
    now[size] = q * later[size]
    for m in range(size):
        now[m] = q * later[m] + p * later[m + 1]


@per_row
def _step_sums_back(p, q, g, later, sums, now, size):
    now[size] = q * sums[size]
    for m in range(size):
        now[m] = q * sums[m] + p * (sums[m + 1] + g * later[m + 1])


@per_row
def covariance_product(p, q, g, units, size, upto, sums, after, came, missing, product):
    """Cov(x_i, sum_j g_j x_j) given N = size, from what :func:`masses` left in ``upto``, ``came`` and ``missing``.

    ``sums`` has room like ``upto``, ``after`` for four times ``size + 1`` numbers.
    """
    sums[0, : size + 1] = 0.0
    for j in range(units):
        _step_sums(p[j], q[j], g[j], upto[j], sums[j], sums[j + 1], size)
    total = upto[units, size]
    mean = sums[units, size] / total
    now, later, sums_now, sums_later = after[0], after[1], after[2], after[3]
    later[: size + 1], sums_later[: size + 1] = 0.0, 0.0
    later[size] = 1.0
    for j in range(units - 1, -1, -1):
        # Of the two complements the less probable, so that no more digits are lost than it has.
        if came[j] < missing[j]:
            both = _dot(sums[j], later[1:], size) + _dot(upto[j], sums_later[1:], size)
            both += g[j] * _dot(upto[j], later[1:], size)
            product[j] = p[j] * both / total - came[j] * mean
        else:
            both = _dot(sums[j], later, size + 1) + _dot(upto[j], sums_later, size + 1)
            product[j] = missing[j] * mean - q[j] * both / total
        _step_sums_back(p[j], q[j], g[j], later, sums_later, sums_now, size)
        _step_back(p[j], q[j], later, now, size)
        now, later = later, now
        sums_now, sums_later = sums_later, sums_now
