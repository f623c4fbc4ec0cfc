"""Round-robin: the clients take turns in a fixed public order, a block each round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fl_app import checks
from fl_app.plugins import ClientRange, Cohort
from fl_app.privacy import NeighboringRelation, NoiseKind, PrivacyEvent, PrivacyUnit, View
from fl_app.stages import IndexVector

_WHOLE = 1e-9
"""How far from a whole number fraction x population may lie (float rounding only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobinCohort(Cohort):
    """Asks the next `size` clients each round, in the order of their numbers, again and again.

    In any T rounds in a row every client is asked floor(T size / N) or ceil(T size / N) times. The
    order is public and nothing is drawn, so it is the same in a simulation and in deployment.

    Guarantee: no amplification (whoever knows the round knows the cohort); ZERO_OUT (a client's
    contributions are replaced by zero). Only the rounds in which a client is asked compose for it;
    a round that is asked again after a kill counts again.

    Attributes:
        size: clients per round; None: `fraction` says how many.
        fraction: share of the population per round, a whole number of clients; None: `size` does.
    """

    size: int | None
    fraction: float | None

    def __post_init__(self) -> None:
        if (self.size is None) == (self.fraction is None):
            raise checks.fail(
                "cohort.size",
                self.size,
                "exactly one of it and cohort.fraction must be a number",
                "set the other one to null",
            )
        if self.size is not None:
            checks.at_least("cohort.size", self.size, 1)
        else:
            checks.rate("cohort.fraction", self.fraction)

    def sample(self, population: int, round: int, stream: np.random.Generator) -> IndexVector:
        """Returns the sorted clients whose turn it is; draws nothing from `stream`."""
        size = self._size(population)
        block = ((round - 1) * size + np.arange(size, dtype=np.int64)) % population
        return np.sort(block)

    def expected_size(self, population: int) -> float:
        """Returns the number of clients of every round."""
        return float(self._size(population))

    def check(self, population: int) -> None:
        """Refuses more clients than there are, and a fraction that is not a number of clients."""
        if self.size is not None:
            if self.size > population:
                raise checks.fail(
                    "cohort.size",
                    self.size,
                    f"must be <= federation.population={population}",
                    "lower cohort.size or raise federation.population",
                )
            return
        wanted = (self.fraction or 0.0) * population
        if self._size(population) < 1 or abs(wanted - round(wanted)) > _WHOLE * population:
            raise checks.fail(
                "cohort.fraction",
                self.fraction,
                f"must be a whole number of clients, not {wanted:g} of {population}",
                f"set cohort.fraction=null cohort.size={max(1, round(wanted))}",
            )

    def event(
        self, noise: NoiseKind, noise_multiplier: float, population: int, *, amplified: bool = True
    ) -> PrivacyEvent:
        """Returns the event of one noised sum over a block that the client is in."""
        return PrivacyEvent(
            unit=PrivacyUnit.CLIENT,
            view=View.OBSERVER,
            relation=NeighboringRelation.ZERO_OUT,
            noise=noise,
            noise_multiplier=noise_multiplier,
        )

    def max_participations(self, num_rounds: int, population: int) -> int:
        """Returns ceil(num_rounds size / N): exact for rounds in a row, wherever they start."""
        return -(-num_rounds * self._size(population) // population)

    def turns(self, num_rounds: int, population: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rounds of each range of clients, every different set once."""
        sets = (part.rounds or () for part in self.ranges(num_rounds, population))
        return tuple(dict.fromkeys(sets))

    def ranges(self, num_rounds: int, population: int) -> tuple[ClientRange, ...]:
        """Returns the ranges from one end of a block to the next: inside, all share their turns."""
        size = self._size(population)
        starts = np.arange(num_rounds, dtype=np.int64) * size % population
        # Which blocks a client is in changes from one to the next only where a block begins or has
        # ended, and the block of a round has ended where that of the next one begins.
        firsts = np.unique(np.append(starts, num_rounds * size % population))
        lasts = np.append(firsts[1:], population) - 1
        asked = (firsts[:, None] - starts[None, :]) % population < size
        turns = [tuple((np.flatnonzero(row) + 1).tolist()) for row in asked]
        return tuple(
            ClientRange(first=int(first), last=int(last), most=len(own), rounds=own)
            for first, last, own in zip(firsts, lasts, turns, strict=True)
        )

    def _size(self, population: int) -> int:
        return round((self.fraction or 0.0) * population) if self.size is None else self.size


PLUGIN = RoundRobinCohort
