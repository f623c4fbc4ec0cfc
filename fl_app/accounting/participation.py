"""Which of the charged rounds can be those of one client.

The ledger counts charges; a guarantee composes the rounds in which one client can have been asked.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from fl_app.noise_schedule import CONSTANT, NoiseSchedule, level, levels
from fl_app.plugins import ClientRange, Cohort
from fl_app.privacy import PrivacyEvent, PrivacyUnit, Sampling


def in_round(event: PrivacyEvent, schedule: NoiseSchedule, round: int) -> PrivacyEvent:
    """Returns what `round` charges: `event`, its multiplier (the scale) times the round's level."""
    return _leveled(event, level(schedule, round))


@functools.lru_cache(maxsize=16)
def in_rounds(
    event: PrivacyEvent, schedule: NoiseSchedule, num_rounds: int
) -> Mapping[PrivacyEvent, int]:
    """Returns how often rounds 1 to `num_rounds` charge each event."""
    if schedule == CONSTANT:
        return MappingProxyType({event: num_rounds})
    return _counted(event, levels(schedule, num_rounds))


def composed(
    counts: Mapping[PrivacyEvent, int],
    repeats: Mapping[PrivacyEvent, int],
    event: PrivacyEvent,
    schedule: NoiseSchedule,
    cohort: Cohort,
    population: int,
) -> dict[PrivacyEvent, int]:
    """Returns how often each charged event of `event`'s unit is composed for one client.

    The worst client's rounds: with amplification by client sampling every round counts, without
    only those in which one client can have been asked (`Cohort.max_participations`, `Cohort.turns`;
    under a schedule at the least noise that they allow). A round charged again counts once more in
    full, at its own event: the same clients may have been asked again. So do rounds that are not
    those of the schedule, as far as one client can have been asked so often.

    Args:
        counts: charged rounds by event.
        repeats: how many of them charged a round again.
        event: what one round charges at level 1.
        schedule: the levels of the rounds.
        cohort: the sampler.
        population: N.
    """
    charged = {e: count for e, count in counts.items() if e.unit is event.unit and count}
    first = {e: count - repeats.get(e, 0) for e, count in charged.items()}
    num_rounds = sum(first.values())
    most = cohort.max_participations(num_rounds, population)
    turns = cohort.turns(num_rounds, population) if len(first) > 1 else None
    asked = _asked(first, event, schedule, most, turns)
    total = {e: asked.get(e, 0) + charged[e] - first[e] for e in charged}
    return {e: count for e, count in total.items() if count}


def by_requests(
    counts: Mapping[PrivacyEvent, int],
    repeats: Mapping[PrivacyEvent, int],
    event: PrivacyEvent,
    schedule: NoiseSchedule,
    cohort: Cohort,
    population: int,
) -> dict[int, tuple[tuple[ClientRange, ...], dict[PrivacyEvent, int]]]:
    """Returns the clients that can be asked equally often, and what is composed for them.

    As `composed`, for those clients alone: no client costs more than what is composed for its row.
    By the number of rounds, a round that was made again counted once.
    """
    charged = {e: count for e, count in counts.items() if e.unit is event.unit and count}
    again = {e: repeats.get(e, 0) for e in charged}
    first = {e: count - again[e] for e, count in charged.items()}
    grouped: dict[int, list[ClientRange]] = {}
    for part in cohort.ranges(sum(first.values()), population):
        grouped.setdefault(part.most, []).append(part)
    found = {}
    for most, parts in sorted(grouped.items(), reverse=True):
        known = tuple(part.rounds for part in parts if part.rounds is not None)
        asked = _asked(first, event, schedule, most, known or None) if most else {}
        total = {e: asked.get(e, 0) + (again[e] if most else 0) for e in charged}
        found[most] = (tuple(parts), {e: count for e, count in total.items() if count})
    return found


def _asked(
    first: Mapping[PrivacyEvent, int],
    event: PrivacyEvent,
    schedule: NoiseSchedule,
    most: int,
    turns: tuple[tuple[int, ...], ...] | None,
) -> Mapping[PrivacyEvent, int]:
    """Returns how often each event is one client's, of rounds that were charged once each.

    Args:
        first: those rounds, by event.
        event: what one round charges at level 1.
        schedule: the levels of the rounds.
        most: in how many of them one client can be asked.
        turns: in which, see `Cohort.turns`.
    """
    num_rounds = sum(first.values())
    amplified = event.unit is PrivacyUnit.CLIENT and event.sampling is not Sampling.NONE
    if amplified or most >= num_rounds:
        return first
    if len(first) > 1 and first == in_rounds(event, schedule, num_rounds):
        shape = levels(schedule, num_rounds)
        return _counted(event, _worst(shape, most, turns))
    return {e: min(count, most) for e, count in first.items()}


def _worst(
    levels_T: tuple[float, ...], most: int, turns: tuple[tuple[int, ...], ...] | None
) -> tuple[float, ...]:
    """Returns levels that cost no client less than its own: its k-th lowest is not below the k-th.

    Less noise never costs less, so that bounds every client, whatever the noise and accountant;
    where one client has the lowest level at every rank (a falling schedule and turns) it is exact.

    Args:
        levels_T: the level of each round.
        most: in how many rounds one client can be asked.
        turns: every client's rounds, from 1; None if any `most` rounds may be one client's.
    """
    if turns is None:
        return tuple(sorted(levels_T)[:most])
    lowest = [math.inf] * most
    for rounds in turns:
        own = sorted(levels_T[round - 1] for round in rounds)
        lowest[: len(own)] = map(min, lowest, own)
    return tuple(lowest)


def _counted(event: PrivacyEvent, values: tuple[float, ...]) -> Mapping[PrivacyEvent, int]:
    counts = Counter(values)
    return MappingProxyType({_leveled(event, value): count for value, count in counts.items()})


def _leveled(event: PrivacyEvent, value: float) -> PrivacyEvent:
    if value == 1:
        return event
    return replace(event, noise_multiplier=event.noise_multiplier * value)
