"""A site's own image files: ``train/<class>/`` and ``test/<class>/``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_app import checks
from fl_app.data import hub
from fl_app.data.site import Rows, load_files
from fl_app.data.transform import Standardize, check_constants
from fl_app.errors import DataError
from fl_app.plugins import Dataset
from fl_app.stages import LoadedData

_LARGEST_VALUE = 255.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolder(Dataset):
    """Image files in a folder that the node's ``data-path`` names; see dataset=npz.

    Attributes:
        path: folder for the server or a simulation, or None.
        classes: names of the sub-folders, in the order of the labels: public, as a site need not
            have images of all of them.
        image_size: side length that all images are resized to.
        mean: public mean of each channel, of values in [0, 1]; one value means grey images.
        std: public standard deviation of each channel.
    """

    path: str | None
    classes: tuple[str, ...]
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(set(self.classes)) != len(self.classes) or len(self.classes) == 1:
            raise checks.fail(
                "dataset.classes", list(self.classes), "must be at least 2 different names"
            )
        checks.at_least("dataset.image_size", self.image_size, 1)
        check_constants(self.mean, self.std)

    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the rows of the first of `data_path` and `path`.

        Raises:
            DataError: not there, not readable, or not as the settings describe.
        """
        if not self.classes:
            raise DataError("dataset.classes=[]: must name the folders of the labels; set it")
        shape = (len(self.mean), self.image_size, self.image_size)
        facts = ("image_folder", self.classes)
        decoded = load_files(
            data_path, self.path, cache_dir, facts, "", self._read, shape, len(self.classes)
        )
        return decoded.loaded(Standardize(largest=_LARGEST_VALUE, mean=self.mean, std=self.std))

    def _read(self, folder: Path) -> Rows:
        from fl_app.data.images import ImageLayout, decode_batch

        layout = ImageLayout(
            found_as=str(folder),
            image_column="",
            label_column="",
            splits={},
            num_channels=len(self.mean),
            image_size=self.image_size,
        )
        files = self._files(folder)
        with hub.readable(str(folder), "images", "complete image files only"):
            encoded = [{"bytes": None, "path": str(file)} for file, _ in files]
            features = decode_batch(encoded, layout)
        return features, np.array([label for _, label in files], dtype=np.int64)

    def _files(self, folder: Path) -> list[tuple[Path, int]]:
        """Returns all visible files below `folder` with their labels."""
        found = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
        if not found <= set(self.classes):
            raise DataError(
                f"{folder}: must hold the folders of dataset.classes={list(self.classes)} only; "
                "rename or remove others, or set dataset.classes on all sides"
            )
        files = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted((folder / name).rglob("*"))
            if file.is_file() and not file.name.startswith(".")
        ]
        if not files:
            raise DataError(f"{folder}: holds no image; put them into folders named by class")
        return files


PLUGIN = ImageFolder
