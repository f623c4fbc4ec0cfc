"""What a node charges: un-amplified, never too little for a record, and summed by a valid bound."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

from fl_app import rng
from fl_app.accounting.node_charge import (
    ACCOUNTANTS,
    as_record_event,
    ledger_guarantees,
    node_events,
    planned_charge,
    record_epsilon,
    request_events,
)
from fl_app.accounting.plan import make_plan
from fl_app.accounting.rdp import Rdp
from fl_app.errors import AccountingError
from fl_app.models import set_flat_parameters
from fl_app.overrides import compose
from fl_app.plugins import TrainingJob, Transform
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)
from fl_app.stages import ClientPartition, LedgerEntry, RoundOrder, Table

DELTA = 1e-5
CLIENT = PrivacyEvent(
    unit=PrivacyUnit.CLIENT,
    view=View.SERVER,
    relation=NeighboringRelation.ZERO_OUT,
    noise=NoiseKind.GAUSSIAN,
    noise_multiplier=1.386,
)
RECORD = PrivacyEvent(
    unit=PrivacyUnit.RECORD,
    view=View.SERVER,
    relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    noise=NoiseKind.GAUSSIAN,
    noise_multiplier=1.0,
    sampling=Sampling.POISSON,
    sampling_rate=0.125,
    steps=8,
)
ORDER = RoundOrder(
    round=1, clipping_norm=1.0, noise_multiplier=2.0, training_noise_multiplier=None, nominal_rows=9
)
UNLIMITED = ["privacy.target_epsilon=null"]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of Gaussian DP (Dong, Roth and Su 2019, arXiv:1905.02383, corollary 1)."""

    def excess(epsilon: float) -> float:
        lower = norm.logcdf(-mu / 2 - epsilon / mu)
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + lower) - delta

    return float(brentq(excess, 0.0, 10 * mu**2 + 10 * mu))


def entries(*requests: list[PrivacyEvent]) -> list[LedgerEntry]:
    rows = [(number, event) for number, events in enumerate(requests, 1) for event in events]
    return [
        LedgerEntry(seq=seq, round=request, event=event.to_json(), previous="", digest="")
        for seq, (request, event) in enumerate(rows, 1)
    ]


def epsilons(*requests: list[PrivacyEvent]) -> dict[tuple[str, str], float | None]:
    """The statement after these requests by unit and accountant; (unit, "") without a bound."""
    rows = ledger_guarantees(entries(*requests), DELTA)
    return {(row.unit, row.accountant): row.epsilon for row in rows}


# What one request is charged.


@pytest.mark.parametrize(
    "cohort",
    [
        ["cohort=poisson", "cohort.sampling_rate=0.1"],
        ["cohort=fixed_size", "cohort.size=10", "accountant=rdp"],
        ["cohort=round_robin", "cohort.size=10", "cohort.fraction=null"],
        ["cohort=all"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_central_noise_is_charged_without_amplification_whatever_the_sampler_says(
    cohort: list[str],
) -> None:
    settings = compose(
        ["mechanism=central_gaussian", "mechanism.noise_multiplier=2", *cohort, *UNLIMITED,
         "federation.population=100"]
    )  # fmt: skip
    expected = replace(CLIENT, view=View.OBSERVER, noise_multiplier=2.0)
    assert request_events(settings, ORDER, 10) == [expected]


def test_local_noise_and_record_level_noise_are_both_charged() -> None:
    settings = compose(
        ["mechanism=local_gaussian", "mechanism.noise_multiplier=2", "training=dp_sgd",
         "training.noise_multiplier=1.5", "training.batch_rate=0.125", "training.local_steps=8",
         *UNLIMITED]
    )  # fmt: skip
    order = replace(ORDER, training_noise_multiplier=1.5)
    assert request_events(settings, order, 10) == [
        replace(CLIENT, noise_multiplier=2.0),
        replace(RECORD, noise_multiplier=1.5),
    ]


def test_the_noise_that_is_charged_is_that_of_the_order() -> None:
    """It is the order that a client's noise is made from, not the settings."""
    settings = compose(["mechanism=local_gaussian", "mechanism.noise_multiplier=9", *UNLIMITED])
    assert request_events(settings, ORDER, 10)[0].noise_multiplier == 2.0


@pytest.mark.parametrize("kind", ["distributed_discrete_gaussian", "distributed_skellam"])
def test_of_noise_shares_a_node_charges_its_own_alone(kind: str) -> None:
    settings = compose(
        [f"mechanism={kind}", "mechanism.noise_multiplier=12", "mechanism.min_survivors=10",
         "mechanism.assumed_colluders=1", "mechanism.scale=1000", *UNLIMITED]
    )  # fmt: skip
    (event,) = request_events(settings, replace(ORDER, noise_multiplier=12.0), 100)
    assert event.shares is not None
    assert (event.shares.num_shares, event.view) == (1, View.SERVER)
    assert event.noise_multiplier == pytest.approx(12 / 3)
    bounds = epsilons([event])
    # Fine integers: a little more than the continuous noise of multiplier 4, and of 2 for a record.
    for unit, z in (("CLIENT", 4.0), ("RECORD", 2.0)):
        rdp = Rdp().epsilon({replace(CLIENT, noise_multiplier=z): 1}, DELTA)
        assert rdp <= (bounds[(unit, "rdp")] or 0.0) <= 1.02 * rdp


@pytest.mark.parametrize(
    "overrides",
    [
        ["mechanism=none", "training=sgd"],
        ["mechanism=local_gaussian", "mechanism.noise_multiplier=0"],
        ["mechanism=local_gaussian", "mechanism.noise_multiplier=2", "run.seeded_noise=true"],
    ],
    ids=["no privacy", "no noise", "noise that can be repeated"],
)
def test_a_request_without_noise_costs_everything(overrides: list[str]) -> None:
    settings = compose([*overrides, *UNLIMITED])
    z = settings.noise_multiplier_of(PrivacyUnit.CLIENT)
    events = request_events(settings, replace(ORDER, noise_multiplier=z), 10)
    assert [event.noise_multiplier for event in events] == [0.0]
    assert record_epsilon(dict.fromkeys(events, 1), DELTA) == math.inf
    assert set(epsilons(events).values()) == {None}


def test_a_part_without_noise_beside_a_noised_one_releases_nothing_of_its_own() -> None:
    bare = replace(RECORD, noise_multiplier=0.0)
    assert node_events([CLIENT, bare], seeded=False) == [CLIENT]
    assert node_events([replace(CLIENT, noise_multiplier=0.0), RECORD], seeded=False) == [RECORD]


# What charges add up to.


def test_ten_answered_requests_cost_what_ten_unsampled_gaussians_cost() -> None:
    """10 of 100 rounds at z 1.386: 11.8, not the 1.5 of events that were sampled at rate 0.1."""
    found = epsilons(*[[CLIENT]] * 10)
    exact = gaussian_epsilon(math.sqrt(10) / 1.386, DELTA)
    assert exact == pytest.approx(11.77, abs=0.005)
    assert exact <= found["CLIENT", "pld"] <= exact * 1.001
    assert exact <= found["CLIENT", "rdp"]


def test_for_a_record_the_same_noise_counts_half() -> None:
    found = epsilons(*[[CLIENT]] * 10)
    exact = gaussian_epsilon(2 * math.sqrt(10) / 1.386, DELTA)
    assert exact == pytest.approx(29.17, abs=0.005)
    assert exact <= found["RECORD", "pld"] <= exact * 1.001
    assert record_epsilon({CLIENT: 10}, DELTA) == found["RECORD", "pld"]


def test_laplace_noise_counts_half_for_a_record_too() -> None:
    """L1 clipping: a record moves the vector by up to 2C; epsilon 2 / z a release at delta 0."""
    laplace = replace(CLIENT, noise=NoiseKind.LAPLACE, noise_multiplier=20.0)
    one = record_epsilon({laplace: 1}, 1e-12)
    assert one == pytest.approx(2 / 20.0, rel=1e-3)
    assert one == record_epsilon({as_record_event(laplace): 1}, 1e-12)


def test_noise_whose_bound_for_a_record_is_not_known_has_none() -> None:
    odd = replace(CLIENT, noise="odd")  # type: ignore[arg-type]
    with pytest.raises(AccountingError, match="odd"):
        as_record_event(odd)
    assert record_epsilon({odd: 1}, DELTA) == math.inf


def test_record_level_requests_cost_their_own_poisson_draws() -> None:
    """Golden values of scenario S01; there is no client-level guarantee without such noise."""
    found = epsilons(*[[RECORD]] * 5)
    assert found["RECORD", "rdp"] == pytest.approx(6.59, abs=0.005)
    assert found["RECORD", "pld"] == pytest.approx(5.79, abs=0.01)
    assert found["CLIENT", ""] is None


def test_both_charges_of_a_request_compose_for_a_record() -> None:
    """Without sampling all noises are Gaussians, whose (sensitivity / std)^2 add up."""
    full = replace(RECORD, sampling=Sampling.NONE, sampling_rate=1.0, noise_multiplier=3.0, steps=2)
    client = replace(CLIENT, noise_multiplier=4.0)
    found = epsilons(*[[client, full]] * 5)
    exact = gaussian_epsilon(math.sqrt(5 * (2 / 4.0) ** 2 + 5 * 2 / 3.0**2), DELTA)
    assert exact <= found["RECORD", "pld"] <= exact * 1.001
    assert found["CLIENT", "pld"] == epsilons(*[[client]] * 5)["CLIENT", "pld"]


def test_one_request_without_client_level_noise_ends_the_client_level_guarantee() -> None:
    assert epsilons([CLIENT], [RECORD], [CLIENT])["CLIENT", ""] is None
    assert epsilons([CLIENT, RECORD], [CLIENT])["CLIENT", "pld"] is not None


@given(
    clients=st.integers(0, 20), records=st.integers(0, 20), z=st.sampled_from([0.5, 1.0, 4.0, 30.0])
)
def test_a_budget_is_never_smaller_than_any_part_of_it(
    clients: int, records: int, z: float
) -> None:
    event = replace(CLIENT, noise_multiplier=z)
    both = rdp_epsilon(event, clients, records)
    assert both >= max(rdp_epsilon(event, clients, 0), rdp_epsilon(event, 0, records))
    assert rdp_epsilon(event, clients + 1, records) > both


def rdp_epsilon(event: PrivacyEvent, clients: int, records: int) -> float:
    return record_epsilon({event: clients, RECORD: records}, DELTA, at_most=math.inf)


def test_the_slow_accountant_is_asked_near_the_limit_only() -> None:
    quick, exact = (epsilons(*[[CLIENT]] * 10)["RECORD", kind] for kind in ("rdp", "pld"))
    assert [accountant.kind for accountant in ACCOUNTANTS] == ["rdp", "pld"]
    assert quick is not None
    assert record_epsilon({CLIENT: 10}, DELTA, at_most=quick) == quick
    assert record_epsilon({CLIENT: 10}, DELTA, at_most=quick - 1e-6) == exact


# A record moves a clipped update by 2C.


class AsStored(Transform):
    def __call__(self, stored: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(stored, np.float32))


def sent(rows: list[int], order: RoundOrder) -> np.ndarray:
    """What a client with these rows sends under CENTRAL: real training, real clipping, no noise.

    Row 0 is class 0; row 1 is three times as far out and of class 1, so it pulls thrice as hard.
    """
    table = Table(
        features=np.array([[1.0], [3.0]], np.float32),
        labels=np.array([0, 1]),
        transform=AsStored(),
    )
    settings = compose(
        ["mechanism=central_gaussian", "mechanism.noise_multiplier=2", "training.batch_size=2",
         *UNLIMITED]
    )  # fmt: skip
    model = nn.Linear(1, 2, bias=False)
    set_flat_parameters(model, np.zeros(2, np.float32))
    job = TrainingJob(
        noise_multiplier=None,
        nominal_rows=2,
        batches=rng.stream(0, "batches"),
        noise=rng.noise_source("record-noise", 1, 0, seed=None),
        device=torch.device("cpu"),
    )
    partition = ClientPartition(client=0, table=table, rows=np.array(rows, np.int64))
    update = settings.training.train(model, partition, job)
    noise = rng.noise_source("client-noise", 1, 0, seed=None)
    return settings.mechanism.privatize(update, order, noise).vector_P


def test_one_record_can_turn_a_clipped_update_round() -> None:
    """The pair that needs all of 2C: with ZERO_OUT's C the noise would count twice what it does."""
    order = replace(ORDER, clipping_norm=0.01)
    without, added = sent([0], order), sent([0, 1], order)
    assert np.linalg.norm(without - added) == pytest.approx(2 * 0.01, rel=1e-5)
    assert np.linalg.norm(sent([], order) - added) == pytest.approx(0.01, rel=1e-5)


# What `dpfl plan` says.


def test_a_plan_tells_the_most_and_the_expected_charge_of_a_node() -> None:
    plan = make_plan(
        compose(
            ["mechanism=central_gaussian", "mechanism.noise_multiplier=1.386", "cohort=poisson",
             "cohort.sampling_rate=0.1", "federation.population=1000", "run.num_rounds=100",
             "privacy.target_delta=1e-5", *UNLIMITED]
        )
    )  # fmt: skip
    charge = planned_charge(plan)
    assert (charge.most_requests, charge.expected_requests) == (100, 10)
    client, record = charge.expected
    assert client.epsilon == pytest.approx(11.77, abs=0.01)
    assert record.epsilon == pytest.approx(29.17, abs=0.02)
    assert (client.relation, record.relation) == ("ZERO_OUT", "ADD_OR_REMOVE_ONE")
    assert client.view is View.OBSERVER
    assert any("the server adds the noise" in text for text in client.assumptions)
    worst = gaussian_epsilon(10 / 1.386, DELTA)
    assert worst <= charge.most[0].epsilon <= worst * 1.001
    assert charge.to_json()["most"][0]["epsilon"] == charge.most[0].epsilon


def test_a_plan_counts_turns_where_clients_take_turns() -> None:
    plan = make_plan(
        compose(
            ["mechanism=local_gaussian", "mechanism.noise_multiplier=3", "cohort=round_robin",
             "cohort.fraction=null",
             "cohort.size=3", "federation.population=10", "run.num_rounds=11", *UNLIMITED]
        )
    )  # fmt: skip
    charge = planned_charge(plan)
    assert (charge.most_requests, charge.expected_requests) == (4, 4)
    assert charge.most[0].view is View.SERVER


def test_a_plan_with_a_schedule_charges_each_round_at_its_own_noise() -> None:
    settings = compose(
        ["mechanism=local_gaussian", "mechanism.noise_multiplier=8", "run.num_rounds=4",
         "mechanism.noise_schedule=[1,0.5,2,4]", "cohort=poisson", "cohort.sampling_rate=0.5",
         "training=sgd", *UNLIMITED]
    )  # fmt: skip
    charge = planned_charge(make_plan(settings))
    for row, levels in ((charge.most[0], (1, 0.5, 2, 4)), (charge.expected[0], (0.5, 1))):
        exact = gaussian_epsilon(math.hypot(*(1 / (8 * level) for level in levels)), row.delta)
        assert exact <= (row.epsilon or 0.0) <= 1.001 * exact


def test_a_plan_without_noise_promises_a_node_nothing() -> None:
    plan = make_plan(compose(["training=sgd", *UNLIMITED]))
    assert [row.epsilon for row in planned_charge(plan).most] == [None, None]
    assert all(row["epsilon"] is None for row in planned_charge(plan).to_json()["most"])


def test_a_number_that_cannot_be_computed_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflows(*_: object) -> float:
        raise OverflowError

    quick = epsilons([CLIENT])["RECORD", "rdp"]
    monkeypatch.setattr(type(ACCOUNTANTS[1]), "epsilon", overflows)
    assert record_epsilon({CLIENT: 1}, DELTA) == quick
    monkeypatch.setattr(type(ACCOUNTANTS[0]), "epsilon", overflows)
    assert record_epsilon({CLIENT: 1}, DELTA) == math.inf


def test_the_least_noise_that_can_be_asked_for_still_has_a_number() -> None:
    """1,000 releases at z 0.001: the loss is of the order of 1000 (2 / z)^2 / 2, far beyond exp."""
    least = replace(CLIENT, noise_multiplier=1e-3)
    assert record_epsilon({least: 1000}, DELTA) == pytest.approx(2e9, rel=0.2)
