"""Renyi differential privacy: composes by adding, and also bounds fixed-size sampling."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant

from fl_app.accounting.fixed_size import fixed_size_rdp, log_binomials, log_sums
from fl_app.accounting.integers import integer_noise_rdp
from fl_app.accounting.steps import fits, refuse_noise, sensitivity_multiplier, step_counts
from fl_app.errors import AccountingError
from fl_app.plugins import Accountant
from fl_app.privacy import NoiseKind, PrivacyEvent, Sampling
from fl_app.stages import DoubleVector

# The library's sums carry errors of about this size per order. A smaller (or negative) result would
# be read as "no loss at all" however often it is composed.
_ROUND_OFF = 1e-15
# A sampled step costs the library up to a millisecond an order, too much for schedules of many
# different steps. Poisson-sampled ones are then integrated here, fixed-size ones always.
_FEW = 16
_WHOLE = np.array([*range(11, 64), 128, 256])
_LEAST_Z = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdp(Accountant):
    """Mironov's (2017, arXiv:1702.07476) accounting over dp-accounting's orders.

    Sampled Gaussians: Mironov, Talwar and Zhang (2019, arXiv:1908.10530) for Poisson; Wang, Balle
    and Kasiviswanathan (2019, arXiv:1808.00087, theorem 27) for fixed size. Conversion to epsilon:
    Canonne, Kamath and Steinke (2020, arXiv:2004.00010, proposition 12). Integer noise:
    `fl_app.accounting.integers`.

    Guarantee: an upper bound on epsilon under the relation of the events.
        POISSON with ADD_OR_REMOVE_ONE; FIXED_SIZE with REPLACE_ONE at sensitivity 2C; unsampled
        with any relation. Looser than `pld`: 7.90 where that says 7.05.
    """

    def refusal(self, event: PrivacyEvent) -> str | None:
        """Returns None for Gaussian and integer noise whose sampling fits the relation."""
        if event.noise is NoiseKind.LAPLACE:
            return refuse_noise(event)
        return fits(event, integers=True)

    def epsilon(self, events: Mapping[PrivacyEvent, int], delta: float) -> float:
        """Returns the bound; milliseconds once each distinct event has been seen."""
        steps = step_counts(self, events, delta)
        if not steps:
            return 0.0
        if any(event.noise_multiplier == 0 for event in steps):
            return math.inf
        quick = len(steps) > _FEW
        orders = np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
        total = sum(count * _step_rdp(event, quick) for event, count in steps.items())
        epsilon, _ = rdp_privacy_accountant.compute_epsilon(orders, total, delta)
        return math.inf if math.isnan(epsilon) else max(0.0, float(epsilon))


@functools.lru_cache(maxsize=2048)
def _step_rdp(event: PrivacyEvent, quick: bool = False) -> DoubleVector:
    """Returns a bound on the Renyi divergence of one step at every default order (inf: unknown).

    `quick` spares most of the time of a sampled step, and is a little looser.
    """
    every = np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
    known: DoubleVector
    z, rate = event.noise_multiplier, event.sampling_rate
    if quick and event.sampling is Sampling.POISSON and rate < 1 and z >= _LEAST_Z:
        low = every[every < _WHOLE[0]]
        known = np.full(every.shape, np.inf)
        known[: low.size] = _integrated(z, rate, low)
        known[np.isin(every, _WHOLE)] = _summed(z, rate)
    elif event.sampling is Sampling.FIXED_SIZE and rate < 1:
        known = fixed_size_rdp(sensitivity_multiplier(event), rate, every)
    elif event.shares is not None:
        known = integer_noise_rdp(event, every)
    else:
        known = _library_rdp(event, every)
    if event.sampling is Sampling.POISSON:
        # Sampling never costs more than taking part always (Renyi divergence is quasi-convex).
        with np.errstate(all="ignore"):
            known = np.minimum(known, every / (2 * event.noise_multiplier**2))
    curve: DoubleVector = np.maximum(known, _ROUND_OFF)
    curve.flags.writeable = False
    return curve


def _integrated(z: float, rate: float, orders: DoubleVector) -> DoubleVector:
    """Returns the divergence of a Poisson-sampled Gaussian at low orders, whole or not.

    log E (1 - q + q exp((2 x - 1) / (2 z^2)))^a / (a - 1), x normal of std z (Mironov, Talwar and
    Zhang 2019, arXiv:1908.10530, section 3.3), by the trapezoid rule: on such a grid its error is
    below exp(-4 pi^2), as the integrand has no singularity within pi z^2 of the real line.
    """
    step = min(z / 8, z * z / 2)
    x = np.arange(-12 * z, orders[-1] + 12 * z, step)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * z * z))
    density = -x * x / (2 * z * z) + math.log(step / (z * math.sqrt(2 * math.pi)))
    moments: DoubleVector = log_sums(density + orders[:, None] * ratio)
    bound: DoubleVector = moments / (orders - 1)
    return bound


def _summed(z: float, rate: float) -> DoubleVector:
    """Returns the same at the whole orders of `_WHOLE`, as a binomial sum (same section)."""
    k = np.arange(_WHOLE[-1] + 1.0)
    terms = (
        log_binomials(tuple(_WHOLE.tolist()), int(_WHOLE[-1]))
        + k * math.log(rate)
        + (k * k - k) / (2 * z * z)
    )
    terms += (_WHOLE[:, None] - k) * math.log1p(-rate)
    bound: DoubleVector = log_sums(terms) / (_WHOLE - 1)
    return bound


def _library_rdp(event: PrivacyEvent, orders: DoubleVector) -> DoubleVector:
    """Returns dp-accounting's Renyi divergence of one step at `orders`; inf where it has none."""
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    step = dp_accounting.GaussianDpEvent(sensitivity_multiplier(event))
    if event.sampling is Sampling.POISSON:
        step = dp_accounting.PoissonSampledDpEvent(event.sampling_rate, step)
    elif event.sampling is Sampling.FIXED_SIZE:
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        step = dp_accounting.SampledWithoutReplacementDpEvent(
            event.population, event.cohort_size, step
        )
    accountant = rdp_privacy_accountant.RdpAccountant(orders, neighboring_relation=relation)
    try:
        with _without_warnings_per_order(), np.errstate(all="ignore"):
            accountant.compose(step)
    except (ArithmeticError, ValueError) as error:
        raise AccountingError(
            f"accountant=rdp: cannot bound noise_multiplier={event.noise_multiplier} "
            f"({type(error).__name__}); choose one from 0.001 to 1000000"
        ) from error
    # Where the library computes no number there is no bound.
    known: DoubleVector = np.where(np.isnan(accountant._rdp), np.inf, accountant._rdp)
    return known


@contextmanager
def _without_warnings_per_order() -> Iterator[None]:
    """Silences the library's note that it left out a fractional order; all others pass."""

    def wanted(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("_compute_log_a_frac failed to converge")

    logger = logging.getLogger("absl")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


PLUGIN = Rdp
