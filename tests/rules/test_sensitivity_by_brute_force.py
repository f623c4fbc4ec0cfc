"""Rules 2 and 6: one client or record moves the un-noised release by the stated sensitivity at most.

Every combination of a mechanism (or a private training) and a server optimizer goes through the
whole server side at z = 0, over hostile cohorts: one client or record is taken out, made zero or
replaced, and the largest move of the released sum is compared with what the ledger's event states.
A new plug-in fails here until its line is in the tables.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from harness import UNLIMITED, Federation, composed, federation
from torch import nn
from unit.test_training import Plain

from fl_app import rng
from fl_app.mechanisms._rotation import rotate
from fl_app.plugins import Mechanism, Training, TrainingJob, kinds, load
from fl_app.privacy import NoiseKind, PrivacyEvent
from fl_app.rng import NoiseSource
from fl_app.stages import ClientPartition, CohortSum, Release, RoundOrder, Table
from fl_app.wire import TrainRequest

C, P, CLIENTS, SCALE = 0.7, 64, 5, 30
"""P is a power of two: an integer mechanism pads nothing, so its whole sum can be had back."""
EXACT, FLOAT32 = 1 + 1e-9, 1 + 2e-5
NEAR = 0.95
"""Clipping everything away would pass too: this share of the bound must be reached."""

FLAT_AND_LAYERS = ([], ["mechanism.clipping=per_layer", "mechanism.layer_sizes=[16,16,32]"])
INTEGERS = ([f"mechanism.scale={SCALE}", "mechanism.min_survivors=3"],)
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
    """The same random rounding at a client whatever the others send."""

    def source(purpose: str, *numbers: int, seed: int | None) -> NoiseSource:
        return NoiseSource.seeded_from(0, purpose, *numbers)

    monkeypatch.setattr(rng, "noise_source", source)


# --- one client


@functools.cache
def cohorts() -> tuple[np.ndarray, ...]:
    """Updates [clients, P] of each cohort.

    Huge and all alike; opposite pairs on the bound; along axes and along what is rotated onto an
    axis; zero, tiny, just over the bound and not finite.
    """
    random = np.random.default_rng(0)
    directions = random.normal(size=(CLIENTS, P))
    on_bound = C * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    pairs = on_bound[[0, 0, 1, 1, 2]] * np.array([1, -1, 1, -1, 1])[:, None]
    axes = np.zeros((CLIENTS, P))
    axes[range(CLIENTS), [0, 0, 17, 33, 63]] = [C, -C, 1e30, -3e38, 1e-40]
    odd = np.stack([np.zeros(P), on_bound[1] * 1e-30, on_bound[2] * 1.001, on_bound[3], np.ones(P)])
    odd[3, 5], odd[4, 9] = np.nan, -np.inf
    alike = np.full((CLIENTS, P), 3e38)
    return tuple(v.astype(np.float32) for v in (alike, pairs, axes, odd))


def same(update_P: np.ndarray) -> np.ndarray:
    return update_P


def not_a_number(update_P: np.ndarray) -> np.ndarray:
    return np.full_like(update_P, np.nan)


def opposite(update_P: np.ndarray) -> np.ndarray:
    away = -1e30 * np.nan_to_num(update_P.astype(np.float64))
    return np.clip(away, -3e38, 3e38).astype(np.float32)


def along_an_axis(update_P: np.ndarray) -> np.ndarray:
    return np.float32(3e38) * np.eye(P, dtype=np.float32)[0]


Change = Callable[[np.ndarray], np.ndarray]
TAKEN_OUT: tuple[Change | None, ...] = (None, np.zeros_like, not_a_number)
"""None: it does not answer."""
REPLACED: tuple[Change, ...] = (opposite, along_an_axis)


def who_and_where(round: int) -> tuple[int, int]:
    """The client that a round is about and its cohort: each pair has a round of its own."""
    return divmod(round - 1, len(cohorts()))


def client_federation(
    folder: Path, kind: str, optimizer: str, variant: list[str], change: Change | None
) -> Federation:
    """Every round one client is `change`d; all other rounds and clients are as without it."""
    made = federation(
        folder, f"mechanism={kind}", f"server_optimizer={optimizer}", "cohort=all", *variant,
        "mechanism.noise_multiplier=0", f"mechanism.clipping_norm={C}", *UNLIMITED,
        f"federation.population={CLIENTS}", f"run.num_rounds={CLIENTS * len(cohorts())}",
        num_parameters=P,
    )  # fmt: skip

    def delta(client: int, round: int) -> np.ndarray:
        who, where = who_and_where(round)
        update_P = cohorts()[where][client]
        return (change or same)(update_P) if client == who else update_P

    def answer(client: int, message: Message, request: TrainRequest) -> list[Message]:
        silent = change is None and client == who_and_where(request.order.round)[0]
        return [] if silent else made.grid.genuine(message, request)

    made.grid.delta = delta
    made.grid.answers |= {c: functools.partial(answer, c) for c in range(CLIENTS)}
    return made.run()


def un_noised_sums(made: Federation) -> np.ndarray:
    """What each round released [rounds, P] before it was divided; integers, if clients sent such.

    The rotation is repeated, as norms are bounded where the rounding took place.
    """
    sums = np.stack(made.released_sums)
    if made.settings.mechanism.modulus is None:
        return sums
    orders = {request.order.round: request.order for request in made.grid.requests}
    exact = np.stack([rotate(s * SCALE, orders[r]) for r, s in enumerate(sums, start=1)])
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


def largest_move(base: np.ndarray, others: Sequence[np.ndarray], order: int) -> float:
    return max(float(np.linalg.norm(base - other, order, axis=1).max()) for other in others)


@OPTIMIZERS
@pytest.mark.parametrize(("kind", "variant"), CLIENT_LEVEL, ids=name_of)
@pytest.mark.usefixtures("coupled")
def test_one_client_moves_the_sum_by_the_stated_sensitivity(
    tmp_path: Path, kind: str, variant: list[str], optimizer: str
) -> None:
    numbers = itertools.count()

    def run(change: Change | None) -> Federation:
        folder = tmp_path / str(next(numbers))
        return client_federation(folder, kind, optimizer, variant, change)

    whole = run(same)
    event = PrivacyEvent.from_json(whole.ledger.entries()[0].event)
    base = un_noised_sums(whole)
    taken_out = [un_noised_sums(run(change)) for change in TAKEN_OUT]
    replaced = [un_noised_sums(run(change)) for change in REPLACED]
    for order, bound in stated_bounds(event).items():
        assert NEAR * bound <= largest_move(base, taken_out, order) <= bound * EXACT
        assert NEAR * 2 * bound <= largest_move(base, replaced, order) <= 2 * bound * EXACT
    if event.shares is not None:  # the clipping norm itself would be no bound
        assert largest_move(base, taken_out, 2) > event.shares.scaled_norm


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


RECORD_TAKEN_OUT = ("removed", "not a number")
RECORD_REPLACED = ("other label", "huge")


def with_record(where: int, row: int, how: str) -> ClientPartition:
    """Client 1 of a cohort with one of its rows changed."""
    features, labels = (values[1].copy() for values in records()[where])
    rows = np.arange(ROWS)
    if how == "removed":
        rows = np.delete(rows, row)
    elif how == "other label":
        labels[row] = 1 - labels[row]
    elif how == "huge":
        features[row] = -1e30
    elif how == "not a number":
        features[row] = np.nan
    table = Table(features=features, labels=labels, transform=Plain())
    return ClientPartition(client=1, table=table, rows=rows)


def untouched(client: int, where: int) -> ClientPartition:
    features, labels = (values[client] for values in records()[where])
    table = Table(features=features, labels=labels, transform=Plain())
    return ClientPartition(client=client, table=table, rows=np.arange(ROWS))


@functools.cache
def trained(
    kind: str, variant: tuple[str, ...], client: int, where: int, row: int, how: str
) -> np.ndarray:
    """The update of one client; only that of client 1 depends on `row` and `how`."""
    training = composed(*record_level(kind, variant)).training
    partition = with_record(where, row, how) if client == 1 else untouched(client, where)
    job = TrainingJob(
        noise_multiplier=0.0, nominal_rows=NOMINAL, batches=np.random.default_rng(0),
        noise=NoiseSource.from_os(), device=torch.device("cpu"),
    )  # fmt: skip
    return training.train(zero_net(), partition, job).delta_P


def record_level(kind: str, variant: Sequence[str]) -> list[str]:
    assert kind in RECORD_VARIANTS, f"say in RECORD_VARIANTS what {kind} needs"
    return [
        f"training={kind}", "mechanism=none", "cohort=all", *variant, *UNLIMITED,
        "training.noise_multiplier=0", f"training.clipping_norm={C}", "training.local_steps=1",
        f"training.batch_rate={RATE}", f"training.learning_rate={LEARNING_RATE}",
        f"federation.population={CLIENTS}", f"run.num_rounds={ROWS * len(records())}",
    ]  # fmt: skip


def un_noised_gradients(
    folder: Path, kind: str, optimizer: str, variant: list[str], how: str
) -> np.ndarray:
    """What each round released [rounds, P], not divided; each (row, cohort) has a round."""

    def delta(client: int, round: int) -> np.ndarray:
        row, where = divmod(round - 1, len(records()))
        seen = (row, how) if client == 1 else (0, "")
        return trained(kind, tuple(variant), client, where, *seen)

    made = federation(
        folder, *record_level(kind, variant), f"server_optimizer={optimizer}",
        delta=delta, num_parameters=NUM_RECORD_PARAMETERS,
    )  # fmt: skip
    return np.stack(made.run().released_sums) * (RATE * NOMINAL / LEARNING_RATE)


@OPTIMIZERS
@pytest.mark.parametrize(("kind", "variant"), RECORD_LEVEL, ids=name_of)
def test_one_record_moves_the_sum_by_the_stated_sensitivity(
    tmp_path: Path, kind: str, variant: list[str], optimizer: str
) -> None:
    def sums(how: str) -> np.ndarray:
        return un_noised_gradients(tmp_path / how, kind, optimizer, variant, how)

    event = composed(*record_level(kind, variant)).training.event(1.0)
    assert event is not None
    base = sums("as it is")
    taken_out = [sums(how) for how in RECORD_TAKEN_OUT]
    replaced = [sums(how) for how in RECORD_REPLACED]
    for order, bound in stated_bounds(event).items():
        assert NEAR * bound <= largest_move(base, taken_out, order) <= bound * FLOAT32
        assert NEAR * 2 * bound <= largest_move(base, replaced, order) <= 2 * bound * FLOAT32


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
