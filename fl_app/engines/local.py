"""Local engine: Flower's Grid in this process over a pool of worker processes.

Workers call the very same ClientApp that SuperNodes run. No Ray, no SuperLink: for sweeps, tests
and laptops.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fl_app import checks
from fl_app.client_policy import LOCAL_SIMULATION, home
from fl_app.plugins import Engine, Hosts
from fl_app.settings import Settings

SERVER_NODE_ID = 1
Job = tuple[Message, int, int, RecordDict]
Answer = tuple[Message, RecordDict]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine(Engine):
    """Runs server and nodes on this machine.

    Attributes:
        num_workers: worker processes; None: one per core; 0: everything in this process.
    """

    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            checks.at_least("engine.num_workers", self.num_workers, 0)

    def hosts(self, settings: Settings) -> Hosts:
        """Returns one node per worker unless ``federation.num_nodes`` says otherwise."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        workers = (cores or 1) if self.num_workers is None else self.num_workers
        nodes = settings.federation.num_nodes or max(1, workers)
        return Hosts(nodes=nodes, workers=min(workers, nodes))

    def run(
        self, settings: Settings, serve: Callable[[Grid, Settings], object] | None = None
    ) -> int:
        """Runs all rounds; see `Engine.run`."""
        from fl_app.server_run import run_server

        # Data that is not there must show before workers start, which takes seconds.
        settings.dataset.load(data_path=None, cache_dir=home() / "cache")
        hosts = self.hosts(settings)
        with LocalGrid(hosts.nodes, hosts.workers) as grid:
            (serve or run_server)(grid, settings)
        return 0


class LocalGrid(Grid):
    """An in-process Grid: nodes 1 + p for p in 0..P-1, served by worker processes.

    Args:
        num_nodes: P.
        num_workers: worker processes, 0 to work in this process.
    """

    simulated = True

    def __init__(self, num_nodes: int, num_workers: int) -> None:
        self._num_nodes, self._num_workers = num_nodes, num_workers
        self._run = Run.create_empty(run_id=secrets.randbits(62))
        self._states: dict[int, RecordDict] = {}
        self._pending: dict[str, tuple[Message, Future[Answer]]] = {}
        self._pool: Executor | None = None
        if num_workers:
            # Workers import torch and the app while the server reads data and calibrates.
            for _ in range(num_workers):
                self._executor().submit(_warm_up)
        # Flower's Message constructor takes the sender from here.
        TaskIdentity.run_id, TaskIdentity.node_id = self._run.run_id, SERVER_NODE_ID
        TaskIdentity.task_id = 1

    def __enter__(self) -> LocalGrid:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_pool()

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._run

    def set_run(self, run: Run) -> None:
        """Sets the run's description."""
        self._run = run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Returns a message to one node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Returns the ids of all nodes; they are always online."""
        return [SERVER_NODE_ID + 1 + p for p in range(self._num_nodes)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hands the messages to the workers and returns their new ids."""
        ids = []
        for message in messages:
            message_id = secrets.token_hex(16)
            message.metadata.__dict__["_message_id"] = message_id
            self._pending[message_id] = (message, self._submit(message))
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns the replies that are ready; each only once."""
        ready = [i for i in message_ids if i in self._pending and self._pending[i][1].done()]
        return [self._reply(*self._pending.pop(i)) for i in ready]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Sends and returns the replies that come within `timeout` seconds; later ones are lost."""
        ids = list(self.push_messages(messages))
        wait([self._pending[i][1] for i in ids], timeout=timeout)
        replies = list(self.pull_messages(ids))
        for late in ids:
            self._pending.pop(late, None)
        return replies

    def _submit(self, message: Message) -> Future[Answer]:
        node = message.metadata.dst_node_id
        job = (message, node - SERVER_NODE_ID - 1, self._num_nodes, self._state(node))
        if self._num_workers == 0:
            future: Future[Answer] = Future()
            future.set_result(_work(job))
            return future
        try:
            return self._executor().submit(_work, job)
        except BrokenProcessPool:
            self._close_pool()
            return self._executor().submit(_work, job)

    def _reply(self, message: Message, future: Future[Answer]) -> Message:
        try:
            reply, state = future.result()
        except BrokenProcessPool:
            error = Error(ErrorCode.CLIENT_APP_CRASHED, "a worker process died")
            return Message(error, reply_to=message)
        self._states[message.metadata.dst_node_id] = state
        return reply

    def _state(self, node: int) -> RecordDict:
        return self._states.setdefault(node, RecordDict())

    def _executor(self) -> Executor:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["fl_app.client_app", "opacus"])
            threads = max(1, (os.cpu_count() or 1) // self._num_workers)
            self._pool = ProcessPoolExecutor(self._num_workers, context, _start_worker, (threads,))
        return self._pool

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _start_worker(threads: int) -> None:
    """Prepares a worker: its share of cores, no Ctrl-C of its own, no life after its parent."""
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()


def _warm_up() -> None:
    """Makes the pool start a worker."""


def _die_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _work(job: Job) -> Answer:
    """Runs the ClientApp as a SuperNode would; an exception becomes an error reply."""
    from fl_app.client_app import app

    message, partition, partitions, state = job
    context = Context(
        run_id=message.metadata.run_id,
        node_id=message.metadata.dst_node_id,
        node_config={
            "partition-id": partition,
            "num-partitions": partitions,
            LOCAL_SIMULATION: True,
        },
        state=state,
        run_config={},
    )
    try:
        return app(message, context), context.state
    except Exception as error:  # as Flower's own runtimes do
        reason = f"{type(error).__name__}: {error}"
        reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        return reply, context.state


PLUGIN = LocalEngine
