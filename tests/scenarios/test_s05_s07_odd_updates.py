"""S05 to S07: integer counters, zero updates, non-finite updates."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from harness import CENTRAL, LOCAL, UNLIMITED, federation, spoil_client, watched_run
from torch import nn

from fl_app import wire
from fl_app.models.linear import PLUGIN as LINEAR
from fl_app.stages import ProtectedUpdate
from fl_app.wire import TrainRequest

MECHANISMS = {
    "central": [*CENTRAL, "mechanism.noise_multiplier=1", "mechanism.clipping_norm=0.01"],
    "local": [*LOCAL, "mechanism.noise_multiplier=1", "mechanism.clipping_norm=0.01"],
    "none": ["training=sgd"],
    "record": ["training.noise_multiplier=1", "training.clipping_norm=0.01"],
}


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x)
        return scores


@pytest.mark.parametrize("kind", MECHANISMS)
def test_s05_batch_norm_counters_neither_crash_nor_count_as_noised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(LINEAR, "build", lambda self, spec: Normalized())
    run = watched_run(
        tmp_path / "run", *MECHANISMS[kind], *UNLIMITED, "federation.population=4", num_nodes=2
    )
    assert run.report.status == "completed"
    num_floats = 64 * 8 + 8 + 8 + 8 + 8 * 10 + 10
    for reply in run.grid.train_replies():
        vector = reply.content.array_records["update"]["vector"]
        assert (vector.dtype, tuple(vector.shape)) == ("float64", (num_floats,))


@pytest.mark.parametrize("kind", MECHANISMS)
@pytest.mark.parametrize("how", ["learning rate 0", "no rows"])
def test_s06_zero_updates_complete_the_round_and_are_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    overrides = ["training.learning_rate=0"] if how == "learning rate 0" else []
    for client in range(4) if how == "no rows" else ():
        spoil_client(monkeypatch, client, "empty")
    run = watched_run(
        tmp_path / "run", *MECHANISMS[kind], *UNLIMITED, *overrides, "federation.population=4"
    )
    assert run.report.status == "completed"
    assert run.report.ledger_rows == (0 if kind == "none" else 2)
    for reply in run.grid.train_replies():
        vector_P = reply.content.array_records["update"]["vector"].numpy()
        noised = kind == "local" or (kind == "record" and how == "no rows")
        assert bool(vector_P.any()) is noised


def test_s07_a_nan_and_an_inf_update_among_six(tmp_path: Path) -> None:
    def delta(client: int, round: int) -> np.ndarray:
        bad = {1: np.nan, 4: np.inf}.get(client, 0.1)
        return np.array([0.1, bad, 0.1], np.float32)

    made = federation(
        tmp_path, *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=0", "run.num_rounds=1",
        "federation.population=6", delta=delta, num_parameters=3, num_nodes=2,
    ).run()  # fmt: skip
    assert made.traces[0].answered == (0, 1, 2, 3, 4, 5)
    np.testing.assert_allclose(made.released_sums[0], [0.4, 0.4, 0.4], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_s07_a_node_that_sends_a_non_finite_update_anyway_is_a_violation(
    tmp_path: Path, bad: float
) -> None:
    made = federation(
        tmp_path, *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=0", "run.num_rounds=2",
        "federation.population=6", delta=lambda client, round: np.full(3, 0.1, np.float32),
        num_parameters=3,
    )  # fmt: skip

    def hostile(message: Message, request: TrainRequest) -> list[Message]:
        vector_P = np.array([0.1, bad, 0.1], np.float32)
        update = ProtectedUpdate(
            round=request.order.round, clients=request.clients, vector_P=vector_P, weight=1.0
        )
        return [wire.train_reply(update, message)]

    made.grid.answers[5] = hostile
    made.run()
    for trace, total in zip(made.traces, made.released_sums, strict=True):
        assert trace.absent == (5,)
        assert "not finite" in trace.violations[0]
        np.testing.assert_allclose(total, 0.5, rtol=1e-6)
    assert np.isfinite(made.strategy.parameters_P).all()
