"""MNIST, Fashion-MNIST and CIFAR-10 from offline copies in the layout of the hub."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from fl_app import plugins

ROOT = Path(__file__).resolve().parents[2]

# Label counts as the datasets' authors publish them: MNIST's are uneven, the others have 6,000 or
# 5,000 training and 1,000 test images of each label.
MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
FACTS = {
    "mnist": ("ylecun/mnist", "image", (1, 28, 28), MNIST_TRAIN, MNIST_TEST),
    "fashion_mnist": (
        "zalando-datasets/fashion_mnist",
        "image",
        (1, 28, 28),
        [6000] * 10,
        [1000] * 10,
    ),
    "cifar10": ("uoft-cs/cifar10", "img", (3, 32, 32), [5000] * 10, [1000] * 10),
}


def configured(name: str) -> plugins.Dataset:
    text = (ROOT / "conf" / "dataset" / f"{name}.yaml").read_text(encoding="utf-8")
    return plugins.build("dataset", yaml.safe_load(text))


def source_folder(hub_id: str) -> Path:
    folder = Path(os.environ["DPFL_DATA_ROOT"]) / hub_id
    if not folder.is_dir():
        pytest.skip(f"no copy of {hub_id} in $DPFL_DATA_ROOT")
    return folder


@pytest.mark.parametrize("name", sorted(FACTS))
def test_real_dataset_is_decoded_exactly_and_then_mapped(name: str, cache_dir: Path) -> None:
    hub_id, column, shape, train_counts, test_counts = FACTS[name]
    folder = source_folder(hub_id)
    start = time.monotonic()
    data = configured(name).load(data_path=None, cache_dir=cache_dir)
    assert time.monotonic() - start < 200
    assert data.spec.shape == shape
    assert data.spec.num_classes == 10
    assert np.bincount(data.train.labels).tolist() == train_counts
    assert np.bincount(data.test.labels).tolist() == test_counts

    rows = [0, 1, 999, 1000, len(data.test.labels) - 1]
    table = pq.read_table(folder / "test-00000-of-00001.parquet").take(rows).to_pylist()
    for row, line in zip(rows, table, strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(line[column]["bytes"])))
        expected = pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        np.testing.assert_array_equal(data.test.features[row], expected)
        assert int(data.test.labels[row]) == line["label"]

    start = time.monotonic()
    again = configured(name).load(data_path=None, cache_dir=cache_dir)
    assert time.monotonic() - start < 0.5
    assert isinstance(again.train.features, np.memmap)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_the_constants_of_a_configuration_standardize_its_training_images(
    name: str, cache_dir: Path
) -> None:
    source_folder(FACTS[name][0])
    data = configured(name).load(data_path=None, cache_dir=cache_dir)
    inputs = data.train.transform(data.train.features[:10_000])
    assert inputs.mean(dim=(0, 2, 3)).abs().max() < 0.02
    assert (inputs.std(dim=(0, 2, 3)) - 1).abs().max() < 0.03


def test_two_processes_decode_a_real_dataset_once_between_them(tmp_path: Path) -> None:
    rows = source_folder("ylecun/mnist") / "test-00000-of-00001.parquet"
    (tmp_path / "files").mkdir()
    for split in ("train", "test"):
        (tmp_path / "files" / f"{split}-00000-of-00001.parquet").symlink_to(rows)
    code = (
        "import sys, yaml, zlib\n"
        "from pathlib import Path\n"
        "from fl_app import plugins\n"
        "values = yaml.safe_load(Path(sys.argv[1]).read_text())\n"
        "dataset = plugins.build('dataset', values)\n"
        "data = dataset.load(data_path=sys.argv[3], cache_dir=Path(sys.argv[2]))\n"
        "rows = data.train.features\n"
        "print(zlib.crc32(rows.tobytes()), rows.filename)\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(ROOT / "conf/dataset/mnist.yaml"),
        str(tmp_path / "c"),
        str(tmp_path / "files"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")}
    (tmp_path / "home").mkdir()
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    results = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert results[0] == results[1]
    assert results[0][1] == b""  # no progress bars, no warnings
    assert len(list((tmp_path / "c").glob("mnist-*"))) == 1
    assert not list((tmp_path / "c").glob(".*.tmp"))
    assert not list((tmp_path / "home").rglob("*.arrow"))


def test_offline_without_a_copy_a_process_ends_within_ten_seconds(tmp_path: Path) -> None:
    code = (
        "import sys, yaml\n"
        "from pathlib import Path\n"
        "from fl_app import plugins\n"
        "values = yaml.safe_load(Path(sys.argv[1]).read_text())\n"
        "plugins.build('dataset', values).load(data_path=None, cache_dir=Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", code, str(ROOT / "conf/dataset/mnist.yaml"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    del environment["DPFL_DATA_ROOT"]
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - start < 10
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fl_app.errors.DataError: dataset.hub_id=ylecun/mnist")
    assert "dataset.path" in last
    assert "$DPFL_DATA_ROOT/ylecun/mnist" in last
