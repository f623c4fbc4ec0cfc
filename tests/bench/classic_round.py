"""The classic experiment's round: 20 clients of 600 rows, one full-batch DP step each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import wire
from fl_app.client_round import client_partition
from fl_app.engines.local import SERVER_NODE_ID, LocalGrid
from fl_app.models import build_model, flat_parameters, set_flat_parameters
from fl_app.overrides import compose
from fl_app.settings import Settings
from fl_app.stages import ProtectedUpdate, RoundOrder
from fl_app.training._batches import fetch
from tests.bench._core import Options, Ratio, Work
from tests.bench._training import CPU, loaded, mnist_or_synthetic

POPULATION, COHORT, WORKERS = 100, 20, 2


@contextmanager
def _work(options: Options) -> Iterator[Work]:
    settings = _settings(options, clipping_norm=1.0, noise_multiplier=1.0, dropout=0.5)
    # Without clipping, noise and dropout both do the same.
    exact = _settings(options, clipping_norm=1e6, noise_multiplier=0.0, dropout=0.0)
    data = loaded(settings)
    model, exact_model = (
        build_model(s.model, data.spec, seed=0, private=True).train() for s in (settings, exact)
    )
    global_P = flat_parameters(model)
    clients = [client_partition(c, settings, data) for c in range(COHORT)]
    batches = [fetch(client.table, client.rows, CPU) for client in clients]
    rows = len(data.train.labels) // POPULATION
    with LocalGrid(WORKERS, WORKERS) as grid:

        def check() -> None:
            got_P = _dp_round(grid, exact, exact_model, rows)
            expected_P = _plain_round(exact_model, global_P, batches, 0.1)
            error = np.linalg.norm(got_P - expected_P) / np.linalg.norm(expected_P)
            assert error <= 1e-4, f"differs from plain SGD by {error:.1e}"

        yield Work(
            ours=lambda: _dp_round(grid, settings, model, rows),
            baseline=lambda: _plain_round(model, global_P, batches, 0.1),
            check=check,
        )


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
            f"model.dropout={dropout}",
        ]
    )


def _dp_round(grid: LocalGrid, settings: Settings, model: nn.Module, rows: int) -> np.ndarray:
    """Asks the nodes as the strategy does and returns the sum of their updates [P]."""
    order = RoundOrder(
        round=1,
        clipping_norm=None,
        noise_multiplier=None,
        training_noise_multiplier=settings.training.noise_multiplier,  # type: ignore[attr-defined]
        nominal_rows=rows,
    )
    arrays = wire.model_record(model.state_dict())
    messages = [
        wire.train_message(
            SERVER_NODE_ID + 1 + p, arrays, settings.to_wire(), order, range(p, COHORT, WORKERS)
        )
        for p in range(WORKERS)
    ]
    updates = [wire.read_train_reply(reply) for reply in grid.send_and_receive(messages)]
    assert all(isinstance(update, ProtectedUpdate) for update in updates), updates
    return np.sum([update.vector_P for update in updates], axis=0)  # type: ignore[union-attr]


def _plain_round(
    model: nn.Module, global_P: np.ndarray, batches: list[list[torch.Tensor]], learning_rate: float
) -> np.ndarray:
    """A plain PyTorch loop over the clients without DP: the sum of one full-batch step of each."""
    total_P = np.zeros_like(global_P)
    for inputs, labels in batches:
        set_flat_parameters(model, global_P)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
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
