"""The classic round in the way of Flower's Opacus example, at the Message API of Flower 1.42.

One SuperNode per client. A client puts its rows into a ``DataLoader``, loads the parameters, makes
model, optimizer and loader private, trains one epoch and asks the accountant what it cost. As in
the example the dataset stays in the worker process; unlike there its rows are tensors already.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from opacus import PrivacyEngine
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_app.client_round import client_partition
from fl_app.settings import Settings
from fl_app.stages import LoadedData
from fl_app.training._batches import fetch
from tests.bench._rounds import load, network
from tests.bench._training import CPU
from tests.bench.classic_round import COHORT, LEARNING_RATE, POPULATION, WORKERS

DELTA = 1e-5
Ask = Callable[[dict[str, torch.Tensor], Settings], tuple[dict[str, torch.Tensor], dict[str, Any]]]
client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of a client in one batch of all its rows."""
    settings, data = _loaded(str(message.content["config"]["settings"]))
    client = client_partition(int(context.node_config["partition-id"]), settings, data)
    rows = TensorDataset(*fetch(client.table, client.rows, CPU))
    model = network(settings, data)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    engine = PrivacyEngine()  # with its own choice of accountant, PRV
    private_model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        data_loader=DataLoader(rows, batch_size=len(rows), shuffle=True),
        noise_multiplier=settings.training.noise_multiplier,
        max_grad_norm=settings.training.clipping_norm,
    )
    steps = trained = 0
    for inputs, labels in loader:
        optimizer.zero_grad()
        cross_entropy(private_model(inputs), labels).backward()
        optimizer.step()
        steps, trained = steps + 1, trained + len(labels)
    metrics = {
        "num-examples": len(rows),
        "client": client.client,
        "steps": steps,
        "rows": trained,
    }
    if settings.training.noise_multiplier:  # Opacus' accountant takes no zero
        metrics["epsilon"] = float(engine.get_epsilon(DELTA))
    records = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(records), reply_to=message)


@cache
def _loaded(text: str) -> tuple[Settings, LoadedData]:
    warnings.simplefilter("ignore")
    settings = Settings.from_mapping(json.loads(text))
    return settings, load(settings)


@contextmanager
def flower() -> Iterator[Ask]:
    """Yields what runs a round from a model: the new model, and each client's metrics in lists.

    The simulation runs in a process of its own, with `WORKERS` actors of one core.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_simulate, args=(there,))
    process.start()
    there.close()  # so that the end of the process is an EOFError here

    def ask(
        model: dict[str, torch.Tensor], settings: Settings
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        here.send((model, settings.to_wire()))
        answer: tuple[dict[str, torch.Tensor], dict[str, Any]] = here.recv()
        return answer

    try:
        yield ask
    finally:
        here.close()
        process.join()


def _simulate(asked: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    # By default the actors give way to every other program.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=COHORT / POPULATION,
            fraction_evaluate=0.0,
            min_available_nodes=POPULATION,
            train_metrics_aggr_fn=_listed,
        )
        while True:
            try:
                model, settings = asked.recv()
            except EOFError:
                return
            config = ConfigRecord({"settings": settings})
            result = strategy.start(grid, ArrayRecord(model), num_rounds=1, train_config=config)
            metrics = dict(result.train_metrics_clientapp[1])
            asked.send((result.arrays.to_torch_state_dict(), metrics))

    run_simulation(
        server_app,
        client_app,
        num_supernodes=POPULATION,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"address": "local", "num_cpus": WORKERS},
        },
    )


def _listed(replies: list[RecordDict], _: str) -> MetricRecord:
    """Returns every metric as the list of the clients' values."""
    metrics = [reply.metric_records["metrics"] for reply in replies]
    return MetricRecord({key: [m[key] for m in metrics] for key in metrics[0]})
