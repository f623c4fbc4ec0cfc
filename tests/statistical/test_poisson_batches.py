"""Membership of rows in batches: Poisson at the public rate. False alarms: 1e-6 a check.

n = 20,000 batches of 20 rows at rate 0.2.
"""

from collections.abc import Callable

import numpy as np
from exact_intervals import FALSE_ALARM, count_within
from scipy import stats

from fl_app.rng import stream
from fl_app.training.dp_sgd import poisson_batch

ROWS, RATE, BATCHES = np.arange(20) * 3, 0.2, 20_000


def membership(draw: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    """Returns [BATCHES, 20] bool: which rows each batch holds."""
    random = stream(0, "poisson test")
    return np.stack([np.isin(ROWS, draw(random), assume_unique=True) for _ in range(BATCHES)])


def poisson(random: np.random.Generator) -> np.ndarray:
    return poisson_batch(ROWS, RATE, random)


def fixed_size(random: np.random.Generator) -> np.ndarray:
    return random.choice(ROWS, size=4, replace=False)


def pairs_are_independent(members: np.ndarray) -> bool:
    """Pearson's chi-square of the 2x2 tables of 10 disjoint pairs, cells known: 30 degrees."""
    first, second = members[:, ::2].astype(int), members[:, 1::2].astype(int)
    statistic = 0.0
    for a in (0, 1):
        for b in (0, 1):
            expected = BATCHES * RATE ** (a + b) * (1 - RATE) ** (2 - a - b)
            counts = np.sum((first == a) & (second == b), axis=0)
            statistic += float(np.sum((counts - expected) ** 2 / expected))
    return statistic <= stats.chi2.ppf(1 - FALSE_ALARM, df=30)


def sizes_are_binomial(members: np.ndarray) -> bool:
    """Chi-square of batch sizes 0 to 9 and more against the binomial law: 10 degrees."""
    counts = np.bincount(np.minimum(members.sum(axis=1), 10), minlength=11)
    law = stats.binom.pmf(np.arange(10), 20, RATE)
    expected = BATCHES * np.append(law, 1 - law.sum())
    statistic = float(np.sum((counts - expected) ** 2 / expected))
    return statistic <= stats.chi2.ppf(1 - FALSE_ALARM, df=10)


def test_every_row_is_drawn_at_the_rate_independently_of_others_and_of_other_batches() -> None:
    members = membership(poisson)
    for row in range(20):
        assert count_within(int(members[:, row].sum()), BATCHES, RATE)
        both = int((members[:-1:2, row] & members[1::2, row]).sum())
        assert count_within(both, BATCHES // 2, RATE**2)
    assert count_within(int(members.sum()), members.size, RATE)
    assert pairs_are_independent(members)
    assert sizes_are_binomial(members)


def test_fixed_size_sampling_is_noticed() -> None:
    members = membership(fixed_size)
    assert not pairs_are_independent(members)
    assert not sizes_are_binomial(members)


def test_a_rate_that_is_a_twentieth_too_large_is_noticed() -> None:
    members = membership(lambda random: poisson_batch(ROWS, RATE * 1.05, random))
    assert not count_within(int(members.sum()), members.size, RATE)
    assert not pairs_are_independent(members)


def test_edge_rates_and_no_rows() -> None:
    random = stream(0, "edges")
    assert poisson_batch(ROWS, 1.0, random).tolist() == ROWS.tolist()
    assert poisson_batch(ROWS[:0], 0.5, random).size == 0
