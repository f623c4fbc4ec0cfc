"""protection=none: sums at the node and at the server."""

import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_app import plugins
from fl_app.errors import ProtocolError
from fl_app.stages import PrivatizedUpdate, ProtectedUpdate

PROTECTION = plugins.build("protection", {"kind": "none"})


def private(client: int, vector: object, weight: float = 1.0) -> PrivatizedUpdate:
    return PrivatizedUpdate(client=client, vector_P=np.asarray(vector, np.float32), weight=weight)


def sent(clients: tuple[int, ...], vector: object, round: int = 1) -> ProtectedUpdate:
    return ProtectedUpdate(
        round=round,
        clients=clients,
        vector_P=np.asarray(vector, np.float32),
        weight=float(len(clients)),
    )


def test_nothing_is_hidden_from_the_server() -> None:
    assert PROTECTION.hides_from_server is False


def test_a_node_sends_the_weighted_sum_and_who_is_in_it() -> None:
    node = PROTECTION.protect([private(3, [1, 2]), private(7, [10, 20], weight=3.0)], 5)
    assert (node.round, node.clients, node.weight) == (5, (3, 7), 4.0)
    assert node.vector_P.tolist() == [31.0, 62.0]
    assert node.vector_P.dtype == np.float64
    assert PROTECTION.protect([private(3, [1, 2])], 5).vector_P.dtype == np.float32


def test_changing_one_of_many_clients_moves_the_sum_by_no_more_than_its_change() -> None:
    """In float32 the rounding of a large sum would add to it."""
    stream = np.random.default_rng(0)
    others = [private(i, stream.random(200).tolist()) for i in range(2000)]
    size = np.linalg.norm(np.full(200, float(np.float32(1.03e-3))))
    with_one = PROTECTION.protect([*others, private(2000, [1.03e-3] * 200)], 1).vector_P
    without = PROTECTION.protect([*others, private(2000, [0.0] * 200)], 1).vector_P
    assert np.linalg.norm(with_one - without) <= size * (1 + 1e-9)
    rounded = with_one.astype(np.float32) - without.astype(np.float32)
    assert np.linalg.norm(rounded) > size * (1 + 1e-4)  # the negative control: float32 sums


def test_sums_are_made_in_float64() -> None:
    # In float32 the small summands would vanish beside 1e8.
    updates = [private(0, [1e8]), *(private(i, [1.0]) for i in range(1, 101)), private(101, [-1e8])]
    assert PROTECTION.protect(updates, 1).vector_P.tolist() == [100.0]
    combined = PROTECTION.combine([sent((i,), u.vector_P) for i, u in enumerate(updates)], 1, 1)
    assert combined.sum_P.tolist() == [100.0]


def test_a_node_holds_no_more_than_a_few_updates_at_a_time() -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0

    def train() -> Iterator[PrivatizedUpdate]:
        nonlocal most
        for client in range(20):
            update = private(client, [1.0, 2.0])
            alive.append(weakref.ref(update.vector_P))
            yield update
            del update
            most = max(most, sum(vector() is not None for vector in alive))

    node = PROTECTION.protect(train(), 1)
    assert node.clients == tuple(range(20))
    assert node.vector_P.tolist() == [20.0, 40.0]
    assert most <= 3


def test_protecting_leaves_the_updates_alone() -> None:
    update = private(0, [1.0, 2.0])
    PROTECTION.protect([update, private(1, [5.0, 5.0])], 1)
    assert update.vector_P.tolist() == [1.0, 2.0]


def test_the_server_sums_all_arrivals() -> None:
    total = PROTECTION.combine([sent((0, 2), [1, 2]), sent((1,), [3, 4])], 2, 1)
    assert total.sum_P.tolist() == [4.0, 6.0]
    assert total.sum_P.dtype == np.float64
    assert (total.round, total.weight, total.num_answered) == (1, 3.0, 3)


def test_nobody_answering_gives_zero() -> None:
    total = PROTECTION.combine([], 4, 2)
    assert total.sum_P.tolist() == [0.0] * 4
    assert (total.weight, total.num_answered) == (0.0, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_s07_a_non_finite_arrival_is_dropped_and_named(bad: float) -> None:
    arrivals = [sent((0,), [1, 1]), sent((4, 9), [0, bad]), sent((1,), [2, 2])]
    total = PROTECTION.combine(arrivals, 2, 1)
    assert total.sum_P.tolist() == [3.0, 3.0]
    assert (total.weight, total.num_answered, total.dropped) == (2.0, 2, (4, 9))


def test_s07_infinities_that_cancel_and_the_last_of_many_numbers_are_found() -> None:
    arrivals = []
    for client, bad in enumerate([0.0, np.inf, -np.inf, np.nan]):
        vector_P = np.ones(100_001, np.float32)
        vector_P[-1] = bad
        arrivals.append(sent((client,), vector_P))
    total = PROTECTION.combine(arrivals, 100_001, 1)
    assert total.dropped == (1, 2, 3)
    np.testing.assert_array_equal(total.sum_P, np.append(np.ones(100_000), 0.0))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_sum_is_made_in_the_order_of_the_updates_by_any_number_of_threads(
    num_threads: int,
) -> None:
    stream = np.random.default_rng(0)
    vectors = [stream.standard_normal(150_001, dtype=np.float32) * 10**i for i in range(5)]
    one_by_one = np.zeros(150_001)
    for vector_P in vectors:
        one_by_one += vector_P
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        arrivals = [sent((i,), v) for i, v in enumerate(vectors)]
        total = PROTECTION.combine(arrivals, 150_001, 1)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(total.sum_P, one_by_one)
    assert total.dropped == ()


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_an_impossible_weight_is_dropped(weight: float) -> None:
    total = PROTECTION.combine([replace(sent((0,), [1.0]), weight=weight)], 1, 1)
    assert (total.sum_P.tolist(), total.weight, total.num_answered) == ([0.0], 0.0, 0)
    assert total.dropped == (0,)


def test_a_sum_beyond_float32_counts_in_full() -> None:
    node = PROTECTION.protect([private(i, [3e38]) for i in range(2)], 1)
    total = PROTECTION.combine([node], 1, 1)
    assert (total.num_answered, total.sum_P[0]) == (2, 2 * float(np.float32(3e38)))


def test_s37_another_rounds_update_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"update\.round=1: round 2"):
        PROTECTION.combine([sent((0,), [1.0], round=1)], 1, 2)


def test_another_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"shape=\(3,\)"):
        PROTECTION.combine([sent((0,), [1.0] * 3)], 2, 1)
    with pytest.raises(ProtocolError, match=r"shape=\(1,\)"):
        PROTECTION.protect([private(0, [1.0, 1.0]), private(1, [1.0])], 1)


def test_a_node_without_updates_sends_nothing() -> None:
    with pytest.raises(ProtocolError, match="at least one"):
        PROTECTION.protect([], 1)
