"""LOCAL Laplace noise: every client clips the L1 norm and noises its update before it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_app.mechanisms._additive import LocalNoise
from fl_app.privacy import NoiseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLaplace(LocalNoise):
    """The Laplace mechanism (Dwork et al. 2006, doi:10.1007/11681878_14) at every client.

    Guarantee:
        One client's update has L1 norm at most C before noise of scale z C: epsilon 1 / z at
        delta 0 a round (CLIENT, ZERO_OUT, without amplification). Holds against the SERVER and
        everybody behind it, for each update alone.
    """

    noise_kind: ClassVar[NoiseKind] = NoiseKind.LAPLACE


PLUGIN = LocalLaplace
