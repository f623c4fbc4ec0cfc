"""Client-level central DP against `pfl`, Apple's simulator, on the same clients and batches.

pfl runs in this process with two threads. Its other way to use two cores, two processes of one
thread under ``torchrun``, took 2.7 s a round where this took 2.5 (medians on two cores).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app.client_round import client_partition
from fl_app.engines.local import LocalGrid
from fl_app.models import flat_parameters, num_parameters, set_flat_parameters
from fl_app.settings import Settings
from fl_app.training._batches import fetch
from tests.bench._core import PFL, Options, Ratio, Work
from tests.bench._rounds import load, network, order_of, passes, relative_error, released, summed
from tests.bench._training import CPU
from tests.bench.client_level import (
    BATCH,
    LEARNING_RATE,
    SAME,
    WORKERS,
    batches_of,
    central,
    cohort,
    shuffled,
)

Users = list[list[torch.Tensor]]


@contextmanager
def _work(options: Options) -> Iterator[Work]:
    private, exact = central(options, 1.0, 1.0), central(options, 1e6, 0.0)
    data, clients = load(private), cohort(options)
    model = network(private, data)
    start_P = flat_parameters(model)
    partitions = [client_partition(client, private, data) for client in clients]
    users = [fetch(p.table, shuffled(p), CPU) for p in partitions]
    # One network each: the rounds of pfl step its own.
    pfl, exact_pfl = (pfl_rounds(network(s, data), s, users) for s in (private, exact))
    with LocalGrid(WORKERS, WORKERS) as grid:

        def ours(chosen: Settings = private) -> np.ndarray:
            order = order_of(chosen, nominal_rows=60)
            return released(summed(grid, chosen, model, order, clients), chosen, order)

        def check() -> None:
            new_P, steps = exact_pfl()
            assert new_P.size == num_parameters(model)
            assert steps == sum(-(-len(labels) // BATCH) for _, labels in users)
            error = relative_error(start_P + ours(exact), new_P)
            assert error <= SAME, f"differs from pfl by {error:.1e}"

        yield Work(
            ours=ours,
            baseline=pfl,
            check=check,
            profile=lambda: passes(model, batches_of(partitions), WORKERS),
        )


class _Network(nn.Module):
    """The network with the loss and the metrics that pfl asks for; counts its training steps."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.steps = network, 0

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return cross_entropy(self.network(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, object]:
        from pfl.metrics import Weighted

        loss = cross_entropy(self.network(inputs), labels, reduction="sum")
        return {"loss": Weighted(loss.item(), len(labels))}


def pfl_rounds(
    network: nn.Module, settings: Settings, users: Users
) -> Callable[[], tuple[np.ndarray, int]]:
    """Returns what runs one round of all `users`: the new model [P] and the steps of all of them.

    Every round begins with the parameters that `network` has now.
    """
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism

    start_P = flat_parameters(network)
    counted = _Network(network)
    model = PyTorchModel(
        model=counted,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(counted.parameters(), lr=1.0),
    )
    turns = itertools.cycle(range(len(users)))
    dataset = FederatedDataset(lambda user: Dataset(users[user]), lambda: next(turns))
    mechanism = GaussianMechanism(
        settings.mechanism.clipping_norm,  # type: ignore[attr-defined]
        settings.mechanism.noise_multiplier,  # type: ignore[attr-defined]
    )
    backend = SimulatedBackend(
        training_data=dataset,
        val_data=dataset,
        postprocessors=[WeightByUser(), CentrallyAppliedPrivacyMechanism(mechanism)],
    )
    algorithm = FederatedAveraging()
    done = itertools.count(1)

    def round() -> tuple[np.ndarray, int]:
        set_flat_parameters(network, start_P)
        counted.steps = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A second call goes on where the first ended; pfl evaluates in the first round only.
            algorithm.run(
                NNAlgorithmParams(
                    central_num_iterations=next(done),
                    evaluation_frequency=10**9,
                    train_cohort_size=len(users),
                    val_cohort_size=None,
                ),
                backend,
                model,
                NNTrainHyperParams(
                    local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
                ),
                NNEvalHyperParams(local_batch_size=BATCH),
                send_metrics_to_platform=False,
            )
        return flat_parameters(network), counted.steps

    return round


BENCHMARK = Ratio(
    title="client-level round: 100 clients of 60 images, one epoch of batch 20, cnn, local engine",
    baseline="pfl, one process",
    target=0.5,
    threads=2,
    work=_work,
    product=PFL,
)
