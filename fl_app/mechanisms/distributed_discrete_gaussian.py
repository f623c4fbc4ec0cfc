"""DISTRIBUTED discrete Gaussian noise: integer shares at the clients, a modular sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_app.mechanisms._distributed import DistributedMechanism
from fl_app.privacy import NoiseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedDiscreteGaussian(DistributedMechanism):
    """The mechanism of Kairouz, Liu and Steinke 2021, arXiv:2102.06387.

    Guarantee:
        That of `DistributedMechanism`. Sums of discrete Gaussians are not discrete Gaussians; what
        that costs is accounted (`fl_app.accounting.integers`), and is nothing to speak of once a
        share's std is 2 in integer units.
    """

    noise_kind: ClassVar[NoiseKind] = NoiseKind.DISCRETE_GAUSSIAN


PLUGIN = DistributedDiscreteGaussian
