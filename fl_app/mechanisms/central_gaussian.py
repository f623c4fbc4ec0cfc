"""CENTRAL Gaussian noise: clients clip, the server adds the noise to the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_app.mechanisms._additive import CentralNoise
from fl_app.privacy import NoiseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralGaussian(CentralNoise):
    """DP-FedAvg with a trusted server (McMahan et al. 2018, arXiv:1710.06963, fixed denominator).

    Guarantee:
        The sum has L2 sensitivity C (CLIENT, ADD_OR_REMOVE_ONE and ZERO_OUT) and noise of std
        exactly z C whatever number answered, nobody included. Holds against the OBSERVER; the
        SERVER sees the un-noised sum. Accounted by the cohort's event.
    """

    noise_kind: ClassVar[NoiseKind] = NoiseKind.GAUSSIAN


PLUGIN = CentralGaussian
