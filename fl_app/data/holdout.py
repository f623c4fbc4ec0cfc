"""Which rows are for training, validation and testing, where the dataset does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_app import checks
from fl_app.data import cache
from fl_app.errors import DataError
from fl_app.stages import IndexVector

SPLIT_SEED = 20_260_101
"""Public: the rows kept out of training are the same in every run, whatever ``run.seed``."""
_SHARE = 10


def hold_out(names: npt.NDArray[Any], *, ordered: bool) -> dict[str, IndexVector]:
    """Returns the sorted row numbers of each split.

    Of the groups (writers, roles), one in ten is held out whole: all of its rows are ``test``. Of
    every other group, one row in ten is ``validation`` (none if it has fewer than ten rows, so
    that nobody's only rows go) and all others are ``train``.

    Args:
        names: [N] the group of each row.
        ordered: validation rows are the group's last ones (texts, where neighbours overlap), not
            random ones.

    Raises:
        DataError: fewer than two groups.
    """
    groups, members = np.unique(names, return_inverse=True)
    if len(groups) < 2:
        raise DataError("dataset: needs rows of at least 2 groups, one of them for testing")
    random = np.random.default_rng(SPLIT_SEED)
    tested = random.permutation(len(groups))[: max(1, len(groups) // _SHARE)]
    split_of = np.full(len(names), "train", dtype="<U10")
    by_group = np.split(np.argsort(members, kind="stable"), np.cumsum(np.bincount(members))[:-1])
    for group, rows in enumerate(by_group):
        order = rows if ordered else random.permutation(rows)
        split_of[order[len(order) - len(order) // _SHARE :]] = "validation"
        if group in tested:
            split_of[rows] = "test"
    return {split: np.flatnonzero(split_of == split) for split in cache.ALL_SPLITS}


def write_splits(
    folder: Path,
    features: npt.NDArray[Any],
    labels: IndexVector,
    names: npt.NDArray[Any],
    *,
    ordered: bool,
) -> None:
    """Writes the arrays of all splits, groups numbered by name among those of training.

    Args:
        folder: the cache's folder of this dataset.
        features: [N, ...] of all rows.
        labels: [N] of all rows.
        names: [N] group of each row.
        ordered: see `hold_out`.
    """
    rows_of = hold_out(names, ordered=ordered)
    trained = np.unique(names[rows_of["train"]])
    for split, rows in rows_of.items():
        np.save(cache.array_path(folder, split, "features"), features[rows])
        np.save(cache.array_path(folder, split, "labels"), labels[rows].astype(np.int64))
        if split != "test":
            numbers = np.searchsorted(trained, names[rows]).astype(np.int64)
            np.save(cache.array_path(folder, split, "groups"), numbers)


def check_fraction(fraction: float) -> None:
    """Raises SettingsError unless ``dataset.validation_fraction`` is a share in [0, 1)."""
    key = "dataset.validation_fraction"
    if not 0 <= checks.number(key, fraction) < 1:
        raise checks.fail(key, fraction, "must be >= 0 and < 1", "set 0 for no validation rows")


def set_aside(decode: cache.Decode, fraction: float) -> cache.Decode:
    """Returns `decode` with `fraction` of the training rows moved to ``validation``; 0: none.

    The rows are drawn at random with a public constant seed: the same in every run and on every
    machine, and no client has them.

    Raises:
        DataError: (when decoding) no training row would be left.
    """

    def decode_and_cut(folder: Path) -> int:
        num_classes = decode(folder)
        if fraction > 0:
            _move_to_validation(folder, fraction)
        return num_classes

    return decode_and_cut


def _move_to_validation(folder: Path, fraction: float) -> None:
    whats = ("features", "labels")
    arrays = {what: np.load(cache.array_path(folder, "train", what)) for what in whats}
    num_rows = len(arrays["labels"])
    num_moved = max(1, round(fraction * num_rows))
    if num_moved >= num_rows:
        raise DataError(
            f"dataset.validation_fraction={fraction}: leaves none of {num_rows} rows for training; "
            "lower it"
        )
    order = np.random.default_rng(SPLIT_SEED).permutation(num_rows)
    for split, rows in (("validation", order[:num_moved]), ("train", order[num_moved:])):
        for what, array in arrays.items():
            np.save(cache.array_path(folder, split, what), array[np.sort(rows)])
