"""clip_l2 and clip_l1: the bound and its edge cases (rule 2)."""

import math

import numpy as np
import pytest

from fl_app.clipping import clip_l1, clip_l2, is_finite, l1_norm, l2_norm
from fl_app.errors import PrivacyError


def exact_norm(vector: np.ndarray) -> float:
    return math.sqrt(math.fsum(float(v) ** 2 for v in vector.reshape(-1)))


def test_known_vector_is_scaled_to_the_bound() -> None:
    np.testing.assert_allclose(clip_l2(np.float32([30, 40]), 5.0), [3, 4], rtol=1e-6)


@pytest.mark.parametrize("clipping_norm", [1e-30, 0.1, 1.0, 1 / 3, 1e6])
@pytest.mark.parametrize("size", [1, 2, 1000, 70_000])
def test_norm_after_the_cast_is_strictly_within_and_nearly_the_bound(
    clipping_norm: float, size: int
) -> None:
    vector = np.random.default_rng(size).normal(size=size).astype(np.float32) * np.float32(1e7)
    norm = exact_norm(clip_l2(vector, clipping_norm))
    assert clipping_norm * (1 - 1e-6) < norm <= clipping_norm


def test_vector_within_the_bound_is_unchanged_bit_for_bit() -> None:
    vector = np.float32([3, -4, -0.0, 1e-45])
    assert clip_l2(vector, 5.0).tobytes() == vector.tobytes()


def test_zero_stays_zero() -> None:
    assert not clip_l2(np.zeros(7, np.float32), 1.0).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_s07_one_non_finite_element_makes_all_zero(bad: float) -> None:
    vector = np.ones(100_000, np.float32)
    vector[99_999] = bad
    clipped = clip_l2(vector, 1.0)
    assert clipped.shape == vector.shape
    assert not clipped.any()


def test_squares_beyond_float32_do_not_overflow() -> None:
    vector = np.full(1000, np.finfo(np.float32).max)
    np.testing.assert_allclose(clip_l2(vector, 1.0), 1000**-0.5, rtol=1e-6)


def test_zero_dimensional_empty_and_single_values_obey_the_bound() -> None:
    assert clip_l2(np.array(-8.0, np.float32), 2.0) == pytest.approx(-2.0, rel=1e-6)
    assert clip_l2(np.array(-8.0, np.float32), 2.0).shape == ()
    assert clip_l2(np.zeros(0, np.float32), 2.0).shape == (0,)
    assert clip_l2(np.float32([8.0]), 2.0)[0] <= 2.0


def test_bound_below_float32_gives_zero() -> None:
    assert not clip_l2(np.ones(3, np.float32), 1e-60).any()


def test_the_input_is_not_changed() -> None:
    vector = np.full(10, 5.0, np.float32)
    clip_l2(vector, 1.0)
    assert (vector == 5.0).all()


@pytest.mark.parametrize("clipping_norm", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_that_bounds_nothing_is_refused(clipping_norm: float) -> None:
    with pytest.raises(PrivacyError, match="clipping_norm="):
        clip_l2(np.ones(3, np.float32), clipping_norm)


def test_norm_over_several_blocks_equals_the_exact_one() -> None:
    vector = np.random.default_rng(0).normal(size=200_001).astype(np.float32)
    assert l2_norm(vector) == pytest.approx(exact_norm(vector), rel=1e-12)


# L1.


def exact_l1(vector: np.ndarray) -> float:
    return math.fsum(abs(float(v)) for v in vector.reshape(-1))


def test_the_l1_norm_is_the_sum_of_absolute_values() -> None:
    np.testing.assert_allclose(clip_l1(np.float32([30, -40]), 7.0), [3, -4], rtol=1e-6)
    vector = np.random.default_rng(0).normal(size=200_001).astype(np.float32)
    assert l1_norm(vector) == pytest.approx(exact_l1(vector), rel=1e-12)


@pytest.mark.parametrize("clipping_norm", [1e-6, 0.1, 1 / 3, 1e6])
@pytest.mark.parametrize("size", [1, 2, 1000, 200_000])
def test_l1_norm_after_the_cast_is_strictly_within_and_nearly_the_bound(
    clipping_norm: float, size: int
) -> None:
    vector = np.random.default_rng(size).normal(size=size).astype(np.float32) * np.float32(1e12)
    norm = exact_l1(clip_l1(vector, clipping_norm))
    assert clipping_norm * (1 - 1e-6) < norm <= clipping_norm


def test_l1_edge_cases_are_those_of_l2() -> None:
    within = np.float32([3, -4, -0.0, 1e-45])
    assert clip_l1(within, 7.5).tobytes() == within.tobytes()
    assert not clip_l1(np.float32([1, math.nan]), 1.0).any()
    assert not clip_l1(np.float32([1, -math.inf]), 1.0).any()
    assert not clip_l1(np.zeros(7, np.float32), 1.0).any()
    assert clip_l1(np.zeros(0, np.float32), 2.0).shape == (0,)
    assert clip_l1(np.array(-8.0, np.float32), 2.0) == pytest.approx(-2.0, rel=1e-6)
    largest = np.full(1000, np.finfo(np.float32).max)
    np.testing.assert_allclose(clip_l1(largest, 1.0), 1e-3, rtol=1e-6)
    with pytest.raises(PrivacyError, match="clipping_norm="):
        clip_l1(within, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 8191, 8192, 19_999])
def test_one_element_that_is_not_finite_is_found_in_every_block(value: float, place: int) -> None:
    vector = np.zeros(20_000, np.float32)
    assert is_finite(vector)
    vector[place] = value
    assert not is_finite(vector)
