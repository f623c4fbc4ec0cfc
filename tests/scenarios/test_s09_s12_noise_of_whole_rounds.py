"""S09 to S12: dropouts, unequal clients, a million zero parameters, workers."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, MessageType
from harness import (
    CENTRAL,
    LOCAL,
    UNLIMITED,
    RecordingGrid,
    charged_rounds,
    dead,
    federation,
    watched_run,
)
from statistical.exact_intervals import is_normal, is_uncorrelated, mean_within, std_within

from fl_app import client_round, wire
from fl_app.engines.local import LocalGrid
from fl_app.errors import SettingsError
from fl_app.overrides import compose
from fl_app.run import default_directory
from fl_app.server_run import load_settings, run_server
from fl_app.settings import Settings
from fl_app.stages import ClientPartition, LoadedData


class DroppingGrid(RecordingGrid):
    """Loses the replies of some nodes."""

    def __init__(self, num_nodes: int, lost: set[int]) -> None:
        super().__init__(num_nodes)
        self.lost = lost

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        return [
            m
            for m in replies
            if m.metadata.message_type != MessageType.TRAIN
            or m.metadata.src_node_id - 2 not in self.lost
        ]


@pytest.mark.parametrize("lost", [set(), {1, 4, 6}, set(range(8))], ids=["none", "three", "all"])
def test_s09_dropouts_are_charged_and_named_to_the_operator_only(
    tmp_path: Path, lost: set[int]
) -> None:
    folder = tmp_path / "run"
    settings = load_settings(
        [*CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=1", "federation.population=8",
         "run.num_rounds=2", f"run.output_dir={folder}"], default_directory,
    )  # fmt: skip
    report = run_server(DroppingGrid(8, lost), settings)
    assert (report.status, report.num_rounds_done) == ("completed", 2)
    assert charged_rounds(folder / "ledger.sqlite") == [1, 2]
    records = [json.loads(x) for x in (folder / "operator.jsonl").read_text().splitlines()]
    assert [set(r["absent"]) for r in records if r["event"] == "round"] == [lost, lost]
    history = json.loads((folder / "results.json").read_text())["history"]
    assert [(row["cohort_expected"], row["noise_std_of_sum"]) for row in history] == [(8, 1)] * 2


@pytest.mark.parametrize(("num_dead", "factor"), [(0, 8**0.5), (3, 5**0.5), (7, 1.0)])
def test_s09_local_noise_follows_those_who_answered(
    tmp_path: Path, num_dead: int, factor: float
) -> None:
    """n = 50,000: 1.6 % accepted, false alarm 1e-6."""
    made = federation(
        tmp_path, *LOCAL, *UNLIMITED, "mechanism.noise_multiplier=2", "mechanism.clipping_norm=3",
        "federation.population=8", "run.num_rounds=1", num_parameters=50_000,
    )  # fmt: skip
    for part in range(num_dead):
        made.grid.answers[part] = dead
    (noise,) = made.run().released_sums
    assert std_within(noise, 6 * factor)
    assert not std_within(noise, 6 * 8**0.5 * 1.05)


def test_s10_clients_of_10_and_of_1000_rows_move_the_average_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clip 1; the average is over q N = 4: nobody's share is above 1/4."""
    genuine = client_round.client_partition

    def sized(client: int, settings: Settings, data: LoadedData) -> ClientPartition:
        whole = genuine(client, settings, data)
        rows = np.arange(1000) if client == 1 else np.arange(1000, 1010)
        return ClientPartition(client=client, table=whole.table, rows=rows)

    monkeypatch.setattr(client_round, "client_partition", sized)
    run = watched_run(
        tmp_path / "run", *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=0",
        "federation.population=4", "training.learning_rate=5", "training.local_epochs=20",
        "run.num_rounds=1", num_nodes=4,
    )  # fmt: skip
    norms = []
    for reply in run.grid.train_replies():
        update = wire.read_train_reply(reply)
        assert not isinstance(update, str)
        norms.append(np.linalg.norm(update.vector_P.astype(np.float64)))
        assert update.weight == 1.0
    assert norms == pytest.approx([1.0] * 4, rel=1e-5)
    with pytest.raises(SettingsError, match="example counts are private"):
        compose([*CENTRAL, "federation.weighting=examples"])


@pytest.mark.parametrize(
    ("overrides", "std"), [(CENTRAL, 1.0), (LOCAL, 3**0.5)], ids=["central", "local"]
)
def test_s11_a_million_zero_parameters(tmp_path: Path, overrides: list[str], std: float) -> None:
    """n = 1e6: |std / expected - 1| < 0.0035, |mean| < 0.0049 std, KS; false alarms 1e-6 each."""
    made = federation(
        tmp_path, *overrides, *UNLIMITED, "mechanism.noise_multiplier=1", "federation.population=3",
        "run.num_rounds=1", num_parameters=1_000_000,
    )  # fmt: skip
    (noise,) = made.run().released_sums
    assert mean_within(noise, std)
    assert std_within(noise, std)
    assert abs(noise.std() / std - 1) < 0.01
    assert is_normal(noise, std)
    assert not std_within(noise * 1.01, std)


def test_s11_no_noise_where_none_is_configured(tmp_path: Path) -> None:
    made = federation(
        tmp_path, "mechanism=none", *UNLIMITED, "run.num_rounds=1", num_parameters=1_000_000
    )
    assert not made.run().released_sums[0].any()


class TwoWorkers(LocalGrid):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.vectors: list[np.ndarray] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if reply.metadata.message_type == MessageType.TRAIN:
                self.vectors.append(reply.content.array_records["update"]["vector"].numpy())
        return replies


@pytest.mark.parametrize("overrides", [
    [*LOCAL, "mechanism.noise_multiplier=100"],
    ["training.noise_multiplier=1000"],
], ids=["local", "record"])  # fmt: skip
def test_s12_worker_processes_and_rounds_have_unrelated_noise(
    tmp_path: Path, overrides: list[str]
) -> None:
    """2 workers x 2 rounds, 650 parameters of almost pure noise; |r| < 0.19 accepted, 1e-6 each."""
    settings = load_settings(
        [*overrides, *UNLIMITED, "federation.population=2", "run.num_rounds=2",
         f"run.output_dir={tmp_path / 'run'}"], default_directory,
    )  # fmt: skip
    with TwoWorkers() as grid:
        run_server(grid, settings)
    assert len(grid.vectors) == 4
    for i, first in enumerate(grid.vectors):
        for second in grid.vectors[i + 1 :]:
            assert is_uncorrelated(first, second)
    assert not is_uncorrelated(grid.vectors[0], grid.vectors[0] + grid.vectors[1])
