"""Renyi divergence of Gaussian noise on a sample of fixed size, all orders at once.

Wang, Balle and Kasiviswanathan (2019, arXiv:1808.00087): theorem 27 at whole orders, corollary 10
between them. The theorem's alternating sums, which lose all digits where noise is large, are
moments of one likelihood ratio; these are integrated here.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy.special import gammaln

from fl_app.stages import DoubleVector

_FEW = 64
_MOST = 256
"""Largest order with moments; above it the theorem's simpler term serves."""


def fixed_size_rdp(z: float, rate: float, orders: DoubleVector) -> DoubleVector:
    """Returns a bound on the divergence of one step at each of `orders`, where one is replaced.

    Args:
        z: noise std / sensitivity, the sensitivity being that of replacing.
        rate: cohort / population, in (0, 1).
        orders: > 1.
    """
    lower, upper = np.floor(orders), np.ceil(orders)
    wholes = np.unique(np.concatenate([lower, upper]))
    most = max(2, int(wholes[-1]))
    powers = np.arange(2, most + 1) * math.log(rate) + _log_terms(z, most)
    cgf = np.concatenate(
        [_cgf(part, powers) for part in (wholes[wholes <= _FEW], wholes[wholes > _FEW])]
    )
    share = orders - lower
    low, high = (cgf[np.searchsorted(wholes, ends)] for ends in (lower, upper))
    return np.asarray(((1 - share) * low + share * high) / (orders - 1))


def _cgf(wholes: DoubleVector, powers: DoubleVector) -> DoubleVector:
    """Returns (order - 1) times the bound at some whole orders from 1."""
    most = int(wholes.max(initial=2))
    terms = log_binomials(tuple(wholes.tolist()), most)[:, 2:] + powers[: most - 1]
    return np.asarray(np.logaddexp(0, log_sums(terms)))


@functools.lru_cache(maxsize=8)
def log_binomials(wholes: tuple[float, ...], most: int) -> DoubleVector:
    """Returns log binom(a, i) of whole orders a and i = 0 to `most`; -inf where i > a."""
    a, i = np.array(wholes)[:, None], np.arange(most + 1)
    table = gammaln(a + 1) - gammaln(i + 1) - gammaln(np.maximum(a - i, 0) + 1)
    return np.where(i <= a, table, -np.inf)


def _log_terms(z: float, most: int) -> DoubleVector:
    """Returns the logarithms of what the powers 2, 3, ... of the rate are multiplied with."""
    i = np.arange(2, most + 1)
    log_s = math.log(2) + i * (i - 1) / (2 * z * z)
    log_s[0] = min(log_s[0], math.log(4) + _log_expm1(1 / (z * z)))
    # Far above order 4 z^2 the moment comes from large ratios, and the simpler term is less.
    moments = _log_even_moments(z, min(most + most % 2, _MOST, 16 + 2 * math.ceil(4 * z * z)))
    exact = i[1 : 2 * len(moments) - 1]
    pairs = 0.5 * (moments[exact // 2 - 1] + moments[(exact + 1) // 2 - 1])
    log_s[1 : len(exact) + 1] = np.minimum(log_s[1 : len(exact) + 1], math.log(4) + pairs)
    return np.asarray(log_s)


def _log_even_moments(z: float, most: int) -> DoubleVector:
    """Returns log E (r - 1)^l of l = 2, 4, ..., for r = exp((2 x - 1) / (2 z^2)), x ~ N(0, z^2).

    By the trapezoid rule: the integrand is entire and falls like a Gaussian of std z around points
    from 0 to l, so that with z / h points the error is below exp(-2 pi^2 (z / h)^2) times
    E (r + 1)^l. That is at most 2^l exp(l (l - 1) / (2 z^2)), and E (r - 1)^l at least z^-l
    (Jensen's inequality, E (r - 1)^2 = exp(1 / z^2) - 1); h leaves exp(-40) of it.
    """
    digits = 40 + most * (math.log(2) + (most - 1) / (2 * z * z) + max(0.0, math.log(z)))
    step = z / max(4.0, math.sqrt(digits / 2) / math.pi)
    x = np.arange(-12 * z, most + 12 * z, step)
    log_ratio = (2 * x - 1) / (2 * z * z)
    log_change = np.where(log_ratio == 0, -np.inf, _log_expm1(np.abs(log_ratio)))
    log_change += np.minimum(log_ratio, 0)  # |r - 1| = r (1/r - 1) where r < 1
    density = -x * x / (2 * z * z) + math.log(step / (z * math.sqrt(2 * math.pi)))
    powers = np.arange(2, most + 1, 2)
    return log_sums(density + powers[:, None] * log_change)


def log_sums(terms: DoubleVector) -> DoubleVector:
    """Returns the logarithm of the sum of exp(terms) along each row; -inf for a row of these.

    SciPy's takes several times as long.
    """
    largest = terms.max(axis=1, keepdims=True, initial=-np.inf)
    largest[largest == -np.inf] = 0.0
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(terms - largest).sum(axis=1)) + largest[:, 0])


def _log_expm1(x: DoubleVector | float) -> DoubleVector:
    """Returns log(exp(x) - 1) for x > 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(x + np.log(-np.expm1(-np.asarray(x))))
