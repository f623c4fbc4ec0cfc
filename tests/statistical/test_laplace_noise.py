"""Laplace noise: the generator, and a DP-SGD update. False alarms: 1e-6 a check."""

import numpy as np
import pytest
from exact_intervals import count_within, is_laplace, is_normal, is_uncorrelated, scale_within
from scipy import stats
from test_dp_sgd_noise import LEARNING_RATE, NOMINAL, RATE, C, Z, delta

from fl_app.rng import NoiseSource

SCALE_OF_ONE_STEP = LEARNING_RATE * Z * C / (RATE * NOMINAL)


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    """n = 4e6 from the operating system's key: the checks must hold for every key."""
    return NoiseSource.from_os().laplace(4_000_000)


def test_scale_is_one_and_the_law_is_laplace(samples: np.ndarray) -> None:
    """n = 4e6: |scale - 1| < 0.00245 is accepted; KS on 1e6."""
    assert scale_within(samples, 1.0)
    assert is_laplace(samples[:1_000_000], 1.0)


@pytest.mark.parametrize("size", [0, 1, 7, 12])
@pytest.mark.parametrize("sign", [1, -1])
def test_both_tails_hold_as_many_as_they_should(samples: np.ndarray, size: int, sign: int) -> None:
    """n = 4e6: beyond 12 scales 0 to 50 or so are accepted where 12.3 are expected."""
    beyond = int(np.sum(sign * samples > size))
    assert count_within(beyond, samples.size, stats.laplace.sf(size))


def test_samples_do_not_depend_on_each_other(samples: np.ndarray) -> None:
    """n = 4e6, through bounded scores: of the value, and of its size."""
    for lag in (1, 16_384, 32_768):
        first, second = samples[:-lag], samples[lag:]
        assert is_uncorrelated(np.sign(first), np.sign(second))
        assert is_uncorrelated(np.exp(-np.abs(first)), np.exp(-np.abs(second)))
    assert is_uncorrelated(np.sign(samples), np.exp(-np.abs(samples)))


def test_no_sample_is_infinite_and_none_exceeds_the_longest_uniform() -> None:
    """The two ends of the uniform: 2**-53 and 1."""

    class Ends(NoiseSource):
        __slots__ = ()

        def _raw_words(self, count: int) -> np.ndarray:
            return np.array([0, 1, 2**64 - 1, 2**64 - 2], np.uint64)[:count]

    found = Ends(bytes(32), seeded=True).laplace(4)
    np.testing.assert_allclose(found, [53 * np.log(2), -53 * np.log(2), 0, 0], rtol=1e-15)


def test_the_checks_notice_a_tenth_more_noise_a_shift_and_another_law(samples: np.ndarray) -> None:
    assert not scale_within(samples * 1.1, 1.0)
    assert not is_laplace(samples[:1_000_000] * 1.1, 1.0)
    assert not is_laplace(samples[:1_000_000] + 0.01, 1.0)
    normal = NoiseSource.from_os().gaussian(1_000_000)
    assert not is_laplace(normal / np.abs(normal).mean(), 1.0)


@pytest.mark.parametrize("num_rows", [0, 30])
def test_noise_of_an_update_is_laplace_of_scale_learning_rate_z_c_over_the_public_batch(
    num_rows: int,
) -> None:
    """P = 200,200: |scale / expected - 1| < 0.011 is accepted."""
    noise = delta(num_rows, 1, noise="laplace")
    assert scale_within(noise, SCALE_OF_ONE_STEP)
    assert is_laplace(noise, SCALE_OF_ONE_STEP)
    assert not is_normal(noise, 2**0.5 * SCALE_OF_ONE_STEP)


def test_the_check_notices_a_tenth_more_noise_and_gaussian_noise() -> None:
    assert not scale_within(delta(30, 1, z=1.1 * Z, noise="laplace"), SCALE_OF_ONE_STEP)
    assert not is_laplace(delta(30, 1), SCALE_OF_ONE_STEP)


def test_noise_is_added_once_whatever_the_physical_batches() -> None:
    assert scale_within(delta(30, 1, physical_batch_size=2, noise="laplace"), SCALE_OF_ONE_STEP)
