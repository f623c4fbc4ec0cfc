"""The ledger: durable before it returns, chained, one writer, and any tampering found (rule 7)."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fl_app.accounting.ledger import Ledger, heads, read, read_id, verify
from fl_app.errors import LedgerError
from fl_app.privacy import NeighboringRelation, NoiseKind, PrivacyEvent, PrivacyUnit, View

ROOT = Path(__file__).resolve().parents[2]

CLIENT = PrivacyEvent(
    unit=PrivacyUnit.CLIENT,
    view=View.OBSERVER,
    relation=NeighboringRelation.ZERO_OUT,
    noise=NoiseKind.GAUSSIAN,
    noise_multiplier=1.1,
)
RECORD = replace(CLIENT, unit=PrivacyUnit.RECORD, view=View.SERVER, noise_multiplier=0.1, steps=4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def filled(path: Path, num_rounds: int = 5, run_id: str = "run") -> Ledger:
    ledger = Ledger.create(path, run_id)
    for round in range(1, num_rounds + 1):
        ledger.append(round, CLIENT)
    return ledger


def edit(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_rows_and_counts_survive_closing(path):
    with Ledger.create(path, "run") as ledger:
        first = ledger.append_all(1, [CLIENT, RECORD])
        second = ledger.append(2, CLIENT)
        head = ledger.head
    with Ledger.open(path) as ledger:
        assert ledger.entries() == [*first, second]
        assert [entry.round for entry in ledger.entries()] == [1, 1, 2]
        assert [entry.seq for entry in ledger.entries()] == [1, 2, 3]
        assert ledger.counts() == {CLIENT: 2, RECORD: 1}
        assert (ledger.head, ledger.num_rows) == (head, 3)


def test_appending_goes_on_where_it_stopped(path):
    filled(path, 2).close()
    with Ledger.open(path) as ledger:
        entry = ledger.append(3, RECORD)
    assert (entry.seq, entry.round) == (3, 3)
    assert verify(path, head=entry.digest, num_rows=3) == []


def test_a_row_is_in_the_file_before_append_returns(path):
    with Ledger.create(path, "run") as ledger:
        ledger.append(1, CLIENT)
        other = sqlite3.connect(path)
        assert other.execute("SELECT count(*) FROM releases").fetchone() == (1,)
        other.close()


def test_every_commit_is_synced_to_disk(path):
    with Ledger.create(path, "run") as ledger:
        assert ledger._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert ledger._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert not ledger._connection.in_transaction


def test_one_plain_file_remains_after_closing(path):
    filled(path).close()
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    copy = path.with_name("copy.sqlite")
    shutil.copy(path, copy)
    assert verify(copy, num_rows=5) == []


def test_digests_of_the_past(path):
    with Ledger.create(path, "run") as ledger:
        heads = [ledger.head]
        for round in range(1, 4):
            ledger.append(round, CLIENT)
            heads.append(ledger.head)
        assert [ledger.digest_at(n) for n in range(4)] == heads
        assert len(set(heads)) == 4
        with pytest.raises(LedgerError, match="has 3 rows, not 4"):
            ledger.digest_at(4)


def test_chains_of_different_runs_differ_from_the_start(tmp_path):
    first = filled(tmp_path / "a.sqlite", 1, "one")
    second = filled(tmp_path / "b.sqlite", 1, "two")
    assert first.digest_at(0) != second.digest_at(0)
    assert first.head != second.head
    first.close()
    second.close()


def test_rows_hold_no_times(path):
    filled(path, 1).close()
    connection = sqlite3.connect(path)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(releases)")]
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    connection.close()
    assert columns == ["seq", "round", "event", "previous", "digest"]
    assert meta == {"schema": "1", "run_id": "run"}


def test_equal_histories_give_equal_heads(tmp_path):
    heads = set()
    for name in ("a", "b"):
        with filled(tmp_path / name) as ledger:
            heads.add(ledger.head)
    assert len(heads) == 1


def test_several_rows_are_written_all_or_none(path):
    ledger = filled(path, 1)
    head = ledger.head
    # Somebody slips in the row that the second of the two would become.
    edit(path, "INSERT INTO releases VALUES (3, 9, 'x', 'y', 'z')")
    with pytest.raises(LedgerError, match="cannot be read or written"):
        ledger.append_all(2, [CLIENT, RECORD])
    assert (ledger.num_rows, ledger.head, ledger.counts()) == (1, head, {CLIENT: 1})
    edit(path, "DELETE FROM releases WHERE seq = 3")
    ledger.close()
    assert verify(path, head=head, num_rows=1) == []


# Tampering. The control: an untouched ledger has no problems.


def test_an_untouched_ledger_has_no_problems(path):
    with filled(path) as ledger:
        head = ledger.head
        assert verify(path, head, 5) == []  # also while it is open
    assert verify(path) == []
    assert verify(path, head) == []
    assert verify(path, head, 5) == []


CHEAPER = replace(CLIENT, noise_multiplier=100.0).to_json()

TAMPERING = {
    "edited event": [f"UPDATE releases SET event = '{CHEAPER}' WHERE seq = 3"],
    "edited round": ["UPDATE releases SET round = 7 WHERE seq = 3"],
    "edited digest": ["UPDATE releases SET digest = 'f' || substr(digest, 2) WHERE seq = 5"],
    "removed first": ["DELETE FROM releases WHERE seq = 1"],
    "removed middle": ["DELETE FROM releases WHERE seq = 3"],
    "removed and renumbered": [
        "DELETE FROM releases WHERE seq = 3",
        "UPDATE releases SET seq = 3 WHERE seq = 4",
        "UPDATE releases SET seq = 4 WHERE seq = 5",
    ],
    "swapped": [
        "UPDATE releases SET seq = 99 WHERE seq = 2",
        "UPDATE releases SET seq = 2 WHERE seq = 3",
        "UPDATE releases SET seq = 3 WHERE seq = 99",
    ],
    "inserted": ["INSERT INTO releases SELECT 6, round, event, previous, digest FROM releases"],
    "another run": ["UPDATE meta SET value = 'other' WHERE key = 'run_id'"],
    "another schema": ["UPDATE meta SET value = '2' WHERE key = 'schema'"],
    "no table": ["DROP TABLE releases"],
}
TAMPERING["inserted"][0] += " WHERE seq = 5"


@pytest.mark.parametrize("statements", TAMPERING.values(), ids=TAMPERING.keys())
def test_tampering_is_found_and_the_ledger_not_opened(path, statements):
    filled(path).close()
    edit(path, *statements)
    assert len(verify(path)) == 1
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: "):
        Ledger.open(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # the lock is given up


def test_rows_removed_at_the_end_are_found_by_what_is_kept_elsewhere(path):
    with filled(path) as ledger:
        head, before = ledger.head, ledger.digest_at(4)
    edit(path, "DELETE FROM releases WHERE seq = 5")
    assert verify(path) == []  # the rest of the chain still fits together
    assert "older than" in verify(path, num_rows=5)[0]
    assert "older than" in verify(path, head=head)[0]
    assert "older than" in verify(path, head=head, num_rows=5)[0]
    assert verify(path, head=before, num_rows=4) == []


def test_an_older_copy_is_found(path):
    ledger = filled(path, 3)
    ledger.close()
    shutil.copy(path, path.with_name("old"))
    with Ledger.open(path) as ledger:
        ledger.append(4, CLIENT)
        head = ledger.head
    shutil.copy(path.with_name("old"), path)
    assert "older than" in verify(path, head, 4)[0]


def test_a_ledger_that_went_on_after_the_checkpoint_is_accepted(path):
    with filled(path) as ledger:
        assert verify(path, ledger.digest_at(3), 3) == []
        assert verify(path, ledger.digest_at(3)) == []
        assert verify(path, ledger.digest_at(0), 0) == []


def test_a_rewritten_chain_of_the_same_length_is_found_by_its_head(tmp_path):
    with filled(tmp_path / "a") as ledger:
        head = ledger.head
    with Ledger.create(tmp_path / "b", "run") as ledger:
        for round in range(1, 6):
            ledger.append(round, replace(CLIENT, noise_multiplier=100.0))
    assert verify(tmp_path / "b") == []
    assert "not in its chain" in verify(tmp_path / "b", head, 5)[0]


def test_a_row_that_is_no_event_is_found(path):
    from fl_app.accounting.ledger import _entry

    with filled(path, 1) as ledger:
        row = _entry(2, 2, json.dumps({"unit": "CLIENT"}), ledger.head)
    edit(
        path,
        f"INSERT INTO releases VALUES (2, 2, '{row.event}', '{row.previous}', '{row.digest}')",
    )
    assert "cannot be understood" in verify(path)[0]


# Opening.


def test_a_missing_ledger_is_not_replaced_by_an_empty_one(path):
    with pytest.raises(LedgerError, match="there is no ledger"):
        Ledger.open(path)
    assert "there is no ledger" in verify(path)[0]
    assert list(path.parent.iterdir()) == []


def test_an_existing_ledger_is_not_overwritten(path):
    with filled(path) as ledger:
        head = ledger.head
    with pytest.raises(LedgerError, match="is there already"):
        Ledger.create(path, "other")
    assert verify(path, head, 5) == []


def test_a_file_that_is_no_ledger_is_refused(path):
    path.write_text("something else entirely\n" * 100)
    assert len(verify(path)) == 1
    with pytest.raises(LedgerError, match="file is not a database"):
        Ledger.open(path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LedgerError, match="nowhere"):
        Ledger.create(tmp_path / "nowhere" / "ledger.sqlite", "run")


def test_one_writer_at_a_time(path):
    ledger = filled(path)
    with pytest.raises(LedgerError, match="held by another process"):
        Ledger.open(path)
    with pytest.raises(LedgerError, match="held by another process"):
        Ledger.create(path, "run")
    ledger.append(6, CLIENT)  # the holder is not disturbed
    ledger.close()
    ledger.close()
    Ledger.open(path).close()


WRITER = """
import sys
import threading
from fl_app.accounting.ledger import Ledger
from fl_app.privacy import PrivacyEvent
ledger = Ledger.open(sys.argv[1])
event = PrivacyEvent.from_json(sys.argv[2])
round = ledger.num_rows
while True:
    round += 1
    print(ledger.append_all(round, [event, event])[-1].seq, flush=True)
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), CLIENT.to_json()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_another_process_is_kept_out_until_the_holder_dies(path):
    filled(path, 0).close()
    writer = start_writer(path)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        with pytest.raises(LedgerError, match="held by another process"):
            Ledger.open(path)
    finally:
        writer.kill()
        writer.communicate()
    Ledger.open(path).close()


def test_kill_9_loses_no_row_that_was_acknowledged(path):
    filled(path, 0).close()
    acknowledged = 0
    for _ in range(4):
        writer = start_writer(path)
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(random.uniform(0.0, 0.1))
        os.kill(writer.pid, signal.SIGKILL)
        rest, _ = writer.communicate()
        lines = [line for line in (first + rest).splitlines(keepends=True) if line.endswith("\n")]
        assert int(lines[-1]) > acknowledged
        acknowledged = int(lines[-1])
        assert verify(path, num_rows=acknowledged) == []
        with Ledger.open(path) as ledger:
            # At most the transaction in progress came on top, and never half of it.
            assert ledger.num_rows - acknowledged in (0, 2)
            acknowledged = ledger.num_rows


def test_rows_can_be_read_while_another_process_holds_the_ledger(path):
    with filled(path) as ledger:
        assert read(path) == ledger.entries()
    edit(path, "UPDATE releases SET round = 9 WHERE seq = 2")
    with pytest.raises(LedgerError, match="row 2 was changed"):
        read(path)
    with pytest.raises(LedgerError, match="there is no ledger"):
        read(path.with_name("none.sqlite"))


def test_a_round_charged_again_is_a_repeat_also_after_reopening(path):
    with Ledger.create(path, "run") as ledger:
        ledger.append_all(1, [CLIENT, RECORD])
        assert ledger.repeats() == {}
        ledger.append_all(1, [CLIENT, RECORD])
        ledger.append_all(1, [CLIENT])
        ledger.append_all(2, [CLIENT, RECORD])
    with Ledger.open(path) as ledger:
        assert ledger.counts() == {CLIENT: 4, RECORD: 3}
        assert ledger.repeats() == {CLIENT: 2, RECORD: 1}
        assert [ledger.has_round(r) for r in (0, 1, 2, 3)] == [False, True, True, False]


def test_another_event_of_the_same_unit_in_a_round_is_a_repeat_too(path):
    other = dataclasses.replace(CLIENT, noise_multiplier=9.0)
    with Ledger.create(path, "run") as ledger:
        ledger.append(1, CLIENT)
        ledger.append(1, other)
        assert ledger.repeats() == {other: 1}


def test_a_ledger_is_readable_after_a_kill_in_the_middle_of_a_write(path):
    """The half-written pages are undone first; a connection that cannot write could not do that."""
    with filled(path) as ledger:
        rows, head = ledger.entries(), ledger.head
    code = (
        "import os, sqlite3, sys\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "database.execute('PRAGMA cache_size = 1')\n"
        "database.execute('BEGIN IMMEDIATE')\n"
        "database.execute('UPDATE releases SET event = ?', ('x' * 100_000,))\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 9
    assert path.with_name(path.name + "-journal").exists()
    assert verify(path, head, 5) == []
    assert read(path) == rows


def test_rows_of_a_round_are_counted(path):
    with Ledger.create(path, "run") as ledger:
        ledger.append_all(1, [CLIENT, RECORD])
        ledger.append_all(1, [CLIENT, RECORD])
        ledger.append(2, CLIENT)
        assert [ledger.rows_of(r) for r in (1, 2, 3)] == [4, 1, 0]
        head = ledger.head
        assert ledger.heads()[-1] == head == heads(path)[-1]
    with Ledger.open(path) as ledger:
        assert [ledger.rows_of(r) for r in (1, 2, 3)] == [4, 1, 0]


def test_a_ledger_that_is_not_there_is_begun_only_on_request(path):
    with Ledger.open(path, create_as="data:a") as ledger:
        ledger.append(1, CLIENT)
    assert read_id(path) == "data:a"
    with Ledger.open(path, create_as="data:a") as ledger:
        assert ledger.num_rows == 1
    with pytest.raises(LedgerError, match="data:a, not of data:b"):
        Ledger.open(path, create_as="data:b")
    Ledger.open(path).close()  # the lock was given up


def test_a_write_ahead_log_without_its_ledger_is_no_new_ledger(path):
    path.with_name(path.name + "-wal").write_bytes(b"rows")
    with pytest.raises(LedgerError, match="was removed"):
        Ledger.create(path, "run")
    assert not path.exists()


def test_one_who_waits_gets_the_ledger_when_its_holder_is_done(path):
    filled(path).close()
    writer = start_writer(path)
    assert writer.stdout is not None
    assert writer.stdout.readline()
    with pytest.raises(LedgerError, match="held by another process"):
        Ledger.open(path, wait_seconds=0.1)
    threading.Timer(0.2, writer.kill).start()
    with Ledger.open(path, wait_seconds=30) as waited:
        assert waited.num_rows > 5
    writer.communicate()


def test_a_lock_file_that_its_holder_removes_meanwhile_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fstat = tmp_path / "ledger.sqlite", os.fstat
    Ledger.create(path, "run").close()
    lock = path.with_name(path.name + ".lock")
    removed: list[Path] = []

    def remove_first(descriptor: int) -> os.stat_result:
        if not removed:
            lock.unlink()
            removed.append(lock)
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", remove_first)
    with Ledger.open(path):
        assert removed
        assert lock.exists()
