"""Fixed-size sampling without replacement: the same number of clients every round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
class FixedSizeCohort(Cohort):
    """Asks `size` different clients each round, every subset equally likely.

    Guarantee: with `amplification`, REPLACE_ONE (a replaced client moves the sum by 2C), which the
    RDP accountant bounds. Without, the T-fold composition of the un-sampled mechanism under
    `neighboring_relation`.

    Attributes:
        size: clients per round.
        amplification: take credit for the sampling (needs accountant=rdp).
        neighboring_relation: replace_one, or zero_out (without amplification only).
    """

    size: int
    amplification: bool = True
    neighboring_relation: str = "replace_one"

    def __post_init__(self) -> None:
        checks.at_least("cohort.size", self.size, 1)
        key = "cohort.neighboring_relation"
        checks.one_of(key, self.neighboring_relation, ("replace_one", "zero_out"))
        if self.amplification and self.neighboring_relation != "replace_one":
            raise checks.fail(
                key,
                self.neighboring_relation,
                "fixed-size sampling is amplified under replace_one only",
                "set cohort.amplification=false",
            )

    def sample(self, population: int, round: int, stream: np.random.Generator) -> IndexVector:
        """Returns `size` sorted clients."""
        return np.sort(stream.choice(population, self.size, replace=False)).astype(np.int64)

    def expected_size(self, population: int) -> float:
        """Returns `size`."""
        return float(self.size)

    def check(self, population: int) -> None:
        """Refuses a cohort larger than the population."""
        if self.size > population:
            raise checks.fail(
                "cohort.size",
                self.size,
                f"must be <= federation.population={population}",
                "lower cohort.size or raise federation.population",
            )

    def event(
        self, noise: NoiseKind, noise_multiplier: float, population: int, *, amplified: bool = True
    ) -> PrivacyEvent:
        """Returns the event of one noised sum over a fixed-size cohort."""
        credited = self.amplification and amplified
        return PrivacyEvent(
            unit=PrivacyUnit.CLIENT,
            view=View.OBSERVER,
            relation=NeighboringRelation(self.neighboring_relation.upper()),
            noise=noise,
            noise_multiplier=noise_multiplier,
            sampling=Sampling.FIXED_SIZE if credited else Sampling.NONE,
            sampling_rate=self.size / population if credited else 1.0,
            population=population if credited else 0,
            cohort_size=self.size if credited else 0,
        )

    def max_participations(self, num_rounds: int, population: int) -> int:
        """Returns `num_rounds`: chance may choose a client every time."""
        return num_rounds


PLUGIN = FixedSizeCohort
