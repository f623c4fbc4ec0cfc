"""Client-level central DP: 100 clients of 60 images train one epoch, the server adds the noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import rng
from fl_app.client_round import client_partition
from fl_app.engines.local import LocalGrid
from fl_app.models import flat_parameters, set_flat_parameters
from fl_app.overrides import compose
from fl_app.settings import Settings
from fl_app.stages import ClientPartition
from fl_app.training._batches import fetch
from tests.bench._core import Options, Ratio, Work
from tests.bench._rounds import load, network, order_of, passes, relative_error, released, summed
from tests.bench._training import CPU

WORKERS, BATCH, LEARNING_RATE = 2, 20, 0.05
SAME = 1e-5
"""Largest relative difference between the new models of both."""


def settings(options: Options, *mechanism: str) -> Settings:
    """Returns 1,000 clients of 60 images; 10 generated ones of 30 if tiny."""
    tiny = ["dataset=synthetic", "dataset.num_train=300", "federation.population=10"]
    real = ["dataset=fashion_mnist", "federation.population=1000"]
    return compose(
        [
            *(tiny if options.tiny else real),
            "partition=iid",
            "model=cnn",
            "training=sgd",
            f"training.batch_size={BATCH}",
            f"training.learning_rate={LEARNING_RATE}",
            *mechanism,
            "privacy.target_epsilon=null",
        ]
    )


def central(options: Options, clipping_norm: float, noise_multiplier: float) -> Settings:
    return settings(
        options,
        "mechanism=central_gaussian",
        f"mechanism.clipping_norm={clipping_norm}",
        f"mechanism.noise_multiplier={noise_multiplier}",
    )


def cohort(options: Options) -> list[int]:
    return list(range(4 if options.tiny else 100))


@contextmanager
def _work(options: Options) -> Iterator[Work]:
    private, exact = central(options, 1.0, 1.0), central(options, 1e6, 0.0)
    data = load(private)
    model, clients = network(private, data), cohort(options)
    partitions = [client_partition(client, private, data) for client in clients]
    with LocalGrid(WORKERS, WORKERS) as grid:

        def ours(chosen: Settings = private) -> np.ndarray:
            order = order_of(chosen, nominal_rows=60)
            return released(summed(grid, chosen, model, order, clients), chosen, order)

        def check() -> None:
            start_P = flat_parameters(model)
            expected_P = start_P + _plain_round(model, partitions)
            error = relative_error(start_P + ours(exact), expected_P)
            assert error <= SAME, f"differs from plain SGD by {error:.1e}"

        yield Work(
            ours=ours,
            baseline=lambda: _plain_round(model, partitions),
            check=check,
            profile=lambda: passes(model, batches_of(partitions), WORKERS),
        )


def _plain_round(model: nn.Module, partitions: list[ClientPartition]) -> np.ndarray:
    """A plain PyTorch loop over the clients without DP: the mean of their changes [P]."""
    global_P = flat_parameters(model)
    total_P = np.zeros(global_P.shape)
    for partition in partitions:
        set_flat_parameters(model, global_P)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        rows = shuffled(partition)
        for start in range(0, len(rows), BATCH):
            inputs, labels = fetch(partition.table, rows[start : start + BATCH], CPU)
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        total_P += flat_parameters(model) - global_P
    set_flat_parameters(model, global_P)
    return np.asarray(total_P / len(partitions))


def batches_of(partitions: list[ClientPartition]) -> list[list[torch.Tensor]]:
    """Returns all batches of a round."""
    return [
        fetch(p.table, rows, CPU)
        for p in partitions
        for rows in np.split(shuffled(p), range(BATCH, len(p.rows), BATCH))
    ]


def shuffled(partition: ClientPartition) -> np.ndarray:
    """Returns the client's rows in the order of its own stream: all sides see the same batches."""
    stream = rng.stream(0, "batches", 1, partition.client, 0)
    stream.integers(2**63)  # the first draw is dropout's
    return stream.permutation(partition.rows)


BENCHMARK = Ratio(
    title="client-level round: 100 clients of 60 images, one epoch of batch 20, cnn, local engine",
    baseline="plain PyTorch loop without DP",
    target=0.45,
    threads=2,
    work=_work,
)
