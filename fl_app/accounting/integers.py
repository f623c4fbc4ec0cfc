"""Renyi divergence of integer noise that several clients add in shares.

One client's rounded update is a vector s of integers; its squared L2 norm, L1 norm and number of
elements other than 0 have public bounds (`NoiseShares`). The divergence of order a between the sum
with and without it (ZERO_OUT) adds up over the elements of s.
"""

from __future__ import annotations

import math

import numpy as np

from fl_app.errors import AccountingError
from fl_app.privacy import NoiseKind, NoiseShares, PrivacyEvent
from fl_app.stages import DoubleVector


def integer_noise_rdp(event: PrivacyEvent, orders: DoubleVector) -> DoubleVector:
    """Returns an upper bound on the Renyi divergence of one step at each order.

    More shares than the event counts only add independent noise, which is post-processing; so is
    the reduction of the sum by a modulus.

    Args:
        event: DISCRETE_GAUSSIAN or SKELLAM noise, not 0.
        orders: each > 1.

    Raises:
        AccountingError: other noise.
    """
    shares = event.shares
    if shares is None:
        raise AccountingError(f"noise={event.noise}: has no shares")
    if event.noise is NoiseKind.SKELLAM:
        return _skellam(shares, _variance_of_sum(event, shares), orders)
    return orders * concentrated_loss(shares, _variance_of_sum(event, shares)) ** 2 / 2


def concentrated_loss(shares: NoiseShares, variance: float) -> float:
    """Returns epsilon so that the divergence of every order a is at most a epsilon^2 / 2.

    h discrete Gaussians of variance `variance` / h do not add up to one of `variance`: the ratio of
    the two laws varies by a factor of exp(r), r from `ratio_range`. Per element, three divergences
    of the form a e^2 / 2 follow one another, whose e add up (Bun and Steinke 2016,
    arXiv:1605.02065, the triangle inequality behind group privacy): from the true law to the
    discrete Gaussian, r / 2; |s_i| / std (Canonne, Kamath and Steinke 2020, arXiv:2004.00010); and
    back, r / 2. (A log ratio L between two laws P and Q with a range of r has K(t) = log E_P
    exp(t L) with K(0) = K(1) = 0 and K'' <= r^2 / 4, so D_a(Q | P) = K(a) / (a - 1) <= a r^2 / 8.)

    Summed over the elements that are not 0 this has the form of Kairouz, Liu and Steinke 2021,
    arXiv:2102.06387, with r in place of their tau = 10 sum_k exp(-2 pi^2 share k / (k + 1)), which
    is more than twice as large.

    Args:
        shares: what one client may add, and h.
        variance: of the discrete Gaussian that the sum stands for, h times that of one share.
    """
    spread = ratio_range(variance / shares.num_shares, shares.num_shares)
    squared = shares.norm_squared / variance
    squared += 2 * spread * shares.l1_norm / math.sqrt(variance)
    return math.sqrt(squared + spread**2 * shares.num_nonzero)


def ratio_range(share_variance: float, num_shares: int) -> float:
    """Returns the range of log(law of the sum / discrete Gaussian); inf where it has no bound here.

    The sum of two discrete Gaussians of variances u and v has at x the probability of one of
    variance u + v times sum_k exp(-(k - t)^2 / (2 w)) with w = u v / (u + v) and a t that depends
    on x; by Poisson's summation formula this is a constant times 1 + e, |e| <= 2 sum_j exp(-2 pi^2
    w j^2). Adding one share after the other, w = share k / (k + 1), the ranges 2 artanh(e) add up.
    """
    k = np.arange(1, num_shares, dtype=np.float64)
    first = np.exp(-2 * math.pi**2 * share_variance * k / (k + 1))
    with np.errstate(divide="ignore"):
        wave = 2 * first / (1 - first**3)  # j^2 >= 1 + 3 (j - 1)
    if (wave >= 1).any():
        return math.inf
    return 2 * float(np.sum(np.arctanh(wave)))


def _skellam(shares: NoiseShares, variance: float, orders: DoubleVector) -> DoubleVector:
    """Returns the bound of Agarwal, Kairouz and Liu 2021, arXiv:2110.04995, theorem 3.5.

    It holds for whole orders. In between, (a - 1) times the divergence of order a is convex in a
    and 0 at 1, so the straight line between its bounds at the whole orders next to a is a bound.
    Sums of Skellam shares are Skellam again.
    """
    below = np.floor(orders)
    share = orders - below
    line = (1 - share) * _skellam_moment(shares, variance, below)
    line += share * _skellam_moment(shares, variance, below + 1)
    bound: DoubleVector = line / (orders - 1)
    return bound


def _skellam_moment(shares: NoiseShares, variance: float, a: DoubleVector) -> DoubleVector:
    """Returns (a - 1) times the bound on the divergence, for whole orders a >= 1."""
    squared, l1_norm = float(shares.norm_squared), shares.l1_norm
    correction = np.minimum(
        ((2 * a - 1) * squared + 6 * l1_norm) / (4 * variance**2), 3 * l1_norm / (2 * variance)
    )
    bound: DoubleVector = (a - 1) * (a * squared / (2 * variance) + correction)
    return bound


def _variance_of_sum(event: PrivacyEvent, shares: NoiseShares) -> float:
    return (event.noise_multiplier * shares.scaled_norm) ** 2
