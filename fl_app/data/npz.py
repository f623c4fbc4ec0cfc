"""A site's own NumPy files: ``train.npz`` and ``test.npz``."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_app import checks
from fl_app.data.site import Rows, load_files
from fl_app.data.transform import Standardize, check_constants
from fl_app.errors import DataError
from fl_app.plugins import Dataset
from fl_app.stages import LoadedData


@dataclass(frozen=True, slots=True, kw_only=True)
class Npz(Dataset):
    """Arrays in a folder that the node's ``data-path`` names; use it with ``partition=own``.

    ``train.npz`` holds the node's rows. ``test.npz`` in ``dataset.path`` of the server holds the
    public test rows. Shape and classes are public settings, the same on all sides.

    Attributes:
        path: folder for the server or a simulation, or None.
        feature_array: name of the array [N, *shape] of numbers.
        label_array: name of the array [N] of whole numbers.
        shape: of one input.
        num_classes: labels, 0 to num_classes - 1.
        mean: public mean of the numbers, one for all or one for each channel.
        std: public standard deviation likewise.
    """

    path: str | None
    feature_array: str
    label_array: str
    shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        check_constants(self.mean, self.std, self.shape)
        checks.at_least("dataset.num_classes", self.num_classes, 2)

    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the rows of the first of `data_path` and `path`.

        Raises:
            DataError: not there, not readable, or not as the settings describe.
        """
        facts = ("npz", self.feature_array, self.label_array)
        decoded = load_files(
            data_path, self.path, cache_dir, facts, ".npz", self._read, self.shape, self.num_classes
        )
        return decoded.loaded(Standardize(largest=1.0, mean=self.mean, std=self.std))

    def _read(self, file: Path) -> Rows:
        names = {"feature_array": self.feature_array, "label_array": self.label_array}
        try:
            with np.load(file, allow_pickle=False) as arrays:
                for key, name in names.items():
                    if name not in arrays:
                        seen = ", ".join(arrays)
                        raise DataError(f"dataset.{key}={name}: not in {file.name} ({seen} are)")
                features, labels = (arrays[name] for name in names.values())
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(
                f"{file}: is no complete NumPy file ({type(error).__name__}); write it anew with "
                "numpy.savez, without objects"
            ) from error
        if features.dtype.kind not in "fiub":
            raise DataError(f"dataset.feature_array={self.feature_array}: must hold numbers")
        stored = features if features.dtype == np.uint8 else features.astype(np.float32)
        return stored, labels


PLUGIN = Npz
