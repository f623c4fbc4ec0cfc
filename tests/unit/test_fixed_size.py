"""Renyi divergences of fixed-size samples: equal to dp-accounting's, exact where that loses digits.

The exact values are theorem 27 of Wang, Balle and Kasiviswanathan (2019, arXiv:1808.00087) with its
alternating sums in hundreds of digits.
"""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as library

from fl_app.accounting.fixed_size import fixed_size_rdp

ORDERS = np.asarray(library.DEFAULT_RDP_ORDERS)


@pytest.mark.parametrize("z", [0.05, 0.3, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.1, 0.5, 0.99])
def test_it_is_the_bound_of_the_library_where_that_has_its_digits(z: float, rate: float) -> None:
    expected = library._compute_rdp_sample_wor_gaussian(rate, z, ORDERS)
    np.testing.assert_allclose(fixed_size_rdp(z, rate, ORDERS), expected, rtol=1e-9)


@pytest.mark.parametrize("z", [0.7, 6.0, 20.0, 300.0])
@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_it_is_the_theorem_in_exact_arithmetic(z: float, rate: float) -> None:
    orders = np.array([2.0, 3.0, 7.0, 24.0, 63.0])
    exact = [_theorem_27(z, rate, int(order)) for order in orders]
    np.testing.assert_allclose(fixed_size_rdp(z, rate, orders), exact, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("z", [20.0, 300.0])
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_it_is_never_above_the_library(z: float, rate: float) -> None:
    """Whose alternating sums are too large there by up to a factor of a thousand."""
    theirs = library._compute_rdp_sample_wor_gaussian(rate, z, ORDERS)
    ours = fixed_size_rdp(z, rate, ORDERS)
    assert np.all(ours <= theirs * (1 + 1e-7))
    assert np.any(ours < 0.3 * theirs)


def test_orders_between_two_whole_ones_are_interpolated_as_corollary_10_says() -> None:
    low, between, high = fixed_size_rdp(1.3, 0.2, np.array([3.0, 3.25, 4.0]))
    assert between == pytest.approx((0.75 * 2 * low + 0.25 * 3 * high) / 2.25, rel=1e-12)


def _theorem_27(z: float, rate: float, order: int) -> float:
    with mpmath.workdps(400):
        variance, q = mpmath.mpf(z) ** 2, mpmath.mpf(rate)

        def moment(power: int) -> mpmath.mpf:
            """Returns E (r - 1)^power."""
            return mpmath.fsum(
                (-1) ** (power - k) * mpmath.binomial(power, k) * _moment_of_ratio(k)
                for k in range(power + 1)
            )

        def _moment_of_ratio(k: int) -> mpmath.mpf:
            return mpmath.exp(mpmath.mpf(k) * (k - 1) / (2 * variance))

        second = mpmath.exp(1 / variance)
        total = 1 + q**2 * mpmath.binomial(order, 2) * min(4 * (second - 1), 2 * second)
        for j in range(3, order + 1):
            exact = 4 * mpmath.sqrt(moment(2 * (j // 2)) * moment(2 * -(-j // 2)))
            term = min(exact, 2 * _moment_of_ratio(j))
            total += q**j * mpmath.binomial(order, j) * term
        return float(mpmath.log(total) / (order - 1))
