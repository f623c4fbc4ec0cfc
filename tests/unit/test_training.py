"""Local training: DP-SGD against a hand-written loop, plain SGD, and evaluation."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import plugins
from fl_app.errors import DataError, ModelError, PrivacyError, SettingsError
from fl_app.models import flat_parameters, set_flat_parameters
from fl_app.plugins import Training, TrainingJob, Transform
from fl_app.privacy import NeighboringRelation, NoiseKind, PrivacyUnit, Sampling, View
from fl_app.rng import NoiseSource, stream
from fl_app.stages import ClientPartition, LocalUpdate, Table
from fl_app.training._batches import layout_of
from fl_app.training.evaluate import evaluate

CPU = torch.device("cpu")
DP_SGD = {
    "kind": "dp_sgd",
    "local_steps": 1,
    "batch_rate": 1.0,
    "learning_rate": 1.0,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "noise": "gaussian",
    "clipping_norm": 0.5,
    "noise_multiplier": None,
    "nominal_rows": None,
    "physical_batch_size": None,
}
SGD = {
    "kind": "sgd",
    "local_epochs": 1,
    "local_steps": None,
    "batch_size": 4,
    "learning_rate": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
}


@dataclass(frozen=True)
class Plain(Transform):
    """Passes features on and keeps what was asked for."""

    seen: list[np.ndarray] = field(default_factory=list)

    def __call__(self, stored: np.ndarray) -> torch.Tensor:
        self.seen.append(stored)
        return torch.from_numpy(np.array(stored, np.float32))


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def rows_of(num_rows: int, seed: int = 0) -> ClientPartition:
    random = np.random.default_rng(seed)
    features = random.normal(size=(num_rows + 5, 1, 6, 6)).astype(np.float32)
    table = Table(features=features, labels=random.integers(0, 3, num_rows + 5), transform=Plain())
    return ClientPartition(client=2, table=table, rows=np.arange(num_rows) + 5)


def job(z: float | None = 0.0, nominal_rows: int = 10, seed: int = 0) -> TrainingJob:
    return TrainingJob(
        noise_multiplier=z,
        nominal_rows=nominal_rows,
        batches=stream(seed, "batches"),
        noise=NoiseSource.seeded_from(seed, "noise"),
        device=CPU,
    )


def build(base: dict[str, object], **values: object) -> Training:
    training: Training = plugins.build("training", base | values)
    return training


def train(
    training: Training,
    partition: ClientPartition,
    a_job: TrainingJob,
    make: Callable[[], nn.Module] = small_net,
) -> LocalUpdate:
    return training.train(make(), partition, a_job)


def hand_written_sum(
    partition: ClientPartition, clipping_norm: float, order: int = 2
) -> np.ndarray:
    """Returns the sum of clipped gradients at the start, one backward pass a row."""
    model, total = small_net(), 0.0
    for row in partition.rows:
        model.zero_grad()
        inputs = torch.from_numpy(partition.table.features[[row]])
        cross_entropy(model(inputs), torch.tensor([partition.table.labels[row]])).backward()
        gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
        norm = np.linalg.norm(gradient.astype(np.float64), order)
        total = total + gradient * min(1.0, clipping_norm / norm)
    return np.asarray(total)


def un_noised_sum(partition: ClientPartition, *, seed: int = 0, **values: object) -> np.ndarray:
    """Returns what one step of dp_sgd sums, with z = 0, learning rate 1 and denominator 10."""
    training = build(DP_SGD, **values)
    rate = training.batch_rate  # type: ignore[attr-defined]
    return -train(training, partition, job(seed=seed)).delta_P.astype(np.float64) * rate * 10


# --- DP-SGD: one step


@pytest.mark.parametrize("clipping_norm", [1e-3, 0.5, 1.5, 1e3])
def test_a_step_equals_the_hand_written_per_sample_loop(clipping_norm: float) -> None:
    partition = rows_of(12)
    got = un_noised_sum(partition, clipping_norm=clipping_norm)
    expected = hand_written_sum(partition, clipping_norm)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=3e-6)


def test_the_denominator_is_public_whatever_the_client_holds() -> None:
    partition = rows_of(6)
    small = train(build(DP_SGD), partition, job(nominal_rows=10)).delta_P
    large = train(build(DP_SGD), partition, job(nominal_rows=1000)).delta_P
    np.testing.assert_allclose(small, large * 100, atol=1e-4)
    assert np.linalg.norm(small) > 0.01


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_physical_batches_give_the_same_update(size: int) -> None:
    partition, steps = rows_of(12), {"local_steps": 3, "batch_rate": 0.7}
    whole = train(build(DP_SGD, **steps), partition, job(z=1.0))
    parts = train(build(DP_SGD, **steps, physical_batch_size=size), partition, job(z=1.0))
    np.testing.assert_allclose(parts.delta_P, whole.delta_P, atol=1e-5)
    assert parts.num_noisy_steps == whole.num_noisy_steps == 3


def test_no_more_rows_than_the_physical_batch_are_computed_at_a_time() -> None:
    partition = rows_of(12)
    train(build(DP_SGD, physical_batch_size=5), partition, job())
    assert [len(s) for s in partition.table.transform.seen] == [5, 5, 2]  # type: ignore[attr-defined]


def test_one_record_moves_the_un_noised_sum_by_at_most_the_clipping_norm() -> None:
    partition = rows_of(8)
    partition.table.features[5 + 3] *= 1e4
    complete, moved = un_noised_sum(partition), []
    for left_out in range(8):
        rows = np.delete(partition.rows, left_out)
        rest = ClientPartition(client=2, table=partition.table, rows=rows)
        moved.append(np.linalg.norm(complete - un_noised_sum(rest)))
    assert max(moved) <= 0.5 * (1 + 1e-5)
    # A test that clips everything away would pass the line above: the bound must be reached too.
    assert max(moved) > 0.49


def test_one_record_more_moves_the_sum_of_a_poisson_batch_by_at_most_the_clipping_norm() -> None:
    moved = []
    for seed in range(12):
        full = rows_of(9, seed)
        # Membership is drawn row by row: without the last row the others are drawn alike.
        rest = ClientPartition(client=2, table=full.table, rows=full.rows[:-1])
        sums = [un_noised_sum(p, seed=seed, batch_rate=0.5) for p in (full, rest)]
        moved.append(np.linalg.norm(sums[0] - sums[1]))
    assert max(moved) <= 0.5 * (1 + 1e-5)
    assert max(moved) > 0.4
    assert min(moved) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_s07_a_record_with_a_non_finite_gradient_counts_as_zero(bad: float) -> None:
    partition = rows_of(8)
    rest = ClientPartition(client=2, table=partition.table, rows=np.delete(partition.rows, 3))
    expected = un_noised_sum(rest)
    partition.table.features[5 + 3] = bad
    broken = un_noised_sum(partition)
    assert np.isfinite(broken).all()
    np.testing.assert_allclose(broken, expected, atol=1e-6)


def test_learning_rate_scales_noise_and_gradient_alike() -> None:
    one = train(build(DP_SGD), rows_of(6), job(z=1.0)).delta_P
    tenth = train(build(DP_SGD, learning_rate=0.1), rows_of(6), job(z=1.0)).delta_P
    np.testing.assert_allclose(tenth, one / 10, atol=1e-6)


@pytest.mark.parametrize("clipping_norm", [1e-2, 3.0, 1e4])
def test_a_laplace_step_clips_the_l1_norm_of_each_row(clipping_norm: float) -> None:
    partition = rows_of(12)
    got = un_noised_sum(partition, clipping_norm=clipping_norm, noise="laplace")
    expected = hand_written_sum(partition, clipping_norm, order=1)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=3e-6)


def test_one_record_moves_the_un_noised_sum_by_at_most_the_clipping_norm_in_l1() -> None:
    """By brute force: each of 8 rows left out in turn, one of them a thousand times too large."""
    values = {"noise": "laplace", "clipping_norm": 3.0}
    partition = rows_of(8)
    partition.table.features[5 + 3] *= 1e3
    complete, moved, moved_l2_clipped = un_noised_sum(partition, **values), [], []
    for left_out in range(8):
        rows = np.delete(partition.rows, left_out)
        rest = ClientPartition(client=2, table=partition.table, rows=rows)
        moved.append(np.abs(complete - un_noised_sum(rest, **values)).sum())
        l2 = {"clipping_norm": 3.0}
        difference = un_noised_sum(partition, **l2) - un_noised_sum(rest, **l2)
        moved_l2_clipped.append(np.abs(difference).sum())
    assert max(moved) <= 3.0 * (1 + 1e-5)
    assert max(moved) > 2.99
    assert max(moved_l2_clipped) > 6.0  # negative control: L2 clipping does not bound L1


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_s07_a_non_finite_gradient_counts_as_zero_under_laplace_too(bad: float) -> None:
    partition = rows_of(8)
    rest = ClientPartition(client=2, table=partition.table, rows=np.delete(partition.rows, 3))
    expected = un_noised_sum(rest, noise="laplace")
    partition.table.features[5 + 3] = bad
    np.testing.assert_allclose(un_noised_sum(partition, noise="laplace"), expected, atol=1e-6)


# --- DP-SGD: noise and its generator


def test_laplace_noise_is_the_jobs_source_scaled_by_z_c_over_the_denominator() -> None:
    training = build(DP_SGD, batch_rate=0.2, noise="laplace")
    update = train(training, rows_of(0), job(z=1.5))
    noise = NoiseSource.seeded_from(0, "noise").laplace(len(update.delta_P))
    np.testing.assert_allclose(update.delta_P, -1.5 * 0.5 / (0.2 * 10) * noise, atol=1e-6)


def test_the_event_says_which_noise_it_is() -> None:
    for noise, rate in (("gaussian", 0.2), ("laplace", 0.2), ("laplace", 1.0)):
        event = build(DP_SGD, noise=noise, batch_rate=rate).event(3.0)
        assert event is not None
        assert event.noise == noise
        assert event.noise_multiplier == 3.0
        assert event.sampling is (Sampling.POISSON if rate < 1 else Sampling.NONE)
    with pytest.raises(SettingsError, match=r"training\.noise=laplce: .*did you mean laplace"):
        build(DP_SGD, noise="laplce")


def test_noise_is_the_jobs_source_scaled_by_z_c_over_the_denominator() -> None:
    update = train(build(DP_SGD, batch_rate=0.2), rows_of(0), job(z=1.5))
    noise = NoiseSource.seeded_from(0, "noise").gaussian(len(update.delta_P))
    np.testing.assert_allclose(update.delta_P, -1.5 * 0.5 / (0.2 * 10) * noise, atol=1e-6)


def test_s12_torchs_seed_does_not_fix_the_noise() -> None:
    deltas = []
    for _ in range(2):
        model = small_net()
        torch.manual_seed(0)
        a_job = TrainingJob(
            noise_multiplier=1.0,
            nominal_rows=10,
            batches=stream(0, "batches"),
            noise=NoiseSource.from_os(),
            device=CPU,
        )
        deltas.append(build(DP_SGD).train(model, rows_of(5), a_job).delta_P)
    assert (deltas[0] != deltas[1]).mean() > 0.99


def dropout_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Dropout(0.5), nn.Linear(20, 3))


@pytest.mark.parametrize("base", [DP_SGD, SGD])
def test_training_repeats_and_leaves_torchs_generator_alone(base: dict[str, object]) -> None:
    deltas = []
    for disturbance in range(2):
        model = dropout_net()
        torch.manual_seed(disturbance)
        before = torch.random.get_rng_state()
        deltas.append(build(base).train(model, rows_of(9), job(z=1.0)).delta_P)
        assert torch.equal(torch.random.get_rng_state(), before)
    assert deltas[0].tobytes() == deltas[1].tobytes()
    other = build(base).train(dropout_net(), rows_of(9), job(z=1.0, seed=1)).delta_P
    assert (other != deltas[0]).any()


# --- DP-SGD: steps that are counted


def test_s13_every_step_is_noised_and_counted_empty_batches_too() -> None:
    training = build(DP_SGD, local_steps=40, batch_rate=1 / 40)
    empty_steps = 0
    for seed in range(50):
        partition = rows_of(40)
        update = train(training, partition, job(z=1.0, nominal_rows=40, seed=seed))
        assert update.num_noisy_steps == 40
        empty_steps += 40 - len(partition.table.transform.seen)  # type: ignore[attr-defined]
    # (1 - 1/40)**40 = 36 % of 2000 batches are empty.
    assert 600 < empty_steps < 860


def test_s06_a_client_without_rows_sends_noise_and_counts_all_steps() -> None:
    update = train(build(DP_SGD, local_steps=3), rows_of(0), job(z=1.0))
    assert update.num_noisy_steps == 3
    assert (update.delta_P != 0).all()


def test_s17_without_noise_an_empty_client_does_not_move() -> None:
    update = train(build(DP_SGD, local_steps=3), rows_of(0), job(z=0.0))
    assert not update.delta_P.any()


def test_a_step_without_noise_stops_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_app.training._opacus import NoisySGD

    honest = NoisySGD.add_noise

    def skips_one(self: NoisySGD) -> None:
        honest(self)
        self.num_noisy_steps = min(self.num_noisy_steps, 1)

    monkeypatch.setattr(NoisySGD, "add_noise", skips_one)
    with pytest.raises(PrivacyError, match=r"training\.local_steps=3: 1 steps"):
        train(build(DP_SGD, local_steps=3), rows_of(4), job(z=1.0))


@pytest.mark.parametrize(("z", "nominal"), [(None, 10), (1.0, 0)])
def test_a_job_without_z_or_nominal_rows_is_refused(z: float | None, nominal: int) -> None:
    with pytest.raises(PrivacyError, match="job"):
        train(build(DP_SGD), rows_of(3), job(z, nominal))


# --- DP-SGD: what is left behind


def test_s30_one_model_object_trains_three_rounds_and_stays_plain() -> None:
    model, plain = small_net(), small_net()
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    for number in range(3):
        start_P = flat_parameters(model)
        update = build(DP_SGD, local_steps=2).train(
            model, rows_of(7, number), job(1.0, seed=number)
        )
        np.testing.assert_array_equal(update.delta_P, flat_parameters(model) - start_P)
        set_flat_parameters(model, start_P)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks
    for parameter in model.parameters():
        assert parameter.grad is None
        assert not vars(parameter)


def test_a_failing_forward_leaves_the_model_usable() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.fail = small_net(), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.net(x)
            if self.fail:
                raise RuntimeError("stop")
            return scores

    model = Fails()
    with pytest.raises(RuntimeError, match="stop"):
        build(DP_SGD).train(model, rows_of(4), job())
    model.fail = False
    expected = train(build(DP_SGD), rows_of(4), job()).delta_P
    np.testing.assert_array_equal(build(DP_SGD).train(model, rows_of(4), job()).delta_P, expected)


class Tied(nn.Module):
    """A layer used twice, a layer never used and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.twice, self.last = nn.Linear(36, 36), nn.Linear(36, 3)
        self.unused, self.frozen = nn.Linear(4, 5), nn.Linear(36, 36)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.frozen(x.flatten(1)))
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


def test_s31_unused_shared_and_frozen_layers_train() -> None:
    update = train(build(DP_SGD), rows_of(6), job(z=0.0), Tied)
    assert len(update.delta_P) == 36 * 37 + 37 * 3 + 25
    assert update.delta_P[: 36 * 37].any()
    assert not update.delta_P[-25:].any()
    noised = train(build(DP_SGD), rows_of(6), job(z=1.0), Tied)
    assert (noised.delta_P[-25:] != 0).all()


def test_a_layer_that_mixes_records_is_refused() -> None:
    def mixing() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 3))

    with pytest.raises(ModelError, match="cannot be trained"):
        train(build(DP_SGD), rows_of(6), job(), mixing)


# --- DP-SGD: event and settings


def test_the_event_is_the_steps_of_one_call() -> None:
    event = build(DP_SGD, local_steps=4, batch_rate=0.2).event(1.406)
    assert event is not None
    assert (event.unit, event.view) == (PrivacyUnit.RECORD, View.SERVER)
    assert event.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    assert (event.noise, event.noise_multiplier) == (NoiseKind.GAUSSIAN, 1.406)
    assert (event.sampling, event.sampling_rate, event.steps) == (Sampling.POISSON, 0.2, 4)


def test_full_batches_take_no_credit_for_sampling() -> None:
    event = build(DP_SGD, local_steps=2).event(1.0)
    assert event is not None
    assert (event.sampling, event.sampling_rate, event.steps) == (Sampling.NONE, 1.0, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("local_steps", 0),
        ("batch_rate", 0.0),
        ("batch_rate", 1.5),
        ("batch_rate", math.nan),
        ("clipping_norm", 0.0),
        ("clipping_norm", math.inf),
        ("noise_multiplier", -1.0),
        ("learning_rate", -0.1),
        ("nominal_rows", 0),
        ("physical_batch_size", 0),
    ],
)
def test_s08_impossible_dp_sgd_values_are_refused(key: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f"training.{key}={value}"):
        build(DP_SGD, **{key: value})


# --- learning rates that decay


@pytest.mark.parametrize("base", [DP_SGD, SGD], ids=["dp_sgd", "sgd"])
def test_the_learning_rate_decays_with_the_round(base: dict[str, object]) -> None:
    one_step = base | {"local_epochs": None, "local_steps": 1} if base is SGD else base
    deltas = {}
    for number in (1, 2, 5):
        a_job = dataclasses.replace(job(), round=number)
        deltas[number] = train(build(one_step, learning_rate_decay=0.9), rows_of(4), a_job).delta_P
    constant = train(build(one_step), rows_of(4), dataclasses.replace(job(), round=5)).delta_P
    np.testing.assert_array_equal(deltas[1], constant)
    np.testing.assert_allclose(deltas[2], constant * 0.9, atol=2e-7)
    np.testing.assert_allclose(deltas[5], constant * 0.9**4, atol=2e-7)


@pytest.mark.parametrize("decay", [0.0, 1.1, math.nan])
@pytest.mark.parametrize("base", [DP_SGD, SGD], ids=["dp_sgd", "sgd"])
def test_a_decay_outside_zero_to_one_is_refused(base: dict[str, object], decay: float) -> None:
    with pytest.raises(SettingsError, match=f"training.learning_rate_decay={decay}"):
        build(base, learning_rate_decay=decay)


# --- plain SGD


@pytest.mark.parametrize(
    ("epochs", "steps", "sizes"),
    [(1, None, [4, 4, 2]), (2, None, [4, 4, 2] * 2), (None, 5, [4, 4, 2, 4, 4]), (None, 1, [4])],
)
def test_sgd_visits_shuffled_batches_and_keeps_the_last(
    epochs: int | None, steps: int | None, sizes: list[int]
) -> None:
    partition = rows_of(10)
    train(build(SGD, local_epochs=epochs, local_steps=steps), partition, job(None))
    seen = partition.table.transform.seen  # type: ignore[attr-defined]
    assert [len(batch) for batch in seen] == sizes
    if epochs:
        first_pass = np.sort(np.concatenate(seen[:3]).ravel())
        np.testing.assert_array_equal(first_pass, np.sort(partition.table.features[5:15].ravel()))


def test_sgd_with_one_batch_is_a_step_along_the_mean_gradient() -> None:
    partition = rows_of(6)
    update = train(build(SGD, batch_size=6), partition, job(None))
    expected = -0.1 * hand_written_sum(partition, 1e9) / 6
    np.testing.assert_allclose(update.delta_P, expected, atol=1e-6)
    assert (update.client, update.num_examples, update.num_noisy_steps) == (2, 6, 0)


def test_s06_sgd_without_rows_gives_a_zero_update() -> None:
    update = train(
        build(SGD, local_epochs=None, local_steps=3, weight_decay=0.1), rows_of(0), job(None)
    )
    assert not update.delta_P.any()


def optimizer_loop(
    training: Training,
    partition: ClientPartition,
    a_job: TrainingJob,
    make: Callable[[], nn.Module],
) -> np.ndarray:
    """Returns local minus global of two passes with `torch.optim.SGD`, on the batches of `job`."""
    model = make()
    before_P = flat_parameters(model)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        lr=0.1 * 0.5 ** (a_job.round - 1),
        momentum=training.momentum,  # type: ignore[attr-defined]
        weight_decay=training.weight_decay,  # type: ignore[attr-defined]
    )
    a_job.batches.integers(2**63)  # dropout's seed
    for _ in range(2):
        order = a_job.batches.permutation(partition.rows)
        for rows in np.split(order, range(4, len(order), 4)):
            optimizer.zero_grad()
            inputs = torch.from_numpy(partition.table.features[rows])
            cross_entropy(model(inputs), torch.from_numpy(partition.table.labels[rows])).backward()
            optimizer.step()
    return np.asarray(flat_parameters(model) - before_P)


def linear_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def tied_net() -> nn.Module:
    torch.manual_seed(1)
    return Tied()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("num_rows", [10, 3])
@pytest.mark.parametrize("make", [linear_net, small_net, tied_net])
def test_sgd_takes_the_steps_of_torch_s_optimizer(
    make: Callable[[], nn.Module], num_rows: int, weight_decay: float, momentum: float
) -> None:
    training = build(
        SGD,
        local_epochs=2,
        momentum=momentum,
        weight_decay=weight_decay,
        learning_rate_decay=0.5,
    )
    partition = rows_of(num_rows)
    jobs = [dataclasses.replace(job(None), round=2) for _ in range(2)]
    expected_P = optimizer_loop(training, partition, jobs[0], make)
    got_P = train(training, partition, jobs[1], make).delta_P
    assert np.linalg.norm(got_P - expected_P) <= 1e-5 * np.linalg.norm(expected_P)


def test_a_step_of_sgd_leaves_no_gradient_behind() -> None:
    model = small_net()
    build(SGD, momentum=0.9).train(model, rows_of(6), job(None))
    assert all(p.grad is None for p in model.parameters())


def test_sgd_is_not_private() -> None:
    assert build(SGD).event(1.0) is None
    assert (build(SGD).private, build(DP_SGD).private) == (False, True)


@pytest.mark.parametrize("both", [(None, None), (1, 1)])
def test_exactly_one_of_epochs_and_steps_is_given(both: tuple[int | None, int | None]) -> None:
    with pytest.raises(SettingsError, match="exactly one"):
        build(SGD, local_epochs=both[0], local_steps=both[1])


# --- evaluation


def known_scores() -> nn.Module:
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    return nn.Sequential(model, nn.Dropout(0.9))


@pytest.mark.parametrize("batch_size", [1, 3, 1024])
def test_evaluation_gives_accuracy_and_mean_loss_of_known_scores(batch_size: int) -> None:
    features = np.float32([[2, 0, 0], [0, 1, 0], [0, 0, 3], [1, 0, 0]])
    table = Table(features=features, labels=np.array([0, 1, 2, 2]), transform=Plain())
    got = evaluate(known_scores(), table, CPU, batch_size)
    losses = [math.log(math.e**s + 2) - hit for s, hit in [(2, 2), (1, 1), (3, 3), (1, 0)]]
    assert got["accuracy"] == 0.75
    assert got["loss"] == pytest.approx(sum(losses) / 4, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_restores_the_training_mode(training: bool) -> None:
    model = known_scores().train(training)
    table = Table(features=np.eye(3, dtype=np.float32), labels=np.arange(3), transform=Plain())
    evaluate(model, table, CPU)
    assert model.training is training


def test_evaluation_without_rows_is_refused() -> None:
    table = Table(features=np.zeros((0, 3)), labels=np.zeros(0, np.int64), transform=Plain())
    with pytest.raises(DataError, match="test rows=0"):
        evaluate(known_scores(), table, CPU)


def test_images_are_laid_out_with_channels_innermost_and_train_the_same() -> None:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten())
    images = torch.randn(5, 1, 8, 8)
    laid = layout_of(convolution)(images)
    assert torch.equal(laid, images)
    assert convolution[0](laid).is_contiguous(memory_format=torch.channels_last)
    grads = []
    for inputs in (images, laid):
        convolution.zero_grad()
        convolution(inputs).square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in convolution.parameters()]))
    assert (grads[0] - grads[1]).norm() <= 1e-5 * grads[0].norm()


def test_tables_and_images_before_a_group_normalization_stay_as_they_are() -> None:
    normalized = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))
    for inputs, model in (
        (torch.zeros(5, 7), nn.Linear(7, 2)),
        (torch.zeros(1, 1, 8, 8), normalized),
    ):
        assert layout_of(model)(inputs) is inputs
