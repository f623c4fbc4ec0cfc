"""Where the files of a hub dataset are: a given folder, a data root, or the hub."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from fl_app.errors import DataError

DATA_ROOT = "DPFL_DATA_ROOT"
_PROBE_SECONDS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where to read from.

    Attributes:
        location: what `datasets` loads: a folder, or the id of a hub dataset.
        folder: the folder, or None for the hub.
        found_as: what the user would change, for error texts.
    """

    location: str
    folder: Path | None
    found_as: str


def find_source(data_path: str | None, path: str | None, hub_id: str | None) -> Source:
    """Returns the first place that is given; a given folder that is not there is not passed over.

    Nothing is asked of the network here, see `check_hub`.

    Raises:
        DataError: a given folder does not exist, or nothing is given.
    """
    for key, given in (("data-path", data_path), ("dataset.path", path)):
        if given:
            return _local(key, given)
    if hub_id is None:
        raise DataError(
            "dataset.hub_id=null: no dataset is named; "
            "set dataset.hub_id, or dataset.path to a folder with its files"
        )
    root = os.environ.get(DATA_ROOT)
    if root and (Path(root).expanduser() / hub_id).is_dir():
        return _local(f"${DATA_ROOT}/{hub_id}", str(Path(root) / hub_id))
    return Source(location=hub_id, folder=None, found_as=f"dataset.hub_id={hub_id}")


def check_hub(hub_id: str) -> None:
    """Returns if the hub has the dataset; waits 4 seconds at most and honours proxy settings.

    Raises:
        DataError: the hub does not answer in time, or does not have it.
    """
    from huggingface_hub import HfApi

    failures: list[Exception] = []
    answered = threading.Event()

    def ask() -> None:
        try:
            HfApi().dataset_info(hub_id, timeout=_PROBE_SECONDS)
        except Exception as error:
            failures.append(error)
        answered.set()

    # Name look-ups take no time-out, so the question runs in a thread that need not end.
    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(_PROBE_SECONDS):
        raise DataError(_missing(hub_id, f"no answer in {_PROBE_SECONDS:g} s"))
    if failures:
        raise DataError(_missing(hub_id, type(failures[0]).__name__)) from failures[0]


def _local(key: str, given: str) -> Source:
    folder = Path(given).expanduser().absolute()
    if not folder.is_dir():
        raise DataError(
            f"{key}={given}: must be an existing folder with the dataset's files, and {folder} is "
            "none; correct it, or remove it to look elsewhere"
        )
    return Source(location=str(folder), folder=folder, found_as=f"{key}={given}")


def _missing(hub_id: str, reason: str) -> str:
    root = os.environ.get(DATA_ROOT)
    state = f"no such folder in {root}" if root else "it is not set"
    return (
        f"dataset.hub_id={hub_id}: not on this machine, and the Hugging Face hub does not give it "
        f"({reason}); set dataset.path to a folder with its files, or put them into "
        f"${DATA_ROOT}/{hub_id} ({state}), or check the network"
    )
