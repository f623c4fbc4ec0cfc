"""Epsilons against numbers and programs that are not ours.

Sources: the scenario table of the project (S01, S04), Opacus' RDP and PRV accountants,
dp-accounting's own accountants used directly, and the exact curve of the Gaussian mechanism: Balle
and Wang (2018, arXiv:1805.06530, theorem 8).
"""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fl_app.accounting.calibration import calibrate
from fl_app.accounting.pld import Pld
from fl_app.accounting.rdp import Rdp
from fl_app.accounting.simple import Simple
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)

PLD, RDP, SIMPLE = Pld(discretization=1e-4), Rdp(), Simple(formula="analytic")
BOTH = pytest.mark.parametrize("accountant", [PLD, RDP], ids=["pld", "rdp"])


def event(
    z: float,
    *,
    noise: NoiseKind = NoiseKind.GAUSSIAN,
    q: float = 1.0,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    steps: int = 1,
) -> PrivacyEvent:
    return PrivacyEvent(
        unit=PrivacyUnit.CLIENT,
        view=View.OBSERVER,
        relation=relation,
        noise=noise,
        noise_multiplier=z,
        sampling=Sampling.POISSON if q < 1 else Sampling.NONE,
        sampling_rate=q,
        steps=steps,
    )


def fixed_size_event(z: float, size: int, population: int) -> PrivacyEvent:
    return PrivacyEvent(
        unit=PrivacyUnit.CLIENT,
        view=View.OBSERVER,
        relation=NeighboringRelation.REPLACE_ONE,
        noise=NoiseKind.GAUSSIAN,
        noise_multiplier=z,
        sampling=Sampling.FIXED_SIZE,
        sampling_rate=size / population,
        population=population,
        cohort_size=size,
    )


def gaussian_epsilon(z: float, delta: float) -> float:
    """Solves delta(epsilon) of one Gaussian of multiplier z (Balle and Wang, theorem 8)."""

    def excess(epsilon: float) -> float:
        upper = norm.logcdf(1 / (2 * z) - epsilon * z)
        lower = epsilon + norm.logcdf(-1 / (2 * z) - epsilon * z)
        return math.exp(upper) - math.exp(lower) - delta

    return float(brentq(excess, 0.0, 1e4, xtol=1e-10))


def opacus_epsilon(accountant: object, z: float, q: float, steps: int, delta: float) -> float:
    accountant.history = [(z, q, steps)]
    return float(accountant.get_epsilon(delta))


def test_s01_rounds_of_local_steps_compose_over_the_whole_run():
    round_event = event(1.0, q=0.125, steps=8)
    whole_run = RDP.epsilon({round_event: 5}, 1e-5)
    assert whole_run == pytest.approx(6.59, abs=0.005)
    # What an accountant that starts afresh every round would report for the same run.
    assert RDP.epsilon({round_event: 1}, 1e-5) == pytest.approx(3.79, abs=0.005)


@BOTH
def test_client_level_poisson_epsilon_is_the_published_one(accountant):
    expected = {"pld": 7.05, "rdp": 7.90}[accountant.kind]
    assert accountant.epsilon({event(1.0, q=0.1): 100}, 1e-5) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(
    ("z", "q", "steps", "delta"), [(1.0, 0.1, 100, 1e-5), (1.406, 0.2, 120, 1e-4)]
)
def test_rdp_agrees_with_opacus_rdp(z, q, steps, delta):
    independent = opacus_epsilon(RDPAccountant(), z, q, steps, delta)
    assert RDP.epsilon({event(z, q=q): steps}, delta) == pytest.approx(independent, rel=0.01)


@pytest.mark.parametrize(
    ("z", "q", "steps", "delta"), [(1.0, 0.1, 100, 1e-5), (1.406, 0.2, 120, 1e-4)]
)
def test_pld_agrees_with_opacus_prv(z, q, steps, delta):
    # PRV returns an upper end that lies at most eps_error above the truth (default 0.01).
    independent = opacus_epsilon(PRVAccountant(), z, q, steps, delta)
    assert PLD.epsilon({event(z, q=q): steps}, delta) == pytest.approx(independent, abs=0.02)


def test_rdp_equals_the_plain_library_accountant():
    plain = RdpAccountant()
    sampled = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(0.9))
    plain.compose(sampled, 300)
    ours = RDP.epsilon({event(0.9, q=0.05, steps=3): 100}, 1e-6)
    assert ours == pytest.approx(plain.get_epsilon(1e-6), rel=1e-9)


def test_pld_on_its_adapted_grid_equals_the_plain_library_accountant_on_a_fine_one():
    plain = PLDAccountant(value_discretization_interval=1e-4)
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    plain.compose(sampled, 100)
    fine = plain.get_epsilon(1e-5)
    ours = PLD.epsilon({event(1.0, q=0.1): 100}, 1e-5)
    assert fine <= ours <= fine * (1 + 1e-4)


def test_pld_stays_tight_where_one_step_loses_less_than_the_usual_grid():
    # One step's loss is 0.001 / 50: on the fixed grid of 1e-4 most of the result is rounding.
    small = event(50.0, q=0.001)
    tight = PLD.epsilon({small: 10_000}, 1e-6)
    coarse = PLDAccountant(value_discretization_interval=1e-4)
    sampled = dp_accounting.PoissonSampledDpEvent(0.001, dp_accounting.GaussianDpEvent(50.0))
    coarse.compose(sampled, 10_000)
    assert tight < 0.6 * coarse.get_epsilon(1e-6)
    assert tight <= RDP.epsilon({small: 10_000}, 1e-6)
    # Central limit: about one Gaussian of mean shift q sqrt(T) / z (Dong et al. 2019, 1905.02383).
    limit = gaussian_epsilon(50.0 / (0.001 * math.sqrt(10_000)), 1e-6)
    assert tight == pytest.approx(limit, rel=0.02)


@pytest.mark.parametrize(("z", "count"), [(1.0, 1), (1.0, 100), (0.3, 10), (40.0, 100)])
def test_unsampled_epsilon_is_the_closed_form(z, count):
    exact = gaussian_epsilon(z / math.sqrt(count), 1e-5)
    tight = PLD.epsilon({event(z): count}, 1e-5)
    assert exact * (1 - 1e-9) <= tight <= exact * (1 + 1e-3)
    assert RDP.epsilon({event(z): count}, 1e-5) > exact


@pytest.mark.parametrize(
    ("relation", "pld", "rdp"),
    [
        (NeighboringRelation.ZERO_OUT, 91.8, 96.1),
        (NeighboringRelation.ADD_OR_REMOVE_ONE, 91.8, 96.1),
        (NeighboringRelation.REPLACE_ONE, 284.4, 294.9),
    ],
)
def test_s04_unamplified_numbers(relation, pld, rdp):
    events = {event(1.0, relation=relation): 100}
    assert PLD.epsilon(events, 1e-5) == pytest.approx(pld, abs=0.05)
    assert RDP.epsilon(events, 1e-5) == pytest.approx(rdp, abs=0.05)


def test_unamplified_replace_one_is_the_closed_form_at_twice_the_sensitivity():
    exact = gaussian_epsilon(1.0 / 2 / math.sqrt(100), 1e-5)
    events = {event(1.0, relation=NeighboringRelation.REPLACE_ONE): 100}
    assert PLD.epsilon(events, 1e-5) == pytest.approx(exact, rel=1e-3)


def test_s04_fixed_size_sampling_doubles_the_sensitivity_once():
    ours = RDP.epsilon({fixed_size_event(1.0, 10, 100): 100}, 1e-5)
    assert ours == pytest.approx(83.9, abs=0.05)
    # Neither undoubled (what the library says to a plain z) nor doubled twice.
    for wrong in (1.0, 0.25):
        plain = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        noise = dp_accounting.GaussianDpEvent(wrong)
        plain.compose(dp_accounting.SampledWithoutReplacementDpEvent(100, 10, noise), 100)
        assert abs(plain.get_epsilon(1e-5) / ours - 1) > 0.3


@pytest.mark.parametrize(
    ("accountant", "q", "steps", "target", "delta", "expected"),
    [
        (PLD, 0.1, 100, 4.0, 1e-5, 1.386),
        (RDP, 0.1, 100, 4.0, 1e-5, 1.482),
        (PLD, 0.2, 120, 8.0, 1e-4, 1.406),
    ],
    ids=["pld", "rdp", "main-job"],
)
def test_calibrated_noise_multipliers(accountant, q, steps, target, delta, expected):
    z = calibrate(accountant, lambda z: {event(z, q=q): steps}, target, delta)
    assert z == pytest.approx(expected, abs=6e-4)
    assert accountant.epsilon({event(z, q=q): steps}, delta) <= target


def test_calibrated_unsampled_noise_is_that_of_the_analytic_gaussian_mechanism():
    z = calibrate(PLD, lambda z: {event(z): 1}, 1.0, 1e-5)
    exact = brentq(lambda z: gaussian_epsilon(z, 1e-5) - 1.0, 1.0, 10.0)
    assert exact <= z <= exact * (1 + 5e-4)


# Laplace.


def laplace_epsilon(single: float, count: int, delta: float) -> float:
    """Returns the exact epsilon of `count` randomized responses of epsilon `single` at `delta`.

    Randomized response dominates every mechanism of that pure epsilon, Laplace included (Kairouz,
    Oh and Viswanath 2015, arXiv:1311.0776): an upper bound on Laplace noise.
    """
    wins = np.arange(count + 1)
    right = binom.pmf(wins, count, 1 / (1 + math.exp(-single)))
    wrong = right[::-1]

    def excess(epsilon: float) -> float:
        return float(np.maximum(right - math.exp(epsilon) * wrong, 0).sum()) - delta

    return float(brentq(excess, 0.0, single * count))


def test_a_hundred_laplace_releases_of_a_tenth():
    events = {event(10.0, noise=NoiseKind.LAPLACE): 100}
    ours = PLD.epsilon(events, 1e-5)
    assert ours == pytest.approx(4.22, abs=0.005)  # the scenario table of the project
    assert 0.9 * laplace_epsilon(0.1, 100, 1e-5) < ours < laplace_epsilon(0.1, 100, 1e-5)


def test_one_laplace_release_is_the_closed_form():
    # delta(epsilon) = 1 - exp((epsilon - 1/b) / 2) for 0 <= epsilon <= 1/b.
    for scale in (0.5, 1.0, 10.0):
        exact = 1 / scale + 2 * math.log1p(-1e-3)
        ours = PLD.epsilon({event(scale, noise=NoiseKind.LAPLACE): 1}, 1e-3)
        assert exact - 1e-9 <= ours <= exact * (1 + 5e-4)


@pytest.mark.parametrize(("scale", "q", "count"), [(1.0, 0.1, 100), (10.0, 0.2, 500)])
def test_poisson_sampled_laplace_equals_the_plain_library_accountant(scale, q, count):
    plain = PLDAccountant(value_discretization_interval=1e-5)
    sampled = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.LaplaceDpEvent(scale))
    plain.compose(sampled, count)
    fine = plain.get_epsilon(1e-5)
    ours = PLD.epsilon({event(scale, q=q, noise=NoiseKind.LAPLACE): count}, 1e-5)
    assert fine * (1 - 1e-4) <= ours <= fine * (1 + 1e-3)
    unsampled = PLD.epsilon({event(scale, noise=NoiseKind.LAPLACE): count}, 1e-5)
    assert ours < unsampled / 3


# Basic composition.


@pytest.mark.parametrize("z", [0.3, 1.0, 4.2, 10.0, 100.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 5e-7])
def test_simple_is_the_exact_curve_of_one_gaussian_split_over_the_steps(z, delta):
    exact = gaussian_epsilon(z, delta)
    ours = SIMPLE.epsilon({event(z): 1}, delta)
    assert exact - 1e-8 <= ours <= exact + 1e-7
    assert SIMPLE.epsilon({event(z): 8}, 8 * delta) == pytest.approx(8 * ours, rel=1e-9)


def test_simple_calibrates_the_split_of_epsilon_and_delta():
    # 20 steps, epsilon 10: each one epsilon 0.5 at delta 5e-7, solved here without our code.
    z = calibrate(SIMPLE, lambda z: {event(z): 20}, 10.0, 1e-5)
    exact = brentq(lambda z: gaussian_epsilon(z, 5e-7) - 0.5, 1.0, 50.0)
    assert exact <= z <= exact * (1 + 1e-4)
    classic = math.sqrt(2 * math.log(1.25 / 5e-7)) / 0.5
    assert z < classic
    # The published run's noise: std 10.86 x 2C under REPLACE_ONE is classic at that split.
    assert classic == pytest.approx(10.86, abs=0.005)


def test_simple_adds_laplace_releases():
    events = {event(10.0, noise=NoiseKind.LAPLACE): 100}
    assert SIMPLE.epsilon(events, 1e-5) == pytest.approx(10.0, rel=1e-12)


def test_the_published_noise_at_claimed_ten_is_worth_far_less():
    """20 full-batch steps of std 10.86 x 2C (the project's own table: 0.75 and 1.61)."""
    for relation, expected in (
        (NeighboringRelation.ADD_OR_REMOVE_ONE, 0.75),
        (NeighboringRelation.REPLACE_ONE, 1.61),
    ):
        events = {event(21.72, relation=relation): 20}
        assert PLD.epsilon(events, 1e-5) == pytest.approx(expected, abs=0.006)


def test_the_traps_of_replace_one_in_the_library_are_avoided():
    """Ten releases of z 1 to an adversary who may replace a client: sensitivity 2C, once.

    The library's RDP accountant does not double it, its PLD accountant does by itself.
    """
    ten, delta = {event(1.0, relation=NeighboringRelation.REPLACE_ONE): 10}, 1e-5
    exact = gaussian_epsilon(0.5 / math.sqrt(10), delta)
    assert exact == pytest.approx(46.2, abs=0.05)
    assert PLD.epsilon(ten, delta) == pytest.approx(exact, rel=1e-3)
    assert exact <= RDP.epsilon(ten, delta) < 1.1 * exact
    replace_one = dp_accounting.NeighboringRelation.REPLACE_ONE
    trap = RdpAccountant(neighboring_relation=replace_one)
    trap.compose(dp_accounting.GaussianDpEvent(1.0), 10)
    assert trap.get_epsilon(delta) == pytest.approx(19.05, abs=0.01)
    twice = PLDAccountant(neighboring_relation=replace_one, value_discretization_interval=1e-3)
    twice.compose(dp_accounting.GaussianDpEvent(0.5), 10)
    assert twice.get_epsilon(delta) == pytest.approx(133, abs=1)
