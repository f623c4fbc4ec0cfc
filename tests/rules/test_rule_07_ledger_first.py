"""Rule 7: the charge is durable before anybody is asked and before anything released is seen."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from harness import CENTRAL, LOCAL, UNLIMITED, charged_rounds, federation, watched_run
from safetensors import safe_open

from fl_app import server_run
from fl_app.accounting.ledger import Ledger, verify
from fl_app.errors import LedgerError
from fl_app.privacy import PrivacyEvent
from fl_app.run_directory import RunDirectory
from fl_app.server_run import run_server

NOISE = [*UNLIMITED, "mechanism.noise_multiplier=1", "run.num_rounds=3"]


@pytest.mark.parametrize("overrides", [CENTRAL, LOCAL], ids=["central", "local"])
def test_another_process_sees_the_charge_when_clients_are_asked_and_the_model_moves(
    tmp_path: Path, overrides: list[str]
) -> None:
    made = federation(tmp_path, *overrides, *NOISE)
    asked: list[tuple[int, list[int]]] = []
    stepped: list[list[int]] = []
    made.grid.on_train.append(lambda r: asked.append((r.order.round, made.durable_rounds())))
    made.optimizer.before_step.append(lambda: stepped.append(made.durable_rounds()))
    made.run()
    assert len(asked) == 30
    for round, charged in asked:
        assert charged == list(range(1, round + 1))
    assert stepped == [[1], [1, 2], [1, 2, 3]]


def test_the_cohort_is_drawn_after_the_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = federation(tmp_path, *CENTRAL, *NOISE)
    genuine, charged = made.strategy._draw_cohort, []

    def draw(round: int, attempt: int) -> np.ndarray:
        charged.append(made.durable_rounds())
        return genuine(round, attempt)

    monkeypatch.setattr(made.strategy, "_draw_cohort", draw)
    made.run()
    assert charged == [[1], [1, 2], [1, 2, 3]]


def test_a_charge_that_cannot_be_written_stops_the_round_before_anybody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = federation(tmp_path, *CENTRAL, *NOISE)
    made.run(1)

    def full(*_: object) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(made.ledger, "append_all", full)
    before_P, asked = made.strategy.parameters_P.copy(), len(made.grid.requests)
    with pytest.raises(LedgerError):
        made.run()
    assert len(made.grid.requests) == asked
    assert len(made.optimizer.means) == 1
    np.testing.assert_array_equal(made.strategy.parameters_P, before_P)


def test_a_commit_is_synced_to_disk_before_it_returns(tmp_path: Path) -> None:
    """FULL (2) syncs the write-ahead log at every commit; NORMAL (1) would not."""
    with Ledger.create(tmp_path / "ledger.sqlite", "run") as ledger:
        level = ledger._connection.execute("PRAGMA synchronous").fetchone()[0]
        mode = ledger._connection.execute("PRAGMA journal_mode").fetchone()[0]
    assert (level, mode) == (2, "wal")


def test_whole_run_charges_before_evaluation_and_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = tmp_path / "run", []
    evaluate = server_run.evaluate
    save = RunDirectory.save_checkpoint

    def evaluating(*arguments: object, **named: object) -> dict[str, float]:
        seen.append(len(charged_rounds(folder / "ledger.sqlite")))
        return evaluate(*arguments, **named)  # type: ignore[arg-type]

    def saving(self: RunDirectory, checkpoint: object) -> None:
        assert len(charged_rounds(folder / "ledger.sqlite")) == checkpoint.round  # type: ignore[attr-defined]
        save(self, checkpoint)  # type: ignore[arg-type]

    monkeypatch.setattr(server_run, "evaluate", evaluating)
    monkeypatch.setattr(RunDirectory, "save_checkpoint", saving)
    watched_run(folder, *CENTRAL, *NOISE)
    assert seen == [1, 2, 3, 3]


def test_head_and_row_count_are_kept_in_checkpoint_and_results(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "run", *CENTRAL, *NOISE)
    with Ledger.open(run.folder / "ledger.sqlite") as ledger:
        head, rows = ledger.head, ledger.num_rows
        assert {PrivacyEvent.from_json(e.event).noise_multiplier for e in ledger.entries()} == {1.0}
    assert run.results["ledger"] == {"head": head, "rows": rows}
    assert rows == 3
    with safe_open(run.folder / "checkpoint.safetensors", framework="np") as file:
        assert (file.metadata()["ledger_head"], file.metadata()["ledger_rows"]) == (head, "3")


@pytest.mark.parametrize("damage", ["missing", "last row removed", "z changed", "older copy"])
def test_a_run_is_not_continued_on_less_than_was_spent(tmp_path: Path, damage: str) -> None:
    run = watched_run(tmp_path / "run", *CENTRAL, *NOISE, "run.stop_after=2")
    path = run.folder / "ledger.sqlite"
    if damage == "missing":
        path.unlink()
    elif damage == "older copy":
        event = next(iter(run.settings.events(1.0)))
        path.unlink()
        with Ledger.create(path, "test") as other:
            other.append(1, event)
    else:
        statement = {
            "last row removed": "DELETE FROM releases WHERE seq = 2",
            "z changed": "UPDATE releases SET event = "
            "replace(event, '\"noise_multiplier\":1.0', '\"noise_multiplier\":9.0') WHERE seq = 1",
        }[damage]
        with closing(sqlite3.connect(path)) as connection, connection:
            assert connection.execute(statement).rowcount == 1
    settings = server_run.load_settings([f"run.resume={run.folder}"], lambda: tmp_path)
    with pytest.raises(LedgerError):
        run_server(run.grid, settings)
    assert verify(path, run.results["ledger"]["head"], run.results["ledger"]["rows"])


def test_an_untouched_ledger_lets_the_run_go_on(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "run", *CENTRAL, *NOISE, "run.stop_after=2")
    settings = server_run.load_settings([f"run.resume={run.folder}"], lambda: tmp_path)
    assert run_server(run.grid, settings).ledger_rows == 3
