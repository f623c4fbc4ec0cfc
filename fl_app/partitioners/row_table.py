"""The table of row numbers that flwr-datasets' partitioners split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

if TYPE_CHECKING:
    from fl_app.stages import IndexVector


class RowTable(datasets.Dataset):  # type: ignore[misc]
    """A dataset of the columns ``row`` and ``label`` whose selections are plain row numbers.

    An ordinary selection builds a table, a schema and a hash, which takes milliseconds: too much
    for ten thousand clients.
    """

    @classmethod
    def of(cls, rows: IndexVector, labels: IndexVector) -> RowTable:
        """Returns the table with one line for each of `rows` [N], with its `labels` [N]."""
        table: RowTable = cls.from_dict({"row": rows, "label": labels})
        return table

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.data.column(key).to_numpy()
        return super().__getitem__(key)

    def select(self, indices: Iterable[int], *_: Any, **__: Any) -> IndexVector:
        """Returns the row numbers [n] at `indices`."""
        rows: IndexVector = self["row"][np.fromiter(indices, dtype=np.int64)]
        return rows
