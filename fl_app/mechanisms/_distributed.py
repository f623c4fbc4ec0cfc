"""What the DISTRIBUTED integer mechanisms share: all but the law of the noise.

Kairouz, Liu and Steinke 2021, arXiv:2102.06387; Agarwal, Kairouz and Liu 2021, arXiv:2110.04995.
Shape letters: P parameters, W the next power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from fl_app import checks
from fl_app.clipping import clip_l2
from fl_app.errors import PrivacyError
from fl_app.integer_noise import LARGEST_STD, table
from fl_app.mechanisms._additive import check_expected_cohort, ordered_clipping_norm
from fl_app.mechanisms._rotation import padded_size, rotate, rotate_back
from fl_app.mechanisms._rounding import round_within, rounded_norm_squared
from fl_app.plugins import CohortSize, Mechanism
from fl_app.privacy import NoiseKind, NoiseShares, Placement
from fl_app.rng import NoiseSource
from fl_app.stages import CohortSum, LocalUpdate, PrivatizedUpdate, Release, RoundOrder

SURVIVORS = 0.8
"""Share of the expected cohort that must answer where ``mechanism.min_survivors`` is null."""
SIGMAS = 6.0
"""A sum of integers fits into its bits if so many of its standard deviations do."""
_LARGEST_NORM = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedMechanism(Mechanism):
    """Clip, scale, rotate, round to integers, add an integer share of the noise, reduce mod 2^bits.

    Guarantee:
        One client's rounded vector has the L2 norm that `shares` states, always, and the shares of
        the fewest honest survivors, `min_survivors` - `assumed_colluders`, add up to a std of z C
        (CLIENT, ZERO_OUT, without amplification). Holds against whoever sees sums of at least so
        many only: the OBSERVER, since a round with fewer answers is not released, and the SERVER
        if a protection hides the single updates. A single update is protected by one share.
        Accounted with the norm after rounding. The rotation and the modulus change no privacy.

    Attributes:
        noise_multiplier: z, std of the noise of the fewest honest survivors / clipping norm; None:
            calibrated.
        clipping_norm: C, L2 norm of one client's update before rounding.
        min_survivors: answers that a release needs; None: 80 % of the expected cohort, rounded up.
        assumed_colluders: answers whose noise the adversary may know.
        bits: elements are sent modulo 2^bits.
        scale: integers per unit of the update; None: the largest that fits (`resolved`).
    """

    noise_multiplier: float | None
    clipping_norm: float
    min_survivors: int | None
    assumed_colluders: int
    bits: int
    scale: float | None

    placement: ClassVar[Placement | None] = Placement.DISTRIBUTED
    noise_kind: ClassVar[NoiseKind]

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            checks.noise_multiplier("mechanism.noise_multiplier", self.noise_multiplier)
        checks.clipping_norm("mechanism.clipping_norm", self.clipping_norm)
        if self.min_survivors is not None:
            checks.at_least("mechanism.min_survivors", self.min_survivors, 1)
        checks.at_least("mechanism.assumed_colluders", self.assumed_colluders, 0)
        if checks.at_least("mechanism.bits", self.bits, 8) > 32:
            raise checks.fail("mechanism.bits", self.bits, "must be a whole number from 8 to 32")
        if self.scale is not None:
            checks.positive("mechanism.scale", self.scale, "set null to have it chosen")

    @property
    def modulus(self) -> int:
        """2^bits."""
        return 1 << self.bits

    def wire_size(self, num_parameters: int) -> int:
        """Returns W."""
        return padded_size(num_parameters)

    def own_noise_multiplier(
        self, noise_multiplier: float, num_parameters: int | None = None
    ) -> float:
        """Returns the noise std of one share / the norm of a client's integers.

        That is z / sqrt(fewest honest survivors), and once P is known times C / the norm after
        rounding: a coarse scale makes that norm much longer than C.
        """
        own = noise_multiplier / math.sqrt(self.fewest_honest)
        if num_parameters is None:
            return own
        shares = self.shares(num_parameters)
        return own * min(1.0, shares.scaled_norm / math.sqrt(shares.norm_squared))

    def can_release(self, num_answered: int) -> bool:
        """Returns whether enough shares are in the sum."""
        return num_answered >= self._survivors

    def resolved(self, noise_multiplier: float, num_parameters: int, cohort: CohortSize) -> Self:
        """Returns the mechanism with `min_survivors` and `scale` filled in.

        The scale is the largest with which the sum fits into its bits (`_sigmas`) and a share's std
        is at most 2048, where rounding adds nothing that could be noticed.

        Raises:
            SettingsError: the cohort is too small for the survivors or too large for the bits.
        """
        survivors = self.min_survivors
        if survivors is None:
            survivors = max(1, math.ceil(SURVIVORS * cohort.expected - 1e-9))
        self._check_survivors(survivors, cohort)
        known = replace(self, min_survivors=survivors)
        if self.scale is not None:
            return known
        room = (self.modulus / 2 / SIGMAS) ** 2 - cohort.largest / 4
        if room <= 0:
            raise checks.fail(
                "mechanism.bits",
                self.bits,
                f"too few for sums over {cohort.largest} clients",
                "raise mechanism.bits",
            )
        scale = min(
            math.sqrt(room / known._variance_per_scale(noise_multiplier, num_parameters, cohort)),
            _LARGEST_NORM / self.clipping_norm,
        )
        if noise_multiplier > 0:
            share_std = noise_multiplier * self.clipping_norm / math.sqrt(known.fewest_honest)
            scale = min(scale, LARGEST_STD * (1 - 1e-9) / share_std)
        return replace(known, scale=scale)

    def check_run(self, noise_multiplier: float, num_parameters: int, cohort: CohortSize) -> None:
        """Refuses a given scale with which sums would wrap around, or noise is too wide to draw.

        Raises:
            SettingsError: with a scale that would do.
        """
        fitting = replace(self, scale=None).resolved(noise_multiplier, num_parameters, cohort)
        if self._scale > fitting._scale * (1 + 1e-9):
            raise checks.fail(
                "mechanism.scale",
                self.scale,
                f"must be at most {fitting._scale:.6g} for mechanism.bits={self.bits}: sums would "
                "wrap around, or noise would be too wide",
                "lower it, set null to have it chosen, or raise mechanism.bits",
            )

    def shares(self, num_parameters: int) -> NoiseShares:
        """Returns what the accountant needs to know of the shares of a resolved mechanism."""
        dimension, norm = padded_size(num_parameters), self.clipping_norm * self._scale
        return NoiseShares(
            dimension=dimension,
            scaled_norm=norm,
            norm_squared=rounded_norm_squared(norm, dimension),
            num_shares=self.fewest_honest,
        )

    def facts(
        self, noise_multiplier: float, num_parameters: int, cohort: CohortSize
    ) -> dict[str, str]:
        """Returns what ``dpfl plan`` says about the integers of a resolved mechanism."""
        shares = self.shares(num_parameters)
        share_std = noise_multiplier * shares.scaled_norm / math.sqrt(shares.num_shares)
        sigmas = self._sigmas(noise_multiplier, num_parameters, cohort)
        wrapped = min(1.0, 2 * math.exp(-(sigmas**2) / 2)) * shares.dimension
        return {
            "integers": f"{shares.dimension} of {self.bits} bits, scale {self.scale:.6g}",
            "clipping norm after rounding": f"{math.sqrt(shares.norm_squared) / self._scale:.6g}",
            "fewest honest survivors": (
                f"{shares.num_shares} (a release needs {self.min_survivors} answers, "
                f"{self.assumed_colluders} of them may collude)"
            ),
            "noise std of one share": (
                f"{share_std / self._scale:.6g}, {share_std:.6g} in integer units"
            ),
            "integers that wrap around in a round": (
                f"about {wrapped:.2g} if updates agree ({self.bits} bits hold {sigmas:.3g} sigma)"
            ),
        }

    def privatize(
        self, update: LocalUpdate, order: RoundOrder, noise: NoiseSource
    ) -> PrivatizedUpdate:
        """Returns the client's integers [W] in 0 .. 2^bits - 1, noised by one share.

        Raises:
            PrivacyError: the order has another clipping norm than the one that is accounted.
        """
        norm = ordered_clipping_norm(order)
        if norm != self.clipping_norm:
            raise PrivacyError(
                f"order.clipping_norm={order.clipping_norm}: mechanism={self.kind} rounds with "
                f"mechanism.clipping_norm={self.clipping_norm} in every round"
            )
        shares = self.shares(update.delta_P.size)
        rotated_W = rotate(clip_l2(update.delta_P, norm).astype(np.float64) * self._scale, order)
        integers_W = round_within(rotated_W, shares.norm_squared, noise)
        if std := self._noise_std(order) * self._scale:
            law = table(self.noise_kind, std**2 / shares.num_shares)
            integers_W += noise.integers(law, integers_W.size)
        integers_W %= self.modulus
        return PrivatizedUpdate(
            client=update.client, vector_P=integers_W, weight=1.0, modulus=self.modulus
        )

    def release(
        self, total: CohortSum, order: RoundOrder, expected_cohort: float, noise: NoiseSource
    ) -> Release:
        """Returns the sum over the expected cohort; adds nothing; `total.sum_P` becomes that mean.

        The stds are the expected, public ones, as under LOCAL: z C sqrt(expected_cohort / fewest
        honest survivors) of the sum. The accounting relies on z C.

        Raises:
            PrivacyError: fewer answers than `min_survivors`: the noise would be too small.
        """
        check_expected_cohort(expected_cohort)
        if not self.can_release(total.num_answered):
            total.sum_P.fill(0.0)
            raise PrivacyError(
                f"mechanism.min_survivors={self._survivors}: too few answers for a release"
            )
        mean_W = total.sum_P
        mean_W += self.modulus / 2
        mean_W %= self.modulus
        mean_W -= self.modulus / 2
        rotate_back(mean_W, order)
        mean_W /= self._scale * expected_cohort
        std = self._noise_std(order) * math.sqrt(expected_cohort / self.fewest_honest)
        return Release(
            round=total.round,
            mean_P=mean_W,
            noise_std_of_sum=std,
            noise_std_of_mean=std / expected_cohort,
        )

    def _noise_std(self, order: RoundOrder) -> float:
        """Returns z C of this round."""
        if order.noise_multiplier is None:
            raise PrivacyError("order.noise_multiplier=null: must be a number; 0 for no noise")
        return order.noise_multiplier * ordered_clipping_norm(order)

    @property
    def fewest_honest(self) -> int:
        """The fewest shares in a released sum that the adversary does not know."""
        return self._survivors - self.assumed_colluders

    @property
    def _survivors(self) -> int:
        if self.min_survivors is None:
            raise PrivacyError("mechanism.min_survivors=null: the plan of the run fills it in")
        return self.min_survivors

    @property
    def _scale(self) -> float:
        if self.scale is None:
            raise PrivacyError("mechanism.scale=null: the plan of the run fills it in")
        return self.scale

    def _check_survivors(self, survivors: int, cohort: CohortSize) -> None:
        if survivors > cohort.largest:
            raise checks.fail(
                "mechanism.min_survivors",
                survivors,
                f"must be at most the {cohort.largest} clients of a round",
                "lower it, set null for 80 % of the expected cohort, or ask more clients",
            )
        if self.assumed_colluders >= survivors:
            raise checks.fail(
                "mechanism.assumed_colluders",
                self.assumed_colluders,
                f"must be below the {survivors} answers that a release needs",
                "lower it, or raise mechanism.min_survivors",
            )

    def _variance_per_scale(
        self, noise_multiplier: float, num_parameters: int, cohort: CohortSize
    ) -> float:
        """Returns the variance of one element of the largest sum, at scale 1, without rounding.

        All clients are taken to send the same longest update (the bound of section 4.4 of
        arXiv:2102.06387 for a rotated sum), and all of them to answer.
        """
        n, squared = cohort.largest, self.clipping_norm**2
        signal = n**2 * squared / padded_size(num_parameters)
        return signal + n * noise_multiplier**2 * squared / self.fewest_honest

    def _sigmas(self, noise_multiplier: float, num_parameters: int, cohort: CohortSize) -> float:
        """Returns how many stds of an element of the largest sum fit into half the modulus."""
        variance = self._variance_per_scale(noise_multiplier, num_parameters, cohort)
        return self.modulus / 2 / math.sqrt(variance * self._scale**2 + cohort.largest / 4)
