"""S11, S12: noise of a million parameters, exactly once and only where configured.

False alarms: 1e-6 a check. P = 1e6: |std / (z C) - 1| < 0.0035, |mean| < 0.0049 z C.
"""

import numpy as np
import pytest
from exact_intervals import (
    is_laplace,
    is_normal,
    is_uncorrelated,
    mean_within,
    scale_within,
    std_within,
)

from fl_app import plugins
from fl_app.plugins import Mechanism
from fl_app.rng import NoiseSource, noise_source
from fl_app.stages import CohortSum, LocalUpdate, PrivatizedUpdate, RoundOrder

P = 1_000_000
Z, C = 1.5, 2.0
PROTECTION = plugins.build("protection", {"kind": "none"})


def mechanism(kind: str) -> Mechanism:
    # Other values than the order's: the order counts (rule 4).
    values = {"kind": kind, "noise_multiplier": 9.0, "clipping_norm": 9.0}
    made: Mechanism = plugins.build("mechanism", values)
    return made


def order(round: int = 1) -> RoundOrder:
    return RoundOrder(
        round=round,
        clipping_norm=C,
        noise_multiplier=Z,
        training_noise_multiplier=None,
        nominal_rows=1,
    )


def zero_update(client: int) -> LocalUpdate:
    return LocalUpdate(
        client=client, delta_P=np.zeros(P, np.float32), num_noisy_steps=0, num_examples=3
    )


def privatize(kind: str, client: int, round: int = 1) -> PrivatizedUpdate:
    noise = noise_source("mechanism", round, client, seed=None)
    return mechanism(kind).privatize(zero_update(client), order(round), noise)


def released_sum(kind: str, num_clients: int, expected_cohort: float = 4.0) -> np.ndarray:
    node = [PROTECTION.protect([privatize(kind, c)], 1) for c in range(num_clients)]
    total: CohortSum = PROTECTION.combine(node, P, 1)
    release = mechanism(kind).release(total, order(), expected_cohort, NoiseSource.from_os())
    return np.asarray(release.mean_P * expected_cohort)


def check(noise: np.ndarray, std: float) -> None:
    assert mean_within(noise, std)
    assert std_within(noise, std)
    assert is_normal(noise, std)
    # Negative control: the same noise, a tenth larger, is noticed by both checks of scale.
    assert not std_within(noise * 1.1, std)
    assert not is_normal(noise * 1.1, std)


@pytest.mark.parametrize("num_clients", [0, 3])
def test_s11_central_noise_of_the_sum_is_z_c_whatever_number_answers(num_clients: int) -> None:
    check(released_sum("central_gaussian", num_clients), Z * C)


def test_s11_central_clients_add_nothing() -> None:
    assert not privatize("central_gaussian", 0).vector_P.any()


def test_s11_local_noise_of_each_client_is_z_c() -> None:
    check(privatize("local_gaussian", 0).vector_P, Z * C)


@pytest.mark.parametrize("num_clients", [1, 4])
def test_s11_local_noise_of_the_sum_is_z_c_for_each_answer_and_no_more(num_clients: int) -> None:
    check(released_sum("local_gaussian", num_clients), Z * C * num_clients**0.5)


def test_s11_local_server_adds_nothing() -> None:
    assert not released_sum("local_gaussian", 0).any()


def test_s12_clients_rounds_and_repetitions_are_independent() -> None:
    noises = [
        privatize("local_gaussian", *who).vector_P for who in [(0, 1), (1, 1), (0, 2), (0, 1)]
    ]
    for i, first in enumerate(noises):
        for second in noises[i + 1 :]:
            assert is_uncorrelated(first, second)
    # Negative control: a hundredth of another client's noise is noticed.
    assert not is_uncorrelated(noises[0], noises[1] + 0.01 * noises[0])


# Laplace: scale z C (P = 1e6: |scale / (z C) - 1| < 0.0049), never the std.


def check_laplace(noise: np.ndarray) -> None:
    assert scale_within(noise, Z * C)
    assert is_laplace(noise, Z * C)
    assert not scale_within(noise * 1.1, Z * C)
    assert not scale_within(noise / 2**0.5, Z * C)  # z C taken for the std
    assert not is_normal(noise, Z * C * 2**0.5)


@pytest.mark.parametrize("num_clients", [0, 3])
def test_s11_central_laplace_scale_of_the_sum_is_z_c_whatever_number_answers(
    num_clients: int,
) -> None:
    check_laplace(released_sum("central_laplace", num_clients))
    assert not privatize("central_laplace", 0).vector_P.any()


def test_s11_local_laplace_scale_of_each_client_is_z_c_and_the_server_adds_nothing() -> None:
    first, second = (privatize("local_laplace", c).vector_P for c in (0, 1))
    check_laplace(first)
    assert is_uncorrelated(np.sign(first), np.sign(second))
    # Two Laplaces have the variance 2 (z C)^2 each; the sum of 1e6 fourth powers sets the width:
    # the std of the sample variance is sqrt(3.5) of it / 1000, 4.9 such stds are 1e-6.
    variance = float(np.mean(released_sum("local_laplace", 2) ** 2))
    assert abs(variance / (4 * (Z * C) ** 2) - 1) < 4.9 * 3.5**0.5 / 1000
    assert not released_sum("local_laplace", 0).any()
