"""Flip and crop: each row by itself, from the job's stream, in training only."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_training import DP_SGD, SGD, Plain, build, job, rows_of, train

from fl_app.data.augmentation import FlipCrop, augmentation
from fl_app.plugins import Augmentation
from fl_app.stages import ClientPartition
from fl_app.training._batches import fetch


def images(num_rows: int, side: int = 9) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 256, (num_rows, 3, side, side), dtype=np.uint8)


def test_every_result_is_one_of_the_shifts_of_the_image_or_its_mirror() -> None:
    stored = images(20)
    got = FlipCrop(padding=2)(stored, np.random.default_rng(0))
    assert got.dtype == stored.dtype
    for before, after in zip(stored, got, strict=True):
        candidates = []
        for image in (before, before[:, :, ::-1]):
            canvas = np.zeros((3, 13, 13), np.uint8)
            canvas[:, 2:11, 2:11] = image
            candidates += [
                canvas[:, top : top + 9, left : left + 9] for top in range(5) for left in range(5)
            ]
        assert any(np.array_equal(after, c) for c in candidates)


def test_all_flips_and_shifts_occur_equally_often() -> None:
    # Each of the 2 x 3 x 3 outcomes of padding 1 is Binomial(n = 9,000, 1/18). By the normal tail
    # 500 +- 130 (6 standard deviations of 21.7) fails a fair draw with probability < 18 x 2e-9;
    # a flip probability of 0.7 (700 on one side) would fail for certain.
    marked = np.zeros((9_000, 1, 5, 5), np.uint8)
    marked[:, 0, 2, 1] = 1
    got = FlipCrop(padding=1)(marked, np.random.default_rng(1))
    places = np.argwhere(got[:, 0] == 1)[:, 1:]
    # Column 1 mirrored is column 3; a shift moves either by -1, 0 or 1, so column 2 comes twice.
    counts = np.zeros((5, 5), int)
    np.add.at(counts, (places[:, 0], places[:, 1]), 1)
    assert (abs(counts[1:4, [0, 1, 3, 4]] - 500) < 130).all()
    assert (abs(counts[1:4, 2] - 1000) < 185).all()


def test_rows_do_not_see_each_other_and_parts_equal_the_whole() -> None:
    stored = images(8)
    whole = FlipCrop()(stored, np.random.default_rng(5))
    parts = np.random.default_rng(5)
    cut = [FlipCrop()(stored[start:stop], parts) for start, stop in ((0, 3), (3, 3), (3, 8))]
    np.testing.assert_array_equal(np.concatenate(cut), whole)
    changed = stored.copy()
    changed[4] = 0
    others = np.arange(8) != 4
    again = FlipCrop()(changed, np.random.default_rng(5))
    np.testing.assert_array_equal(again[others], whole[others])


def test_the_stored_images_stay_as_they_are() -> None:
    stored = images(4)
    stored.flags.writeable = False
    copy = stored.copy()
    FlipCrop()(stored, np.random.default_rng(0))
    np.testing.assert_array_equal(stored, copy)


def augmented(num_rows: int) -> ClientPartition:
    partition = rows_of(num_rows)
    table = dataclasses.replace(partition.table, augmentation=FlipCrop(padding=1))
    return dataclasses.replace(partition, table=table)


@pytest.mark.parametrize("base", [DP_SGD, SGD], ids=["dp_sgd", "sgd"])
def test_both_trainings_augment_and_repeat(base: dict[str, object]) -> None:
    plain = train(build(base), rows_of(8), job()).delta_P
    first, again = (train(build(base), augmented(8), job()).delta_P for _ in range(2))
    assert not np.allclose(first, plain, atol=1e-4)
    np.testing.assert_array_equal(first, again)


def test_physical_batches_augment_alike() -> None:
    whole = train(build(DP_SGD, local_steps=2, batch_rate=0.7), augmented(12), job()).delta_P
    parts = train(
        build(DP_SGD, local_steps=2, batch_rate=0.7, physical_batch_size=3), augmented(12), job()
    ).delta_P
    np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_an_augmented_record_moves_the_sum_by_at_most_the_clipping_norm() -> None:
    @dataclasses.dataclass(frozen=True)
    class Huge(Augmentation):
        """Makes one row enormous."""

        def __call__(self, stored: np.ndarray, batches: np.random.Generator) -> np.ndarray:
            stored = np.array(stored)
            stored[:1] *= 1e5
            return stored

    partition = rows_of(6)
    table = dataclasses.replace(partition.table, augmentation=Huge())
    spoiled = dataclasses.replace(partition, table=table)
    huge, usual = (train(build(DP_SGD), p, job()).delta_P for p in (spoiled, partition))
    difference = huge - usual
    assert 0.01 < np.linalg.norm(difference) * 10 <= 2 * 0.5 * (1 + 1e-5)


def test_evaluation_sees_the_rows_as_they_are() -> None:
    partition = augmented(5)
    inputs, _ = fetch(partition.table, partition.rows, torch.device("cpu"))
    np.testing.assert_array_equal(inputs.numpy(), partition.table.features[partition.rows])
    assert isinstance(partition.table.transform, Plain)


def test_none_is_no_augmentation() -> None:
    assert augmentation("none") is None
    assert augmentation("flip_crop") == FlipCrop(padding=4)
