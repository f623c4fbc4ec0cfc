"""Shards, quantity and natural: laws, refusals, agreement with flwr-datasets where it has them."""

from __future__ import annotations

import time

import datasets
import numpy as np
import pytest
from flwr_datasets.partitioner import LinearPartitioner, NaturalIdPartitioner, ShardPartitioner

from fl_app import plugins
from fl_app.errors import SettingsError
from fl_app.partitioners import client_rows

LABELS = np.arange(6000) % 10
SHARDS = {"kind": "shards", "shards_per_client": 2}
QUANTITY = {"kind": "quantity", "law": "dirichlet", "alpha": 0.5, "min_size": 2}
NATURAL: plugins.Partitioner = plugins.build("partition", {"kind": "natural"})


def build(values: dict[str, object], **changes: object) -> plugins.Partitioner:
    plugin: plugins.Partitioner = plugins.build("partition", values | changes)
    return plugin


def test_two_shards_give_equal_sizes_and_at_most_two_labels_where_shards_divide_the_labels() -> (
    None
):
    parts = client_rows(build(SHARDS), np.random.default_rng(0).permutation(LABELS), 100, 0)
    labels = np.random.default_rng(0).permutation(LABELS)
    assert {len(p) for p in parts} == {60}
    assert {len(set(labels[p])) for p in parts} <= {1, 2}
    # 200 shards, 20 of each label: two of the same label have probability 19/199 for each client.
    assert sum(len(set(labels[p])) == 2 for p in parts) > 70


def test_shards_have_the_shape_of_those_of_flwr_datasets() -> None:
    library = ShardPartitioner(num_partitions=30, partition_by="label", num_shards_per_partition=2)
    library.dataset = datasets.Dataset.from_dict({"label": LABELS})
    theirs = [np.bincount(library.load_partition(c)["label"], minlength=10) for c in range(30)]
    ours = [np.bincount(LABELS[p], minlength=10) for p in client_rows(build(SHARDS), LABELS, 30, 0)]

    def sizes(counts: list[np.ndarray]) -> list[int]:
        return [int(c.sum()) for c in counts]

    assert sizes(ours) == sizes(theirs)
    assert sum(ours).tolist() == sum(theirs).tolist()  # type: ignore[attr-defined]
    # 100 rows to a shard and 600 to a label: no shard lies over a border.
    assert all(set(c.tolist()) <= {0, 100, 200} for c in [*ours, *theirs])


def test_rows_that_shards_do_not_divide_are_given_out_too() -> None:
    sizes = [len(p) for p in client_rows(build(SHARDS), LABELS[:1437], 100, 0)]
    assert sum(sizes) == 1437
    assert max(sizes) - min(sizes) <= 2


def test_more_shards_than_rows_are_refused_naming_both_keys() -> None:
    with pytest.raises(SettingsError, match=r"shards_per_client=2.*federation\.population=4"):
        client_rows(build(SHARDS), np.zeros(7, dtype=np.int64), 4, 0)


def test_small_alpha_gives_few_clients_most_rows_and_large_alpha_nearly_equal_sizes() -> None:
    def largest(alpha: float) -> int:
        return max(len(p) for p in client_rows(build(QUANTITY, alpha=alpha), LABELS, 20, 0))

    assert largest(0.1) > 1000 > 330 > largest(1000.0)


def test_quantity_keeps_labels_iid() -> None:
    largest = max(client_rows(build(QUANTITY), LABELS, 5, 0), key=len)
    counts = np.bincount(LABELS[largest], minlength=10)
    # Hypergeometric: its tails are no heavier than the binomial's; 6.4 sigma hold each of 10 counts
    # with false-alarm probability < 1e-8 (n is about 3,000), together below 1e-6.
    n = len(largest)
    assert np.abs(counts - n / 10).max() < 6.4 * np.sqrt(n * 0.09)


def test_quantity_gives_everybody_the_smallest_size_at_once_even_for_a_tiny_alpha() -> None:
    start = time.monotonic()
    sizes = [len(p) for p in client_rows(build(QUANTITY, alpha=1e-3), LABELS[:600], 50, 0)]
    assert time.monotonic() - start < 5
    assert min(sizes) == 2
    assert sum(sizes) == 600


def test_linear_sizes_are_those_of_flwr_datasets_up_to_rounding() -> None:
    library = LinearPartitioner(num_partitions=7)
    library.dataset = datasets.Dataset.from_dict({"row": LABELS})
    plugin = build(QUANTITY, law="linear", min_size=0)
    for client, rows in enumerate(client_rows(plugin, LABELS, 7, 0)[:-1]):
        assert abs(len(rows) - len(library.load_partition(client))) <= 1


def test_exponential_sizes_grow_by_e_and_do_not_overflow() -> None:
    plugin = build(QUANTITY, law="exponential", min_size=0)
    sizes = [len(p) for p in client_rows(plugin, LABELS, 1000, 0)]
    assert sizes[-1] / sizes[-2] == pytest.approx(np.e, rel=0.01)
    assert sum(sizes) == 6000


def test_a_smallest_size_above_the_rows_is_refused_naming_both_keys() -> None:
    with pytest.raises(SettingsError, match=r"min_size=2.*federation\.population=4"):
        client_rows(build(QUANTITY), np.zeros(7, dtype=np.int64), 4, 0)


def test_natural_clients_are_those_of_flwr_datasets() -> None:
    groups = np.random.default_rng(1).integers(0, 7, 300)
    library = NaturalIdPartitioner(partition_by="group")
    library.dataset = datasets.Dataset.from_dict({"row": np.arange(300), "group": groups})
    parts = client_rows(NATURAL, np.zeros(300, dtype=np.int64), 7, 0, groups=groups)
    for client, rows in enumerate(parts):
        assert rows.tolist() == sorted(library.load_partition(client)["row"])


def test_natural_tells_the_right_population() -> None:
    groups = np.array([0, 1, 2, 0])
    with pytest.raises(SettingsError, match=r"set federation\.population=3"):
        client_rows(NATURAL, np.zeros(4, dtype=np.int64), 2, 0, groups=groups)


def test_natural_needs_a_dataset_with_groups() -> None:
    with pytest.raises(SettingsError, match="partition=natural: needs a dataset that tells"):
        client_rows(NATURAL, LABELS, 10, 0)


@pytest.mark.parametrize("values", [SHARDS, QUANTITY])
def test_ten_thousand_clients_are_split_quickly(values: dict[str, object]) -> None:
    start = time.monotonic()
    parts = client_rows(build(values), np.arange(60_000) % 10, 10_000, 0)
    assert time.monotonic() - start < 10
    assert sum(len(p) for p in parts) == 60_000


@pytest.mark.parametrize(
    ("values", "changes", "key"),
    [
        (SHARDS, {"shards_per_client": 0}, r"partition\.shards_per_client=0"),
        (QUANTITY, {"law": "linea"}, r"partition\.law=linea: .*did you mean linear"),
        (QUANTITY, {"alpha": 0.0}, r"partition\.alpha=0\.0"),
        (QUANTITY, {"min_size": -1}, r"partition\.min_size=-1"),
    ],
)
def test_impossible_values_are_refused_by_key(
    values: dict[str, object], changes: dict[str, object], key: str
) -> None:
    with pytest.raises(SettingsError, match=key):
        build(values, **changes)
