"""No client-level privacy: updates pass as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fl_app.plugins import Mechanism
from fl_app.privacy import NoiseKind, Placement
from fl_app.rng import NoiseSource
from fl_app.stages import CohortSum, LocalUpdate, PrivatizedUpdate, Release, RoundOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMechanism(Mechanism):
    """The weighted mean of the updates that came, neither clipped nor noised.

    Guarantee:
        None at CLIENT level. Record-level privacy of the training passes through unchanged.
    """

    placement: ClassVar[Placement | None] = None
    noise_kind: ClassVar[NoiseKind | None] = None

    def privatize(
        self, update: LocalUpdate, order: RoundOrder, noise: NoiseSource
    ) -> PrivatizedUpdate:
        """Returns the update, zeros if it is not finite; row counts weigh if the order says so."""
        weight = float(update.num_examples) if order.weighting == "examples" else 1.0
        vector_P = update.delta_P
        if not np.isfinite(vector_P).all():
            vector_P = np.zeros_like(vector_P)
        return PrivatizedUpdate(client=update.client, vector_P=vector_P, weight=weight)

    def release(
        self, total: CohortSum, order: RoundOrder, expected_cohort: float, noise: NoiseSource
    ) -> Release:
        """Returns the sum over the weight that answered (zero if none did), in `total.sum_P`."""
        if total.weight > 0:
            total.sum_P /= total.weight
        else:
            total.sum_P.fill(0.0)
        return Release(
            round=total.round, mean_P=total.sum_P, noise_std_of_sum=0.0, noise_std_of_mean=0.0
        )


PLUGIN = NoMechanism
