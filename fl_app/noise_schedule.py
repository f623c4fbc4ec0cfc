"""How noise changes from round to round: a scale z times the level of the round.

A schedule is one number, the factor by which the level changes every round after the first (1: the
same noise always; below 1: more noise early, less late), or a list with one level per round.
"""

from __future__ import annotations

import math

from fl_app import checks
from fl_app.errors import PrivacyError

NoiseSchedule = float | tuple[float, ...]

CONSTANT: NoiseSchedule = 1.0
_LEVELS = (1e-3, 1e3)


def check(key: str, schedule: NoiseSchedule) -> None:
    """Refuses levels that are not finite numbers > 0.

    Raises:
        SettingsError: naming `key` and the level.
    """
    if not isinstance(schedule, tuple):
        checks.positive(key, schedule, "set 1 for the same noise in every round")
        return
    for round, value in enumerate(schedule, start=1):
        checks.positive(f"{key}[{round - 1}]", value)


def check_rounds(
    key: str, schedule: NoiseSchedule, noise_multiplier: float | None, num_rounds: int
) -> None:
    """Refuses a schedule that does not fit the run, or noise in one of its rounds.

    Args:
        key: the section's name, e.g. ``mechanism``.
        schedule: a checked schedule.
        noise_multiplier: z, the scale; None if it is still to be calibrated.
        num_rounds: T.

    Raises:
        SettingsError: a list of another length; a level outside 0.001 to 1000; or a round whose
            multiplier no accountant takes.
    """
    name = f"{key}.noise_schedule"
    if isinstance(schedule, tuple) and len(schedule) != num_rounds:
        raise checks.fail(
            name,
            f"(list of {len(schedule)})",
            f"must have one level for each of the run.num_rounds={num_rounds} rounds",
            "change one of them, or give one factor, e.g. 0.98",
        )
    for round, value in enumerate(levels(schedule, num_rounds), start=1):
        if not _LEVELS[0] <= value <= _LEVELS[1]:
            raise checks.fail(
                name,
                _shown(schedule),
                f"makes the level of round {round} {value:g}: must be from 0.001 to 1000",
                "choose a factor nearer to 1",
            )
        if noise_multiplier is not None:
            checks.noise_multiplier(
                f"{key}.noise_multiplier of round {round}", noise_multiplier * value
            )


def level(schedule: NoiseSchedule, round: int) -> float:
    """Returns what the scale is multiplied with in `round` (from 1).

    Raises:
        PrivacyError: the schedule has no such round.
    """
    if round < 1 or (isinstance(schedule, tuple) and round > len(schedule)):
        raise PrivacyError(f"round={round}: the noise schedule has no such round")
    if isinstance(schedule, tuple):
        return schedule[round - 1]
    try:
        return float(schedule ** (round - 1))
    except OverflowError:
        return math.inf


def levels(schedule: NoiseSchedule, num_rounds: int) -> tuple[float, ...]:
    """Returns the levels of rounds 1 to `num_rounds`; of a list as many as it has."""
    if isinstance(schedule, tuple):
        return schedule[:num_rounds]
    return tuple(level(schedule, round) for round in range(1, num_rounds + 1))


def of(owner: object) -> NoiseSchedule:
    """Returns the schedule of a mechanism or training; constant for one that has none."""
    schedule: NoiseSchedule = getattr(owner, "noise_schedule", CONSTANT)
    return schedule


def _shown(schedule: NoiseSchedule) -> str:
    return f"(list of {len(schedule)})" if isinstance(schedule, tuple) else f"{schedule:g}"
