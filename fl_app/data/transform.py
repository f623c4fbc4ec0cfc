"""Scaling of stored features with public constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fl_app import checks
from fl_app.plugins import Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class Standardize(Transform):
    """Maps a stored value v of channel c to (v / largest - mean[c]) / std[c].

    Attributes:
        largest: the largest stored value, e.g. 255.
        mean: public mean of each channel after the division by `largest`.
        std: public standard deviation of each channel after the division by `largest`.
    """

    largest: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, stored: npt.NDArray[Any]) -> torch.Tensor:
        """Returns float32 [B, C, ...] of `stored` [B, C, ...]; B may be 0."""
        batch = torch.from_numpy(np.array(stored, dtype=np.float32))
        batch.div_(self.largest)
        if len(self.mean) == 1:
            return batch.sub_(self.mean[0]).div_(self.std[0])
        channels = (1, len(self.mean)) + (1,) * (batch.dim() - 2)
        mean, std = (torch.tensor(values).view(channels) for values in (self.mean, self.std))
        return batch.sub_(mean).div_(std)


def check_constants(
    mean: tuple[float, ...], std: tuple[float, ...], shape: tuple[int, ...] | None = None
) -> None:
    """Raises SettingsError unless `mean` and `std` are as many finite numbers, `std` above 0.

    With a `shape` (of one input), they must be one or as many as its first side.
    """
    if shape is not None:
        if not shape:
            raise checks.fail("dataset.shape", [], "must have at least one side")
        for i, side in enumerate(shape):
            checks.at_least(f"dataset.shape[{i}]", side, 1)
        if len(mean) not in (1, shape[0]):
            raise checks.fail(
                "dataset.mean", list(mean), f"must have one value, or {shape[0]} (dataset.shape[0])"
            )
    elif len(mean) not in (1, 3):
        raise checks.fail(
            "dataset.mean", list(mean), "must have one value per channel: 1 (grey) or 3 (colour)"
        )
    if len(std) != len(mean):
        raise checks.fail(
            "dataset.std", list(std), f"must have {len(mean)} values like dataset.mean"
        )
    for i, (centre, scale) in enumerate(zip(mean, std, strict=True)):
        checks.number(f"dataset.mean[{i}]", centre)
        checks.positive(f"dataset.std[{i}]", scale)
