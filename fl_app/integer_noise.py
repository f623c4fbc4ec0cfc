"""Integer noise: the discrete Gaussian and the Skellam law as alias tables of 128-bit weights.

A table is made with whole numbers only. `NoiseSource.integers` draws from it: one 64-bit word of
the keystream picks a column and decides, by 64 further bits where the first word leaves it open,
between the column's own value and its alias (Walker 1977, doi:10.1145/355744.355749; built as Vose
1991, doi:10.1109/32.92917).

Guarantee: one draw has the true law up to a total variation distance below 2**-100: a tail that is
    cut off (below 2**-103), and the weights' rounding (below 2**-110). A million parameters, a
    million times, add less than 2**-60 to delta.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fl_app.errors import PrivacyError
from fl_app.privacy import NoiseKind

LARGEST_STD = 2048.0
"""The largest std of a table: some 50,000 columns, which stay in a core's cache."""

_WEIGHT_BITS = 128
_FIXED = 384
"""Bits behind the point while weights are computed: errors stay far below 2**-128."""
_TAIL_BITS = 104
_WORD = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntegerTable:
    """A law on -`largest` .. `largest` with weights that are multiples of 2**-128.

    Attributes:
        largest: the largest value.
        index_bits: a column's number has so many bits; a power of two of columns, K.
        high: [K] uint64, the upper 64 - `index_bits` bits of each column's threshold, out of
            2**(128 - `index_bits`): below it the column's own value is drawn, else its alias.
        low: [K] uint64, the lower 64 bits of the threshold.
        alias: [K] int64, column number of the alias.
    """

    largest: int
    index_bits: int
    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]
    alias: npt.NDArray[np.int64]


@functools.lru_cache(maxsize=8)
def table(kind: NoiseKind, variance: float) -> IntegerTable:
    """Returns the table of one law: made once per process and variance, in a tenth of a second.

    Args:
        kind: DISCRETE_GAUSSIAN: P(x) ~ exp(-x^2 / (2 variance)) on the integers, whose variance is
            at most `variance` (Canonne, Kamath and Steinke 2020, arXiv:2004.00010). SKELLAM: the
            difference of two Poissons of mean variance / 2 each.
        variance: > 0, at most `LARGEST_STD` squared.

    Raises:
        PrivacyError: another kind or variance.
    """
    if not 0 < variance <= LARGEST_STD**2:
        raise PrivacyError(
            f"integer noise: variance={variance} must be > 0 and at most {LARGEST_STD**2:g}"
        )
    if kind not in _WEIGHTS:
        raise PrivacyError(f"integer noise: kind={kind} has no integer table")
    return _alias_table(_normalized(_WEIGHTS[kind](variance)))


def _discrete_gaussian(variance: float) -> list[int]:
    """Returns numbers in proportion to exp(-x^2 / (2 variance)), x = 0 .. largest.

    The two tails beyond hold less than exp(-largest^2 / (2 variance)): they are no heavier than a
    Gaussian's from one step further in (Canonne, Kamath and Steinke 2020, arXiv:2004.00010).
    """
    largest = math.ceil(math.sqrt(2 * _TAIL_BITS * math.log(2) * variance))
    context = Context(prec=_FIXED // 3)
    twice = context.multiply(Decimal(2), Decimal(variance))
    step = context.divide(Decimal(-1), twice).exp(context)
    step_fixed = int(context.multiply(step, Decimal(2**_FIXED)))
    ratio, step_squared = step_fixed, step_fixed * step_fixed >> _FIXED
    weights = [1 << _FIXED]
    for _ in range(largest):
        weights.append(weights[-1] * ratio >> _FIXED)
        ratio = ratio * step_squared >> _FIXED
    return weights


def _skellam(variance: float) -> list[int]:
    """Returns numbers in proportion to I_x(variance), the Bessel function, x = 0 .. largest.

    By its recurrence I_(x-1) = I_(x+1) + (2 x / variance) I_x, downwards from far outside (Miller's
    algorithm), where it is stable.
    """
    largest = _skellam_largest(variance)
    inverse = 1 / Fraction(variance)
    above, here = 0, 1 << _FIXED
    weights = []
    for x in range(2 * largest + 64, 0, -1):
        above, here = here, above + 2 * x * here * inverse.numerator // inverse.denominator
        if x <= largest + 1:
            weights.append(here)
    return weights[::-1]


def _skellam_largest(variance: float) -> int:
    """Returns where the two tails beyond hold less than 2**-_TAIL_BITS, by Chernoff's bound."""

    def tail_bits(value: int) -> float:
        slope = math.asinh(value / variance)
        exponent = variance * (math.sqrt(1 + (value / variance) ** 2) - 1) - slope * value
        return -exponent / math.log(2) - 1

    high = 1
    while tail_bits(high) < _TAIL_BITS:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if tail_bits(middle) >= _TAIL_BITS else (middle, high)
    return high


_WEIGHTS: dict[NoiseKind, Callable[[float], list[int]]] = {
    NoiseKind.DISCRETE_GAUSSIAN: _discrete_gaussian,
    NoiseKind.SKELLAM: _skellam,
}


def _normalized(half: Sequence[int]) -> list[int]:
    """Returns whole weights of -largest .. largest with the sum 2**128; the middle takes the rest.

    Args:
        half: the unnormalized weights of 0 .. largest of a symmetric law.
    """
    total = 2 * sum(half) - half[0]
    scaled = [(weight << _WEIGHT_BITS) // total for weight in half]
    weights = scaled[:0:-1] + scaled
    weights[len(half) - 1] += (1 << _WEIGHT_BITS) - sum(weights)
    return weights


def _alias_table(weights: list[int]) -> IntegerTable:
    """Returns the table that draws column k with probability ``weights[k]`` / 2**128 exactly."""
    index_bits = max(1, (len(weights) - 1).bit_length())
    num_columns = 1 << index_bits
    full = 1 << (_WEIGHT_BITS - index_bits)
    left = weights + [0] * (num_columns - len(weights))
    alias = list(range(num_columns))
    thresholds = [full] * num_columns
    small = [k for k, weight in enumerate(left) if weight < full]
    large = [k for k, weight in enumerate(left) if weight >= full]
    while small:
        k, donor = small.pop(), large[-1]
        thresholds[k], alias[k] = left[k], donor
        left[donor] -= full - left[k]
        if left[donor] < full:
            small.append(large.pop())
    mask = (1 << _WORD) - 1
    return IntegerTable(
        largest=(len(weights) - 1) // 2,
        index_bits=index_bits,
        high=np.array([t >> _WORD for t in thresholds], np.uint64),
        low=np.array([t & mask for t in thresholds], np.uint64),
        alias=np.array(alias, np.int64),
    )
