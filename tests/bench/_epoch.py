"""One epoch with and without DP over part of MNIST."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import nn

from fl_app.models import build_model, num_parameters
from fl_app.overrides import compose
from fl_app.stages import ClientPartition, InputSpec
from tests.bench._core import Options, Work
from tests.bench._training import (
    BATCH,
    check_against_opacus,
    dp_epoch,
    hot_spots,
    loaded,
    mnist_or_synthetic,
    plain_epoch,
)

ROWS = 100 * BATCH


def epoch(
    make: Callable[[InputSpec], nn.Module],
) -> Callable[[Options], AbstractContextManager[Work]]:
    """Returns the preparation of an epoch with the network that `make` returns."""

    @contextmanager
    def work(options: Options) -> Iterator[Work]:
        data = loaded(compose(mnist_or_synthetic(options.tiny)))
        rows = np.arange(min(ROWS, len(data.train.labels)))
        ours, plain = make(data.spec), make(data.spec)
        client = ClientPartition(client=0, table=data.train, rows=rows)
        few = ClientPartition(client=0, table=data.train, rows=rows[:BATCH])
        yield Work(
            ours=lambda: dp_epoch(ours, client, BATCH),
            baseline=lambda: plain_epoch(plain, data.train, rows, BATCH),
            check=lambda: check_against_opacus(ours, few),
            profile=lambda: hot_spots(lambda: dp_epoch(ours, client, BATCH)),
        )

    return work


def shipped_cnn(spec: InputSpec) -> nn.Module:
    """Returns the shipped ``model=cnn``."""
    return build_model(compose(["model=cnn"]).model, spec, seed=0, private=True)


def wide_cnn(spec: InputSpec) -> nn.Module:
    """Returns two 3 x 3 convolutions of 32 and 64 channels and a hidden layer of 128."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels, outputs in ((spec.shape[0], 32), (32, 64)):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)]
    network = nn.Sequential(*layers)
    assert num_parameters(network) == 421_642
    return network
