"""Accountant gdp: exact for Gaussians that are not sampled, refused for everything else.

Independent sources: mpmath at 60 digits on the duality of Gaussian differential privacy (Dong, Roth
and Su 2019, arXiv:1905.02383, corollary 2.13), numerical integration of the hockey-stick
divergence, and dp-accounting's PLD.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import mpmath
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.integrate import quad
from scipy.stats import norm

from fl_app.accounting.calibration import calibrate
from fl_app.accounting.gdp import Gdp
from fl_app.accounting.plan import make_plan
from fl_app.accounting.pld import Pld
from fl_app.accounting.rdp import Rdp
from fl_app.errors import AccountingError, SettingsError
from fl_app.overrides import compose
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)

GDP, PLD, RDP = Gdp(), Pld(discretization=1e-4), Rdp()


def event(z: float, **changes: object) -> PrivacyEvent:
    values: dict[str, object] = {
        "unit": PrivacyUnit.CLIENT,
        "view": View.OBSERVER,
        "relation": NeighboringRelation.ZERO_OUT,
        "noise": NoiseKind.GAUSSIAN,
        "noise_multiplier": z,
    }
    return PrivacyEvent(**(values | changes))


def exact_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        tail = mpmath.ncdf(-m / 2 - e / m)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * tail


@pytest.mark.parametrize("mu", [1e-3, 0.05, 1.0, 10.0, 40.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9, 1e-15])
def test_the_bound_is_exact_to_nine_digits_and_never_below(mu: float, delta: float) -> None:
    epsilon = GDP.epsilon({event(1 / mu): 1}, delta)
    assert exact_delta(mu, epsilon) <= delta
    if epsilon > 0:
        assert exact_delta(mu, epsilon * (1 - 3e-9) - 2e-12) > delta
    else:
        assert exact_delta(mu, 0.0) <= delta


def test_delta_is_the_integral_of_the_hockey_stick_divergence() -> None:
    mu, epsilon = math.sqrt(3 / 4 + 1 / 9), GDP.epsilon({event(2.0): 3, event(3.0): 1}, 1e-3)

    def excess(x: float) -> float:
        return float(max(norm.pdf(x - mu) - math.exp(epsilon) * norm.pdf(x), 0.0))

    start = epsilon / mu + mu / 2
    integral, _ = quad(excess, start, start + 15, epsabs=1e-14)
    assert integral == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_heterogeneous_gaussians_agree_with_pld_composed_one_by_one(delta: float) -> None:
    multipliers = [2.0, 3.0, 5.0, 8.0]
    parts = [
        privacy_loss_distribution.from_gaussian_mechanism(z, value_discretization_interval=1e-4)
        for z in multipliers
    ]
    composed = parts[0]
    for part in parts[1:]:
        composed = composed.compose(part)
    ours = GDP.epsilon({event(z): 1 for z in multipliers}, delta)
    assert ours <= composed.get_epsilon_for_delta(delta) <= ours + 5e-4


@pytest.mark.parametrize(
    ("relation", "expected"),
    [(NeighboringRelation.ZERO_OUT, 91.8), (NeighboringRelation.REPLACE_ONE, 284.4)],
)
def test_the_published_numbers_of_a_hundred_rounds(
    relation: NeighboringRelation, expected: float
) -> None:
    """REPLACE_ONE halves the multiplier once: neither 91.8 nor what a quarter would cost."""
    events = {event(1.0, relation=relation): 100}
    assert GDP.epsilon(events, 1e-5) == pytest.approx(expected, abs=0.05)
    assert GDP.epsilon(events, 1e-5) <= PLD.epsilon(events, 1e-5) <= RDP.epsilon(events, 1e-5)
    half = event(0.5 if relation is NeighboringRelation.REPLACE_ONE else 1.0)
    assert GDP.epsilon(events, 1e-5) == GDP.epsilon({half: 100}, 1e-5)


def test_round_robin_costs_what_the_scenario_table_says() -> None:
    settings = compose(
        [
            "mechanism=central_gaussian", "mechanism.noise_multiplier=1", "cohort=round_robin",
            "federation.population=100", "run.num_rounds=100", "privacy.target_delta=1e-5",
            "privacy.target_epsilon=null", "accountant=gdp",
        ]
    )  # fmt: skip
    assert make_plan(settings).guarantees(100)[0].epsilon == pytest.approx(17.86, abs=0.005)


def test_it_calibrates_the_analytic_gaussian_mechanism() -> None:
    z = calibrate(GDP, lambda z: {event(z): 30}, 2.0, 1e-6)
    assert exact_delta(math.sqrt(30) / z, 2.0) <= 1e-6
    assert exact_delta(math.sqrt(30) / (z * (1 - 2e-4)), 2.0) > 1e-6


REPLACED = {"relation": NeighboringRelation.REPLACE_ONE}
FIXED = {"sampling": Sampling.FIXED_SIZE, "population": 9, "cohort_size": 3} | REPLACED
POISSON = {"sampling": Sampling.POISSON, "relation": NeighboringRelation.ADD_OR_REMOVE_ONE}


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"noise": NoiseKind.LAPLACE}, "accountant=pld"),
        (POISSON | {"sampling_rate": 0.1}, "accountant=pld"),
        (FIXED | {"sampling_rate": 1 / 3}, "accountant=rdp"),
        (FIXED | {"sampling_rate": 1 / 3}, "cohort.amplification=false"),
    ],
    ids=["laplace", "poisson", "fixed-size", "fixed-size-plain"],
)
def test_anything_else_is_refused_with_the_alternative(
    changes: dict[str, object], way_out: str
) -> None:
    refused = event(1.0, **changes)
    assert way_out in str(GDP.refusal(refused))
    with pytest.raises(AccountingError, match="accountant=gdp"):
        GDP.epsilon({refused: 1}, 1e-5)


def test_settings_refuse_it_for_sampled_cohorts_and_batches() -> None:
    central = ["mechanism=central_gaussian", "cohort=poisson", "accountant=gdp"]
    with pytest.raises(SettingsError, match=r"accountant=gdp: .*accountant=pld"):
        compose(central)
    compose([*central, "cohort.amplification=false"])
    with pytest.raises(SettingsError, match=r"accountant=gdp: .*accountant=pld"):
        compose(["training=dp_sgd", "accountant=gdp"])
    compose(["training=dp_sgd", "training.batch_rate=1", "accountant=gdp"])


def test_the_ends() -> None:
    assert GDP.epsilon({}, 1e-5) == 0.0
    assert GDP.epsilon({event(1.0): 0}, 1e-5) == 0.0
    assert GDP.epsilon({event(0.0): 1, event(1.0): 3}, 1e-5) == math.inf
    assert GDP.epsilon({event(1e6): 1}, 1e-2) == 0.0
    assert 0.5e6 < GDP.epsilon({event(1e-3): 1}, 1e-5) < 0.6e6
    assert GDP.epsilon({event(3.0, steps=4): 5}, 1e-5) == GDP.epsilon({event(3.0): 20}, 1e-5)
    with pytest.raises(AccountingError, match="one unit and relation"):
        GDP.epsilon({event(1.0): 1, event(1.0, **REPLACED): 1}, 1e-5)
    with pytest.raises(AccountingError, match="target_delta"):
        GDP.epsilon({event(1.0): 1}, 0.0)


def test_a_thousand_different_rounds_cost_milliseconds() -> None:
    events = {event(5.0 + i / 100): 1 for i in range(1000)}
    started = time.perf_counter()
    epsilon = GDP.epsilon(events, 1e-5)
    assert time.perf_counter() - started < 0.5
    longer = events | {event(99.0): 1}
    assert epsilon < GDP.epsilon(longer, 1e-5)
    larger = {replace(e, noise_multiplier=2 * e.noise_multiplier): 1 for e in events}
    assert GDP.epsilon(larger, 1e-5) < epsilon
