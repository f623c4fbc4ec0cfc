"""LEAF folders: users become natural clients, and a bad file is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_app import plugins
from fl_app.errors import DataError, SettingsError
from fl_app.overrides import compose_mapping
from fl_app.partitioners import client_rows
from fl_app.stages import LoadedData

NATURAL: plugins.Partitioner = plugins.build("partition", {"kind": "natural"})
SMALL = {"shape": [1, 2, 2], "num_classes": 3, "mean": [0.0], "std": [1.0]}
TEXT = "x" * 80


def leaf(**changes: Any) -> plugins.Dataset:
    section = compose_mapping(["dataset=leaf"])["dataset"]
    dataset: plugins.Dataset = plugins.build("dataset", section | changes)
    return dataset


def write(folder: Path, split: str, name: str, users: dict[str, Any], **changes: Any) -> Path:
    content = {
        "users": list(users),
        "num_samples": [len(rows["y"]) for rows in users.values()],
        "user_data": users,
    } | changes
    path = folder / split / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def numbers(*labels: int) -> dict[str, Any]:
    return {"x": [[float(y)] * 4 for y in labels], "y": list(labels)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "train", "a", {"zoe": numbers(0, 1), "bob": numbers(2)})
    write(tmp_path, "train", "b", {"eve": numbers(1, 1, 0)})
    write(tmp_path, "test", "a", {"bob": numbers(2, 0)})
    return tmp_path


def load(folder: Path, cache_dir: Path, **changes: Any) -> LoadedData:
    dataset = leaf(**(SMALL | {"path": str(folder)} | changes))
    return dataset.load(data_path=None, cache_dir=cache_dir)


def test_users_of_all_files_are_natural_clients_in_the_order_of_their_names(
    folder: Path, cache_dir: Path
) -> None:
    data = load(folder, cache_dir)
    assert data.spec.shape == (1, 2, 2)
    assert data.spec.num_classes == 3
    assert data.test.labels.tolist() == [2, 0]
    parts = client_rows(NATURAL, data.train.labels, 3, 0, groups=data.train.groups)
    assert [data.train.labels[p].tolist() for p in parts] == [[2], [1, 1, 0], [0, 1]]
    assert np.asarray(data.train.features)[:, 0, 0, 0].tolist() == [2, 1, 1, 0, 0, 1]


def test_texts_become_tokens_and_the_next_character(tmp_path: Path, cache_dir: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path, split, "a", {"ROLE": {"x": ["a" * 80, "b" * 80], "y": ["b", "_"]}})
    data = load(tmp_path, cache_dir, content="text")
    assert (data.spec.shape, data.spec.vocabulary, data.spec.num_classes) == ((80,), 81, 81)
    inputs = data.train.transform(data.train.features[:])
    assert inputs.dtype == torch.int64
    assert int(inputs[1, 0]) - int(inputs[0, 0]) == 1
    assert data.train.labels.tolist() == [int(inputs[1, 0]), 80]


def test_a_user_without_rows_is_no_client(folder: Path, cache_dir: Path) -> None:
    write(folder, "train", "c", {"ann": {"x": [], "y": []}})
    data = load(folder, cache_dir)
    assert np.unique(data.train.groups).tolist() == [0, 1, 2]


def test_a_truncated_file_is_named(folder: Path, cache_dir: Path) -> None:
    path = folder / "train" / "b.json"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"train/b\.json: is not complete JSON.*anew"):
        load(folder, cache_dir)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[1]", b"{}", b'{"users": [], "user_data": 3}'])
def test_a_file_of_another_form_is_named(content: bytes, folder: Path, cache_dir: Path) -> None:
    (folder / "train" / "b.json").write_bytes(content)
    with pytest.raises(DataError, match=r"train/b\.json: "):
        load(folder, cache_dir)


@pytest.mark.parametrize(
    ("users", "changes", "match"),
    [
        ({"u": numbers(1)}, {"num_samples": [2]}, "num_samples must be"),
        ({"u": numbers(1)}, {"users": ["v"]}, "must name the same users"),
        ({"u": {"x": [], "y": [1]}}, {}, "equally long"),
        ({"u": {"x": [[1.0] * 4]}}, {"num_samples": [1]}, "must hold the lists x and y"),
        ({"u": {"x": [[1.0] * 3], "y": [1]}}, {}, r"dataset\.shape=\[1, 2, 2\]"),
        ({"u": {"x": [[1.0] * 4, [1.0]], "y": [1, 1]}}, {}, "lists of numbers"),
        ({"u": {"x": [TEXT], "y": [1]}}, {}, "set content=text"),
        ({"u": numbers(3)}, {}, r"every y must be in 0\.\.2"),
        ({"u": {"x": [[1.0] * 4], "y": [0.5]}}, {}, r"every y must be in 0\.\.2"),
    ],
)
def test_rows_of_another_form_are_refused_naming_the_file(
    users: Any, changes: dict[str, Any], match: str, tmp_path: Path, cache_dir: Path
) -> None:
    sizes = {"num_samples": [len(u.get("y", [])) for u in users.values()]} | changes
    write(tmp_path, "test", "a", {"bob": numbers(1)})
    content = {"users": list(users), "user_data": users} | sizes
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "b.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"train/b\.json: .*{match}"):
        load(tmp_path, cache_dir)


def test_a_user_in_two_files_is_refused(folder: Path, cache_dir: Path) -> None:
    write(folder, "train", "c", {"bob": numbers(0)})
    with pytest.raises(DataError, match="train: a user is in it twice"):
        load(folder, cache_dir)


def test_a_folder_without_files_and_no_folder_are_refused(tmp_path: Path, cache_dir: Path) -> None:
    with pytest.raises(DataError, match=r"train: holds no \*\.json"):
        load(tmp_path, cache_dir)
    with pytest.raises(DataError, match=r"dataset\.path=null"):
        load(tmp_path, cache_dir, path=None)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"content": "texts"}, r"dataset\.content=texts.*did you mean text"),
        ({"shape": []}, r"dataset\.shape"),
        ({"num_classes": 1}, r"dataset\.num_classes=1"),
    ],
)
def test_impossible_values_are_refused_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        leaf(**changes)
