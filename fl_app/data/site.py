"""What datasets of a site's own files share: public facts from the settings, rows from the node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_app.data import cache, hub
from fl_app.data.source import Source, find_source
from fl_app.errors import DataError
from fl_app.stages import IndexVector

Rows = tuple[npt.NDArray[Any], IndexVector]
Read = Callable[[Path], Rows]
"""Returns features [N, ...] and labels [N] of the file or folder of one split."""


def load_files(
    data_path: str | None,
    path: str | None,
    cache_dir: Path,
    facts: tuple[object, ...],
    suffix: str,
    read: Read,
    shape: tuple[int, ...],
    num_classes: int,
) -> cache.Decoded:
    """Returns the rows of ``train<suffix>`` and ``test<suffix>``.

    A node (which has a `data_path`) needs no test rows, and a server no training rows; what is
    not there has no rows.

    Args:
        data_path: the node's own ``data-path``, or None.
        path: ``dataset.path``, or None.
        cache_dir: folder of all decoded datasets.
        facts: kind and settings that the stored arrays depend on; the kind names the folder.
        suffix: of the files; empty for folders.
        read: reads one of them.
        shape: of one input.
        num_classes: number of labels.

    Raises:
        DataError: not there, not readable, or not as the settings describe.
    """
    if data_path is None and path is None:
        raise DataError(
            "dataset.path=null: these are the files of a site; set data-path in the node's "
            "configuration, and dataset.path for the server or a simulation"
        )
    source = find_source(data_path, path, None)
    needed = "test" if data_path is None else "train"

    def decode(folder: Path) -> int:
        for split in cache.SPLITS:
            features, labels = _split(source, f"{split}{suffix}", split == needed, read, shape)
            check_labels(labels, num_classes, f"{source.found_as}: {split}{suffix}")
            np.save(cache.array_path(folder, split, "features"), features)
            np.save(cache.array_path(folder, split, "labels"), labels.astype(np.int64))
        return num_classes

    facts = (*facts, shape, num_classes, needed)
    return hub.load_decoded(source, cache_dir, str(facts[0]), facts, decode)


def check_labels(labels: npt.NDArray[Any], num_classes: int, where: str) -> None:
    """Raises DataError unless `labels` are whole numbers in 0..num_classes-1."""
    if labels.dtype.kind not in "iu" or (
        len(labels) and not (labels.min() >= 0 and labels.max() < num_classes)
    ):
        raise DataError(
            f"{where}: every label must be a whole number in 0..{num_classes - 1}; "
            "correct the labels, or dataset.num_classes on all sides"
        )


def _split(
    source: Source, name: str, needed: bool, read: Read, shape: tuple[int, ...]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    file = Path(source.location) / name
    if not file.exists():
        if needed:
            raise DataError(f"{source.found_as}: has no {name}; put it there")
        return np.zeros((0, *shape), dtype=np.float32), np.zeros(0, dtype=np.int64)
    features, labels = read(file)
    if features.shape != (len(labels), *shape) or labels.ndim != 1:
        raise DataError(
            f"{source.found_as}: {name} must hold one label for each input of shape {list(shape)}, "
            f"and its inputs have shape {list(features.shape[1:])}; correct the file or the setting"
        )
    return features, labels
