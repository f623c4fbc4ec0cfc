"""Breast cancer and synthetic data, and the area under the curve that binary tables report."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from fl_app import plugins
from fl_app.data.breast_cancer import RANGES
from fl_app.data.transform import Standardize
from fl_app.errors import SettingsError
from fl_app.stages import LoadedData, Table
from fl_app.training.evaluate import evaluate

SYNTHETIC = {
    "kind": "synthetic",
    "num_train": 500,
    "num_test": 100,
    "num_classes": 4,
    "signal": 0.1,
    "seed": 0,
}
CPU = torch.device("cpu")


def load(values: dict[str, Any], cache_dir: Path) -> LoadedData:
    data: LoadedData = plugins.build("dataset", values).load(data_path=None, cache_dir=cache_dir)
    return data


def test_breast_cancer_is_scaled_by_the_published_ranges(cache_dir: Path) -> None:
    lines = re.findall(r"\((?:mean|standard error|worst)\): +([\d.]+) +([\d.]+)\n",
                       load_breast_cancer().DESCR)  # fmt: skip
    assert [(float(a), float(b)) for a, b in lines] == list(RANGES)
    data = load({"kind": "breast_cancer"}, cache_dir)
    assert (data.spec.shape, data.spec.num_classes) == ((30,), 2)
    assert (len(data.train.labels), len(data.test.labels)) == (455, 114)
    inputs = data.train.transform(data.train.features[:])
    assert inputs.dtype == torch.float32
    # (v - low) / (high - low) lies in [0, 1], then (u - 0.3) / 0.15; constants are rounded.
    assert float(inputs.min()) > -2.0 - 0.3
    assert float(inputs.max()) < 0.7 / 0.15 + 0.3
    assert inputs.mean().abs() < 1
    assert 0.5 < inputs.std() < 1.5


def test_breast_cancer_has_the_rows_of_scikit_learn(cache_dir: Path) -> None:
    data = load({"kind": "breast_cancer"}, cache_dir)
    table, labels = load_breast_cancer(return_X_y=True)
    got = np.concatenate([data.train.features, data.test.features])
    order, expected = np.lexsort(got.T), table.astype(np.float32)
    np.testing.assert_array_equal(got[order], expected[np.lexsort(expected.T)])
    assert abs(int(data.test.labels.sum()) - 114 * labels.mean()) < 1


def test_synthetic_data_are_the_same_in_every_process_and_change_with_their_seed(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, zlib\n"
        "from pathlib import Path\n"
        "from fl_app import plugins\n"
        f"data = plugins.build('dataset', {SYNTHETIC!r}).load("
        "data_path=None, cache_dir=Path(sys.argv[1]))\n"
        "print(zlib.crc32(data.train.features.tobytes()), zlib.crc32(data.test.labels.tobytes()))\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / name)],
            capture_output=True, text=True, check=True, cwd=root,
        ).stdout
        for name in ("a", "b")
    }  # fmt: skip
    assert len(outputs) == 1
    first, other = (load(SYNTHETIC | {"seed": s}, tmp_path / "c") for s in (0, 1))
    assert not np.array_equal(first.train.features, other.train.features)


def test_synthetic_images_are_patterns_of_their_label_under_unit_noise(tmp_path: Path) -> None:
    data = load(SYNTHETIC | {"num_train": 4000}, tmp_path)
    assert data.spec.shape == (1, 28, 28)
    assert np.bincount(data.train.labels).tolist() == [1000] * 4
    images = np.asarray(data.train.features)[:, 0]
    means = np.stack([images[data.train.labels == k].mean(axis=0) for k in range(4)])
    noise = images - means[data.train.labels]
    # 3.1 million samples: the std's own std is 4e-4, so 0.003 is beyond 7 sigma (1e-6 is 4.9).
    assert abs(float(noise.std()) - 1) < 0.003
    blocks = means.reshape(4, 7, 4, 7, 4)
    # Within a 4 x 4 block the pattern is flat: what is left is noise of std 1 / sqrt(1000).
    assert blocks.std(axis=(2, 4)).mean() < 0.04 < blocks.mean(axis=(2, 4)).std()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_train": 0}, r"dataset\.num_train=0"),
        ({"num_classes": 1}, r"dataset\.num_classes=1"),
        ({"signal": 0.0}, r"dataset\.signal=0\.0"),
        ({"seed": -1}, r"dataset\.seed=-1"),
    ],
)
def test_impossible_values_are_refused_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        plugins.build("dataset", SYNTHETIC | changes)


def table_of(scores: list[float], labels: list[int], num_classes: int = 2) -> Table:
    features = np.zeros((len(scores), num_classes), dtype=np.float32)
    features[:, 1] = scores
    plain = Standardize(largest=1.0, mean=(0.0,), std=(1.0,))
    return Table(features=features, labels=np.array(labels), transform=plain)


def test_area_under_the_curve_counts_ordered_pairs() -> None:
    # Pairs (negative, positive): of 2 x 2, 2 are in order, 1 is tied, 1 is not: 2.5 / 4.
    scores, labels = [0.1, 0.4, 0.4, 0.2], [0, 0, 1, 1]
    metrics = evaluate(nn.Identity(), table_of(scores, labels), CPU, batch_size=3)
    assert metrics["auc"] == pytest.approx(2.5 / 4)


def test_area_under_the_curve_is_left_out_where_it_is_not_defined() -> None:
    assert "auc" not in evaluate(nn.Identity(), table_of([0.1, 0.2], [1, 1]), CPU)
    assert "auc" not in evaluate(nn.Identity(), table_of([0.1, 0.2], [0, 1], 3), CPU)


def test_a_diverged_model_is_no_better_than_chance() -> None:
    metrics = evaluate(nn.Identity(), table_of([float("nan")] * 2, [0, 1]), CPU)
    assert metrics["auc"] == 0.5
