"""Rule 12: a reply holds the privatized update and public facts only, and looks like any other."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MessageType
from harness import (
    CENTRAL,
    LOCAL,
    UNLIMITED,
    RecordingGrid,
    federation,
    shape_of,
    spoil_client,
    watched_run,
)
from torch import nn

from fl_app import client_app, client_round, wire
from fl_app.models import build_model
from fl_app.models.linear import PLUGIN as LINEAR
from fl_app.overrides import compose
from fl_app.stages import InputSpec

RECORD = ["cohort=all", *UNLIMITED, "training.noise_multiplier=1"]
KINDS = {
    "central": [*CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=1"],
    "local": [*LOCAL, *UNLIMITED, "mechanism.noise_multiplier=1"],
    "record": RECORD,
    "both": [*CENTRAL, *RECORD, "training=dp_sgd", "mechanism.noise_multiplier=1"],
}
THREE = ["federation.population=3"]


def replies(folder: Path, *overrides: str) -> RecordingGrid:
    return watched_run(folder, *overrides, *THREE, num_nodes=3).grid


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_looks_the_same_whatever_the_clients_rows(tmp_path: Path, kind: str) -> None:
    """No rows, NaN rows, huge rows, usual rows: keys, types, sizes and numbers of a reply agree."""
    shapes = {}
    for how in ("usual", "empty", "nan", "huge"):
        with pytest.MonkeyPatch.context() as patch:
            spoil_client(patch, 1, how)
            grid = replies(tmp_path / how, *KINDS[kind])
        shapes[how] = [shape_of(reply) for reply in grid.train_replies()]
        assert len(shapes[how]) == 6
    for how, seen in shapes.items():
        assert seen == shapes["usual"], how


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_holds_these_keys_and_no_more(tmp_path: Path, kind: str) -> None:
    grid = replies(tmp_path / "run", *KINDS[kind])
    for reply in grid.received:
        assert not reply.has_error()
        content = reply.content
        assert len(content.metric_records) == 0
        assert set(content.config_records) == {"config"}
        config = content.config_records["config"]
        if reply.metadata.message_type != MessageType.TRAIN:
            assert set(config) == {"partition-id", "num-partitions", "simulated", "error"}
            assert len(content.array_records) == 0
            continue
        assert set(content.array_records) == {"update"}
        assert list(content.array_records["update"]) == ["vector"]
        assert set(config) == {"round", "clients", "weight", "error"}
        assert config["error"] == ""
        assert config["weight"] == len(config["clients"]) == 1


@pytest.mark.parametrize("kind", ["local", "record"])
def test_vectors_of_empty_broken_and_usual_clients_are_noise_of_the_same_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """z = 50 drowns the signal: 650 values, std within 14 % (chi-square, 1e-6 a check)."""
    from statistical.exact_intervals import std_within

    spoil_client(monkeypatch, 0, "empty")
    spoil_client(monkeypatch, 1, "nan")
    section = "training" if kind == "record" else "mechanism"
    grid = replies(tmp_path / "run", *KINDS[kind], f"{section}.noise_multiplier=50")
    # One dp_sgd step: learning rate z C / (batch rate x nominal rows), 4 steps add up.
    std = 50.0 if kind == "local" else 4**0.5 * 1.0 * 50 * 0.35 / (0.2 * (1437 // 3))
    for reply in grid.train_replies():
        vector_P = reply.content.array_records["update"]["vector"].numpy()
        assert std_within(vector_P, std)


def test_no_evaluation_is_asked_of_clients(tmp_path: Path) -> None:
    made = federation(tmp_path, *KINDS["central"], "run.num_rounds=1")
    empty, config = ArrayRecord(), ConfigRecord()
    assert list(made.strategy.configure_evaluate(1, empty, config, made.grid)) == []
    assert made.strategy.aggregate_evaluate(1, []) is None
    types = {m.metadata.message_type for m in replies(tmp_path / "run", *KINDS["central"]).sent}
    assert types == {MessageType.TRAIN, MessageType.QUERY}


def test_metrics_that_a_client_slips_in_reach_nobody(tmp_path: Path) -> None:
    made = federation(tmp_path, *KINDS["central"], "run.num_rounds=1")
    arrays = made.strategy._to_arrays(np.zeros(8, np.float32))
    messages = list(made.strategy.configure_train(1, arrays, ConfigRecord(), made.grid))
    answers = list(made.grid.send_and_receive(messages))
    for answer in answers:
        answer.content.config_records["config"]["loss"] = 0.123456
    _, metrics = made.strategy.aggregate_train(1, answers)
    assert metrics is None


def test_a_deployed_nodes_failure_tells_its_kind_and_never_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of an error may hold a row: it stays at the node."""
    made = federation(tmp_path, *KINDS["central"], "run.num_rounds=1", "federation.population=1")
    made.run()

    def fails(*_: object) -> None:
        raise ValueError("patient 4711 has a negative age")

    monkeypatch.setattr(client_round, "client_partition", fails)
    settings = compose([*KINDS["central"], "federation.population=1"])
    monkeypatch.setattr(client_app.client_round, "run_node", client_round.run_node)
    from flwr.app import Context, Message, RecordDict

    spec = InputSpec(shape=(1, 8, 8), num_classes=10)
    model = build_model(settings.model, spec, seed=0, private=True)
    order = made.grid.requests[0].order
    message: Message = wire.train_message(
        2, wire.model_record(model.state_dict()), settings.to_wire(), order, [0]
    )
    message.metadata.__dict__["_message_id"] = "1"
    config = {"partition-id": 0, "num-partitions": 1, "allowed-placements": "central"}
    context = Context(1, 2, config, RecordDict(), {})  # type: ignore[arg-type]
    answer = wire.read_train_reply(client_app.app(message, context))
    assert isinstance(answer, wire.NodeFailure)
    assert answer.code == wire.FAILED
    assert "ValueError" in answer.text
    assert "4711" not in answer.text
    assert "Traceback" not in answer.text


class Statistics(nn.Module):
    """A network with BatchNorm: statistics of records that would feed a later release."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 4),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.Linear(4, 10),
        )

    def forward(self, x: object) -> object:
        return self.layers(x)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_is_replaced_the_same_way_on_both_sides_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(LINEAR, "build", lambda self, spec: Statistics())
    grid = replies(tmp_path / "run", *KINDS[kind])
    names = {name for m in grid.train_messages() for name in m.content.array_records["model"]}
    assert not any("running" in name or "num_batches" in name for name in names)
    num_sent = sum(
        a.numpy().size for a in grid.train_messages()[0].content.array_records["model"].values()
    )
    for reply in grid.train_replies():
        assert reply.content.array_records["update"]["vector"].numpy().shape == (num_sent,)
