"""The table of all clients: each one's own bound, the headline is its worst row, never a sum."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fl_app.accounting.client_table import client_table, table_lines
from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.overrides import compose

TURNS = [
    "mechanism=central_gaussian", "mechanism.noise_multiplier=2", "privacy.target_epsilon=null",
    "accountant=gdp", "cohort=round_robin", "cohort.fraction=null", "cohort.size=4",
]  # fmt: skip


def plan(*overrides: str) -> PrivacyPlan:
    return make_plan(compose([*TURNS, *overrides]))


def closed_form(multipliers: list[float], delta: float = 1e-4) -> float:
    mu = sum(z**-2 for z in multipliers) ** 0.5

    def excess(epsilon: float) -> float:
        upper = norm.cdf(mu / 2 - epsilon / mu)
        return float(upper - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta)

    return float(brentq(excess, 0, 200)) if mu else 0.0


def members(numbers: str) -> list[int]:
    ends = [part.partition("-") for part in numbers.split(", ")]
    return [c for a, _, b in ends for c in range(int(a), int(b or a) + 1)]


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 7])
def test_by_turns_every_client_has_the_bound_of_its_own_rounds(num_rounds: int) -> None:
    """10 clients, 4 a round: some take part once more than others, or not at all."""
    p = plan()
    asked = np.zeros(10, int)
    for round in range(1, num_rounds + 1):
        asked[p.cohort.sample(10, round, np.random.default_rng(0))] += 1
    rows = client_table(p, p.charges(num_rounds), {})
    assert sorted(c for row in rows for c in members(row.numbers)) == list(range(10))
    for row in rows:
        assert row.count == len(members(row.numbers))
        for client in members(row.numbers):
            assert row.rounds == asked[client]
            assert row.epsilon == pytest.approx(closed_form([2.0] * asked[client]), rel=1e-6)
    assert max(row.epsilon or 0 for row in rows) == p.guarantees(num_rounds)[0].epsilon


def test_under_a_schedule_no_client_costs_more_than_its_row() -> None:
    p = plan("mechanism.noise_schedule=0.8", "run.num_rounds=7")
    rows = client_table(p, p.charges(7), {})
    for row in rows:
        for client in members(row.numbers):
            own = [
                2 * 0.8 ** (round - 1)
                for round in range(1, 8)
                if client in p.cohort.sample(10, round, np.random.default_rng(0))
            ]
            assert closed_form(own) <= (row.epsilon or 0) * (1 + 1e-6)
    assert max(row.epsilon or 0 for row in rows) == pytest.approx(p.guarantees(7)[0].epsilon)


def test_a_round_made_again_counts_for_everybody_who_was_asked() -> None:
    p = plan()
    (event,) = p.events
    rows = client_table(p, {event: 3}, {event: 1})  # rounds 1, 2 and 2 again: client 8 and 9 once
    assert [(row.numbers, row.rounds) for row in rows] == [("0-7", 1), ("8-9", 0)]
    assert rows[0].epsilon == pytest.approx(closed_form([2.0, 2.0]), rel=1e-6)
    assert rows[1].epsilon == 0


@pytest.mark.parametrize("cohort", ["all", "poisson", "fixed_size"])
def test_other_samplers_may_ask_everybody_every_round(cohort: str) -> None:
    settings = compose(["training.noise_multiplier=2", "privacy.target_epsilon=null",
                        f"cohort={cohort}", "federation.population=20"])  # fmt: skip
    p = make_plan(settings)
    (row,) = client_table(p, p.charges(30), {})
    assert (row.numbers, row.count, row.rounds) == ("0-19", 20, 30)
    assert row.epsilon == p.guarantees(30)[0].epsilon  # of one client, not 20 times as much
    assert table_lines([row])[0].startswith("clients 0-19: asked in at most 30 rounds, epsilon ")


def test_without_privacy_no_row_has_an_epsilon() -> None:
    p = plan("run.seeded_noise=true")
    assert {row.epsilon for row in client_table(p, p.charges(3), {})} == {None}
    none = make_plan(compose(["training=sgd", "privacy.target_epsilon=null"]))
    assert client_table(none, {}, {}) == ()
