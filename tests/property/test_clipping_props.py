"""clip_l2 and clip_l1 for any float32 vector and any bound."""

import math

import hypothesis.extra.numpy as arrays
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fl_app.clipping import clip_l1, clip_l2

VECTORS = arrays.arrays(
    np.float32, arrays.array_shapes(min_dims=0, max_dims=1, min_side=0, max_side=40)
)
FINITE = arrays.arrays(
    np.float32,
    st.integers(0, 40),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)
BOUNDS = st.floats(1e-40, 1e40, allow_nan=False)


def exact_norm(vector: np.ndarray) -> float:
    return math.sqrt(math.fsum(float(v) ** 2 for v in np.atleast_1d(vector)))


@given(VECTORS, BOUNDS)
def test_clipped_norm_never_exceeds_the_bound(vector: np.ndarray, bound: float) -> None:
    assert exact_norm(clip_l2(vector, bound)) <= bound * (1 + 1e-12)


@given(FINITE, BOUNDS)
def test_clipping_keeps_direction_and_touches_only_what_is_too_long(
    vector: np.ndarray, bound: float
) -> None:
    clipped, norm = clip_l2(vector, bound), exact_norm(vector)
    if norm <= bound * (1 - 1e-12):
        assert clipped.tobytes() == vector.tobytes()
    elif norm > bound * (1 + 1e-12):
        expected = vector.astype(np.float64) * (bound / norm)
        error = np.abs(clipped - expected)
        below_float32 = bound < 1e-37 and not clipped.any()
        assert below_float32 or (error <= 1e-6 * np.abs(expected) + 2e-45).all()


@given(FINITE, BOUNDS)
def test_clipping_twice_changes_nothing_more(vector: np.ndarray, bound: float) -> None:
    once = clip_l2(vector, bound)
    assert clip_l2(once, bound).tobytes() == once.tobytes()


@given(VECTORS, BOUNDS)
def test_clipped_l1_norm_never_exceeds_the_bound(vector: np.ndarray, bound: float) -> None:
    clipped = clip_l1(vector, bound)
    assert math.fsum(abs(float(v)) for v in np.atleast_1d(clipped)) <= bound * (1 + 1e-12)
    assert clip_l1(clipped, bound).tobytes() == clipped.tobytes()
