"""The node's own configuration decides, whatever a message says."""

from pathlib import Path

import pytest

from fl_app.client_policy import LOCAL_SIMULATION, Node, home
from fl_app.client_round import _batch_stream
from fl_app.errors import PrivacyError, ProtocolError
from fl_app.overrides import compose
from fl_app.stages import RoundOrder

DEPLOYED = {"partition-id": 1, "num-partitions": 3}
ORDER = RoundOrder(
    round=1,
    clipping_norm=None,
    noise_multiplier=None,
    training_noise_multiplier=1.0,
    nominal_rows=10,
)


def test_node_reads_its_own_configuration() -> None:
    node = Node.from_config({**DEPLOYED, "data-path": "/data"})
    assert (node.partition_id, node.num_partitions, node.data_path) == (1, 3, "/data")
    assert not node.simulated
    assert Node.from_config({**DEPLOYED, LOCAL_SIMULATION: True}).simulated


@pytest.mark.parametrize(
    "config",
    [{}, {"partition-id": 3, "num-partitions": 3}, {"partition-id": "0", "num-partitions": 1}],
)
def test_node_without_a_valid_place_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="partition-id"):
        Node.from_config(config)


def test_deployed_node_refuses_seeded_noise_unless_it_allows_it() -> None:
    settings = compose(["run.seeded_noise=true"])
    with pytest.raises(PrivacyError, match=r"run\.seeded_noise"):
        Node.from_config(DEPLOYED).check(settings)
    Node.from_config({**DEPLOYED, "allow-seeded-noise": True}).check(settings)
    Node.from_config({**DEPLOYED, LOCAL_SIMULATION: True}).check(settings)


def test_deployed_node_draws_batches_from_its_own_entropy() -> None:
    deployed, simulated = (
        Node.from_config(DEPLOYED),
        Node.from_config({**DEPLOYED, LOCAL_SIMULATION: True}),
    )
    draws = [_batch_stream(0, ORDER, 1, deployed).random(4).tolist() for _ in range(2)]
    assert draws[0] != draws[1]
    draws = [_batch_stream(0, ORDER, 1, simulated).random(4).tolist() for _ in range(2)]
    assert draws[0] == draws[1]


@pytest.mark.parametrize("clients", [[0], [1, 2], [1, 1], [10], [-2]])
def test_node_refuses_clients_that_it_does_not_host(clients: list[int]) -> None:
    with pytest.raises(ProtocolError):
        Node.from_config(DEPLOYED).check_clients(clients, population=10)
    Node.from_config(DEPLOYED).check_clients([1, 4, 7], population=10)


def test_home_is_absolute_and_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DPFL_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("DPFL_HOME")
    assert home().name == ".dpfl"
