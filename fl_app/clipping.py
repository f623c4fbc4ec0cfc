"""Clipping: bounds how far one update can move a sum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fl_app.errors import PrivacyError
from fl_app.stages import DoubleVector, FloatVector

_Vector = TypeVar("_Vector", FloatVector, DoubleVector)

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
    return _clip(vector_P, clipping_norm, l2_norm)


def clip_l1(vector_P: FloatVector, clipping_norm: float) -> FloatVector:
    """Returns `vector_P` scaled down, if need be, to an L1 norm of at most `clipping_norm`.

    Guarantee and edge cases are those of `clip_l2`, with the sum of absolute values as the norm.
    """
    return _clip(vector_P, clipping_norm, l1_norm)


def clip_layers(
    vector_P: FloatVector,
    layer_sizes: Sequence[int],
    clipping_norms: Sequence[float],
    clip: Callable[[FloatVector, float], FloatVector],
) -> FloatVector:
    """Returns `vector_P` with every layer clipped by itself.

    Guarantee:
        Each layer keeps the guarantee of `clip`, so the norm of the whole is at most that of
        `clipping_norms`. A NaN or infinite element anywhere: all layers are zero.

    Args:
        vector_P: [P] float32; other types are converted first.
        layer_sizes: elements of each layer, in order; they add up to P.
        clipping_norms: the bound of each layer, finite and > 0.
        clip: `clip_l2` or `clip_l1`.

    Raises:
        PrivacyError: the sizes are not those of the vector, or a bound bounds nothing.
    """
    vector_P = np.asarray(vector_P, dtype=np.float32)
    parts = split_layers(vector_P, layer_sizes)
    clipped = [clip(part, norm) for part, norm in zip(parts, clipping_norms, strict=True)]
    return np.concatenate(clipped) if np.isfinite(vector_P).all() else np.zeros_like(vector_P)


def split_layers(vector_P: _Vector, layer_sizes: Sequence[int]) -> list[_Vector]:
    """Returns views of the layers of a flat vector.

    Raises:
        PrivacyError: the sizes do not add up to P.
    """
    if sum(layer_sizes) != vector_P.size or vector_P.ndim != 1:
        raise PrivacyError(
            f"layer sizes add up to {sum(layer_sizes)}: the vector has {vector_P.shape} numbers"
        )
    ends = list(itertools.accumulate(layer_sizes))
    return [vector_P[end - size : end] for size, end in zip(layer_sizes, ends, strict=True)]


def _clip(
    vector_P: FloatVector, clipping_norm: float, norm_of: Callable[[FloatVector], float]
) -> FloatVector:
    if not (math.isfinite(clipping_norm) and clipping_norm > 0):
        raise PrivacyError(f"clipping_norm={clipping_norm}: must be a finite number > 0")
    vector_P = np.asarray(vector_P, dtype=np.float32)
    norm = norm_of(vector_P)
    if not math.isfinite(norm):
        return np.zeros_like(vector_P)
    if norm <= clipping_norm:
        return vector_P
    clipped_P = np.empty_like(vector_P)
    factor = clipping_norm / norm * _SHRINK
    np.multiply(vector_P, factor, out=clipped_P, dtype=np.float64, casting="same_kind")
    return clipped_P if norm_of(clipped_P) <= clipping_norm else np.zeros_like(vector_P)


def is_finite(vector_P: npt.NDArray[Any]) -> bool:
    """Returns whether no element is NaN or infinite; looks block by block, without a mask [P]."""
    flat = vector_P.reshape(-1)
    starts = range(0, flat.size, _BLOCK)
    return all(bool(np.isfinite(flat[start : start + _BLOCK]).all()) for start in starts)


def l2_norm(vector_P: FloatVector) -> float:
    """Returns the L2 norm in float64, not finite if an element is not. As private as the vector."""
    return math.sqrt(math.fsum(float(part @ part) for part in _wide_blocks(vector_P)))


def l1_norm(vector_P: FloatVector) -> float:
    """Returns the L1 norm in float64, not finite if an element is not. As private as the vector."""
    return math.fsum(float(np.abs(part).sum()) for part in _wide_blocks(vector_P))


def _wide_blocks(vector_P: FloatVector) -> Iterator[DoubleVector]:
    """Yields the elements in order, in float64, a block at a time (memory)."""
    flat = vector_P.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        yield flat[start : start + _BLOCK].astype(np.float64)
