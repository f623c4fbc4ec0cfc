"""A site's own files: what is read, what is refused before training, and whose rows they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fl_app import plugins
from fl_app.client_policy import Node
from fl_app.client_round import client_partition, run_node
from fl_app.errors import DataError, PrivacyError, SettingsError
from fl_app.overrides import compose, compose_mapping
from fl_app.server_run import nominal_rows
from fl_app.stages import LoadedData, RoundOrder
from fl_app.wire import TrainRequest

NPZ = {"shape": [2, 2], "num_classes": 3}
PARQUET = {"feature_columns": ["b", "a"], "num_classes": 3}
IMAGES = {"classes": ["cat", "dog", "emu"], "image_size": 3}


def build(kind: str, **changes: Any) -> plugins.Dataset:
    section = compose_mapping([f"dataset={kind}"])["dataset"]
    dataset: plugins.Dataset = plugins.build("dataset", section | changes)
    return dataset


def write_npz(folder: Path, split: str = "train", **arrays: Any) -> Path:
    rows = {"x": np.arange(12.0).reshape(3, 2, 2), "y": np.array([0, 2, 1])} | arrays
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{split}.npz", **rows)
    return folder / f"{split}.npz"


def write_parquet(folder: Path, split: str = "train", **columns: Any) -> Path:
    rows = {"a": [1.0, 2.0], "b": [3, 4], "label": [2, 0], "name": ["p", "q"]} | columns
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows), folder / f"{split}.parquet")
    return folder / f"{split}.parquet"


def write_images(folder: Path, split: str = "train", *names: str) -> Path:
    for i, name in enumerate(names or ("emu", "cat")):
        (folder / split / name).mkdir(parents=True)
        path = folder / split / name / "1.png"
        Image.fromarray(np.full((5, 4), 10 * i, dtype=np.uint8)).save(path)
    return path


def at_node(kind: str, folder: Path, cache_dir: Path, **changes: Any) -> LoadedData:
    facts = {"npz": NPZ, "parquet": PARQUET, "image_folder": IMAGES}[kind]
    return build(kind, **(facts | changes)).load(data_path=str(folder), cache_dir=cache_dir)


def test_arrays_are_read_as_they_are_and_a_node_needs_no_test_rows(
    tmp_path: Path, cache_dir: Path
) -> None:
    write_npz(tmp_path)
    data = at_node("npz", tmp_path, cache_dir, mean=[1.0], std=[2.0])
    assert (data.spec.shape, data.spec.num_classes) == ((2, 2), 3)
    assert data.train.labels.tolist() == [0, 2, 1]
    assert data.train.transform(data.train.features[:1]).tolist() == [[[-0.5, 0], [0.5, 1]]]
    assert data.test.features.shape == (0, 2, 2)


def test_columns_are_read_in_the_order_of_the_settings(tmp_path: Path, cache_dir: Path) -> None:
    write_parquet(tmp_path)
    data = at_node("parquet", tmp_path, cache_dir)
    assert data.spec.shape == (2,)
    assert np.asarray(data.train.features).tolist() == [[3.0, 1.0], [4.0, 2.0]]
    assert data.train.labels.tolist() == [2, 0]


def test_labels_of_image_files_are_the_places_of_their_folders_in_the_settings(
    tmp_path: Path, cache_dir: Path
) -> None:
    write_images(tmp_path)
    data = at_node("image_folder", tmp_path, cache_dir)
    assert (data.spec.shape, data.spec.num_classes) == ((1, 3, 3), 3)
    assert data.train.labels.tolist() == [0, 2]
    assert np.asarray(data.train.features)[:, 0, 0, 0].tolist() == [10, 0]


def test_a_server_needs_test_rows_only(tmp_path: Path, cache_dir: Path) -> None:
    write_npz(tmp_path, "test")
    dataset = build("npz", **NPZ, path=str(tmp_path))
    data = dataset.load(data_path=None, cache_dir=cache_dir)
    assert (len(data.train.labels), len(data.test.labels)) == (0, 3)
    with pytest.raises(DataError, match=r"data-path=.*: has no train\.npz"):
        dataset.load(data_path=str(tmp_path), cache_dir=cache_dir)


@pytest.mark.parametrize("kind", ["npz", "parquet", "image_folder"])
def test_no_folder_and_no_rows_are_refused_saying_what_to_set(
    kind: str, tmp_path: Path, cache_dir: Path
) -> None:
    facts = {"npz": NPZ, "parquet": PARQUET, "image_folder": IMAGES}[kind]
    with pytest.raises(DataError, match=r"dataset\.path=null.*data-path"):
        build(kind, **facts).load(data_path=None, cache_dir=cache_dir)
    with pytest.raises(DataError, match=r"data-path=.*: has no train"):
        at_node(kind, tmp_path, cache_dir)


@pytest.mark.parametrize(
    ("kind", "write"),
    [("npz", write_npz), ("parquet", write_parquet), ("image_folder", write_images)],
)
def test_a_truncated_file_is_refused(
    kind: str, write: Callable[[Path], Path], tmp_path: Path, cache_dir: Path
) -> None:
    path = write(tmp_path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"train.*(is no complete|cannot be read)"):
        at_node(kind, tmp_path, cache_dir)


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"x": np.zeros((3, 4))}, r"shape \[2, 2\], and its inputs have shape \[4\]"),
        ({"y": np.array([0, 1])}, "one label for each input"),
        ({"y": np.array([0, 3, 1])}, r"must be a whole number in 0\.\.2"),
        ({"y": np.array([0, -1, 1])}, r"must be a whole number in 0\.\.2"),
        ({"y": np.array([0, 0.5, 1])}, r"must be a whole number in 0\.\.2"),
        ({"x": np.array([["a"] * 2] * 3)}, "must hold numbers"),
        ({"x": np.array([None] * 3)}, "without objects"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    arrays: dict[str, Any], match: str, tmp_path: Path, cache_dir: Path
) -> None:
    write_npz(tmp_path, **arrays)
    with pytest.raises(DataError, match=match):
        at_node("npz", tmp_path, cache_dir)


def test_missing_arrays_and_columns_are_refused_naming_those_seen(
    tmp_path: Path, cache_dir: Path
) -> None:
    write_npz(tmp_path)
    write_parquet(tmp_path)
    with pytest.raises(DataError, match=r"dataset\.label_array=z: .*\(x, y are\)"):
        at_node("npz", tmp_path, cache_dir, label_array="z")
    with pytest.raises(DataError, match=r"feature_columns=c: .*columns are a, b, label, name"):
        at_node("parquet", tmp_path, cache_dir, feature_columns=["a", "c"])


@pytest.mark.parametrize("columns", [{"a": ["x", "y"]}, {"a": [1.0, None]}, {"label": [0, None]}])
def test_columns_without_a_number_in_every_row_are_refused(
    columns: dict[str, Any], tmp_path: Path, cache_dir: Path
) -> None:
    write_parquet(tmp_path, **columns)
    with pytest.raises(DataError, match="must hold a number in every row"):
        at_node("parquet", tmp_path, cache_dir)


def test_a_folder_that_is_no_class_is_refused_without_its_name(
    tmp_path: Path, cache_dir: Path
) -> None:
    write_images(tmp_path, "train", "cat", "somebody")
    with pytest.raises(DataError, match=r"dataset\.classes") as caught:
        at_node("image_folder", tmp_path, cache_dir)
    assert "somebody" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("npz", {"shape": [0]}, r"dataset\.shape\[0\]=0"),
        ("npz", {"mean": [0.0, 1.0, 2.0], "std": [1.0] * 3, "shape": [2]}, r"dataset\.mean"),
        ("npz", {"num_classes": 1}, r"dataset\.num_classes=1"),
        ("parquet", {"feature_columns": ["a", "a"]}, r"dataset\.feature_columns"),
        ("parquet", {"feature_columns": ["label"]}, r"dataset\.label_column=label"),
        ("image_folder", {"classes": ["a"]}, r"dataset\.classes"),
        ("image_folder", {"image_size": 0}, r"dataset\.image_size=0"),
    ],
)
def test_impossible_values_are_refused_by_key(kind: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        build(kind, **changes)


OWN = ["dataset=npz", "dataset.shape=[2,2]", "dataset.num_classes=3", "partition=own",
       "federation.population=2", "mechanism=local_gaussian", "mechanism.noise_multiplier=0.1",
       "privacy.target_epsilon=null"]  # fmt: skip


def node(folder: Path | None, part: int = 0, parts: int = 2) -> Node:
    config: dict[str, object] = {"partition-id": part, "num-partitions": parts}
    return Node.from_config(config | ({} if folder is None else {"data-path": str(folder)}))


def test_a_client_has_all_rows_of_its_node_and_trains_on_them(tmp_path: Path) -> None:
    from fl_app.client_round import new_model, worker_data

    write_npz(tmp_path / "a")
    write_npz(tmp_path / "b", x=np.zeros((1, 2, 2)), y=np.array([2]))
    settings = compose(OWN)
    for part, (name, rows) in enumerate([("a", 3), ("b", 1)]):
        here = node(tmp_path / name, part)
        data = worker_data(settings.to_wire(), here)
        assert client_partition(part, settings, data).rows.tolist() == list(range(rows))
        order = RoundOrder(
            round=1,
            clipping_norm=1.0,
            noise_multiplier=0.1,
            training_noise_multiplier=None,
            nominal_rows=1,
        )
        state = new_model(settings, data.spec).state_dict()
        request = TrainRequest(
            settings=settings.to_wire(), order=order, clients=(part,), model=state
        )
        assert run_node(request, here).clients == (part,)


def test_own_rows_are_never_those_of_two_clients(tmp_path: Path) -> None:
    settings = compose(OWN)
    with pytest.raises(PrivacyError, match=r"num-partitions=1, federation\.population=2"):
        node(tmp_path, parts=1).check(settings)
    with pytest.raises(PrivacyError, match="data-path"):
        node(None).check(settings)
    node(tmp_path).check(settings)


def test_record_level_needs_a_public_row_count_where_nodes_have_their_own_rows(
    tmp_path: Path, cache_dir: Path
) -> None:
    write_npz(tmp_path)
    record = [*OWN[:5], "training=dp_sgd"]
    data = at_node("npz", tmp_path, cache_dir)
    with pytest.raises(SettingsError, match=r"training\.nominal_rows=null: partition=own"):
        nominal_rows(compose(record), data)
    assert nominal_rows(compose([*record, "training.nominal_rows=50"]), data) == 50


def test_a_simulation_cannot_use_own_rows() -> None:
    with pytest.raises(SettingsError, match="choose partition=iid"):
        plugins.build("partition", {"kind": "own"}).split(np.arange(3), 2, 0)
