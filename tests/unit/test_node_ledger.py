"""The node's ledger: durable, one budget for all processes, and no going back (rule 13)."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fl_app.accounting.ledger import Ledger, read, verify
from fl_app.accounting.node_charge import record_epsilon
from fl_app.accounting.node_ledger import NodeLedger, data_id_of, head_path
from fl_app.errors import BudgetError, LedgerError, SettingsError
from fl_app.ledger_view import ledger_view
from fl_app.privacy import NeighboringRelation, NoiseKind, PrivacyEvent, PrivacyUnit, View
from fl_app.run_directory import verify_ledger

EVENT = PrivacyEvent(
    unit=PrivacyUnit.CLIENT,
    view=View.SERVER,
    relation=NeighboringRelation.ZERO_OUT,
    noise=NoiseKind.GAUSSIAN,
    noise_multiplier=4.0,
)
DELTA = 1e-5
FORK = multiprocessing.get_context("fork")


def node_ledger(folder: Path, max_epsilon: float | None = None) -> NodeLedger:
    return NodeLedger(
        path=folder / "ledger.sqlite", data_id="ward-7", max_epsilon=max_epsilon, max_delta=DELTA
    )


def enough_for(num_requests: int) -> float:
    """A budget that allows so many requests of one event and not one more."""
    return record_epsilon({EVENT: num_requests}, DELTA) * (1 + 1e-9)


def requests(ledger: NodeLedger) -> list[int]:
    """The request number of every row that another process sees in the file."""
    return [entry.round for entry in read(ledger.path)]


def test_a_charge_is_in_the_file_when_it_returns(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path)
    ledger.charge([EVENT, EVENT])
    ledger.charge([EVENT])
    assert requests(ledger) == [1, 1, 2]
    assert verify_ledger(ledger.path) == []


def test_the_same_request_twice_is_charged_twice(tmp_path: Path) -> None:
    """Rows are the node's own count: nothing that a server sends makes two requests one."""
    ledger = node_ledger(tmp_path)
    for _ in range(3):
        ledger.charge([EVENT])
    assert requests(ledger) == [1, 2, 3]
    with Ledger.open(ledger.path) as opened:
        assert opened.counts() == {EVENT: 3}
        assert opened.repeats() == {}


def test_a_budget_ends_before_it_would_be_exceeded_and_stays_ended(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path, enough_for(3))
    for _ in range(3):
        ledger.charge([EVENT])
    with pytest.raises(BudgetError, match="max-epsilon="):
        ledger.charge([EVENT])
    # Another process, another run, another version of the app: the file is what counts.
    with pytest.raises(BudgetError):
        node_ledger(tmp_path, enough_for(3)).check([EVENT])
    assert requests(ledger) == [1, 2, 3]
    node_ledger(tmp_path, enough_for(4)).charge([EVENT])  # its owner may raise it
    assert requests(ledger) == [1, 2, 3, 4]


def test_a_request_of_several_clients_is_charged_whole_or_not_at_all(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path, enough_for(3))
    ledger.charge([EVENT] * 2)
    with pytest.raises(BudgetError):
        ledger.charge([EVENT] * 2)
    ledger.charge([EVENT])
    assert requests(ledger) == [1, 1, 2]


def test_a_budget_refuses_what_has_no_noise_and_what_comes_after(tmp_path: Path) -> None:
    bare = replace(EVENT, noise_multiplier=0.0)
    with pytest.raises(BudgetError):
        node_ledger(tmp_path, 1e6).charge([bare])
    node_ledger(tmp_path).charge([bare])  # without a budget it is written down
    with pytest.raises(BudgetError):
        node_ledger(tmp_path, 1e6).charge([EVENT])


def test_checking_charges_nothing(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path, enough_for(1))
    for _ in range(3):
        ledger.check([EVENT])
    assert requests(ledger) == []
    ledger.charge([EVENT])


def test_a_ledger_is_that_of_one_data_id(tmp_path: Path) -> None:
    node_ledger(tmp_path).charge([EVENT])
    with pytest.raises(LedgerError, match=r"data:ward-7, not of data:ward-8"):
        replace(node_ledger(tmp_path), data_id="ward-8").charge([EVENT])
    assert data_id_of("data:ward-7") == "ward-7"
    assert data_id_of("0f3a-77") is None
    Ledger.create(tmp_path / "run.sqlite", "run").close()
    with pytest.raises(LedgerError, match="not of data:ward-7"):
        replace(node_ledger(tmp_path), path=tmp_path / "run.sqlite").charge([EVENT])


# Several processes.


def in_processes(count: int, work: Callable[[int], None]) -> list[int]:
    """Runs `work` in so many processes at once and returns their exit codes."""
    processes = [FORK.Process(target=work, args=(i,)) for i in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    return [process.exitcode if process.exitcode is not None else -1 for process in processes]


def test_eight_processes_at_once_lose_no_charge(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path)

    def charge(number: int) -> None:
        for _ in range(4):
            ledger.charge([EVENT] * (number + 1))

    assert in_processes(8, charge) == [0] * 8
    rows = Counter(requests(ledger))  # rows of each request
    assert sorted(rows) == list(range(1, 33))
    assert Counter(rows.values()) == dict.fromkeys(range(1, 9), 4)
    assert verify_ledger(ledger.path) == []


def test_eight_processes_at_once_do_not_overspend(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path, enough_for(10))

    def charge(number: int) -> None:
        for _ in range(3):
            try:
                ledger.charge([EVENT])
            except BudgetError:
                continue
            (tmp_path / f"trained-{number}").open("a").write("x")

    assert in_processes(8, charge) == [0] * 8
    trained = sum(path.stat().st_size for path in tmp_path.glob("trained-*"))
    assert (trained, requests(ledger)) == (10, list(range(1, 11)))


# Kills.


def test_kill_9_at_20_moments_loses_no_charge_whose_training_began(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path)
    moments = random.Random(4)
    began = 0
    for _ in range(20):
        receive, send = os.pipe()
        process = FORK.Process(target=keep_training, args=(ledger, send))
        process.start()
        os.close(send)
        time.sleep(moments.uniform(0.0, 0.3))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        with os.fdopen(receive, "rb") as pipe:
            began += len(pipe.read())
        charged = read(ledger.path) if ledger.path.exists() else []
        assert verify_ledger(ledger.path) == [] or not charged
        assert len({entry.round for entry in charged}) >= began
        assert set(Counter(entry.round for entry in charged).values()) <= {2}  # no half request
        began = len({entry.round for entry in charged})  # the one in progress may be charged
    assert began > 20
    ledger.charge([EVENT, EVENT])
    assert len(requests(ledger)) == 2 * (began + 1)
    assert verify_ledger(ledger.path) == []


def keep_training(ledger: NodeLedger, pipe: int) -> None:
    while True:
        ledger.charge([EVENT, EVENT])
        os.write(pipe, b"t")


# Disks.


def test_a_full_disk_is_a_refusal_and_not_a_free_round(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path)
    ledger.charge([EVENT])
    before = ledger.path.read_bytes(), head_path(ledger.path).read_bytes()

    def charge(limit: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(LedgerError):
            ledger.charge([EVENT] * 500)

    for limit in (0, 10_000):
        process = FORK.Process(target=charge, args=(limit,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert verify(ledger.path) == []
    assert requests(ledger) == [1]
    assert head_path(ledger.path).read_bytes() == before[1]
    ledger.charge([EVENT])
    assert requests(ledger) == [1, 2]


@pytest.mark.parametrize("place", ["missing/ledger.sqlite", "file/ledger.sqlite", "folder"])
def test_a_place_that_cannot_be_written_is_a_refusal(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(LedgerError):
        replace(node_ledger(tmp_path), path=tmp_path / place).charge([EVENT])


def test_a_head_that_cannot_be_written_is_a_refusal(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path)
    ledger.charge([EVENT])
    (tmp_path / "ledger.sqlite.head.tmp").mkdir()
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.charge([EVENT])
    assert requests(ledger) == [1, 2]  # one charge more, never one less


# Going back.


def test_an_older_copy_is_refused(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path)
    ledger.charge([EVENT])
    shutil.copy(ledger.path, tmp_path / "old")
    ledger.charge([EVENT])
    shutil.copy(tmp_path / "old", ledger.path)
    assert "older than" in verify_ledger(ledger.path)[0]
    with pytest.raises(LedgerError, match="older than"):
        ledger.charge([EVENT])
    assert requests(ledger) == [1]


@pytest.mark.parametrize("gone", ["ledger.sqlite", "ledger.sqlite.head"])
def test_a_lost_file_is_no_new_budget(tmp_path: Path, gone: str) -> None:
    ledger = node_ledger(tmp_path)
    ledger.charge([EVENT])
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"ledger\.sqlite\.head"):
            ledger.charge([EVENT])
    (tmp_path / "elsewhere").replace(tmp_path / gone)
    ledger.charge([EVENT])
    assert requests(ledger) == [1, 2]


@pytest.mark.parametrize("content", ["", "{}", '{"head": "x", "rows": 1}', '{"head": 1}', "[]"])
def test_a_spoilt_head_is_refused(tmp_path: Path, content: str) -> None:
    ledger = node_ledger(tmp_path)
    ledger.charge([EVENT])
    head_path(ledger.path).write_text(content)
    assert len(verify_ledger(ledger.path)) == 1
    with pytest.raises(LedgerError, match="ledger"):
        ledger.charge([EVENT])


def test_a_row_that_was_edited_is_refused(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path)
    ledger.charge([EVENT])
    with sqlite3.connect(ledger.path) as database:
        database.execute("UPDATE releases SET event = ?", (replace(EVENT, steps=1).to_json(),))
        database.execute(
            "UPDATE releases SET event = ?", (replace(EVENT, noise_multiplier=99.0).to_json(),)
        )
    database.close()
    assert "was changed" in verify_ledger(ledger.path)[0]
    with pytest.raises(LedgerError, match="was changed"):
        ledger.charge([EVENT])


def test_a_kill_between_charge_and_head_is_one_charge_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = node_ledger(tmp_path)
    ledger.charge([EVENT])
    with monkeypatch.context() as patch:
        patch.setattr(NodeLedger, "_write_head", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.charge([EVENT])
    assert json.loads(head_path(ledger.path).read_text())["rows"] == 1
    ledger.charge([EVENT])
    assert requests(ledger) == [1, 2, 3]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# Showing.


def test_the_ledger_of_a_node_says_what_is_spent_and_what_is_left(tmp_path: Path) -> None:
    ledger = node_ledger(tmp_path)
    for _ in range(3):
        ledger.charge([EVENT, EVENT])
    view = ledger_view(ledger.path, delta=DELTA, max_epsilon=20.0)
    spent = record_epsilon({EVENT: 6}, DELTA)
    assert (view.values["data_id"], view.values["num_requests"]) == ("ward-7", 3)
    assert view.values["num_releases"] == len(view.values["rows"]) == 6
    assert view.values["left"] == pytest.approx(20.0 - spent, abs=1.1e-3)
    assert view.values["left"] <= 20.0 - spent
    kinds = [(row["unit"], row["accountant"]) for row in view.values["guarantees"]]
    assert kinds == [("CLIENT", "rdp"), ("CLIENT", "pld"), ("RECORD", "rdp"), ("RECORD", "pld")]
    assert "RECORD against SERVER: epsilon" in view.text
    assert "request     3" in view.text
    assert ledger_view(ledger.path).values["left"] is None
    held = node_ledger(tmp_path, max_epsilon=30.0)
    held.charge([EVENT])
    kept = ledger_view(ledger.path).values
    spent = record_epsilon({EVENT: 7}, DELTA)
    assert (kept["max_epsilon"], kept["guarantees"][0]["delta"]) == (30.0, DELTA)
    assert kept["left"] == pytest.approx(30.0 - spent, abs=1.1e-3)
    other = ledger_view(ledger.path, delta=DELTA / 10).values
    assert (other["max_epsilon"], other["left"]) == (None, None)
    assert ledger_view(ledger.path, max_epsilon=1.0).values["left"] == 0.0
    for wrong in ({"delta": 0.0}, {"delta": 1e-13}, {"max_epsilon": 0.0}):
        with pytest.raises(SettingsError, match="--"):
            ledger_view(ledger.path, **wrong)
