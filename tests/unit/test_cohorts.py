"""Cohort samplers: who is chosen, the public divisor, and the event each one stands for."""

import numpy as np
import pytest
from scipy import stats

from fl_app import plugins, rng
from fl_app.errors import SettingsError
from fl_app.privacy import NeighboringRelation, NoiseKind, Sampling, View
from strategies.cohorts.all import FullCohort
from strategies.cohorts.fixed_size import FixedSizeCohort
from strategies.cohorts.poisson import PoissonCohort
from strategies.cohorts.round_robin import RoundRobinCohort

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


def turns(cohort: RoundRobinCohort, population: int, first: int, num_rounds: int) -> np.ndarray:
    """How often each client is asked in `num_rounds` rounds from `first` on."""
    counts = np.zeros(population, int)
    for r in range(first, first + num_rounds):
        chosen = cohort.sample(population, r, stream(r))
        assert len(set(chosen.tolist())) == len(chosen) == cohort.expected_size(population)
        assert (np.diff(chosen) > 0).all()
        counts[chosen] += 1
    return counts


@pytest.mark.parametrize(("population", "size"), [(100, 10), (10, 3), (7, 5), (7, 7), (1, 1)])
@pytest.mark.parametrize("first", [1, 2, 5])
def test_round_robin_asks_everybody_floor_or_ceil_of_t_times_the_fraction(
    population: int, size: int, first: int
) -> None:
    cohort = RoundRobinCohort(size=size, fraction=None)
    for num_rounds in range(1, 25):
        counts = turns(cohort, population, first, num_rounds)
        low = num_rounds * size // population
        assert set(counts.tolist()) <= {low, -(-num_rounds * size // population)}
        # The bound that the accounting composes is reached: not one too many, not one too few.
        assert counts.max() == cohort.max_participations(num_rounds, population)


def test_round_robin_by_fraction_is_that_many_clients_and_draws_nothing() -> None:
    by_fraction = RoundRobinCohort(size=None, fraction=0.1)
    by_size = RoundRobinCohort(size=10, fraction=None)
    for r in (1, 7, 11):
        ours = by_fraction.sample(100, r, stream(r))
        assert ours.tolist() == by_size.sample(100, r, stream(99)).tolist()
    # 0.1 * 100 rounds is 10.000000000000002 in some orders of multiplication.
    assert by_fraction.max_participations(100, 100) == 10
    assert by_fraction.max_participations(101, 100) == 11


def test_round_robin_event_is_zero_out_without_amplification() -> None:
    event = RoundRobinCohort(size=10, fraction=None).event(NoiseKind.LAPLACE, 1.0, 100)
    assert (event.relation, event.sampling) == (NeighboringRelation.ZERO_OUT, Sampling.NONE)
    assert (event.noise, event.sampling_rate) == (NoiseKind.LAPLACE, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": None, "fraction": None}, r"cohort\.size=null: exactly one"),
        ({"size": 3, "fraction": 0.3}, r"cohort\.size=3: exactly one"),
        ({"size": 0, "fraction": None}, r"cohort\.size=0: "),
        ({"size": None, "fraction": 1.5}, r"cohort\.fraction=1\.5: "),
        ({"size": 11, "fraction": None}, r"cohort\.size=11: .*federation\.population=10"),
        ({"size": None, "fraction": 0.25}, r"cohort\.fraction=0\.25: .*not 2\.5 of 10.*size=2"),
        ({"size": None, "fraction": 0.01}, r"cohort\.fraction=0\.01: .*size=1"),
    ],
)
def test_round_robin_refuses_what_is_no_block_of_clients(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        plugins.build("cohort", {"kind": "round_robin"} | values).check(10)


def test_hardly_any_cohort_is_larger_than_the_largest() -> None:
    assert FullCohort().largest_size(10) == 10
    poisson = PoissonCohort(sampling_rate=0.1)
    assert poisson.largest_size(1000) == 140
    assert poisson.largest_size(10) == 5
    assert stats.binom.sf(140, 1000, 0.1) < 1e-4
