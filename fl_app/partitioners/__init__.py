"""How a simulation spreads training rows over clients, and the per-process cache of the split."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fl_app import checks
from fl_app.errors import PrivacyError

if TYPE_CHECKING:
    from fl_app.plugins import Partitioner
    from fl_app.settings import Settings
    from fl_app.stages import IndexVector, LoadedData


def client_rows(
    partitioner: Partitioner,
    labels: IndexVector,
    population: int,
    seed: int,
    *,
    groups: IndexVector | None = None,
) -> Sequence[IndexVector]:
    """Returns the sorted row numbers of each client, read-only; every row belongs to one client.

    The same in every process for the same arguments; the last splits of this process are kept.

    Args:
        partitioner: the plug-in that splits.
        labels: [N] labels of the training rows.
        population: number of clients.
        seed: ``run.seed``.
        groups: [N] groups of the training rows, None if the dataset has none.

    Guarantee:
        No row belongs to two clients: the worst client is the whole story of RECORD level.

    Raises:
        SettingsError: the split cannot be made, naming the settings to change.
        PrivacyError: the plug-in gave a row to two clients or to none.
    """
    column = labels
    if partitioner.by == "groups":
        column = _existing_groups(partitioner, groups)
    if population > len(column):
        raise checks.fail(
            "federation.population",
            population,
            "must not exceed the number of training rows",
            "lower it or choose a larger dataset",
        )
    if isinstance(column, np.memmap) and not column.flags.writeable:
        # Rows of a file that is never changed: asked for client by client, so not read again.
        return _split_same(partitioner, _Same(column), population, seed)
    return _split(partitioner, _content(column), population, seed)


def _existing_groups(partitioner: Partitioner, groups: IndexVector | None) -> IndexVector:
    if groups is None:
        raise checks.fail(
            "partition",
            partitioner.kind,
            "needs a dataset that tells who each row comes from",
            "choose dataset=femnist, shakespeare or leaf, or partition=dirichlet",
        )
    return groups


def split_of(settings: Settings, data: LoadedData) -> Sequence[IndexVector]:
    """Returns `client_rows` of a run: its partition, population and seed over its training rows."""
    return client_rows(
        settings.partition,
        data.train.labels,
        settings.federation.population,
        settings.run.seed,
        groups=data.train.groups,
    )


class _Same:
    """Compares as the very array that it holds, not by content."""

    def __init__(self, column: IndexVector) -> None:
        self.column = column

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.column is self.column

    def __hash__(self) -> int:
        return id(self.column)


@functools.lru_cache(maxsize=4)
def _split_same(
    partitioner: Partitioner, same: _Same, population: int, seed: int
) -> tuple[IndexVector, ...]:
    return _split(partitioner, _content(same.column), population, seed)


def _content(column: IndexVector) -> bytes:
    return np.ascontiguousarray(column, dtype=np.int64).tobytes()


@functools.lru_cache(maxsize=4)
def _split(
    partitioner: Partitioner, column: bytes, population: int, seed: int
) -> tuple[IndexVector, ...]:
    vector = np.frombuffer(column, dtype=np.int64)
    parts = partitioner.split(vector, population, seed)
    _check_disjoint(partitioner, parts, len(vector), population)
    rows = tuple(np.sort(np.asarray(part, dtype=np.int64)) for part in parts)
    for part in rows:
        part.setflags(write=False)
    return rows


def _check_disjoint(
    partitioner: Partitioner, parts: Sequence[IndexVector], num_rows: int, population: int
) -> None:
    given = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    complete = np.array_equal(np.sort(given), np.arange(num_rows))
    if len(parts) != population or not complete:
        raise PrivacyError(
            f"partition={partitioner.kind}: it must give every row to exactly one of {population} "
            "clients and does not; repair the plug-in"
        )
