"""Stage values <-> Flower records. The only place with record keys.

A train message carries the global model under its plain parameter names, the settings as JSON and
the round's order. A reply carries one flat vector (the protected update), the clients in it and
their
weight: nothing measured on data (rule 12).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from fl_app.errors import ProtocolError
from fl_app.stages import ProtectedUpdate, RoundOrder

MODEL = "model"
UPDATE = "update"
CONFIG = "config"
VECTOR = "vector"
SETTINGS = "settings"
ORDER = "order"
CLIENTS = "clients"
ROUND = "round"
WEIGHT = "weight"
MODULUS = "modulus"
ERROR = "error"
CODE = "code"
PARTITION_ID = "partition-id"
NUM_PARTITIONS = "num-partitions"
SIMULATED = "simulated"


REFUSED = "refused"
"""The request breaks the node's policy or the protocol."""
BUDGET_EXHAUSTED = "budget_exhausted"
"""The node's own budget does not allow it; later requests like it will not fare better."""
LEDGER = "ledger"
"""The node cannot write down what it would spend, so it does not train."""
FAILED = "failed"
"""Anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What a node reads from a train message.

    Attributes:
        settings: JSON of the settings.
        order: the round's public numbers.
        clients: the hosted clients that are asked.
        model: the global model's state by plain name.
    """

    settings: str
    order: RoundOrder
    clients: tuple[int, ...]
    model: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node tells about itself when asked: public facts.

    Attributes:
        partition_id: the node's number p; it hosts the clients c with c mod P = p.
        num_partitions: P.
        simulated: True if the node itself knows that it runs in a simulation.
        error: why it cannot take part, "" if it can.
    """

    partition_id: int
    num_partitions: int
    simulated: bool
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """Why a node sent no update: public facts.

    Attributes:
        code: `REFUSED`, `BUDGET_EXHAUSTED`, `LEDGER` or `FAILED`.
        text: the cause, for the operator.
    """

    code: str
    text: str


def model_record(state: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Returns the state dict of a plain model as an array record with the same keys."""
    return ArrayRecord({n: _array(t.detach().cpu().numpy()) for n, t in state.items()})


def model_state(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """Returns the state dict in `record`."""
    return dict(record.to_torch_state_dict())


def hello_message(node_id: int, settings: str) -> Message:
    """Returns the question to a node who it is and whether it can run these settings."""
    content = RecordDict({CONFIG: ConfigRecord({SETTINGS: settings})})
    return Message(content, node_id, MessageType.QUERY)


def read_hello(message: Message) -> str:
    """Returns the settings JSON of a hello message."""
    return _text(message, SETTINGS)


def hello_reply(facts: NodeFacts, reply_to: Message) -> Message:
    """Returns the node's answer to a hello message."""
    config = ConfigRecord(
        {
            PARTITION_ID: facts.partition_id,
            NUM_PARTITIONS: facts.num_partitions,
            SIMULATED: facts.simulated,
            ERROR: facts.error,
        }
    )
    return Message(RecordDict({CONFIG: config}), reply_to=reply_to)


def read_hello_reply(message: Message) -> NodeFacts:
    """Returns the facts in a node's answer.

    Raises:
        ProtocolError: not such an answer.
    """
    if message.has_error():
        raise ProtocolError(f"error code {message.error.code}: {message.error.reason}")
    config = _config(message)
    try:
        return NodeFacts(
            partition_id=_int(config[PARTITION_ID]),
            num_partitions=_int(config[NUM_PARTITIONS]),
            simulated=config[SIMULATED] is True,
            error=str(config[ERROR]),
        )
    except KeyError as error:
        raise ProtocolError(f"hello reply: {error} is missing") from error


def train_message(
    node_id: int, model: ArrayRecord, settings: str, order: RoundOrder, clients: Sequence[int]
) -> Message:
    """Returns the message that asks one node to train `clients` this round."""
    config = ConfigRecord(
        {SETTINGS: settings, ORDER: json.dumps(asdict(order)), CLIENTS: [int(c) for c in clients]}
    )
    content = RecordDict({MODEL: model, CONFIG: config})
    return Message(content, node_id, MessageType.TRAIN, group_id=str(order.round))


def read_train(message: Message) -> TrainRequest:
    """Returns the content of a train message.

    Raises:
        ProtocolError: not such a message.
    """
    config = _config(message)
    try:
        return TrainRequest(
            settings=_text(message, SETTINGS),
            order=_order(json.loads(_text(message, ORDER))),
            clients=_ints(config[CLIENTS]),
            model=model_state(message.content.array_records[MODEL]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"train message: {type(error).__name__} {error}") from error


def train_reply(update: ProtectedUpdate, reply_to: Message) -> Message:
    """Returns a node's protected update as a reply."""
    arrays = ArrayRecord({VECTOR: _array(update.vector_P)})
    config = ConfigRecord(
        {
            ROUND: update.round,
            CLIENTS: list(update.clients),
            WEIGHT: float(update.weight),
            ERROR: "",
        }
    )
    if update.modulus is not None:
        config[MODULUS] = update.modulus
    return Message(RecordDict({UPDATE: arrays, CONFIG: config}), reply_to=reply_to)


def failure_reply(error: str, reply_to: Message, code: str = FAILED) -> Message:
    """Returns the reply of a node that trained nobody, with a public reason and its code."""
    config = ConfigRecord({ERROR: error, CODE: code})
    return Message(RecordDict({CONFIG: config}), reply_to=reply_to)


def read_train_reply(message: Message) -> ProtectedUpdate | NodeFailure:
    """Returns the protected update in a reply, or the node's reason why there is none.

    Raises:
        ProtocolError: neither of both.
    """
    if message.has_error():
        text = f"error code {message.error.code}: {message.error.reason}"
        return NodeFailure(code=FAILED, text=text)
    config = _config(message)
    if config.get(ERROR):
        return NodeFailure(code=str(config.get(CODE, FAILED)), text=str(config[ERROR]))
    try:
        vector_P = _vector(message.content.array_records[UPDATE][VECTOR])
        weight = config[WEIGHT]
        modulus = _int(config[MODULUS]) if MODULUS in config else None
        types = (np.float32, np.float64) if modulus is None else (np.int64,)
        if vector_P.ndim != 1 or vector_P.dtype not in types or not isinstance(weight, float):
            raise ProtocolError(
                "train reply: the update must be one flat float vector, or int64 with a modulus"
            )
        if modulus is not None and not ((vector_P >= 0) & (vector_P < modulus)).all():
            raise ProtocolError("train reply: integers must lie between 0 and the modulus")
        return ProtectedUpdate(
            round=_int(config[ROUND]),
            clients=_ints(config[CLIENTS]),
            vector_P=vector_P,
            weight=weight,
            modulus=modulus,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"train reply: {type(error).__name__} {error}") from error


def _array(values: npt.NDArray[Any]) -> Array:
    """Returns what `Array(values)` is, but copies the numbers once, not several times."""
    values = np.asarray(values, order="C")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    data = b"".join((header.getvalue(), values.data))
    return Array(dtype=str(values.dtype), shape=values.shape, stype="numpy.ndarray", data=data)


def _vector(array: Array) -> npt.NDArray[Any]:
    """Returns the array as a read-only view of its own bytes; `Array.numpy` would copy them.

    Raises:
        ValueError: not an array of numbers, or of another size than it says.
    """
    if array.stype != "numpy.ndarray":
        raise ValueError(f"stype {array.stype}")
    stream = io.BytesIO(array.data)  # shares the bytes
    if (version := np.lib.format.read_magic(stream)) != (1, 0):
        raise ValueError(f"npy version {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    return np.frombuffer(array.data, dtype, offset=stream.tell()).reshape(shape)


def is_simulation(grid: Grid) -> bool:
    """Returns whether the server itself runs in a simulation, whatever nodes say."""
    return isinstance(grid, InMemoryGrid) or getattr(grid, "simulated", False) is True


def num_bytes(message: Message) -> int:
    """Returns the size of the arrays in a message, in bytes."""
    if not message.has_content():
        return 0
    return sum(r.count_bytes() for r in message.content.array_records.values())


def _config(message: Message) -> ConfigRecord:
    if not message.has_content() or CONFIG not in message.content.config_records:
        raise ProtocolError("message: has no config record")
    return message.content.config_records[CONFIG]


def _text(message: Message, key: str) -> str:
    value = _config(message).get(key)
    if not isinstance(value, str):
        raise ProtocolError(f"message: {key} must be a text")
    return value


def _order(values: Mapping[str, Any]) -> RoundOrder:
    order = RoundOrder(**values)
    for name, least in (("round", 1), ("attempt", 0), ("nominal_rows", 0)):
        if _int(getattr(order, name), name) < least:
            raise ProtocolError(f"message: {name} must be at least {least}")
    for name in ("clipping_norm", "noise_multiplier", "training_noise_multiplier"):
        number = getattr(order, name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise ProtocolError(f"message: {name} must be a number or null")
    return order


def _int(value: object, name: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ProtocolError(f"message: {name}{'=' if name else ''}{value!r} must be a whole number")
    return value


def _ints(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ProtocolError("message: clients must be a list")
    return tuple(_int(v) for v in value)
