"""Server optimizers against their papers' formulas, written out independently."""

import numpy as np
import torch

from strategies.server_optimizers.adam import ServerAdam
from strategies.server_optimizers.momentum import ServerMomentum
from strategies.server_optimizers.sgd import ServerSgd

MEANS = [np.array([1.0, -2.0, 0.5]), np.array([0.0, 1.0, 1.0]), np.array([-1.0, 0.0, 2.0])]


def moved_by(optimizer: object) -> np.ndarray:
    parameters = np.zeros(3)
    state = optimizer.start(3)  # type: ignore[attr-defined]
    for mean in MEANS:
        before = mean.copy()
        optimizer.step(parameters, mean, state)  # type: ignore[attr-defined]
        assert (mean == before).all()
    return parameters


def test_sgd_with_rate_one_is_fedavg() -> None:
    np.testing.assert_allclose(moved_by(ServerSgd(learning_rate=1.0)), sum(MEANS))


def test_momentum_equals_torch_sgd_on_the_negative_mean() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    reference = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    for mean in MEANS:
        parameter.grad = -torch.from_numpy(mean)
        reference.step()
    ours = moved_by(ServerMomentum(learning_rate=0.5, momentum=0.9))
    np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-12)


def test_adam_follows_fedadam_without_bias_correction() -> None:
    # First step by hand: m = 0.1 d, v = 0.99 tau^2 + 0.01 d^2, x = lr m / (sqrt(v) + tau).
    optimizer = ServerAdam(learning_rate=0.1, beta1=0.9, beta2=0.99, tau=1e-3)
    parameters, mean = np.zeros(3), MEANS[0]
    optimizer.step(parameters, mean, optimizer.start(3))
    expected = 0.1 * 0.1 * mean / (np.sqrt(0.99e-6 + 0.01 * mean**2) + 1e-3)
    np.testing.assert_allclose(parameters, expected, rtol=1e-12)


def test_vectors_of_several_blocks_are_moved_as_a_whole() -> None:
    mean = np.random.default_rng(0).normal(size=40_000)
    parameters = np.ones(40_000)
    ServerSgd(learning_rate=0.5).step(parameters, mean, {})
    np.testing.assert_array_equal(parameters, 1 + 0.5 * mean)
