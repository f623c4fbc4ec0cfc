"""Generated images: one smooth Gaussian pattern for each label, and Gaussian noise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fl_app import checks
from fl_app.data import cache
from fl_app.data.holdout import check_fraction, set_aside
from fl_app.data.transform import Standardize
from fl_app.plugins import Dataset
from fl_app.stages import LoadedData

_SIDE = 28
_BLOCK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic(Dataset):
    """Images of shape (1, 28, 28): signal * pattern of the label + standard normal noise.

    A pattern is 7 x 7 standard normal blocks of 4 x 4 pixels. The labels are as frequent as each
    other; label skew is the partitioner's. The same values give the same data on every node.

    Attributes:
        num_train: training rows of all clients.
        num_test: public test rows.
        num_classes: labels.
        signal: scale of the patterns. Two of them are about 40 * signal noise stds apart.
        seed: of patterns and noise, so the data do not change with ``run.seed``.
        validation_fraction: share of the training rows that nobody trains on, for choices made
            before a run (``run.evaluate_on=validation``).
    """

    num_train: int
    num_test: int
    num_classes: int
    signal: float
    seed: int
    validation_fraction: float = 0.0

    def __post_init__(self) -> None:
        checks.at_least("dataset.num_train", self.num_train, 1)
        checks.at_least("dataset.num_test", self.num_test, 1)
        checks.at_least("dataset.num_classes", self.num_classes, 2)
        checks.positive("dataset.signal", self.signal)
        checks.at_least("dataset.seed", self.seed, 0)
        check_fraction(self.validation_fraction)

    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the dataset; `data_path` is not looked at, the rows are generated."""
        key = f"synthetic-{cache.fingerprint('synthetic', asdict(self))}"
        decode = set_aside(self._generate, self.validation_fraction)
        decoded = cache.find_or_decode(cache_dir, key, decode)
        return decoded.loaded(Standardize(largest=1.0, mean=(0.0,), std=(1.0,)))

    def _generate(self, folder: Path) -> int:
        random = np.random.default_rng(self.seed)
        blocks = random.normal(size=(self.num_classes, _SIDE // _BLOCK, _SIDE // _BLOCK))
        patterns = np.kron(blocks, np.ones((1, _BLOCK, _BLOCK))).astype(np.float32)
        for split, rows in zip(cache.SPLITS, (self.num_train, self.num_test), strict=True):
            labels = random.permutation(np.arange(rows) % self.num_classes)
            images = random.normal(size=(rows, _SIDE, _SIDE)).astype(np.float32)
            images += np.float32(self.signal) * patterns[labels]
            np.save(cache.array_path(folder, split, "features"), images[:, np.newaxis])
            np.save(cache.array_path(folder, split, "labels"), labels.astype(np.int64))
        return self.num_classes


PLUGIN = Synthetic
