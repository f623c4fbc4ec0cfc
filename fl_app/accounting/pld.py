"""Privacy loss distributions: the tight accountant."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld

from fl_app import checks
from fl_app.accounting import gaussian, rdp
from fl_app.errors import AccountingError
from fl_app.plugins import Accountant
from fl_app.privacy import PrivacyEvent, Sampling

# One step: noise std / sensitivity, sampling rate, how often it is composed.
_Step = tuple[float, float, int]

# Grid / loss scale of one step. At _FINE the grid adds less than 1e-4 of epsilon, a finer one is
# wasted; above _COARSE it adds more than 1e-3, soon as much as epsilon itself.
_FINE = 1 / 64
_COARSE = 1 / 8
_MAX_POINTS = 1 << 22
# FFT round-off and the library's tail truncation (1e-15 a composition) stay well below this.
_SMALLEST_DELTA = 1e-12
_TAIL_MASS = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pld(Accountant):
    """Numerical composition of privacy loss distributions with dp-accounting, rounded upwards.

    Koskela, Jaelkoe and Honkela (2020, arXiv:1906.03049); the discretization is that of Doroshenko
    et al. (2022, arXiv:2207.04380).

    Guarantee: an upper bound on epsilon under the relation of the events.
        POISSON with ADD_OR_REMOVE_ONE; unsampled with any relation (REPLACE_ONE: half the noise
        multiplier under ADD_OR_REMOVE_ONE). Whatever grid is used, the bound holds.

    Attributes:
        discretization: grid of privacy losses (nats). The one used is that times a power of two:
            finer where one step's loss is smaller, coarser where it is much larger or memory would
            not do.
    """

    discretization: float

    def __post_init__(self) -> None:
        checks.positive("accountant.discretization", self.discretization, "use 1.0e-4")

    def refusal(self, event: PrivacyEvent) -> str | None:
        """Returns None for Gaussian events, unsampled or Poisson-sampled."""
        if event.sampling is Sampling.FIXED_SIZE:
            return (
                "cannot bound fixed-size sampling; set accountant=rdp, or drop the credit for it "
                "with cohort.amplification=false, or choose cohort=poisson"
            )
        return gaussian.refusal(event)

    def epsilon(self, events: Mapping[PrivacyEvent, int], delta: float) -> float:
        """Returns the bound; tens of milliseconds for one more of an event that was seen before.

        Raises:
            AccountingError: an event that `refusal` names, or a delta too small for the arithmetic.
        """
        steps = gaussian.step_counts(self, events, delta)
        if delta < _SMALLEST_DELTA:
            raise AccountingError(
                f"privacy.target_delta={delta}: accountant=pld resolves {_SMALLEST_DELTA} and "
                "more; set accountant=rdp"
            )
        if not steps:
            return 0.0
        if any(event.noise_multiplier == 0 for event in steps):
            return math.inf
        epsilon = _epsilon(_merged(steps), _grid(steps, self.discretization), delta)
        # The library's exp(-loss) underflows around a loss of 720; any valid bound will do there.
        return epsilon if math.isfinite(epsilon) else rdp.Rdp().epsilon(steps, delta)


def _merged(steps: Mapping[PrivacyEvent, int]) -> tuple[_Step, ...]:
    """Returns the steps with all unsampled Gaussians as one: their (1/z)^2 add up."""
    sampled = [
        (gaussian.sensitivity_multiplier(event), event.sampling_rate, count)
        for event, count in steps.items()
        if event.sampling_rate < 1
    ]
    precision = math.fsum(
        count / gaussian.sensitivity_multiplier(event) ** 2
        for event, count in steps.items()
        if event.sampling_rate == 1
    )
    plain = [(precision**-0.5, 1.0, 1)] if precision else []
    return tuple(sorted(sampled + plain))


def _grid(steps: Mapping[PrivacyEvent, int], usual: float) -> float:
    """Returns the grid of losses: `usual` times a power of two."""
    scale = min(_loss_scale(z, rate) for z, rate, _ in _merged(steps))
    wanted = max(scale * _FINE, min(usual, scale * _COARSE))
    grid = usual * 2.0 ** math.floor(math.log2(wanted / usual))
    while _loss_range(steps) / grid > _MAX_POINTS:
        grid *= 2
    return grid


def _loss_scale(z: float, rate: float) -> float:
    """Returns about the standard deviation of one step's loss.

    That is 1/z unsampled. Sampled: of the likelihood ratio 1 + rate (exp(x/z^2 - 1/(2z^2)) - 1).
    """
    precision = 1 / z**2
    if rate == 1 or precision > 100:
        return 1 / z
    return min(1 / z, rate * math.sqrt(math.expm1(precision)))


def _loss_range(steps: Mapping[PrivacyEvent, int]) -> float:
    """Returns about how far the loss reaches, one step and composed: bounds memory, not privacy."""
    composed = rdp.Rdp().epsilon(steps, _TAIL_MASS)
    single = max(0.5 / z**2 + 10 / z for z, _, _ in _merged(steps))
    return 2 * max(composed, single)


@functools.lru_cache(maxsize=64)
def _epsilon(steps: tuple[_Step, ...], grid: float, delta: float) -> float:
    total = _composed(*steps[0], grid)
    for step in steps[1:]:
        total = total.compose(_composed(*step, grid))
    with np.errstate(over="ignore"):
        return max(0.0, float(total.get_epsilon_for_delta(delta)))


@functools.lru_cache(maxsize=4)
def _composed(z: float, rate: float, count: int, grid: float) -> Any:
    return _single(z, rate, grid).self_compose(count)


@functools.lru_cache(maxsize=4)
def _single(z: float, rate: float, grid: float) -> Any:
    return pld.from_gaussian_mechanism(z, value_discretization_interval=grid, sampling_prob=rate)


PLUGIN = Pld
