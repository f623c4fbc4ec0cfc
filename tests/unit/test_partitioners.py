"""Partitioners: laws, refusals, speed, agreement with flwr-datasets on ordinary tables."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import numpy.typing as npt
import pytest
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner

from fl_app import plugins, rng
from fl_app.errors import PrivacyError, SettingsError
from fl_app.partitioners import client_rows

ROOT = Path(__file__).resolve().parents[2]
LABELS = np.arange(1437) % 10
IID = plugins.build("partition", {"kind": "iid"})


def dirichlet(alpha: float = 0.5, min_size: int = 2) -> plugins.Partitioner:
    return plugins.build("partition", {"kind": "dirichlet", "alpha": alpha, "min_size": min_size})


def skew(parts: Sequence[npt.NDArray[np.int64]], labels: npt.NDArray[np.int64]) -> float:
    """Returns the mean over clients of the share of their commonest label."""
    return float(np.mean([np.bincount(labels[p]).max() / len(p) for p in parts if len(p)]))


def test_default_split_of_the_embedded_dataset_works_for_many_seeds() -> None:
    for seed in range(51):
        parts = client_rows(dirichlet(), LABELS, 10, seed)
        assert min(len(p) for p in parts) >= 2


def test_dirichlet_is_the_split_of_flwr_datasets_on_an_ordinary_table() -> None:
    library = DirichletPartitioner(
        num_partitions=7,
        partition_by="label",
        alpha=0.5,
        min_partition_size=0,
        seed=rng.derive_seed(3, "partition", 0),
    )
    library.dataset = datasets.Dataset.from_dict({"row": np.arange(1437), "label": LABELS})
    for client, rows in enumerate(client_rows(dirichlet(min_size=0), LABELS, 7, 3)):
        assert rows.tolist() == sorted(library.load_partition(client)["row"])


def test_iid_is_the_split_of_flwr_datasets_after_a_shuffle() -> None:
    rows = rng.stream(3, "partition").permutation(1437)
    library = IidPartitioner(num_partitions=7)
    library.dataset = datasets.Dataset.from_dict({"row": rows})
    for client, got in enumerate(client_rows(IID, LABELS, 7, 3)):
        assert got.tolist() == sorted(library.load_partition(client)["row"])


def test_iid_shares_have_the_labels_of_the_whole_even_if_rows_lie_sorted() -> None:
    labels = np.repeat(np.arange(10), 600)
    for part in client_rows(IID, labels, 10, 0):
        # Hypergeometric, n=600 of 6000 with 600 hits, std 6.97: 60 +- 45 holds each of 100 counts
        # with false-alarm probability < 1e-8 (6.4 sigma), together below 1e-6.
        counts = np.bincount(labels[part], minlength=10)
        assert counts.min() > 15
        assert counts.max() < 105


def test_small_alpha_is_skewed_and_large_alpha_is_not() -> None:
    skewed = client_rows(dirichlet(0.1, 0), LABELS, 10, 0)
    even = client_rows(dirichlet(1000.0, 0), LABELS, 10, 0)
    assert skew(skewed, LABELS) > 0.3 > 0.15 > skew(even, LABELS)


@pytest.mark.parametrize("partitioner", [IID, dirichlet()])
def test_seeds_matter(partitioner: plugins.Partitioner) -> None:
    first, second = (client_rows(partitioner, LABELS, 10, seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_process_makes_the_same_split() -> None:
    code = (
        "import numpy as np, hashlib\n"
        "from fl_app import plugins\n"
        "from fl_app.partitioners import client_rows\n"
        "for values in ({'kind': 'iid'}, {'kind': 'dirichlet', 'alpha': 0.5, 'min_size': 2}):\n"
        "    plugin = plugins.build('partition', values)\n"
        "    parts = client_rows(plugin, np.arange(1437) % 10, 10, 5)\n"
        "    print(hashlib.sha256(b'|'.join(p.tobytes() for p in parts)).hexdigest())\n"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert len(outputs[0].split()) == 2
    assert outputs[0] == outputs[1]


def test_an_impossible_smallest_size_is_refused_in_bounded_time_naming_both_keys() -> None:
    start = time.monotonic()
    with pytest.raises(SettingsError, match=r"partition\.alpha=0\.1.*partition\.min_size"):
        client_rows(dirichlet(0.1, 10), np.arange(600) % 10, 50, 0)
    assert time.monotonic() - start < 5


def test_more_rows_wanted_than_there_are_is_refused_at_once() -> None:
    with pytest.raises(SettingsError, match=r"partition\.min_size=200"):
        client_rows(dirichlet(0.5, 200), LABELS, 10, 0)


def test_clients_may_have_no_row_with_smallest_size_zero() -> None:
    parts = client_rows(dirichlet(0.01, 0), np.arange(600) % 10, 50, 0)
    assert min(len(p) for p in parts) == 0
    assert sum(len(p) for p in parts) == 600


def test_a_draw_with_a_small_client_is_repeated_without_warnings() -> None:
    first_draws = [min(map(len, client_rows(dirichlet(0.3, 0), LABELS, 20, s))) for s in range(30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accepted = [min(map(len, client_rows(dirichlet(0.3, 8), LABELS, 20, s))) for s in range(30)]
    assert min(first_draws) < 8 <= min(accepted)


@pytest.mark.parametrize("partitioner", [IID, dirichlet(0.5, 0)])
def test_a_population_above_the_rows_is_refused(partitioner: plugins.Partitioner) -> None:
    with pytest.raises(SettingsError, match=r"federation\.population=11"):
        client_rows(partitioner, np.arange(10), 11, 0)
    assert len(client_rows(partitioner, np.arange(10), 10, 0)) == 10


@pytest.mark.parametrize("partitioner", [IID, dirichlet(0.5, 0)])
def test_ten_thousand_clients_are_split_quickly(partitioner: plugins.Partitioner) -> None:
    labels = np.arange(60_000) % 10
    start = time.monotonic()
    parts = client_rows(partitioner, labels, 10_000, 0)
    assert time.monotonic() - start < 10
    assert sum(len(p) for p in parts) == 60_000


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"alpha": 0.0, "min_size": 0}, r"partition\.alpha=0\.0"),
        ({"alpha": 0.5, "min_size": -1}, r"partition\.min_size=-1"),
    ],
)
def test_impossible_values_are_refused_by_key(values: dict[str, object], key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        plugins.build("partition", {"kind": "dirichlet"} | values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(plugins.Partitioner):
    """Gives what it was made with and counts its calls."""

    parts: tuple[tuple[int, ...], ...]
    calls: list[int]

    def __hash__(self) -> int:
        return hash(self.parts)

    def split(
        self, labels: npt.NDArray[np.int64], population: int, seed: int
    ) -> list[npt.NDArray[np.int64]]:
        self.calls.append(seed)
        return [np.array(part, dtype=np.int64) for part in self.parts]


@pytest.mark.parametrize("parts", [((0, 1), (1, 2)), ((0,), (2,)), ((0, 1), (2, 3)), ((0, 1, 2),)])
def test_overlapping_or_incomplete_splits_are_refused(parts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(PrivacyError, match="exactly one"):
        client_rows(Given(parts=parts, calls=[]), np.zeros(3, dtype=np.int64), 2, 0)


def test_a_split_is_made_once_and_cannot_be_written_to() -> None:
    partitioner = Given(parts=((2, 0), (1,)), calls=[])
    first = client_rows(partitioner, np.array([1, 0, 1]), 2, 0)
    second = client_rows(partitioner, np.array([1, 0, 1]), 2, 0)
    assert partitioner.calls == [0]
    assert first[0].tolist() == [0, 2]
    assert first[0] is second[0]
    with pytest.raises(ValueError, match="read-only"):
        first[0][0] = 1
    client_rows(partitioner, np.array([1, 1, 1]), 2, 0)
    assert partitioner.calls == [0, 0]


def test_labels_of_a_file_are_read_once_and_others_by_content(tmp_path: Path) -> None:
    partitioner = Given(parts=((2, 0), (1,)), calls=[])
    files = []
    for name in ("one", "two"):
        np.save(tmp_path / f"{name}.npy", np.array([1, 0, len(files)]))
        files.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    first, second = (client_rows(partitioner, file, 2, 0) for file in files)
    assert partitioner.calls == [0, 0]
    assert client_rows(partitioner, files[0], 2, 0) is first
    assert client_rows(partitioner, files[1], 2, 0) is second
    assert client_rows(partitioner, np.array(files[0]), 2, 0) is first  # the same labels
    client_rows(partitioner, files[0], 2, 1)
    assert partitioner.calls == [0, 0, 1]
