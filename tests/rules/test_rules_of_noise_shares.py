"""Rules 2, 4, 5, 7, 8 and 11 for DISTRIBUTED noise, through the whole server side."""

import logging
from pathlib import Path

import numpy as np
import pytest
from harness import Federation, dead, federation
from scipy import stats

from fl_app import wire
from fl_app.integer_noise import table
from fl_app.mechanisms._rounding import rounded_norm_squared
from fl_app.privacy import NoiseKind, PrivacyEvent
from fl_app.rng import NoiseSource

KINDS = ["distributed_discrete_gaussian", "distributed_skellam"]
EIGHT = ["federation.population=8", "privacy.target_epsilon=null"]
NOISE = ["mechanism.noise_multiplier=1.5", "mechanism.clipping_norm=2"]
P = 2**16
FALSE_ALARM = 1e-6


def made(folder: Path, kind: str, *overrides: str, num_parameters: int = P) -> Federation:
    return federation(
        folder, f"mechanism={kind}", *EIGHT, *NOISE, *overrides, num_parameters=num_parameters
    )


def std_fits(sample: np.ndarray, std: float) -> bool:
    squares = float(np.sum(sample**2)) / std**2
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], df=sample.size)
    return bool(low <= squares <= high)


@pytest.mark.parametrize("kind", KINDS)
def test_rule_4_the_fewest_survivors_leave_exactly_z_c(kind: str, tmp_path: Path) -> None:
    run = made(tmp_path, kind, "run.num_rounds=1", "mechanism.min_survivors=6")
    run.grid.answers |= {0: dead, 1: dead}
    (noise,) = run.run().released_sums
    assert noise.size == P
    assert std_fits(noise, 1.5 * 2)
    assert not std_fits(noise, 1.5 * 2 * (8 / 6) ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_rule_4_everybody_leaves_more(kind: str, tmp_path: Path) -> None:
    run = made(tmp_path, kind, "run.num_rounds=1", "mechanism.min_survivors=6")
    (noise,) = run.run().released_sums
    assert std_fits(noise, 1.5 * 2 * (8 / 6) ** 0.5)


def test_rule_8_a_round_with_fewer_answers_is_charged_and_moves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = made(tmp_path, KINDS[1], "run.num_rounds=2", "mechanism.min_survivors=7")
    run.grid.answers |= {0: dead, 1: dead}
    with caplog.at_level(logging.WARNING, "dpfl"):
        run.run()
    assert run.released_sums == []
    assert not run.strategy.parameters_P.any()
    assert run.durable_rounds() == [1, 2]
    assert any("not released" in record.message for record in caplog.records)


@pytest.mark.parametrize("kind", KINDS)
def test_rule_7_the_ledger_holds_what_the_shares_were_accounted_with(
    kind: str, tmp_path: Path
) -> None:
    run = made(tmp_path, kind, "run.num_rounds=1", "mechanism.assumed_colluders=1")
    run.run()
    (entry,) = run.ledger.entries()
    event = PrivacyEvent.from_json(entry.event)
    assert event.shares is not None
    assert event.noise_multiplier == 1.5
    assert event.shares.num_shares == 7 - 1  # 80 % of 8, rounded up, less the colluder
    assert event.shares.dimension == P
    norm = event.shares.scaled_norm
    assert event.shares.norm_squared == rounded_norm_squared(norm, P) >= norm**2


@pytest.mark.parametrize("kind", KINDS)
def test_rule_2_what_a_client_adds_is_within_the_accounted_norm(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes the noise off again: what is left of a huge update must obey the ledger's norm."""
    run = made(tmp_path, kind, "run.num_rounds=1", "mechanism.scale=3", num_parameters=64)
    law = {KINDS[0]: NoiseKind.DISCRETE_GAUSSIAN, KINDS[1]: NoiseKind.SKELLAM}[kind]
    drawn: list[np.ndarray] = []
    genuine = NoiseSource.integers

    def watched(self: NoiseSource, law_: object, size: int) -> np.ndarray:
        drawn.append(genuine(self, law_, size))  # type: ignore[arg-type]
        return drawn[-1]

    monkeypatch.setattr(NoiseSource, "integers", watched)
    generator = np.random.default_rng(0)
    run.grid.delta = lambda client, round: generator.normal(0, 9, 64).astype(np.float32)
    replies = []
    accept = wire.read_train_reply
    monkeypatch.setattr(
        wire, "read_train_reply", lambda m: replies.append(accept(m)) or replies[-1]
    )
    run.run()
    (entry,) = run.ledger.entries()
    shares = PrivacyEvent.from_json(entry.event).shares
    assert shares is not None
    modulus = 2**20
    for noise, update in zip(drawn, sorted(replies, key=lambda u: u.clients), strict=True):
        clean = (update.vector_P - noise + modulus // 2) % modulus - modulus // 2
        assert 0 < int(clean @ clean) <= shares.norm_squared
        assert np.abs(clean).sum() <= shares.l1_norm
    assert table(law, (1.5 * shares.scaled_norm) ** 2 / shares.num_shares)


def test_rule_5_the_sum_is_divided_by_the_expected_cohort(tmp_path: Path) -> None:
    quiet = ["run.num_rounds=1", "mechanism.noise_multiplier=0", "mechanism.min_survivors=4"]
    run = made(tmp_path, KINDS[0], *quiet, num_parameters=4)
    run.grid.delta = lambda client, round: np.float32([0.5, 0, 0, -0.25])
    run.grid.answers |= {0: dead, 1: dead, 2: dead, 3: dead}
    run.run()
    (mean,) = run.optimizer.means
    np.testing.assert_allclose(mean, np.array([0.5, 0, 0, -0.25]) * 4 / 8, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rule_11_rounds_and_repetitions_have_their_own_noise(kind: str, tmp_path: Path) -> None:
    first = made(tmp_path / "a", kind, "run.num_rounds=2").run().released_sums
    second = made(tmp_path / "b", kind, "run.num_rounds=1").run().released_sums
    for one, other in [(first[0], first[1]), (first[0], second[0])]:
        assert stats.pearsonr(one, other).pvalue > FALSE_ALARM
    assert stats.pearsonr(first[0], first[1] + 0.1 * first[0]).pvalue < FALSE_ALARM


@pytest.mark.parametrize("vector", ["short", "float", "modulus"])
def test_what_is_not_the_mechanisms_vector_is_a_violation(vector: str, tmp_path: Path) -> None:
    run = made(tmp_path, KINDS[0], "run.num_rounds=1", "mechanism.min_survivors=7")

    def forged(message, request):  # type: ignore[no-untyped-def]
        modulus = {"modulus": 2**16, "float": None}.get(vector, 2**20)
        size = 5 if vector == "short" else P
        kind = np.float32 if vector == "float" else np.int64
        update = wire.ProtectedUpdate(
            round=1, clients=(0,), vector_P=np.zeros(size, kind), weight=1.0, modulus=modulus
        )
        return [wire.train_reply(update, message)]

    run.grid.answers[0] = forged
    run.run()
    (trace,) = run.traces
    assert trace.absent == (0,)
    assert len(trace.violations) == 1
    assert "wrong" in trace.violations[0]
