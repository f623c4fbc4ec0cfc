"""Which node hosts which client: node p of P hosts the clients c with c mod P = p."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from fl_app import wire
from fl_app.errors import FederationError, ProtocolError
from fl_app.settings import FederationSettings
from fl_app.wire import NodeFacts

log = logging.getLogger("dpfl")

POLL_SECONDS = 0.1
STARTING_SECONDS = 540.0
"""How much longer simulated nodes may take for their first answer, while they import torch."""


class Roster:
    """The nodes that have answered a hello, by node id.

    Args:
        federation: how many nodes are needed and how long they are waited for.
        settings_json: the settings that nodes must be able to run.
    """

    def __init__(self, federation: FederationSettings, settings_json: str) -> None:
        self._federation = federation
        self._settings_json = settings_json
        self._nodes: dict[int, NodeFacts] = {}
        self._refused: dict[int, str] = {}
        self._greeted: dict[str, int] = {}
        self._own_simulation = False

    @property
    def simulated(self) -> bool:
        """True if the server itself and every known node run in a simulation."""
        known = self._nodes.values()
        return self._own_simulation and bool(known) and all(n.simulated for n in known)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that can be asked."""
        return len(self._nodes)

    @property
    def node_ids(self) -> frozenset[int]:
        """The nodes that can be asked."""
        return frozenset(self._nodes)

    def gather(self, grid: Grid) -> None:
        """Waits for enough nodes: all of a simulation, else ``federation.min_nodes``.

        Raises:
            FederationError: too few in ``federation.join_timeout``, or a simulated node cannot run.
        """
        deadline = time.monotonic() + self._federation.join_timeout
        while True:
            self.refresh(grid)
            if self.num_nodes >= self._needed():
                return
            if time.monotonic() >= deadline + self._patience():
                break
            time.sleep(POLL_SECONDS)
        if self.num_nodes >= self._federation.min_nodes:
            log.warning("%d of %d nodes joined; going on", self.num_nodes, self._needed())
            return
        reasons = "".join(f"\n  {reason}" for reason in sorted(set(self._refused.values())))
        raise FederationError(
            f"federation.min_nodes={self._federation.min_nodes}: only {self.num_nodes} joined "
            f"within federation.join_timeout={self._federation.join_timeout} s; "
            f"start more nodes or lower federation.min_nodes{reasons}"
        )

    def refresh(self, grid: Grid) -> None:
        """Says hello to nodes not greeted yet, takes in answers, forgets nodes that have left.

        Does not wait: a node that never answers costs nothing but its own clients' absence.
        """
        self._own_simulation = wire.is_simulation(grid)
        present = set(grid.get_node_ids())
        self._nodes = {n: facts for n, facts in self._nodes.items() if n in present}
        self._greeted = {i: n for i, n in self._greeted.items() if n in present}
        strangers = sorted(
            present - set(self._nodes) - set(self._refused) - set(self._greeted.values())
        )
        if strangers:
            hellos = [wire.hello_message(n, self._settings_json) for n in strangers]
            self._greeted |= dict(zip(grid.push_messages(hellos), strangers, strict=True))
        if self._greeted:
            for reply in grid.pull_messages(list(self._greeted)):
                node = self._greeted.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    self._add(node, reply)

    def _patience(self) -> float:
        """Returns extra seconds for simulated nodes that are there but still starting up."""
        starting = self._own_simulation and self._greeted and not self._nodes
        return STARTING_SECONDS if starting else 0.0

    def group(self, clients: Iterable[int]) -> dict[int, list[int]]:
        """Returns the clients that can be reached, by node id; the others are absent."""
        hosts = {facts.partition_id: node for node, facts in self._nodes.items()}
        parts = self._num_partitions()
        groups: dict[int, list[int]] = {}
        for client in clients:
            node = hosts.get(client % parts) if parts else None
            if node is not None:
                groups.setdefault(node, []).append(int(client))
        return groups

    def _add(self, node_id: int, reply: Message) -> None:
        try:
            facts = wire.read_hello_reply(reply)
        except ProtocolError as error:
            log.warning("node %d did not introduce itself: %s", node_id, error)
            return
        if facts.error and facts.simulated:
            raise FederationError(facts.error)
        taken = {n.partition_id: i for i, n in self._nodes.items() if i != node_id}
        if facts.error:
            self._refuse(node_id, f"node {facts.partition_id} cannot take part: {facts.error}")
        elif self._nodes and facts.num_partitions != self._num_partitions():
            self._refuse(
                node_id,
                f"num-partitions={facts.num_partitions}: other nodes say {self._num_partitions()}",
            )
        elif facts.partition_id in taken:
            self._refuse(node_id, f"partition-id={facts.partition_id}: another node has it already")
        else:
            self._nodes[node_id] = facts

    def _refuse(self, node_id: int, reason: str) -> None:
        self._refused[node_id] = reason
        log.warning("%s", reason)

    def _num_partitions(self) -> int:
        return next((n.num_partitions for n in self._nodes.values()), 0)

    def _needed(self) -> int:
        if self.simulated:
            return max(self._num_partitions(), self._federation.min_nodes)
        return self._federation.min_nodes
