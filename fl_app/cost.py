"""What a run will cost in seconds, bytes and memory: ``dpfl plan --cost``.

Bytes follow from the messages themselves. Seconds and memory come from a rehearsal on this machine
(`fl_app.rehearsal`) that times a few clients; from there to whole rounds it is arithmetic: a node
needs a fixed time for a message, one for each client and one for each row, and the workers share
the nodes. For the operator only, like every other timing.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from scipy.optimize import nnls

from fl_app import checks, plugins, rng, wire
from fl_app.accounting.plan import make_plan
from fl_app.client_policy import home
from fl_app.client_round import new_model
from fl_app.engines.local import LocalGrid
from fl_app.models import num_parameters
from fl_app.node_policy import order_of
from fl_app.overrides import compose_mapping
from fl_app.partitioners import split_of
from fl_app.plugins import Hosts
from fl_app.rehearsal import Findings, NodeTime, Part, Role, Script, rehearse
from fl_app.server_run import nominal_rows, with_layers, with_noise
from fl_app.settings import Settings
from fl_app.stages import (
    IndexVector,
    LoadedData,
    LocalUpdate,
    ProtectedUpdate,
    RoundOrder,
)

NOT_INCLUDED = (
    "other programs on the machine, and nodes on other machines: their speed and their network",
    "the names, settings and client numbers around the arrays of a message",
    "decoding the dataset, if this is the first time",
    "memory of a GPU",
)
_COHORTS = 64
"""Rounds whose cohorts are drawn to see how the load falls on nodes."""
_MOST_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Array bytes of a round of expected size, as the operator's log counts them."""

    sent: float
    received: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModel:
    """Seconds of a node: for a message, each client and each row of these."""

    message: float
    client: float
    row: float

    @classmethod
    def fitted(cls, times: Sequence[NodeTime]) -> NodeModel:
        """Returns the non-negative model with the least relative square errors."""
        seconds = np.array([time.seconds for time in times])
        sizes = np.array([[1.0, time.clients, time.rows] for time in times])
        # Where some clients' rows are all equal, one of the columns says it all.
        solution, _ = nnls(sizes / seconds[:, np.newaxis], np.ones(len(seconds)))
        return cls(message=solution[0], client=solution[1], row=solution[2])

    def seconds(self, clients: float, rows: float) -> float:
        """Returns the time from a message to its reply."""
        return self.message + self.client * clients + self.row * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one node is asked for in a round."""

    clients: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a run of `num_rounds` rounds costs.

    Attributes:
        hosts: nodes and workers.
        num_rounds: that the budget and ``run.stop_after`` allow.
        num_evaluations: how many of them end with an evaluation.
        clients_per_round: expected cohort.
        rows_per_client: mean.
        nodes: the fitted times of a node.
        node_seconds: of a round, until the last node has answered.
        findings: of the rehearsal.
        traffic: of a round.
        mapped_data_bytes: decoded rows, which all processes share and the system can take back.
    """

    hosts: Hosts
    num_rounds: int
    num_evaluations: int
    clients_per_round: float
    rows_per_client: float
    nodes: NodeModel
    node_seconds: float
    findings: Findings
    traffic: Traffic
    mapped_data_bytes: int

    @property
    def seconds_startup(self) -> float:
        """Seconds before the first round, with what the first one takes longer than others."""
        first = self.findings.first
        late = first.seconds - self.nodes.seconds(first.clients, first.rows)
        return self.findings.startup + max(0.0, late)

    @property
    def seconds_per_round(self) -> float:
        """Mean seconds of a round."""
        evaluation = self.findings.evaluation * self.num_evaluations / self.num_rounds
        return self.node_seconds + self.findings.server + evaluation

    @property
    def seconds_total(self) -> float:
        """Seconds of the whole run, from the command to its end."""
        rounds = self.num_rounds * self.seconds_per_round
        return self.seconds_startup + rounds + self.findings.finish

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values, each with its unit in its name."""
        found = self.findings
        return {
            "seconds_total": self.seconds_total,
            "seconds_startup": self.seconds_startup,
            "seconds_per_round": self.seconds_per_round,
            "seconds_of_nodes_per_round": self.node_seconds,
            "seconds_of_server_per_round": found.server,
            "seconds_per_evaluation": found.evaluation,
            "seconds_finish": found.finish,
            "bytes_sent_per_round": self.traffic.sent,
            "bytes_received_per_round": self.traffic.received,
            "bytes_total": self.num_rounds * (self.traffic.sent + self.traffic.received),
            "server_memory_bytes": found.server_memory,
            "worker_memory_bytes": found.worker_memory,
            "mapped_data_bytes": self.mapped_data_bytes,
            "num_rounds": self.num_rounds,
            "num_nodes": self.hosts.nodes,
            "num_workers": self.hosts.workers,
            "clients_per_round": self.clients_per_round,
            "rows_per_client": self.rows_per_client,
            "not_included": list(NOT_INCLUDED),
        }

    def to_text(self) -> str:
        """Returns the same as lines for people."""
        found = self.findings
        lines = [
            f"cost on this machine, {self.hosts.nodes} nodes on {self.hosts.workers} workers, "
            f"{self.clients_per_round:g} clients a round of {self.rows_per_client:.4g} rows:",
            f"seconds of {self.num_rounds} rounds: {_readable(self.seconds_total)} "
            f"(start {self.seconds_startup:.3g}, end {found.finish:.3g})",
            f"seconds of a round: {self.seconds_per_round:.3g} (nodes {self.node_seconds:.3g}, "
            f"server {found.server:.3g}, each evaluation {found.evaluation:.3g})",
            f"bytes of a round: {self.traffic.sent:,.0f} sent, "
            f"{self.traffic.received:,.0f} received",
            f"peak memory: server {_mib(found.server_memory)}, "
            f"each worker {_mib(found.worker_memory)}, "
            f"and {_mib(self.mapped_data_bytes)} of mapped rows that all share",
        ]
        return "\n".join([*lines, *(f"not included: {text}" for text in NOT_INCLUDED)])


def _readable(seconds: float) -> str:
    """Returns at least three digits, and never an exponent."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def estimate(overrides: Sequence[str], *, rows_per_client: int | None = None) -> Cost:
    """Returns what a run of these overrides will cost on this machine; rehearses it.

    Args:
        overrides: Hydra overrides.
        rows_per_client: rows of every client, for more clients than the dataset has rows for; None:
            those that the partition gives it.

    Raises:
        DpflError: the run could not start, or the cost of such a run cannot be told.
    """
    settings = Settings.from_mapping(compose_mapping(overrides))
    _check(settings, rows_per_client)
    if rows_per_client is not None and getattr(settings.training, "nominal_rows", 1) is None:
        overrides = [*overrides, f"training.nominal_rows={rows_per_client}"]
        settings = Settings.from_mapping(compose_mapping(overrides))
    hosts = settings.engine.hosts(settings)
    at_once = max(1, hosts.workers)
    data = settings.dataset.load(data_path=None, cache_dir=home() / "cache")
    planned = _planned(settings, data)
    settings = planned.settings
    nodes_do = settings if rows_per_client is None else _of_equal(settings, data, rows_per_client)
    rehearsed_rows = _rows_of_clients(nodes_do, data)
    rows_N = (
        rehearsed_rows
        if rows_per_client is None
        else np.full(settings.federation.population, rows_per_client)
    )
    findings = rehearse(
        Script(
            overrides=tuple(overrides),
            node_settings=nodes_do.to_mapping(),
            order=planned.order,
            num_rounds=planned.num_rounds,
            wire_size=settings.mechanism.wire_size(planned.num_parameters),
            modulus=settings.mechanism.modulus,
            types=planned.reply_types,
            cast=_cast(rehearsed_rows, hosts.nodes, at_once, settings.cohort_size.expected),
        )
    )
    nodes = NodeModel.fitted(findings.nodes)
    rounds = _shares(settings, rows_N, hosts.nodes)
    return Cost(
        hosts=hosts,
        num_rounds=planned.num_rounds,
        num_evaluations=_num_evaluations(settings, planned.num_rounds),
        clients_per_round=settings.cohort_size.expected,
        rows_per_client=float(rows_N.mean()),
        nodes=nodes,
        node_seconds=statistics.mean(_seconds(nodes, shares, at_once) for shares in rounds),
        findings=findings,
        traffic=_traffic(planned, rounds),
        mapped_data_bytes=_mapped_bytes(data),
    )


def _check(settings: Settings, rows_per_client: int | None) -> None:
    if rows_per_client is not None:
        checks.at_least("--rows-per-client", rows_per_client, 1)
    if settings.run.resume is not None:
        raise checks.fail(
            "run.resume",
            settings.run.resume,
            "the cost of a part of a run cannot be told",
            "give the settings of the whole run instead",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A run as its plan has it.

    Attributes:
        settings: noise multipliers and the like filled in.
        order: of the first round.
        num_rounds: that the budget and ``run.stop_after`` allow.
        num_parameters: P.
        arrays: the model as nodes get it.
        replies: what a node replies for one client and for several.
    """

    settings: Settings
    order: RoundOrder
    num_rounds: int
    num_parameters: int
    arrays: ArrayRecord
    replies: tuple[ProtectedUpdate, ProtectedUpdate]

    @property
    def reply_types(self) -> tuple[str, str]:
        """NumPy types of the replies."""
        one, several = self.replies
        return str(one.vector_P.dtype), str(several.vector_P.dtype)


def _planned(settings: Settings, data: LoadedData) -> _Planned:
    """Returns the plan of a run.

    Raises:
        SettingsError: the budget does not allow a single round.
    """
    model = new_model(settings, data.spec)
    rows, size = nominal_rows(settings, data), num_parameters(model)
    settings = with_layers(settings, model)
    plan = make_plan(settings, rows, num_parameters=size)
    settings = with_noise(settings, plan)
    num_rounds = min(plan.affordable_rounds(), settings.run.stop_after or settings.run.num_rounds)
    if num_rounds == 0:
        raise checks.fail(
            "privacy.target_epsilon",
            settings.privacy.target_epsilon,
            "does not allow a single round, so there is nothing to pay for",
            "raise it, or the noise multiplier",
        )
    order = dataclasses.replace(
        order_of(settings), nominal_rows=rows, weighting=settings.federation.weighting
    )
    return _Planned(
        settings=settings,
        order=order,
        num_rounds=num_rounds,
        num_parameters=size,
        arrays=wire.model_record(model.state_dict()),
        replies=_replies(settings, order, size),
    )


def _replies(
    settings: Settings, order: RoundOrder, size: int
) -> tuple[ProtectedUpdate, ProtectedUpdate]:
    """Returns what a node sends for one client and for two whose updates are zero."""
    update = LocalUpdate(
        client=0, delta_P=np.zeros(size, np.float32), num_noisy_steps=0, num_examples=2
    )
    noise = rng.noise_source("cost", seed=None)
    private = settings.mechanism.privatize(update, order, noise)
    both = [private, dataclasses.replace(private, client=1)]
    protect = settings.protection.protect
    return protect(both[:1], order.round), protect(both, order.round)


def _of_equal(settings: Settings, data: LoadedData, rows: int) -> Settings:
    """Returns the settings with so many clients that each has `rows` rows, all of them asked."""
    population = len(data.train.labels) // rows
    nodes = settings.engine.hosts(settings).nodes
    if population < nodes:
        raise checks.fail(
            "--rows-per-client",
            rows,
            f"the dataset has rows for {population} such clients, and each of {nodes} nodes has "
            "to train one",
            "lower it or choose a larger dataset",
        )
    return dataclasses.replace(
        settings,
        partition=plugins.build("partition", {"kind": "iid"}),
        cohort=plugins.build("cohort", {"kind": "all"}),
        federation=dataclasses.replace(settings.federation, population=population),
    )


def _rows_of_clients(settings: Settings, data: LoadedData) -> IndexVector:
    """Returns how many rows each client has [N]."""
    if settings.partition.by == "node":
        return np.full(settings.federation.population, len(data.train.labels))
    return np.array([len(rows) for rows in split_of(settings, data)])


def _cast(rows_N: IndexVector, num_nodes: int, at_once: int, cohort: float) -> tuple[Role, ...]:
    """Returns who plays in the rehearsal: one node for each worker, or all if they are fewer."""
    hosted = [np.arange(p, len(rows_N), num_nodes) for p in range(num_nodes)]
    hosted = [clients for clients in hosted if len(clients)][:at_once]
    longest = min(_MOST_AT_ONCE, max(2, math.ceil(cohort / num_nodes)), *map(len, hosted))

    def nearest(clients: IndexVector, rows: float) -> list[Part]:
        order = np.argsort(abs(rows_N[clients] - rows), kind="stable")
        return [Part(client=int(c), rows=int(rows_N[c])) for c in clients[order]]

    few, many = np.quantile(rows_N, (0.05, 0.95))
    return tuple(
        Role(
            small=nearest(clients, few)[0],
            typical=tuple(nearest(clients, rows_N.mean())[:longest]),
            large=nearest(clients, many)[0],
        )
        for clients in hosted
    )


def _shares(settings: Settings, rows_N: IndexVector, num_nodes: int) -> list[list[Share]]:
    """Returns what each asked node has to do in several rounds.

    The cohorts are not those of the run: what follows from them is no fact about who was sampled.
    """
    population, rounds = settings.federation.population, []
    for round in range(1, _COHORTS + 1):
        cohort = settings.cohort.sample(population, round, np.random.default_rng(round))
        clients_P = np.bincount(cohort % num_nodes, minlength=num_nodes)
        rows_P = np.bincount(cohort % num_nodes, rows_N[cohort], minlength=num_nodes)
        asked = zip(clients_P.tolist(), rows_P.tolist(), strict=True)
        rounds.append([Share(clients=c, rows=int(r)) for c, r in asked if c])
    return rounds


def _seconds(nodes: NodeModel, shares: Sequence[Share], num_workers: int) -> float:
    """Returns when the last node has answered, if a free worker takes the next node."""
    free = [0.0] * num_workers
    for share in shares:
        heapq.heapreplace(free, free[0] + nodes.seconds(share.clients, share.rows))
    return max(free)


def _traffic(planned: _Planned, rounds: Sequence[Sequence[Share]]) -> Traffic:
    """Returns the mean bytes, counted on messages as the run sends them."""
    with LocalGrid(1, 0) as grid:  # Flower's messages need to know who sends
        node = next(iter(grid.get_node_ids()))
        settings_json = planned.settings.to_wire()
        message = wire.train_message(node, planned.arrays, settings_json, planned.order, [0])
        one, several = (wire.num_bytes(wire.train_reply(r, message)) for r in planned.replies)
    return Traffic(
        sent=wire.num_bytes(message) * statistics.mean(len(shares) for shares in rounds),
        received=statistics.mean(
            math.fsum(one if share.clients == 1 else several for share in shares)
            for shares in rounds
        ),
    )


def _num_evaluations(settings: Settings, num_rounds: int) -> int:
    run = settings.run
    last = num_rounds % run.evaluate_every and num_rounds in (run.num_rounds, run.stop_after)
    return num_rounds // run.evaluate_every + bool(last)


def _mapped_bytes(data: LoadedData) -> int:
    tables = (data.train, data.test, data.validation)
    arrays = [a for t in tables if t is not None for a in (t.features, t.labels)]
    return sum(array.nbytes for array in arrays if isinstance(array, np.memmap))


def _mib(size: int | None) -> str:
    return "unknown on this system" if size is None else f"{size / 2**20:,.0f} MiB"
