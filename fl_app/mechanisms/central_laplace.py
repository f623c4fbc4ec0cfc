"""CENTRAL Laplace noise: clients clip the L1 norm, the server adds the noise to the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_app.mechanisms._additive import CentralNoise
from fl_app.privacy import NoiseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralLaplace(CentralNoise):
    """The Laplace mechanism (Dwork et al. 2006, doi:10.1007/11681878_14) on the sum of a round.

    Guarantee:
        The sum has L1 sensitivity C (CLIENT, ADD_OR_REMOVE_ONE and ZERO_OUT) and noise of scale
        exactly z C whatever number answered: one un-sampled release has epsilon 1 / z at delta 0.
        Holds against the OBSERVER; the SERVER sees the un-noised sum. Accounted by the cohort's
        event.
    """

    noise_kind: ClassVar[NoiseKind] = NoiseKind.LAPLACE


PLUGIN = CentralLaplace
