"""Full participation: every client, every round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fl_app.plugins import Cohort
from fl_app.privacy import NeighboringRelation, NoiseKind, PrivacyEvent, PrivacyUnit, View
from fl_app.stages import IndexVector


@dataclass(frozen=True, slots=True, kw_only=True)
class FullCohort(Cohort):
    """Asks everybody.

    Guarantee: no amplification; ZERO_OUT (a client's contribution is replaced by zero).
    """

    def sample(self, population: int, round: int, stream: np.random.Generator) -> IndexVector:
        """Returns all clients."""
        return np.arange(population, dtype=np.int64)

    def expected_size(self, population: int) -> float:
        """Returns `population`."""
        return float(population)

    def check(self, population: int) -> None:
        """Accepts every population."""

    def event(
        self, noise: NoiseKind, noise_multiplier: float, population: int, *, amplified: bool = True
    ) -> PrivacyEvent:
        """Returns the event of one noised sum over everybody."""
        return PrivacyEvent(
            unit=PrivacyUnit.CLIENT,
            view=View.OBSERVER,
            relation=NeighboringRelation.ZERO_OUT,
            noise=noise,
            noise_multiplier=noise_multiplier,
        )

    def max_participations(self, num_rounds: int, population: int) -> int:
        """Returns `num_rounds`."""
        return num_rounds


PLUGIN = FullCohort
