"""The words of privacy: units, relations, views, placements, events and guarantees.

Values only, no mathematics: accountants (`fl_app.accounting`) bound events, samplers, trainings and
mechanisms make them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from fl_app.errors import PrivacyError


class PrivacyUnit(StrEnum):
    """What one neighbouring dataset differs in."""

    RECORD = "RECORD"
    CLIENT = "CLIENT"


class NeighboringRelation(StrEnum):
    """How two neighbouring datasets differ in one unit."""

    ADD_OR_REMOVE_ONE = "ADD_OR_REMOVE_ONE"
    ZERO_OUT = "ZERO_OUT"
    REPLACE_ONE = "REPLACE_ONE"


class Placement(StrEnum):
    """Who adds the client-level noise."""

    CENTRAL = "CENTRAL"
    LOCAL = "LOCAL"
    DISTRIBUTED = "DISTRIBUTED"


class View(StrEnum):
    """An adversary: SERVER runs the rounds, OBSERVER sees released models and the public report."""

    SERVER = "SERVER"
    OBSERVER = "OBSERVER"


class NoiseKind(StrEnum):
    """The law of the noise, and with it the norm that clipping bounds: L2 or, for LAPLACE, L1."""

    GAUSSIAN = "gaussian"
    LAPLACE = "laplace"
    DISCRETE_GAUSSIAN = "discrete_gaussian"
    SKELLAM = "skellam"

    @property
    def std_per_scale(self) -> float:
        """Std of noise of scale 1: 1, or sqrt(2) for LAPLACE."""
        return math.sqrt(2) if self is NoiseKind.LAPLACE else 1.0


class Sampling(StrEnum):
    """How the units of one release are drawn, as far as the accountant may use it."""

    NONE = "none"
    POISSON = "poisson"
    FIXED_SIZE = "fixed_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseShares:
    """How integer noise is spread over clients, and how far one client moves the sum of integers.

    Attributes:
        dimension: length of the integer vector, d.
        scaled_norm: the clipping norm in integer units, C x scale.
        norm_squared: the largest squared L2 norm of one client's rounded vector; rounding makes it
            larger than `scaled_norm` squared.
        num_shares: the fewest honest shares in the sum, h. The sum of so many has the event's noise
            multiplier: one share has the variance (z x scaled_norm)^2 / h.
    """

    dimension: int
    scaled_norm: float
    norm_squared: int
    num_shares: int

    def __post_init__(self) -> None:
        sound = math.isfinite(self.scaled_norm) and self.scaled_norm > 0
        if not sound or min(self.dimension, self.norm_squared, self.num_shares) < 1:
            raise PrivacyError(f"{self}: every number must be finite and > 0")

    @property
    def l1_norm(self) -> float:
        """The largest L1 norm of one client's rounded vector of integers."""
        return min(math.sqrt(self.dimension * self.norm_squared), float(self.norm_squared))

    @property
    def num_nonzero(self) -> int:
        """The most elements of one client's rounded vector that are not zero."""
        return min(self.dimension, self.norm_squared)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyEvent:
    """One release as an accountant needs it: what was noised, how, and for whom it counts.

    Attributes:
        unit: the protected unit.
        view: the most knowing adversary that sees the release.
        relation: the neighbouring relation under which it is to be bounded.
        noise: the law of the noise.
        noise_multiplier: noise scale of the sum / clipping norm (z), whatever the relation: an
            accountant that bounds REPLACE_ONE accounts for the doubled sensitivity itself. 0 means
            no noise. GAUSSIAN: std / L2 norm C. LAPLACE: scale b / L1 norm C (the std is sqrt(2)
            b), so that one unsampled step has epsilon 1 / z at delta 0. Integer noise: std in
            integer units / ``shares.scaled_norm``.
        sampling: the sampling that may be credited.
        sampling_rate: probability that a unit takes part in one step (1 without sampling).
        population: number of units sampled from (FIXED_SIZE only, else 0).
        cohort_size: number of units in one step (FIXED_SIZE only, else 0).
        steps: equal noised steps inside this one release (the local steps of one training call).
        shares: integer noise only (DISCRETE_GAUSSIAN, SKELLAM): its shares; else None.
    """

    unit: PrivacyUnit
    view: View
    relation: NeighboringRelation
    noise: NoiseKind
    noise_multiplier: float
    sampling: Sampling = Sampling.NONE
    sampling_rate: float = 1.0
    population: int = 0
    cohort_size: int = 0
    steps: int = 1
    shares: NoiseShares | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise PrivacyError(f"noise_multiplier={self.noise_multiplier}: must be finite and >= 0")
        if not 0 < self.sampling_rate <= 1 or self.steps < 1:
            raise PrivacyError(
                f"sampling_rate={self.sampling_rate}, steps={self.steps}: "
                "need 0 < rate <= 1, steps >= 1"
            )
        if self.sampling is Sampling.NONE and self.sampling_rate != 1.0:
            raise PrivacyError("an event without sampling must have sampling_rate 1")
        if self.sampling is Sampling.FIXED_SIZE and not 0 < self.cohort_size <= self.population:
            raise PrivacyError("a fixed-size event needs 0 < cohort_size <= population")
        self._check_shares()

    def _check_shares(self) -> None:
        integers = self.noise in (NoiseKind.DISCRETE_GAUSSIAN, NoiseKind.SKELLAM)
        if integers != (self.shares is not None):
            raise PrivacyError(f"noise={self.noise}: integer noise, and no other, has shares")
        plain = self.sampling is Sampling.NONE
        plain = plain and self.relation is not NeighboringRelation.REPLACE_ONE
        if integers and not plain:
            raise PrivacyError(f"noise={self.noise}: is bounded unsampled and not for REPLACE_ONE")

    def one_share(self) -> PrivacyEvent:
        """Returns the event as it is for whoever sees one client's share alone.

        Raises:
            PrivacyError: the event has no shares.
        """
        if self.shares is None:
            raise PrivacyError(f"noise={self.noise}: has no shares")
        return replace(
            self,
            noise_multiplier=self.noise_multiplier / math.sqrt(self.shares.num_shares),
            shares=replace(self.shares, num_shares=1),
        )

    def to_json(self) -> str:
        """Returns the event as canonical JSON (sorted keys, shortest round-trip floats).

        An event without shares has no such key: so were all events written before there were any.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["shares"] = None if self.shares is None else asdict(self.shares)
        if values["shares"] is None:
            del values["shares"]
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyEvent:
        """Returns the event written by `to_json`.

        Raises:
            PrivacyError: the text is not such an event.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            for key, enum in _ENUMS.items():
                values[key] = enum(values[key])
            if "shares" in values:
                values["shares"] = NoiseShares(**values["shares"])
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PrivacyError(f"not a privacy event: {error}") from error


def round_up(epsilon: float, digits: int) -> str:
    """Returns `epsilon` in decimals that are not below it (but for an error of the last float)."""
    scale = 10**digits
    return f"{math.ceil(epsilon * scale - 1e-9) / scale:.{digits}f}"


_ENUMS: Mapping[str, type[StrEnum]] = {
    "unit": PrivacyUnit,
    "view": View,
    "relation": NeighboringRelation,
    "noise": NoiseKind,
    "sampling": Sampling,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """One line of the privacy statement. An epsilon is never shown without the rest of it.

    Attributes:
        epsilon: the bound, or None where there is no guarantee.
        accountant: the accountant that computed it ("" where there is none).
        assumptions: what must hold for it, one phrase each.
    """

    unit: PrivacyUnit
    view: View
    relation: NeighboringRelation
    epsilon: float | None
    delta: float
    accountant: str
    assumptions: tuple[str, ...]

    @property
    def private(self) -> bool:
        """True if there is a finite bound."""
        return self.epsilon is not None

    def shown_epsilon(self, digits: int) -> str:
        """Returns epsilon in decimals, rounded up: what is printed is still a bound."""
        return "none" if self.epsilon is None else round_up(self.epsilon, digits)

    @property
    def name(self) -> str:
        """The row's short name, e.g. ``RECORD against SERVER``."""
        return f"{self.unit} against {self.view}"
