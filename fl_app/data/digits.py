"""The embedded dataset: scikit-learn's handwritten digits, 1,797 grey images of 8 x 8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_app.data import cache
from fl_app.data.holdout import check_fraction, set_aside
from fl_app.data.transform import Standardize
from fl_app.plugins import Dataset
from fl_app.stages import LoadedData

_TEST_ROWS = 360
_SPLIT_SEED = 20_260_101
_LARGEST_VALUE = 16.0
_NUM_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits(Dataset):
    """1,437 training and 360 public test rows of shape (1, 8, 8), 10 labels.

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
        facts = ("digits", _TEST_ROWS, _SPLIT_SEED, self.validation_fraction)
        decode = set_aside(_decode, self.validation_fraction)
        decoded = cache.find_or_decode(cache_dir, f"digits-{cache.fingerprint(*facts)}", decode)
        return decoded.loaded(Standardize(largest=_LARGEST_VALUE, mean=(0.3,), std=(1.0,)))


def _decode(folder: Path) -> int:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    rows = train_test_split(
        np.arange(len(labels)), test_size=_TEST_ROWS, stratify=labels, random_state=_SPLIT_SEED
    )
    for split, chosen in zip(cache.SPLITS, rows, strict=True):
        features = images[chosen].astype(np.uint8).reshape(-1, 1, 8, 8)
        np.save(cache.array_path(folder, split, "features"), features)
        np.save(cache.array_path(folder, split, "labels"), labels[chosen].astype(np.int64))
    return _NUM_CLASSES


PLUGIN = Digits
