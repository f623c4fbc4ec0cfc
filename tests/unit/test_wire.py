"""Messages: what goes in comes out, and nothing else is in them."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fl_app import wire
from fl_app.engines.local import LocalGrid
from fl_app.errors import ProtocolError
from fl_app.stages import ProtectedUpdate, RoundOrder

ORDER = RoundOrder(
    round=3,
    clipping_norm=0.5,
    noise_multiplier=1.1,
    training_noise_multiplier=None,
    nominal_rows=60,
)
UPDATE = ProtectedUpdate(
    round=3, clients=(1, 3), vector_P=np.array([1.0, -2.0, 0.5], np.float32), weight=2.0
)


@pytest.fixture(autouse=True)
def _sender() -> None:
    LocalGrid(1, 0)  # Flower's Message constructor needs to know who sends


def ask(model: torch.nn.Module | None = None) -> Message:
    network = model or torch.nn.Linear(2, 1)
    record = wire.model_record(network.state_dict())
    message = wire.train_message(7, record, "{}", ORDER, [1, 3])
    message.metadata.__dict__["_message_id"] = "m1"
    return message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round", 1.5), ("round", True), ("round", 0), ("round", "1"), ("attempt", -1),
        ("nominal_rows", 2.5), ("noise_multiplier", "1"), ("clipping_norm", True),
    ],
)  # fmt: skip
def test_an_order_with_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    message = ask()
    config = next(iter(message.content.config_records.values()))
    config[wire.ORDER] = json.dumps(json.loads(str(config[wire.ORDER])) | {name: value})
    with pytest.raises(ProtocolError, match=name):
        wire.read_train(message)


def test_train_message_keeps_order_clients_and_plain_model_keys() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    request = wire.read_train(ask(network))
    assert (request.order, request.clients, request.settings) == (ORDER, (1, 3), "{}")
    assert list(request.model) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    other.load_state_dict(dict(request.model), strict=True)
    assert all(
        torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(6, dtype=torch.float32).view(2, 3),
        torch.arange(6, dtype=torch.float64).view(2, 3).T,
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3),
        torch.ones(0, 4),
    ],
    ids=["matrix", "transposed", "channels_last", "number", "empty"],
)
def test_arrays_are_what_flower_makes_of_them(values: torch.Tensor) -> None:
    made, flowers = wire.model_record({"x": values})["x"], Array(values.contiguous())
    assert (made.dtype, made.shape, made.stype) == (flowers.dtype, flowers.shape, flowers.stype)
    assert made.data == flowers.data


def test_reply_holds_the_update_and_public_facts_only() -> None:
    reply = wire.train_reply(UPDATE, ask())
    read = wire.read_train_reply(reply)
    assert isinstance(read, ProtectedUpdate)
    assert (read.round, read.clients, read.weight) == (3, (1, 3), 2.0)
    np.testing.assert_array_equal(read.vector_P, UPDATE.vector_P)
    assert set(reply.content.keys()) == {wire.UPDATE, wire.CONFIG}
    assert set(reply.content[wire.CONFIG]) == {"round", "clients", "weight", "error"}
    assert not reply.content.metric_records


def test_failures_come_back_as_texts() -> None:
    refused = wire.read_train_reply(wire.failure_reply("no data", ask(), wire.LEDGER))
    assert refused == wire.NodeFailure(code="ledger", text="no data")
    crashed = Message(Error(8, "died"), reply_to=ask())
    failed = wire.NodeFailure(code="failed", text="error code 8: died")
    assert wire.read_train_reply(crashed) == failed


@pytest.mark.parametrize(
    "change",
    [
        {"clients": "all"},
        {"clients": [1.5]},
        {"round": True},
        {"weight": 2},
    ],
)
def test_malformed_replies_are_protocol_errors(change: dict[str, object]) -> None:
    config = {"round": 3, "clients": [1], "weight": 1.0, "error": ""} | change
    arrays = ArrayRecord({"vector": Array(np.zeros(3, np.float32))})
    content = RecordDict({wire.UPDATE: arrays, wire.CONFIG: ConfigRecord(config)})
    with pytest.raises(ProtocolError):
        wire.read_train_reply(Message(content, reply_to=ask()))


@pytest.mark.parametrize("vector", [np.zeros(3, np.int64), np.zeros((3, 1), np.float32)])
def test_updates_of_another_type_or_shape_are_protocol_errors(vector: np.ndarray) -> None:
    config = ConfigRecord({"round": 3, "clients": [1], "weight": 1.0, "error": ""})
    arrays = ArrayRecord({"vector": Array(vector)})
    with pytest.raises(ProtocolError, match="flat float"):
        wire.read_train_reply(
            Message(RecordDict({wire.UPDATE: arrays, wire.CONFIG: config}), reply_to=ask())
        )


def integer_reply(values: list[int], modulus: object, kind: type = np.int64) -> Message:
    config = {"round": 3, "clients": [1], "weight": 1.0, "error": "", "modulus": modulus}
    arrays = ArrayRecord({"vector": Array(np.array(values, kind))})
    content = RecordDict({wire.UPDATE: arrays, wire.CONFIG: ConfigRecord(config)})
    return Message(content, reply_to=ask())


def test_integers_travel_with_their_modulus() -> None:
    update = ProtectedUpdate(
        round=3, clients=(1,), vector_P=np.array([0, 15]), weight=1.0, modulus=16
    )
    back = wire.read_train_reply(wire.train_reply(update, ask()))
    assert isinstance(back, ProtectedUpdate)
    assert (back.modulus, back.vector_P.dtype, back.vector_P.tolist()) == (16, np.int64, [0, 15])


@pytest.mark.parametrize(
    ("values", "modulus", "kind"),
    [([16], 16, np.int64), ([-1], 16, np.int64), ([1], 16, np.float64), ([1], 1.5, np.int64),
     ([0], 0, np.int64), ([1], True, np.int64)],
)  # fmt: skip
def test_integers_outside_their_modulus_are_protocol_errors(
    values: list[int], modulus: object, kind: type
) -> None:
    with pytest.raises(ProtocolError, match=r"integers must lie|flat float|modulus|whole number"):
        wire.read_train_reply(integer_reply(values, modulus, kind))


def test_hello_round_trip() -> None:
    facts = wire.NodeFacts(partition_id=1, num_partitions=4, simulated=True, error="x")
    hello = wire.hello_message(5, "{}")
    assert wire.read_hello(hello) == "{}"
    assert wire.read_hello_reply(wire.hello_reply(facts, hello)) == facts
    with pytest.raises(ProtocolError):
        wire.read_hello_reply(wire.train_reply(UPDATE, ask()))


def test_a_reply_is_read_without_a_copy_and_cannot_be_written_to() -> None:
    update = ProtectedUpdate(
        round=1, clients=(0,), vector_P=np.arange(5, dtype=np.float32), weight=1.0
    )
    reply = wire.train_reply(update, ask())
    got = wire.read_train_reply(reply)
    assert isinstance(got, ProtectedUpdate)
    np.testing.assert_array_equal(got.vector_P, update.vector_P)
    sent = np.frombuffer(reply.content.array_records[wire.UPDATE]["vector"].data, np.uint8)
    assert np.shares_memory(got.vector_P, sent)
    assert not got.vector_P.flags.writeable


@pytest.mark.parametrize(
    "spoil",
    [lambda data: data[:-3], lambda data: data + b"1234", lambda data: data[:20], lambda data: b""],
)
def test_spoiled_bytes_are_protocol_errors(spoil: Callable[[bytes], bytes]) -> None:
    update = ProtectedUpdate(round=1, clients=(0,), vector_P=np.ones(5, np.float32), weight=1.0)
    reply = wire.train_reply(update, ask())
    array = reply.content.array_records[wire.UPDATE]["vector"]
    array.data = spoil(array.data)
    with pytest.raises(ProtocolError):
        wire.read_train_reply(reply)
