"""Noise shares of a whole federation: exactly z C at the fewest honest survivors (rule 4).

False alarms: 1e-6 a check. P = 2^18: |std / (z C) - 1| < 0.007.
"""

import math

import numpy as np
import pytest
from exact_intervals import is_normal, is_uncorrelated, mean_within, std_within

from fl_app import plugins
from fl_app.mechanisms._distributed import DistributedMechanism
from fl_app.rng import NoiseSource, noise_source
from fl_app.stages import LocalUpdate, PrivatizedUpdate, RoundOrder

P = 2**18
Z, C, SCALE = 1.5, 2.0, 200.0
SURVIVORS, COLLUDERS = 6, 2
KINDS = ["distributed_discrete_gaussian", "distributed_skellam"]
PROTECTION = plugins.build("protection", {"kind": "none"})
ORDER = RoundOrder(
    round=1,
    clipping_norm=C,
    noise_multiplier=Z,
    training_noise_multiplier=None,
    nominal_rows=1,
)


def mechanism(kind: str) -> DistributedMechanism:
    made: DistributedMechanism = plugins.build(
        "mechanism",
        {
            "kind": kind, "noise_multiplier": 9.0, "clipping_norm": C, "bits": 20,
            "min_survivors": SURVIVORS, "assumed_colluders": COLLUDERS, "scale": SCALE,
        },
    )  # fmt: skip
    return made


def privatize(kind: str, client: int, delta: np.ndarray | None = None) -> PrivatizedUpdate:
    vector = np.zeros(P, np.float32) if delta is None else delta
    local = LocalUpdate(client=client, delta_P=vector, num_noisy_steps=0, num_examples=3)
    return mechanism(kind).privatize(local, ORDER, noise_source("test", 1, client, seed=None))


def released_sum(kind: str, num_clients: int, delta: np.ndarray | None = None) -> np.ndarray:
    sent = [PROTECTION.protect([privatize(kind, c, delta)], 1) for c in range(num_clients)]
    total = PROTECTION.combine(sent, P, 1)
    release = mechanism(kind).release(total, ORDER, 10.0, NoiseSource.from_os())
    return np.asarray(release.mean_P * 10.0)


def check(noise: np.ndarray, std: float) -> None:
    assert mean_within(noise, std)
    assert std_within(noise, std)
    assert is_normal(noise, std)
    assert not std_within(noise * 1.1, std)
    assert not is_normal(noise * 1.1, std)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_clients", [SURVIVORS, 10])
def test_rule_4_the_honest_shares_of_the_sum_reach_z_c(kind: str, num_clients: int) -> None:
    honest = SURVIVORS - COLLUDERS
    check(released_sum(kind, num_clients), Z * C * math.sqrt(num_clients / honest))


@pytest.mark.parametrize("kind", KINDS)
def test_rule_4_one_share_has_its_part_of_the_variance(kind: str) -> None:
    sent = privatize(kind, 0).vector_P.astype(np.float64)
    share = np.where(sent < 2**19, sent, sent - 2**20) / SCALE
    assert std_within(share, Z * C / math.sqrt(SURVIVORS - COLLUDERS))
    assert mean_within(share, Z * C / math.sqrt(SURVIVORS - COLLUDERS))
    assert not std_within(share, Z * C / math.sqrt(SURVIVORS))


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_two_clients_are_independent(kind: str) -> None:
    first, second = (released_sum(kind, SURVIVORS) for _ in range(2))
    assert is_uncorrelated(first, second)
    assert not is_uncorrelated(first, second + 0.1 * first)


@pytest.mark.parametrize("kind", KINDS)
def test_at_a_fine_scale_it_is_central_gaussian_of_the_same_noise(kind: str) -> None:
    delta = np.zeros(P, np.float32)
    delta[:100] = 0.2  # norm 2: not clipped
    std = Z * C * math.sqrt(SURVIVORS / (SURVIVORS - COLLUDERS))
    central = plugins.build(
        "mechanism", {"kind": "central_gaussian", "noise_multiplier": None, "clipping_norm": C}
    )
    order = RoundOrder(
        round=1, clipping_norm=C, noise_multiplier=std / C,
        training_noise_multiplier=None, nominal_rows=1,
    )  # fmt: skip
    local = LocalUpdate(client=0, delta_P=delta, num_noisy_steps=0, num_examples=3)
    plain = central.privatize(local, order, NoiseSource.from_os())
    total = PROTECTION.combine([PROTECTION.protect([plain] * SURVIVORS, 1)], P, 1)
    reference = central.release(total, order, 1.0, NoiseSource.from_os()).mean_P
    for result in (released_sum(kind, SURVIVORS, delta), reference):
        check(result - SURVIVORS * delta.astype(np.float64), std)
