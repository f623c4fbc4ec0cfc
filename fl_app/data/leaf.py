"""A folder of LEAF JSON files: users, and the rows of each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_app import checks
from fl_app.data import cache, hub
from fl_app.data.source import find_source
from fl_app.data.text import CHARACTERS, NUM_TOKENS, WINDOW, Tokens, encode
from fl_app.data.transform import Standardize, check_constants
from fl_app.errors import DataError
from fl_app.plugins import Dataset
from fl_app.stages import IndexVector, LoadedData


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf(Dataset):
    """``train/*.json`` and ``test/*.json`` as LEAF writes them (Caldas et al. 2018, 1812.01097).

    Each file holds ``users``, ``num_samples`` and ``user_data``: for every user the lists ``x`` and
    ``y``. With ``partition=natural`` every user of ``train/`` is a client, in the order of their
    names. The rows of ``test/`` are the server's public test set: put there only what may be
    public.

    Attributes:
        path: the folder that holds ``train`` and ``test``, or None.
        content: numbers: x is a list of numbers, y a label; text: x is 80 characters, y the next
            one, tokens as in dataset=shakespeare.
        shape: of one input of numbers, whose list may be flat, e.g. [1, 28, 28].
        num_classes: labels of numbers, 0 to num_classes - 1.
        mean: public mean of numbers, one for all or one for each channel.
        std: public standard deviation likewise.
    """

    path: str | None
    content: str
    shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        checks.one_of("dataset.content", self.content, ("numbers", "text"))
        checks.at_least("dataset.num_classes", self.num_classes, 2)
        check_constants(self.mean, self.std, self.shape)

    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the dataset from the first of `data_path` and `path`.

        Raises:
            DataError: not there, not complete, or not as described, naming the file.
        """
        if data_path is None and self.path is None:
            raise DataError(
                "dataset.path=null: must be a folder with LEAF's train and test; set it"
            )
        source = find_source(data_path, self.path, None)
        root = Path(source.location)
        facts = ("leaf", self.content, self.shape, self.num_classes, CHARACTERS)
        decoded = hub.load_decoded(
            source, cache_dir, "leaf", facts, lambda folder: self._decode(root, folder)
        )
        if self.content == "text":
            return decoded.loaded(Tokens(), vocabulary=NUM_TOKENS)
        return decoded.loaded(Standardize(largest=1.0, mean=self.mean, std=self.std))

    def _decode(self, root: Path, folder: Path) -> int:
        for split in cache.SPLITS:
            parts = sorted(self._users(root / split), key=lambda part: part[0])
            names = [name for name, _, _ in parts]
            if len(set(names)) != len(names):
                raise DataError(f"{root / split}: a user is in it twice; merge the files")
            np.save(
                cache.array_path(folder, split, "features"),
                np.concatenate([x for _, x, _ in parts]),
            )
            np.save(
                cache.array_path(folder, split, "labels"), np.concatenate([y for _, _, y in parts])
            )
            groups = np.repeat(np.arange(len(parts)), [len(y) for _, _, y in parts])
            if split == "train":
                # A user without rows is no client: only those with rows can be told apart.
                numbers = np.unique(groups, return_inverse=True)[1]
                np.save(cache.array_path(folder, split, "groups"), numbers.astype(np.int64))
        return NUM_TOKENS if self.content == "text" else self.num_classes

    def _users(self, folder: Path) -> Iterator[tuple[str, npt.NDArray[Any], IndexVector]]:
        """Yields name, features and labels of each user in the files of `folder`."""
        files = sorted(folder.glob("*.json"))
        if not files:
            raise DataError(f"{folder}: holds no *.json; dataset.path must have train and test")
        for file in files:
            for name, rows in _read(file):
                yield str(name), *self._rows(rows, f"{file}: user_data of one user")

    def _rows(self, rows: Any, where: str) -> tuple[npt.NDArray[Any], IndexVector]:
        if not isinstance(rows, Mapping) or not all(isinstance(rows.get(k), list) for k in "xy"):
            raise DataError(f"{where}: must hold the lists x and y; write the file anew")
        if len(rows["x"]) != len(rows["y"]):
            raise DataError(f"{where}: x and y must be equally long; write the file anew")
        if self.content == "text":
            labels = encode(rows["y"], 1, f"{where}, y")[:, 0].astype(np.int64)
            return encode(rows["x"], WINDOW, f"{where}, x"), labels
        return self._numbers(rows, where)

    def _numbers(self, rows: Mapping[str, Any], where: str) -> tuple[npt.NDArray[Any], IndexVector]:
        try:
            features = np.array(rows["x"], dtype=np.float32)
            labels = np.array(rows["y"], dtype=np.float64)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{where}: must be equally long lists of numbers; set content=text for texts"
            ) from error
        num_rows = len(rows["y"])
        if features.size != num_rows * math.prod(self.shape) or labels.shape != (num_rows,):
            raise DataError(
                f"{where}: every x must have the numbers of dataset.shape={list(self.shape)}, and "
                "every y must be one label; correct dataset.shape"
            )
        if num_rows and not np.isin(labels, np.arange(self.num_classes)).all():
            raise DataError(
                f"{where}: every y must be in 0..{self.num_classes - 1}; correct num_classes"
            )
        return features.reshape(num_rows, *self.shape), labels.astype(np.int64)


def _read(file: Path) -> Iterator[tuple[Any, Any]]:
    """Yields user and rows of one file.

    Raises:
        DataError: truncated, corrupt or of another form, naming the file.
    """
    again = "it may be cut off; fetch or write it anew"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: is not complete JSON ({type(error).__name__}); {again}"
        ) from error
    users, sizes, rows = (
        content.get(key) if isinstance(content, Mapping) else None
        for key in ("users", "num_samples", "user_data")
    )
    if not (isinstance(users, list) and isinstance(sizes, list) and isinstance(rows, Mapping)):
        raise DataError(f"{file}: must hold users, num_samples and user_data; {again}")
    if len(users) != len(sizes) or set(map(str, users)) != set(rows):
        raise DataError(
            f"{file}: users, num_samples and user_data must name the same users; {again}"
        )
    for user, size in zip(users, sizes, strict=True):
        found = rows[str(user)]
        labels = found.get("y") if isinstance(found, Mapping) else None
        if isinstance(labels, list) and len(labels) != size:
            raise DataError(f"{file}: num_samples must be the rows of each user; {again}")
        yield user, found


PLUGIN = Leaf
