"""Calibration: the target is kept, hardly undershot, and refused where it cannot be met."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from fl_app.accounting.calibration import calibrate
from fl_app.accounting.pld import Pld
from fl_app.accounting.rdp import Rdp
from fl_app.errors import AccountingError
from fl_app.plugins import Accountant
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)

PLD, RDP = Pld(discretization=1e-4), Rdp()


def events(z: float, q: float, count: int) -> dict[PrivacyEvent, int]:
    event = PrivacyEvent(
        unit=PrivacyUnit.RECORD,
        view=View.SERVER,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        noise=NoiseKind.GAUSSIAN,
        noise_multiplier=z,
        sampling=Sampling.POISSON if q < 1 else Sampling.NONE,
        sampling_rate=q,
    )
    return {event: count}


@dataclass(frozen=True)
class StepAccountant(Accountant):
    """Epsilon jumps from 10 to 1 at one noise multiplier: no smooth curve to follow."""

    at: float

    def refusal(self, event: PrivacyEvent) -> str | None:
        return None

    def epsilon(self, events: Mapping[PrivacyEvent, int], delta: float) -> float:
        return 1.0 if all(e.noise_multiplier >= self.at for e in events) else 10.0


@dataclass(frozen=True)
class Counting(Accountant):
    """RDP that keeps what it was asked."""

    asked: list[float]

    def refusal(self, event: PrivacyEvent) -> str | None:
        return None

    def epsilon(self, events: Mapping[PrivacyEvent, int], delta: float) -> float:
        self.asked.append(delta)
        return RDP.epsilon(events, delta)


@pytest.mark.parametrize(
    ("accountant", "q", "count", "target", "delta"),
    [
        (PLD, 1.0, 100, 1.0, 1e-5),
        (PLD, 1.0, 1, 50.0, 1e-5),
        (PLD, 0.01, 500, 0.5, 1e-6),
        (RDP, 0.2, 120, 8.0, 1e-4),
        (RDP, 1.0, 10, 0.1, 1e-6),
        (RDP, 0.02, 1000, 1000.0, 1e-6),
    ],
)
def test_the_target_is_kept_and_the_noise_is_no_more_than_needed(
    accountant, q, count, target, delta
):
    z = calibrate(accountant, lambda z: events(z, q, count), target, delta)
    assert accountant.epsilon(events(z, q, count), delta) <= target
    assert accountant.epsilon(events(z * (1 - 2e-4), q, count), delta) > target


@pytest.mark.parametrize("at", [0.0123, 0.7, 1.0, 3.3, 456.78])
def test_a_jump_is_found_from_above(at):
    z = calibrate(StepAccountant(at=at), lambda z: events(z, 1.0, 1), 5.0, 1e-5)
    assert at <= z <= at * (1 + 1.1e-4)


def test_a_target_out_of_reach_is_refused_in_one_line_with_what_to_change():
    with pytest.raises(AccountingError) as caught:
        calibrate(RDP, lambda z: events(z, 1.0, 1000), 1e-9, 1e-9)
    text = str(caught.value)
    assert "\n" not in text
    assert "privacy.target_epsilon=1e-09" in text
    assert "run.num_rounds" in text


@pytest.mark.parametrize("accountant", [PLD, RDP])
def test_a_hundredth_with_a_thousand_full_batch_steps_is_out_of_reach(accountant):
    """It takes z = 5,500 or more, with which nothing is learned."""
    with pytest.raises(AccountingError, match=r"0\.01: not reached .*; raise .* or lower [^\n]*$"):
        calibrate(accountant, lambda z: events(z, 1.0, 1000), 0.01, 1e-4)


def test_a_target_that_hardly_needs_noise_gets_the_smallest_noise():
    z = calibrate(RDP, lambda z: events(z, 0.1, 10), 1e8, 1e-5)
    assert z == pytest.approx(0.01)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_a_target_that_is_no_budget_is_refused(target):
    with pytest.raises(AccountingError, match="target_epsilon"):
        calibrate(RDP, lambda z: events(z, 1.0, 1), target, 1e-5)


def test_few_evaluations_are_needed():
    counted = Counting(asked=[])
    calibrate(counted, lambda z: events(z, 0.2, 120), 8.0, 1e-4)
    assert len(counted.asked) <= 9
