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

from fl_app.accounting.integers import integer_noise_rdp
from fl_app.accounting.steps import fits, refuse_noise, sensitivity_multiplier, step_counts
from fl_app.errors import AccountingError
from fl_app.plugins import Accountant
from fl_app.privacy import NoiseKind, PrivacyEvent, Sampling
from fl_app.stages import DoubleVector

# The library's sums carry errors of about this size per order. A smaller (or negative) result would
# be read as "no loss at all" however often it is composed.
_ROUND_OFF = 1e-15
# A sampled step costs the library up to a millisecond an order. Schedules of many different steps
# are bounded at every fourth order: any order gives a bound, and near the best one it is flat.
_FEW = 16
_SPARSE = 4


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
        stride = _SPARSE if len(steps) > _FEW else 1
        orders = np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)[::stride]
        total = sum(count * _step_rdp(event, stride) for event, count in steps.items())
        epsilon, _ = rdp_privacy_accountant.compute_epsilon(orders, total, delta)
        return math.inf if math.isnan(epsilon) else max(0.0, float(epsilon))


@functools.lru_cache(maxsize=2048)
def _step_rdp(event: PrivacyEvent, stride: int = 1) -> DoubleVector:
    """Returns the Renyi divergence of one step (inf where it is unknown).

    At every default order, or at every `stride`-th.
    """
    orders = np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)[::stride]
    if event.shares is not None:
        curve = np.maximum(integer_noise_rdp(event, orders), _ROUND_OFF)
        curve.flags.writeable = False
        return curve
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
    known = np.where(np.isnan(accountant._rdp), np.inf, accountant._rdp)
    if event.sampling is Sampling.POISSON:
        # Sampling never costs more than taking part always (Renyi divergence is quasi-convex).
        with np.errstate(all="ignore"):
            known = np.minimum(known, accountant._orders / (2 * event.noise_multiplier**2))
    curve = np.maximum(known, _ROUND_OFF)
    curve.flags.writeable = False
    return curve


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
