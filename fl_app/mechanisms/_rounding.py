"""Random rounding to integers under a bound on the norm.

Kairouz, Liu and Steinke 2021, arXiv:2102.06387, section 4 (conditional randomized rounding).
"""

from __future__ import annotations

import math

import numpy as np

from fl_app.rng import NoiseSource
from fl_app.stages import DoubleVector, IndexVector

BETA = math.exp(-0.5)
"""The bound is kept by one try at random with a probability of at least 1 - BETA."""
_TRIES = 100


def rounded_norm_squared(norm: float, dimension: int) -> int:
    """Returns the largest squared L2 norm that `round_within` may leave.

    The smaller of two: one that holds always, (norm + sqrt(d))^2, and one that a try exceeds with a
    probability of at most BETA: norm^2 + d / 4 + sqrt(2 ln(1 / BETA)) (norm + sqrt(d) / 2).

    Args:
        norm: a bound on the L2 norm before rounding, in integer units.
        dimension: d.
    """
    root = math.sqrt(dimension)
    always = (norm + root) ** 2
    mostly = norm**2 + dimension / 4 + math.sqrt(-2 * math.log(BETA)) * (norm + root / 2)
    return max(1, math.floor(min(always, mostly)))


def round_within(vector_W: DoubleVector, norm_squared: int, noise: NoiseSource) -> IndexVector:
    """Returns integers next to `vector_W`, each of the two at random so that the mean is kept.

    Guarantee: the squared L2 norm of the result is at most `norm_squared`, computed exactly.
        - a try that exceeds it is made again; the mean is then kept only nearly;
        - after 100 tries every element is rounded towards zero (probability BETA^100 < 1e-21);
        - if even that exceeds it, all zeros: the vector was longer than promised.

    Args:
        vector_W: elements below 2**30.
        norm_squared: at most 2**61.
        noise: the client's own source.
    """
    floor_W = np.floor(vector_W)
    fraction_W = vector_W - floor_W
    for _ in range(_TRIES):
        rounded_W = (floor_W + (noise.uniform(vector_W.size) < fraction_W)).astype(np.int64)
        if int(rounded_W @ rounded_W) <= norm_squared:
            return rounded_W
    rounded_W = np.trunc(vector_W).astype(np.int64)
    return rounded_W if int(rounded_W @ rounded_W) <= norm_squared else np.zeros_like(rounded_W)
