"""The client-level mechanisms: who clips, who adds noise, what is divided by what."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fl_app import plugins
from fl_app.errors import PrivacyError, SettingsError
from fl_app.plugins import Mechanism
from fl_app.privacy import NoiseKind, Placement
from fl_app.rng import NoiseSource
from fl_app.stages import CohortSum, LocalUpdate, RoundOrder

ORDER = RoundOrder(
    round=3,
    clipping_norm=2.0,
    noise_multiplier=1.5,
    training_noise_multiplier=None,
    nominal_rows=100,
)
PLAIN = replace(ORDER, clipping_norm=None, noise_multiplier=None)
GAUSSIANS = ["central_gaussian", "local_gaussian"]
LAPLACES = ["central_laplace", "local_laplace"]
NOISED = [*GAUSSIANS, *LAPLACES]


def make(kind: str, **values: object) -> Mechanism:
    if kind != "none":
        values = {"noise_multiplier": None, "clipping_norm": 77.0} | values
    mechanism: Mechanism = plugins.build("mechanism", {"kind": kind, **values})
    return mechanism


def source(number: int = 0) -> NoiseSource:
    return NoiseSource.seeded_from(0, "test", number)


def update(delta: object, rows: int = 10) -> LocalUpdate:
    vector = np.asarray(delta, np.float32)
    return LocalUpdate(client=4, delta_P=vector, num_noisy_steps=0, num_examples=rows)


def total(values: object, weight: float = 1.0) -> CohortSum:
    return CohortSum(
        round=3, sum_P=np.array(values, float), weight=weight, num_answered=int(weight)
    )


def test_placement_and_noise_are_declared() -> None:
    declared = {k: (make(k).placement, make(k).noise_kind) for k in ["none", *NOISED]}
    assert declared == {
        "none": (None, None),
        "central_gaussian": (Placement.CENTRAL, NoiseKind.GAUSSIAN),
        "local_gaussian": (Placement.LOCAL, NoiseKind.GAUSSIAN),
        "central_laplace": (Placement.CENTRAL, NoiseKind.LAPLACE),
        "local_laplace": (Placement.LOCAL, NoiseKind.LAPLACE),
    }
    assert make("local_gaussian").kind == "local_gaussian"


@pytest.mark.parametrize("kind", NOISED)
@pytest.mark.parametrize(
    ("key", "value"),
    [("noise_multiplier", -1.0), ("noise_multiplier", math.nan), ("noise_multiplier", math.inf)]
    + [("clipping_norm", v) for v in (0.0, -1.0, math.nan, math.inf)],
)
def test_s08_impossible_values_are_refused_with_key_and_value(
    kind: str, key: str, value: float
) -> None:
    with pytest.raises(SettingsError, match=f"mechanism.{key}={value}"):
        make(kind, **{key: value})


def test_central_clips_to_the_order_and_adds_no_noise_at_the_client() -> None:
    private = make("central_gaussian").privatize(update([30, 40]), ORDER, source())
    np.testing.assert_allclose(private.vector_P, [1.2, 1.6], rtol=1e-6)
    assert private.vector_P.dtype == np.float32


def test_local_adds_the_orders_noise_to_the_clipped_update() -> None:
    private = make("local_gaussian").privatize(update([30, 40]), ORDER, source())
    expected = np.float64([1.2, 1.6]) + 1.5 * 2.0 * source().gaussian(2)
    np.testing.assert_allclose(private.vector_P, expected, rtol=1e-5)
    assert private.vector_P.dtype == np.float32


def test_laplace_clips_the_l1_norm_and_adds_scale_z_c() -> None:
    central = make("central_laplace").privatize(update([30, -40]), ORDER, source())
    np.testing.assert_allclose(central.vector_P, [6 / 7, -8 / 7], rtol=1e-6)
    local = make("local_laplace").privatize(update([30, -40]), ORDER, source())
    expected = np.float64([6 / 7, -8 / 7]) + 1.5 * 2.0 * source().laplace(2)
    np.testing.assert_allclose(local.vector_P, expected, rtol=1e-5)
    released = make("central_laplace").release(total([1.0, 2.0], 3), ORDER, 8.0, source())
    expected = (np.float64([1.0, 2.0]) + 1.5 * 2.0 * source().laplace(2)) / 8
    np.testing.assert_allclose(released.mean_P, expected, rtol=1e-12)
    # Told by its std, sqrt(2) times the scale.
    assert released.noise_std_of_sum == pytest.approx(3.0 * 2**0.5)
    assert released.noise_std_of_mean == pytest.approx(3.0 * 2**0.5 / 8)
    shared = make("local_laplace").release(total([1.0, 2.0], 3), ORDER, 9.0, source())
    assert shared.noise_std_of_sum == pytest.approx(3.0 * 2**0.5 * 3)


@pytest.mark.parametrize("kind", NOISED)
def test_s10_row_counts_do_not_weigh(kind: str) -> None:
    order = replace(ORDER, weighting="examples")
    weights = [
        make(kind).privatize(update([1, 2], n), order, source()).weight for n in (10, 10_000)
    ]
    assert weights == [1.0, 1.0]


@pytest.mark.parametrize("rows", [10, 10_000])
def test_s10_no_client_moves_the_average_by_more_than_c_over_expected_cohort(rows: int) -> None:
    mechanism, order = make("central_gaussian"), replace(ORDER, noise_multiplier=0.0)
    others, client = np.float64([5, 5]), update([1e9, -1e9], rows)
    with_client = total(others + mechanism.privatize(client, order, source()).vector_P)
    moved = (
        mechanism.release(with_client, order, 4.0, source()).mean_P
        - mechanism.release(total(others), order, 4.0, source()).mean_P
    )
    assert np.linalg.norm(moved) == pytest.approx(2.0 / 4.0, rel=1e-5)


@pytest.mark.parametrize("kind", ["none", *NOISED])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_s07_a_non_finite_update_becomes_zero_before_noise(kind: str, bad: float) -> None:
    mechanism, order = make(kind), PLAIN if kind == "none" else ORDER
    broken = mechanism.privatize(update([1, bad, 3]), order, source())
    zero = mechanism.privatize(update([0, 0, 0]), order, source())
    assert broken.vector_P.tobytes() == zero.vector_P.tobytes()
    assert (broken.client, broken.weight) == (zero.client, zero.weight)


@pytest.mark.parametrize("kind", NOISED)
def test_s06_a_zero_update_passes(kind: str) -> None:
    order = replace(ORDER, noise_multiplier=0.0)
    assert not make(kind).privatize(update(np.zeros(5)), order, source()).vector_P.any()


@pytest.mark.parametrize("answered", [0, 1, 8])
def test_s09_central_noise_is_the_same_whatever_number_answered(answered: int) -> None:
    sum_P = np.full(5, float(answered))
    released = make("central_gaussian").release(total(sum_P, answered), ORDER, 8.0, source())
    expected = (sum_P + 1.5 * 2.0 * source().gaussian(5)) / 8.0
    np.testing.assert_allclose(released.mean_P, expected, rtol=1e-12)
    assert (released.noise_std_of_sum, released.noise_std_of_mean) == (3.0, 0.375)


def test_s14_ten_clients_clip_2_z_1_5() -> None:
    released = make("central_gaussian").release(total([0.0], 10), ORDER, 10.0, source())
    assert released.noise_std_of_sum == pytest.approx(3.0)
    assert released.noise_std_of_mean == pytest.approx(0.30)


def test_local_release_adds_nothing_and_reports_the_expected_std() -> None:
    released = make("local_gaussian").release(total([6.0, 3.0], 7), ORDER, 9.0, source())
    np.testing.assert_allclose(released.mean_P, [6 / 9, 3 / 9])
    assert released.noise_std_of_sum == pytest.approx(3.0 * 3)
    assert released.noise_std_of_mean == pytest.approx(1.0)


@pytest.mark.parametrize("kind", NOISED)
def test_s17_clip_only_adds_nothing_and_says_so(kind: str) -> None:
    mechanism, order = make(kind), replace(ORDER, noise_multiplier=0.0)
    private = mechanism.privatize(update([0.5, -0.25]), order, source())
    assert private.vector_P.tolist() == [0.5, -0.25]
    released = mechanism.release(total([0.5, -0.25]), order, 1.0, source())
    assert released.mean_P.tolist() == [0.5, -0.25]
    assert (released.noise_std_of_sum, released.noise_std_of_mean) == (0.0, 0.0)


@pytest.mark.parametrize("kind", ["none", *NOISED])
def test_rule_6_no_un_noised_sum_stays_behind(kind: str) -> None:
    cohort_sum = total([1.0, 2.0])
    released = make(kind).release(cohort_sum, PLAIN if kind == "none" else ORDER, 4.0, source())
    assert released.mean_P is cohort_sum.sum_P
    assert released.round == 3


@pytest.mark.parametrize("kind", NOISED)
@pytest.mark.parametrize("missing", ["clipping_norm", "noise_multiplier"])
def test_an_order_without_c_or_z_is_refused(kind: str, missing: str) -> None:
    order = replace(ORDER, **{missing: None})
    with pytest.raises(PrivacyError, match=f"order.{missing}=null"):
        make(kind).release(total([0.0]), order, 1.0, source())


@pytest.mark.parametrize("kind", NOISED)
@pytest.mark.parametrize("expected_cohort", [0.0, -1.0, math.nan])
def test_an_impossible_divisor_is_refused(kind: str, expected_cohort: float) -> None:
    with pytest.raises(PrivacyError, match="expected_cohort="):
        make(kind).release(total([0.0]), ORDER, expected_cohort, source())


def test_none_passes_updates_with_weight_one_or_row_count() -> None:
    vector, weighted = update([30, 40], rows=12), replace(PLAIN, weighting="examples")
    plain = make("none").privatize(vector, PLAIN, source())
    assert (plain.vector_P.tolist(), plain.weight) == ([30, 40], 1.0)
    assert make("none").privatize(vector, weighted, source()).weight == 12.0


def test_none_releases_the_mean_over_the_weight_that_answered() -> None:
    released = make("none").release(total([6.0, 3.0], weight=3), PLAIN, 100.0, source())
    assert released.mean_P.tolist() == [2.0, 1.0]
    assert released.noise_std_of_sum == 0.0


def test_none_releases_zero_when_nobody_answered() -> None:
    released = make("none").release(total([0.0, 0.0], weight=0), PLAIN, 10.0, source())
    assert released.mean_P.tolist() == [0.0, 0.0]
