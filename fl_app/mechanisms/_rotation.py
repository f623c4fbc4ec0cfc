"""The randomized Hadamard rotation: spreads a vector evenly over its elements before rounding.

Shape letters: P parameters, W the next power of two (what is padded holds zeros).
"""

from __future__ import annotations

import math

import numpy as np

from fl_app import rng
from fl_app.stages import DoubleVector, RoundOrder


def padded_size(num_parameters: int) -> int:
    """Returns W, the smallest power of two that is at least `num_parameters`."""
    return 1 << max(0, num_parameters - 1).bit_length()


def rotate(vector_P: DoubleVector, order: RoundOrder) -> DoubleVector:
    """Returns the rotated vector [W], of the same L2 norm: a Hadamard matrix after random signs.

    Every element is then sub-Gaussian with a variance of |vector|^2 / W over the signs (Kairouz,
    Liu and Steinke 2021, arXiv:2102.06387, section 4).
    """
    vector_W = np.zeros(padded_size(vector_P.size))
    vector_W[: vector_P.size] = vector_P
    vector_W *= _signs(order, vector_W.size)
    _hadamard(vector_W)
    return vector_W


def rotate_back(vector_W: DoubleVector, order: RoundOrder) -> None:
    """Undoes `rotate` in place, up to float64 rounding and the padding."""
    _hadamard(vector_W)
    vector_W *= _signs(order, vector_W.size)


def _signs(order: RoundOrder, size: int) -> DoubleVector:
    """Returns the round's signs [W], the same for everybody: public, and no secret of privacy."""
    stream = rng.stream(0, "rotation", order.round, order.attempt)
    return stream.choice(np.array([-1.0, 1.0]), size)


def _hadamard(vector_W: DoubleVector) -> None:
    """Multiplies by the orthonormal Hadamard matrix in place; it is its own inverse."""
    half = 1
    while half < vector_W.size:
        pairs = vector_W.reshape(-1, 2, half)
        difference = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = difference
        half *= 2
    vector_W /= math.sqrt(vector_W.size)
