"""Gaussian differential privacy: the closed form of Gaussians that are not sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fl_app.accounting.simple import analytic_gaussian_epsilon
from fl_app.accounting.steps import fits, refuse_noise, sensitivity_multiplier, step_counts
from fl_app.plugins import Accountant
from fl_app.privacy import NoiseKind, PrivacyEvent, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Gdp(Accountant):
    """Dong, Roth and Su (2019, arXiv:1905.02383): any Gaussians compose to one, exactly.

    n steps of multipliers z_i are mu-GDP with mu^2 = sum 1 / z_i^2 (corollary 3.3), and delta is
    Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu) (corollary 2.13). The central
    limit theorem of the same paper, which would also take sampled steps, is left out: it is no
    bound (6.01 where `pld` says 7.05).

    Guarantee: the exact epsilon, rounded upwards by 1e-9 of itself, under the relation of the
        events; equal to `pld` up to that one's grid.
    """

    def refusal(self, event: PrivacyEvent) -> str | None:
        """Returns None for every Gaussian event without credit for sampling."""
        if event.noise is not NoiseKind.GAUSSIAN:
            return refuse_noise(event)
        if event.sampling is Sampling.POISSON:
            return "has no bound for sampled steps; set accountant=pld"
        if event.sampling is Sampling.FIXED_SIZE:
            return (
                "has no bound for sampled steps; set accountant=rdp, or drop the credit for it "
                "with cohort.amplification=false"
            )
        return fits(event)

    def epsilon(self, events: Mapping[PrivacyEvent, int], delta: float) -> float:
        """Returns the epsilon of all events in microseconds, however many differ."""
        steps = step_counts(self, events, delta)
        if not steps:
            return 0.0
        if any(event.noise_multiplier == 0 for event in steps):
            return math.inf
        mu = math.sqrt(math.fsum(n / sensitivity_multiplier(e) ** 2 for e, n in steps.items()))
        return analytic_gaussian_epsilon(1 / mu, delta)


PLUGIN = Gdp
