"""Basic composition: every step gets its share of delta, and the single epsilons add up."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from scipy.optimize import brentq
from scipy.special import log_ndtr

from fl_app import checks
from fl_app.accounting.steps import fits, sensitivity_multiplier, step_counts
from fl_app.plugins import Accountant
from fl_app.privacy import NoiseKind, PrivacyEvent

ANALYTIC, CLASSIC = "analytic", "classic"
# Added to every solved epsilon (relative, and absolute): the solver's tolerance and round-off.
_UPWARDS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Simple(Accountant):
    """The T-fold split, for comparison with works that use it: epsilon / T and delta / T a step.

    With n Gaussian steps in all, whatever their noise, each one is bounded at delta / n by itself
    and the epsilons are added (Dwork et al. 2006, doi:10.1007/11761679_29, theorem 1). A Laplace
    step adds its epsilon at delta 0 and takes no share of delta. No credit is taken for sampling: a
    sampled step counts as an unsampled one, which costs at least as much.

    Guarantee: with `formula` analytic an upper bound on epsilon under the relation of the events,
        much looser than `pld`. With classic it is none as soon as one step has epsilon 1 or more:
        see `caveat`.

    Attributes:
        formula: analytic, the exact curve of one Gaussian (Balle and Wang 2018, arXiv:1805.06530,
            theorem 8); or classic, sqrt(2 ln(1.25 / delta)) / z (Dwork and Roth 2014,
            doi:10.1561/0400000042, theorem A.1), to reproduce published runs only.
    """

    formula: str

    rdp_may_accept: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.one_of("accountant.formula", self.formula, (ANALYTIC, CLASSIC))

    def refusal(self, event: PrivacyEvent) -> str | None:
        """Returns None for every event whose sampling fits its relation."""
        return fits(event)

    def epsilon(self, events: Mapping[PrivacyEvent, int], delta: float) -> float:
        """Returns the sum of the single epsilons; with classic only a claim (`caveat`)."""
        return math.fsum(count * single for single, count in self._singles(events, delta))

    def caveat(self, events: Mapping[PrivacyEvent, int], delta: float) -> str | None:
        """Returns None with analytic, and with classic while every step stays below epsilon 1."""
        gaussian = {e: n for e, n in events.items() if e.noise is NoiseKind.GAUSSIAN}
        if self.formula == ANALYTIC:
            return None
        if all(single < 1 or math.isinf(single) for single, _ in self._singles(gaussian, delta)):
            return None
        return (
            "NOT a valid bound: accountant.formula=classic holds only while one step's epsilon is "
            "below 1, and here it is not; set accountant.formula=analytic"
        )

    def _singles(self, events: Mapping[PrivacyEvent, int], delta: float) -> list[tuple[float, int]]:
        """Returns (epsilon of one step, number of such steps)."""
        steps = step_counts(self, events, delta)
        gaussian = sum(n for event, n in steps.items() if event.noise is NoiseKind.GAUSSIAN)
        return [(self._single(event, delta / max(gaussian, 1)), n) for event, n in steps.items()]

    def _single(self, event: PrivacyEvent, delta: float) -> float:
        if event.noise_multiplier == 0:
            return math.inf
        z = sensitivity_multiplier(event)
        if event.noise is NoiseKind.LAPLACE:
            return 1 / z
        if self.formula == CLASSIC:
            return math.sqrt(2 * math.log(1.25 / delta)) / z
        return analytic_gaussian_epsilon(z, delta)


@functools.lru_cache(maxsize=256)
def analytic_gaussian_epsilon(z: float, delta: float) -> float:
    """Returns the epsilon of one Gaussian of multiplier `z` at `delta`, rounded upwards.

    Solves Balle and Wang (2018, arXiv:1805.06530, theorem 8) for epsilon,
    delta = Phi(1/(2z) - epsilon z) - exp(epsilon) Phi(-1/(2z) - epsilon z), in logarithms, so that
    neither a small delta nor a large epsilon loses digits. 0 if `delta` covers everything.

    Args:
        z: noise std / sensitivity, > 0.
        delta: in (0, 1).
    """
    log_delta = math.log(delta)

    def excess(epsilon: float) -> float:
        return _log_delta(z, epsilon) - log_delta

    if excess(0.0) <= 0:
        return 0.0
    # The upper tail alone is below delta there: Phi(-t) <= exp(-t^2 / 2).
    highest = (0.5 / z + math.sqrt(-2 * log_delta)) / z
    solved = float(brentq(excess, 0.0, highest * (1 + _UPWARDS), xtol=1e-13, rtol=1e-13))
    return solved * (1 + _UPWARDS) + 1e-12


def _log_delta(z: float, epsilon: float) -> float:
    """Returns log(delta) of the exact curve at `epsilon`; -inf where it is 0."""
    upper = float(log_ndtr(0.5 / z - epsilon * z))
    share = epsilon + float(log_ndtr(-0.5 / z - epsilon * z)) - upper
    return upper + math.log(-math.expm1(share)) if share < 0 else -math.inf


PLUGIN = Simple
