"""The privacy loss distribution of one Poisson-sampled step, all its points at once.

A schedule of noise has as many different steps as rounds, and a calibration needs the curve of each
several times: dp-accounting computes and truncates a curve point by point.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf, PLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import log_ndtr, ndtri_exp

from fl_app.privacy import NoiseKind
from fl_app.stages import DoubleVector

_TAIL_STDS = -float(ndtri_exp(-50 - math.log(2)))
"""Beyond lies half of exp(-50) of a Gaussian's mass."""


def sampled_noise(noise: NoiseKind, z: float, rate: float, grid: float) -> PrivacyLossDistribution:
    """Returns the losses of noise around 0 against the same around 1 with chance q, else 0.

    Both ways: who takes part is removed, or added.

    Guarantee: every hockey-stick divergence of what is returned is at least the true one
        (Doroshenko et al. 2022, arXiv:2207.04380: true at the grid's points, connected by lines
        in exp(epsilon)).

    Args:
        noise: GAUSSIAN or LAPLACE.
        z: noise scale / sensitivity.
        rate: q, in (0, 1).
        grid: distance of the losses (nats).
    """
    law = _Laplace(z) if noise is NoiseKind.LAPLACE else _Gaussian(z)
    ratios = np.array(law.log_ratios())
    ends = np.logaddexp(math.log1p(-rate), math.log(rate) + ratios)
    low, high = math.floor(ends[0] / grid), math.ceil(ends[1] / grid)
    removed = _removed(grid * np.arange(low, high + 1), law, rate)
    added = _added(grid * np.arange(-high, -low + 1), law, rate)
    return PrivacyLossDistribution(_connected(removed, low, grid), _connected(added, -high, grid))


def with_quick_tails(losses: PrivacyLossDistribution) -> PrivacyLossDistribution:
    """Returns the same losses, composed with others' like these faster than by the library.

    The library composes curves of one class only, and repeats (`self_compose`) into its own.
    """
    removed = _quick(losses._pmf_remove)
    return PrivacyLossDistribution(removed, None if losses._symmetric else _quick(losses._pmf_add))


def _quick(curve: PLDPmf) -> _Curve:
    if isinstance(curve, _Curve):
        return curve
    dense = curve.to_dense_pmf()
    return _Curve(
        dense._discretization,
        dense._lower_loss,
        dense._probs,
        dense._infinity_mass,
        dense._pessimistic_estimate,
    )


class _Law(ABC):
    """Noise whose likelihood ratio between being around 1 and around 0 rises."""

    @abstractmethod
    def log_ratios(self) -> tuple[float, float]:
        """Returns the least and largest log ratio that matter."""

    @abstractmethod
    def at_log_ratio(self, log_ratio_K: DoubleVector) -> DoubleVector:
        """Returns above which values the log ratio is larger than `log_ratio_K`."""

    @abstractmethod
    def log_survival(self, x_K: DoubleVector) -> DoubleVector:
        """Returns the log probability of noise (around 0) above each of `x_K`."""


@dataclass(frozen=True, slots=True)
class _Gaussian(_Law):
    std: float

    def log_ratios(self) -> tuple[float, float]:
        tail = _TAIL_STDS / self.std
        return -0.5 / self.std**2 - tail, 0.5 / self.std**2 + tail

    def at_log_ratio(self, log_ratio_K: DoubleVector) -> DoubleVector:
        return self.std**2 * log_ratio_K + 0.5

    def log_survival(self, x_K: DoubleVector) -> DoubleVector:
        return np.asarray(log_ndtr(-x_K / self.std))


@dataclass(frozen=True, slots=True)
class _Laplace(_Law):
    scale: float

    def log_ratios(self) -> tuple[float, float]:
        return -1 / self.scale, 1 / self.scale

    def at_log_ratio(self, log_ratio_K: DoubleVector) -> DoubleVector:
        x_K = (self.scale * log_ratio_K + 1) / 2
        return np.where(x_K <= 0, -np.inf, np.where(x_K >= 1, np.inf, x_K))

    def log_survival(self, x_K: DoubleVector) -> DoubleVector:
        upper = -np.abs(x_K) / self.scale - math.log(2)
        with np.errstate(divide="ignore"):
            return np.where(x_K >= 0, upper, np.log1p(-np.exp(upper)))


def _removed(epsilon_K: DoubleVector, law: _Law, rate: float) -> DoubleVector:
    """Returns the divergences [K] of the mixture from the noise around 0."""
    with np.errstate(over="ignore"):
        delta_K = -np.expm1(epsilon_K)  # where the mixture is nowhere below exp(epsilon) times that
    inside = epsilon_K > math.log1p(-rate)
    epsilon = epsilon_K[inside]
    cut = _cut(epsilon, law, rate)
    plain = law.log_survival(cut)
    mixture = (1 - rate) * np.exp(plain) + rate * np.exp(law.log_survival(cut - 1))
    delta_K[inside] = mixture - np.exp(epsilon + plain)
    return np.clip(delta_K, 0, 1)


def _added(epsilon_K: DoubleVector, law: _Law, rate: float) -> DoubleVector:
    """Returns the divergences [K] of the noise around 0 from the mixture."""
    delta_K = np.zeros_like(epsilon_K)
    inside = epsilon_K < -math.log1p(-rate)  # no loss is larger
    epsilon = epsilon_K[inside]
    cut = _cut(-epsilon, law, rate)
    plain = law.log_survival(-cut)  # of being below: the noise is symmetric
    mixture = np.logaddexp(math.log1p(-rate) + plain, math.log(rate) + law.log_survival(1 - cut))
    delta_K[inside] = np.exp(plain) - np.exp(epsilon + mixture)
    return np.clip(delta_K, 0, 1)


def _cut(loss_K: DoubleVector, law: _Law, rate: float) -> DoubleVector:
    """Returns above which values log(mixture / noise around 0) is larger than `loss_K`.

    All losses must be above log(1 - q), the least of the mixture.
    """
    rest = np.log1p(-np.exp(math.log1p(-rate) - loss_K))
    return law.at_log_ratio(loss_K + rest - math.log(rate))


def _connected(delta_K: DoubleVector, low: int, grid: float) -> _Curve:
    """Returns the losses whose divergences are `delta_K` [K] at grid * (low, low + 1, ...).

    Between these points they are linear in exp(epsilon), below them at most 1, above constant.
    """
    delta_K = np.minimum.accumulate(delta_K)  # falls; what rises is rounding
    slopes = np.diff(delta_K) / math.expm1(grid)
    mass_K = np.zeros_like(delta_K)
    mass_K[:-1] = slopes
    mass_K[1:] -= math.exp(grid) * slopes
    mass_K[0] += 1 - delta_K[0]
    return _Curve(grid, low, np.maximum(mass_K, 0), float(delta_K[-1]), True)


class _Curve(DensePLDPmf):  # type: ignore[misc]
    """The library's curve, with its tails searched for all at once."""

    def compose(self, other: DensePLDPmf, tail_mass_truncation: float = 0) -> _Curve:
        """Returns the curve of both; half of `tail_mass_truncation` at most moves up at either end.

        From the lowest losses to the lowest that stays, from the highest to infinity.
        """
        whole = super().compose(other)
        mass_K, room = whole._probs, tail_mass_truncation / 2
        first = _fitting(mass_K, room)
        last = max(len(mass_K) - _fitting(mass_K[::-1], room), first + 1)
        kept = mass_K[first:last].copy()
        kept[0] += mass_K[:first].sum()
        infinity = whole._infinity_mass + mass_K[last:].sum()
        return _Curve(whole._discretization, whole._lower_loss + first, kept, infinity, True)


def _fitting(mass_K: DoubleVector, room: float) -> int:
    """Returns how many of the first masses add up to at most `room`."""
    over = np.cumsum(mass_K) > room
    return int(np.argmax(over)) if over.any() else len(mass_K)
