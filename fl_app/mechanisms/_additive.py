"""What the client-level mechanisms share that clip an update and add independent noise to it.

`noise_kind` decides the norm that is clipped and the law of the noise, `CentralNoise` and
`LocalNoise` who adds it. With adaptive clipping (Andrew et al. 2021, arXiv:1905.03871) a vector has
one coordinate more, which tells whether the update was within C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from fl_app import checks, layers, noise_schedule, parallel
from fl_app.clipping import clip_l1, clip_l2, clip_layers, l1_norm, l2_norm, split_layers
from fl_app.errors import PrivacyError
from fl_app.layers import FLAT, PER_LAYER, LayerShares
from fl_app.noise_schedule import CONSTANT, NoiseSchedule
from fl_app.plugins import CohortSize, Mechanism
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

_COUNT_SHARE = 1 / 20
_COUNT_MULTIPLE = 2.0
_SHRINK = 1 - 2.0**-23
"""Room for rounding the count's coordinate to float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditiveMechanism(Mechanism):
    """Clipping to C and noise of scale z C: GAUSSIAN bounds the L2 norm, LAPLACE the L1 norm.

    The values of a round come from its `RoundOrder`, never from here: calibration, the schedule and
    adaptive clipping may have changed them.

    Adaptive clipping (`target_quantile`): beside its update a client sends b - 1/2, where b is 1 if
    the update was within C and 0 if not. Noise on the sum of these has the scale `count_noise_std`,
    noise on the updates z_u C with 1/z^2 = 1/z_u^2 + 1/(2 count_noise_std)^2 (LAPLACE: without the
    squares; Andrew et al. 2021, theorem 1): both together are one release of multiplier z. In the
    vector b - 1/2 is scaled so that one noise of scale z_u C serves all coordinates.

    Attributes:
        noise_multiplier: z, noise scale of the sum / clipping norm (GAUSSIAN: the std; LAPLACE: b,
            whose std is sqrt(2) b); None: calibrated.
        noise_schedule: the level of each round that z is multiplied with, see `noise_schedule`.
        clipping_norm: C of the first round, norm of one client's update.
        target_quantile: gamma: C moves until this share of the updates is within it; None: fixed.
        clipping_learning_rate: eta: C is multiplied by exp(-eta (share within - gamma)) each round.
        count_noise_std: scale of one noise on the count of updates within C; None: a twentieth of
            the expected cohort, and at least twice z, which makes z_u 3 % larger than z.
        clipping: flat, one norm over all parameters; or per_layer, a norm for each layer. These
            combine to C, see `fl_app.layers`.
        layer_norms: per_layer: the norm of each layer up to a common factor; None: all equal.
        layer_noise: the noise scale of each layer up to a common factor; None: z C everywhere.
            Whatever they are, a release is one of multiplier z.
        layer_sizes: how many parameters each layer has, in order; None: one layer for each
            parameter tensor of the model. No guarantee depends on whether they are the model's.
    """

    noise_multiplier: float | None
    noise_schedule: NoiseSchedule = CONSTANT
    clipping_norm: float
    target_quantile: float | None = None
    clipping_learning_rate: float = 0.2
    count_noise_std: float | None = None
    clipping: str = FLAT
    layer_norms: tuple[float, ...] | None = None
    layer_noise: tuple[float, ...] | None = None
    layer_sizes: tuple[int, ...] | None = None

    noise_kind: ClassVar[NoiseKind]

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            checks.noise_multiplier("mechanism.noise_multiplier", self.noise_multiplier)
        noise_schedule.check("mechanism.noise_schedule", self.noise_schedule)
        checks.clipping_norm("mechanism.clipping_norm", self.clipping_norm)
        if self.target_quantile is not None:
            checks.open_unit("mechanism.target_quantile", self.target_quantile, "0.5: the median")
        checks.rate("mechanism.clipping_learning_rate", self.clipping_learning_rate)
        if self.count_noise_std is not None:
            checks.positive("mechanism.count_noise_std", self.count_noise_std)
        layers.check("mechanism", self.clipping, self.layer_norms, self.layer_noise)
        self._check_layers()

    def _check_layers(self) -> None:
        if self._in_layers and self.target_quantile is not None:
            raise checks.fail(
                "mechanism.target_quantile",
                self.target_quantile,
                "adaptive clipping follows one norm over all layers, under one noise",
                f"set it null, or mechanism.clipping={FLAT} and mechanism.layer_noise=null",
            )
        if self.layer_sizes is None:
            return
        if not self._in_layers:
            raise checks.fail(
                "mechanism.layer_sizes",
                f"(list of {len(self.layer_sizes)})",
                "no key of this mechanism goes by layers",
                f"set mechanism.clipping={PER_LAYER}, or layer_sizes=null",
            )
        for number, size in enumerate(self.layer_sizes):
            checks.at_least(f"mechanism.layer_sizes[{number}]", size, 1)
        layers.check_number("mechanism", len(self.layer_sizes), self.layer_norms, self.layer_noise)

    @property
    def _in_layers(self) -> bool:
        return self.clipping == PER_LAYER or self.layer_noise is not None

    def with_layers(self, layer_sizes: tuple[int, ...]) -> Self:
        """Returns the mechanism with the model's layers filled in, if it goes by layers.

        Raises:
            SettingsError: a list has not one number for each layer.
        """
        if not self._in_layers or self.layer_sizes is not None:
            return self
        return replace(self, layer_sizes=layer_sizes)

    def check_run(self, noise_multiplier: float, num_parameters: int, cohort: CohortSize) -> None:
        """Raises SettingsError if the layers are not those of a model of P parameters."""
        sizes = self.layer_sizes
        if sizes is not None and num_parameters not in (0, sum(sizes)):
            raise checks.fail(
                "mechanism.layer_sizes",
                f"(list of {len(sizes)})",
                f"adds up to {sum(sizes)} parameters, the model has {num_parameters}",
                "set null for one layer for each parameter tensor",
            )

    def facts(
        self, noise_multiplier: float, num_parameters: int, cohort: CohortSize
    ) -> dict[str, str]:
        """Returns how norm and noise are spread over layers, if they are."""
        if self.layer_sizes is None:
            return {}
        return {"client-level layers": layers.described(self._shares())}

    @property
    def num_counts(self) -> int:
        """One with adaptive clipping."""
        return 0 if self.target_quantile is None else 1

    def resolved(self, noise_multiplier: float, num_parameters: int, cohort: CohortSize) -> Self:
        """Returns the mechanism with the noise of the count filled in.

        Raises:
            SettingsError: with the configured noise of the count nothing is left for the updates.
        """
        if self.target_quantile is None:
            return self
        std = self.count_noise_std
        if std is None:
            # As many noises are in the sum; all together a fixed share of the count.
            local = self.placement is Placement.LOCAL
            num_noises = max(1.0, cohort.expected) if local else 1.0
            share = _COUNT_SHARE * cohort.expected / math.sqrt(num_noises)
            std = max(share, _COUNT_MULTIPLE * noise_multiplier)
        if std <= noise_multiplier / 2:
            raise checks.fail(
                "mechanism.count_noise_std",
                std,
                f"must be above {noise_multiplier / 2:g}, half the largest noise multiplier: the "
                "count alone would cost as much as the whole release",
                f"set {_COUNT_MULTIPLE * noise_multiplier:g} or more, or null",
            )
        return replace(self, count_noise_std=std)

    def update_multiplier(self, noise_multiplier: float) -> float:
        """Returns z_u of a release of multiplier z; z itself without adaptive clipping.

        Raises:
            PrivacyError: the noise of the count is not set, or leaves nothing for the updates.
        """
        if self.target_quantile is None or noise_multiplier == 0:
            return noise_multiplier
        power = 1 if self.noise_kind is NoiseKind.LAPLACE else 2
        rest = noise_multiplier**-power - (2 * self._count_noise()) ** -power
        if rest <= 0:
            raise PrivacyError(
                f"mechanism.count_noise_std={self.count_noise_std}: must be above half the noise "
                f"multiplier {noise_multiplier}"
            )
        return float(rest ** (-1 / power))

    def clipping_norms(self, round: int) -> tuple[float, float]:
        """Returns how far C can have moved by `round`, as the share within is from 0 to 1."""
        first, quantile = self.clipping_norm, self.target_quantile
        if quantile is None:
            return first, first
        reach = self.clipping_learning_rate * (round - 1)
        low, high = math.exp(-reach * (1 - quantile)), math.exp(min(reach * quantile, 700.0))
        least, largest = checks.CLIPPING_NORMS
        return max(first * low, least), min(first * high, largest)

    def _clipped(self, update: LocalUpdate, order: RoundOrder) -> FloatVector:
        """Returns the client's update with a norm of at most C; zero if it is not finite.

        [P], or [P + 1] with the count's coordinate last.
        """
        laplace, norm = self.noise_kind is NoiseKind.LAPLACE, ordered_clipping_norm(order)
        clip = clip_l1 if laplace else clip_l2
        if self.clipping == PER_LAYER:
            norms = [norm * share for share in self._shares().norms or ()]
            return clip_layers(update.delta_P, self._sizes(), norms, clip)
        clipped_P = clip(update.delta_P, norm)
        if self.target_quantile is None:
            return clipped_P
        length = (l1_norm if laplace else l2_norm)(update.delta_P)
        # What is not finite has become zero, and zero is within: the reply looks like any other.
        within = length <= norm or not math.isfinite(length)
        bit = (0.5 if within else -0.5) * self._count_weight(order) * _SHRINK
        return np.append(clipped_P, np.float32(bit))

    def _count_weight(self, order: RoundOrder) -> float:
        """Returns what b - 1/2 is multiplied with, so that noise of z_u C is `count_noise_std`."""
        scale = self._noise_scale(order)
        return scale / self._count_noise() if scale > 0 else ordered_clipping_norm(order)

    def _count_noise(self) -> float:
        if self.count_noise_std is None:
            raise PrivacyError("mechanism.count_noise_std=null: must be a number by now")
        return self.count_noise_std

    def _sizes(self) -> tuple[int, ...]:
        if self.layer_sizes is None:
            raise PrivacyError("mechanism.layer_sizes=null: must be the model's by now")
        return self.layer_sizes

    def _shares(self) -> LayerShares:
        sizes = self._sizes()
        return layers.shares_of(
            self.noise_kind, len(sizes), self.clipping, self.layer_norms, self.layer_noise
        )

    def _noise_scale(self, order: RoundOrder) -> float:
        """Returns z C, or z_u C with adaptive clipping: the scale of every coordinate's noise.

        With noise by layers it is the scale that all of them together cost as much as.
        """
        if order.noise_multiplier is None:
            raise PrivacyError("order.noise_multiplier=null: must be a number; 0 for no noise")
        return self.update_multiplier(order.noise_multiplier) * ordered_clipping_norm(order)

    def _add_noise(self, vector: DoubleVector, order: RoundOrder, noise: NoiseSource) -> None:
        """Adds this round's noise to every coordinate of `vector` in place."""
        laplace = self.noise_kind is NoiseKind.LAPLACE
        add = noise.add_laplace if laplace else noise.add_gaussian
        scale = self._noise_scale(order)
        if self.layer_noise is None:
            add(vector, scale)
            return
        parts = split_layers(vector, self._sizes())
        for part, share in zip(parts, self._shares().noises or (), strict=True):
            add(part, scale * share)

    def _mean(
        self, total: CohortSum, order: RoundOrder, expected_cohort: float, num_noises: float
    ) -> Release:
        """Returns the noised sum over the expected cohort; `total.sum_P` becomes that mean.

        Args:
            total: the sum with its noise.
            order: this round's.
            expected_cohort: the public constant.
            num_noises: how many independent noises are in the sum by public knowledge.
        """
        std = self._noise_scale(order) * self.noise_kind.std_per_scale * math.sqrt(num_noises)
        parallel.divide(total.sum_P, expected_cohort)
        mean_P, fraction = total.sum_P, None
        if self.target_quantile is not None:
            mean_P = total.sum_P[:-1]
            share = float(total.sum_P[-1]) / self._count_weight(order) + 0.5
            fraction = min(max(share, 0.0), 1.0)
        return Release(
            round=total.round,
            mean_P=mean_P,
            noise_std_of_sum=std,
            noise_std_of_mean=std / expected_cohort,
            fraction_within=fraction,
        )


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
        return self._mean(total, order, expected_cohort, num_noises=1)


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
        if self._noise_scale(order) > 0:
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
        return self._mean(total, order, expected_cohort, num_noises=expected_cohort)


def ordered_clipping_norm(order: RoundOrder) -> float:
    """Returns C of this round.

    Raises:
        PrivacyError: the order has none.
    """
    if order.clipping_norm is None:
        raise PrivacyError("order.clipping_norm=null: client-level privacy needs a number > 0")
    return order.clipping_norm


def check_expected_cohort(expected_cohort: float) -> None:
    """Raises PrivacyError unless `expected_cohort` can be divided by."""
    if checks.number_or_none(expected_cohort) is None or expected_cohort <= 0:
        raise PrivacyError(f"expected_cohort={expected_cohort}: must be a finite number > 0")
