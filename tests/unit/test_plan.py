"""The plan: the rows a run states, what the target binds, when the gate closes (rules 8 to 10)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fl_app.accounting import participation
from fl_app.accounting.ledger import Ledger
from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.accounting.pld import Pld
from fl_app.accounting.rdp import Rdp
from fl_app.errors import SettingsError
from fl_app.overrides import compose
from fl_app.plugins import Accountant, Cohort
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)

CENTRAL = ["mechanism=central_gaussian", "mechanism.noise_multiplier=1.0", "training=sgd"]
LOCAL = ["mechanism=local_gaussian", "mechanism.noise_multiplier=40.0", "training=sgd"]
RECORD = ["training=dp_sgd", "training.noise_multiplier=1.406", "training.batch_rate=0.2"]
POISSON = ["cohort=poisson", "cohort.sampling_rate=0.1", "federation.population=1000"]


def plan(*overrides: str, nominal_rows: int | None = 143) -> PrivacyPlan:
    return make_plan(compose(list(overrides)), nominal_rows)


def rows(plan: PrivacyPlan, num_rounds: int = 30) -> dict[str, object]:
    return {row.name: row for row in plan.guarantees(num_rounds)}


@dataclass(frozen=True)
class Says(Accountant):
    """An accountant that says a fixed epsilon and keeps what it was asked."""

    value: float
    asked: list[dict[PrivacyEvent, int]]

    def refusal(self, event: PrivacyEvent) -> str | None:
        return None

    def epsilon(self, events: Mapping[PrivacyEvent, int], delta: float) -> float:
        self.asked.append(dict(events))
        return self.value


class EveryThirdRound(Cohort):
    """Stands in for round-robin: a client is asked in every third round."""

    def sample(self, population, round, stream):
        raise NotImplementedError

    def expected_size(self, population):
        return population / 3

    def check(self, population):
        pass

    def event(self, noise, noise_multiplier, population, *, amplified=True):
        raise NotImplementedError

    def max_participations(self, num_rounds, population):
        return -(-num_rounds // 3)


# Rows.


def test_central_noise_protects_from_the_observer_and_not_from_the_server():
    p = plan(*CENTRAL, *POISSON)
    stated = rows(p)
    assert list(stated) == ["CLIENT against OBSERVER", "CLIENT against SERVER"]
    observer, server = stated.values()
    assert observer.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    assert observer.epsilon == pytest.approx(
        Pld(discretization=1e-4).epsilon({p.events[0]: 30}, 1e-4)
    )
    assert p.events[0].sampling_rate == 0.1
    assert (server.epsilon, server.private, server.accountant) == (None, False, "")
    assert server.assumptions == ("the server sees clipped updates without noise",)
    assert p.epsilon_of == "CLIENT against OBSERVER"


def test_local_noise_protects_from_both_and_takes_no_credit_for_sampling():
    p = plan(*LOCAL, *POISSON)
    server, observer = rows(p).values()
    assert (server.name, observer.name) == ("CLIENT against SERVER", "CLIENT against OBSERVER")
    assert p.epsilon_of == "CLIENT against SERVER"
    assert server.epsilon == observer.epsilon
    unsampled = replace(p.events[0], sampling=Sampling.NONE, sampling_rate=1.0)
    assert p.events == (unsampled,)
    assert server.epsilon == Pld(discretization=1e-4).epsilon({unsampled: 30}, 1e-4)
    assert any("one" in text and "un-amplified" in text for text in observer.assumptions)


def test_record_level_protects_from_both_over_all_rounds_whatever_the_cohort():
    everybody, sampled = plan(*RECORD), plan(*RECORD, *POISSON)
    server, observer = rows(everybody).values()
    assert (server.name, observer.name) == ("RECORD against SERVER", "RECORD against OBSERVER")
    assert everybody.epsilon_of == "RECORD against SERVER"
    assert server.epsilon == observer.epsilon
    assert server.epsilon == pytest.approx(8.0, abs=0.01)  # issue: z 1.406, 120 steps, rate 0.2
    assert rows(sampled)["RECORD against SERVER"].epsilon == server.epsilon
    assert any("disjoint" in text and "worst client" in text for text in server.assumptions)


def test_two_units_are_stated_and_charged_side_by_side():
    p = plan(*CENTRAL, *RECORD, *POISSON, "training=dp_sgd")
    assert [e.unit for e in p.events] == [PrivacyUnit.CLIENT, PrivacyUnit.RECORD]
    stated = rows(p)
    assert len(stated) == 4
    assert p.epsilon_of == "CLIENT against OBSERVER"
    alone = rows(plan(*RECORD))["RECORD against SERVER"].epsilon
    assert stated["RECORD against SERVER"].epsilon == alone
    other = plan(*CENTRAL, *RECORD, *POISSON, "training=dp_sgd", "privacy.privacy_unit=record")
    assert other.epsilon_of == "RECORD against SERVER"


def test_nothing_private_is_said_to_be_not_private():
    p = plan("training=sgd", "mechanism=none", "privacy.target_epsilon=null")
    (row,) = p.guarantees(30)
    assert (row.epsilon, row.private, row.assumptions) == (None, False, ("nothing adds noise",))
    assert (p.events, p.epsilon_of, p.bound_event) == ((), None, None)
    assert p.epsilon_after({}) is None
    assert p.within_budget({})
    assert p.bound_noise() == (None, 0.0)


def test_zero_noise_is_said_to_be_not_private():
    p = plan(*RECORD, "training.noise_multiplier=0", "privacy.target_epsilon=null")
    for row in p.guarantees(1):
        assert (row.epsilon, row.assumptions) == (None, ("nothing adds noise",))
    assert any("NOT PRIVATE" in text for text in p.warnings)


def test_seeded_noise_takes_every_epsilon_away_but_keeps_the_gate():
    p, seeded = plan(*RECORD), plan(*RECORD, "run.seeded_noise=true")
    for row in seeded.guarantees(1):
        assert row.epsilon is None
        assert "NOT PRIVATE" in row.assumptions[0]
    event = p.events[0]
    assert seeded.epsilon_after({event: 1}) is None
    assert any("NOT PRIVATE" in text for text in seeded.warnings)
    for count in (0, 100):
        assert seeded.within_budget({event: count}) == p.within_budget({event: count})


def test_fixed_size_is_stated_under_replace_one():
    p = plan(*CENTRAL, "cohort=fixed_size", "federation.population=100", "accountant=rdp")
    observer = rows(p)["CLIENT against OBSERVER"]
    assert observer.relation is NeighboringRelation.REPLACE_ONE
    assert any("2C" in text for text in observer.assumptions)


def test_amplification_is_conditional_on_hidden_cohorts_and_the_seed():
    observer = rows(plan(*CENTRAL, *POISSON))["CLIENT against OBSERVER"]
    text = "; ".join(observer.assumptions)
    assert "how many, stays hidden from the observer" in text
    assert "run.seed" in text
    plain = "; ".join(rows(plan(*CENTRAL))["CLIENT against OBSERVER"].assumptions)
    assert "hidden" not in plain
    assert "run.seed" not in plain


def test_skipping_rounds_costs_the_amplification_and_is_an_assumption():
    p = plan(*CENTRAL, *POISSON, "federation.on_missing=skip", "privacy.target_epsilon=null")
    assert p.events[0].sampling is Sampling.NONE
    observer = rows(p)["CLIENT against OBSERVER"]
    assert any("availability independent of data" in text for text in observer.assumptions)


# Calibration.


def test_the_main_job_is_calibrated_to_its_target():
    p = plan("training.batch_rate=0.2", "training.local_steps=4", "run.num_rounds=30")
    assert p.training_noise_multiplier == pytest.approx(1.406, abs=6e-4)
    assert p.mechanism_noise_multiplier is None
    assert p.events[0].noise_multiplier == p.training_noise_multiplier
    assert 7.99 < p.epsilon_after({p.events[0]: 30}) <= 8.0
    # Every one of the planned rounds is allowed, and not one more.
    allowed = [p.within_budget({p.events[0]: n}) for n in range(31)]
    assert allowed == [True] * 30 + [False]


def test_the_configured_noise_is_kept():
    assert plan(*RECORD).training_noise_multiplier == 1.406
    assert plan(*CENTRAL).mechanism_noise_multiplier == 1.0


def test_distributed_noise_is_refused_without_the_number_of_parameters():
    settings = compose(["mechanism=distributed_skellam"])
    with pytest.raises(SettingsError, match="accounted with the number of parameters"):
        make_plan(settings, 143)


# The gate.


def test_the_gate_closes_before_the_target_would_be_exceeded():
    p = plan(*RECORD, "privacy.target_epsilon=3.0")
    event, count = p.events[0], 0
    while p.within_budget({event: count}):
        count += 1
    assert 0 < count < 30
    assert p.epsilon_after({event: count}) <= 3.0 < p.epsilon_after({event: count + 1})


def test_an_rdp_gate_stops_earlier_than_a_pld_gate():
    pld, rdp = plan(*RECORD), plan(*RECORD, "accountant=rdp")
    event = pld.events[0]
    assert pld.within_budget({event: 29})
    assert not rdp.within_budget({event: 29})


def test_rdp_may_accept_early():
    p = plan(*RECORD)
    strict = Says(value=100.0, asked=[])
    assert Rdp().epsilon({p.events[0]: 1}, 1e-4) < 8.0
    assert replace(p, accountant=strict).within_budget({})


def test_rdp_never_refuses_for_another_accountant():
    p = plan(*RECORD)
    event = p.events[0]
    assert Rdp().epsilon({event: 35}, 1e-4) > 8.0
    own = Says(value=7.9, asked=[])
    assert replace(p, accountant=own).within_budget({event: 34})
    assert {event: 35} in own.asked


def test_refused_if_neither_bound_allows_it():
    p = plan(*RECORD)
    event = p.events[0]
    assert not replace(p, accountant=Says(value=8.1, asked=[])).within_budget({event: 34})


def test_a_planned_run_needs_no_accounting_round_by_round():
    p = plan(*RECORD)
    own = Says(value=8.0, asked=[])
    gated = replace(p, accountant=own)
    assert all(gated.within_budget({p.events[0]: n}) for n in range(30))
    assert own.asked == [{p.events[0]: 30}] * 30


def test_a_charge_too_much_is_not_covered_by_the_plan():
    p = plan("training.batch_rate=0.2", "training.local_steps=4", "run.num_rounds=30")
    event = p.events[0]
    assert p.within_budget({event: 29})
    assert not p.within_budget({event: 30})  # a kill has cost one charge: the last round is off


def test_without_a_target_every_round_is_allowed():
    p = plan(*RECORD, "privacy.target_epsilon=null")
    assert p.within_budget({p.events[0]: 10**6})


def test_charges_of_the_other_unit_do_not_count():
    p = plan(*CENTRAL, *RECORD, *POISSON, "training=dp_sgd")
    client, record = p.events
    assert p.epsilon_after({client: 3, record: 30}) == p.epsilon_after({client: 3})


def test_earlier_charges_at_another_noise_count():
    p = plan(*RECORD)
    event = p.events[0]
    noisier = replace(event, noise_multiplier=0.7)
    assert p.epsilon_after({event: 5, noisier: 5}) > p.epsilon_after({event: 5})
    assert not p.within_budget({event: 5, noisier: 30})


# How often one client is charged.


def test_only_rounds_in_which_a_client_can_be_asked_compose():
    everybody = plan(*LOCAL)
    thirds = replace(everybody, cohort=EveryThirdRound())
    event = everybody.events[0]
    assert thirds.epsilon_after({event: 30}) == everybody.epsilon_after({event: 10})
    assert thirds.epsilon_after({event: 1}) == everybody.epsilon_after({event: 1})


def test_amplified_rounds_all_compose_whoever_was_asked():
    p = plan(*CENTRAL, *POISSON)
    event = p.events[0]
    thirds = replace(p, cohort=EveryThirdRound())
    assert thirds.epsilon_after({event: 30}) == p.epsilon_after({event: 30})


# What is told to people and programs.


def test_delta_that_allows_publishing_one_unit_is_warned_about():
    client = plan(*CENTRAL, "federation.population=1000", "privacy.target_delta=1e-3")
    assert any("1/1000" in text and "CLIENT" in text for text in client.warnings)
    record = plan(*RECORD, "privacy.target_delta=1e-2", nominal_rows=143)
    assert any("1/143" in text and "RECORD" in text for text in record.warnings)
    fine = plan(*CENTRAL, "federation.population=1000", "privacy.target_delta=9e-4")
    assert fine.warnings == ()
    assert plan(*RECORD, nominal_rows=143).warnings == ()


def test_json_of_central_noise_has_the_stds_and_the_signal():
    p = plan(*CENTRAL, *POISSON, "mechanism.clipping_norm=0.5", "mechanism.noise_multiplier=2.0")
    values = json.loads(json.dumps(p.to_json(num_parameters=10_000), allow_nan=False))
    assert values["noise_std_of_sum"] == 2.0 * 0.5
    assert values["noise_std_of_mean"] == 1.0 / 100
    assert values["signal_to_noise"] == pytest.approx(0.5 / (0.01 * 100))
    assert values["private"] is True
    assert values["epsilon_of"] == "CLIENT against OBSERVER"
    names = {"unit", "view", "relation", "epsilon", "delta", "accountant", "assumptions", "private"}
    assert set(values["guarantees"][0]) == names
    assert values["guarantees"][1]["epsilon"] is None
    assert p.bound_noise() == (0.5, 1.0)


def test_local_noise_adds_up_over_the_cohort():
    values = plan(*LOCAL).to_json()
    assert values["noise_std_of_sum"] == pytest.approx(40.0 * 10**0.5)
    assert values["noise_std_of_mean"] == pytest.approx(40.0 / 10**0.5)
    assert values["signal_to_noise"] is None


def test_record_level_signal_is_that_of_one_step():
    p = plan(*RECORD, "training.clipping_norm=0.5", nominal_rows=100)
    std = 1.406 * 0.5 / (0.2 * 100)
    assert p.signal_to_noise(400) == pytest.approx(0.5 / (std * 20))
    assert plan(*RECORD, nominal_rows=None).signal_to_noise(400) is None


def test_json_has_no_infinity_without_noise():
    p = plan("training=sgd", "privacy.target_epsilon=null")
    values = json.loads(json.dumps(p.to_json(), allow_nan=False))
    assert (values["private"], values["guarantees"][0]["epsilon"]) == (False, None)


def test_summary_names_budget_and_noise():
    facts = plan(*CENTRAL, *POISSON).summary()
    assert facts["budget"] == ("epsilon 8 at delta 0.0001 over 30 rounds, CLIENT against OBSERVER")
    assert facts["client-level noise multiplier"] == "1"
    assert facts["expected cohort"] == "100"


def test_noise_kind_and_view_of_the_events():
    (event,) = plan(*LOCAL).events
    assert (event.noise, event.view) == (NoiseKind.GAUSSIAN, View.SERVER)


# Round-robin: only the rounds in which a client is asked compose, and none is forgotten.

ROUND_ROBIN = [
    "cohort=round_robin", "cohort.fraction=0.1", "federation.population=100",
    "privacy.target_delta=1e-5", "run.num_rounds=100",
]  # fmt: skip


def worst_client(cohort: Cohort, population: int, charged: list[int]) -> int:
    """How often the most asked client was asked in these charged rounds, by listing all."""
    asked = [c for r in charged for c in cohort.sample(population, r, None).tolist()]
    return max(asked.count(c) for c in range(population))


def test_ten_of_a_hundred_by_turns_compose_ten_of_a_hundred_rounds():
    p = plan(*CENTRAL, *ROUND_ROBIN, "privacy.target_epsilon=null")
    observer = rows(p, 100)["CLIENT against OBSERVER"]
    assert observer.relation is NeighboringRelation.ZERO_OUT
    assert observer.epsilon == pytest.approx(17.86, abs=0.005)  # the scenario table of the project
    assert any("10 of 100" in text and "schedule" in text for text in observer.assumptions)
    local = plan(
        *LOCAL, "mechanism.noise_multiplier=1", *ROUND_ROBIN, "privacy.target_epsilon=null"
    )
    assert rows(local, 100)["CLIENT against SERVER"].epsilon == observer.epsilon


@pytest.mark.parametrize(
    "charged",
    [
        [1, 1],
        [1, 1, 1, 1],
        [1, 2, 3, 3, 3],
        [1, 1, 2, 2, 3, 3, 4],
        [*range(1, 12), 11, *range(12, 21)],
        [*range(1, 11), 10, 11, 12, 12],
    ],
    ids=len,
)
def test_rounds_charged_twice_after_a_kill_never_under_count(tmp_path, charged):
    p = plan(*CENTRAL, *ROUND_ROBIN, "privacy.target_epsilon=null")
    (event,) = p.events
    own = Says(value=1.0, asked=[])
    gated = replace(p, accountant=own, target_epsilon=0.5)
    with Ledger.create(tmp_path / "ledger.sqlite", "run") as ledger:
        for r in charged:
            # The gate counts the round to come as it is counted once it is charged.
            gated.within_budget(ledger.counts(), ledger.repeats(), again=ledger.has_round(r))
            before = own.asked[-1]
            ledger.append(r, event)
            gated.epsilon_after(ledger.counts(), ledger.repeats())
            assert before == own.asked[-1]
        composed, repeated = own.asked[-1][event], len(charged) - len(set(charged))
        worst = worst_client(p.cohort, 100, charged)
        assert worst <= composed <= worst + repeated
        # Without the repeats it would be too few.
        if charged == [1, 1, 1, 1]:
            gated.epsilon_after(ledger.counts())
            assert own.asked[-1][event] == 1 < composed == 4


def test_rounds_of_another_noise_are_all_taken_for_rounds_of_one_client():
    p = plan(*CENTRAL, *ROUND_ROBIN, "privacy.target_epsilon=null")
    (event,) = p.events
    other = replace(event, noise_multiplier=3.0)
    own = Says(value=1.0, asked=[])
    # Rounds 1, 11 and 21 (one client's) at one noise, the others of 1 to 21 at another.
    replace(p, accountant=own).epsilon_after({event: 3, other: 18})
    assert own.asked == [{event: 3, other: 3}]


def test_the_schedule_is_calibrated_for_and_gates_after_the_last_turn():
    p = plan(*CENTRAL, "mechanism.noise_multiplier=null", *ROUND_ROBIN, "privacy.target_epsilon=5")
    (event,) = p.events
    once = Pld(discretization=1e-4).epsilon({event: 10}, 1e-5)
    assert 4.99 < once <= 5.0
    assert p.within_budget({event: 99})
    assert not p.within_budget({event: 100})
    assert not p.within_budget({event: 100}, {event: 1}, again=True)


def test_laplace_noise_is_told_by_its_std_and_accounted_by_its_scale():
    p = plan(
        "training=dp_sgd", "training.noise=laplace", "training.clipping_norm=50",
        "training.batch_rate=1", "training.local_steps=1", "training.noise_multiplier=10",
        "privacy.target_epsilon=null", "privacy.target_delta=1e-5", nominal_rows=600,
    )  # fmt: skip
    assert rows(p, 100)["RECORD against SERVER"].epsilon == pytest.approx(4.22, abs=0.005)
    norm, std = p.bound_noise()
    assert (norm, std) == (50.0, pytest.approx(2**0.5 * 10 * 50))
    # In the L1 norm: that of 400 Laplace noises is 400 scales on average.
    assert p.signal_to_noise(400) == pytest.approx(50 / (10 * 50 / 600 * 400))
    assert p.summary()["record-level noise"].startswith("laplace, scale")
    text = "; ".join(rows(p)["RECORD against SERVER"].assumptions)
    assert "continuous Laplace" in text
    assert "Gaussian" not in text


def test_client_level_laplace_is_told_by_its_std_and_calibrated_by_its_scale():
    p = plan(
        "mechanism=central_laplace", *POISSON, "mechanism.clipping_norm=20", "accountant=pld",
        "privacy.target_epsilon=2", "privacy.target_delta=1e-5",
    )  # fmt: skip
    z = p.mechanism_noise_multiplier
    assert rows(p)["CLIENT against OBSERVER"].epsilon == pytest.approx(2, rel=1e-3)
    norm, std = p.bound_noise()
    assert (norm, std) == (20.0, pytest.approx(2**0.5 * z * 20))
    assert p.noise_std_of_mean == pytest.approx(std / 100)
    assert p.signal_to_noise(400) == pytest.approx(20 / (z * 20 / 100 * 400))
    assert p.summary()["client-level noise"].startswith("laplace, scale")
    local = plan(
        "mechanism=local_laplace", "mechanism.noise_multiplier=10", "privacy.target_epsilon=null",
        "privacy.target_delta=1e-5",
    )  # fmt: skip
    assert rows(local, 100)["CLIENT against SERVER"].epsilon == pytest.approx(4.22, abs=0.005)
    assert local.noise_std_of_sum == pytest.approx(2**0.5 * 10 * 10 * 10**0.5)


SPLIT = [
    *ROUND_ROBIN[2:], "cohort=round_robin", "cohort.fraction=0.2", "training=dp_sgd",
    "training.batch_rate=1", "training.local_steps=1", "accountant=simple",
]  # fmt: skip


def test_the_split_is_calibrated_over_the_rounds_of_one_client():
    p = plan(*SPLIT, "privacy.target_epsilon=10", nominal_rows=600)
    stated = rows(p, 100)["RECORD against SERVER"]
    assert 9.99 < stated.epsilon <= 10.0
    assert stated.accountant == "simple"
    assert not any("NOT" in text for text in stated.assumptions + p.warnings)
    tight = plan(*SPLIT, "accountant=pld", "privacy.target_epsilon=10", nominal_rows=600)
    assert p.training_noise_multiplier > 2 * tight.training_noise_multiplier


@pytest.mark.parametrize(("target", "valid"), [(10, True), (19.9, True), (20, False), (30, False)])
def test_the_classic_formula_states_no_epsilon_where_it_is_no_bound(target, valid):
    p = plan(
        *SPLIT, "accountant.formula=classic", f"privacy.target_epsilon={target}", nominal_rows=600
    )
    z, (event,) = p.training_noise_multiplier, p.events
    assert z == pytest.approx((2 * np.log(1.25 / 5e-7)) ** 0.5 / (target / 20), rel=2e-4)
    if target == 20:  # calibration ends just below: take the noise that claims 1 a step exactly
        p = replace(p, events=(replace(event, noise_multiplier=z * (1 - 2e-4)),))
        p = replace(p, rows=tuple(replace(row, event=p.events[0]) for row in p.rows))
    for row in rows(p, 100).values():
        assert row.private is valid
        assert (row.epsilon is not None) is valid
        assert bool(row.accountant) is valid
        assert any("NOT a valid bound" in text for text in row.assumptions) is not valid
    if target == 30:
        assert any("NOT a valid bound" in text for text in p.warnings)
        assert p.to_json()["private"] is False
        assert p.epsilon_after({event: 100}) is None
        assert p.within_budget({event: 99})  # the gate goes on by the claim
        assert not p.within_budget({event: 100})


def test_the_gate_of_the_split_does_not_accept_by_a_tighter_accountant():
    p = plan(*SPLIT, "privacy.target_epsilon=10", nominal_rows=600)
    (event,) = p.events
    assert Rdp().epsilon({event: 21}, 1e-5) < 10.0
    assert p.within_budget({event: 99})
    assert not p.within_budget({event: 100})


def test_the_plan_says_how_many_rounds_a_budget_allows():
    overrides = ["training.noise_multiplier=1.0", "run.num_rounds=30"]
    plan = make_plan(compose(overrides), 143)
    affordable = plan.affordable_rounds()
    assert 0 < affordable < 30
    event = plan.bound_event
    assert (
        plan.epsilon_after({event: affordable}) <= 8 < plan.epsilon_after({event: affordable + 1})
    )
    assert plan.within_budget({event: affordable - 1})
    assert not plan.within_budget({event: affordable})
    assert make_plan(compose([]), 143).affordable_rounds() == 30


def test_a_tiny_expected_cohort_is_warned_of():
    base = ["mechanism=central_gaussian", "cohort=poisson"]
    assert any("may ask nobody" in w for w in make_plan(compose(base), 143).warnings)
    many = make_plan(compose([*base, "federation.population=1000"]), 143)
    assert not any("may ask nobody" in w for w in many.warnings)


def test_the_affordable_rounds_that_planning_found_are_not_searched_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = plan("training.noise_multiplier=1.4", "privacy.target_epsilon=2")
    monkeypatch.setattr(PrivacyPlan, "_count_affordable_rounds", lambda *_: pytest.fail("again"))
    assert 0 < found.affordable_rounds() < found.num_rounds


@pytest.mark.parametrize(
    "words",
    [
        ("training.noise_schedule=0.97", "privacy.target_epsilon=6"),
        ("mechanism=central_gaussian", "cohort=poisson", "mechanism.noise_schedule=0.97"),
    ],
)
def test_after_a_round_was_charged_again_the_gate_asks_the_accountant_once(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(*words, "run.num_rounds=20")
    event = made.bound_event
    assert event is not None
    rounds = [participation.in_round(event, made.schedules[event.unit], r) for r in range(1, 21)]
    counts, repeats = Counter(rounds[:6]), {rounds[5]: 1}
    counts.update(repeats)
    assert made.within_budget(counts, repeats, round=7)
    asked: list[int] = []
    own = type(made)._epsilon

    def count(self: PrivacyPlan, accountant: Any, composed: Any) -> float:
        asked.append(1)
        return own(self, accountant, composed)

    monkeypatch.setattr(PrivacyPlan, "_epsilon", count)
    last = made.affordable_rounds(repeats)
    assert 7 < last < 20  # the second charge of round 6 costs a round at the end
    for round in range(7, last + 1):
        asked.clear()
        assert made.within_budget(counts, repeats, round=round)
        assert len(asked) <= 1  # the planned whole, which is kept
        counts[rounds[round - 1]] += 1
    assert not made.within_budget(counts, repeats, round=last + 1)
