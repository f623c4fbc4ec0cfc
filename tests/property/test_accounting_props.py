"""Epsilon never falls when a run gets longer, samples more, adds less noise or lowers delta.

RDP is computed at fixed orders and PLD on a grid that depends on the event, so both may wobble by
their own numerical error: 1e-6 and 1e-3 of epsilon are allowed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_app.accounting.pld import Pld
from fl_app.accounting.rdp import Rdp
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)

SLACK = {"pld": 1e-3, "rdp": 1e-6}
BOTH = pytest.mark.parametrize("accountant", [Pld(discretization=1e-4), Rdp()], ids=["pld", "rdp"])

rates = st.floats(0.005, 1.0)
multipliers = st.floats(0.4, 20.0)
counts = st.integers(1, 400)
deltas = st.floats(1e-8, 1e-2)
factors = st.floats(1.0, 4.0)


def poisson(z: float, q: float) -> PrivacyEvent:
    return PrivacyEvent(
        unit=PrivacyUnit.RECORD,
        view=View.SERVER,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        noise=NoiseKind.GAUSSIAN,
        noise_multiplier=z,
        sampling=Sampling.POISSON,
        sampling_rate=q,
    )


def check_not_less(accountant, more: float, less: float) -> None:
    assert more >= less * (1 - SLACK[accountant.kind]) - 1e-9


@BOTH
@settings(max_examples=10, deadline=None)
@given(z=multipliers, q=rates, count=counts, delta=deltas, factor=factors)
def test_more_rounds_never_cost_less(accountant, z, q, count, delta, factor):
    less = accountant.epsilon({poisson(z, q): count}, delta)
    check_not_less(
        accountant, accountant.epsilon({poisson(z, q): int(count * factor)}, delta), less
    )


@BOTH
@settings(max_examples=10, deadline=None)
@given(z=multipliers, q=rates, count=counts, delta=deltas, factor=factors)
def test_a_larger_rate_never_costs_less(accountant, z, q, count, delta, factor):
    less = accountant.epsilon({poisson(z, q): count}, delta)
    larger = poisson(z, min(q * factor, 1.0))
    check_not_less(accountant, accountant.epsilon({larger: count}, delta), less)


@BOTH
@settings(max_examples=10, deadline=None)
@given(z=multipliers, q=rates, count=counts, delta=deltas, factor=factors)
def test_less_noise_never_costs_less(accountant, z, q, count, delta, factor):
    less = accountant.epsilon({poisson(z, q): count}, delta)
    check_not_less(accountant, accountant.epsilon({poisson(z / factor, q): count}, delta), less)


@BOTH
@settings(max_examples=10, deadline=None)
@given(z=multipliers, q=rates, count=counts, delta=deltas, factor=factors)
def test_a_smaller_delta_never_costs_less(accountant, z, q, count, delta, factor):
    less = accountant.epsilon({poisson(z, q): count}, delta)
    check_not_less(accountant, accountant.epsilon({poisson(z, q): count}, delta / factor), less)


@BOTH
@settings(max_examples=10, deadline=None)
@given(z=multipliers, q=rates, count=counts, delta=deltas)
def test_sampling_never_costs_more_than_taking_part_always(accountant, z, q, count, delta):
    always = replace(poisson(z, 1.0), sampling=Sampling.NONE)
    sampled = accountant.epsilon({poisson(z, q): count}, delta)
    check_not_less(accountant, accountant.epsilon({always: count}, delta), sampled)
