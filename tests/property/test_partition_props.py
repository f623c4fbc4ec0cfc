"""Every split covers every row exactly once, whatever the labels, population and seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_app import plugins

LABELS = st.lists(st.integers(0, 9), min_size=1, max_size=200).map(np.array)


def check_cover(partitioner: plugins.Partitioner, labels: np.ndarray, share: float) -> None:
    population = max(1, round(share * len(labels)))
    parts = partitioner.split(labels, population, 7)
    assert len(parts) == population
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@settings(max_examples=60, deadline=None)
@given(LABELS, st.floats(0, 1))
def test_iid_covers_every_row_once_in_nearly_equal_shares(labels: np.ndarray, share: float) -> None:
    partitioner = plugins.build("partition", {"kind": "iid"})
    check_cover(partitioner, labels, share)
    sizes = [len(p) for p in partitioner.split(labels, max(1, round(share * len(labels))), 7)]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(LABELS, st.floats(0, 1), st.floats(0.01, 100))
def test_dirichlet_covers_every_row_once(labels: np.ndarray, share: float, alpha: float) -> None:
    values = {"kind": "dirichlet", "alpha": alpha, "min_size": 0}
    check_cover(plugins.build("partition", values), labels, share)


@settings(max_examples=60, deadline=None)
@given(LABELS, st.floats(0, 1), st.integers(1, 4))
def test_shards_cover_every_row_once(labels: np.ndarray, share: float, most: int) -> None:
    shards = min(most, len(labels))
    population = max(1, int(share * (len(labels) // shards)))
    plugin = plugins.build("partition", {"kind": "shards", "shards_per_client": shards})
    parts = plugin.split(labels, population, 7)
    assert len(parts) == population
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@settings(max_examples=60, deadline=None)
@given(
    LABELS,
    st.floats(0, 1),
    st.sampled_from(["dirichlet", "linear", "square", "exponential"]),
    st.floats(1e-3, 100),
    st.booleans(),
)
def test_quantity_covers_every_row_once_and_keeps_its_smallest_size(
    labels: np.ndarray, share: float, law: str, alpha: float, one: bool
) -> None:
    values = {"kind": "quantity", "law": law, "alpha": alpha, "min_size": int(one)}
    plugin = plugins.build("partition", values)
    check_cover(plugin, labels, share)
    parts = plugin.split(labels, max(1, round(share * len(labels))), 7)
    assert min(len(p) for p in parts) >= int(one)


@settings(max_examples=60, deadline=None)
@given(LABELS)
def test_natural_covers_every_row_once_with_one_group_each(groups: np.ndarray) -> None:
    parts = plugins.build("partition", {"kind": "natural"}).split(groups, len(set(groups)), 7)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(groups)))
    assert [set(groups[p]) for p in parts] == [{g} for g in sorted(set(groups))]
