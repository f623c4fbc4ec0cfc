"""Clipping: bounds how far one update can move a sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_app.errors import PrivacyError
from fl_app.stages import FloatVector

_BLOCK = 1 << 13
"""Elements squared at a time: 64 KiB in float64, which stay in a core's cache."""
_SHRINK = 1 - 2.0**-23
"""Room for rounding to float32, which moves an element by at most 2**-24 of itself."""


def clip_l2(vector_P: FloatVector, clipping_norm: float) -> FloatVector:
    """Returns `vector_P` scaled down, if need be, to an L2 norm of at most `clipping_norm`.

    One norm over all elements, computed in float64, where squares of float32 cannot overflow.

    Guarantee:
        L2 norm of the result <= `clipping_norm`, after the rounding to float32, so adding or
        zeroing one update moves a sum of results by at most that (CLIENT, ZERO_OUT).
        - a NaN or infinite element anywhere: all zeros;
        - all zeros, and vectors within the bound: returned as they are, bit for bit (not copied;
          "within" is judged up to the float64 rounding of the norm, below 1e-12 relative);
        - empty, one-element and 0-d vectors obey the same rules;
        - a bound below the resolution of float32: all zeros.

    Args:
        vector_P: [P] float32; other types are converted first.
        clipping_norm: C, finite and > 0.

    Raises:
        PrivacyError: `clipping_norm` bounds nothing.
    """
    if not (math.isfinite(clipping_norm) and clipping_norm > 0):
        raise PrivacyError(f"clipping_norm={clipping_norm}: must be a finite number > 0")
    vector_P = np.asarray(vector_P, dtype=np.float32)
    norm = l2_norm(vector_P)
    if not math.isfinite(norm):
        return np.zeros_like(vector_P)
    if norm <= clipping_norm:
        return vector_P
    clipped_P = np.empty_like(vector_P)
    factor = clipping_norm / norm * _SHRINK
    np.multiply(vector_P, factor, out=clipped_P, dtype=np.float64, casting="same_kind")
    return clipped_P if l2_norm(clipped_P) <= clipping_norm else np.zeros_like(vector_P)


def is_finite(vector_P: npt.NDArray[Any]) -> bool:
    """Returns whether no element is NaN or infinite; looks block by block, without a mask [P]."""
    flat = vector_P.reshape(-1)
    starts = range(0, flat.size, _BLOCK)
    return all(bool(np.isfinite(flat[start : start + _BLOCK]).all()) for start in starts)


def l2_norm(vector_P: FloatVector) -> float:
    """Returns the L2 norm in float64, not finite if an element is not. As private as the vector."""
    flat = vector_P.reshape(-1)
    total = 0.0
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK].astype(np.float64)
        total += float(part @ part)
    return math.sqrt(total)
