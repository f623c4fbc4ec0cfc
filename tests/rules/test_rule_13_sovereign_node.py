"""Rule 13, as far as it is built: what a node refuses whatever the server asks."""

from pathlib import Path

import numpy as np
import pytest
from harness import UNLIMITED, node

from fl_app import client_round
from fl_app.client_policy import Node
from fl_app.errors import FederationError, PrivacyError, ProtocolError
from fl_app.models import build_model
from fl_app.overrides import compose
from fl_app.settings import Settings
from fl_app.stages import InputSpec, ProtectedUpdate, RoundOrder
from fl_app.wire import TrainRequest

ORDER = RoundOrder(
    round=1, clipping_norm=1.0, noise_multiplier=1.0, training_noise_multiplier=None, nominal_rows=1
)


def settings(*overrides: str) -> Settings:
    local = ["mechanism=local_gaussian", "mechanism.noise_multiplier=1", *UNLIMITED]
    return compose([*local, *overrides])


def asked(own: Node, clients: tuple[int, ...], *overrides: str) -> ProtectedUpdate:
    made = settings(*overrides)
    spec = InputSpec(shape=(1, 8, 8), num_classes=10)
    model = build_model(made.model, spec, seed=0, private=True)
    request = TrainRequest(
        settings=made.to_wire(), order=ORDER, clients=clients, model=model.state_dict()
    )
    return client_round.run_node(request, own)


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
