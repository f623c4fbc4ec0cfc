"""Noise schedules: levels, what is refused, and which rounds one client's composition counts.

Independent sources for epsilons: the closed form of Gaussian DP in mpmath, dp-accounting's PLD and
RDP accountants composed round by round, and brute force over all clients.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fl_app import noise_schedule
from fl_app.accounting import participation
from fl_app.accounting.gdp import Gdp
from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.accounting.pld import Pld
from fl_app.accounting.simple import Simple
from fl_app.client_round import check_order
from fl_app.errors import PrivacyError, SettingsError
from fl_app.overrides import compose
from fl_app.plugins import Cohort
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)
from fl_app.settings import Settings
from fl_app.stages import RoundOrder
from strategies.cohorts.all import FullCohort
from strategies.cohorts.fixed_size import FixedSizeCohort
from strategies.cohorts.poisson import PoissonCohort
from strategies.cohorts.round_robin import RoundRobinCohort

CENTRAL = ["mechanism=central_gaussian", "federation.population=100", "privacy.target_delta=1e-5"]
UNLIMITED = ["privacy.target_epsilon=null"]
EVENT = PrivacyEvent(
    unit=PrivacyUnit.CLIENT,
    view=View.OBSERVER,
    relation=NeighboringRelation.ZERO_OUT,
    noise=NoiseKind.GAUSSIAN,
    noise_multiplier=2.0,
)
SAMPLED = replace(
    EVENT,
    relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    sampling=Sampling.POISSON,
    sampling_rate=0.1,
)


def plan(*overrides: str) -> PrivacyPlan:
    return make_plan(compose([*CENTRAL, *overrides]), 100)


def settings_of(*overrides: str) -> Settings:
    return compose([*CENTRAL, *overrides])


# Levels and what is refused.


def test_a_factor_falls_geometrically_from_the_scale_and_a_list_is_taken_as_it_is() -> None:
    assert noise_schedule.levels(0.5, 4) == (1.0, 0.5, 0.25, 0.125)
    assert noise_schedule.levels((3.0, 1.0, 2.0), 2) == (3.0, 1.0)
    assert noise_schedule.level((3.0, 1.0, 2.0), 3) == 2.0
    assert noise_schedule.levels(1.0, 3) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("schedule", "round"), [(0.9, 0), ((1.0, 2.0), 3), ((1.0, 2.0), -1)])
def test_a_round_that_the_schedule_does_not_have_is_refused(
    schedule: noise_schedule.NoiseSchedule, round: int
) -> None:
    with pytest.raises(PrivacyError, match=f"round={round}"):
        noise_schedule.level(schedule, round)


@pytest.mark.parametrize(
    ("section", "value", "text"),
    [
        ("mechanism", "0", r"mechanism\.noise_schedule=0.*> 0"),
        ("mechanism", "-1", r"mechanism\.noise_schedule=-1"),
        ("mechanism", "nan", r"mechanism\.noise_schedule=nan"),
        ("mechanism", "1e300", r"mechanism\.noise_schedule=1e\+300.*round 2"),
        ("mechanism", "[1,0,1]", r"mechanism\.noise_schedule\[1\]=0"),
        ("mechanism", "[1,2]", r"list of 2.*run\.num_rounds=3"),
        ("mechanism", "0.01", r"mechanism\.noise_schedule=0\.01.*round 3"),
        ("mechanism", "[1,2000,1]", r"list of 3.*round 2 2000"),
        ("mechanism", "linear", r"mechanism\.noise_schedule=linear: must be a number or a list"),
        ("training", "[1,2]", r"training\.noise_schedule=.*run\.num_rounds=3"),
    ],
)
def test_impossible_schedules_are_refused_with_the_key(section: str, value: str, text: str) -> None:
    record = ["training=dp_sgd", "mechanism=none"] if section == "training" else []
    with pytest.raises(SettingsError, match=text):
        settings_of(*record, "run.num_rounds=3", f"{section}.noise_schedule={value}")


def test_noise_that_no_accountant_takes_in_some_round_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"mechanism\.noise_multiplier of round 3=0\.0004"):
        settings_of("run.num_rounds=3", "mechanism.noise_multiplier=0.04",
                    "mechanism.noise_schedule=0.1")  # fmt: skip
    none = settings_of("run.num_rounds=3", "mechanism.noise_multiplier=0",
                       "mechanism.noise_schedule=0.1", *UNLIMITED)  # fmt: skip
    assert make_plan(none).guarantees(3)[0].epsilon is None


def test_a_node_refuses_the_noise_of_another_round_and_a_round_that_is_not_the_runs() -> None:
    local = settings_of("mechanism=local_gaussian", "mechanism.noise_multiplier=8", *UNLIMITED,
                        "mechanism.noise_schedule=[3,2,1]", "run.num_rounds=3")  # fmt: skip
    order = RoundOrder(round=2, clipping_norm=1.0, noise_multiplier=16.0,
                       training_noise_multiplier=None, nominal_rows=10)  # fmt: skip
    check_order(order, local)
    check_order(
        replace(order, noise_multiplier=16.0 * (1 + 1e-15)), local
    )  # another machine's power
    for round, z in ((1, 16.0), (3, 16.0), (2, 8.0), (2, 15.999), (2, None)):
        with pytest.raises(PrivacyError, match=r"mechanism\.noise_multiplier"):
            check_order(replace(order, round=round, noise_multiplier=z), local)
    for round in (0, 4):
        with pytest.raises(PrivacyError, match="rounds 1 to 3"):
            check_order(replace(order, round=round), local)
    record = compose(["training=dp_sgd", "training.noise_multiplier=2", *UNLIMITED,
                      "training.noise_schedule=0.5", "run.num_rounds=3"])  # fmt: skip
    asked = replace(order, clipping_norm=None, noise_multiplier=None, training_noise_multiplier=1.0)
    check_order(asked, record)
    with pytest.raises(PrivacyError, match=r"training\.noise_multiplier"):
        check_order(replace(asked, round=3), record)


# Which rounds are one client's.


def brute_force_turns(cohort: Cohort, population: int, num_rounds: int) -> set[tuple[int, ...]]:
    asked: list[list[int]] = [[] for _ in range(population)]
    for r in range(1, num_rounds + 1):
        for client in cohort.sample(population, r, np.random.default_rng(0)).tolist():
            asked[client].append(r)
    return {tuple(rounds) for rounds in asked}


@hypothesis_settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.data(), st.integers(1, 40))
def test_the_turns_are_those_of_every_client(population: int, data: st.DataObject, t: int) -> None:
    cohort = RoundRobinCohort(size=data.draw(st.integers(1, population)), fraction=None)
    turns = cohort.turns(t, population)
    assert set(turns) == brute_force_turns(cohort, population, t)
    assert max(map(len, turns)) == cohort.max_participations(t, population)


@hypothesis_settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 12),
    st.data(),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=20),
)
def test_the_composed_rounds_cost_no_client_less_than_its_own(
    population: int, data: st.DataObject, shape: list[float]
) -> None:
    """Gaussians cost the sum of 1/z^2: compared with that of every client, by listing them all."""
    cohort = RoundRobinCohort(size=data.draw(st.integers(1, population)), fraction=None)
    schedule = tuple(shape)
    counts = participation.in_rounds(EVENT, schedule, len(schedule))
    found = participation.composed(counts, {}, EVENT, schedule, cohort, population)
    cost = math.fsum(n / e.noise_multiplier**2 for e, n in found.items())
    clients = [
        math.fsum((2.0 * schedule[r - 1]) ** -2 for r in rounds)
        for rounds in brute_force_turns(cohort, population, len(schedule))
    ]
    assert cost >= max(clients) * (1 - 1e-12)
    assert sum(found.values()) == cohort.max_participations(len(schedule), population)
    falling = tuple(sorted(schedule, reverse=True))
    counts = participation.in_rounds(EVENT, falling, len(falling))
    found = participation.composed(counts, {}, EVENT, falling, cohort, population)
    exact = max(
        math.fsum((2.0 * falling[r - 1]) ** -2 for r in rounds)
        for rounds in brute_force_turns(cohort, population, len(falling))
    )
    cost = math.fsum(n / e.noise_multiplier**2 for e, n in found.items())
    # Exact for a falling schedule where blocks do not overlap; never below otherwise.
    assert cost >= exact * (1 - 1e-12)
    if population % cohort.expected_size(population) == 0:
        assert cost == pytest.approx(exact, rel=1e-9)


class EverySecondSomehow(FullCohort):
    """Says how often a client is asked, not in which rounds."""

    def max_participations(self, num_rounds: int, population: int) -> int:
        return -(-num_rounds // 2)


def test_without_known_turns_the_least_noise_is_one_clients() -> None:
    schedule = (1.0, 4.0, 2.0, 3.0, 5.0)
    counts = participation.in_rounds(EVENT, schedule, 5)
    found = participation.composed(counts, {}, EVENT, schedule, EverySecondSomehow(), 10)
    assert sorted(e.noise_multiplier for e in found) == [2.0, 4.0, 6.0]


def test_amplified_and_full_cohorts_compose_every_round() -> None:
    schedule = (1.0, 0.9, 0.9)
    for event, cohort in (
        (EVENT, FullCohort()),
        (SAMPLED, PoissonCohort(sampling_rate=0.1)),
        (EVENT, FixedSizeCohort(size=3, amplification=False)),
    ):
        counts = participation.in_rounds(event, schedule, 3)
        found = participation.composed(counts, {}, event, schedule, cohort, 10)
        assert found == counts == {event: 1, replace(event, noise_multiplier=1.8): 2}


def test_a_round_made_again_counts_at_its_own_event_in_full() -> None:
    schedule, cohort = (1.0, 0.5, 0.25, 0.125), RoundRobinCohort(size=1, fraction=None)
    first, second, third = (participation.in_round(EVENT, schedule, r) for r in (1, 2, 3))
    # Two clients by turns, three rounds, the second one charged three times.
    found = participation.composed(
        {first: 1, second: 3, third: 1}, {second: 2}, EVENT, schedule, cohort, 2
    )
    # The bound: client 0 has rounds 1 and 3, client 1 round 2; and both repeats.
    assert found == {third: 1, first: 1, second: 2}


def test_charges_that_are_not_the_schedules_count_as_far_as_one_client_can_be_asked() -> None:
    schedule, cohort = (1.0, 0.5, 0.25, 0.125), RoundRobinCohort(size=1, fraction=None)
    other = replace(EVENT, noise_multiplier=7.0)
    found = participation.composed({EVENT: 1, other: 3}, {}, EVENT, schedule, cohort, 2)
    assert found == {EVENT: 1, other: 2}


# Epsilon of whole schedules.


def test_an_unsampled_schedule_is_the_closed_form() -> None:
    """GDP adds 1/z^2 over the rounds: 20 rounds, z 10 falling by 5 % a round (mpmath)."""
    made = plan("cohort=all", "mechanism.noise_multiplier=10", "mechanism.noise_schedule=0.95",
                "run.num_rounds=20", *UNLIMITED)  # fmt: skip
    epsilon = made.guarantees(20)[0].epsilon
    assert epsilon is not None
    with mpmath.workdps(40):
        mu = mpmath.sqrt(sum((10 * mpmath.mpf("0.95") ** r) ** -2 for r in range(20)))

        def excess(e: mpmath.mpf) -> mpmath.mpf:
            tail = mpmath.ncdf(-mu / 2 - e / mu)
            return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * tail - mpmath.mpf("1e-5")

        exact = float(mpmath.findroot(excess, epsilon))
    assert exact <= epsilon <= exact * (1 + 1e-3)
    assert exact <= (replace(made, accountant=Gdp()).guarantees(20)[0].epsilon or 0) <= exact + 1e-6
    # At a constant 10 it would cost less, at the last round's noise more.
    assert Pld(discretization=1e-4).epsilon({made.events[0]: 20}, 1e-5) < 0.8 * exact
    assert Pld(discretization=1e-4).epsilon({made.events_of(20)[0]: 20}, 1e-5) > 1.2 * exact


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_a_sampled_schedule_equals_the_plain_library_composed_round_by_round(noise: str) -> None:
    made = plan(f"mechanism=central_{noise}", "cohort=poisson", "mechanism.noise_multiplier=1.5",
                "mechanism.noise_schedule=0.97", "run.num_rounds=20", *UNLIMITED)  # fmt: skip
    law = dp_accounting.GaussianDpEvent if noise == "gaussian" else dp_accounting.LaplaceDpEvent
    accountants = [PLDAccountant(value_discretization_interval=5e-4)]
    accountants += [RdpAccountant()] if noise == "gaussian" else []
    for accountant in accountants:
        for r in range(20):
            accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, law(1.5 * 0.97**r)))
    ours = made.guarantees(20)[0].epsilon
    assert ours == pytest.approx(accountants[0].get_epsilon(1e-5), rel=1e-3)
    if noise == "gaussian":
        rdp = plan("cohort=poisson", "mechanism.noise_multiplier=1.5", "accountant=rdp",
                   "mechanism.noise_schedule=0.97", "run.num_rounds=20", *UNLIMITED)  # fmt: skip
        bound, plain = rdp.guarantees(20)[0].epsilon, accountants[1].get_epsilon(1e-5)
        # The library knows nothing at some of the low orders, so it may be a little looser.
        assert ours <= bound <= plain * (1 + 1e-9)
        assert bound == pytest.approx(plain, rel=1e-3)


def test_many_different_rounds_on_the_coarser_grid_are_still_bounded_tightly() -> None:
    """Laws that span a factor of 8, against the plain library on a fine grid."""
    schedule = [8.0 ** (1 - i / 23) for i in range(24)]
    ours = Pld(discretization=1e-4).epsilon(
        {replace(SAMPLED, noise_multiplier=z): 1 for z in schedule}, 1e-5
    )
    fine = PLDAccountant(value_discretization_interval=2e-4)
    for z in schedule:
        fine.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(z)))
    exact = fine.get_epsilon(1e-5)
    assert exact * (1 - 1e-5) <= ours <= exact * (1 + 5e-4)


def test_the_target_holds_for_the_whole_schedule_and_leaves_nothing_over() -> None:
    made = plan("cohort=all", "mechanism.noise_schedule=[3,2,1.5,1]", "run.num_rounds=4",
                "privacy.target_epsilon=2")  # fmt: skip
    scale = made.mechanism_noise_multiplier
    assert scale is not None
    zs = [scale * level for level in (3, 2, 1.5, 1)]
    assert [made.noise_multiplier(PrivacyUnit.CLIENT, r) for r in (1, 2, 3, 4)] == zs
    spent = made.guarantees(4)[0].epsilon
    assert spent == pytest.approx(2.0, rel=1e-3)
    assert spent <= 2.0
    allowed = [made.within_budget(made.charges(n)) for n in range(4)]
    assert allowed == [True] * 4
    assert made.affordable_rounds() == 4
    # The events that a ledger will hold, and one round charged twice: the last is off.
    assert [made.events_of(r)[0].noise_multiplier for r in (1, 2, 3, 4)] == zs
    again = made.charges(3) | {made.events_of(2)[0]: 2}
    assert not made.within_budget(again, {made.events_of(2)[0]: 1}, round=4)


def test_a_repeat_of_a_noisy_round_costs_less_than_one_of_a_late_round() -> None:
    made = plan("cohort=all", "mechanism.noise_multiplier=2", "mechanism.noise_schedule=[4,1]",
                "run.num_rounds=2", *UNLIMITED)  # fmt: skip
    first, last = made.events_of(1)[0], made.events_of(2)[0]
    early = made.epsilon_after({first: 2, last: 1}, {first: 1})
    late = made.epsilon_after({first: 1, last: 2}, {last: 1})
    straight = made.epsilon_after({first: 1, last: 1})
    assert straight < early < late
    assert early == pytest.approx(
        Pld(discretization=1e-4).epsilon({first: 2, last: 1}, 1e-5), rel=1e-12
    )


def test_the_gate_refuses_a_late_round_that_an_early_one_would_have_fitted() -> None:
    made = plan("cohort=all", "mechanism.noise_multiplier=8", "mechanism.noise_schedule=0.6",
                "run.num_rounds=10", "privacy.target_epsilon=1.5")  # fmt: skip
    affordable = made.affordable_rounds()
    assert 0 < affordable < 10
    assert made.within_budget(made.charges(affordable - 1))
    assert not made.within_budget(made.charges(affordable))
    # The same charges, but the round to come is the first one's noise: that would do.
    assert made.within_budget(made.charges(affordable), round=1)


def test_round_robin_by_turns_costs_what_its_last_clients_pay() -> None:
    """10 of 100 by turns, 100 rounds: the worst client has rounds 10, 20, ..., 100."""
    made = plan("cohort=round_robin", "mechanism.noise_multiplier=2", "accountant=gdp",
                "mechanism.noise_schedule=0.99", "run.num_rounds=100", *UNLIMITED)  # fmt: skip
    mu = math.sqrt(sum((2 * 0.99 ** (r - 1)) ** -2 for r in range(10, 101, 10)))
    exact = Gdp().epsilon({replace(EVENT, noise_multiplier=1 / mu): 1}, 1e-5)
    assert made.guarantees(100)[0].epsilon == pytest.approx(exact, rel=1e-9)
    worst_ten = math.sqrt(sum((2 * 0.99 ** (r - 1)) ** -2 for r in range(91, 101)))
    loose = Gdp().epsilon({replace(EVENT, noise_multiplier=1 / worst_ten): 1}, 1e-5)
    assert exact < 0.95 * loose


def test_record_level_schedules_are_accounted_and_calibrated_too() -> None:
    made = make_plan(
        compose(["training=dp_sgd", "training.noise_schedule=0.9", "run.num_rounds=8",
                 "privacy.target_epsilon=5", "accountant=rdp"]), 100)  # fmt: skip
    scale = made.training_noise_multiplier
    assert scale is not None
    plain = RdpAccountant()
    for r in range(8):
        step = dp_accounting.PoissonSampledDpEvent(
            0.2, dp_accounting.GaussianDpEvent(scale * 0.9**r)
        )
        plain.compose(step, 4)
    assert plain.get_epsilon(1e-4) == pytest.approx(5.0, rel=1e-3)
    assert made.epsilon_after(made.charges(8)) == pytest.approx(plain.get_epsilon(1e-4), rel=1e-6)


def test_the_split_of_simple_takes_each_rounds_own_noise() -> None:
    simple = Simple(formula="analytic")
    made = plan("cohort=all", "mechanism.noise_multiplier=9", "run.num_rounds=3",
                "mechanism.noise_schedule=[3,2,1]", "accountant=simple", *UNLIMITED)  # fmt: skip
    singles = [
        simple.epsilon({replace(EVENT, noise_multiplier=z): 1}, 1e-5 / 3) for z in (27.0, 18.0, 9.0)
    ]
    assert made.guarantees(3)[0].epsilon == pytest.approx(sum(singles), rel=1e-9)


def test_plan_and_history_tell_each_rounds_noise() -> None:
    made = plan("mechanism.noise_multiplier=8", "mechanism.noise_schedule=0.5", "run.num_rounds=3",
                "mechanism.clipping_norm=0.5", *UNLIMITED)  # fmt: skip
    assert made.to_json()["round_noise_multipliers"] == {"CLIENT": [8.0, 4.0, 2.0]}
    assert [made.bound_noise(r) for r in (1, 2, 3)] == [(0.5, 4.0), (0.5, 2.0), (0.5, 1.0)]
    assert made.summary()["client-level noise multiplier"] == "8 in round 1, 2 in the last"
    there_and_back = plan("mechanism.noise_multiplier=8", "mechanism.noise_schedule=[1,3,1]",
                          "run.num_rounds=3", *UNLIMITED)  # fmt: skip
    assert there_and_back.summary()["client-level noise multiplier"] != "8"
    constant = plan("mechanism.noise_multiplier=8", *UNLIMITED)
    assert constant.to_json()["round_noise_multipliers"] == {}
    assert constant.summary()["client-level noise multiplier"] == "8"


def test_levels_that_are_equal_are_grouped() -> None:
    made = plan("cohort=poisson", "mechanism.noise_multiplier=2", "run.num_rounds=6",
                "mechanism.noise_schedule=[2,2,2,1,1,1]", *UNLIMITED)  # fmt: skip
    assert Counter(made.charges(6).values()) == {3: 2}


@pytest.mark.slow
def test_a_hundred_different_sampled_rounds_are_calibrated_in_seconds() -> None:
    started = time.process_time()
    made = plan("cohort=poisson", "mechanism.noise_schedule=0.99", "run.num_rounds=100",
                "privacy.target_epsilon=4")  # fmt: skip
    assert time.process_time() - started < 30
    assert made.guarantees(100)[0].epsilon == pytest.approx(4.0, rel=1e-3)
