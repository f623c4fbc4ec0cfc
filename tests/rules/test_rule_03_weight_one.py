"""Rule 3: under client-level DP every update counts once; row counts are private."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from harness import CENTRAL, LOCAL, UNLIMITED, federation, node, watched_run

from fl_app import client_round, wire
from fl_app.errors import SettingsError
from fl_app.overrides import compose
from fl_app.stages import ProtectedUpdate
from fl_app.wire import TrainRequest


@pytest.mark.parametrize("overrides", [CENTRAL, LOCAL], ids=["central", "local"])
def test_a_client_of_100_000_rows_moves_the_sum_like_one_of_10(
    tmp_path: Path, overrides: list[str]
) -> None:
    """The fake clients have 10, 100, ... rows; each sends its own basis vector of length C."""
    made = federation(
        tmp_path, *overrides, *UNLIMITED, "mechanism.noise_multiplier=0", "run.num_rounds=1",
        "federation.population=5", delta=lambda client, round: np.eye(5, dtype=np.float32)[client],
        num_parameters=5, num_nodes=2,
    )  # fmt: skip
    np.testing.assert_allclose(made.run().released_sums[0], np.ones(5), rtol=1e-6)


@pytest.mark.parametrize("private", [CENTRAL, LOCAL, ["training=dp_sgd"]])
def test_weights_by_examples_are_refused_with_any_privacy(private: list[str]) -> None:
    with pytest.raises(SettingsError, match=r"federation\.weighting=examples: example counts"):
        compose([*private, "federation.weighting=examples"])


def test_the_weight_on_the_wire_is_the_public_number_of_clients(tmp_path: Path) -> None:
    run = watched_run(
        tmp_path / "run", *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=1", num_nodes=3
    )
    for reply in run.grid.train_replies():
        config = reply.content.config_records["config"]
        assert config["weight"] == len(config["clients"])


@pytest.mark.parametrize("weight", [7.0, 0.0, 1e9, float("nan"), -1.0])
def test_a_node_that_claims_another_weight_is_not_summed(tmp_path: Path, weight: float) -> None:
    made = federation(
        tmp_path, *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=0", "run.num_rounds=1",
        delta=lambda client, round: np.full(4, 0.1, np.float32), num_parameters=4,
    )  # fmt: skip

    def heavy(message: Message, request: TrainRequest) -> list[Message]:
        update = ProtectedUpdate(
            round=1, clients=(3,), vector_P=np.full(4, 0.1, np.float32), weight=weight
        )
        return [wire.train_reply(update, message)]

    made.grid.answers[3] = heavy
    made.run()
    np.testing.assert_allclose(made.released_sums[0], 9 * 0.1, rtol=1e-6)
    assert 3 in made.traces[0].absent
    assert "weight" in made.traces[0].violations[0]


def test_a_nodes_code_gives_weight_one_whatever_the_rows(tmp_path: Path) -> None:
    settings = compose([*CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=1"])
    own = node(folder=tmp_path)
    data = client_round.worker_data(settings.to_wire(), own)
    sizes = {len(client_round.client_partition(c, settings, data).rows) for c in range(10)}
    assert len(sizes) > 3  # Dirichlet: the clients are of different sizes
    made = federation(
        tmp_path, *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=1", "run.num_rounds=1"
    )
    made.run()
    order = made.grid.requests[0].order
    model = client_round.worker_model(settings.to_wire(), own)
    global_P = client_round.flat_parameters(model)
    for client in range(3):
        update = client_round.run_client(client, settings, order, model, global_P, data, own)
        assert update.weight == 1.0
