"""Flower ClientApp: one train message a round for all clients that this node hosts."""

from __future__ import annotations

import logging
import traceback

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fl_app import client_round, parallel, wire
from fl_app.client_policy import Node
from fl_app.errors import DpflError

log = logging.getLogger("dpfl")
app = ClientApp()

MISCONFIGURED = "its own configuration is not valid (see the node's log)"


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Answers who this node is and whether it can run the settings."""
    node = _node(context)
    if node is None:
        unknown = wire.NodeFacts(
            partition_id=-1, num_partitions=0, simulated=False, error=MISCONFIGURED
        )
        return wire.hello_reply(unknown, message)
    error = ""
    try:
        client_round.check_node(wire.read_hello(message), node)
    except Exception as problem:  # its text may hold private values: the policy decides
        _note("cannot take part", problem)
        error = client_round.public_cause(problem, node)
    facts = wire.NodeFacts(
        partition_id=node.partition_id,
        num_partitions=node.num_partitions,
        simulated=node.simulated,
        error=error,
    )
    return wire.hello_reply(facts, message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains the asked clients; a failure becomes a reply without anything measured on data."""
    parallel.keep_freed_memory()
    node = _node(context)
    if node is None:
        return wire.failure_reply(MISCONFIGURED, message, wire.REFUSED)
    try:
        return wire.train_reply(client_round.run_node(wire.read_train(message), node), message)
    except Exception as problem:  # its text may hold private values: the policy decides
        _note("round refused or failed", problem)
        cause = client_round.public_cause(problem, node)
        return wire.failure_reply(cause, message, client_round.failure_code(problem))


def _node(context: Context) -> Node | None:
    """Returns the node of this process; None, with the reason in its log, if it is misconfigured.

    The text of such an error names the node's files, so it is no reply.
    """
    try:
        return Node.from_config(context.node_config)
    except DpflError as problem:
        _note("this node's configuration is refused", problem)
        return None


def _note(what: str, problem: Exception) -> None:
    """Logs a failure at the node; our own texts say it all, others come with their traceback."""
    own = isinstance(problem, DpflError)
    log.warning("%s: %s", what, problem if own else traceback.format_exc())
