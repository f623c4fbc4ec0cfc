"""Arithmetic on flat vectors block by block, so that no temporary is as long as the model."""

from __future__ import annotations

from fl_app.stages import DoubleVector

_BLOCK = 1 << 14
"""Elements at a time: 128 KiB, which stay in a core's cache."""


def add_scaled(parameters_P: DoubleVector, scale: float, vector_P: DoubleVector) -> None:
    """Adds `scale` times `vector_P` to `parameters_P` in place."""
    for start in range(0, parameters_P.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        parameters_P[part] += scale * vector_P[part]
