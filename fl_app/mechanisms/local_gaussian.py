"""LOCAL Gaussian noise: every client clips and noises its update before it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_app.mechanisms._additive import LocalNoise
from fl_app.privacy import NoiseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGaussian(LocalNoise):
    """Client-level privacy without trust in the server.

    Guarantee:
        One client's update has L2 norm at most C before noise of std z C (CLIENT, ZERO_OUT, without
        amplification). Holds against the SERVER and everybody behind it, for each update alone.
    """

    noise_kind: ClassVar[NoiseKind] = NoiseKind.GAUSSIAN


PLUGIN = LocalGaussian
