"""What the client-level Gaussian mechanisms share: their keys and the clipping at the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_app import checks
from fl_app.clipping import clip_l2
from fl_app.errors import PrivacyError
from fl_app.plugins import Mechanism
from fl_app.privacy import NoiseKind
from fl_app.stages import FloatVector, LocalUpdate, RoundOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianMechanism(Mechanism):
    """L2 clipping and Gaussian noise; subclasses say where the noise is added.

    The values of a round come from its `RoundOrder`, never from here: calibration and adaptive
    clipping may have changed them.

    Attributes:
        noise_multiplier: z, noise std of the sum / clipping norm; None: calibrated.
        clipping_norm: C of the first round, L2 norm of one client's update.
    """

    noise_multiplier: float | None
    clipping_norm: float

    noise_kind: ClassVar[NoiseKind | None] = NoiseKind.GAUSSIAN

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            checks.noise_multiplier("mechanism.noise_multiplier", self.noise_multiplier)
        checks.clipping_norm("mechanism.clipping_norm", self.clipping_norm)


def ordered_clipping_norm(order: RoundOrder) -> float:
    """Returns C of this round.

    Raises:
        PrivacyError: the order has none.
    """
    if order.clipping_norm is None:
        raise PrivacyError("order.clipping_norm=null: client-level privacy needs a number > 0")
    return order.clipping_norm


def ordered_noise_std(order: RoundOrder) -> float:
    """Returns z C of this round: one noise's std on the sum (0: none).

    Raises:
        PrivacyError: the order lacks one of the two.
    """
    if order.noise_multiplier is None:
        raise PrivacyError("order.noise_multiplier=null: must be a number; 0 for no noise")
    return order.noise_multiplier * ordered_clipping_norm(order)


def clipped(update: LocalUpdate, order: RoundOrder) -> FloatVector:
    """Returns the client's update [P] with an L2 norm of at most C; zero if it is not finite."""
    return clip_l2(update.delta_P, ordered_clipping_norm(order))


def check_expected_cohort(expected_cohort: float) -> None:
    """Raises PrivacyError unless `expected_cohort` can be divided by."""
    if checks.number_or_none(expected_cohort) is None or expected_cohort <= 0:
        raise PrivacyError(f"expected_cohort={expected_cohort}: must be a finite number > 0")
