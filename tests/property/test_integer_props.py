"""Rotation and rounding: what holds for every vector."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fl_app.mechanisms._rotation import padded_size, rotate, rotate_back
from fl_app.mechanisms._rounding import BETA, round_within, rounded_norm_squared
from fl_app.rng import NoiseSource
from fl_app.stages import RoundOrder

FALSE_ALARM = 1e-6
ORDER = RoundOrder(
    round=1,
    clipping_norm=1.0,
    noise_multiplier=1.0,
    training_noise_multiplier=None,
    nominal_rows=1,
)
VECTORS = st.lists(
    st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=1, max_size=70
).map(np.array)


def order(round: int, attempt: int = 0) -> RoundOrder:
    return dataclasses.replace(ORDER, round=round, attempt=attempt)


@given(vector=VECTORS, round=st.integers(1, 1000))
def test_rotation_keeps_the_norm_and_is_undone_exactly(vector: np.ndarray, round: int) -> None:
    rotated = rotate(vector, order(round))
    assert rotated.size == padded_size(vector.size)
    scale = max(1e-300, float(np.linalg.norm(vector)))
    assert np.linalg.norm(rotated) == pytest.approx(np.linalg.norm(vector), rel=1e-12)
    rotate_back(rotated, order(round))
    np.testing.assert_allclose(rotated[: vector.size], vector, atol=1e-12 * scale)
    np.testing.assert_allclose(rotated[vector.size :], 0, atol=1e-12 * scale)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_rotation_is_an_orthonormal_matrix_of_equal_magnitudes(size: int) -> None:
    matrix = np.array([rotate(row, ORDER) for row in np.eye(size)])
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    np.testing.assert_allclose(np.abs(matrix), 1 / math.sqrt(size), rtol=1e-12)


def test_signs_differ_between_rounds_and_attempts_and_are_the_same_for_everybody() -> None:
    vector = np.arange(1.0, 65.0)
    rotated = [rotate(vector, order(*who)).tobytes() for who in [(1,), (2,), (1, 1), (1,)]]
    assert rotated[0] == rotated[3]
    assert len(set(rotated)) == 3


def test_a_rotated_spike_is_spread_over_all_elements() -> None:
    spike = np.zeros(1000)
    spike[17] = 32.0
    np.testing.assert_allclose(np.abs(rotate(spike, ORDER)), 1.0, rtol=1e-12)


@pytest.mark.parametrize(("given", "padded"), [(1, 1), (2, 2), (3, 4), (650, 1024), (1024, 1024)])
def test_padding_is_the_next_power_of_two(given: int, padded: int) -> None:
    assert padded_size(given) == padded


# Rounding.


@settings(max_examples=200)
@given(vector=VECTORS, seed=st.integers(0, 10**6))
def test_the_rounded_norm_is_within_its_bound_always(vector: np.ndarray, seed: int) -> None:
    norm = float(np.linalg.norm(vector))
    bound = rounded_norm_squared(norm * (1 + 1e-12), vector.size)
    rounded = round_within(vector, bound, NoiseSource.seeded_from(seed, "test"))
    assert rounded.dtype == np.int64
    assert sum(int(v) ** 2 for v in rounded) <= bound
    assert (np.abs(rounded - vector) < 1).all()


@pytest.mark.parametrize("dimension", [4, 64, 4096])
def test_the_bound_is_below_what_rounding_away_from_zero_gives(dimension: int) -> None:
    # The worst that unconditional rounding can do; without the condition it would happen.
    vector = np.full(dimension, 1e-6)
    away = dimension
    assert rounded_norm_squared(float(np.linalg.norm(vector)), dimension) < away


@pytest.mark.parametrize("element", [0.5, 0.1, 3.5])
@pytest.mark.parametrize("dimension", [16, 1024])
def test_one_try_in_keeps_the_bound_as_often_as_promised(element: float, dimension: int) -> None:
    vector = np.full(dimension, element)
    bound = rounded_norm_squared(float(np.linalg.norm(vector)), dimension)
    source, tries = NoiseSource.from_os(), 4000
    floor, kept = math.floor(element), 0
    for _ in range(tries):
        tried = floor + (source.uniform(dimension) < element - floor)
        kept += int(tried @ tried) <= bound
    assert kept >= stats.binom.ppf(FALSE_ALARM, tries, 1 - BETA)


@pytest.mark.parametrize("element", [0.25, -0.25, 2.9, -7.5])
def test_rounding_keeps_the_mean(element: float) -> None:
    vector = np.full(1000, element)
    source = NoiseSource.from_os()
    total = sum(int(round_within(vector, 10**6, source).sum()) for _ in range(200))
    up = total - math.floor(element) * 200_000
    probability = element - math.floor(element)
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], 200_000, probability)
    assert low <= up <= high
    # Negative control: rounding to the nearest integer would be noticed.
    assert not low <= (round(element) - math.floor(element)) * 200_000 <= high


def test_a_bound_that_no_try_keeps_leaves_what_is_rounded_towards_zero() -> None:
    vector = np.array([0.999999, -3.999999])
    source = NoiseSource.seeded_from(0, "test")
    assert round_within(vector, 9, source).tolist() == [0, -3]


def test_a_vector_longer_than_promised_becomes_zero() -> None:
    assert round_within(np.array([5.0, 5.0]), 9, NoiseSource.from_os()).tolist() == [0, 0]


def test_integers_stay_as_they_are() -> None:
    vector = np.array([3.0, -4.0, 0.0])
    assert round_within(vector, 25, NoiseSource.from_os()).tolist() == [3, -4, 0]
