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
