"""Cohort samplers: who is chosen, the public divisor, and the event each one stands for."""

import numpy as np
import pytest
from scipy import stats

from fl_app import rng
from fl_app.errors import SettingsError
from fl_app.privacy import NeighboringRelation, NoiseKind, Sampling, View
from strategies.cohorts.all import FullCohort
from strategies.cohorts.fixed_size import FixedSizeCohort
from strategies.cohorts.poisson import PoissonCohort

FALSE_ALARM = 1e-6


def stream(round: int) -> np.random.Generator:
    return rng.stream(0, "cohort", round)


def test_poisson_cohort_sizes_follow_the_binomial_law() -> None:
    # n = 2,000 rounds of 50 clients at q 0.1; the total is Binomial(100,000, 0.1).
    cohort, n, population = PoissonCohort(sampling_rate=0.1), 2000, 50
    sizes = np.array([len(cohort.sample(population, r, stream(r))) for r in range(n)])
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], n * population, 0.1)
    assert low <= sizes.sum() <= high
    # Sizes vary as they must: n * var / binomial variance is chi-square with n - 1 degrees.
    score = (n - 1) * sizes.var(ddof=1) / (population * 0.1 * 0.9)
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], n - 1)
    assert low * 0.97 <= score <= high * 1.03  # binomial sizes are a little platykurtic
    fixed = np.full(n, 5)  # negative control: a fixed size is not Poisson
    assert not low * 0.97 <= (n - 1) * fixed.var(ddof=1) / (population * 0.1 * 0.9)


def test_poisson_chooses_every_client_at_the_same_rate_independently() -> None:
    cohort, n = PoissonCohort(sampling_rate=0.3), 4000
    member = np.zeros((n, 20))
    for r in range(n):
        member[r, cohort.sample(20, r, stream(r))] = 1
    low, high = stats.binom.ppf([FALSE_ALARM / 40, 1 - FALSE_ALARM / 40], n, 0.3)
    assert ((low <= member.sum(0)) & (member.sum(0) <= high)).all()
    together = member[:, 0] * member[:, 1]
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], n, 0.09)
    assert low <= together.sum() <= high


def test_s03_ten_clients_at_rate_a_tenth_are_never_raised_to_a_minimum_of_two() -> None:
    cohort = PoissonCohort(sampling_rate=0.1)
    sizes = [len(cohort.sample(10, r, stream(r))) for r in range(300)]
    assert 0 in sizes
    assert 1 in sizes
    assert FixedSizeCohort(size=1).sample(10, 1, stream(1)).size == 1


def test_poisson_event_is_amplified_unless_told_otherwise() -> None:
    event = PoissonCohort(sampling_rate=0.1).event(NoiseKind.GAUSSIAN, 1.0, 100)
    assert (event.sampling, event.sampling_rate) == (Sampling.POISSON, 0.1)
    assert event.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    assert event.view is View.OBSERVER
    for cohort, amplified in (
        (PoissonCohort(sampling_rate=0.1), False),
        (PoissonCohort(sampling_rate=0.1, amplification=False), True),
        (PoissonCohort(sampling_rate=1.0), True),
    ):
        plain = cohort.event(NoiseKind.GAUSSIAN, 1.0, 100, amplified=amplified)
        assert (plain.sampling, plain.sampling_rate) == (Sampling.NONE, 1.0)


def test_fixed_size_draws_distinct_clients_all_equally_often() -> None:
    cohort, n = FixedSizeCohort(size=3), 3000
    counts = np.zeros(10)
    for r in range(n):
        chosen = cohort.sample(10, r, stream(r))
        assert len(set(chosen.tolist())) == 3
        counts[chosen] += 1
    low, high = stats.binom.ppf([FALSE_ALARM / 20, 1 - FALSE_ALARM / 20], n, 0.3)
    assert ((low <= counts) & (counts <= high)).all()


def test_fixed_size_event_is_replace_one() -> None:
    event = FixedSizeCohort(size=10).event(NoiseKind.GAUSSIAN, 1.0, 100)
    assert event.relation is NeighboringRelation.REPLACE_ONE
    assert (event.sampling, event.cohort_size, event.population) == (Sampling.FIXED_SIZE, 10, 100)
    plain = FixedSizeCohort(size=10, amplification=False, neighboring_relation="zero_out")
    event = plain.event(NoiseKind.GAUSSIAN, 1.0, 100)
    assert (event.relation, event.sampling) == (NeighboringRelation.ZERO_OUT, Sampling.NONE)


def test_fixed_size_larger_than_the_population_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"cohort\.size=11: .*federation\.population=10"):
        FixedSizeCohort(size=11).check(10)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_rates_outside_zero_to_one_are_refused(rate: float) -> None:
    with pytest.raises(SettingsError, match=r"cohort\.sampling_rate="):
        PoissonCohort(sampling_rate=rate)


def test_full_participation_is_zero_out_without_amplification() -> None:
    event = FullCohort().event(NoiseKind.GAUSSIAN, 1.0, 7)
    assert (event.relation, event.sampling) == (NeighboringRelation.ZERO_OUT, Sampling.NONE)
    assert FullCohort().sample(7, 1, stream(1)).tolist() == list(range(7))
    assert FullCohort().expected_size(7) == 7
