"""Datasets: the embedded digits, hub images from small folders, look-up order, refusals."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from fl_app import plugins
from fl_app.data import source
from fl_app.errors import DataError, SettingsError

HUB_IMAGE: dict[str, Any] = {
    "kind": "hub_image",
    "hub_id": None,
    "path": None,
    "subset": None,
    "image_column": "image",
    "label_column": "label",
    "train_split": "train",
    "test_split": "test",
    "image_size": None,
    "mean": [0.5],
    "std": [0.25],
}


def hub_image(**changes: Any) -> plugins.Dataset:
    return plugins.build("dataset", HUB_IMAGE | changes)


def write(
    folder: Path,
    *,
    rows: int = 6,
    shape: tuple[int, ...] = (4, 5),
    labels: Any = None,
    seed: int = 0,
    names: tuple[str, str] = ("image", "label"),
    feature: Any = None,
) -> np.ndarray:
    """Writes train and test Parquet files of random PNG images; returns the training pixels."""
    feature = datasets.ClassLabel(num_classes=3) if feature is None else feature
    features = datasets.Features({names[0]: datasets.Image(), names[1]: feature})
    pixels = np.random.default_rng(seed).integers(0, 256, (rows, *shape), dtype=np.uint8)
    columns = {
        names[0]: [{"bytes": png(p), "path": None} for p in pixels],
        names[1]: [i % 3 for i in range(rows)] if labels is None else labels,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        table = datasets.Dataset.from_dict(columns, features=features)
        table.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return pixels


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture
def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPFL_DATA_ROOT")


def test_digits_has_the_documented_facts(cache_dir: Path) -> None:
    data = plugins.build("dataset", {"kind": "digits"}).load(data_path=None, cache_dir=cache_dir)
    assert data.spec.shape == (1, 8, 8)
    assert data.spec.num_classes == 10
    assert data.train.features.shape == (1437, 1, 8, 8)
    assert data.test.features.shape == (360, 1, 8, 8)
    inputs = data.train.transform(data.train.features[:])
    assert inputs.dtype == torch.float32
    # Values in [0, 1], moved by the public constant 0.3.
    assert float(inputs.min()) == pytest.approx(-0.3)
    assert float(inputs.max()) == pytest.approx(0.7)


def test_hub_images_can_set_training_rows_aside(tmp_path: Path, cache_dir: Path) -> None:
    write(tmp_path / "images", rows=20)
    whole = hub_image(path=str(tmp_path / "images")).load(data_path=None, cache_dir=cache_dir)
    dataset = hub_image(path=str(tmp_path / "images"), validation_fraction=0.25)
    cut = dataset.load(data_path=None, cache_dir=cache_dir)
    assert whole.validation is None
    assert cut.validation is not None
    assert (len(cut.train.labels), len(cut.validation.labels)) == (15, 5)
    both = np.concatenate([cut.train.features, cut.validation.features])
    assert sorted(map(bytes, both)) == sorted(map(bytes, whole.train.features))
    np.testing.assert_array_equal(cut.test.features, whole.test.features)
    assert cut.validation.augmentation is None


def test_digits_splits_the_rows_of_scikit_learn_by_label_share(cache_dir: Path) -> None:
    data = plugins.build("dataset", {"kind": "digits"}).load(data_path=None, cache_dir=cache_dir)
    images, labels = load_digits(return_X_y=True)

    def lines(features: np.ndarray, labels: np.ndarray) -> list[tuple[int, ...]]:
        flat = np.asarray(features, dtype=np.int64).reshape(len(labels), -1)
        return [(*row, label) for row, label in zip(flat.tolist(), labels.tolist(), strict=True)]

    got = [r for t in (data.train, data.test) for r in lines(t.features, t.labels)]
    assert sorted(got) == sorted(lines(images, labels))
    expected = np.bincount(labels) * 360 / 1797
    assert np.abs(np.bincount(data.test.labels) - expected).max() <= 1


def test_images_are_stored_as_they_are(tmp_path: Path, cache_dir: Path) -> None:
    pixels = write(tmp_path / "d")
    data = hub_image(path=str(tmp_path / "d")).load(data_path=None, cache_dir=cache_dir)
    assert data.spec.shape == (1, 4, 5)
    assert data.spec.num_classes == 3
    assert data.train.features.dtype == np.uint8
    np.testing.assert_array_equal(data.train.features[:, 0], pixels)
    assert data.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    expected = (pixels[0] / 255 - 0.5) / 0.25
    np.testing.assert_allclose(data.train.transform(data.train.features[:1])[0, 0], expected, 1e-5)


def test_colour_images_have_the_channel_first(tmp_path: Path, cache_dir: Path) -> None:
    pixels = write(tmp_path / "d", shape=(4, 5, 3))
    dataset = hub_image(path=str(tmp_path / "d"), mean=[0.5] * 3, std=[0.5] * 3)
    data = dataset.load(data_path=None, cache_dir=cache_dir)
    np.testing.assert_array_equal(data.train.features, pixels.transpose(0, 3, 1, 2))


def test_image_files_in_folders_by_label_are_read(tmp_path: Path, cache_dir: Path) -> None:
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "d" / split / label
            folder.mkdir(parents=True)
            (folder / "a.png").write_bytes(png(np.full((3, 3), 7, dtype=np.uint8)))
    data = hub_image(path=str(tmp_path / "d")).load(data_path=None, cache_dir=cache_dir)
    assert data.train.features.shape == (2, 1, 3, 3)
    assert sorted(data.train.labels.tolist()) == [0, 1]
    assert data.spec.num_classes == 2


def test_images_are_resized_on_request(tmp_path: Path, cache_dir: Path) -> None:
    write(tmp_path / "d")
    dataset = hub_image(path=str(tmp_path / "d"), image_size=8)
    assert dataset.load(data_path=None, cache_dir=cache_dir).spec.shape == (1, 8, 8)


def test_the_number_of_classes_is_counted_where_none_is_declared(
    tmp_path: Path, cache_dir: Path
) -> None:
    write(tmp_path / "d", labels=[0, 4, 1, 0, 1, 1], feature=datasets.Value("int64"))
    data = hub_image(path=str(tmp_path / "d")).load(data_path=None, cache_dir=cache_dir)
    assert data.spec.num_classes == 5


def test_changed_files_and_changed_settings_are_decoded_again(
    tmp_path: Path, cache_dir: Path
) -> None:
    dataset = hub_image(path=str(tmp_path / "d"))
    write(tmp_path / "d", seed=1)
    dataset.load(data_path=None, cache_dir=cache_dir)
    pixels = write(tmp_path / "d", seed=2)
    data = dataset.load(data_path=None, cache_dir=cache_dir)
    np.testing.assert_array_equal(data.train.features[:, 0], pixels)
    resized = hub_image(path=str(tmp_path / "d"), image_size=6)
    assert resized.load(data_path=None, cache_dir=cache_dir).spec.shape == (1, 6, 6)


def test_lookup_order_is_node_then_setting_then_root_then_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("node", "setting", "root/owner/name"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("DPFL_DATA_ROOT", str(tmp_path / "root"))
    node, setting = str(tmp_path / "node"), str(tmp_path / "setting")
    found = [
        source.find_source(node, setting, "owner/name"),
        source.find_source(None, setting, "owner/name"),
        source.find_source(None, None, "owner/name"),
        source.find_source(None, None, "owner/other"),
    ]
    assert [s.folder for s in found[:3]] == [
        tmp_path / "node",
        tmp_path / "setting",
        tmp_path / "root/owner/name",
    ]
    assert found[3].folder is None
    assert found[3].location == "owner/other"


@pytest.mark.parametrize(
    ("data_path", "path", "key"),
    [("nowhere", None, "data-path=nowhere"), (None, "nowhere", "dataset.path=nowhere")],
)
def test_a_given_folder_that_is_not_there_is_never_passed_over(
    data_path: str | None, path: str | None, key: str, cache_dir: Path
) -> None:
    # ylecun/mnist is in the data root of the tests, so passing over would succeed.
    dataset = hub_image(hub_id="ylecun/mnist", path=path)
    with pytest.raises(DataError, match=key):
        dataset.load(data_path=data_path, cache_dir=cache_dir)


@pytest.mark.usefixtures("no_root")
def test_no_dataset_named_says_what_to_set(cache_dir: Path) -> None:
    with pytest.raises(DataError, match=r"set dataset\.hub_id"):
        hub_image().load(data_path=None, cache_dir=cache_dir)


def assert_names_the_ways_out(error: DataError, hub_id: str) -> None:
    text = str(error)
    assert all(part in text for part in (hub_id, "dataset.path", f"$DPFL_DATA_ROOT/{hub_id}"))


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    accepted.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for connection in accepted:
            connection.close()


@pytest.mark.usefixtures("no_root")
def test_a_proxy_that_never_answers_ends_in_a_clear_error_within_ten_seconds(
    silent_server: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, silent_server)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    start = time.monotonic()
    with pytest.raises(DataError) as caught:
        hub_image(hub_id="owner/name").load(data_path=None, cache_dir=cache_dir)
    assert time.monotonic() - start < 10
    assert_names_the_ways_out(caught.value, "owner/name")
    assert not list(cache_dir.glob("name-*"))


@pytest.mark.parametrize(("rename", "key"), [("img", "image_column=img"), ("y", "label_column=y")])
def test_a_missing_column_is_refused_naming_those_seen(
    rename: str, key: str, tmp_path: Path, cache_dir: Path
) -> None:
    write(tmp_path / "d", names=("pixels", "digit"))
    changes = {"image_column": "pixels", "label_column": "digit"} | {key.split("=")[0]: rename}
    with pytest.raises(DataError, match=f"dataset.{key}.*the columns are pixels, digit"):
        hub_image(path=str(tmp_path / "d"), **changes).load(data_path=None, cache_dir=cache_dir)


def test_a_column_without_images_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    write(tmp_path / "d")
    with pytest.raises(DataError, match="must hold images"):
        hub_image(path=str(tmp_path / "d"), image_column="label").load(
            data_path=None, cache_dir=cache_dir
        )


def test_labels_that_are_texts_are_refused(tmp_path: Path, cache_dir: Path) -> None:
    write(tmp_path / "d", labels=list("abcabc"), feature=datasets.Value("string"))
    with pytest.raises(DataError, match="class labels or whole numbers"):
        hub_image(path=str(tmp_path / "d")).load(data_path=None, cache_dir=cache_dir)


def test_missing_labels_are_refused(tmp_path: Path, cache_dir: Path) -> None:
    write(tmp_path / "d", labels=[-1, 0, 1, 2, 0, 1])
    with pytest.raises(DataError, match="remove rows without a label"):
        hub_image(path=str(tmp_path / "d")).load(data_path=None, cache_dir=cache_dir)


def test_a_missing_split_is_refused_naming_those_seen(tmp_path: Path, cache_dir: Path) -> None:
    write(tmp_path / "d")
    with pytest.raises(DataError, match=r"dataset\.test_split=valid.*'train', 'test'"):
        hub_image(path=str(tmp_path / "d"), test_split="valid").load(
            data_path=None, cache_dir=cache_dir
        )


def test_colour_images_under_one_mean_are_refused(tmp_path: Path, cache_dir: Path) -> None:
    write(tmp_path / "d", shape=(4, 5, 3))
    with pytest.raises(DataError, match=r"dataset\.mean"):
        hub_image(path=str(tmp_path / "d")).load(data_path=None, cache_dir=cache_dir)


def test_splits_with_images_of_different_shapes_are_refused(
    tmp_path: Path, cache_dir: Path
) -> None:
    write(tmp_path / "d")
    write(tmp_path / "small", shape=(3, 3))
    name = "test-00000-of-00001.parquet"
    os.replace(tmp_path / "small" / name, tmp_path / "d" / name)
    with pytest.raises(DataError, match=r"dataset\.image_size"):
        hub_image(path=str(tmp_path / "d")).load(data_path=None, cache_dir=cache_dir)


def test_images_of_different_shapes_are_refused_unless_resized(
    tmp_path: Path, cache_dir: Path
) -> None:
    for split in ("train", "test"):
        for label, side in (("cat", 3), ("dog", 4)):
            folder = tmp_path / "d" / split / label
            folder.mkdir(parents=True)
            (folder / "a.png").write_bytes(png(np.full((side, side), 7, dtype=np.uint8)))
    with pytest.raises(DataError, match=r"dataset\.image_size"):
        hub_image(path=str(tmp_path / "d")).load(data_path=None, cache_dir=cache_dir)
    resized = hub_image(path=str(tmp_path / "d"), image_size=4)
    assert resized.load(data_path=None, cache_dir=cache_dir).spec.shape == (1, 4, 4)


@pytest.mark.parametrize("content", [None, b"PAR1 no"])
def test_an_unreadable_folder_is_a_data_error(
    content: bytes | None, tmp_path: Path, cache_dir: Path
) -> None:
    if content is not None:
        (tmp_path / "train-00000-of-00001.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"dataset\.path=.*cannot be read"):
        hub_image(path=str(tmp_path)).load(data_path=None, cache_dir=cache_dir)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"mean": []}, r"dataset\.mean"),
        ({"mean": [0.1, 0.2]}, r"dataset\.mean"),
        ({"std": [0.1, 0.2, 0.3]}, r"dataset\.std"),
        ({"std": [0.0]}, r"dataset\.std\[0\]"),
        ({"image_size": 0}, r"dataset\.image_size"),
        ({"hub_id": ""}, r"dataset\.hub_id"),
    ],
)
def test_impossible_values_are_refused_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        hub_image(**changes)
