"""The curve of one sampled step is that of dp-accounting, and is never below the true one."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.pld.pld_pmf import DensePLDPmf
from scipy.integrate import quad
from scipy.stats import laplace, norm

from fl_app.accounting.plan import make_plan
from fl_app.accounting.sampled_noise import _fitting, sampled_noise
from fl_app.overrides import compose
from fl_app.privacy import NoiseKind

LIBRARY = {
    NoiseKind.GAUSSIAN: library.from_gaussian_mechanism,
    NoiseKind.LAPLACE: library.from_laplace_mechanism,
}
LAW = {NoiseKind.GAUSSIAN: norm, NoiseKind.LAPLACE: laplace}
EPSILONS = (-5.0, -0.3, -0.01, 0.0, 1e-3, 0.0123, 0.1, 0.7, 3.0, 30.0)


@pytest.mark.parametrize("noise", LIBRARY)
@pytest.mark.parametrize("z", [0.1, 0.3, 0.8, 1.7, 20.0, 500.0])
@pytest.mark.parametrize("rate", [1e-4, 0.05, 0.5, 0.999])
def test_it_is_the_curve_of_the_library(noise: NoiseKind, z: float, rate: float) -> None:
    grid = 1e-2 / z
    ours = sampled_noise(noise, z, rate, grid)
    theirs = LIBRARY[noise](z, value_discretization_interval=grid, sampling_prob=rate)
    for epsilon in EPSILONS:
        expected = theirs.get_delta_for_epsilon(epsilon)
        # Below 0 deltas are near 1, and their rounding differs from processor to processor.
        near = pytest.approx(expected, rel=0, abs=1e-12 if epsilon >= 0 else 1e-10)
        assert ours.get_delta_for_epsilon(epsilon) == near
    for delta in (1e-2, 1e-5, 1e-9):
        expected = theirs.get_epsilon_for_delta(delta)
        assert ours.get_epsilon_for_delta(delta) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("noise", LIBRARY)
@pytest.mark.parametrize(("z", "rate"), [(0.7, 0.1), (1.5, 0.01), (3.0, 0.6)])
@pytest.mark.parametrize("grid", [1e-3, 0.037])
def test_no_divergence_is_below_the_true_one(
    noise: NoiseKind, z: float, rate: float, grid: float
) -> None:
    law = LAW[noise]

    def plain(x: float) -> float:
        return float(law.pdf(x, scale=z))

    def mixed(x: float) -> float:
        return (1 - rate) * plain(x) + rate * float(law.pdf(x, loc=1, scale=z))

    def divergence(upper, lower, epsilon: float) -> float:
        def over(x: float) -> float:
            return max(0.0, upper(x) - math.exp(epsilon) * lower(x))

        ends = [-30 * z, -1.0, 0.0, 0.5, 1.0, 2.0, 30 * z]
        pieces = [quad(over, a, b, limit=200, epsabs=1e-11)[0] for a, b in pairwise(ends)]
        return math.fsum(pieces)

    curve = sampled_noise(noise, z, rate, grid)
    below = 0
    for epsilon in (0.0, 0.0041, 0.0173, 0.2):
        true = max(divergence(mixed, plain, epsilon), divergence(plain, mixed, epsilon))
        got = curve.get_delta_for_epsilon(epsilon)
        assert got >= true - 1e-8
        below += got > true + 1e-4
    assert below < 4 or grid > 1e-3  # a fine grid comes near


def test_composed_curves_are_those_of_the_library() -> None:
    steps = [(z, 0.05) for z in np.geomspace(0.6, 3, 12)]
    ours = theirs = None
    for z, rate in steps:
        a = sampled_noise(NoiseKind.GAUSSIAN, z, rate, 1e-3)
        b = library.from_gaussian_mechanism(
            z, value_discretization_interval=1e-3, sampling_prob=rate
        )
        ours = a if ours is None else ours.compose(a)
        theirs = b if theirs is None else theirs.compose(b)
    assert ours is not None
    assert theirs is not None
    for delta in (1e-3, 1e-6, 1e-9):
        expected = theirs.get_epsilon_for_delta(delta)
        # A transform's rounding counts for more in the tail, and differs between processors.
        rel = 1e-8 if delta > 1e-9 else 1e-7
        assert ours.get_epsilon_for_delta(delta) == pytest.approx(expected, rel=rel)


def test_what_a_composition_cuts_off_moves_up_and_is_not_lost() -> None:
    curve = sampled_noise(NoiseKind.GAUSSIAN, 0.8, 0.1, 1e-3)._pmf_remove
    whole, cut = curve.compose(curve), curve.compose(curve, 1e-2)
    assert isinstance(whole, DensePLDPmf)
    assert cut.size < whole.size
    assert cut._probs.sum() + cut._infinity_mass == pytest.approx(1, abs=1e-9)
    assert 0 < cut._infinity_mass <= 0.5e-2
    epsilons = np.linspace(-1, 3, 9)
    assert np.all(
        cut.get_delta_for_epsilon(epsilons) >= whole.get_delta_for_epsilon(epsilons) - 1e-12
    )


@pytest.mark.parametrize(
    ("masses", "room", "expected"),
    [([0.1, 0.2, 0.3], 0.05, 0), ([0.1, 0.2, 0.3], 0.3001, 2), ([0.1, 0.2], 1.0, 2), ([], 1.0, 0)],
)
def test_how_many_masses_fit(masses: list[float], room: float, expected: int) -> None:
    assert _fitting(np.array(masses), room) == expected


@pytest.mark.parametrize("words", [["accountant=pld"], ["accountant=rdp"]])
def test_a_schedule_of_a_hundred_sampled_rounds_is_calibrated_in_seconds(words: list[str]) -> None:
    settings = compose(
        [
            *words,
            "dataset=synthetic",
            "mechanism=central_gaussian",
            "mechanism.noise_schedule=0.98",
            "cohort=poisson",
            "federation.population=1000",
            "run.num_rounds=100",
            "privacy.target_epsilon=4",
        ]
    )
    start = time.process_time()
    make_plan(settings, 100)
    assert time.process_time() - start < 10  # 1 to 3 s; the library's own curves took over 20 s
