r"""Sums over the nodes of a characteristic function as polynomials of :math:`\lambda_i = p_i - q_i`, in numba.

In the notation of :mod:`.numba_nodes`, with :math:`u = \tan(t/4)` and Chebyshev's polynomials :math:`T_m`,

.. math:: \log\varphi_i &= \frac{it}{2} + 2 \log\cos\frac t4 - 2 \sum_{m \ge 1} \frac{(-iu)^m}{m}\, T_m(\lambda_i), \\
    y_i &= 2i \sin\frac t2 \Big(1 + 2 \sum_{m \ge 1} (-iu)^m\, T_m(\lambda_i)\Big),

from the generating functions of :math:`T_m`. Distant nodes, for which u is near 1, have no weight if B has some
variance, so some 20 to 40 terms are enough. Then nodes depend on the units only through
:math:`\sum_i a_i T_m(\lambda_i)`, and :math:`\delta_i` or :math:`\langle Y y_i \rangle` is the value of a polynomial at
:math:`\lambda_i`: a term of a unit takes one multiplication and addition, whereas a node of a unit takes a division and
ten of them. As :math:`y_i^2` is :math:`-2\, dy_i / d\lambda_i`, its mean is a polynomial, too.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import per_row, summed

TERMS = 48  # at most
DIGITS = 37.0  # terms below e^-37 of the largest are left out
BLOCK = 256  # units that go through all terms at a time, in the first-level cache of a processor


@per_row
def room():
    """Arrays for a row, reused for all: sums or coefficients, two rows of powers of -iu, and a block of units."""
    return np.empty((6, max(TERMS + 3, BLOCK)))


@per_row
def terms_of(variance, size, versine):
    """The number of terms needed at nodes with these 1 - cos t, for sums of this size; 0 if there are too many."""
    terms, digits = 8, DIGITS + math.log(size)
    for j in range(1, versine.shape[0]):
        depth = digits - variance * versine[j]
        if depth > 0 and versine[j] > 0:
            half_sin = math.sqrt(versine[j] / 2)
            half_cos = math.sqrt(max(1 - versine[j] / 2, 0.0))
            terms = max(terms, 1 + math.ceil(-depth / math.log(half_sin / (1 + half_cos))))
    terms = (terms + 2) // 4 * 4 + 1  # a whole number of cycles through the powers of i
    return terms if terms <= TERMS + 1 else 0


@summed
def _begin(p, q, lean, first, second):
    """From weights to weights times lambda, or from T_0 to T_1; returns the sums of both."""
    total = moment = 0.0
    for i in range(p.shape[0]):
        lean[i] = p[i] - q[i]
        second[i] = first[i] * lean[i]
        total += first[i]
        moment += second[i]
    return total, moment


@summed
def _next(lean, first, second):
    """From T_{m-1} and T_m to T_{m+1}, which replaces the former; returns its sum."""
    total = 0.0
    for i in range(lean.shape[0]):
        first[i] = 2 * lean[i] * second[i] - first[i]
        total += first[i]
    return total


@per_row
def _sums(p, q, weight, terms, series):
    """Writes the sums of T_m(lambda), times weights if there are any, into the first row of ``series``."""
    sums = series[0]
    for m in range(terms):
        sums[m] = 0.0
    for start in range(0, p.shape[0], BLOCK):
        size = min(BLOCK, p.shape[0] - start)
        lean, first, second = series[3, :size], series[4, :size], series[5, :size]
        first[:] = 1.0
        if weight.shape[0]:
            for i in range(size):
                first[i] = weight[start + i]
        total, moment = _begin(p[start : start + size], q[start : start + size], lean, first, second)
        sums[0] += total
        sums[1] += moment
        for m in range(2, terms):
            sums[m] += _next(lean, first, second)
            first, second = second, first


@per_row
def _angles(versine):
    """sin and cos of t/2, and tan(t/4)."""
    sine, cosine = math.sqrt(versine / 2), math.sqrt(max(1 - versine / 2, 0.0))
    return sine, cosine, sine / (1 + cosine)


@per_row
def law_at_nodes(p, q, versine, terms, law_real, law_imag, series):
    """Multiplies the law by phi of all units."""
    n, sums = p.shape[0], series[0]
    _sums(p, q, p[:0], terms, series)
    for j in range(versine.shape[0]):
        sine, cosine, u = _angles(versine[j])
        real, imag, power = n * math.log(0.5 * (1 + cosine)), n * math.atan2(sine, cosine), 2 * u
        for m in range(1, terms, 4):  # (-i)^m is -i, -1, i, 1
            imag += power * sums[m] / m
            power *= u
            real += power * sums[m + 1] / (m + 1)
            power *= u
            imag -= power * sums[m + 2] / (m + 2)
            power *= u
            real -= power * sums[m + 3] / (m + 3)
            power *= u
        size = math.exp(real)
        c, d = size * math.cos(imag), size * math.sin(imag)
        a, b = law_real[j], law_imag[j]
        law_real[j], law_imag[j] = a * c - b * d, a * d + b * c


@per_row
def _coefficients(versine, real, imag, terms, out):
    """Writes the coefficients of <Y y> as a polynomial of lambda, for w Y with these real and imaginary parts."""
    for m in range(terms):
        out[m] = 0.0
    for j in range(versine.shape[0]):
        sine, _, u = _angles(versine[j])
        # Re of (real + i imag) 2i sin (-iu)^m cycles through -imag, real, imag, -real, times 2 sin u^m.
        a, b, power = -2 * sine * imag[j], 2 * sine * real[j], 2 * u
        out[0] += a
        for m in range(1, terms, 4):
            out[m] += power * b
            power *= u
            out[m + 1] -= power * a
            power *= u
            out[m + 2] -= power * b
            power *= u
            out[m + 3] += power * a
            power *= u


@per_row
def _derivative(coefficients, terms, out):
    """Writes the coefficients of -2 times the derivative of a polynomial."""
    out[terms] = out[terms - 1] = 0.0
    for m in range(terms - 1, 0, -1):
        out[m - 1] = out[m + 1] - 4 * m * coefficients[m]
    out[0] *= 0.5


@summed
def _lean(p, q, lean, first, second):
    for i in range(p.shape[0]):
        lean[i], first[i], second[i] = p[i] - q[i], 0.0, 0.0


@summed
def _clenshaw(lean, first, second, coefficient):
    """From b_{m+1} and b_{m+2} to b_m, which replaces the latter."""
    for i in range(lean.shape[0]):
        second[i] = 2 * lean[i] * first[i] - second[i] + coefficient


@summed
def _finish_given(p, q, lean, first, second, constant, complement, inclusion):
    for i in range(p.shape[0]):
        delta = lean[i] * first[i] - second[i] + constant
        out, included = q[i] * (1 - p[i] * delta), p[i] * (1 + q[i] * delta)
        complement[i] = out if out < 0.5 else 1 - included  # with the digits that are left next to 1
        inclusion[i] = included if out >= 0.5 else 1 - out


@summed
def _finish(lean, first, second, constant, out):
    for i in range(lean.shape[0]):
        out[i] = lean[i] * first[i] - second[i] + constant


@per_row
def _two_of_clenshaw(p, q, start, size, coefficients, terms, series):
    """lambda and the last two of Clenshaw's numbers for a block of units."""
    lean, first, second = series[3, :size], series[4, :size], series[5, :size]
    _lean(p[start : start + size], q[start : start + size], lean, first, second)
    for m in range(terms - 1, 0, -1):
        _clenshaw(lean, first, second, coefficients[m])
        first, second = second, first
    return lean, first, second


@per_row
def given_count(p, q, versine, law_real, law_imag, terms, series, complement, inclusion):
    """Writes the probabilities of units."""
    _coefficients(versine, law_real, law_imag, terms, series[0])
    for start in range(0, p.shape[0], BLOCK):
        size = min(BLOCK, p.shape[0] - start)
        stop = start + size
        lean, first, second = _two_of_clenshaw(p, q, start, size, series[0], terms, series)
        _finish_given(
            p[start:stop], q[start:stop], lean, first, second, series[0, 0], complement[start:stop],
            inclusion[start:stop],
        )  # fmt: skip


@summed
def _assemble(p, q, t, delta, squares, mean, result):
    for i in range(p.shape[0]):
        spread, first = p[i] * q[i], delta[i]
        own = (1 + q[i] * first) * (1 - p[i] * first) - spread * (squares[i] - first * first)
        result[i] = own * t[i] + spread * (result[i] - first * mean)


@per_row
def covariance_times(p, q, t, versine, law_real, law_imag, terms, series, result):
    """Writes C v for the v with ``pq v = t``."""
    nodes = versine.shape[0]
    _sums(p, q, t, terms, series)
    sums, real, imag, mean = series[0], np.empty(nodes), np.empty(nodes), 0.0
    for j in range(nodes):
        sine, _, u = _angles(versine[j])
        a, b, power = sums[0], 0.0, 2 * u  # of the sum of t T_m (-iu)^m
        for m in range(1, terms, 4):
            b -= power * sums[m]
            power *= u
            a -= power * sums[m + 1]
            power *= u
            b += power * sums[m + 2]
            power *= u
            a += power * sums[m + 3]
            power *= u
        a, b = -2 * sine * b, 2 * sine * a
        real[j], imag[j] = a * law_real[j] - b * law_imag[j], a * law_imag[j] + b * law_real[j]
        mean += real[j]
    delta, squares = np.empty(BLOCK), np.empty(BLOCK)
    _coefficients(versine, law_real, law_imag, terms, series[0])
    _derivative(series[0], terms, series[1])
    _coefficients(versine, real, imag, terms, series[2])
    for start in range(0, p.shape[0], BLOCK):
        size = min(BLOCK, p.shape[0] - start)
        stop = start + size
        for row, out in ((0, delta[:size]), (1, squares[:size]), (2, result[start:stop])):
            lean, first, second = _two_of_clenshaw(p, q, start, size, series[row], terms, series)
            _finish(lean, first, second, series[row, 0], out)
        _assemble(p[start:stop], q[start:stop], t[start:stop], delta[:size], squares[:size], mean, result[start:stop])
