"""Rules 2 and 6: how far one client or record moves the un-noised release, by brute force.

Every combination of a mechanism (or a private training) and a server optimizer goes through the
whole server side at z = 0, over hostile cohorts, a round each. One client or record is taken out,
made zero or replaced, and the largest move of the released sum is compared with what the ledger's
event states. A new plug-in fails here until its line is in the tables.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from harness import UNLIMITED, Delta, Federation, composed, federation
from torch import nn
from unit.test_training import Plain

from fl_app import rng
from fl_app.mechanisms import _rotation
from fl_app.plugins import Mechanism, Training, TrainingJob, kinds, load
from fl_app.privacy import NoiseKind, PrivacyEvent
from fl_app.rng import NoiseSource
from fl_app.stages import ClientPartition, CohortSum, Release, RoundOrder, Table
from fl_app.wire import TrainRequest

C, P, CLIENTS, SCALE = 0.7, 64, 3, 30
"""P is a power of two: an integer mechanism pads nothing, so its whole sum can be had back."""
EXACT, FLOAT32 = 1 + 1e-9, 1 + 2e-5
NEAR = 0.95
"""Clipping everything away would pass too: this share of the bound must be reached."""

FLAT_AND_LAYERS = ([], ["mechanism.clipping=per_layer", "mechanism.layer_sizes=[16,16,32]"])
INTEGERS = ([f"mechanism.scale={SCALE}", "mechanism.min_survivors=2"],)
VARIANTS: Mapping[str, Sequence[list[str]]] = {
    "central_gaussian": FLAT_AND_LAYERS,
    "central_laplace": FLAT_AND_LAYERS,
    "local_gaussian": FLAT_AND_LAYERS,
    "local_laplace": FLAT_AND_LAYERS,
    "distributed_discrete_gaussian": INTEGERS,
    "distributed_skellam": INTEGERS,
    "none": (),  # states no sensitivity of a client
}
RECORD_VARIANTS: Mapping[str, Sequence[list[str]]] = {
    "dp_sgd": [
        [f"training.noise={noise}", f"training.placement={placement}", f"training.clipping={clip}"]
        for noise in ("gaussian", "laplace")
        for placement in ("local", "central")
        for clip in ("flat", "per_layer")
    ],
    "sgd": (),
}
OPTIMIZERS = pytest.mark.parametrize("optimizer", kinds("server_optimizer"))
CLIENT_LEVEL = [(kind, v) for kind, variants in VARIANTS.items() for v in variants]
RECORD_LEVEL = [(kind, v) for kind, variants in RECORD_VARIANTS.items() for v in variants]


def name_of(value: object) -> str:
    if isinstance(value, list):
        return ",".join(o.rpartition("=")[2] for o in value if "layer_sizes" not in o) or "flat"
    return str(value)


def test_the_tables_have_every_mechanism_and_every_training() -> None:
    assert set(VARIANTS) == set(kinds("mechanism"))
    assert set(RECORD_VARIANTS) == set(kinds("training"))
    for kind, variants in VARIANTS.items():
        mechanism = load("mechanism", kind)
        assert issubclass(mechanism, Mechanism)
        assert bool(variants) == (mechanism.placement is not None)
    for kind, variants in RECORD_VARIANTS.items():
        training = load("training", kind)
        assert issubclass(training, Training)
        assert bool(variants) == training.private


@pytest.fixture
def coupled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client rounds alike in every round, whatever the others send."""
    signs = _rotation._signs

    def source(purpose: str, round: int, *numbers: int, seed: int | None) -> NoiseSource:
        return NoiseSource.seeded_from(0, purpose, *numbers)

    monkeypatch.setattr(rng, "noise_source", source)
    monkeypatch.setattr(_rotation, "_signs", lambda order, n: signs(replace(order, round=1), n))


def run_rounds(
    folder: Path, *overrides: str, rounds: int, num_parameters: int, delta: Delta
) -> Federation:
    """All clients on one node, which leaves out those whose update is empty."""
    made = federation(
        folder, *overrides, "cohort=all", *UNLIMITED, f"federation.population={CLIENTS}",
        f"run.num_rounds={rounds}", num_parameters=num_parameters, delta=delta, num_nodes=1,
    )  # fmt: skip

    def answer(message: Message, request: TrainRequest) -> list[Message]:
        there = [c for c in request.clients if delta(c, request.order.round).size > 0]
        return made.grid.genuine(message, replace(request, clients=tuple(there)))

    made.grid.answers[0] = answer
    return made.run()


def largest_move(base: np.ndarray, others: np.ndarray, order: int) -> float:
    """Of the sums [cases, P] from those of the same cases in `base`."""
    return float(np.linalg.norm(others - base, order, axis=1).max())


# --- one client


@functools.cache
def cohorts() -> tuple[np.ndarray, ...]:
    """Updates [clients, P] of each cohort.

    Huge and all alike; opposite pairs on the bound; along axes and along what is rotated onto an
    axis; zero, tiny, just over the bound and not finite.
    """
    random = np.random.default_rng(0)
    directions = random.normal(size=(2, P))
    on_bound = C * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    pair = np.stack([on_bound[0], -on_bound[0], on_bound[1] * 1.001])
    axes = np.zeros((CLIENTS, P))
    axes[range(CLIENTS), [0, 0, 33]] = [C, -3e38, 1e-40]
    odd = np.stack([np.zeros(P), on_bound[0] * 1e-30, on_bound[1]])
    odd[2, 5] = np.inf
    alike = np.full((CLIENTS, P), 3e38)
    return tuple(v.astype(np.float32) for v in (alike, pair, axes, odd))


def silent(update_P: np.ndarray) -> np.ndarray:
    return update_P[:0]


def not_a_number(update_P: np.ndarray) -> np.ndarray:
    return np.full_like(update_P, np.nan)


def opposite(update_P: np.ndarray) -> np.ndarray:
    away = -1e30 * np.nan_to_num(update_P.astype(np.float64), posinf=3e38)
    return np.clip(away, -3e38, 3e38).astype(np.float32)


def along_an_axis(update_P: np.ndarray) -> np.ndarray:
    return np.float32(3e38) * np.eye(P, dtype=np.float32)[0]


Change = Callable[[np.ndarray], np.ndarray]
TAKEN_OUT: tuple[Change, ...] = (silent, np.zeros_like, not_a_number)
REPLACED: tuple[Change, ...] = (opposite, along_an_axis)
CASES = list(itertools.product((*TAKEN_OUT, *REPLACED), range(4), range(CLIENTS)))
"""What is done in which cohort to which client; after the rounds of the cohorts as they are."""


def client_delta(client: int, round: int) -> np.ndarray:
    if round <= len(cohorts()):
        return cohorts()[round - 1][client]
    change, where, who = CASES[round - 1 - len(cohorts())]
    update_P = cohorts()[where][client]
    return change(update_P) if client == who else update_P


def un_noised_sums(made: Federation) -> np.ndarray:
    """What each round released [rounds, P] before it was divided; integers, if clients sent such.

    The rotation is repeated, as norms are bounded where the rounding took place.
    """
    sums, order = np.stack(made.released_sums), made.strategy.last_order
    if made.settings.mechanism.modulus is None:
        return sums
    assert order is not None
    exact = np.stack([_rotation.rotate(total * SCALE, order) for total in sums])
    np.testing.assert_allclose(exact, np.rint(exact), atol=1e-6)
    return np.rint(exact)


def stated_bounds(event: PrivacyEvent) -> dict[int, float]:
    """The order of each norm that the accounting of this event relies on, and its bound."""
    if event.noise is NoiseKind.GAUSSIAN:
        return {2: C}
    if event.noise is NoiseKind.LAPLACE:
        return {1: C}
    assert event.noise in (NoiseKind.DISCRETE_GAUSSIAN, NoiseKind.SKELLAM)
    assert event.shares is not None
    assert event.shares.scaled_norm == pytest.approx(C * SCALE)
    return {2: math.sqrt(event.shares.norm_squared), 1: event.shares.l1_norm}


@OPTIMIZERS
@pytest.mark.parametrize(("kind", "variant"), CLIENT_LEVEL, ids=name_of)
@pytest.mark.usefixtures("coupled")
def test_one_client_moves_the_sum_by_the_stated_sensitivity(
    tmp_path: Path, kind: str, variant: list[str], optimizer: str
) -> None:
    made = run_rounds(
        tmp_path, f"mechanism={kind}", f"server_optimizer={optimizer}", *variant,
        "mechanism.noise_multiplier=0", f"mechanism.clipping_norm={C}",
        rounds=len(cohorts()) + len(CASES), num_parameters=P, delta=client_delta,
    )  # fmt: skip
    sums = un_noised_sums(made)
    base = sums[[where for _, where, _ in CASES]]
    changed = sums[len(cohorts()) :]
    out = np.array([change in TAKEN_OUT for change, _, _ in CASES])
    event = PrivacyEvent.from_json(made.ledger.entries()[0].event)
    for order, bound in stated_bounds(event).items():
        assert NEAR * bound <= largest_move(base[out], changed[out], order) <= bound * EXACT
        most = largest_move(base[~out], changed[~out], order)
        assert NEAR * 2 * bound <= most <= 2 * bound * EXACT
    if event.shares is not None:  # the clipping norm itself would be no bound
        assert largest_move(base[out], changed[out], 2) > event.shares.scaled_norm


# --- one record


ROWS, FEATURES, RATE, NOMINAL, LEARNING_RATE = 3, 6, 1.0, 100, 100.0
"""`federation` has 100 nominal rows. Large steps, so that float32 parameters round little off."""
NUM_RECORD_PARAMETERS = 2 * FEATURES + 2


def zero_net() -> nn.Module:
    """Gives every row of two labels the same probability: the other label turns a gradient over."""
    net = nn.Linear(FEATURES, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


@functools.cache
def records() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Features [clients, rows, F] and labels of each cohort: large and alike, mixed, and broken."""
    random = np.random.default_rng(1)
    mixed = random.normal(size=(CLIENTS, ROWS, FEATURES))
    broken = mixed * np.array([0.0, 1e-20, 1e25])[None, :, None]
    broken[1, 1, 2], broken[2, 0, 0] = np.nan, np.inf
    labels = random.integers(0, 2, (CLIENTS, ROWS))
    alike = np.full_like(mixed, 1e3)
    cases = [(alike, np.zeros_like(labels)), (mixed, labels), (broken, labels)]
    return tuple((features.astype(np.float32), labels) for features, labels in cases)


RECORD_TAKEN_OUT, RECORD_REPLACED = ("removed", "not a number"), ("other label", "huge")
RECORD_CASES = list(itertools.product((*RECORD_TAKEN_OUT, *RECORD_REPLACED), range(3), range(ROWS)))
"""What is done in which cohort to which row of client 1; after the cohorts as they are."""


def partition_of(client: int, where: int, row: int = 0, how: str = "") -> ClientPartition:
    """The client's rows in a cohort, with one of them changed as `how` says."""
    features, labels = (values[client].copy() for values in records()[where])
    rows = np.arange(ROWS)
    if how == "removed":
        rows = np.delete(rows, row)
    elif how == "other label":
        labels[row] = 1 - labels[row]
    elif how:
        features[row] = {"huge": -1e30, "not a number": np.nan}[how]
    table = Table(features=features, labels=labels, transform=Plain())
    return ClientPartition(client=client, table=table, rows=rows)


def record_level(kind: str, variant: Sequence[str]) -> list[str]:
    return [
        f"training={kind}", "mechanism=none", *variant, "training.noise_multiplier=0",
        f"training.clipping_norm={C}", "training.local_steps=1", f"training.batch_rate={RATE}",
        f"training.learning_rate={LEARNING_RATE}",
    ]  # fmt: skip


@functools.cache
def trained(kind: str, variant: tuple[str, ...]) -> dict[tuple[int, int], np.ndarray]:
    """The update of each client in each round; the rounds of one client's change share others'."""
    training = composed(*record_level(kind, variant), "cohort=all", *UNLIMITED).training

    def update(partition: ClientPartition) -> np.ndarray:
        job = TrainingJob(
            noise_multiplier=0.0, nominal_rows=NOMINAL, batches=np.random.default_rng(0),
            noise=NoiseSource.from_os(), device=torch.device("cpu"),
        )  # fmt: skip
        return training.train(zero_net(), partition, job).delta_P

    cases = range(len(records()))
    as_it_is = {(c, w): update(partition_of(c, w)) for c in range(CLIENTS) for w in cases}
    updates = {(c, w + 1): vector_P for (c, w), vector_P in as_it_is.items()}
    for round, (how, where, row) in enumerate(RECORD_CASES, start=len(cases) + 1):
        updates |= {(c, round): as_it_is[c, where] for c in range(CLIENTS)}
        updates[1, round] = update(partition_of(1, where, row, how))
    return updates


@OPTIMIZERS
@pytest.mark.parametrize(("kind", "variant"), RECORD_LEVEL, ids=name_of)
def test_one_record_moves_the_sum_by_the_stated_sensitivity(
    tmp_path: Path, kind: str, variant: list[str], optimizer: str
) -> None:
    updates = trained(kind, tuple(variant))
    made = run_rounds(
        tmp_path, *record_level(kind, variant), f"server_optimizer={optimizer}",
        rounds=len(records()) + len(RECORD_CASES), num_parameters=NUM_RECORD_PARAMETERS,
        delta=lambda client, round: updates[client, round],
    )  # fmt: skip
    sums = np.stack(made.released_sums) * (RATE * NOMINAL / LEARNING_RATE)
    base = sums[[where for _, where, _ in RECORD_CASES]]
    changed = sums[len(records()) :]
    out = np.array([how in RECORD_TAKEN_OUT for how, _, _ in RECORD_CASES])
    event = PrivacyEvent.from_json(made.ledger.entries()[0].event)
    for order, bound in stated_bounds(event).items():
        assert NEAR * bound <= largest_move(base[out], changed[out], order) <= bound * FLOAT32
        most = largest_move(base[~out], changed[~out], order)
        assert NEAR * 2 * bound <= most <= 2 * bound * FLOAT32


# --- the server optimizer


RELEASERS = [
    ("mechanism=none",),
    *[(f"mechanism={k}", *v[0], "mechanism.noise_multiplier=0") for k, v in VARIANTS.items() if v],
    (
        "training=dp_sgd", "mechanism=none", "training.placement=central", "training.local_steps=1",
        "training.noise_multiplier=0",
    ),
]  # fmt: skip


@OPTIMIZERS
@pytest.mark.parametrize("releaser", RELEASERS, ids=lambda r: ",".join(r[:1]))
@pytest.mark.parametrize("fixed", [True, False], ids=["same release", "releases of their own"])
def test_the_optimizer_does_the_same_with_the_same_release_whatever_the_sum_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, releaser: tuple[str, ...],
    optimizer: str, fixed: bool,
) -> None:  # fmt: skip
    """With releases of their own the two federations differ: the sums do get there."""

    def release(
        self: object, total: CohortSum, order: RoundOrder, expected: float, noise: NoiseSource
    ) -> Release:
        mean_P = np.random.default_rng(order.round).normal(size=P)
        return Release(
            round=total.round, mean_P=mean_P, noise_std_of_sum=0.0, noise_std_of_mean=0.0
        )

    ends = []
    for number, size in enumerate((0.01, -0.02)):
        made = federation(
            tmp_path / str(number), *releaser, f"server_optimizer={optimizer}", "cohort=all",
            *UNLIMITED,
            f"federation.population={CLIENTS}", "run.num_rounds=3", num_parameters=P,
            delta=lambda client, round, size=size: np.full(P, size, np.float32),
        )  # fmt: skip
        if fixed:
            monkeypatch.setattr(type(made.settings.releaser), "release", release)
        made.run()
        assert len(made.optimizer.means) == 3
        state = made.strategy.optimizer_state
        ends.append(np.concatenate([made.strategy.parameters_P, *state.values()]))
    assert np.array_equal(*ends) == fixed
