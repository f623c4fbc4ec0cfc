"""Reading of datasets in the layout of the hub, through flwr-datasets, into the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_app.data import cache
from fl_app.data.source import Source, check_hub
from fl_app.errors import DataError


def load_decoded(
    source: Source, cache_dir: Path, name: str, facts: tuple[object, ...], decode: cache.Decode
) -> cache.Decoded:
    """Returns the decoded dataset, found in the cache or decoded from `source`.

    Args:
        source: where the files are.
        cache_dir: folder of all decoded datasets.
        name: begins the name of its folder.
        facts: what the stored arrays depend on beside the files.
        decode: as `cache.find_or_decode` takes it.

    Raises:
        DataError: not there or not readable; without a network, within 10 seconds.
    """
    state = source.location if source.folder is None else cache.folder_state(source.folder)
    key = f"{name}-{cache.fingerprint(*facts, state)}"
    decoded = cache.find(cache_dir, key)
    if decoded is None:
        if source.folder is None:
            check_hub(source.location)
        decoded = cache.find_or_decode(cache_dir, key, decode)
    return decoded


def open_splits(
    location: str,
    subset: str | None,
    splits: Mapping[str, str],
    found_as: str,
    arrow_dir: Path,
) -> dict[str, Any]:
    """Returns the table of each split.

    Args:
        location: a folder or the id of a hub dataset.
        subset: the dataset's configuration name, None for its only one.
        splits: the dataset's own name of each of our splits.
        found_as: where it was found, as the user sets it.
        arrow_dir: scratch folder.

    Raises:
        DataError: a split is missing.
    """
    from flwr_datasets import FederatedDataset

    federated = FederatedDataset(
        dataset=location, subset=subset, partitioners={}, shuffle=False, cache_dir=str(arrow_dir)
    )
    tables = {}
    for ours, theirs in splits.items():
        try:
            tables[ours] = federated.load_split(theirs)
        except ValueError as error:
            if not str(error).startswith("The given split"):
                raise
            raise DataError(
                f"dataset.{ours}_split={theirs}: no such split in {found_as} "
                f"({str(error).rpartition(': ')[2].strip(chr(39) + '.')} are there); correct it"
            ) from error
    return tables


def check_columns(table: Any, columns: Mapping[str, str]) -> None:
    """Raises DataError unless `table` has all `columns` (the name of each by its key)."""
    seen = ", ".join(table.column_names)
    for key, column in columns.items():
        if column not in table.column_names:
            raise DataError(f"dataset.{key}={column}: no such column; the columns are {seen}")


@contextlib.contextmanager
def readable(found_as: str, what: str, layout: str) -> Iterator[None]:
    """Within it nothing is printed, and what cannot be read becomes a DataError.

    Args:
        found_as: where it was found, as the user sets it; begins the error text.
        what: what it should be, e.g. "an image dataset".
        layout: what such a folder holds.
    """
    from datasets.exceptions import DatasetsError

    try:
        with _no_progress_bars():
            yield
    except (OSError, ValueError, TypeError, SyntaxError, DatasetsError) as error:
        raise DataError(
            f"{found_as}: cannot be read as {what} ({type(error).__name__}); "
            f"check that it holds {layout}"
        ) from error


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
