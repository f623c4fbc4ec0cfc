"""One real private round of each dataset, and models that cannot take one."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import operator_rounds, results, run_here
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits

from fl_app import plugins
from fl_app.engines.local import LocalEngine
from fl_app.errors import ModelError, SettingsError
from fl_app.models import build_model
from fl_app.overrides import compose
from fl_app.run import run_one
from fl_app.server_run import plan_of
from fl_app.stages import InputSpec

ONE = ["run.num_rounds=1", "federation.num_nodes=2", "privacy.target_delta=1e-5"]
LOCAL = ["mechanism=local_gaussian", "cohort=fixed_size", "cohort.size=4"]
CASES = {
    "breast_cancer": ["dataset=breast_cancer", "model=linear", "partition=quantity"],
    "synthetic": ["dataset=synthetic", "model=cnn", "partition=shards"],
    "femnist": ["dataset=femnist", "model=linear", "partition=natural", "federation.population=95"],
    "shakespeare": [
        "dataset=shakespeare",
        "model=char_lstm",
        "model.hidden=16",
        "partition=natural",
        "federation.population=180",
        "training.local_epochs=null",
        "training.local_steps=1",
    ],
}
NEEDS = {"femnist": "flwrlabs/femnist", "shakespeare": "flwrlabs/shakespeare"}


@pytest.mark.parametrize("name", sorted(CASES))
def test_one_round_of(name: str, tmp_path: Path) -> None:
    root = Path(os.environ["DPFL_DATA_ROOT"])
    if name in NEEDS and not (root / NEEDS[name]).is_dir():
        pytest.skip(f"no copy of {NEEDS[name]} in $DPFL_DATA_ROOT")
    values = run_here(tmp_path, *ONE, *LOCAL, *CASES[name])
    assert values["status"] == "completed"
    (trace,) = operator_rounds(tmp_path)
    assert len(trace["answered"]) == 4
    assert trace["errors"] == []
    assert ("auc" in values["final"]) == (name == "breast_cancer")


def leaf_files(folder: Path) -> list[str]:
    """Writes handwritten digits as LEAF does: 10 users for training, one for testing."""
    images, labels = load_digits(return_X_y=True)
    rows = np.array_split(np.arange(220), 11)
    for split, chosen in (("train", rows[:10]), ("test", rows[10:])):
        (folder / split).mkdir(parents=True)
        data = {f"{split}{i}": {"x": images[r].tolist(), "y": labels[r].tolist()}
                for i, r in enumerate(chosen)}  # fmt: skip
        sizes = [len(user["y"]) for user in data.values()]
        content = {"users": list(data), "num_samples": sizes, "user_data": data}
        (folder / split / "all.json").write_text(json.dumps(content))
    shape = ["dataset.shape=[1,8,8]", "dataset.num_classes=10", "dataset.mean=[5]"]
    return ["dataset=leaf", *shape, "dataset.std=[6]", "partition=natural"]


def parquet_files(folder: Path) -> list[str]:
    """Writes three columns of the breast cancer table and its label."""
    table, labels = load_breast_cancer(return_X_y=True)
    for split, rows in (("train", slice(400)), ("test", slice(400, None))):
        columns = {name: table[rows, i] for i, name in enumerate(("radius", "texture", "rim"))}
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table({**columns, "label": labels[rows]}), folder / f"{split}.parquet")
    scale = ["dataset.mean=[14,19,92]", "dataset.std=[4,4,24]"]
    return ["dataset=parquet", "dataset.feature_columns=[radius,texture,rim]", *scale]


def image_files(folder: Path) -> list[str]:
    """Writes handwritten zeros and ones as PNG files in folders by class."""
    images, labels = load_digits(n_class=2, return_X_y=True)
    for i, (image, label) in enumerate(zip(images[:120], labels[:120], strict=True)):
        split = "train" if i < 80 else "test"
        target = folder / split / ("zero", "one")[label]
        target.mkdir(parents=True, exist_ok=True)
        pixels = (image.reshape(8, 8) * 15).astype(np.uint8)
        Image.fromarray(pixels).save(target / f"{i}.png")
    return ["dataset=image_folder", "dataset.classes=[zero,one]", "dataset.image_size=8"]


@pytest.mark.parametrize("write", [leaf_files, parquet_files, image_files])
def test_one_round_of_files_on_disk(write: Callable[[Path], list[str]], tmp_path: Path) -> None:
    words = write(tmp_path / "files")
    values = run_here(tmp_path / "run", f"dataset.path={tmp_path / 'files'}", *words, *ONE, *LOCAL)
    assert values["status"] == "completed"
    (trace,) = operator_rounds(tmp_path / "run")
    assert len(trace["answered"]) == 4
    assert trace["errors"] == []
    assert ("auc" in values["final"]) == (write is not leaf_files)


@pytest.mark.parametrize("kind", [k for k in plugins.kinds("model") if k != "char_lstm"])
def test_a_model_of_numbers_is_refused_on_tokens(kind: str) -> None:
    tokens = InputSpec(shape=(80,), num_classes=81, vocabulary=81)
    with pytest.raises(ModelError, match=f"model={kind}: takes numbers, .*choose model=char_lstm"):
        build_model(compose([f"model={kind}"]).model, tokens, seed=0, private=True)


def test_a_model_of_tokens_is_refused_on_images_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model=char_lstm: needs rows of tokens.*model=mlp"):
        run_one(["model=char_lstm", "engine.num_workers=0", f"run.output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_labels_of_clients_are_not_shown_of_a_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "partition" in plan_of([], show_partition=True).values
    monkeypatch.setattr(LocalEngine, "kind", "deployment")
    with pytest.raises(SettingsError, match=r"--show-partition=deployment: is for simulations"):
        plan_of([], show_partition=True)


def test_the_synthetic_data_can_be_learned(tmp_path: Path) -> None:
    plain = ["training=sgd", "privacy.target_epsilon=null", "run.num_rounds=3"]
    values = run_here(tmp_path, "dataset=synthetic", "partition=dirichlet", *plain)
    assert values["final"]["accuracy"] > 0.5


def test_every_evaluated_round_has_its_auc_before_and_after_a_stop(tmp_path: Path) -> None:
    medical = [*CASES["breast_cancer"], "run.evaluate_every=2", "run.stop_after=2"]
    first = run_here(tmp_path / "run", *medical, *LOCAL)
    assert run_one([f"run.resume={tmp_path / 'run'}"]) == 0
    history = results(tmp_path / "run")["history"]
    assert [row["auc"] is not None for row in history] == [False, True, False, True]
    assert history[1]["auc"] == first["history"][1]["auc"] == first["final"]["auc"]
    assert history[3]["auc"] == results(tmp_path / "run")["final"]["auc"]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["auc"] for row in table] == ["", str(history[1]["auc"]), "", str(history[3]["auc"])]
