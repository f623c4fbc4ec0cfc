"""Server optimizers against their papers' formulas, written out independently."""

import numpy as np
import pytest
import torch

from fl_app.plugins import ServerOptimizer
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


@pytest.mark.parametrize(
    "optimizer",
    [
        ServerSgd(learning_rate=0.5),
        ServerMomentum(learning_rate=0.5, momentum=0.9),
        ServerAdam(learning_rate=0.5, beta1=0.9, beta2=0.99, tau=1e-3),
    ],
)
def test_long_vectors_are_moved_as_their_pieces_are(optimizer: ServerOptimizer) -> None:
    means = np.random.default_rng(0).normal(size=(2, 100_000))
    whole, state = np.ones(100_000), optimizer.start(100_000)
    pieces, states = np.ones((100, 1000)), [optimizer.start(1000) for _ in range(100)]
    for mean in means:
        optimizer.step(whole, mean, state)
        for i, piece in enumerate(mean.reshape(100, 1000)):
            optimizer.step(pieces[i], piece, states[i])
    np.testing.assert_array_equal(whole, pieces.ravel())
    for name, vector in state.items():
        np.testing.assert_array_equal(vector, np.concatenate([s[name] for s in states]))
