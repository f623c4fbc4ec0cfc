"""Decoding of image datasets into arrays, through flwr-datasets."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fl_app.data import cache
from fl_app.errors import DataError

_BATCH_ROWS = 1000
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """What is read of an image dataset.

    Attributes:
        found_as: where it was found, as the user sets it; begins every error text.
        splits: the dataset's own name of each of our splits.
        num_channels: 1 (grey) or 3 (colour), of the stored array.
        image_size: side length to resize to, None: as they are, all of one shape.
    """

    found_as: str
    image_column: str
    label_column: str
    splits: Mapping[str, str]
    num_channels: int
    image_size: int | None


def decode_images(location: str, subset: str | None, layout: ImageLayout, folder: Path) -> int:
    """Writes the arrays of both splits into `folder` and returns the number of classes.

    Features are uint8 [N, channels, height, width].

    Args:
        location: a folder or the id of a hub dataset.
        subset: the dataset's configuration name, None for its only one.

    Raises:
        DataError: not readable, a split or column is missing, or the shapes differ.
    """
    from datasets import Image as ImageFeature
    from datasets.exceptions import DatasetsError

    try:
        with _no_progress_bars():
            tables = _open(location, subset, folder / "arrow", layout)
            classes = {split: _num_classes(table, layout) for split, table in tables.items()}
            for split, table in tables.items():
                stored = table.cast_column(layout.image_column, ImageFeature(decode=False))
                _write_split(folder, split, stored, layout)
    except (OSError, ValueError, TypeError, SyntaxError, DatasetsError) as error:
        raise DataError(
            f"{layout.found_as}: cannot be read as an image dataset ({type(error).__name__}); "
            "check that it holds complete Parquet or image files in the layout of the hub"
        ) from error
    _check_shapes(folder, layout)
    return _check_labels(folder, classes, layout)


def _open(
    location: str, subset: str | None, arrow_dir: Path, layout: ImageLayout
) -> dict[str, Any]:
    """Returns the table of each split, its columns checked."""
    from flwr_datasets import FederatedDataset

    federated = FederatedDataset(
        dataset=location, subset=subset, partitioners={}, shuffle=False, cache_dir=str(arrow_dir)
    )
    tables = {}
    for ours, theirs in layout.splits.items():
        try:
            tables[ours] = federated.load_split(theirs)
        except ValueError as error:
            if not str(error).startswith("The given split"):
                raise
            raise DataError(
                f"dataset.{ours}_split={theirs}: no such split in {layout.found_as} "
                f"({str(error).rpartition(': ')[2].strip(chr(39) + '.')} are there); correct it"
            ) from error
        _check_columns(tables[ours], layout)
    return tables


def _check_columns(table: Any, layout: ImageLayout) -> None:
    from datasets import Image as ImageFeature

    seen = ", ".join(table.column_names)
    for key in ("image_column", "label_column"):
        column = getattr(layout, key)
        if column not in table.column_names:
            raise DataError(f"dataset.{key}={column}: no such column; the columns are {seen}")
    feature = table.features[layout.image_column]
    if not isinstance(feature, ImageFeature):
        raise DataError(
            f"dataset.image_column={layout.image_column}: must hold images, not "
            f"{type(feature).__name__}; the columns are {seen}"
        )


def _num_classes(table: Any, layout: ImageLayout) -> int | None:
    """Returns the number of classes that the label column declares, None if it declares none."""
    from datasets import ClassLabel, Value

    feature = table.features[layout.label_column]
    if isinstance(feature, ClassLabel):
        return int(feature.num_classes)
    if isinstance(feature, Value) and "int" in feature.dtype:
        return None
    raise DataError(
        f"dataset.label_column={layout.label_column}: must hold class labels or whole numbers; "
        f"the columns are {', '.join(table.column_names)}"
    )


def _write_split(folder: Path, split: str, table: Any, layout: ImageLayout) -> None:
    if table.num_rows == 0:
        raise DataError(f"{layout.found_as}: its split {layout.splits[split]} has no rows")
    features: npt.NDArray[np.uint8] | None = None
    labels = np.empty(table.num_rows, dtype=np.int64)
    for start in range(0, table.num_rows, _BATCH_ROWS):
        batch = table[start : start + _BATCH_ROWS]
        pixels = _decode_batch(batch[layout.image_column], layout)
        if features is None:
            features = np.lib.format.open_memmap(
                cache.array_path(folder, split, "features"),
                mode="w+",
                dtype=np.uint8,
                shape=(table.num_rows, *pixels.shape[1:]),
            )
        if pixels.shape[1:] != features.shape[1:]:
            raise _differing(layout)
        features[start : start + len(pixels)] = pixels
        labels[start : start + len(pixels)] = batch[layout.label_column]
    if isinstance(features, np.memmap):
        features.flush()
    np.save(cache.array_path(folder, split, "labels"), labels)


def _decode_batch(
    images: Sequence[Mapping[str, Any]], layout: ImageLayout
) -> npt.NDArray[np.uint8]:
    """Returns the pixels [B, channels, height, width] of encoded images."""
    pixels = [_pixels(image, layout) for image in images]
    if any(p.shape != pixels[0].shape for p in pixels):
        raise _differing(layout)
    return np.stack(pixels)


def _pixels(encoded: Mapping[str, Any], layout: ImageLayout) -> npt.NDArray[np.uint8]:
    if encoded is None:
        raise DataError(f"{layout.found_as}: an image is missing; remove that row")
    content = encoded["bytes"]
    with Image.open(io.BytesIO(content) if content is not None else encoded["path"]) as image:
        if layout.num_channels == 1 and image.mode not in ("L", "1", "LA"):
            raise DataError(
                "dataset.mean: has one value, but an image is in colour; "
                "give dataset.mean and dataset.std three values each"
            )
        converted = image.convert(_MODES[layout.num_channels])
        if layout.image_size is not None:
            size = (layout.image_size, layout.image_size)
            converted = converted.resize(size, Image.Resampling.BILINEAR)
    array = np.asarray(converted, dtype=np.uint8)
    return array[np.newaxis] if array.ndim == 2 else array.transpose(2, 0, 1)


def _differing(layout: ImageLayout) -> DataError:
    return DataError(
        f"{layout.found_as}: the images differ in shape; set dataset.image_size to resize them"
    )


def _check_shapes(folder: Path, layout: ImageLayout) -> None:
    paths = [cache.array_path(folder, split, "features") for split in layout.splits]
    if len({np.load(path, mmap_mode="r").shape[1:] for path in paths}) != 1:
        raise _differing(layout)


def _check_labels(folder: Path, declared: Mapping[str, int | None], layout: ImageLayout) -> int:
    """Returns the number of classes, the same in both splits, that every label lies below."""
    labels = {s: np.load(cache.array_path(folder, s, "labels")) for s in layout.splits}
    if len(set(declared.values())) != 1:
        raise DataError(
            f"dataset.label_column={layout.label_column}: the splits declare different classes; "
            "use splits of one dataset"
        )
    counted = 1 + max(int(values.max()) for values in labels.values())
    num_classes = next(iter(declared.values())) or counted
    if min(int(values.min()) for values in labels.values()) < 0 or counted > num_classes:
        raise DataError(
            f"dataset.label_column={layout.label_column}: every label must be in 0..num_classes-1 "
            f"(num_classes={num_classes}); remove rows without a label"
        )
    if num_classes < 2:
        raise DataError(f"dataset.label_column={layout.label_column}: needs at least 2 classes")
    return num_classes


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from datasets import utils

    shown = not utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            utils.enable_progress_bars()
