"""One round at a node: asked clients train and are privatized; only the protected sum leaves."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import secrets
import traceback
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from fl_app import rng
from fl_app.accounting.node_charge import request_events
from fl_app.client_policy import Node
from fl_app.errors import (
    BudgetError,
    DpflError,
    FederationError,
    LedgerError,
    PrivacyError,
    ProtocolError,
)
from fl_app.models import build_model, flat_parameters, num_parameters, set_flat_parameters
from fl_app.node_policy import order_of
from fl_app.partitioners import split_of
from fl_app.plugins import TrainingJob
from fl_app.privacy import PrivacyUnit
from fl_app.settings import Settings
from fl_app.stages import (
    ClientPartition,
    FloatVector,
    InputSpec,
    LoadedData,
    LocalUpdate,
    PrivatizedUpdate,
    ProtectedUpdate,
    RoundOrder,
)
from fl_app.wire import BUDGET_EXHAUSTED, FAILED, LEDGER, REFUSED, TrainRequest

log = logging.getLogger("dpfl")

_ROUNDING = 1e-12
"""How far the same power or exponential may differ between two machines."""


def run_node(request: TrainRequest, node: Node) -> ProtectedUpdate:
    """Returns the protected sum over the hosted clients that were asked and could train.

    A client whose training raises is left out like an absent one; the cause stays in the node's
    log. The node's own ledger is charged, durably, before anybody trains: for every asked client,
    whether it then trains or not.

    Raises:
        DpflError: the request breaks the node's policy, its budget does not allow it or its ledger
            cannot be written, or nobody could train.
    """
    settings = worker_settings(request.settings)
    node.check(settings, request.order)
    check_order(request.order, settings)
    node.check_clients(request.clients, settings.federation.population)
    data = worker_data(request.settings, node)
    model = worker_model(request.settings, node)
    model.load_state_dict(request.model, strict=True)
    global_P = flat_parameters(model)
    node.policy.check(settings, request.order, global_P.size)
    if (ledger := node.ledger) is not None:
        # After all that may stand in the way, before anything that depends on a record leaves.
        events = request_events(settings, request.order, global_P.size)
        ledger.charge(events * len(request.clients))
    failures: list[str] = []

    def train_all() -> Iterator[PrivatizedUpdate]:
        for client in request.clients:
            try:
                update = run_client(client, settings, request.order, model, global_P, data, node)
            except Exception as error:  # one client's fault must not silence the others
                log.warning("client %d left out:\n%s", client, traceback.format_exc())
                failures.append(public_cause(error, node))
            else:
                yield update

    updates = train_all()
    first = next(updates, None)
    if first is None:
        raise FederationError(f"no client of node {node.partition_id} could train: {failures[:1]}")
    return settings.protection.protect(itertools.chain([first], updates), request.order.round)


def check_order(order: RoundOrder, settings: Settings) -> None:
    """Refuses an order that asks for other noise, clipping or weights than the settings say.

    Example weights would send a private row count along with a private update (rule 12).
    Of adaptive clipping a node can verify how far C can have moved by then, not the noised counts
    that moved it. What a round costs does not depend on C: its noise grows with it.

    Raises:
        PrivacyError: the order's numbers are not those of the settings.
    """
    of_round = functools.partial(settings.noise_multiplier_in, round=order.round)
    multipliers = (
        (
            "mechanism.noise_multiplier",
            order.noise_multiplier,
            of_round(PrivacyUnit.CLIENT),
            settings.client_level,
        ),
        (
            "training.noise_multiplier",
            order.training_noise_multiplier,
            of_round(PrivacyUnit.RECORD),
            settings.training.private,
        ),
    )
    for key, asked, agreed, noised in multipliers:
        if not _same(asked, agreed):
            raise PrivacyError(
                f"{key}={asked} asked in round {order.round}: the settings say {agreed}; "
                "the node does not train"
            )
        if asked is None and noised:
            raise PrivacyError(
                f"{key}=null asked in round {order.round}: the noise of a release must be a "
                "number; the node does not train"
            )
    if order.weighting != settings.federation.weighting:
        raise PrivacyError(
            f"federation.weighting={order.weighting} asked in round {order.round}: the settings "
            f"say {settings.federation.weighting}; the node does not train"
        )
    _check_norm(order, settings.mechanism.clipping_norms(order.round))


def _check_norm(order: RoundOrder, allowed: tuple[float, float] | None) -> None:
    asked = order.clipping_norm
    if asked is None or allowed is None:
        within = asked is None and allowed is None
    else:
        within = allowed[0] * (1 - _ROUNDING) <= asked <= allowed[1] * (1 + _ROUNDING)
    if not within:
        said = None if allowed is None else " to ".join(f"{norm:g}" for norm in sorted({*allowed}))
        raise PrivacyError(
            f"mechanism.clipping_norm={asked} asked in round {order.round}: the settings say "
            f"{said}; the node does not train"
        )


def _same(asked: float | None, agreed: float | None) -> bool:
    """Returns whether two numbers are one, up to the last digits of another machine's power."""
    if asked is None or agreed is None:
        return asked is agreed
    return math.isclose(asked, agreed, rel_tol=_ROUNDING)


def run_client(
    client: int,
    settings: Settings,
    order: RoundOrder,
    model: nn.Module,
    global_P: FloatVector,
    data: LoadedData,
    node: Node,
) -> PrivatizedUpdate:
    """Returns one client's update as it may leave the client.

    Guarantee: the result depends on the client's rows only through `Training.train` (record-level
    privacy, if chosen; under placement central a bounded sum, which the server noises) and
    `Mechanism.privatize` (clipped to ``order.clipping_norm``; noised if LOCAL or DISTRIBUTED).

    Args:
        client: the client's number.
        settings: what both sides agreed on.
        order: the round's public numbers.
        model: the worker's model; its parameters are overwritten.
        global_P: [P] the global parameters of this round.
        data: the node's dataset.
        node: the node's own configuration.
    """
    seed, round = settings.run.seed, order.round
    noise_seed = seed if settings.run.seeded_noise else None
    set_flat_parameters(model, global_P)
    partition = client_partition(client, settings, data)
    job = TrainingJob(
        noise_multiplier=order.training_noise_multiplier,
        nominal_rows=order.nominal_rows,
        batches=_batch_stream(seed, order, client, node),
        noise=rng.noise_source("record-noise", round, client, seed=noise_seed),
        device=device(settings.run.device),
        round=round,
    )
    update = _train(settings, model, global_P, partition, job)
    noise = rng.noise_source("client-noise", round, client, seed=noise_seed)
    return settings.mechanism.privatize(update, order, noise)


def _train(
    settings: Settings,
    model: nn.Module,
    global_P: FloatVector,
    partition: ClientPartition,
    job: TrainingJob,
) -> LocalUpdate:
    """Returns the local update; a private client trains without rows if it cannot with them.

    Guarantee: an error that depends on the client's rows changes nothing that others can see but
    the privatized update itself (rules 2 and 12). What fails without any row is no secret.
    """
    try:
        return settings.training.train(model, partition, job)
    except Exception:
        if not (settings.training.private or settings.client_level):
            raise
        log.warning(
            "client %d trains without its rows:\n%s", partition.client, traceback.format_exc()
        )
    set_flat_parameters(model, global_P)
    without = dataclasses.replace(partition, rows=partition.rows[:0])
    update = settings.training.train(model, without, job)
    return dataclasses.replace(update, num_examples=len(partition.rows))


def client_partition(client: int, settings: Settings, data: LoadedData) -> ClientPartition:
    """Returns the rows of one client."""
    if settings.partition.by == "node":
        rows = np.arange(len(data.train.labels))
        return ClientPartition(client=client, table=data.train, rows=rows)
    rows = split_of(settings, data)[client]
    return ClientPartition(client=client, table=data.train, rows=rows)


def check_node(settings_json: str, node: Node) -> None:
    """Loads everything a round needs, so that what is wrong shows before the first round.

    Raises:
        DpflError: the settings, the node's policy, the data or the model stand in the way.
    """
    settings = worker_settings(settings_json)
    node.check(settings)
    model = worker_model(settings_json, node)
    if (ledger := node.ledger) is not None:
        ledger.check(request_events(settings, order_of(settings), num_parameters(model)))
    client_partition(0, settings, worker_data(settings_json, node))  # splits all of them


@functools.lru_cache(maxsize=4)
def worker_settings(settings_json: str) -> Settings:
    """Returns the checked settings in a message; built once per process."""
    return Settings.from_mapping(json.loads(settings_json))


@functools.lru_cache(maxsize=2)
def worker_data(settings_json: str, node: Node) -> LoadedData:
    """Returns the node's dataset, memory-mapped; opened once per process."""
    dataset = worker_settings(settings_json).dataset
    return dataset.load(data_path=node.data_path, cache_dir=node.cache_dir)


@functools.lru_cache(maxsize=1)
def worker_model(settings_json: str, node: Node) -> nn.Module:
    """Returns the worker's one model, updated in place from client to client."""
    settings = worker_settings(settings_json)
    spec = worker_data(settings_json, node).spec
    return new_model(settings, data_spec=spec).to(device(settings.run.device))


def new_model(settings: Settings, data_spec: InputSpec) -> nn.Module:
    """Returns the freshly initialized model, the same on server and nodes."""
    private = settings.training.private or settings.client_level
    model = build_model(settings.model, data_spec, seed=settings.run.seed, private=private)
    settings.training.check_model(model, data_spec)
    return model


def device(name: str) -> torch.device:
    """Returns the torch device of ``run.device``; auto takes cuda or mps where there is one."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _batch_stream(seed: int, order: RoundOrder, client: int, node: Node) -> np.random.Generator:
    """Returns the stream of batch membership: repeatable in simulation, else the node's own."""
    if node.simulated:
        return rng.stream(seed, "batches", order.round, client, order.attempt)
    return np.random.default_rng(secrets.randbits(256))


def failure_code(error: Exception) -> str:
    """Returns the code that goes with `public_cause`."""
    if isinstance(error, BudgetError):
        return BUDGET_EXHAUSTED
    if isinstance(error, LedgerError):
        return LEDGER
    return REFUSED if isinstance(error, PrivacyError | ProtocolError) else FAILED


def public_cause(error: Exception, node: Node) -> str:
    """Returns what a node may tell of a failure: all in simulation, else nothing about data."""
    told = PrivacyError | ProtocolError | FederationError  # their texts never hold data
    if isinstance(error, told) or (node.simulated and isinstance(error, DpflError)):
        return str(error)
    if node.simulated:
        return "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__} (see the node's log)"
