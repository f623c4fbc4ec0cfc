"""What the client-level mechanisms share that clip an update and add independent noise to it.

`noise_kind` decides the norm that is clipped and the law of the noise, `CentralNoise` and
`LocalNoise` who adds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fl_app import checks, noise_schedule
from fl_app.clipping import clip_l1, clip_l2
from fl_app.errors import PrivacyError
from fl_app.noise_schedule import CONSTANT, NoiseSchedule
from fl_app.plugins import Mechanism
from fl_app.privacy import NoiseKind, Placement
from fl_app.rng import NoiseSource
from fl_app.stages import (
    CohortSum,
    DoubleVector,
    FloatVector,
    LocalUpdate,
    PrivatizedUpdate,
    Release,
    RoundOrder,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditiveMechanism(Mechanism):
    """Clipping to C and noise of scale z C: GAUSSIAN bounds the L2 norm, LAPLACE the L1 norm.

    The values of a round come from its `RoundOrder`, never from here: calibration and adaptive
    clipping may have changed them.

    Attributes:
        noise_multiplier: z, noise scale of the sum / clipping norm (GAUSSIAN: the std; LAPLACE: b,
            whose std is sqrt(2) b); None: calibrated.
        noise_schedule: the level of each round that z is multiplied with, see `noise_schedule`.
        clipping_norm: C of the first round, norm of one client's update.
    """

    noise_multiplier: float | None
    noise_schedule: NoiseSchedule = CONSTANT
    clipping_norm: float

    noise_kind: ClassVar[NoiseKind]

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            checks.noise_multiplier("mechanism.noise_multiplier", self.noise_multiplier)
        noise_schedule.check("mechanism.noise_schedule", self.noise_schedule)
        checks.clipping_norm("mechanism.clipping_norm", self.clipping_norm)

    def _clipped(self, update: LocalUpdate, order: RoundOrder) -> FloatVector:
        """Returns the client's update [P] with a norm of at most C; zero if it is not finite."""
        clip = clip_l1 if self.noise_kind is NoiseKind.LAPLACE else clip_l2
        return clip(update.delta_P, ordered_clipping_norm(order))

    def _add_noise(self, vector_P: DoubleVector, order: RoundOrder, noise: NoiseSource) -> None:
        """Adds noise of scale z C to `vector_P` in place."""
        laplace = self.noise_kind is NoiseKind.LAPLACE
        add = noise.add_laplace if laplace else noise.add_gaussian
        add(vector_P, ordered_noise_scale(order))

    def _mean(self, total: CohortSum, expected_cohort: float, std_of_sum: float) -> Release:
        """Returns the (noised) sum over the expected cohort; `total.sum_P` becomes that mean."""
        total.sum_P /= expected_cohort
        return Release(
            round=total.round,
            mean_P=total.sum_P,
            noise_std_of_sum=std_of_sum,
            noise_std_of_mean=std_of_sum / expected_cohort,
        )

    def _noise_std(self, order: RoundOrder) -> float:
        """Returns the std of one noise."""
        return ordered_noise_scale(order) * self.noise_kind.std_per_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralNoise(AdditiveMechanism):
    """Clients clip, the server adds the noise to the sum."""

    placement: ClassVar[Placement | None] = Placement.CENTRAL

    def privatize(
        self, update: LocalUpdate, order: RoundOrder, noise: NoiseSource
    ) -> PrivatizedUpdate:
        """Returns the clipped update with weight 1 (example counts are private). Draws no noise."""
        vector_P = self._clipped(update, order)
        return PrivatizedUpdate(client=update.client, vector_P=vector_P, weight=1.0)

    def release(
        self, total: CohortSum, order: RoundOrder, expected_cohort: float, noise: NoiseSource
    ) -> Release:
        """Returns the noised sum over the expected cohort; `total.sum_P` becomes that mean."""
        check_expected_cohort(expected_cohort)
        # Noise goes in before anything reads the sum; the same array is released, so no copy stays.
        self._add_noise(total.sum_P, order, noise)
        return self._mean(total, expected_cohort, self._noise_std(order))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNoise(AdditiveMechanism):
    """Every client clips its update and adds the noise before it leaves."""

    placement: ClassVar[Placement | None] = Placement.LOCAL

    def privatize(
        self, update: LocalUpdate, order: RoundOrder, noise: NoiseSource
    ) -> PrivatizedUpdate:
        """Returns the clipped update plus noise of scale z C from the client's source, weight 1.

        Rounding to float32 comes after the noise.
        """
        vector_P = self._clipped(update, order)
        if ordered_noise_scale(order) > 0:
            noised_P = vector_P.astype(np.float64)
            self._add_noise(noised_P, order, noise)
            vector_P = noised_P.astype(np.float32)
        return PrivatizedUpdate(client=update.client, vector_P=vector_P, weight=1.0)

    def release(
        self, total: CohortSum, order: RoundOrder, expected_cohort: float, noise: NoiseSource
    ) -> Release:
        """Returns the sum over the expected cohort; adds nothing; `total.sum_P` becomes that mean.

        The stds are the expected, public ones: sqrt(expected_cohort) noises in the sum. How many
        really are in it is how many answered, and that is the operator's to know.
        """
        check_expected_cohort(expected_cohort)
        std = self._noise_std(order) * math.sqrt(expected_cohort)
        return self._mean(total, expected_cohort, std)


def ordered_clipping_norm(order: RoundOrder) -> float:
    """Returns C of this round.

    Raises:
        PrivacyError: the order has none.
    """
    if order.clipping_norm is None:
        raise PrivacyError("order.clipping_norm=null: client-level privacy needs a number > 0")
    return order.clipping_norm


def ordered_noise_scale(order: RoundOrder) -> float:
    """Returns z C of this round: one noise's scale on the sum (0: none).

    Raises:
        PrivacyError: the order lacks one of the two.
    """
    if order.noise_multiplier is None:
        raise PrivacyError("order.noise_multiplier=null: must be a number; 0 for no noise")
    return order.noise_multiplier * ordered_clipping_norm(order)


def check_expected_cohort(expected_cohort: float) -> None:
    """Raises PrivacyError unless `expected_cohort` can be divided by."""
    if checks.number_or_none(expected_cohort) is None or expected_cohort <= 0:
        raise PrivacyError(f"expected_cohort={expected_cohort}: must be a finite number > 0")
