"""Rules 2, 4, 5, 6, 8, 9, 10, 13 for `training.placement=central`.

False alarms: 1e-6 a check. P = 20,000: 2.4 % of the std are accepted.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from harness import (
    UNLIMITED,
    Federation,
    callers_outside,
    composed,
    dead,
    federation,
    node,
    reachable,
    shape_of,
    spoil_client,
    watched_run,
)
from opacus.accountants import RDPAccountant
from statistical.exact_intervals import is_laplace, is_uncorrelated, scale_within, std_within

from fl_app import rng
from fl_app.accounting.node_charge import planned_charge, request_events
from fl_app.accounting.plan import make_plan
from fl_app.errors import PrivacyError, SettingsError
from fl_app.node_policy import order_of
from fl_app.privacy import PrivacyEvent, PrivacyUnit, Sampling, View
from fl_app.stages import CohortSum, RoundOrder
from fl_app.wire import UPDATE, VECTOR

P, Z, C, RATE, ROWS, RATE_OF_LEARNING = 20_000, 1.5, 0.7, 0.2, 100, 0.5
"""`federation` has 100 nominal rows."""
DIVISOR = 10 * RATE * ROWS / RATE_OF_LEARNING
BASE = [
    "training=dp_sgd", "training.placement=central", "training.local_steps=1", "mechanism=none",
    f"training.clipping_norm={C}", f"training.batch_rate={RATE}",
    f"training.learning_rate={RATE_OF_LEARNING}",
]  # fmt: skip
NOISED = [*BASE, *UNLIMITED, f"training.noise_multiplier={Z}"]


def central(folder: Path, *overrides: str, delta: object = None) -> Federation:
    return federation(
        folder, *NOISED, "cohort=all", *overrides, num_parameters=P,
        delta=delta,  # type: ignore[arg-type]
    )  # fmt: skip


def noised_sums(made: Federation, expected_cohort: float = 10) -> list[np.ndarray]:
    """What was released, times all that it was divided by, by hand."""
    factor = DIVISOR * expected_cohort / 10
    return [mean * factor for mean in made.optimizer.means]


# Rules 4, 5, 6: who adds how much, and what it is divided by.


@pytest.mark.parametrize("answers", [0, 1, 10])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_noise_of_the_sum_is_z_c_whatever_number_answers(
    tmp_path: Path, answers: int, optimizer: str
) -> None:
    made = central(tmp_path, "run.num_rounds=2", f"server_optimizer={optimizer}")
    for part in range(answers, 10):
        made.grid.answers[part] = dead
    sums = noised_sums(made.run())
    for noise in sums:
        assert std_within(noise, Z * C)
        assert not std_within(noise * 1.1, Z * C)
    assert is_uncorrelated(*sums)
    assert made.durable_rounds() == [1, 2]


def test_laplace_noise_has_scale_z_c(tmp_path: Path) -> None:
    (noise,) = noised_sums(central(tmp_path, "run.num_rounds=1", "training.noise=laplace").run())
    assert scale_within(noise, Z * C)
    assert is_laplace(noise, Z * C)
    assert not scale_within(noise * 1.1, Z * C)


def test_a_round_has_the_noise_of_its_own_level_and_is_charged_at_it(tmp_path: Path) -> None:
    made = central(tmp_path, "run.num_rounds=2", "training.noise_schedule=[2,0.5]").run()
    for noise, level in zip(noised_sums(made), (2.0, 0.5), strict=True):
        assert std_within(noise, Z * C * level)
    charged = [PrivacyEvent.from_json(entry.event) for entry in made.ledger.entries()]
    assert [event.noise_multiplier for event in charged] == [2 * Z, Z / 2]


def test_an_empty_poisson_cohort_releases_noise_alone_divided_by_the_expected_one(
    tmp_path: Path,
) -> None:
    made = central(tmp_path, "cohort=poisson", "cohort.sampling_rate=0.02", "run.num_rounds=12")
    made.run()
    empty = [t.round for t in made.traces if not t.cohort]
    assert 0 < len(empty) < 12
    for noise in noised_sums(made, expected_cohort=0.2):
        assert std_within(noise, Z * C)
    assert made.durable_rounds() == list(range(1, 13))


def test_every_client_counts_once_and_no_un_noised_sum_is_left(tmp_path: Path) -> None:
    def delta(client: int, round: int) -> np.ndarray:
        return np.full(P, client + 1, np.float32)

    made = central(tmp_path, "run.num_rounds=1", delta=delta)
    found: list[object] = []

    def search() -> None:
        for thing in reachable([made.strategy, *callers_outside(__file__)]):
            if isinstance(thing, np.ndarray) and thing.shape == (P,):
                found.extend(f for f in (1.0, DIVISOR) if np.allclose(thing * f, 55.0))

    made.optimizer.before_step.append(search)
    (total,) = noised_sums(made.run())
    assert not found
    assert std_within(total - 55.0, Z * C)
    assert not std_within(total - 54.0, Z * C)  # a client missing


def test_the_release_cannot_be_had_without_its_noise() -> None:
    """Whoever asks the settings for the release gets the training's, never the plain mean."""
    settings = composed(*NOISED)
    assert settings.releaser is settings.training
    local = composed("training=dp_sgd", "mechanism=none", *UNLIMITED, "training.noise_multiplier=1")
    assert local.releaser is local.mechanism
    order = RoundOrder(
        round=1, clipping_norm=None, noise_multiplier=None, training_noise_multiplier=None,
        nominal_rows=ROWS,
    )  # fmt: skip
    total = CohortSum(round=1, sum_P=np.ones(3), weight=1.0, num_answered=1)
    source = rng.NoiseSource.from_os()
    for asked in (settings.training, local.training):
        with pytest.raises(PrivacyError, match="a release needs central and a number"):
            asked.release(total, order, 1.0, source)  # type: ignore[attr-defined]
    assert (total.sum_P == 1).all()


@pytest.mark.parametrize("expected_cohort", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_divisor_is_refused(expected_cohort: float) -> None:
    settings = composed(*NOISED)
    total = CohortSum(round=1, sum_P=np.ones(3), weight=1.0, num_answered=1)
    with pytest.raises(PrivacyError, match="divisor="):
        settings.releaser.release(
            total, order_of(settings), expected_cohort, rng.NoiseSource.from_os()
        )


def test_learning_rate_decays_by_round() -> None:
    settings = composed(*NOISED, "training.learning_rate_decay=0.5")
    stds = []
    for round in (1, 3):
        order = RoundOrder(
            round=round, clipping_norm=None, noise_multiplier=None, training_noise_multiplier=Z,
            nominal_rows=ROWS,
        )  # fmt: skip
        total = CohortSum(round=round, sum_P=np.zeros(P), weight=0.0, num_answered=0)
        release = settings.releaser.release(total, order, 10.0, rng.NoiseSource.from_os())
        assert release.mean_P is total.sum_P
        assert release.noise_std_of_sum == pytest.approx(Z * C)
        assert std_within(release.mean_P, release.noise_std_of_mean)
        stds.append(release.noise_std_of_mean)
    assert stds[0] == pytest.approx(RATE_OF_LEARNING * Z * C / (10 * RATE * ROWS))
    assert stds[1] == pytest.approx(stds[0] / 4)


# Rules 2 and 12: what a client sends.


def test_a_whole_run_sends_clipped_sums_and_public_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 3's rows are not numbers: it sends zero, and nothing else about it is different."""
    spoil_client(monkeypatch, 3, "nan")
    run = watched_run(
        tmp_path / "run", *NOISED, "cohort=all", "run.num_rounds=1", "run.seed=5", num_nodes=10
    )
    assert run.report.status == "completed"
    shapes, sums = set(), {}
    for reply in run.grid.train_replies():
        shape = shape_of(reply)
        (client,) = shape["config"].pop("clients")
        shapes.add(json.dumps(shape, sort_keys=True, default=str))
        sums[client] = reply.content.array_records[UPDATE][VECTOR].numpy()
    assert len(shapes) == 1
    assert not sums[3].any()
    assert all(sums[c].any() for c in range(10) if c != 3)


# Rules 9 and 10: what is stated.


@pytest.mark.parametrize("cohort", ["all", "poisson"])
def test_the_target_binds_the_observer_and_nothing_is_promised_against_the_server(
    cohort: str,
) -> None:
    plan = make_plan(
        composed(*BASE, f"cohort={cohort}", "federation.population=100",
                 "privacy.target_epsilon=3", "privacy.target_delta=1e-5"),
        ROWS,
    )  # fmt: skip
    assert plan.epsilon_of == "RECORD against OBSERVER"
    observer, server = plan.guarantees(plan.num_rounds)
    assert (observer.view, server.view) == (View.OBSERVER, View.SERVER)
    assert (observer.unit, server.unit) == (PrivacyUnit.RECORD, PrivacyUnit.RECORD)
    assert observer.epsilon == pytest.approx(3, rel=0.01)
    assert server.epsilon is None
    assert "without noise" in server.assumptions[0]
    text = " ".join(observer.assumptions)
    assert "an honest server adds the noise once" in text
    assert "no credit is taken for the sampling of clients" in text
    assert "amplification by Poisson batches" in text


def test_epsilon_is_that_of_the_batches_alone_by_another_library() -> None:
    """Source: Opacus' RDP accountant, 30 steps of z at the batch rate; client sampling 0.1."""
    plan = make_plan(
        composed(*NOISED, "cohort=poisson", "cohort.sampling_rate=0.1", "accountant=rdp",
                 "federation.population=100", "privacy.target_delta=1e-5"),
        ROWS,
    )  # fmt: skip
    opacus = RDPAccountant()
    opacus.history = [(Z, RATE, 30)]
    expected = opacus.get_epsilon(delta=1e-5)
    assert plan.guarantees(30)[0].epsilon == pytest.approx(expected, rel=0.01)
    # Negative control: with credit for the sampling of clients it would be far less.
    opacus.history = [(Z, RATE * 0.1, 30)]
    assert opacus.get_epsilon(delta=1e-5) < 0.5 * expected


def test_the_noise_is_that_of_one_client_and_the_signal_that_of_the_cohort() -> None:
    local = [o.replace("placement=central", "placement=local") for o in NOISED]
    at_clients, at_server = (
        make_plan(composed(*o, "cohort=all"), ROWS, num_parameters=650) for o in (local, NOISED)
    )
    assert at_server.guarantees(30)[0].epsilon == at_clients.guarantees(30)[0].epsilon
    ratio = at_clients.signal_to_noise(650)
    assert ratio is not None
    assert at_server.signal_to_noise(650) == pytest.approx(10 * ratio)
    assert "added once by the server" in at_server.summary()["record-level noise"]
    assert "added once by the server" not in at_clients.summary()["record-level noise"]


def test_skipped_rounds_need_an_assumption_and_are_charged(tmp_path: Path) -> None:
    skipping = make_plan(composed(*NOISED, "federation.on_missing=skip"), ROWS)
    releasing = make_plan(composed(*NOISED), ROWS)
    text = "availability independent of data"
    assert any(text in a for a in skipping.guarantees(30)[0].assumptions)
    assert not any(text in a for a in releasing.guarantees(30)[0].assumptions)
    made = central(tmp_path, "federation.on_missing=skip", "run.num_rounds=2")
    for part in range(10):
        made.grid.answers[part] = dead
    made.run()
    assert made.optimizer.means == []
    assert made.durable_rounds() == [1, 2]


# Rule 13: the node.


def test_a_deployed_node_must_opt_in_and_charges_its_own_batches() -> None:
    settings = composed(*NOISED)
    with pytest.raises(PrivacyError, match="noise that the server adds"):
        node(simulated=False).check(settings, order_of(settings))
    node(simulated=False, allowed_placements="central").check(settings, order_of(settings))
    (event,) = request_events(settings, order_of(settings), P)
    assert (event.unit, event.view) == (PrivacyUnit.RECORD, View.OBSERVER)
    assert (event.sampling, event.sampling_rate) == (Sampling.POISSON, RATE)
    assert (event.noise_multiplier, event.steps) == (Z, 1)
    plan = make_plan(settings, ROWS)
    assert plan.events == (event,)
    record = planned_charge(plan).most[1]
    assert record.epsilon is not None
    assert any("assuming the server adds the noise" in a for a in record.assumptions)


# Configuration.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.local_steps=4", r"training\.local_steps=4: .*needs 1"),
        ("training.momentum=0.9", r"training\.momentum=0\.9: .*server_optimizer=momentum"),
        ("training.weight_decay=0.1", r"training\.weight_decay=0\.1: .*needs 0"),
        ("training.layer_noise=[1,2]", r"training\.layer_noise=.*same noise in every layer"),
        ("training.placement=centrl", r"training\.placement=centrl: .*did you mean central"),
        ("federation.weighting=examples", r"federation\.weighting=examples"),
    ],
)
def test_what_the_server_cannot_account_for_is_refused(override: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        composed(*NOISED, override)


@pytest.mark.parametrize("mechanism", ["central_gaussian", "local_gaussian"])
def test_a_second_noise_on_top_is_refused(mechanism: str) -> None:
    with pytest.raises(SettingsError, match=rf"mechanism={mechanism}: .*choose mechanism=none"):
        composed(
            *[o for o in NOISED if not o.startswith("mechanism")], f"mechanism={mechanism}",
            "mechanism.noise_multiplier=1",
        )  # fmt: skip
