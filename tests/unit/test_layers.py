"""One C and one z over layers: what clipping and noise by layers must come to."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from harness import UNLIMITED, composed, federation, watched_run
from statistical.exact_intervals import scale_within, std_within

from fl_app import plugins
from fl_app.accounting.plan import make_plan
from fl_app.clipping import clip_l1, clip_l2, clip_layers, split_layers
from fl_app.errors import PrivacyError, SettingsError
from fl_app.layers import FLAT, PER_LAYER, LayerShares, shares_of
from fl_app.mechanisms._additive import AdditiveMechanism
from fl_app.privacy import NoiseKind
from fl_app.rng import NoiseSource
from fl_app.stages import CohortSum, LocalUpdate, RoundOrder

GAUSSIAN, LAPLACE = NoiseKind.GAUSSIAN, NoiseKind.LAPLACE
KINDS = {
    "central_gaussian": GAUSSIAN,
    "local_gaussian": GAUSSIAN,
    "central_laplace": LAPLACE,
    "local_laplace": LAPLACE,
}
SIZES, C, Z = (7, 1, 30), 2.0, 1.5
NORMS, NOISE = (3.0, 1.0, 0.5), (1.0, 4.0, 0.25)
ORDER = RoundOrder(
    round=1, clipping_norm=C, noise_multiplier=Z, training_noise_multiplier=None, nominal_rows=1
)
WAYS = pytest.mark.parametrize(
    ("clipping", "norms"),
    [(FLAT, None), (PER_LAYER, None), (PER_LAYER, NORMS)],
    ids=["flat", "equal", "given"],
)
EVERY = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, **values: object) -> AdditiveMechanism:
    given = {"noise_multiplier": None, "clipping_norm": 77.0, "layer_sizes": SIZES} | values
    made: AdditiveMechanism = plugins.build("mechanism", {"kind": kind, **given})
    return made


def sent(mechanism: AdditiveMechanism, vector: np.ndarray) -> np.ndarray:
    """What a client with this update sends, without noise."""
    update = LocalUpdate(
        client=0, delta_P=vector.astype(np.float32), num_noisy_steps=0, num_examples=1
    )
    order = replace(ORDER, noise_multiplier=0.0)
    return np.asarray(mechanism.privatize(update, order, NoiseSource.from_os()).vector_P)


def norm(kind: str, vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector.astype(np.float64), 1 if KINDS[kind] is LAPLACE else 2))


def longest(kind: NoiseKind, shares: LayerShares) -> float:
    """By search: the longest contribution, each layer in units of its noise scale (/ z C)."""
    random, order = np.random.default_rng(0), 1 if kind is LAPLACE else 2
    noises = np.array(shares.noises or [1.0] * 3)
    if shares.norms is not None:  # any norms up to the bounds of each layer
        lengths = random.uniform(size=(10_000, 3)) * shares.norms
        lengths = np.vstack([lengths, shares.norms])
    else:  # any layers of one vector of norm 1
        lengths = np.vstack([np.abs(random.normal(size=(10_000, 3))), np.eye(3)])
        lengths /= np.linalg.norm(lengths, order, axis=1)[:, None]
    return float(np.linalg.norm(lengths / noises, order, axis=1).max())


@pytest.mark.parametrize("kind", [GAUSSIAN, LAPLACE])
@pytest.mark.parametrize("noise", [None, NOISE])
@WAYS
def test_no_contribution_is_longer_than_1_over_z_in_units_of_its_noise(
    kind: NoiseKind, clipping: str, norms: tuple[float, ...] | None, noise: tuple[float, ...] | None
) -> None:
    shares = shares_of(kind, 3, clipping, norms, noise)
    assert longest(kind, shares) == pytest.approx(1.0, rel=1e-12)
    if noise is not None and shares.noises is not None:
        np.testing.assert_allclose(np.divide(shares.noises, noise) / shares.noises[0], 1, rtol=1e-9)


def test_known_shares() -> None:
    assert shares_of(GAUSSIAN, 4, PER_LAYER, None, None).norms == pytest.approx([0.5] * 4)
    assert shares_of(LAPLACE, 4, PER_LAYER, None, None).norms == pytest.approx([0.25] * 4)
    assert shares_of(GAUSSIAN, 2, PER_LAYER, (3.0, 4.0), None).norms == pytest.approx([0.6, 0.8])
    assert shares_of(GAUSSIAN, 2, FLAT, None, (2.0, 3.0)).noises == pytest.approx([1.0, 1.5])
    assert shares_of(LAPLACE, 2, PER_LAYER, None, (1.0, 0.5)).noises == pytest.approx([1.5, 0.75])


def test_layers_compose_to_the_epsilon_of_z() -> None:
    """Source: dp-accounting. Clipped and noised by itself, each layer is a Gaussian mechanism."""
    shares = shares_of(GAUSSIAN, 3, PER_LAYER, NORMS, NOISE)
    assert shares.norms is not None
    assert shares.noises is not None
    multipliers = [Z * s / c for c, s in zip(shares.norms, shares.noises, strict=True)]
    parts = [from_gaussian_mechanism(m, value_discretization_interval=1e-4) for m in multipliers]
    together = parts[0].compose(parts[1]).compose(parts[2]).get_epsilon_for_delta(1e-5)
    whole = from_gaussian_mechanism(Z, value_discretization_interval=1e-4)
    assert together == pytest.approx(whole.get_epsilon_for_delta(1e-5), rel=1e-3)
    # Negative control: one layer with a tenth less noise is noticed.
    less = from_gaussian_mechanism(0.9 * multipliers[0], value_discretization_interval=1e-4)
    wrong = less.compose(parts[1]).compose(parts[2]).get_epsilon_for_delta(1e-5)
    assert wrong > whole.get_epsilon_for_delta(1e-5) * 1.005


def test_laplace_layers_add_up_to_pure_epsilon_1_over_z() -> None:
    shares = shares_of(LAPLACE, 3, PER_LAYER, NORMS, NOISE)
    spent = [c / (Z * s) for c, s in zip(shares.norms or (), shares.noises or (), strict=True)]
    assert sum(spent) == pytest.approx(1 / Z, rel=1e-12)


# --- clipping


@EVERY
@pytest.mark.parametrize("norms", [None, NORMS])
def test_every_layer_has_its_own_bound_and_all_together_c(
    kind: str, norms: tuple[float, ...] | None
) -> None:
    mechanism = make(kind, clipping=PER_LAYER, layer_norms=norms)
    shares = shares_of(KINDS[kind], 3, PER_LAYER, norms, None)
    got = sent(mechanism, np.random.default_rng(1).normal(size=38) * 1e4)
    for part, share in zip(split_layers(got, SIZES), shares.norms or (), strict=True):
        assert C * share * (1 - 1e-6) < norm(kind, part) <= C * share
    assert C * (1 - 1e-6) < norm(kind, got) <= C * (1 + 1e-12)


@EVERY
def test_by_brute_force_no_client_moves_the_sum_by_more_than_c(kind: str) -> None:
    """Updates of all sizes, some of them in one layer only: left out in turn, the sum moves."""
    mechanism, random = make(kind, clipping=PER_LAYER, layer_norms=NORMS), np.random.default_rng(2)
    updates = [random.normal(size=38) * 10.0**e for e in range(-4, 9)]
    for start, stop in ((0, 7), (7, 8), (8, 38)):
        alone = np.zeros(38)
        alone[start:stop] = 1e5
        updates.append(alone)
    vectors = [sent(mechanism, u).astype(np.float64) for u in updates]
    total = np.sum(vectors, axis=0)
    moved = [
        norm(kind, total - np.sum([w for w in vectors if w is not v], axis=0)) for v in vectors
    ]
    assert max(moved) <= C * (1 + 1e-9)
    assert max(moved) > C * (1 - 1e-5)  # the bound is reached


def test_a_small_layer_keeps_its_update_where_one_norm_would_shrink_it() -> None:
    vector = np.concatenate([np.full(7, 0.1), [0.0], np.full(30, 1e6)])
    by_layer = sent(make("central_gaussian", clipping=PER_LAYER), vector)
    np.testing.assert_array_equal(by_layer[:7], np.float32(0.1))
    assert abs(sent(make("central_gaussian", layer_sizes=None), vector)[0]) < 1e-6


@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_s07_one_non_finite_element_makes_every_layer_zero(kind: str, bad: float) -> None:
    vector = np.ones(38)
    vector[-1] = bad
    assert not sent(make(kind, clipping=PER_LAYER), vector).any()


@EVERY
def test_s06_zero_stays_zero_and_what_is_within_is_unchanged(kind: str) -> None:
    mechanism = make(kind, clipping=PER_LAYER)
    assert not sent(mechanism, np.zeros(38)).any()
    small = np.full(38, 1e-3)
    small[7] = -0.0
    assert sent(mechanism, small).tobytes() == small.astype(np.float32).tobytes()


def test_sizes_of_another_model_are_refused() -> None:
    for clip in (clip_l1, clip_l2):
        with pytest.raises(PrivacyError, match="layer sizes add up to 3"):
            clip_layers(np.ones(4, np.float32), (1, 2), (1.0, 1.0), clip)
    with pytest.raises(PrivacyError, match="layer sizes add up to 38"):
        sent(make("central_gaussian", clipping=PER_LAYER), np.ones(39))
    noised = make("central_gaussian", layer_noise=NOISE)
    total = CohortSum(round=1, sum_P=np.zeros(37), weight=0.0, num_answered=0)
    with pytest.raises(PrivacyError, match="layer sizes add up to 38"):
        noised.release(total, ORDER, 1.0, NoiseSource.from_os())


# --- noise


@EVERY
@WAYS
def test_each_layer_has_noise_of_its_own_scale(
    kind: str, clipping: str, norms: tuple[float, ...] | None
) -> None:
    """n = 30,000 a layer (2 % accepted); a false alarm is 1e-6 a check."""
    sizes = (30_000,) * 3
    mechanism = make(
        kind, clipping=clipping, layer_norms=norms, layer_noise=NOISE, layer_sizes=sizes
    )
    source, size = NoiseSource.from_os(), sum(sizes)
    zero = LocalUpdate(
        client=0, delta_P=np.zeros(size, np.float32), num_noisy_steps=0, num_examples=1
    )
    noised = np.asarray(mechanism.privatize(zero, ORDER, source).vector_P, np.float64)
    if "central" in kind:
        assert not noised.any()
        total = CohortSum(round=1, sum_P=noised, weight=0.0, num_answered=0)
        noised = mechanism.release(total, ORDER, 4.0, source).mean_P * 4.0
    shares = shares_of(KINDS[kind], 3, clipping, norms, NOISE)
    within = scale_within if KINDS[kind] is LAPLACE else std_within
    for part, share in zip(split_layers(noised, sizes), shares.noises or (), strict=True):
        assert within(part, Z * C * share)
        assert not within(part * 1.1, Z * C * share)


def test_equal_levels_are_noise_of_z_c_everywhere() -> None:
    for kind in (GAUSSIAN, LAPLACE):
        for clipping in (FLAT, PER_LAYER):
            assert shares_of(kind, 3, clipping, None, (5.0,) * 3).noises == pytest.approx([1.0] * 3)


# --- configuration


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"clipping": "layers"}, r"mechanism\.clipping=layers: must be one of flat, per_layer"),
        ({"layer_norms": NORMS}, r"mechanism\.layer_norms=.*clips layer by layer"),
        ({"layer_sizes": SIZES}, r"mechanism\.layer_sizes=.*no key of this mechanism"),
        ({"clipping": PER_LAYER, "layer_norms": (1.0, 0.0)}, r"layer_norms\[1\]=0.0"),
        ({"layer_noise": (1.0, math.nan)}, r"layer_noise\[1\]=nan"),
        ({"layer_noise": (1.0, 1e4)}, r"layer_noise\[1\]=10000.0: must be from 0.001 to 1000"),
        ({"layer_noise": NOISE, "layer_sizes": (1, 2)}, r"layer_noise=\(list of 3\).* 2 param"),
        ({"clipping": PER_LAYER, "layer_sizes": (1, 0)}, r"layer_sizes\[1\]=0"),
        ({"clipping": PER_LAYER, "target_quantile": 0.5}, r"target_quantile=0.5: adaptive"),
        ({"layer_noise": NOISE, "target_quantile": 0.5}, r"target_quantile=0.5: adaptive"),
    ],
)
def test_impossible_values_are_refused_with_their_key(values: dict[str, object], key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        make("central_gaussian", **({"layer_sizes": None} | values))


def test_a_list_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    layers = ["mechanism=central_gaussian", "mechanism.layer_noise=[1,2,3]"]
    with pytest.raises(SettingsError, match="each of the model's 2 parameter tensors"):
        watched_run(tmp_path, *layers)
    sizes = composed(*layers, "mechanism.layer_sizes=[5,6,7]", *UNLIMITED,
                     "mechanism.noise_multiplier=1")  # fmt: skip
    with pytest.raises(SettingsError, match="adds up to 18 parameters, the model has 650"):
        make_plan(sizes, num_parameters=650)


def test_layers_change_nothing_that_is_charged_or_calibrated() -> None:
    base = ["mechanism=central_gaussian", "cohort=poisson", "privacy.target_epsilon=3"]
    by_layer = ["mechanism.clipping=per_layer", "mechanism.layer_noise=[1,2,9]",
                "mechanism.layer_sizes=[7,1,30]"]  # fmt: skip
    flat, layered = (
        make_plan(composed(*base, *more), num_parameters=38) for more in ([], by_layer)
    )
    assert layered.events == flat.events
    assert layered.mechanism_noise_multiplier == flat.mechanism_noise_multiplier
    assert flat.signal_to_noise(38) is not None
    assert layered.signal_to_noise(38) is None  # one number would be wrong for every layer
    assert (
        "norms of 3 layers 0.5774 C; noise of 3 layers" in layered.summary()["client-level layers"]
    )


def test_a_whole_round_releases_each_layer_at_its_own_noise(tmp_path: Path) -> None:
    made = federation(
        tmp_path, "mechanism=central_gaussian", "cohort=all", *UNLIMITED, "run.num_rounds=1",
        "mechanism.noise_multiplier=1", "mechanism.layer_noise=[1,3]",
        "mechanism.layer_sizes=[20000,20000]", num_parameters=40_000,
    ).run()  # fmt: skip
    (total,) = made.released_sums
    assert std_within(total[:20_000], 1.0)
    assert std_within(total[20_000:], 3.0)


@pytest.mark.parametrize("mechanism", ["central_gaussian", "local_laplace"])
def test_a_run_takes_the_layers_of_its_model(tmp_path: Path, mechanism: str) -> None:
    run = watched_run(
        tmp_path / "run", f"mechanism={mechanism}", "mechanism.clipping=per_layer",
        "mechanism.layer_noise=[1,2]",
    )  # fmt: skip
    assert run.report.status == "completed"
    assert "layer_sizes:\n  - 640\n  - 10\n" in (run.folder / "config.yaml").read_text()
