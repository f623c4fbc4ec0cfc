"""The classic experiment's round: 20 clients of 600 rows, one full-batch DP step each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app.client_round import client_partition
from fl_app.engines.local import LocalGrid
from fl_app.models import flat_parameters, set_flat_parameters
from fl_app.overrides import compose
from fl_app.settings import Settings
from fl_app.training._batches import fetch
from tests.bench._core import Options, Ratio, Work
from tests.bench._rounds import load, network, order_of, passes, relative_error, summed
from tests.bench._training import CPU, mnist_or_synthetic

POPULATION, COHORT, WORKERS = 100, 20, 2
LEARNING_RATE = 0.1
SAME = 1e-4
"""Largest relative difference between the summed updates of both."""


@contextmanager
def _work(options: Options) -> Iterator[Work]:
    private, exact = noisy(options), without_noise(options)
    data = load(private)
    model, exact_model = network(private, data), network(exact, data)
    global_P = flat_parameters(model)
    clients = [client_partition(c, private, data) for c in range(COHORT)]
    batches = [fetch(client.table, client.rows, CPU) for client in clients]
    rows = len(data.train.labels) // POPULATION
    with LocalGrid(WORKERS, WORKERS) as grid:

        def check() -> None:
            order = order_of(exact, rows)
            got_P = summed(grid, exact, exact_model, order, range(COHORT)).sum_P
            error = relative_error(got_P, _plain_round(exact_model, global_P, batches))
            assert error <= SAME, f"differs from plain SGD by {error:.1e}"

        yield Work(
            ours=lambda: summed(grid, private, model, order_of(private, rows), range(COHORT)),
            baseline=lambda: _plain_round(model, global_P, batches),
            check=check,
            profile=lambda: passes(model, batches, WORKERS),
        )


def noisy(options: Options) -> Settings:
    """Returns the classic experiment with noise multiplier 1."""
    return _settings(options, clipping_norm=1.0, noise_multiplier=1.0, dropout=0.5)


def without_noise(options: Options) -> Settings:
    """Returns it without noise, clipping and dropout: every way to do it gives the same model."""
    return _settings(options, clipping_norm=1e6, noise_multiplier=0.0, dropout=0.0)


def _settings(
    options: Options, *, clipping_norm: float, noise_multiplier: float, dropout: float
) -> Settings:
    return compose(
        [
            "experiment=wenzhu_gaussian_pld",
            *mnist_or_synthetic(options.tiny),
            "privacy.target_epsilon=null",
            f"training.noise_multiplier={noise_multiplier}",
            f"training.clipping_norm={clipping_norm}",
            f"training.learning_rate={LEARNING_RATE}",
            f"model.dropout={dropout}",
        ]
    )


def _plain_round(
    model: nn.Module, global_P: np.ndarray, batches: list[list[torch.Tensor]]
) -> np.ndarray:
    """A plain PyTorch loop over the clients without DP: the sum of one full-batch step of each."""
    total_P = np.zeros_like(global_P)
    for inputs, labels in batches:
        set_flat_parameters(model, global_P)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        total_P += flat_parameters(model) - global_P
    set_flat_parameters(model, global_P)
    return total_P


BENCHMARK = Ratio(
    title="classic round: 20 clients of 600 rows, one full-batch DP step, cnn, local engine",
    baseline="plain PyTorch loop without DP",
    target=0.7,
    threads=2,
    work=_work,
)
