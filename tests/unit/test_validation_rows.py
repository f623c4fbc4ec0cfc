"""Rows for choices made before a run: fixed, public, never trained on, and named wherever shown."""

from pathlib import Path

import numpy as np
import pytest
from harness import watched_run

from fl_app import client_round, plugins
from fl_app.client_policy import home
from fl_app.errors import DataError, SettingsError
from fl_app.overrides import compose, compose_mapping
from fl_app.server_run import plan_of
from fl_app.settings import Settings
from fl_app.stages import ClientPartition, LoadedData

WITH_ROWS = ["digits", "breast_cancer", "synthetic"]
VALIDATION = "run.evaluate_on=validation"


def load(name: str, fraction: float, cache_dir: Path) -> LoadedData:
    section = compose_mapping([f"dataset={name}"])["dataset"]
    dataset: plugins.Dataset = plugins.build("dataset", section | {"validation_fraction": fraction})
    return dataset.load(data_path=None, cache_dir=cache_dir)


def row_bytes(*arrays: np.ndarray) -> list[bytes]:
    return sorted(row.tobytes() for array in arrays for row in np.asarray(array))


@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_fraction_moves_training_rows_and_leaves_the_test_rows(
    name: str, cache_dir: Path
) -> None:
    whole, cut = load(name, 0.0, cache_dir), load(name, 0.2, cache_dir)
    assert whole.validation is None
    assert cut.validation is not None
    assert len(cut.validation.labels) == round(0.2 * len(whole.train.labels))
    assert row_bytes(cut.train.features, cut.validation.features) == row_bytes(whole.train.features)
    for split in ("features", "labels"):
        np.testing.assert_array_equal(getattr(cut.test, split), getattr(whole.test, split))
    # Features and labels were moved together.
    label_of = {f.tobytes(): int(y) for f, y in zip(whole.train.features, whole.train.labels,
                                                    strict=True)}  # fmt: skip
    moved = zip(cut.validation.features, cut.validation.labels, strict=True)
    assert all(label_of[np.asarray(f).tobytes()] == int(y) for f, y in moved)


def test_the_rows_set_aside_are_the_same_on_every_machine(tmp_path: Path) -> None:
    first, second = (load("digits", 0.1, tmp_path / name).validation for name in "ab")
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(first.features, second.features)


@pytest.mark.parametrize("fraction", ["-0.1", "1", "nan"])
def test_a_fraction_that_is_none_is_refused(fraction: str) -> None:
    with pytest.raises(SettingsError, match=r"dataset\.validation_fraction="):
        compose([f"dataset.validation_fraction={fraction}"])


def test_a_fraction_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"validation_fraction=0.9999: leaves none of 455 rows"):
        load("breast_cancer", 0.9999, tmp_path)


def test_a_run_is_measured_on_the_validation_rows_and_trains_on_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[ClientPartition] = []
    genuine = client_round.client_partition

    def watch(client: int, settings: Settings, data: LoadedData) -> ClientPartition:
        trained.append(genuine(client, settings, data))
        return trained[-1]

    monkeypatch.setattr(client_round, "client_partition", watch)
    cut = "dataset.validation_fraction=0.25"
    run = watched_run(tmp_path / "run", cut, VALIDATION)
    data = run.settings.dataset.load(data_path=None, cache_dir=home() / "cache")
    assert data.validation is not None
    aside = set(row_bytes(data.validation.features))
    seen = [row_bytes(p.table.features[p.rows]) for p in trained]
    assert sum(len(rows) for rows in seen[-10:]) == len(data.train.labels)
    duplicates = aside & set(row_bytes(data.train.features))  # equal images of two people
    assert not (aside - duplicates) & {row for rows in seen for row in rows}

    values = run.results
    hits = values["final"]["accuracy"] * len(data.validation.labels)
    assert hits == pytest.approx(round(hits), abs=1e-6)
    again = watched_run(tmp_path / "test", cut).results
    assert (values["evaluated_on"], again["evaluated_on"]) == ("validation", "test")
    report = (run.folder / "privacy_report.md").read_text()
    assert "on validation rows: kept out of training" in report
    assert any("no guarantee covers those rows" in text for text in values["privacy"]["warnings"])
    assert "on the public test rows" in (tmp_path / "test" / "privacy_report.md").read_text()


def test_a_dataset_without_validation_rows_is_refused_naming_the_setting() -> None:
    with pytest.raises(SettingsError) as caught:
        plan_of([VALIDATION])
    assert str(caught.value) == (
        "run.evaluate_on=validation: dataset=digits has no validation rows; "
        "set dataset.validation_fraction=0.1"
    )


def test_a_dataset_that_can_set_none_aside_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", x=np.zeros((3, 4), np.float32), y=np.array([0, 1, 1]))
    own = ["dataset=npz", f"dataset.path={tmp_path}", "dataset.shape=[4]", "dataset.num_classes=2"]
    with pytest.raises(SettingsError, match=r"dataset=npz has no validation.*evaluate_on=test"):
        plan_of([*own, "partition=own", "training.nominal_rows=3", VALIDATION])


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"run\.evaluate_on=train: must be one of test, valid"):
        compose(["run.evaluate_on=train"])
