"""A site's own tables: ``train.parquet`` and ``test.parquet``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_app import checks
from fl_app.data.site import Rows, load_files
from fl_app.data.transform import Standardize, check_constants
from fl_app.errors import DataError
from fl_app.plugins import Dataset
from fl_app.stages import LoadedData


@dataclass(frozen=True, slots=True, kw_only=True)
class Parquet(Dataset):
    """Columns of a table in a folder that the node's ``data-path`` names; see dataset=npz.

    Attributes:
        path: folder for the server or a simulation, or None.
        feature_columns: names of the columns of numbers, in the order the model sees them.
        label_column: name of the column of whole numbers.
        num_classes: labels, 0 to num_classes - 1.
        mean: public mean, one for all columns or one for each.
        std: public standard deviation likewise.
    """

    path: str | None
    feature_columns: tuple[str, ...]
    label_column: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(set(self.feature_columns)) != len(self.feature_columns):
            raise checks.fail(
                "dataset.feature_columns", list(self.feature_columns), "must differ from each other"
            )
        if self.label_column in self.feature_columns:
            raise checks.fail(
                "dataset.label_column", self.label_column, "must not be a feature column, too"
            )
        # Without a column nothing can be loaded, but it may be named later.
        shape = (len(self.feature_columns),) if self.feature_columns else None
        check_constants(self.mean, self.std, shape)
        checks.at_least("dataset.num_classes", self.num_classes, 2)

    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the rows of the first of `data_path` and `path`.

        Raises:
            DataError: not there, not readable, or not as the settings describe.
        """
        if not self.feature_columns:
            raise DataError("dataset.feature_columns=[]: must name the columns of numbers; set it")
        shape = (len(self.feature_columns),)
        facts = ("parquet", self.feature_columns, self.label_column)
        decoded = load_files(
            data_path, self.path, cache_dir, facts, ".parquet", self._read, shape, self.num_classes
        )
        return decoded.loaded(Standardize(largest=1.0, mean=self.mean, std=self.std))

    def _read(self, file: Path) -> Rows:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            seen = pq.read_schema(file).names
            for key, names in self._columns().items():
                for name in names:
                    if name not in seen:
                        raise DataError(
                            f"dataset.{key}={name}: no such column in {file.name}; the columns are "
                            f"{', '.join(seen)}"
                        )
            table = pq.read_table(file, columns=[*self.feature_columns, self.label_column])
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{file}: is no complete Parquet file ({type(error).__name__}); write it anew"
            ) from error
        columns = [_numbers(table, name).astype(np.float32) for name in self.feature_columns]
        return np.stack(columns, axis=1), _numbers(table, self.label_column)

    def _columns(self) -> dict[str, tuple[str, ...]]:
        return {"feature_columns": self.feature_columns, "label_column": (self.label_column,)}


def _numbers(table: Any, name: str) -> npt.NDArray[Any]:
    column: npt.NDArray[Any] = table[name].to_numpy()
    if table[name].null_count or column.dtype.kind not in "fiub":
        raise DataError(f"column {name}: must hold a number in every row; convert or fill it")
    return column


PLUGIN = Parquet
