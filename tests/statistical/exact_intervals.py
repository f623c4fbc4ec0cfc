"""Exact acceptance intervals; each rejects a true hypothesis with probability 1e-6 at most."""

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-6


def std_within(sample: np.ndarray, std: float, mean: float = 0.0) -> bool:
    """True if the sample's std about `mean` fits normal noise of `std` (chi-square, two-sided)."""
    squares = float(np.sum((sample.astype(np.float64) - mean) ** 2)) / std**2
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], df=sample.size)
    return bool(low <= squares <= high)


def mean_within(sample: np.ndarray, std: float, mean: float = 0.0) -> bool:
    """True if the sample's mean fits normal noise of `std` about `mean` (z test, two-sided)."""
    z = (float(np.mean(sample, dtype=np.float64)) - mean) / (std / sample.size**0.5)
    return bool(abs(z) <= stats.norm.ppf(1 - FALSE_ALARM / 2))


def is_normal(sample: np.ndarray, std: float) -> bool:
    """True if the sample fits the normal law of mean 0 and `std` (Kolmogorov-Smirnov)."""
    return bool(stats.kstest(sample.astype(np.float64) / std, "norm").pvalue > FALSE_ALARM)


def scale_within(sample: np.ndarray, scale: float) -> bool:
    """True if the sample fits Laplace noise of `scale`: 2 sum |x| / scale is chi-square (2n)."""
    total = 2 * float(np.sum(np.abs(sample.astype(np.float64)))) / scale
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], df=2 * sample.size)
    return bool(low <= total <= high)


def is_laplace(sample: np.ndarray, scale: float) -> bool:
    """True if the sample fits the Laplace law of mean 0 and `scale` (Kolmogorov-Smirnov)."""
    return bool(stats.kstest(sample.astype(np.float64) / scale, "laplace").pvalue > FALSE_ALARM)


def is_uncorrelated(first: np.ndarray, second: np.ndarray) -> bool:
    """True if two samples of independent normals fit a correlation of zero (Fisher's z)."""
    r = float(np.corrcoef(first, second)[0, 1])
    z = np.arctanh(np.clip(r, -1 + 1e-15, 1 - 1e-15)) * (first.size - 3) ** 0.5
    return bool(abs(z) <= stats.norm.ppf(1 - FALSE_ALARM / 2))


def count_within(count: int, num: int, probability: float) -> bool:
    """True if `count` of `num` independent trials fits `probability` (binomial, two-sided)."""
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], num, probability)
    return bool(low <= count <= high)
