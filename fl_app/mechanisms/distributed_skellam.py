"""DISTRIBUTED Skellam noise: integer shares at the clients, a modular sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_app.mechanisms._distributed import DistributedMechanism
from fl_app.privacy import NoiseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSkellam(DistributedMechanism):
    """The mechanism of Agarwal, Kairouz and Liu 2021, arXiv:2110.04995.

    Guarantee:
        That of `DistributedMechanism`. Sums of Skellam noise are Skellam noise, however small the
        shares; its divergence is that of a Gaussian and a term in the integers' L1 norm.
    """

    noise_kind: ClassVar[NoiseKind] = NoiseKind.SKELLAM


PLUGIN = DistributedSkellam
