"""The noise in a DP-SGD update. P = 200,200. False alarms: 1e-6 a check.

|std / expected - 1| < 0.0078 is accepted.
"""

import numpy as np
import pytest
import torch
from exact_intervals import is_normal, is_uncorrelated, mean_within, std_within
from torch import nn

from fl_app import plugins
from fl_app.plugins import TrainingJob, Transform
from fl_app.rng import NoiseSource, stream
from fl_app.stages import ClientPartition, Table

LEARNING_RATE, RATE, NOMINAL, Z, C = 0.5, 0.2, 50, 1.3, 0.7
STD_OF_ONE_STEP = LEARNING_RATE * Z * C / (RATE * NOMINAL)


class AsTensor(Transform):
    def __call__(self, stored: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(stored)


class NoGradient(nn.Module):
    """Scores that do not depend on the parameters: every per-sample gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1000, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * 0.0


def delta(num_rows: int, local_steps: int, z: float = Z, **values: object) -> np.ndarray:
    training = plugins.build(
        "training",
        {
            "kind": "dp_sgd",
            "local_steps": local_steps,
            "batch_rate": RATE,
            "learning_rate": LEARNING_RATE,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "noise": "gaussian",
            "clipping_norm": C,
            "noise_multiplier": 99.0,
            "nominal_rows": 9999,
            "physical_batch_size": None,
        }
        | values,
    )
    table = Table(
        features=np.ones((num_rows, 1000), np.float32),
        labels=np.zeros(num_rows, np.int64),
        transform=AsTensor(),
    )
    job = TrainingJob(
        noise_multiplier=z,
        nominal_rows=NOMINAL,
        batches=stream(0, "batches"),
        noise=NoiseSource.from_os(),
        device=torch.device("cpu"),
    )
    torch.manual_seed(0)
    model = NoGradient()
    with torch.no_grad():
        # From zero, so that adding to the parameters rounds nothing away.
        for parameter in model.parameters():
            parameter.zero_()
    partition = ClientPartition(client=0, table=table, rows=np.arange(num_rows))
    return np.asarray(training.train(model, partition, job).delta_P)


@pytest.mark.parametrize("num_rows", [0, 30])
@pytest.mark.parametrize("local_steps", [1, 4])
def test_noise_std_is_learning_rate_z_c_over_the_public_batch_a_step(
    num_rows: int, local_steps: int
) -> None:
    noise, std = delta(num_rows, local_steps), STD_OF_ONE_STEP * local_steps**0.5
    assert mean_within(noise, std)
    assert std_within(noise, std)
    assert is_normal(noise, std)


def test_noise_is_added_once_whatever_the_physical_batches() -> None:
    assert std_within(delta(30, 1, physical_batch_size=2), STD_OF_ONE_STEP)


def test_the_check_notices_a_tenth_more_noise_and_a_missing_step() -> None:
    assert not std_within(delta(30, 1, z=1.1 * Z), STD_OF_ONE_STEP)
    assert not std_within(delta(30, 3), STD_OF_ONE_STEP * 4**0.5)


def test_s12_two_calls_with_equal_batches_and_torch_seed_have_independent_noise() -> None:
    assert is_uncorrelated(delta(30, 1), delta(30, 1))
