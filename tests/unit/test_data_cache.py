"""The cache of decoded arrays: decoded once, memory-mapped, robust against kills and damage."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_app.data import cache
from fl_app.data.transform import Standardize
from fl_app.errors import DataError


class Decoder:
    """Writes four small arrays and counts its calls in a file, over all processes."""

    def __init__(self, log: Path, seconds: float = 0.0) -> None:
        self.log = log
        self.seconds = seconds

    @property
    def calls(self) -> int:
        return len(self.log.read_text()) if self.log.exists() else 0

    def __call__(self, folder: Path) -> int:
        with self.log.open("a") as handle:
            handle.write("x")
        time.sleep(self.seconds)
        (folder / "scratch").mkdir()
        (folder / "scratch" / "big").write_bytes(b"0" * 100)
        for split, rows in (("train", 5), ("test", 2)):
            features = np.arange(rows * 4, dtype=np.uint8).reshape(rows, 1, 2, 2)
            np.save(cache.array_path(folder, split, "features"), features)
            np.save(cache.array_path(folder, split, "labels"), np.arange(rows) % 3)
        return 3


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    return Decoder(tmp_path / "calls")


def test_a_second_load_reads_memory_mapped_arrays_that_cannot_be_written(
    tmp_path: Path, decoder: Decoder
) -> None:
    first = cache.find_or_decode(tmp_path / "c", "toy-1", decoder)
    second = cache.find_or_decode(tmp_path / "c", "toy-1", decoder)
    assert decoder.calls == 1
    assert second.num_classes == 3
    for split in ("train", "test"):
        assert isinstance(second.features[split], np.memmap)
        np.testing.assert_array_equal(second.features[split], first.features[split])
        with pytest.raises(ValueError, match="read-only"):
            second.features[split][0] = 0
    assert second.labels["train"].dtype == np.int64


def test_only_arrays_and_facts_stay_on_disk(tmp_path: Path, decoder: Decoder) -> None:
    cache.find_or_decode(tmp_path / "c", "toy-1", decoder)
    names = {p.name for p in (tmp_path / "c" / "toy-1").iterdir()}
    arrays = {f"{s}_{w}.npy" for s in ("train", "test") for w in ("features", "labels")}
    assert names == arrays | {"meta.json"}
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"toy-1", ".toy-1.lock"}


def test_another_key_is_decoded_separately(tmp_path: Path, decoder: Decoder) -> None:
    cache.find_or_decode(tmp_path, "toy-1", decoder)
    cache.find_or_decode(tmp_path, "toy-2", decoder)
    assert decoder.calls == 2


def test_what_a_killed_decode_left_behind_is_removed(tmp_path: Path, decoder: Decoder) -> None:
    left_behind = tmp_path / "c" / ".toy-1.abc.tmp"
    left_behind.mkdir(parents=True)
    (left_behind / "train_features.npy").write_bytes(b"half")
    assert cache.find_or_decode(tmp_path / "c", "toy-1", decoder).num_classes == 3
    assert not left_behind.exists()


def test_a_failing_decode_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, decoder: Decoder
) -> None:
    def broken(folder: Path) -> int:
        (folder / "train_features.npy").write_bytes(b"half")
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        cache.find_or_decode(tmp_path / "c", "toy-1", broken)
    assert {p.name for p in (tmp_path / "c").iterdir()} == {".toy-1.lock"}
    assert cache.find_or_decode(tmp_path / "c", "toy-1", decoder).num_classes == 3


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("name", ["train_features.npy", "test_labels.npy", "meta.json"])
@pytest.mark.parametrize("damage", [truncate, overwrite, Path.unlink])
def test_a_damaged_cache_is_decoded_again(
    tmp_path: Path, decoder: Decoder, name: str, damage: object
) -> None:
    cache.find_or_decode(tmp_path, "toy-1", decoder)
    damage(tmp_path / "toy-1" / name)  # type: ignore[operator]
    assert cache.find(tmp_path, "toy-1") is None
    again = cache.find_or_decode(tmp_path, "toy-1", decoder)
    assert decoder.calls == 2
    assert again.labels["test"].tolist() == [0, 1]


def _load(folder: Path, log: Path) -> None:
    decoded = cache.find_or_decode(folder, "toy-1", Decoder(log, seconds=0.5))
    if decoded.labels["test"].tolist() != [0, 1]:
        raise SystemExit(3)


def test_processes_that_start_together_decode_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "calls"
    workers = [context.Process(target=_load, args=(tmp_path / "c", log)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert Decoder(log).calls == 1


def test_a_killed_decoder_does_not_block_the_next_one(tmp_path: Path, decoder: Decoder) -> None:
    context = multiprocessing.get_context("fork")
    slow = Decoder(tmp_path / "slow", seconds=60)
    worker = context.Process(target=cache.find_or_decode, args=(tmp_path / "c", "toy-1", slow))
    worker.start()
    while not slow.calls:
        time.sleep(0.01)
    worker.kill()
    worker.join(60)
    assert list((tmp_path / "c").glob(".toy-1.*.tmp"))
    assert cache.find_or_decode(tmp_path / "c", "toy-1", decoder).num_classes == 3
    assert not list((tmp_path / "c").glob(".toy-1.*.tmp"))


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path, decoder: Decoder) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="DPFL_HOME"):
        cache.find_or_decode(tmp_path / "file", "toy-1", decoder)


def test_fingerprints_change_with_name_size_and_time_of_a_visible_file(tmp_path: Path) -> None:
    data = tmp_path / "a.parquet"
    data.write_bytes(b"12")
    os.utime(data, ns=(1, 1))
    states = [cache.folder_state(tmp_path)]
    (tmp_path / ".hidden").write_text("")
    assert cache.folder_state(tmp_path) == states[0]
    os.utime(data, ns=(2, 2))
    states.append(cache.folder_state(tmp_path))
    data.write_bytes(b"123")
    os.utime(data, ns=(2, 2))
    states.append(cache.folder_state(tmp_path))
    data.rename(tmp_path / "b.parquet")
    states.append(cache.folder_state(tmp_path))
    assert len({cache.fingerprint(state) for state in states}) == 4


def test_standardize_scales_each_channel_with_its_constants() -> None:
    transform = Standardize(largest=255.0, mean=(0.5, 0.0), std=(0.25, 1.0))
    stored = np.array([[[[0, 255]], [[0, 51]]]], dtype=np.uint8)
    result = transform(stored)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor([[[[-2.0, 2.0]], [[0.0, 0.2]]]]))
    assert stored.tolist() == [[[[0, 255]], [[0, 51]]]]
    assert transform(stored[:0]).shape == (0, 2, 1, 2)
    assert pickle.loads(pickle.dumps(transform)) == transform
