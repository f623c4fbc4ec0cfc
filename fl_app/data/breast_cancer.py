"""A medical table: scikit-learn's breast cancer (Wisconsin, diagnostic), 30 numbers, 2 labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_app.data import cache
from fl_app.data.holdout import check_fraction, set_aside
from fl_app.data.transform import Standardize
from fl_app.plugins import Dataset
from fl_app.stages import LoadedData

_TEST_ROWS = 114
_SPLIT_SEED = 20_260_101
_NUM_CLASSES = 2
RANGES = (
    # the means of the nuclei of one image: radius, texture, perimeter, area, smoothness,
    # compactness, concavity, concave points, symmetry, fractal dimension
    (6.981, 28.11), (9.71, 39.28), (43.79, 188.5), (143.5, 2501.0), (0.053, 0.163),
    (0.019, 0.345), (0.0, 0.427), (0.0, 0.201), (0.106, 0.304), (0.05, 0.097),
    # their standard errors
    (0.112, 2.873), (0.36, 4.885), (0.757, 21.98), (6.802, 542.2), (0.002, 0.031),
    (0.002, 0.135), (0.0, 0.396), (0.0, 0.053), (0.008, 0.079), (0.001, 0.03),
    # the worst of them
    (7.93, 36.04), (12.02, 49.54), (50.41, 251.2), (185.2, 4254.0), (0.071, 0.223),
    (0.027, 1.058), (0.0, 1.252), (0.0, 0.291), (0.156, 0.664), (0.055, 0.208),
)  # fmt: skip
"""Smallest and largest value of each column, as the dataset's public description states them."""
_CENTRE, _SPREAD = 0.3, 0.15
"""Of values scaled to [0, 1]: measurements are skewed, so they lie around 0.3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreastCancer(Dataset):
    """455 training and 114 public test rows of 30 measurements; label 0 malignant, 1 benign.

    Each column is scaled by its published range, so no statistic of the clients' rows is needed.
    The test rows are the same in every run: they do not depend on ``run.seed``.

    Attributes:
        validation_fraction: share of the training rows that nobody trains on, for choices made
            before a run (``run.evaluate_on=validation``).
    """

    validation_fraction: float = 0.0

    def __post_init__(self) -> None:
        check_fraction(self.validation_fraction)

    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the dataset; `data_path` is not looked at, the rows come with scikit-learn."""
        facts = ("breast_cancer", _TEST_ROWS, _SPLIT_SEED, self.validation_fraction)
        key = f"breast_cancer-{cache.fingerprint(*facts)}"
        decode = set_aside(_decode, self.validation_fraction)
        decoded = cache.find_or_decode(cache_dir, key, decode)
        low, high = np.array(RANGES).T
        return decoded.loaded(
            Standardize(
                largest=1.0,
                mean=tuple((low + _CENTRE * (high - low)).tolist()),
                std=tuple((_SPREAD * (high - low)).tolist()),
            )
        )


def _decode(folder: Path) -> int:
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    table, labels = load_breast_cancer(return_X_y=True)
    rows = train_test_split(
        np.arange(len(labels)), test_size=_TEST_ROWS, stratify=labels, random_state=_SPLIT_SEED
    )
    for split, chosen in zip(cache.SPLITS, rows, strict=True):
        np.save(cache.array_path(folder, split, "features"), table[chosen].astype(np.float32))
        np.save(cache.array_path(folder, split, "labels"), labels[chosen].astype(np.int64))
    return _NUM_CLASSES


PLUGIN = BreastCancer
