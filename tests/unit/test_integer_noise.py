"""Integer noise: the tables are exact to 2^-100, and the sampler draws what they say."""

import mpmath
import numpy as np
import pytest
from scipy import stats

from fl_app.errors import PrivacyError
from fl_app.integer_noise import LARGEST_STD, IntegerTable, table
from fl_app.privacy import NoiseKind
from fl_app.rng import NoiseSource

LAWS = [NoiseKind.DISCRETE_GAUSSIAN, NoiseKind.SKELLAM]
FALSE_ALARM = 1e-6


def weights(law: IntegerTable) -> list[int]:
    """The probabilities of -largest .. largest in units of 2^-128, read off the table."""
    full = 1 << (128 - law.index_bits)
    own = [(int(h) << 64) + int(low) for h, low in zip(law.high, law.low, strict=True)]
    total = list(own)
    for column, alias in enumerate(law.alias.tolist()):
        total[alias] += full - own[column]
    assert not any(total[2 * law.largest + 1 :])
    return total[: 2 * law.largest + 1]


def true_law(kind: NoiseKind, variance: float, largest: int) -> list[mpmath.mpf]:
    """By mpmath at 60 digits: theta and Bessel functions, nothing that the tables use."""
    v, values = mpmath.mpf(variance), range(largest + 1)
    if kind is NoiseKind.SKELLAM:
        half = [mpmath.exp(-v) * mpmath.besseli(x, v) for x in values]
    else:
        total = mpmath.jtheta(3, 0, mpmath.exp(-1 / (2 * v)))
        half = [mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * v)) / total for x in values]
    return half[:0:-1] + half


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("variance", [0.01, 0.25, 1.7, 30.0, 1000.1])
def test_a_table_is_the_true_law_up_to_2_to_the_minus_100(kind: NoiseKind, variance: float) -> None:
    with mpmath.workdps(60):
        law = table(kind, variance)
        exact = true_law(kind, variance, law.largest)
        drawn = [mpmath.mpf(w) / 2**128 for w in weights(law)]
        assert sum(weights(law)) == 2**128
        tail = 1 - mpmath.fsum(exact)
        inside = mpmath.fsum(abs(p - q) for p, q in zip(exact, drawn, strict=True))
        assert tail > -(mpmath.mpf(10) ** -50)
        assert (inside + tail) / 2 < mpmath.mpf(2) ** -100
        # Negative control: the same comparison notices a variance that is a millionth off.
        near = true_law(kind, variance * (1 + 1e-6), 1)
        middle = drawn[law.largest - 1 : law.largest + 2]
        moved = mpmath.fsum(abs(p - q) for p, q in zip(near, middle, strict=True))
        assert moved > mpmath.mpf(2) ** -100


@pytest.mark.parametrize("kind", LAWS)
def test_the_largest_table_fits_a_cache_and_is_symmetric(kind: NoiseKind) -> None:
    law = table(kind, LARGEST_STD**2)
    assert law.high.size == 2**16
    drawn = weights(law)
    # The middle takes what the rounding of the others left.
    assert drawn[: law.largest] == drawn[: law.largest : -1]
    values = np.arange(-law.largest, law.largest + 1, dtype=np.float64)
    share = np.array([w / 2**128 for w in drawn])
    assert float(share @ values**2) == pytest.approx(LARGEST_STD**2, rel=1e-12)


@pytest.mark.parametrize("variance", [0.0, -1.0, np.nan, np.inf, LARGEST_STD**2 * 1.01])
def test_impossible_variances_are_refused(variance: float) -> None:
    with pytest.raises(PrivacyError, match="integer noise: variance="):
        table(NoiseKind.SKELLAM, variance)


def test_continuous_laws_have_no_table() -> None:
    with pytest.raises(PrivacyError, match="kind=gaussian"):
        table(NoiseKind.GAUSSIAN, 1.0)


def fits(sample: np.ndarray, law: IntegerTable) -> bool:
    """Chi-square over the values of at least 20 expected draws; false alarm 1e-6."""
    expected = np.array([w / 2**128 for w in weights(law)]) * sample.size
    seen = np.bincount(sample + law.largest, minlength=expected.size)
    common = expected >= 20
    seen = np.append(seen[common], seen[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    kept = expected > 0
    return bool(stats.chisquare(seen[kept], expected[kept]).pvalue > FALSE_ALARM)


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("variance", [0.3, 9.0, 5000.0])
def test_two_million_draws_fit_the_law_and_no_other(kind: NoiseKind, variance: float) -> None:
    sample = NoiseSource.from_os().integers(table(kind, variance), 2_000_000)
    assert sample.dtype == np.int64
    assert fits(sample, table(kind, variance))
    assert not fits(sample, table(kind, variance * 1.02))


def test_neighbouring_draws_are_uncorrelated() -> None:
    sample = NoiseSource.from_os().integers(table(NoiseKind.SKELLAM, 100.0), 1_000_000)
    pairs = stats.pearsonr(sample[:-1], sample[1:])
    assert pairs.pvalue > FALSE_ALARM
    assert stats.pearsonr(sample[:-1] + sample[1:], sample[1:]).pvalue < FALSE_ALARM


def test_what_one_word_leaves_open_is_decided_by_the_low_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    law = table(NoiseKind.DISCRETE_GAUSSIAN, 9.0)
    column = int(np.flatnonzero((law.low > 0) & (law.alias != np.arange(law.alias.size)))[0])
    tied = (int(law.high[column]) << law.index_bits) + column
    low = int(law.low[column])
    answers = {3: [tied, tied, tied + (1 << law.index_bits)], 2: [low - 1, low]}

    def words(self: NoiseSource, count: int) -> np.ndarray:
        return np.array(answers[count], np.uint64)

    monkeypatch.setattr(NoiseSource, "_raw_words", words)
    own, alias = column - law.largest, int(law.alias[column]) - law.largest
    assert NoiseSource.from_os().integers(law, 3).tolist() == [own, alias, alias]


def test_s12_seeded_integers_repeat_and_others_do_not() -> None:
    law = table(NoiseKind.SKELLAM, 50.0)
    first, again = (NoiseSource.seeded_from(0, "test", 1).integers(law, 1000) for _ in range(2))
    assert first.tobytes() == again.tobytes()
    fresh = [NoiseSource.from_os().integers(law, 1000).tobytes() for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_uniforms_lie_in_the_half_open_interval_and_fit() -> None:
    sample = NoiseSource.from_os().uniform(1_000_000)
    assert sample.min() >= 0
    assert sample.max() < 1
    assert stats.kstest(sample, "uniform").pvalue > FALSE_ALARM
    assert stats.kstest(sample * 1.01, "uniform").pvalue < FALSE_ALARM
