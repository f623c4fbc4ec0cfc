"""Decoding of image datasets into arrays, through flwr-datasets."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fl_app.data import cache, hub
from fl_app.errors import DataError

_BATCH_ROWS = 1000
_FILES = "complete Parquet or image files in the layout of the hub"
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
    with hub.readable(layout.found_as, "an image dataset", _FILES):
        tables = open_images(location, subset, layout, folder)
        classes = {split: _num_classes(table, layout) for split, table in tables.items()}
        for split, table in tables.items():
            _write_split(folder, split, table, layout)
    _check_shapes(folder, layout)
    return _check_labels(folder, classes, layout)


def open_images(
    location: str, subset: str | None, layout: ImageLayout, folder: Path
) -> dict[str, Any]:
    """Returns the table of each split, its columns checked, its images still encoded.

    Args:
        location: a folder or the id of a hub dataset.
        subset: the dataset's configuration name, None for its only one.
        layout: what to read.
        folder: a sub-folder of it is used as scratch.

    Raises:
        DataError: a split or column is missing, or the image column holds something else.
    """
    from datasets import Image as ImageFeature

    tables = hub.open_splits(location, subset, layout.splits, layout.found_as, folder / "arrow")
    for table in tables.values():
        columns = {key: getattr(layout, key) for key in ("image_column", "label_column")}
        hub.check_columns(table, columns)
        feature = table.features[layout.image_column]
        if not isinstance(feature, ImageFeature):
            raise DataError(
                f"dataset.image_column={layout.image_column}: must hold images, not "
                f"{type(feature).__name__}; the columns are {', '.join(table.column_names)}"
            )
    encoded = ImageFeature(decode=False)
    return {s: table.cast_column(layout.image_column, encoded) for s, table in tables.items()}


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
        pixels = decode_batch(batch[layout.image_column], layout)
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


def decode_batch(images: Sequence[Mapping[str, Any]], layout: ImageLayout) -> npt.NDArray[np.uint8]:
    """Returns the pixels [B, channels, height, width] of encoded images.

    Raises:
        DataError: an image is missing or in colour under one mean, or the shapes differ.
    """
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
