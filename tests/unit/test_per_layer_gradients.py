"""dp_sgd with a norm or noise for each layer: against a loop of one backward pass a row."""

import math

import numpy as np
import pytest
import torch
from statistical.exact_intervals import std_within
from test_training import (
    DP_SGD,
    build,
    job,
    rows_of,
    small_net,
    train,
    un_noised_sum,
)
from torch.nn.functional import cross_entropy

from fl_app.clipping import split_layers
from fl_app.errors import PrivacyError, SettingsError
from fl_app.layers import PER_LAYER, shares_of
from fl_app.models import layer_sizes
from fl_app.privacy import NoiseKind
from fl_app.rng import NoiseSource
from fl_app.stages import ClientPartition, InputSpec

LAYERS = 8
SIZES = layer_sizes(small_net())
WEIGHTS = tuple(float(w) for w in range(1, LAYERS + 1))
KINDS = pytest.mark.parametrize("noise", ["gaussian", "laplace"])
NORMS = pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "given"])


def order_of(noise: str) -> int:
    return 1 if noise == "laplace" else 2


def bounds(noise: str, weights: tuple[float, ...] | None, clipping_norm: float) -> list[float]:
    """C_l, from scratch: proportional to the weights, and of norm C together."""
    given = np.array(weights or [1.0] * LAYERS)
    return list(clipping_norm * given / np.linalg.norm(given, order_of(noise)))


def by_hand(partition: ClientPartition, noise: str, bounds_L: list[float]) -> np.ndarray:
    """The sum of gradients clipped layer by layer, one backward pass a row, in float64."""
    model, total = small_net().double(), np.zeros(sum(SIZES))
    for row in partition.rows:
        model.zero_grad()
        inputs = torch.from_numpy(partition.table.features[[row]]).double()
        cross_entropy(model(inputs), torch.tensor([partition.table.labels[row]])).backward()
        clipped = []
        for parameter, bound in zip(model.parameters(), bounds_L, strict=True):
            grad = parameter.grad.numpy().ravel()
            clipped.append(grad * min(1.0, bound / np.linalg.norm(grad, order_of(noise))))
        total += np.concatenate(clipped)
    return total


def test_the_small_net_has_the_layers_that_this_file_counts_on() -> None:
    assert len(SIZES) == LAYERS


@KINDS
@NORMS
@pytest.mark.parametrize("clipping_norm", [1e-2, 0.5, 3.0, 1e3])
def test_a_step_equals_the_hand_written_loop(
    noise: str, weights: tuple[float, ...] | None, clipping_norm: float
) -> None:
    partition = rows_of(12)
    got = un_noised_sum(
        partition, noise=noise, clipping=PER_LAYER, layer_norms=weights, clipping_norm=clipping_norm
    )
    expected = by_hand(partition, noise, bounds(noise, weights, clipping_norm))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=3e-6)


@KINDS
@NORMS
def test_by_brute_force_one_record_moves_each_layer_by_its_norm_and_all_by_c(
    noise: str, weights: tuple[float, ...] | None
) -> None:
    """Each of 8 rows left out in turn, one of them a thousand times too large."""
    values = {"noise": noise, "clipping": PER_LAYER, "layer_norms": weights, "clipping_norm": 0.5}
    partition, order = rows_of(8), order_of(noise)
    partition.table.features[5 + 3] *= 1e3
    complete, whole, flat = un_noised_sum(partition, **values), [], []
    for left_out in range(8):
        rest = ClientPartition(
            client=2, table=partition.table, rows=np.delete(partition.rows, left_out)
        )
        change = complete - un_noised_sum(rest, **values)
        whole.append(np.linalg.norm(change, order))
        for part, bound in zip(
            split_layers(change, SIZES), bounds(noise, weights, 0.5), strict=True
        ):
            assert np.linalg.norm(part, order) <= bound * (1 + 1e-5) + 1e-6
        one_norm = {"noise": noise, "clipping_norm": 0.5}
        flat.append(un_noised_sum(partition, **one_norm) - un_noised_sum(rest, **one_norm))
    assert max(whole) <= 0.5 * (1 + 2e-5)
    assert max(whole) > 0.45
    # Negative control: one norm for all does not bound the layers.
    last = max(np.linalg.norm(split_layers(f, SIZES)[4], order) for f in flat)
    assert last > bounds(noise, None, 0.5)[4] * 1.2


@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_s07_a_record_that_is_not_finite_in_some_layer_counts_as_zero_in_all(
    noise: str, bad: float
) -> None:
    values = {"noise": noise, "clipping": PER_LAYER}
    partition = rows_of(8)
    rest = ClientPartition(client=2, table=partition.table, rows=np.delete(partition.rows, 3))
    expected = un_noised_sum(rest, **values)
    partition.table.features[5 + 3] = bad
    np.testing.assert_allclose(un_noised_sum(partition, **values), expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 5])
def test_physical_batches_give_the_same_sum(size: int) -> None:
    whole, parts = (
        un_noised_sum(rows_of(12), clipping=PER_LAYER, physical_batch_size=s) for s in (None, size)
    )
    np.testing.assert_allclose(parts, whole, atol=1e-5)


@KINDS
@pytest.mark.parametrize("clipping", ["flat", PER_LAYER])
def test_noise_is_the_jobs_source_scaled_layer_by_layer(noise: str, clipping: str) -> None:
    training = build(DP_SGD, batch_rate=0.2, noise=noise, clipping=clipping, layer_noise=WEIGHTS)
    update = train(training, rows_of(0), job(z=1.5))
    shares = shares_of(NoiseKind(noise), LAYERS, clipping, None, WEIGHTS).noises or ()
    source = NoiseSource.seeded_from(0, "noise")
    drawn = (source.laplace if noise == "laplace" else source.gaussian)(sum(SIZES))
    for got, unit, share in zip(
        split_layers(update.delta_P, SIZES), split_layers(drawn, SIZES), shares, strict=True
    ):
        np.testing.assert_allclose(got, -1.5 * 0.5 * share / (0.2 * 10) * unit, atol=2e-5)


def test_noise_of_the_large_layer_has_its_own_std() -> None:
    """n = 1,152 a call, 20 calls (3 % accepted); a false alarm is 1e-6 a check."""
    training = build(DP_SGD, layer_noise=WEIGHTS)
    parts = []
    for seed in range(20):
        update = train(training, rows_of(0), job(z=40.0, seed=seed))
        parts.append(split_layers(update.delta_P, SIZES)[4])
    noise, std = np.concatenate(parts), 40.0 * 0.5 * 5.0 / 10
    assert std_within(noise, std)
    assert not std_within(noise * 1.1, std)


def test_lists_that_do_not_fit_the_model_are_refused_before_training_and_in_it() -> None:
    spec = InputSpec(shape=(1, 6, 6), num_classes=3)
    for values in (
        {"layer_noise": (1.0, 2.0)},
        {"clipping": PER_LAYER, "layer_norms": (1.0, 2.0)},
    ):
        training = build(DP_SGD, **values)
        with pytest.raises(SettingsError, match="each of the model's 8 parameter tensors"):
            training.check_model(small_net(), spec)
        with pytest.raises(PrivacyError, match="every list must have 8 numbers"):
            train(training, rows_of(4), job(z=1.0))
    build(DP_SGD, clipping=PER_LAYER, layer_norms=WEIGHTS).check_model(small_net(), spec)


def test_the_event_is_that_of_one_norm_and_one_noise() -> None:
    layered = build(DP_SGD, clipping=PER_LAYER, layer_norms=WEIGHTS, layer_noise=WEIGHTS)
    assert layered.event(1.3) == build(DP_SGD).event(1.3)
