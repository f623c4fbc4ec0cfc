"""A rehearsal of a run: its own engine, nodes and server, timed and weighed for a few rounds.

It happens in a new process and leaves nothing behind: the run directory is a temporary folder that
only this user can read. The server plays its rounds against a stage that answers at once; the nodes
then train a few clients each, all nodes at the same time, as they would in the run.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fl_app import wire
from fl_app.client_policy import home
from fl_app.client_round import device, new_model
from fl_app.errors import FederationError
from fl_app.overrides import compose_mapping
from fl_app.server_run import evaluation_rows, run_server
from fl_app.settings import Settings
from fl_app.stages import ProtectedUpdate, RoundOrder
from fl_app.training.evaluate import evaluate
from strategies.roster import Roster

_SERVER_ROUNDS = 6
_NODE_SECONDS = 6.0
"""How long the nodes' rounds are repeated."""
_LARGE_ROUND_SECONDS = 1.5
"""How long the longest of them should take."""
_NEVER = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A client of a node in the rehearsal, and the rows that it has."""

    client: int
    rows: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The clients that one node trains in the rehearsal.

    Attributes:
        small: one with few rows.
        typical: some with about the mean number of rows.
        large: one with many rows.
    """

    small: Part
    typical: tuple[Part, ...]
    large: Part


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is rehearsed.

    Attributes:
        overrides: Hydra overrides of the run.
        node_settings: plain values that the nodes train with, noise multipliers filled in.
        order: that of the first round.
        num_rounds: rounds that the run has.
        wire_size: length of the vectors that nodes send.
        modulus: that of the updates.
        types: NumPy types of a reply for one client and for several.
        cast: of each node that takes part, all at the same time; equally many typical clients.
    """

    overrides: tuple[str, ...]
    node_settings: Mapping[str, Any]
    order: RoundOrder
    num_rounds: int
    wire_size: int
    modulus: int | None
    types: tuple[str, str]
    cast: tuple[Role, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeTime:
    """How long nodes took that were asked at the same time.

    Attributes:
        clients: that each of them trained.
        rows: that these had, of the node with the most.
        seconds: from the first message to the last reply.
    """

    clients: int
    rows: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a rehearsal found; seconds are wall time.

    Attributes:
        startup: from the start of the process to the first round.
        server: of one round without waiting for nodes and without evaluation.
        evaluation: of one evaluation.
        finish: from the last reply to the end, evaluation included.
        first: the first round of the nodes, in which they load what later rounds find there.
        nodes: the other rounds of the nodes.
        server_memory: largest resident bytes of the server's process, mapped rows left out; None
            where the system does not tell.
        worker_memory: the same of the largest other process; 0 if there is none.
    """

    startup: float
    server: float
    evaluation: float
    finish: float
    first: NodeTime
    nodes: tuple[NodeTime, ...]
    server_memory: int | None
    worker_memory: int | None


def rehearse(script: Script) -> Findings:
    """Returns the findings of a rehearsal in a new process.

    Raises:
        DpflError: the run could not start, or its nodes cannot train.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(_perform, script, time.time()).result()
        except BrokenProcessPool as error:
            raise FederationError(
                "the rehearsal of the run died, perhaps for want of memory; choose a smaller model "
                "or fewer engine.num_workers"
            ) from error


def _perform(script: Script, started: float) -> Findings:
    """Rehearses in this process, whose standard output is silenced."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    settings = Settings.from_mapping(compose_mapping(script.overrides))
    found: list[Findings] = []
    with tempfile.TemporaryDirectory() as folder:
        run = dataclasses.replace(
            settings.run,
            output_dir=f"{folder}/run",
            stop_after=min(_SERVER_ROUNDS, script.num_rounds),
            evaluate_every=_NEVER,
        )
        settings = dataclasses.replace(settings, run=run)
        settings.engine.run(settings, lambda g, s: found.append(_serve(g, s, script, started)))
    if not found:
        raise FederationError("the rehearsal of the run ended before its end; see the log above")
    return found[0]


def _serve(grid: Grid, settings: Settings, script: Script, started: float) -> Findings:
    entered = time.time()
    nodes = _Nodes(grid, script)
    ready = time.time()
    stage = _Stage(grid, script)
    run_server(stage, settings)
    opened, finish = stage.before_and_after(ready, time.time())
    first, *others = nodes.rounds()
    return Findings(
        # The server reads its data and calibrates while the nodes start.
        startup=entered - started + max(ready - entered, opened),
        server=stage.seconds_between_rounds(),
        evaluation=_evaluation_seconds(settings),
        finish=finish,
        first=first,
        nodes=tuple(others),
        server_memory=peak_memory("self"),
        worker_memory=peak_memory_of_others(),
    )


def _evaluation_seconds(settings: Settings) -> float:
    data = settings.dataset.load(data_path=None, cache_dir=home() / "cache")
    target = device(settings.run.device)
    model = new_model(settings, data.spec).to(target)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        evaluate(model, evaluation_rows(settings, data), target)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class _Nodes:
    """The real nodes, ready to train; constructing it waits for them.

    Args:
        grid: where they are.
        script: whom to ask.
    """

    def __init__(self, grid: Grid, script: Script) -> None:
        self._grid, self._script = grid, script
        settings = Settings.from_mapping(script.node_settings)
        self._json, self._timeout = settings.to_wire(), settings.federation.round_timeout
        data = settings.dataset.load(data_path=None, cache_dir=home() / "cache")
        self._model = wire.model_record(new_model(settings, data.spec).state_dict())
        self._roster = Roster(settings.federation, self._json)
        self._roster.gather(grid)

    def rounds(self) -> list[NodeTime]:
        """Returns the time of the very first round, and of others of different sizes in turn."""
        cast, started = self._script.cast, time.monotonic()
        one = [role.typical[:1] for role in cast]
        found = [self._ask(one), self._ask(one)]
        longest = int(_LARGE_ROUND_SECONDS / found[1].seconds)
        sizes: list[list[tuple[Part, ...]]] = [
            [(role.small,) for role in cast],
            [role.typical[: max(1, longest)] for role in cast],
            [(role.large,) for role in cast],
        ]
        while time.monotonic() - started < _NODE_SECONDS:
            found += [self._ask(parts) for parts in sizes]
        return found

    def _ask(self, parts: Sequence[Sequence[Part]]) -> NodeTime:
        """Asks one node for each of `parts`."""
        asked = self._roster.group(part.client for node in parts for part in node)
        messages = [
            wire.train_message(node, self._model, self._json, self._script.order, clients)
            for node, clients in asked.items()
        ]
        start = time.perf_counter()
        replies = list(self._grid.send_and_receive(messages, timeout=self._timeout))
        seconds = time.perf_counter() - start
        for reply in replies:
            if isinstance(failure := wire.read_train_reply(reply), wire.NodeFailure):
                raise FederationError(failure.text)
        if len(replies) < len(messages):
            raise FederationError(
                f"federation.round_timeout={self._timeout}: too short for {len(parts[0])} clients"
            )
        rows = max(sum(part.rows for part in node) for node in parts)
        return NodeTime(clients=len(parts[0]), rows=rows, seconds=seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """When a round began to wait for its nodes, and when it had all replies."""

    round: int
    entered: float
    left: float


class _Stage(Grid):
    """A grid on which every node answers at once, with zeros.

    Args:
        grid: the real one, for its nodes' ids.
        script: what the answers look like.
    """

    simulated = True

    def __init__(self, grid: Grid, script: Script) -> None:
        self._grid, self._script = grid, script
        self._nodes = list(grid.get_node_ids())
        self._replies: dict[str, Message] = {}
        self._asked: list[_Asked] = []

    def before_and_after(self, start: float, end: float) -> tuple[float, float]:
        """Returns the seconds from `start` to the first question, from the last answer to `end`."""
        if not self._asked:  # no cohort had a client: all of it came before the first question
            return end - start, 0.0
        return self._asked[0].entered - start, end - self._asked[-1].left

    def seconds_between_rounds(self) -> float:
        """Returns the seconds of one round without waiting for nodes; 0 if it is the only one."""
        seconds = [
            (after.entered - before.left) / (after.round - before.round)
            for before, after in pairwise(self._asked)
        ]
        return statistics.median(seconds) if seconds else 0.0

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._grid.run

    def set_run(self, run: Run) -> None:
        """Sets the run's description."""
        self._grid.set_run(run)

    def create_message(
        self,
        content: Any,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Returns a message to one node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Returns the ids of all nodes."""
        return self._nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answers the messages and returns their new ids."""
        ids = []
        for message in messages:
            message_id = secrets.token_hex(16)
            message.metadata.__dict__["_message_id"] = message_id
            self._replies[message_id] = self._reply(message)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns the replies; each only once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Returns the answers and notes how long the server had to itself before."""
        entered = time.time()
        asked = list(messages)
        replies = self.pull_messages(self.push_messages(asked))
        number = wire.read_train(asked[0]).order.round
        self._asked.append(_Asked(number, entered, time.time()))
        return replies

    def _reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if message.metadata.message_type != MessageType.TRAIN:
            facts = wire.NodeFacts(
                partition_id=self._nodes.index(node),
                num_partitions=len(self._nodes),
                simulated=True,
            )
            return wire.hello_reply(facts, message)
        request = wire.read_train(message)
        one, several = self._script.types
        update = ProtectedUpdate(
            round=request.order.round,
            clients=request.clients,
            vector_P=np.zeros(
                self._script.wire_size, one if len(request.clients) == 1 else several
            ),
            weight=float(len(request.clients)),
            modulus=self._script.modulus,
        )
        return wire.train_reply(update, message)


def peak_memory_of_others() -> int | None:
    """Returns the peak memory of the largest process that this one has started, 0 without any."""
    children: dict[str, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text(encoding="utf-8").rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(path.parent.name)
    found, waiting = [0], [str(os.getpid())]
    if not children:
        return None
    while waiting:
        for process in children.get(waiting.pop(), []):
            waiting.append(process)
            found.append(peak_memory(process) or 0)
    return max(found)


def peak_memory(process: str) -> int | None:
    """Returns the most memory that a process has had, without the decoded rows that it mapped.

    In bytes; None if the system does not tell.
    """
    folder = Path("/proc") / process
    try:
        status = (folder / "status").read_text(encoding="utf-8").splitlines()
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        mapped, inside = 0, False
        for line in (folder / "smaps").read_text(encoding="utf-8").splitlines():
            if "-" in line.split(" ", 1)[0]:
                inside = line.endswith(".npy")
            elif inside and line.startswith("Rss:"):
                mapped += int(line.split()[1])
    except (OSError, StopIteration):
        return None
    return 1024 * (peak - mapped)
