"""LOCAL Gaussian noise: every client clips and noises its update before it leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

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
class LocalGaussian(GaussianMechanism):
    """Client-level privacy without trust in the server.

    Guarantee:
        One client's update has L2 norm at most C before noise of std z C (CLIENT, ZERO_OUT, without
        amplification). Holds against the SERVER and everybody behind it, for each update alone.
        Rounding to float32 comes after the noise.
    """

    placement: ClassVar[Placement | None] = Placement.LOCAL

    def privatize(
        self, update: LocalUpdate, order: RoundOrder, noise: NoiseSource
    ) -> PrivatizedUpdate:
        """Returns the clipped update plus noise of std z C from the client's source, weight 1."""
        std = ordered_noise_std(order)
        vector_P = clipped(update, order)
        if std > 0:
            noised_P = vector_P.astype(np.float64)
            noise.add_gaussian(noised_P, std)
            vector_P = noised_P.astype(np.float32)
        return PrivatizedUpdate(client=update.client, vector_P=vector_P, weight=1.0)

    def release(
        self, total: CohortSum, order: RoundOrder, expected_cohort: float, noise: NoiseSource
    ) -> Release:
        """Returns the sum over the expected cohort; adds nothing; `total.sum_P` becomes that mean.

        The stds are the expected, public ones: z C sqrt(expected_cohort) of the sum. What really is
        in the sum is z C sqrt(answers), and how many answered is the operator's to know.
        """
        check_expected_cohort(expected_cohort)
        std = ordered_noise_std(order) * math.sqrt(expected_cohort)
        total.sum_P /= expected_cohort
        return Release(
            round=total.round,
            mean_P=total.sum_P,
            noise_std_of_sum=std,
            noise_std_of_mean=std / expected_cohort,
        )


PLUGIN = LocalGaussian
