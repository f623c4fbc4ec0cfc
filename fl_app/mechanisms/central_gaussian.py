"""CENTRAL Gaussian noise: clients clip, the server adds the noise to the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_app.mechanisms._gaussian import (
    GaussianMechanism,
    check_expected_cohort,
    clipped,
    ordered_noise_std,
)
from fl_app.privacy import Placement
from fl_app.rng import NoiseSource
from fl_app.stages import CohortSum, LocalUpdate, PrivatizedUpdate, Release, RoundOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralGaussian(GaussianMechanism):
    """DP-FedAvg with a trusted server (McMahan et al. 2018, arXiv:1710.06963, fixed denominator).

    Guarantee:
        The sum has sensitivity C (CLIENT, ADD_OR_REMOVE_ONE and ZERO_OUT) and noise of std exactly
        z C whatever number answered, nobody included. Holds against the OBSERVER; the SERVER sees
        the un-noised sum. Accounted by the cohort's event.
    """

    placement: ClassVar[Placement | None] = Placement.CENTRAL

    def privatize(
        self, update: LocalUpdate, order: RoundOrder, noise: NoiseSource
    ) -> PrivatizedUpdate:
        """Returns the clipped update with weight 1 (example counts are private). Draws no noise."""
        return PrivatizedUpdate(client=update.client, vector_P=clipped(update, order), weight=1.0)

    def release(
        self, total: CohortSum, order: RoundOrder, expected_cohort: float, noise: NoiseSource
    ) -> Release:
        """Returns the noised sum over the expected cohort; `total.sum_P` becomes that mean."""
        check_expected_cohort(expected_cohort)
        std = ordered_noise_std(order)
        # Noise goes in before anything reads the sum; the same array is released, so no copy stays.
        noise.add_gaussian(total.sum_P, std)
        total.sum_P /= expected_cohort
        return Release(
            round=total.round,
            mean_P=total.sum_P,
            noise_std_of_sum=std,
            noise_std_of_mean=std / expected_cohort,
        )


PLUGIN = CentralGaussian
