"""Privacy loss distributions: the tight accountant."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld

from fl_app import checks
from fl_app.accounting import rdp
from fl_app.accounting.sampled_noise import sampled_noise, with_quick_tails
from fl_app.accounting.simple import analytic_gaussian_epsilon
from fl_app.accounting.steps import (
    EXP_LIMIT,
    fits,
    loss_std,
    pure_epsilon,
    sensitivity_multiplier,
    step_counts,
)
from fl_app.errors import AccountingError
from fl_app.plugins import Accountant
from fl_app.privacy import NoiseKind, PrivacyEvent, Sampling

# One step: noise law, noise scale / sensitivity, sampling rate, how often it is composed.
_Step = tuple[NoiseKind, float, float, int]

# Grid / loss scale of one step. At _FINE the grid adds less than 1e-4 of epsilon, a finer one is
# wasted; at _MANY less than 2e-4, for schedules of more than _FEW different steps, which each cost
# a curve of their own; above _COARSE it adds more than 1e-3, soon as much as epsilon itself.
_FINE = 1 / 64
_MANY = 1 / 16
_COARSE = 1 / 8
_FEW = 16
_MAX_POINTS = 1 << 22
# FFT round-off and the library's tail truncation (1e-15 a composition) stay well below this.
_SMALLEST_DELTA = 1e-12
_TAIL_STDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pld(Accountant):
    """Numerical composition of privacy loss distributions with dp-accounting, rounded upwards.

    Koskela, Jaelkoe and Honkela (2020, arXiv:1906.03049); the discretization is that of Doroshenko
    et al. (2022, arXiv:2207.04380).

    Guarantee: an upper bound on epsilon under the relation of the events.
        Gaussian and Laplace noise; POISSON with ADD_OR_REMOVE_ONE; unsampled with any relation
        (REPLACE_ONE: half the noise multiplier under ADD_OR_REMOVE_ONE). Whatever grid is used, the
        bound holds. With Laplace noise never above the sum of the single epsilons at delta 0.

    Attributes:
        discretization: grid of privacy losses (nats). The one used is that times a power of two:
            finer where one step's loss is smaller, coarser where it is much larger or memory would
            not do.
    """

    discretization: float

    def __post_init__(self) -> None:
        checks.positive("accountant.discretization", self.discretization, "use 1.0e-4")

    def refusal(self, event: PrivacyEvent) -> str | None:
        """Returns None for Gaussian and Laplace events, unsampled or Poisson-sampled."""
        if event.sampling is Sampling.FIXED_SIZE:
            return (
                "cannot bound fixed-size sampling; "
                + ("" if _pure(event) else "set accountant=rdp, or ")
                + "drop the credit for it with cohort.amplification=false, or choose cohort=poisson"
            )
        return fits(event)

    def epsilon(self, events: Mapping[PrivacyEvent, int], delta: float) -> float:
        """Returns the bound; tens of milliseconds for one more of an event that was seen before.

        Of many different events each costs about 10 ms once, and one more of them as much.

        Raises:
            AccountingError: an event that `refusal` names, or a delta too small for the arithmetic.
        """
        steps = step_counts(self, events, delta)
        if delta < _SMALLEST_DELTA:
            raise AccountingError(
                f"privacy.target_delta={delta}: accountant=pld resolves {_SMALLEST_DELTA} and "
                "more; set accountant=rdp"
            )
        if not steps:
            return 0.0
        if any(event.noise_multiplier == 0 for event in steps):
            return math.inf
        # The library's exp(loss) breaks around a loss of 720; any valid bound will do there.
        if any(1 / sensitivity_multiplier(event) > EXP_LIMIT for event in steps if _pure(event)):
            return _loose(steps, delta)
        merged = _merged(steps)
        if (grid := _grid(merged, self.discretization)) > EXP_LIMIT:
            return _loose(steps, delta)
        epsilon = _epsilon(merged, grid, delta)
        if math.isfinite(epsilon) and not any(_pure(event) for event in steps):
            return epsilon
        return min(epsilon, _loose(steps, delta))


def _merged(steps: Mapping[PrivacyEvent, int]) -> tuple[_Step, ...]:
    """Returns the steps with all unsampled Gaussians as one, the last: their (1/z)^2 add up.

    The others keep their order, that of the rounds, so that a longer run begins like a shorter one.
    """
    rest, precisions = [], []
    for event, count in steps.items():
        z = sensitivity_multiplier(event)
        if _pure(event) or event.sampling_rate < 1:
            rest.append((event.noise, z, event.sampling_rate, count))
        else:
            precisions.append(count / z**2)
    precision = math.fsum(precisions)
    merged = [(NoiseKind.GAUSSIAN, precision**-0.5, 1.0, 1)] if precision else []
    return tuple(rest + merged)


def _pure(event: PrivacyEvent) -> bool:
    return event.noise is NoiseKind.LAPLACE


def _loose(steps: Mapping[PrivacyEvent, int], delta: float) -> float:
    """Returns a valid bound in closed form: that of the Gaussians plus the Laplaces' pure epsilon.

    The sum is basic composition, with all of delta for the Gaussians. These cost no more than RDP
    says, nor than without sampling: by joint convexity every hockey-stick divergence of a sampled
    step is at most that of the step itself, and so of all of them together.
    """
    pure = math.fsum(count * pure_epsilon(event) for event, count in steps.items() if _pure(event))
    gaussians = {event: count for event, count in steps.items() if not _pure(event)}
    if not gaussians:
        return pure
    mu = math.sqrt(math.fsum(n / sensitivity_multiplier(e) ** 2 for e, n in gaussians.items()))
    always = analytic_gaussian_epsilon(1 / mu, delta)
    return pure + min(always, rdp.Rdp().epsilon(gaussians, delta))


def _grid(steps: Sequence[_Step], usual: float) -> float:
    """Returns the grid of losses: `usual` times a power of two."""
    scale = _typical(steps)
    finest = _MANY if len(steps) > _FEW else _FINE
    wanted = max(scale * finest, min(usual, scale * _COARSE))
    grid = usual * 2.0 ** math.floor(math.log2(wanted / usual))
    while _loss_range(steps) / grid > _MAX_POINTS:
        grid *= 2
    return grid


def _typical(steps: Sequence[_Step]) -> float:
    """Returns the loss scale that the grid is measured by: the root mean square over the steps.

    A grid that is fine for it adds little to the sum, whatever a single step loses, as long as the
    finest step still spans a cell: then it adds at most its own variance to that of the sum.
    """
    scales = [(_loss_scale(noise, z, rate), count) for noise, z, rate, count in steps]
    mean = math.fsum(n * scale**2 for scale, n in scales) / math.fsum(n for _, n in scales)
    return min(math.sqrt(mean), min(scale for scale, _ in scales) / _MANY)


def _loss_scale(noise: NoiseKind, z: float, rate: float) -> float:
    """Returns about the standard deviation of one step's loss; a 16th of it for Laplace noise.

    (A Laplace loss has its mass at two points, which a grid as coarse as a Gaussian's moves more.)
    """
    std = loss_std(noise, z, rate)
    return std / 16 if noise is NoiseKind.LAPLACE else std


def _loss_range(steps: Sequence[_Step]) -> float:
    """Returns about how far the loss reaches, one step and composed: bounds memory, not privacy."""
    variance = math.fsum(n * loss_std(noise, z, rate) ** 2 for noise, z, rate, n in steps)
    composed = variance / 2 + _TAIL_STDS * math.sqrt(variance)
    single = max(
        1 / z if noise is NoiseKind.LAPLACE else 0.5 / z**2 + _TAIL_STDS / z
        for noise, z, _, _ in steps
    )
    return 2 * max(composed, single)


@functools.lru_cache(maxsize=64)
def _epsilon(steps: tuple[_Step, ...], grid: float, delta: float) -> float:
    total = _total(steps, grid)
    with np.errstate(over="ignore"):
        return max(0.0, float(total.get_epsilon_for_delta(delta)))


@functools.lru_cache(maxsize=32)
def _total(steps: tuple[_Step, ...], grid: float) -> Any:
    """Returns the composition of all steps, in blocks of powers of two.

    One step more at the end leaves all blocks but a few, which are kept, as they are.
    """
    if len(steps) == 1:
        return _composed(*steps[0], grid)
    block = 1 << (len(steps) - 1).bit_length() - 1
    first, rest = (with_quick_tails(_total(part, grid)) for part in (steps[:block], steps[block:]))
    return first.compose(rest)


@functools.lru_cache(maxsize=4)
def _composed(noise: NoiseKind, z: float, rate: float, count: int, grid: float) -> Any:
    single = _single(noise, z, rate, grid)
    return single if count == 1 else single.self_compose(count)


@functools.lru_cache(maxsize=4)
def _single(noise: NoiseKind, z: float, rate: float, grid: float) -> Any:
    if rate < 1:
        return sampled_noise(noise, z, rate, grid)
    if noise is NoiseKind.LAPLACE:
        return pld.from_laplace_mechanism(z, value_discretization_interval=grid)
    return pld.from_gaussian_mechanism(z, value_discretization_interval=grid)


PLUGIN = Pld
