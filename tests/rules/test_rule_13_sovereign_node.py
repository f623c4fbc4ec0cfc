"""Rule 13: what a node refuses whatever the server asks, and what it charges for what it does."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from harness import LOCAL, UNLIMITED, Answer, federation, node, watched_run

from fl_app import client_app, client_round, wire
from fl_app.accounting.ledger import read
from fl_app.accounting.node_charge import record_epsilon, request_events
from fl_app.client_policy import Node
from fl_app.engines.local import LocalGrid
from fl_app.errors import (
    BudgetError,
    FederationError,
    LedgerError,
    PrivacyError,
    ProtocolError,
)
from fl_app.models import build_model
from fl_app.overrides import compose
from fl_app.privacy import PrivacyEvent
from fl_app.settings import Settings
from fl_app.stages import InputSpec, ProtectedUpdate, RoundOrder
from fl_app.wire import TrainRequest

ORDER = RoundOrder(
    round=1, clipping_norm=1.0, noise_multiplier=1.0, training_noise_multiplier=None, nominal_rows=1
)


def settings(*overrides: str) -> Settings:
    local = ["mechanism=local_gaussian", "mechanism.noise_multiplier=1", *UNLIMITED]
    return compose([*local, *overrides])


def asked(
    own: Node, clients: tuple[int, ...], *overrides: str, order: RoundOrder = ORDER
) -> ProtectedUpdate:
    return client_round.run_node(request(clients, *overrides, order=order), own)


def request(clients: tuple[int, ...], *overrides: str, order: RoundOrder = ORDER) -> TrainRequest:
    made = settings(*overrides)
    spec = InputSpec(shape=(1, 8, 8), num_classes=10)
    model = build_model(made.model, spec, seed=0, private=True)
    return TrainRequest(
        settings=made.to_wire(), order=order, clients=clients, model=model.state_dict()
    )


def test_a_deployed_node_refuses_seeded_noise_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    monkeypatch.setattr(client_round, "run_client", lambda client, *_: trained.append(client))
    with pytest.raises(PrivacyError, match="own entropy only"):
        asked(node(simulated=False, folder=tmp_path), (0,), "run.seeded_noise=true")
    assert trained == []


def test_the_server_cannot_make_a_node_believe_that_it_is_simulated() -> None:
    """What the node is comes from its own configuration; messages have no say."""
    own = Node.from_config({"partition-id": 0, "num-partitions": 1, "simulated": True})
    assert not own.simulated
    with pytest.raises(PrivacyError):
        own.check(settings("run.seeded_noise=true"))
    allowing = {"partition-id": 0, "num-partitions": 1, "allow-seeded-noise": True}
    Node.from_config(allowing).check(settings("run.seeded_noise=true"))
    text = Node.from_config(allowing | {"allow-seeded-noise": "true"})
    with pytest.raises(PrivacyError):
        text.check(settings("run.seeded_noise=true"))


@pytest.mark.parametrize("clients", [(1,), (0, 1), (-2,), (10,), (0, 0)])
def test_clients_of_others_and_repeated_clients_are_refused(
    tmp_path: Path, clients: tuple[int, ...]
) -> None:
    """A node asked for one client twice would send its data twice in one sum: 2 C instead of C."""
    with pytest.raises(ProtocolError):
        asked(node(num_partitions=2, folder=tmp_path), clients)


def test_the_clients_of_the_node_itself_are_served(tmp_path: Path) -> None:
    update = asked(node(num_partitions=2, folder=tmp_path), (0, 2, 8))
    assert update.clients == (0, 2, 8)
    assert update.vector_P.shape == (650,)
    assert np.isfinite(update.vector_P).all()


def test_a_node_that_can_train_nobody_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no such disk")

    monkeypatch.setattr(client_round, "client_partition", fails)
    with pytest.raises(FederationError, match="could train"):
        asked(node(folder=tmp_path), (0,))


@pytest.mark.parametrize("config", [{}, {"partition-id": 2, "num-partitions": 2},
                                    {"partition-id": -1, "num-partitions": 2}])  # fmt: skip
def test_a_node_without_a_place_in_the_federation_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="partition-id"):
        Node.from_config(config)


# The node's own ledger.


def charged(own: Node) -> list[PrivacyEvent]:
    """The events that another process sees in the node's ledger."""
    ledger = own.ledger
    assert ledger is not None
    rows = read(ledger.path) if ledger.path.exists() else []
    return [PrivacyEvent.from_json(row.event) for row in rows]


def budget(num_requests: int, **change: float) -> float:
    """A budget for so many requests like ORDER and not one more."""
    (event,) = request_events(settings(), replace(ORDER, **change), 10)  # type: ignore[arg-type]
    return record_epsilon({event: num_requests}, 1e-5) * (1 + 1e-9)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients whose training began in this process."""
    clients: list[int] = []
    genuine = client_round.run_client

    def run_client(client: int, *rest: object) -> object:
        clients.append(client)
        return genuine(client, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(client_round, "run_client", run_client)
    return clients


def test_every_asked_client_is_charged_durably_before_any_of_them_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = node(simulated=False, folder=tmp_path)
    seen: list[int] = []

    def fails(*_: object) -> None:
        seen.append(len(charged(own)))
        raise OSError("no such disk")

    monkeypatch.setattr(client_round, "run_client", fails)
    with pytest.raises(FederationError):
        asked(own, (0, 3, 5))
    assert seen == [3, 3, 3]
    assert {event.noise_multiplier for event in charged(own)} == {1.0}


def test_an_answer_repeated_word_for_word_is_charged_again(tmp_path: Path) -> None:
    """Message, run, round and attempt are the server's words: none of them makes it free."""
    own = node(simulated=False, folder=tmp_path)
    same = request((0,))
    for number in (1, 2, 3):
        client_round.run_node(same, own)
        assert len(charged(own)) == number


def test_a_spent_budget_is_a_refusal_before_training_in_every_later_run(
    tmp_path: Path, trained: list[int]
) -> None:
    config = {"max_epsilon": budget(2), "data_id": "ward-7"}
    own = node(simulated=False, folder=tmp_path, **config)
    asked(own, (0,))
    asked(own, (1,))
    other_process = node(simulated=False, folder=tmp_path, **config)
    for again in (own, other_process):
        with pytest.raises(BudgetError, match="max-epsilon="):
            asked(again, (0,), "run.seed=77", "run.num_rounds=99")
        with pytest.raises(BudgetError):
            client_round.check_node(settings().to_wire(), again)
    assert trained == [0, 1]
    assert len(charged(own)) == 2


def test_a_request_for_more_clients_than_the_budget_allows_trains_none_of_them(
    tmp_path: Path, trained: list[int]
) -> None:
    own = node(simulated=False, folder=tmp_path, max_epsilon=budget(2))
    with pytest.raises(BudgetError):
        asked(own, (0, 1, 2))
    assert (trained, charged(own)) == ([], [])
    assert asked(own, (0, 1)).clients == (0, 1)


CENTRAL_ASKED = (
    "mechanism=central_gaussian", "mechanism.noise_multiplier=1",
    "cohort=poisson", "cohort.sampling_rate=0.1",
)  # fmt: skip


def test_central_noise_is_refused_unless_the_node_opts_in_and_then_not_amplified(
    tmp_path: Path, trained: list[int]
) -> None:
    with pytest.raises(PrivacyError, match="allowed-placements"):
        asked(node(simulated=False, folder=tmp_path), (0,), *CENTRAL_ASKED)
    assert trained == []
    own = node(simulated=False, folder=tmp_path, allowed_placements="central")
    asked(own, (0,), *CENTRAL_ASKED)
    (event,) = charged(own)
    assert (event.sampling, event.sampling_rate, event.view) == ("none", 1.0, "OBSERVER")
    assert (event.relation, event.noise_multiplier) == ("ZERO_OUT", 1.0)


OPEN = ("mechanism.noise_multiplier=null", "privacy.target_epsilon=8")
SHARES = ("mechanism=distributed_skellam", "mechanism.min_survivors=1", "mechanism.scale=0.5")
REFUSALS: dict[str, tuple[dict[str, object], tuple[str, ...], dict[str, float | None]]] = {
    "too little noise": ({"min_noise_multiplier": 1.5}, (), {}),
    "too large a norm": ({"max_clipping_norm": 0.5}, (), {}),
    "placement": ({"allowed_placements": "record"}, (), {}),
    "no noise": ({}, ("mechanism.noise_multiplier=0",), {"noise_multiplier": 0.0}),
    "less noise than the settings say": ({}, (), {"noise_multiplier": 0.5}),
    "a larger norm than the settings say": ({}, (), {"clipping_norm": 9.0}),
    "noise that is no number": ({}, (), {"noise_multiplier": float("nan")}),
    "negative noise": ({}, ("mechanism.noise_multiplier=1",), {"noise_multiplier": -1.0}),
    "noise that nobody has chosen": ({}, OPEN, {"noise_multiplier": None}),
    "noise of the server that nobody has chosen": (
        {"allowed_placements": "central", "min_noise_multiplier": 1.0},
        ("mechanism=central_gaussian", *OPEN),
        {"noise_multiplier": None},
    ),
    "shares whose rounding outgrows their noise": ({"min_noise_multiplier": 0.3}, SHARES, {}),
    "budget": ({"max_epsilon": 0.01}, (), {}),
}


def test_shares_with_a_fine_scale_have_the_noise_that_they_say(tmp_path: Path) -> None:
    own = node(simulated=False, folder=tmp_path, min_noise_multiplier=0.9)
    asked(own, (0,), *SHARES[:2], "mechanism.scale=1000", "accountant=rdp")


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_is_neither_trained_nor_charged(
    name: str, tmp_path: Path, trained: list[int]
) -> None:
    config, overrides, order = REFUSALS[name]
    own = node(simulated=False, folder=tmp_path, **config)
    with pytest.raises(PrivacyError):
        asked(own, (0,), *overrides, order=replace(ORDER, **order))  # type: ignore[arg-type]
    assert (trained, charged(own)) == ([], [])


def block(own: Node) -> None:
    """A folder where the ledger should be: it can be neither read nor written, by nobody."""
    assert own.policy.ledger_path is not None
    own.policy.ledger_path.mkdir(parents=True)


def lose_head(own: Node) -> None:
    asked(own, (0,))
    assert own.policy.ledger_path is not None
    own.policy.ledger_path.with_name(own.policy.ledger_path.name + ".head").unlink()


@pytest.mark.parametrize("damage", [block, lose_head])
def test_a_ledger_that_cannot_be_trusted_or_written_stops_the_node(
    damage: Callable[[Node], None], tmp_path: Path, trained: list[int]
) -> None:
    own = node(simulated=False, folder=tmp_path)
    damage(own)
    trained.clear()
    for _ in range(2):
        with pytest.raises(LedgerError):
            asked(own, (0,))
    assert trained == []


def test_a_simulation_charges_nothing_unless_it_has_a_ledger(tmp_path: Path) -> None:
    own = node(folder=tmp_path)
    asked(own, (0,))
    assert own.ledger is None
    assert not (tmp_path / "nodes").exists()
    own = node(folder=tmp_path, ledger_path=str(tmp_path / "own.sqlite"), max_epsilon=budget(1))
    asked(own, (0,))
    with pytest.raises(BudgetError):
        asked(own, (0,))


def test_seeded_noise_is_charged_as_none(tmp_path: Path) -> None:
    own = replace(node(simulated=False, folder=tmp_path), allow_seeded_noise=True)
    asked(own, (0,), "run.seeded_noise=true")
    assert [event.noise_multiplier for event in charged(own)] == [0.0]
    limited = replace(own, policy=replace(own.policy, max_epsilon=1e9))
    with pytest.raises(BudgetError):
        asked(limited, (0,))


# What the server sees of it.


def reply(config: dict[str, object], asking: TrainRequest) -> Message:
    """The app's answer, as a SuperNode would send it."""
    LocalGrid(1, 0)  # tells Flower's messages where they come from
    message = wire.train_message(
        2, wire.model_record(dict(asking.model)), asking.settings, asking.order, asking.clients
    )
    message.metadata.__dict__["_message_id"] = "1"
    place: dict[str, object] = {"partition-id": 0, "num-partitions": 1}
    return client_app.app(message, Context(1, 2, place | config, RecordDict(), {}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"max-epsilon": 0.01}, "budget_exhausted", "max-epsilon=0.01"),
        ({"min-noise-multiplier": 2.0}, "refused", "min-noise-multiplier=2.0"),
        ({"ledger-path": "/dev/null/no"}, "ledger", "LedgerError (see the node's log)"),
    ],
)
def test_a_refusal_is_a_reply_with_a_code_and_public_facts_only(
    change: dict[str, object], code: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dpfl"):
        failure = wire.read_train_reply(reply({"data-id": "secret-ward", **change}, request((0,))))
    assert isinstance(failure, wire.NodeFailure)
    assert failure.code == code
    assert told in failure.text
    assert "secret-ward" not in failure.text
    assert "/dev/null" not in failure.text
    assert caplog.text  # the node's owner can read more


@pytest.mark.parametrize("kind", ["query", "train"])
def test_a_misconfigured_node_takes_no_part_and_tells_its_owner_why(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    LocalGrid(1, 0)
    config = {"partition-id": 0, "num-partitions": 1, "ledger-path": "wards/7"}
    asking = request((0,))
    if kind == "query":
        message = wire.hello_message(2, asking.settings)
    else:
        model = wire.model_record(dict(asking.model))
        message = wire.train_message(2, model, asking.settings, asking.order, [0])
    message.metadata.__dict__["_message_id"] = "1"
    with caplog.at_level(logging.WARNING, "dpfl"):
        answer = client_app.app(message, Context(1, 2, config, RecordDict(), {}))  # type: ignore[arg-type]
    told = dict(answer.content.config_records["config"])["error"]
    assert told == client_app.MISCONFIGURED
    assert "wards/7" not in str(answer.content)
    assert "ledger-path=wards/7: must be an absolute path" in caplog.text


def exhausted(message: Message, asking: TrainRequest) -> list[Message]:
    return [wire.failure_reply("max-epsilon=1: spent", message, wire.BUDGET_EXHAUSTED)]


def once(genuine: Answer) -> Answer:
    """A node whose budget is enough for one request."""
    counted = Counter[int]()

    def answer(message: Message, asking: TrainRequest) -> list[Message]:
        counted[message.metadata.dst_node_id] += 1
        first = counted[message.metadata.dst_node_id] == 1
        return genuine(message, asking) if first else exhausted(message, asking)

    return answer


FIVE = ["federation.population=5", "run.num_rounds=6", "mechanism.noise_multiplier=1", *UNLIMITED]


def test_nodes_that_refuse_are_absent_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = federation(tmp_path, *LOCAL, *FIVE)
    made.grid.answers = dict.fromkeys(range(4), exhausted)
    with caplog.at_level(logging.WARNING, "dpfl"):
        made.run()
    assert (made.strategy.status, made.strategy.rounds_done) == ("completed", 6)
    assert {trace.answered for trace in made.traces} == {(4,)}
    assert all(len(trace.errors) == 4 for trace in made.traces)
    assert caplog.text.count("max-epsilon=1: spent") == 1  # said, and said once


def test_a_run_ends_well_when_every_node_has_spent_its_budget(tmp_path: Path) -> None:
    made = federation(tmp_path, *LOCAL, *FIVE)
    made.grid.answers = dict.fromkeys(range(5), once(made.grid.genuine))
    made.run()
    assert (made.strategy.status, made.strategy.rounds_done) == ("budget_exhausted", 2)
    assert made.durable_rounds() == [1, 2]


def test_it_ends_only_when_nobody_is_left(tmp_path: Path) -> None:
    """By turns: each round asks others, so a round without answers is not the end yet."""
    turns = ["mechanism=local_gaussian", "cohort=round_robin", "cohort.size=1"]
    made = federation(tmp_path, *turns, "cohort.fraction=null", *FIVE)
    made.grid.answers = dict.fromkeys(range(5), exhausted)
    with pytest.raises(FederationError, match="3 rounds in a row"):
        made.run()
    made = federation(tmp_path / "two", *turns, "cohort.fraction=null", *FIVE, num_nodes=2)
    made.grid.answers = dict.fromkeys(range(2), exhausted)
    made.run()
    assert (made.strategy.status, made.strategy.rounds_done) == ("budget_exhausted", 2)


def test_an_amplified_run_does_not_tell_when_its_nodes_had_enough(tmp_path: Path) -> None:
    """When budgets ended says who had been sampled: the rounds go on, with noise alone."""
    poisson = ["mechanism=central_gaussian", "cohort=poisson", "cohort.sampling_rate=0.9"]
    made = federation(tmp_path, *poisson, *FIVE)
    made.grid.answers = dict.fromkeys(range(5), once(made.grid.genuine))
    made.run()
    assert (made.strategy.status, made.strategy.rounds_done) == ("completed", 6)
    assert len(made.released_sums) == 6
    assert np.linalg.norm(made.released_sums[-1]) > 0


def test_a_whole_run_against_a_spent_budget_ends_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = client_round.run_node
    calls: list[int] = []

    def limited(asking: TrainRequest, own: Node) -> ProtectedUpdate:
        calls.append(own.partition_id)
        if len(calls) > 2:
            raise BudgetError("max-epsilon=1: spent")
        return genuine(asking, own)

    monkeypatch.setattr(client_round, "run_node", limited)
    run = watched_run(
        tmp_path / "run", *LOCAL, *UNLIMITED, "mechanism.noise_multiplier=1", "run.num_rounds=5"
    )
    assert run.results["status"] == "budget_exhausted"
    assert run.results["num_rounds_done"] == 2
    assert (tmp_path / "run" / "model.safetensors").exists()
