"""The Gaussian generator itself. False alarms: 1e-6 a check."""

import numpy as np
import pytest
from exact_intervals import count_within, is_normal, is_uncorrelated, mean_within, std_within
from scipy import stats

from fl_app.rng import NoiseSource


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    """n = 4e6 from the operating system's key: the checks must hold for every key."""
    return NoiseSource.from_os().gaussian(4_000_000)


def test_mean_and_std_are_zero_and_one(samples: np.ndarray) -> None:
    """n = 4e6: |mean| < 0.00245, |std - 1| < 0.00173."""
    assert mean_within(samples, 1.0)
    assert std_within(samples, 1.0)


def test_law_is_normal(samples: np.ndarray) -> None:
    """n = 1e6."""
    assert is_normal(samples[:1_000_000], 1.0)


@pytest.mark.parametrize("sigmas", [1, 3, 4, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_tails_hold_as_many_as_they_should(samples: np.ndarray, sigmas: int, sign: int) -> None:
    """n = 4e6: beyond 5 sigma 0 to 8 are accepted where 1.15 are expected."""
    beyond = int(np.sum(sign * samples > sigmas))
    assert count_within(beyond, samples.size, stats.norm.sf(sigmas))


def test_samples_do_not_depend_on_each_other(samples: np.ndarray) -> None:
    """n = 4e6: neighbours, and the two of one Box-Muller pair (16,384 apart), also their sizes."""
    for lag in (1, 16_384, 32_768):
        first, second = samples[:-lag], samples[lag:]
        assert is_uncorrelated(first, second)
        # Sizes through a bounded score, whose correlation is close to normal at this n.
        assert is_uncorrelated(np.exp(-(first**2)), np.exp(-(second**2)))


def test_the_checks_notice_noise_that_is_a_tenth_too_large(samples: np.ndarray) -> None:
    large = samples * 1.1
    assert not std_within(large, 1.0)
    assert not is_normal(large[:1_000_000], 1.0)
    for sigmas in (1, 3, 4):
        assert not count_within(int(np.sum(large > sigmas)), large.size, stats.norm.sf(sigmas))


def test_the_checks_notice_a_shift_and_a_dependence(samples: np.ndarray) -> None:
    assert not mean_within(samples + 0.01, 1.0)
    first, other = samples[:1_000_000], samples[1_000_000:2_000_000]
    assert not is_uncorrelated(first, other + 0.01 * first)
    same_size = first * np.sign(other)
    assert not is_uncorrelated(np.exp(-(first**2)), np.exp(-(same_size**2)))


def test_the_checks_notice_a_law_that_is_not_normal(samples: np.ndarray) -> None:
    laplace = np.random.default_rng(0).laplace(scale=0.5**0.5, size=1_000_000)
    assert not is_normal(laplace, 1.0)
    assert not count_within(int(np.sum(laplace > 4)), laplace.size, stats.norm.sf(4))
