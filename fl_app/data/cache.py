"""Decoded datasets on disk: written once per machine, memory-mapped by every process.

A dataset is a folder ``<name>-<fingerprint>`` of arrays and ``meta.json``. It is written under
another name and renamed when complete, so a reader never sees half of one; a file lock lets one
process decode while the others wait. What is found damaged is decoded again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_app.errors import DataError
from fl_app.plugins import Transform
from fl_app.stages import IndexVector, InputSpec, LoadedData, Table

DECODE_VERSION = 1
"""Part of every fingerprint: raise it when the stored form changes."""
SPLITS = ("train", "test")
ALL_SPLITS = (*SPLITS, "validation")
Decode = Callable[[Path], int]
"""Writes the arrays of one dataset into a folder and returns its number of classes."""
_META = "meta.json"
_MARK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The arrays of one dataset, memory-mapped and read-only.

    Attributes:
        features: [N, ...] of each split.
        labels: [N] int64 of each split.
        groups: [N] int64 of each split whose rows have groups.
        num_classes: number of labels.
    """

    features: dict[str, npt.NDArray[Any]]
    labels: dict[str, IndexVector]
    groups: dict[str, IndexVector]
    num_classes: int

    def loaded(self, transform: Transform, vocabulary: int | None = None) -> LoadedData:
        """Returns the dataset with `transform` in front of every split."""
        tables = {
            split: Table(
                features=self.features[split],
                labels=self.labels[split],
                transform=transform,
                groups=self.groups.get(split),
            )
            for split in self.features
        }
        shape = tuple(int(side) for side in self.features["train"].shape[1:])
        spec = InputSpec(shape=shape, num_classes=self.num_classes, vocabulary=vocabulary)
        return LoadedData(
            train=tables["train"],
            test=tables["test"],
            validation=tables.get("validation"),
            spec=spec,
        )


def fingerprint(*parts: object) -> str:
    """Returns 16 hexadecimal digits that change with any of `parts` (values that JSON can hold)."""
    text = json.dumps([DECODE_VERSION, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def folder_state(folder: Path) -> list[tuple[str, int, int]]:
    """Returns name, bytes and modification time (ns) of each visible file in `folder` and below."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder) for path in files]
    return [
        (name.as_posix(), path.stat().st_size, path.stat().st_mtime_ns)
        for name, path in zip(names, files, strict=True)
        if not any(part.startswith(".") for part in name.parts)
    ]


def array_path(folder: Path, split: str, what: str) -> Path:
    """Returns where `what` (features, labels or groups) of `split` is stored."""
    return folder / f"{split}_{what}.npy"


def find(cache_dir: Path, key: str) -> Decoded | None:
    """Returns the decoded dataset `key`, or None if there is none or it is damaged."""
    folder = cache_dir / key
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        if any(_mark(folder / name) != mark for name, mark in meta["files"].items()):
            return None
        splits = [s for s in ALL_SPLITS if s in SPLITS or f"{s}_features.npy" in meta["files"]]

        def arrays(what: str, wanted: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
            return {s: np.load(array_path(folder, s, what), mmap_mode="r") for s in wanted}

        return Decoded(
            features=arrays("features", splits),
            labels=arrays("labels", splits),
            groups=arrays("groups", [s for s in splits if f"{s}_groups.npy" in meta["files"]]),
            num_classes=int(meta["num_classes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None


def find_or_decode(cache_dir: Path, key: str, decode: Decode) -> Decoded:
    """Returns the decoded dataset `key`, calling `decode` if no process of the machine has before.

    Args:
        cache_dir: folder of all decoded datasets.
        key: name and fingerprint, a file name.
        decode: writes features and labels of train and test, and where they exist groups and
            ``validation``, at their `array_path` in the given folder, and returns the number of
            classes; may leave other things there in sub-folders, which are removed.

    Raises:
        DataError: `decode` raised it, or the cache cannot be written.
    """
    if (decoded := find(cache_dir, key)) is not None:
        return decoded
    try:
        with _locked(cache_dir, key):
            if (decoded := find(cache_dir, key)) is None:
                _write(cache_dir, key, decode)
                decoded = find(cache_dir, key)
    except OSError as error:
        raise DataError(
            f"cache={cache_dir}: cannot hold the decoded dataset ({error.strerror}); "
            "free space there or set DPFL_HOME to a folder that can be written"
        ) from error
    if decoded is None:
        raise DataError(f"cache={cache_dir / key}: not readable after decoding; check the disk")
    return decoded


@contextlib.contextmanager
def _locked(cache_dir: Path, key: str) -> Iterator[None]:
    """Waits for and holds the machine-wide lock of `key`; the system frees it if we are killed."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / f".{key}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write(cache_dir: Path, key: str, decode: Decode) -> None:
    """Decodes into a temporary folder and renames it. To be called under the lock."""
    for left_behind in (*cache_dir.glob(f".{key}.*.tmp"), cache_dir / key):
        shutil.rmtree(left_behind, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=cache_dir, prefix=f".{key}.", suffix=".tmp"))
    try:
        num_classes = decode(folder)
        for extra in [path for path in folder.iterdir() if path.is_dir()]:
            shutil.rmtree(extra)
        files = {path.name: _mark(path) for path in sorted(folder.iterdir())}
        meta = {"num_classes": num_classes, "files": files}
        (folder / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        for path in folder.iterdir():
            _make_durable(path)
        folder.rename(cache_dir / key)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _mark(path: Path) -> list[int]:
    """Returns size and checksum of the first and last 64 KiB of a file."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        checksum = zlib.crc32(handle.read(_MARK_BYTES))
        handle.seek(max(0, size - _MARK_BYTES))
        checksum = zlib.crc32(handle.read(_MARK_BYTES), checksum)
    return [size, checksum]


def _make_durable(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
