"""The distributed integer mechanisms at one client and at the server."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fl_app import plugins
from fl_app.errors import PrivacyError, ProtocolError, SettingsError
from fl_app.mechanisms._distributed import DistributedMechanism
from fl_app.plugins import CohortSize
from fl_app.privacy import NoiseKind, Placement
from fl_app.rng import NoiseSource
from fl_app.stages import CohortSum, LocalUpdate, PrivatizedUpdate, RoundOrder

ORDER = RoundOrder(
    round=3,
    clipping_norm=2.0,
    noise_multiplier=1.5,
    training_noise_multiplier=None,
    nominal_rows=100,
)
QUIET = replace(ORDER, noise_multiplier=0.0)
KINDS = ["distributed_discrete_gaussian", "distributed_skellam"]
TEN = CohortSize(expected=10.0, largest=10)
PROTECTION = plugins.build("protection", {"kind": "none"})


def make(kind: str = KINDS[0], **values: Any) -> DistributedMechanism:
    given = {
        "noise_multiplier": None, "clipping_norm": 2.0, "min_survivors": 4,
        "assumed_colluders": 0, "bits": 20, "scale": 100.0,
    } | values  # fmt: skip
    made: DistributedMechanism = plugins.build("mechanism", {"kind": kind, **given})
    return made


def update(delta: object, client: int = 4) -> LocalUpdate:
    vector = np.asarray(delta, np.float32)
    return LocalUpdate(client=client, delta_P=vector, num_noisy_steps=0, num_examples=10)


def released(mechanism: DistributedMechanism, deltas: list[Any], order: RoundOrder) -> np.ndarray:
    """The mean of four or more clients, each on a node of its own."""
    updates = [
        mechanism.privatize(update(delta, c), order, NoiseSource.from_os())
        for c, delta in enumerate(deltas)
    ]
    protected = [PROTECTION.protect([u], order.round) for u in updates]
    size = mechanism.wire_size(len(deltas[0]))
    total = PROTECTION.combine(protected, size, order.round)
    mean = mechanism.release(total, order, float(len(deltas)), NoiseSource.from_os()).mean_P
    return np.asarray(mean[: len(deltas[0])])


@pytest.mark.parametrize("kind", KINDS)
def test_placement_noise_and_size_are_declared(kind: str) -> None:
    made = make(kind)
    assert made.placement is Placement.DISTRIBUTED
    assert made.noise_kind in (NoiseKind.DISCRETE_GAUSSIAN, NoiseKind.SKELLAM)
    assert (made.modulus, made.wire_size(650)) == (2**20, 1024)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("noise_multiplier", -1.0), ("clipping_norm", 0.0), ("min_survivors", 0),
        ("assumed_colluders", -1), ("bits", 7), ("bits", 33), ("scale", 0.0),
        ("scale", math.inf),
    ],
)  # fmt: skip
def test_s08_impossible_values_are_refused_with_key_and_value(key: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f"mechanism.{key}={value}"):
        make(**{key: value})


@pytest.mark.parametrize("kind", KINDS)
def test_what_leaves_a_client_are_integers_below_the_modulus(kind: str) -> None:
    sent = make(kind).privatize(update(np.ones(5)), ORDER, NoiseSource.from_os())
    assert sent.vector_P.dtype == np.int64
    assert sent.vector_P.shape == (8,)
    assert (sent.vector_P >= 0).all()
    assert (sent.vector_P < 2**20).all()
    assert (sent.modulus, sent.weight, sent.client) == (2**20, 1.0, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_the_mean_comes_back_up_to_the_rounding(kind: str) -> None:
    deltas = [np.array([0.3, -0.2, 0.1, 0.0, 1.0]) * (c + 1) / 4 for c in range(4)]
    made = make(kind, scale=1e5)
    np.testing.assert_allclose(released(made, deltas, QUIET), np.mean(deltas, axis=0), atol=2e-5)


def test_the_clients_are_clipped_before_rounding() -> None:
    made = make(scale=1e5, bits=24)
    far = [np.array([30.0, 40.0, 0.0])] * 4
    np.testing.assert_allclose(released(made, far, QUIET), [1.2, 1.6, 0.0], atol=5e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_s07_a_non_finite_update_is_a_zero_update(kind: str, bad: float) -> None:
    broken = make(kind).privatize(update([1, bad, 3]), ORDER, NoiseSource.seeded_from(0, "test"))
    zero = make(kind).privatize(update([0, 0, 0]), ORDER, NoiseSource.seeded_from(0, "test"))
    assert broken.vector_P.tobytes() == zero.vector_P.tobytes()


def test_a_sum_beyond_the_modulus_wraps_around_and_one_within_does_not() -> None:
    # The rotation of a one-element vector is +-1 times it. 4 x 100 is -112 modulo 256.
    deltas = [np.array([1.0])] * 4
    inside = released(make(bits=8, scale=30.0, clipping_norm=2.0), deltas, QUIET)
    np.testing.assert_allclose(inside, 1.0)
    outside = released(make(bits=8, scale=100.0, clipping_norm=2.0), deltas, QUIET)
    np.testing.assert_allclose(np.abs(outside), 112 / 400)


def test_a_negative_sum_comes_back_negative() -> None:
    deltas = [np.array([-0.5, 0.25])] * 4
    np.testing.assert_allclose(released(make(scale=1e4), deltas, QUIET), deltas[0], atol=1e-3)


def integers(values: list[int], modulus: int | None = 16) -> PrivatizedUpdate:
    kind = np.int64 if modulus else np.float32
    vector = np.array(values, kind)
    return PrivatizedUpdate(client=values[0], vector_P=vector, weight=1.0, modulus=modulus)


def test_node_and_server_sum_modulo() -> None:
    first = PROTECTION.protect([integers([1, 15, 8]), integers([2, 15, 9])], 1)
    assert first.vector_P.tolist() == [3, 14, 1]
    assert (first.vector_P.dtype, first.modulus) == (np.int64, 16)
    second = PROTECTION.protect([integers([5, 3, 15])], 1)
    assert PROTECTION.combine([first, second], 3, 1).sum_P.tolist() == [8, 1, 0]


def test_integers_of_different_moduli_are_not_summed() -> None:
    with pytest.raises(ProtocolError, match="modulus"):
        PROTECTION.protect([integers([1]), integers([1], 8)], 1)
    with pytest.raises(ProtocolError, match="modulus"):
        PROTECTION.protect([integers([1]), integers([1], None)], 1)


# The constants that the plan fills in.


def test_null_survivors_are_four_fifths_of_the_cohort_rounded_up() -> None:
    for expected, survivors in [(10.0, 8), (9.0, 8), (1.0, 1), (7.5, 6)]:
        cohort = CohortSize(expected=expected, largest=math.ceil(expected))
        made = make(min_survivors=None).resolved(1.0, 10, cohort)
        assert (made.min_survivors, made.fewest_honest) == (survivors, survivors)
    assert make(assumed_colluders=3).fewest_honest == 1


@pytest.mark.parametrize("bits", [12, 16, 24])
@pytest.mark.parametrize("z", [0.5, 5.0])
def test_a_null_scale_is_the_largest_that_fits(bits: int, z: float) -> None:
    cohort, num_parameters = CohortSize(expected=100.0, largest=100), 1000
    made = make(min_survivors=80, bits=bits, scale=None).resolved(z, num_parameters, cohort)
    assert made.scale is not None
    share_std = z * 2.0 * made.scale / math.sqrt(80)
    # The formula once more: n^2 C^2 / W of signal, shares of 100 clients, roundings of 100.
    variance = made.scale**2 * 4 * (100**2 / 1024 + 100 * z**2 / 80) + 100 / 4
    sigmas = 2 ** (bits - 1) / math.sqrt(variance)
    assert sigmas >= 6 * (1 - 1e-9)
    assert share_std <= 2048
    assert sigmas == pytest.approx(6) or share_std == pytest.approx(2048)
    made.check_run(z, num_parameters, cohort)
    with pytest.raises(SettingsError, match=r"mechanism.scale=.*must be at most"):
        replace(made, scale=made.scale * 1.01).check_run(z, num_parameters, cohort)


def test_constants_that_cannot_work_are_refused() -> None:
    with pytest.raises(SettingsError, match="min_survivors=11: must be at most the 10 clients"):
        make(min_survivors=11).resolved(1.0, 10, TEN)
    with pytest.raises(SettingsError, match="assumed_colluders=4: must be below the 4 answers"):
        make(assumed_colluders=4).resolved(1.0, 10, TEN)
    many = CohortSize(expected=1e5, largest=100_000)
    with pytest.raises(SettingsError, match="bits=8: too few for sums over 100000 clients"):
        make(bits=8, scale=None).resolved(1.0, 10, many)


def test_an_open_constant_stops_a_client_and_the_server() -> None:
    for key in ("scale", "min_survivors"):
        with pytest.raises(PrivacyError, match=f"mechanism.{key}=null"):
            make(**{key: None}).privatize(update([1.0]), ORDER, NoiseSource.from_os())


def test_another_clipping_norm_than_the_accounted_one_stops_a_client() -> None:
    order = replace(ORDER, clipping_norm=3.0)
    with pytest.raises(PrivacyError, match=r"order\.clipping_norm=3\.0"):
        make().privatize(update([1.0]), order, NoiseSource.from_os())


@pytest.mark.parametrize("answered", [0, 3])
def test_rule_4_too_few_shares_are_never_released(answered: int) -> None:
    total = CohortSum(round=3, sum_P=np.ones(4), weight=1.0 * answered, num_answered=answered)
    assert not make().can_release(answered)
    with pytest.raises(PrivacyError, match=r"mechanism\.min_survivors=4: too few answers"):
        make().release(total, ORDER, 10.0, NoiseSource.from_os())
    assert not total.sum_P.any()


def test_the_stated_stds_are_those_of_a_full_cohort() -> None:
    total = CohortSum(round=3, sum_P=np.zeros(4), weight=9.0, num_answered=9)
    done = make().release(total, ORDER, 9.0, NoiseSource.from_os())
    assert done.noise_std_of_sum == pytest.approx(1.5 * 2.0 * math.sqrt(9 / 4))
    assert done.noise_std_of_mean == pytest.approx(done.noise_std_of_sum / 9)
