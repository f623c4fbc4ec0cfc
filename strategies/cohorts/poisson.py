"""Poisson sampling: every client is asked with the same probability, independently."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from fl_app import checks
from fl_app.plugins import Cohort
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)
from fl_app.stages import IndexVector


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonCohort(Cohort):
    """Asks each client with probability `sampling_rate`, whether it is online or not.

    Guarantee: amplification by sampling under ADD_OR_REMOVE_ONE against the OBSERVER, as long as
    membership and cohort size stay hidden from it (Abadi et al. 2016, arXiv:1607.00133). None
    against the SERVER.

    Attributes:
        sampling_rate: q in (0, 1].
        amplification: False takes no credit for the sampling.
    """

    sampling_rate: float
    amplification: bool = True

    def __post_init__(self) -> None:
        checks.rate("cohort.sampling_rate", self.sampling_rate)

    def sample(self, population: int, round: int, stream: np.random.Generator) -> IndexVector:
        """Returns the sorted clients of this round; may be empty."""
        return np.flatnonzero(stream.random(population) < self.sampling_rate).astype(np.int64)

    def expected_size(self, population: int) -> float:
        """Returns q N."""
        return self.sampling_rate * population

    def largest_size(self, population: int) -> int:
        """Returns 4 standard deviations more than expected: fewer than 1 in 10,000 are larger."""
        expected = self.expected_size(population)
        return min(population, math.ceil(expected + 4 * math.sqrt(expected)))

    def probability_below(self, size: int, population: int) -> float:
        """Returns the binomial probability of fewer than `size` clients."""
        return float(binom.cdf(size - 1, population, self.sampling_rate))

    def check(self, population: int) -> None:
        """Accepts every population."""

    def event(
        self, noise: NoiseKind, noise_multiplier: float, population: int, *, amplified: bool = True
    ) -> PrivacyEvent:
        """Returns the event of one noised sum over a Poisson cohort."""
        credited = self.amplification and amplified and self.sampling_rate < 1
        return PrivacyEvent(
            unit=PrivacyUnit.CLIENT,
            view=View.OBSERVER,
            # Presence itself decides which rounds may be skipped: only ZERO_OUT is bounded then.
            relation=(
                NeighboringRelation.ADD_OR_REMOVE_ONE if amplified else NeighboringRelation.ZERO_OUT
            ),
            noise=noise,
            noise_multiplier=noise_multiplier,
            sampling=Sampling.POISSON if credited else Sampling.NONE,
            sampling_rate=self.sampling_rate if credited else 1.0,
        )

    def max_participations(self, num_rounds: int, population: int) -> int:
        """Returns `num_rounds`: chance may choose a client every time."""
        return num_rounds


PLUGIN = PoissonCohort
