"""A federation in one process for hostile tests: fake nodes, a watching optimizer, whole runs.

`Federation` runs the real strategy, mechanism, protection, wire and ledger against nodes whose
local updates the test writes itself. `watched_run` runs everything, models and data too, and keeps
copies of all messages.
"""

from __future__ import annotations

import functools
import gc
import json
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MessageType, RecordDict

from fl_app import rng, wire
from fl_app.accounting.ledger import Ledger
from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.client_policy import Node
from fl_app.engines.local import SERVER_NODE_ID, LocalGrid
from fl_app.node_policy import NodePolicy
from fl_app.overrides import compose
from fl_app.plugins import ServerOptimizer, Transform
from fl_app.report import RunReport
from fl_app.run import default_directory
from fl_app.server_run import load_settings, run_server, with_noise
from fl_app.settings import Settings
from fl_app.stages import ClientPartition, LoadedData, LocalUpdate, RoundTrace, Table
from fl_app.wire import NodeFacts, TrainRequest
from strategies.dp_fedavg import DPFedAvg
from strategies.roster import Roster

PUBLIC_FILES = {
    "results.json",
    "metrics.csv",
    "config.yaml",
    "ledger.sqlite",
    "model.safetensors",
    "checkpoint.safetensors",
    "privacy_report.md",
    "curves.png",
}
CENTRAL = ["mechanism=central_gaussian", "cohort=all"]
LOCAL = ["mechanism=local_gaussian", "cohort=all"]
UNLIMITED = ["privacy.target_epsilon=null"]

Delta = Callable[[int, int], np.ndarray]
"""(client, round) -> [P] float32, what local training leaves at that client."""
Answer = Callable[[Message, TrainRequest], list[Message]]
"""What a node replies to a train message."""


def zero_delta(num_parameters: int) -> Delta:
    return lambda client, round: np.zeros(num_parameters, np.float32)


@dataclass(init=False)
class WatchedOptimizer(ServerOptimizer):
    """Passes everything on to the configured optimizer and keeps the means that it was shown."""

    def __init__(self, inner: ServerOptimizer) -> None:
        self.inner = inner
        self.means: list[np.ndarray] = []
        self.before_step: list[Callable[[], None]] = []

    def start(self, num_parameters: int) -> dict[str, np.ndarray]:
        return self.inner.start(num_parameters)

    def step(
        self, parameters_P: np.ndarray, mean_P: np.ndarray, state: dict[str, np.ndarray]
    ) -> None:
        for look in self.before_step:
            look()
        self.means.append(mean_P.copy())
        self.inner.step(parameters_P, mean_P, state)


class FakeGrid(LocalGrid):
    """Nodes 2, 3, ... that answer as the test says; node p hosts the clients c with c mod P = p.

    `answers` replaces what single nodes reply; `on_train` looks at every train message first.
    """

    def __init__(
        self, settings: Settings, num_nodes: int, delta: Delta, *, simulated: bool = True
    ) -> None:
        super().__init__(num_nodes, 0)
        self.settings, self.delta, self.simulated = settings, delta, simulated
        self.answers: dict[int, Answer] = {}
        self.silent: set[int] = set()
        self.on_train: list[Callable[[TrainRequest], None]] = []
        self.requests: list[TrainRequest] = []
        self.pushed: dict[str, list[Message]] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(f"m{len(self.pushed)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            training = message.metadata.message_type == MessageType.TRAIN
            self.pushed[ids[-1]] = self._train(message) if training else self._hello(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [reply for i in message_ids for reply in self.pushed[i]]
        self.pushed |= {i: [] for i in message_ids}
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(list(self.push_messages(messages)))

    def _hello(self, message: Message) -> list[Message]:
        part = message.metadata.dst_node_id - SERVER_NODE_ID - 1
        facts = NodeFacts(
            partition_id=part, num_partitions=self._num_nodes, simulated=self.simulated
        )
        return [] if part in self.silent else [wire.hello_reply(facts, message)]

    def _train(self, message: Message) -> list[Message]:
        request = wire.read_train(message)
        self.requests.append(request)
        for look in self.on_train:
            look(request)
        part = message.metadata.dst_node_id - SERVER_NODE_ID - 1
        return self.answers.get(part, self.genuine)(message, request)

    def genuine(self, message: Message, request: TrainRequest) -> list[Message]:
        """What a node running the app replies: clipped, noised if LOCAL, summed, on the wire."""
        updates = [self.update(client, request) for client in request.clients]
        protected = self.settings.protection.protect(updates, request.order.round)
        return [wire.train_reply(protected, message)]

    def update(self, client: int, request: TrainRequest) -> Any:
        order = request.order
        raw = LocalUpdate(
            client=client,
            delta_P=self.delta(client, order.round),
            num_noisy_steps=0,
            num_examples=10 ** (client % 5),
        )
        noise = rng.noise_source("client-noise", order.round, client, seed=None)
        return self.settings.mechanism.privatize(raw, order, noise)


def dead(message: Message, request: TrainRequest) -> list[Message]:
    """A node that died: no reply."""
    return []


def failing(message: Message, request: TrainRequest) -> list[Message]:
    """A node whose client code raised."""
    return [wire.failure_reply("RuntimeError: the disk is full", message)]


def crashed(message: Message, request: TrainRequest) -> list[Message]:
    """A node whose process died: Flower's own error reply."""
    return [Message(Error(8, "gone"), reply_to=message)]


@dataclass
class Federation:
    """The real server side against fake nodes; the model is the flat vector itself."""

    settings: Settings
    plan: PrivacyPlan
    ledger: Ledger
    ledger_path: Path
    optimizer: WatchedOptimizer
    grid: FakeGrid
    strategy: DPFedAvg
    traces: list[RoundTrace] = field(default_factory=list)

    def run(self, num_rounds: int | None = None) -> Federation:
        rounds = self.settings.run.num_rounds if num_rounds is None else num_rounds
        arrays = parameters_record(self.strategy.parameters_P)
        self.strategy.start(self.grid, arrays, rounds)
        return self

    @property
    def released_sums(self) -> list[np.ndarray]:
        """[P] a round: what was released, times the public constant it was divided by."""
        expected = self.settings.cohort.expected_size(self.settings.federation.population)
        return [mean * expected for mean in self.optimizer.means]

    def durable_rounds(self) -> list[int]:
        """The rounds of the charges that another process sees in the ledger's file."""
        return charged_rounds(self.ledger_path)


def federation(
    folder: Path,
    *overrides: str,
    delta: Delta | None = None,
    num_parameters: int = 8,
    num_nodes: int | None = None,
    first_round: int = 1,
    simulated: bool = True,
) -> Federation:
    """Returns a federation with one client per node unless `num_nodes` says otherwise."""
    settings = composed("training=sgd", "server_optimizer=sgd", *overrides)
    plan = make_plan(settings, num_parameters=num_parameters)
    if plan.mechanism_constants:
        settings = with_noise(settings, plan)
    optimizer = WatchedOptimizer(settings.server_optimizer)
    settings = replace(settings, server_optimizer=optimizer)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ledger.sqlite"
    ledger = Ledger.create(path, "test")
    nodes = settings.federation.population if num_nodes is None else num_nodes
    grid = FakeGrid(settings, nodes, delta or zero_delta(num_parameters), simulated=simulated)
    roster = Roster(settings.federation, "{}")
    roster.gather(grid)
    traces: list[RoundTrace] = []
    strategy = DPFedAvg(
        settings=settings,
        plan=plan,
        ledger=ledger,
        roster=roster,
        parameters_P=np.zeros(num_parameters),
        optimizer_state=optimizer.start(num_parameters),
        to_arrays=parameters_record,
        nominal_rows=100,
        first_round=first_round,
        on_round=lambda strategy, trace, metrics: traces.append(trace),
    )
    return Federation(
        settings=settings,
        plan=plan,
        ledger=ledger,
        ledger_path=path,
        optimizer=optimizer,
        grid=grid,
        strategy=strategy,
        traces=traces,
    )


@functools.lru_cache(maxsize=64)
def composed(*overrides: str) -> Settings:
    """The settings of these overrides; composing takes a tenth of a second."""
    return compose(list(overrides))


def parameters_record(parameters_P: np.ndarray) -> ArrayRecord:
    return ArrayRecord({"parameters": Array(parameters_P.astype(np.float32))})


def charged_rounds(ledger: Path) -> list[int]:
    """Rounds of the rows in a ledger's file, read over a connection of its own."""
    address = f"{ledger.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as connection:
        return [r for (r,) in connection.execute("SELECT round FROM releases ORDER BY seq")]


# --- whole runs


class RecordingGrid(LocalGrid):
    """The local engine's grid, in this process, which keeps every message and reply."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes, 0)
        self.sent: list[Message] = []
        self.received: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        self.sent += sent
        return super().push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        received = list(super().pull_messages(message_ids))
        self.received += received
        return received

    def train_replies(self) -> list[Message]:
        return [m for m in self.received if m.metadata.message_type == MessageType.TRAIN]

    def train_messages(self) -> list[Message]:
        return [m for m in self.sent if m.metadata.message_type == MessageType.TRAIN]


@dataclass
class Watched:
    """A whole run and everything that was sent in it."""

    report: RunReport
    grid: RecordingGrid
    folder: Path
    settings: Settings

    @property
    def results(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return values


def watched_run(
    folder: Path, *overrides: str, num_nodes: int = 2, settings: Settings | None = None
) -> Watched:
    """Runs 2 rounds (unless told otherwise) of the embedded dataset in this process."""
    if settings is None:
        base = ["run.num_rounds=2", f"run.output_dir={folder}"]
        settings = load_settings([*base, *overrides], default_directory)
    grid = RecordingGrid(num_nodes)
    with grid:
        report = run_server(grid, settings)
    return Watched(report=report, grid=grid, folder=folder, settings=settings)


def shape_of(message: Message) -> dict[str, Any]:
    """Everything about a message but the values of its arrays: record keys, types, sizes, texts."""
    content: RecordDict = message.content
    shape: dict[str, Any] = {}
    for name, record in content.array_records.items():
        shape[name] = {k: (a.dtype, tuple(a.shape), len(a.data)) for k, a in record.items()}
    for name, config in content.config_records.items():
        shape[name] = dict(config)
    for name, metric in content.metric_records.items():
        shape[name] = dict(metric)
    return shape


def node(
    num_partitions: int = 1,
    *,
    simulated: bool = True,
    folder: Path | None = None,
    **config: object,
) -> Node:
    """Node 0 with its ledger, if it has one, in `folder`; `config` with _ for -."""
    keys = {key.replace("_", "-"): value for key, value in config.items()}
    return Node(
        partition_id=0,
        num_partitions=num_partitions,
        data_path=None,
        simulated=simulated,
        allow_seeded_noise=False,
        cache_dir=folder or Path("unused"),
        policy=NodePolicy.from_config(
            keys,
            simulated=simulated,
            data_path=None,
            ledger_folder=(folder or Path("unused")) / "nodes",
        ),
    )


@dataclass(frozen=True)
class Constant(Transform):
    """Every input is this value, whatever is stored."""

    value: float
    shape: tuple[int, ...] = (1, 8, 8)

    def __call__(self, stored: np.ndarray) -> torch.Tensor:
        return torch.full((len(stored), *self.shape), self.value)


def spoiled(partition: ClientPartition, how: str) -> ClientPartition:
    """Returns the client with no rows, NaN rows, huge rows, or as it is."""
    table = partition.table
    rows = partition.rows[:0] if how == "empty" else partition.rows
    values = {"nan": float("nan"), "inf": float("inf"), "huge": 1e30}
    if how in values:
        table = Table(features=table.features, labels=table.labels, transform=Constant(values[how]))
    return ClientPartition(client=partition.client, table=table, rows=rows)


def spoil_client(monkeypatch: Any, client: int, how: str) -> None:
    """Makes one client of every run in this process empty or broken."""
    from fl_app import client_round

    genuine = client_round.client_partition

    def partition(who: int, settings: Settings, data: LoadedData) -> ClientPartition:
        made = genuine(who, settings, data)
        return spoiled(made, how) if who == client else made

    monkeypatch.setattr(client_round, "client_partition", partition)


# --- searching memory and files


def reachable(roots: Iterable[object]) -> Iterator[object]:
    """Yields every object that can be reached from `roots`, modules and classes left out."""
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | type(sys)):
            continue
        seen.add(id(thing))
        yield thing
        if callable(thing) and hasattr(thing, "__globals__"):
            todo += [thing.__closure__, getattr(thing, "__self__", None)]
            continue
        todo += gc.get_referents(thing)


def callers_outside(filename: str) -> list[object]:
    """The local variables of the callers of the present function, up to the first of `filename`."""
    frames: list[object] = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != filename:
        frames.append(dict(frame.f_locals))  # a running frame hides them from the collector
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def holds_vector(thing: object, vector_P: np.ndarray) -> bool:
    """True if an array, tensor or bytes object holds `vector_P`, in float64 or float32."""
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().numpy()
    if isinstance(thing, np.ndarray):
        same_size = thing.size == vector_P.size and thing.dtype.kind == "f"
        return same_size and bool(np.allclose(thing.ravel(), vector_P, rtol=1e-5, atol=1e-9))
    if isinstance(thing, bytes | bytearray | memoryview):
        content = bytes(thing)
        return any(vector_P.astype(t).tobytes() in content for t in (np.float32, np.float64))
    return False
