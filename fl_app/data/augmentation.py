"""Random changes of stored images, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_app.plugins import Augmentation

KINDS = ("none", "flip_crop")

_PADDING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipCrop(Augmentation):
    """Mirrors an image left to right with probability 1/2, then shifts it.

    The shift is what cutting the image's own size out of the image with a zero border gives: -4 to
    4 pixels in each direction, uniformly (He et al. 2016, arXiv:1512.03385, section 4.2).

    Attributes:
        padding: width of the border, in pixels.
    """

    padding: int = _PADDING

    def __call__(self, stored: npt.NDArray[Any], batches: np.random.Generator) -> npt.NDArray[Any]:
        """Returns new images of the same shape and type as `stored` [B, C, H, W]."""
        draws_B3 = batches.random((len(stored), 3))
        flips_B = draws_B3[:, 0] < 0.5
        offsets_B2 = (draws_B3[:, 1:] * (2 * self.padding + 1)).astype(np.int64)
        border = ((0, 0), (0, 0), (self.padding,) * 2, (self.padding,) * 2)
        padded = np.pad(np.where(_like(flips_B, stored), stored[..., ::-1], stored), border)
        height, width = stored.shape[2:]
        result = np.empty_like(stored)
        for row, (top, left) in enumerate(offsets_B2):
            result[row] = padded[row, :, top : top + height, left : left + width]
        return result


def augmentation(kind: str) -> Augmentation | None:
    """Returns the augmentation of ``dataset.augment``; None for ``none``."""
    return FlipCrop() if kind == "flip_crop" else None


def _like(flags_B: npt.NDArray[np.bool_], images: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return flags_B.reshape(-1, *[1] * (images.ndim - 1))
