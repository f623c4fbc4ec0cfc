"""What the accountants share: which sampling fits which relation, sensitivity, and step counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fl_app.errors import AccountingError
from fl_app.privacy import NeighboringRelation, NoiseKind, PrivacyEvent, Sampling

if TYPE_CHECKING:
    from fl_app.plugins import Accountant

EXP_LIMIT = 700.0
"""Beyond this exp overflows; the un-amplified epsilon is taken."""


def fits(event: PrivacyEvent, *, integers: bool = False) -> str | None:
    """Returns None if the sampling of `event` fits its relation, else what to do.

    Integer noise is for accountants only that say `integers`.
    """
    if event.shares is not None and not integers:
        return refuse_noise(event)
    needed = {
        Sampling.POISSON: NeighboringRelation.ADD_OR_REMOVE_ONE,
        Sampling.FIXED_SIZE: NeighboringRelation.REPLACE_ONE,
    }.get(event.sampling, event.relation)
    if event.relation is not needed:
        return (
            f"bounds {event.sampling} sampling under {needed} only, not {event.relation}; "
            f"state the event under {needed}, or take no credit for the sampling"
        )
    return None


def refuse_noise(event: PrivacyEvent) -> str:
    """Returns why an accountant of Gaussian noise cannot bound `event`, and which one can."""
    if event.shares is not None:
        remedy = "set accountant=rdp"
    elif event.sampling is Sampling.FIXED_SIZE:
        remedy = "set accountant=simple, or drop the credit with cohort.amplification=false"
    else:
        remedy = "set accountant=pld, or accountant=simple for the sum of the single epsilons"
    return f"cannot bound {event.noise} noise; {remedy}, or choose Gaussian noise"


def sensitivity_multiplier(event: PrivacyEvent) -> float:
    """Returns noise scale / sensitivity of one step: z, or z / 2 where a unit is replaced.

    Replacing one clipped contribution by another moves the sum by up to 2C. The halved multiplier
    goes to the library as plain noise at sensitivity 1, never together with an option of it
    that doubles the sensitivity once more.
    """
    halved = event.relation is NeighboringRelation.REPLACE_ONE
    return event.noise_multiplier / 2 if halved else event.noise_multiplier


def step_counts(
    accountant: Accountant, events: Mapping[PrivacyEvent, int], delta: float
) -> dict[PrivacyEvent, int]:
    """Returns how often each single step is composed: `events` with their ``steps`` multiplied out.

    Raises:
        AccountingError: delta outside (0, 1), a negative count, an event that `accountant` refuses,
            or events of different units or relations, which make no one guarantee.
    """
    if not 0 < delta < 1:
        raise AccountingError(f"privacy.target_delta={delta}: must lie strictly between 0 and 1")
    steps: dict[PrivacyEvent, int] = {}
    for event, count in events.items():
        if count < 0:
            raise AccountingError(f"count={count}: an event is composed 0 times or more")
        if reason := accountant.refusal(event):
            raise AccountingError(f"accountant={accountant.kind}: {reason}")
        if count:
            step = replace(event, steps=1)
            steps[step] = steps.get(step, 0) + count * event.steps
    if len(kinds := {(e.unit, e.relation) for e in steps}) > 1:
        shown = ", ".join(sorted(f"{unit} under {relation}" for unit, relation in kinds))
        raise AccountingError(f"events={shown}: compose events of one unit and relation at a time")
    return steps


def pure_epsilon(event: PrivacyEvent) -> float:
    """Returns the epsilon at delta 0 of one step of Laplace noise; infinite without noise.

    1 / (scale / sensitivity) unsampled (Dwork et al. 2006, doi:10.1007/11681878_14);
    log(1 + rate (exp(that) - 1)) Poisson-sampled (Balle, Barthe and Gaboardi 2018,
    arXiv:1807.01647, theorem 8).
    """
    if event.noise_multiplier == 0:
        return math.inf
    epsilon = 1 / sensitivity_multiplier(event)
    if event.sampling is not Sampling.POISSON or epsilon > EXP_LIMIT:
        return epsilon
    return math.log1p(event.sampling_rate * math.expm1(epsilon))


def loss_std(noise: NoiseKind, z: float, rate: float = 1.0) -> float:
    """Returns about the standard deviation of one step's privacy loss: to choose grids, no bound.

    That is 1/z unsampled. Sampled: of the likelihood ratio 1 + rate (ratio of the noises - 1),
    whose variance is rate^2 times the chi-square divergence of the two noises.

    Args:
        noise: the law.
        z: noise scale / sensitivity.
        rate: sampling rate.
    """
    if rate == 1 or 1 / z > 10:
        return 1 / z
    if noise is NoiseKind.LAPLACE:
        chi_square = (2 * math.exp(1 / z) + math.exp(-2 / z)) / 3 - 1
    else:
        chi_square = math.expm1(1 / z**2)
    return min(1 / z, rate * math.sqrt(chi_square))
