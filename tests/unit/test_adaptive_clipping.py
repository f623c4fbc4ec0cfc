"""Adaptive clipping: where C rests, what the count costs, and what a node can verify.

S15: norms with median 1.4, from C 0.5 and from C 5. Sources of the numbers: Andrew et al. (2021,
arXiv:1905.03871) for the split, and the sensitivity of the whole vector for its cost.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import Delta, Federation, federation, watched_run
from scipy.stats import norm
from statistical.exact_intervals import scale_within, std_within

from fl_app import plugins
from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.client_round import check_order
from fl_app.errors import PrivacyError, SettingsError
from fl_app.mechanisms._additive import AdditiveMechanism
from fl_app.overrides import compose
from fl_app.plugins import CohortSize
from fl_app.rng import NoiseSource
from fl_app.run import default_directory
from fl_app.server_run import load_settings
from fl_app.stages import CohortSum, LocalUpdate, RoundOrder

KINDS = ["central_gaussian", "local_gaussian", "central_laplace", "local_laplace"]
ORDER = {"central_gaussian": 2, "local_gaussian": 2, "central_laplace": 1, "local_laplace": 1}
UNLIMITED = ["privacy.target_epsilon=null", "privacy.target_delta=1e-5"]
MEDIAN = 1.4


def mechanism(kind: str, **values: object) -> AdditiveMechanism:
    given = {"noise_multiplier": 1.0, "clipping_norm": 2.0, "target_quantile": 0.5,
             "count_noise_std": 3.0} | values  # fmt: skip
    made: AdditiveMechanism = plugins.build("mechanism", {"kind": kind, **given})
    return made


def order(norm: float = 2.0, z: float | None = 1.0, round: int = 1) -> RoundOrder:
    return RoundOrder(round=round, clipping_norm=norm, noise_multiplier=z,
                      training_noise_multiplier=None, nominal_rows=1)  # fmt: skip


def update(delta: object) -> LocalUpdate:
    vector = np.asarray(delta, np.float32)
    return LocalUpdate(client=0, delta_P=vector, num_noisy_steps=0, num_examples=1)


def lognormal_deltas(num_clients: int, size: int, length_order: int) -> Delta:
    """Client c's update: a fixed direction, its norm the c-th quantile of a law of median 1.4."""
    ranks = (np.arange(num_clients) + 0.5) / num_clients
    lengths = MEDIAN * np.exp(0.4 * norm.ppf(ranks))
    direction = np.random.default_rng(0).normal(size=size)
    direction /= np.linalg.norm(direction, length_order)
    return lambda client, round: (lengths[client] * direction).astype(np.float32)


def adapted(folder: Path, kind: str, first: float, *overrides: str, rounds: int = 60) -> Federation:
    return federation(
        folder, f"mechanism={kind}", "cohort=all", *UNLIMITED, "mechanism.noise_multiplier=1",
        f"mechanism.clipping_norm={first}", "mechanism.target_quantile=0.5",
        "mechanism.count_noise_std=5", "federation.population=100", f"run.num_rounds={rounds}",
        *overrides, delta=lognormal_deltas(100, 8, ORDER[kind]), num_nodes=4,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["central_gaussian", "central_laplace"])
@pytest.mark.parametrize("first", [0.5, 5.0])
def test_s15_the_norm_rests_near_the_median_from_below_and_from_above(
    tmp_path: Path, kind: str, first: float
) -> None:
    """60 rounds, noise of 5 (Laplace: scale 5) on a count of 100.

    At rest one round's noise moves log C by 0.2 x 0.05 (Laplace: 0.2 x 0.07), and it is drawn back
    by 0.2 x the density of log norms there (1) a round: a stationary std of 0.016 (0.023), less in
    the mean of 20. 10 % is more than 5 such stds.
    """
    made = adapted(tmp_path, kind, first).run()
    sent = [r.order.clipping_norm for r in made.grid.requests if 0 in r.clients]
    assert sent[0] == first
    assert np.mean(sent[-20:]) == pytest.approx(MEDIAN, rel=0.1)
    steps = np.diff(np.log(sent))
    assert np.abs(steps).max() <= 0.2 * 0.5 * (1 + 1e-9)
    # It moves the right way from the beginning.
    assert (steps[:5] > 0).all() if first < MEDIAN else (steps[:5] < 0).all()


def test_s15_local_noise_on_every_bit_leaves_the_norm_resting_too(tmp_path: Path) -> None:
    """100 noises of std 1 on the bits are one of 10 on the count."""
    made = adapted(
        tmp_path, "local_gaussian", 0.5, "mechanism.count_noise_std=1", rounds=80
    ).run()  # fmt: skip
    sent = [r.order.clipping_norm for r in made.grid.requests if 0 in r.clients]
    assert np.mean(sent[-30:]) == pytest.approx(MEDIAN, rel=0.15)


@pytest.mark.parametrize("expected", [4.0, 100.0, 1000.0, 100_000.0])
def test_the_counts_noise_is_a_fixed_share_of_it_whoever_adds_it(expected: float) -> None:
    """A twentieth of the cohort in all, or twice z of each noise if that is more."""
    cohort = CohortSize(expected=expected, largest=int(expected))
    for kind, num_noises in (("central_gaussian", 1.0), ("local_gaussian", expected)):
        made = compose([f"mechanism={kind}", "mechanism.target_quantile=0.5"]).mechanism
        std = made.resolved(1.0, 10, cohort).count_noise_std  # type: ignore[attr-defined]
        assert std >= 2.0
        total = std * math.sqrt(num_noises)
        assert total == pytest.approx(max(expected / 20, 2.0 * math.sqrt(num_noises)))


def test_another_quantile_rests_elsewhere(tmp_path: Path) -> None:
    made = adapted(tmp_path, "central_gaussian", 1.0, "mechanism.target_quantile=0.9").run()
    sent = [r.order.clipping_norm for r in made.grid.requests if 0 in r.clients]
    assert np.mean(sent[-15:]) == pytest.approx(MEDIAN * math.exp(0.4 * norm.ppf(0.9)), rel=0.15)


def test_s15_the_noise_of_a_round_has_the_norm_that_was_sent_in_it(tmp_path: Path) -> None:
    """P = 50,000: |std / expected - 1| < 0.0155 is accepted; false alarms 1e-6."""
    size = 50_000
    made = federation(
        tmp_path, "mechanism=central_gaussian", "cohort=all", *UNLIMITED, "run.num_rounds=4",
        "mechanism.noise_multiplier=1", "mechanism.clipping_norm=3", "federation.population=4",
        "mechanism.target_quantile=0.5", "mechanism.count_noise_std=0.8",
        "mechanism.clipping_learning_rate=1.0",
        delta=lambda client, round: np.zeros(size, np.float32), num_parameters=size,
    ).run()  # fmt: skip
    left = (1 - 1 / (2 * 0.8) ** 2) ** -0.5
    norms = [r.order.clipping_norm for r in made.grid.requests if 0 in r.clients]
    assert len(set(norms)) == 4
    for total, sent in zip(made.released_sums, norms, strict=True):
        assert total.shape == (size,)
        assert std_within(total, left * sent)
        assert not std_within(total, sent)  # z C, as if the count cost nothing
    assert made.strategy.parameters_P.shape == (size,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("z", "count_noise"), [(1.0, 3.0), (0.1, 0.06), (5.0, 2.6), (5.0, 400.0)])
def test_update_and_count_together_are_one_release_of_multiplier_z(
    kind: str, z: float, count_noise: float
) -> None:
    """The longest vector that a client can send, over the noise on each coordinate, is 1/z."""
    made = mechanism(kind, count_noise_std=count_noise)
    longest = 0.0
    for delta in ([0, 0], [2, 0], [1e9, 1e9], [-1e30, 3], [0.1, -0.2], [np.nan, 1]):
        vector = made._clipped(update(delta), order(z=z)).astype(np.float64)
        assert vector.shape == (3,)
        longest = max(longest, float(np.linalg.norm(vector, ORDER[kind])))
    scale = made.update_multiplier(z) * 2.0
    assert longest / scale == pytest.approx(1 / z, rel=1e-6)
    assert longest / scale <= 1 / z * (1 + 1e-9)
    power = ORDER[kind]
    formula = (z**-power - (2 * count_noise) ** -power) ** (-1 / power)
    assert made.update_multiplier(z) == pytest.approx(formula, rel=1e-12)
    assert formula > z


@pytest.mark.parametrize("kind", KINDS)
def test_the_bit_is_one_within_the_norm_and_not_beyond(kind: str) -> None:
    made = mechanism(kind)
    half = made._count_weight(order()) / 2
    for delta, sign in (([1.9, 0], 1), ([2.0, 0], 1), ([2.1, 0], -1), ([0, 0], 1)):
        assert made._clipped(update(delta), order())[-1] == pytest.approx(sign * half, rel=1e-6)
    # A broken update looks like a zero one.
    broken = made._clipped(update([np.inf, 0]), order())
    assert broken.tobytes() == made._clipped(update([0, 0]), order()).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_the_released_share_is_counted_right_and_noised_with_the_counts_noise(kind: str) -> None:
    """30 of 40 within, 20,000 releases; false alarms 1e-6 a check (local: each bit's noise)."""
    made = mechanism(kind, count_noise_std=1.5)
    source, num = NoiseSource.from_os(), 20_000
    local = kind.startswith("local")
    if local:
        weight = made._count_weight(order())
        sent = [made.privatize(update([0.0]), order(), source).vector_P[-1] for _ in range(num)]
        noise = np.array(sent, np.float64) / weight - 0.5
    else:
        bits = [made._clipped(update([1.0 if i < 30 else 9.0]), order()) for i in range(40)]
        total = np.sum(np.array(bits, np.float64), axis=0)
        shares = []
        for _ in range(num):
            cohort = CohortSum(round=1, sum_P=total.copy(), weight=40, num_answered=40)
            shares.append(made.release(cohort, order(), 40.0, source).fraction_within)
        noise = np.array(shares, np.float64) * 40 - 30
    check = scale_within if "laplace" in kind else std_within
    assert check(noise, 1.5)
    assert not check(noise * 1.1, 1.5)
    assert not check(noise, 1.0)


def test_the_share_is_cut_to_zero_and_one() -> None:
    made = mechanism("central_gaussian", noise_multiplier=0.0)
    weight = made._count_weight(order(z=0.0))
    for count, share in ((-9.0, 0.0), (9.0, 1.0), (1.0, 0.75)):
        cohort = CohortSum(round=1, sum_P=np.array([0.0, count * weight]), weight=4, num_answered=4)
        assert (
            made.release(cohort, order(z=0.0), 4.0, NoiseSource.from_os()).fraction_within == share
        )


def test_without_noise_the_share_is_exact_and_the_run_is_not_private(tmp_path: Path) -> None:
    made = adapted(tmp_path, "central_gaussian", 1.0, "mechanism.noise_multiplier=0", rounds=2)
    made.run()
    lengths = MEDIAN * np.exp(0.4 * norm.ppf((np.arange(100) + 0.5) / 100))
    sent = [r.order.clipping_norm for r in made.grid.requests if 0 in r.clients]
    expected = math.exp(-0.2 * (float((lengths <= 1.0).mean()) - 0.5))
    assert sent[1] == pytest.approx(expected, rel=1e-6)
    assert made.plan.guarantees(2)[0].epsilon is None


# Cost and refusals.


def plan(*overrides: str) -> PrivacyPlan:
    base = ["mechanism=central_gaussian", "cohort=poisson", "federation.population=1000",
            "privacy.target_delta=1e-5", "mechanism.target_quantile=0.5"]  # fmt: skip
    return make_plan(compose([*base, *overrides]), 100)


def test_the_charge_is_that_of_the_combined_multiplier_and_the_noise_pays_for_it() -> None:
    fixed = make_plan(
        compose(["mechanism=central_gaussian", "cohort=poisson", "federation.population=1000",
                 "privacy.target_delta=1e-5", "privacy.target_epsilon=4"]), 100)  # fmt: skip
    adaptive = plan("privacy.target_epsilon=4", "mechanism.count_noise_std=2")
    assert adaptive.events == fixed.events
    z = fixed.mechanism_noise_multiplier
    assert z is not None
    assert fixed.noise_std_of_sum == pytest.approx(z)
    assert adaptive.noise_std_of_sum == pytest.approx((z**-2 - 1 / 16) ** -0.5)
    assert "quantile" in adaptive.summary()["adaptive clipping"]
    assert "adaptive clipping" not in fixed.summary()
    text = "; ".join(adaptive.guarantees(30)[0].assumptions)
    assert "noised count" in text


def test_the_counts_noise_is_a_twentieth_of_the_cohort_or_twice_the_multiplier() -> None:
    made = plan("mechanism.noise_multiplier=1", *UNLIMITED)
    assert made.mechanism_constants == {"count_noise_std": 5.0}  # 0.1 x 1000 / 20
    made = plan("mechanism.noise_multiplier=4", *UNLIMITED)
    assert made.mechanism_constants == {"count_noise_std": 8.0}
    # With a schedule the noisiest round counts.
    made = plan("mechanism.noise_multiplier=1", "mechanism.noise_schedule=[1,6]",
                "run.num_rounds=2", *UNLIMITED)  # fmt: skip
    assert made.mechanism_constants == {"count_noise_std": 12.0}


@pytest.mark.parametrize(("z", "std"), [(4, 2), (4, 1.9), (4, 0.001)])
def test_an_impossible_pair_is_refused_with_the_smallest_usable_value(z: float, std: float) -> None:
    with pytest.raises(SettingsError, match=r"mechanism\.count_noise_std=.*must be above 2, half"):
        plan(f"mechanism.noise_multiplier={z}", f"mechanism.count_noise_std={std}", *UNLIMITED)
    plan(f"mechanism.noise_multiplier={z}", "mechanism.count_noise_std=2.0001", *UNLIMITED)
    with pytest.raises(PrivacyError, match="count_noise_std"):
        mechanism("central_gaussian", count_noise_std=std).update_multiplier(float(z))


@pytest.mark.parametrize(
    ("key", "value"),
    [("target_quantile", v) for v in (0, 1, -0.5, 2)]
    + [("clipping_learning_rate", v) for v in (0, -1, 1.5)]
    + [("count_noise_std", v) for v in (0, -1)],
)
def test_impossible_values_are_refused(key: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f"mechanism.{key}={value}"):
        compose(["mechanism=central_gaussian", f"mechanism.{key}={value}"])


def test_a_mechanism_that_was_not_settled_does_not_release() -> None:
    with pytest.raises(PrivacyError, match="count_noise_std=null"):
        mechanism("local_gaussian", count_noise_std=None).privatize(
            update([1.0]), order(), NoiseSource.from_os()
        )


# The node.


def test_a_node_refuses_a_norm_that_the_rule_cannot_have_reached() -> None:
    settings = compose(
        ["mechanism=local_gaussian", "mechanism.noise_multiplier=1", "run.num_rounds=20",
         "mechanism.target_quantile=0.25", "mechanism.count_noise_std=3",
         "mechanism.clipping_norm=2", *UNLIMITED]
    )  # fmt: skip
    check_order(order(2.0), settings)
    for norm_, round in ((2.0001, 1), (1.9999, 1)):
        with pytest.raises(PrivacyError, match=r"mechanism\.clipping_norm"):
            check_order(order(norm_, round=round), settings)
    # Nine moves on: at most 9 x 0.2 x 0.25 up and 9 x 0.2 x 0.75 down, in the logarithm.
    low, high = 2 * math.exp(-1.35), 2 * math.exp(0.45)
    for norm_ in (low, 1.0, 2.0, high):
        check_order(order(norm_, round=10), settings)
    for norm_ in (low * 0.999, high * 1.001, 1e5, None):
        with pytest.raises(PrivacyError, match=r"mechanism\.clipping_norm"):
            check_order(replace(order(2.0, round=10), clipping_norm=norm_), settings)


def test_c_never_leaves_the_range_that_float32_clips_in() -> None:
    made = mechanism("central_gaussian", clipping_norm=1e6)
    assert made.clipping_norms(100_000) == (1e-6, 1e6)


# Whole runs.

RUN = ["mechanism=central_gaussian", "mechanism.noise_multiplier=1", *UNLIMITED,
       "mechanism.target_quantile=0.5", "run.num_rounds=4"]  # fmt: skip


def test_the_public_record_has_each_rounds_norm_and_noise_and_no_count(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "run", *RUN)
    from fl_app import wire

    sent = {}
    for message in run.grid.train_messages():
        asked = wire.read_train(message).order
        sent[asked.round] = asked.clipping_norm
    history = run.results["history"]
    assert [row["clipping_norm"] for row in history] == [sent[r] for r in (1, 2, 3, 4)]
    assert len(set(sent.values())) > 1
    left = (1 - 1 / (2 * 2.0) ** 2) ** -0.5
    for row in history:
        assert row["noise_std_of_sum"] == pytest.approx(left * row["clipping_norm"])
        assert not any("within" in key or "count" in key for key in row)


def test_a_resumed_run_goes_on_with_the_norm_that_it_had(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    base = [*RUN, "engine.num_workers=0", f"run.output_dir={folder}"]
    first = watched_run(
        folder, settings=load_settings([*base, "run.stop_after=2"], default_directory)
    )
    resumed = load_settings([f"run.resume={folder}"], default_directory)
    second = watched_run(folder, settings=resumed)
    assert second.report.status == "completed"
    rows = [row.clipping_norm for row in second.report.history]
    assert rows[:2] == [row.clipping_norm for row in first.report.history]
    assert rows[2] != rows[0]
    assert abs(math.log(rows[2] / rows[1])) <= 0.1 * (1 + 1e-9)


def test_poisson_rounds_without_anybody_move_the_norm_by_noise_alone(tmp_path: Path) -> None:
    made = federation(
        tmp_path, "mechanism=central_gaussian", "cohort=poisson", "cohort.sampling_rate=1e-9",
        *UNLIMITED, "mechanism.noise_multiplier=1", "mechanism.target_quantile=0.5",
        "mechanism.count_noise_std=1", "federation.population=3", "run.num_rounds=3",
    ).run()  # fmt: skip
    assert [trace.answered for trace in made.traces] == [()] * 3
    assert len({made.strategy.clipping_norm, 1.0}) == 2
