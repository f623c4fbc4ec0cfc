"""The durable list of releases: one SQLite file, one row per release, chained by SHA-256.

A row is on disk before `Ledger.append` returns. Rows hold the round and the event, both public; no
times (rule 9). Each digest covers its row and the digest before it, the first one the run's id, so
an edited, removed, inserted or reordered row is found. A chain cut at its end still fits together:
keep the head and the number of rows elsewhere (the checkpoint does) and give them to `verify`.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from fl_app.errors import LedgerError, PrivacyError
from fl_app.privacy import PrivacyEvent, PrivacyUnit
from fl_app.stages import LedgerEntry

SCHEMA_VERSION = 1
_POLL_SECONDS = 0.02
# Reading needs a writer first: a journal or write-ahead log of a process that was killed.
_UNFINISHED = (sqlite3.SQLITE_READONLY_ROLLBACK, sqlite3.SQLITE_READONLY_RECOVERY)

_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE releases (seq INTEGER PRIMARY KEY, round INTEGER NOT NULL, event TEXT NOT NULL, "
    "previous TEXT NOT NULL, digest TEXT NOT NULL)",
)
_SELECT = "SELECT seq, round, event, previous, digest FROM releases ORDER BY seq"
_INSERT = "INSERT INTO releases (seq, round, event, previous, digest) VALUES (?, ?, ?, ?, ?)"


class Ledger:
    """An open ledger. One process at a time may hold it; others may `verify` it meanwhile.

    Guarantee: what `append` and `append_all` returned survives a kill of the process and, where the
        disk honours fsync, a loss of power.
    """

    def __init__(self, path: Path, lock: int, connection: sqlite3.Connection) -> None:
        """Takes over an acquired lock and a connection; use `create` or `open` instead."""
        self._path, self._lock, self._connection = path, lock, connection
        self._genesis, self._entries, problems = _read(connection)
        if problems:
            raise LedgerError(f"{path}: {'; '.join(problems)}; restore it from a copy")
        self._counts: dict[PrivacyEvent, int] = {}
        self._repeats: dict[PrivacyEvent, int] = {}
        self._charged: set[tuple[int, PrivacyUnit]] = set()
        self._rows_of: dict[int, int] = {}
        for entry in self._entries:
            self._count(entry.round, _event(entry.event))

    @classmethod
    def create(cls, path: str | Path, run_id: str) -> Ledger:
        """Returns a new, empty ledger of the run `run_id`.

        Raises:
            LedgerError: `path` is there already or cannot be written, or another process holds it.
        """
        path = Path(path)
        with _locked(path) as lock, _explained(path):
            if path.exists():
                raise LedgerError(
                    f"{path}: is there already; a new run needs a new ledger, choose another folder"
                )
            _write_empty(path, run_id)
            return cls._on(path, lock)

    @classmethod
    def open(
        cls, path: str | Path, *, create_as: str | None = None, wait_seconds: float = 0.0
    ) -> Ledger:
        """Returns the ledger at `path` for appending, its whole chain verified.

        Args:
            path: the file.
            create_as: id of the new ledger to begin if there is none; None: that is an error.
            wait_seconds: how long to wait for another process that holds it.

        Raises:
            LedgerError: missing, damaged, of another schema or id, or held by another process.
        """
        path = Path(path)
        if create_as is None and not path.is_file():
            raise LedgerError(f"{path}: there is no ledger; restore it or start a new run")
        with _locked(path, wait_seconds) as lock, _explained(path):
            if create_as is not None and not path.exists():
                _write_empty(path, create_as)
            ledger = cls._on(path, lock)
            if create_as is not None and create_as != (found := ledger.run_id):
                ledger._connection.close()
                raise LedgerError(
                    f"{path}: is the ledger of {found}, not of {create_as}; name another file, or "
                    "the id that it was begun with"
                )
            return ledger

    @classmethod
    def _on(cls, path: Path, lock: int) -> Ledger:
        connection = _connect(path)
        try:
            return cls(path, lock, connection)
        except BaseException:
            connection.close()
            raise

    def append(self, round: int, event: PrivacyEvent) -> LedgerEntry:
        """Returns the row of one release, durable."""
        return self.append_all(round, [event])[0]

    def append_all(self, round: int, events: Sequence[PrivacyEvent]) -> list[LedgerEntry]:
        """Returns the rows of several releases of one round, durable: all of them or none.

        Raises:
            LedgerError: they could not be written; nothing is charged and nothing may be released.
        """
        entries: list[LedgerEntry] = []
        previous = self.head
        for seq, event in enumerate(events, start=self.num_rows + 1):
            entries.append(_entry(seq, round, event.to_json(), previous))
            previous = entries[-1].digest
        with _explained(self._path), _transaction(self._connection):
            self._connection.executemany(
                _INSERT, [(e.seq, e.round, e.event, e.previous, e.digest) for e in entries]
            )
        self._entries += entries
        for event in events:
            self._count(round, event)
        return entries

    def entries(self) -> list[LedgerEntry]:
        """Returns all rows in order."""
        return list(self._entries)

    def counts(self) -> dict[PrivacyEvent, int]:
        """Returns how often each event was charged."""
        return dict(self._counts)

    def repeats(self) -> dict[PrivacyEvent, int]:
        """Returns how many of `counts` came when the round had been charged at that unit before.

        That is what a kill leaves: the resumed run asks the same clients once more.
        """
        return dict(self._repeats)

    def has_round(self, round: int) -> bool:
        """Returns whether `round` has been charged."""
        return any((round, unit) in self._charged for unit in PrivacyUnit)

    def rows_of(self, round: int) -> int:
        """Returns how many rows `round` has."""
        return self._rows_of.get(round, 0)

    @property
    def run_id(self) -> str:
        """The id that the chain starts from."""
        row = self._connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
        return str(row[0])

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._entries)

    @property
    def head(self) -> str:
        """Digest of the last row; of the run's id if there is none."""
        return self.digest_at(self.num_rows)

    def digest_at(self, num_rows: int) -> str:
        """Returns the head as it was when the ledger had `num_rows` rows.

        Raises:
            LedgerError: it never had so many.
        """
        if not 0 <= num_rows <= self.num_rows:
            raise LedgerError(f"{self._path}: has {self.num_rows} rows, not {num_rows}")
        return self._entries[num_rows - 1].digest if num_rows else self._genesis

    def heads(self) -> list[str]:
        """Returns the head after every number of rows, from 0 on."""
        return [self._genesis, *(entry.digest for entry in self._entries)]

    def close(self) -> None:
        """Leaves one plain file without journals and gives up the lock. May be called twice."""
        if self._lock < 0:
            return
        try:
            # Folds the write-ahead log into the file: copying the one file then copies every row.
            # A reader that is in the way only delays that to the next close.
            self._connection.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.OperationalError:
            pass
        finally:
            self._connection.close()
            _unlock(self._path, self._lock)
            self._lock = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _count(self, round: int, event: PrivacyEvent) -> None:
        self._counts[event] = self._counts.get(event, 0) + 1
        if (round, event.unit) in self._charged:
            self._repeats[event] = self._repeats.get(event, 0) + 1
        self._charged.add((round, event.unit))
        self._rows_of[round] = self._rows_of.get(round, 0) + 1


def verify(path: str | Path, head: str | None = None, num_rows: int | None = None) -> list[str]:
    """Returns what is wrong with the ledger at `path`; an empty list if nothing is.

    Args:
        path: the ledger; it may be open for writing in another process.
        head: a head that it had once, kept elsewhere: without it rows removed at the end go unseen.
        num_rows: the number of rows that it had then.
    """
    genesis, entries, problems = _read_file(Path(path))
    if problems:
        return problems
    return rollback_problems([genesis, *(entry.digest for entry in entries)], head, num_rows)


def rollback_problems(digests: Sequence[str], head: str | None, num_rows: int | None) -> list[str]:
    """Returns what speaks against `digests`, one per number of rows, having had `head` before."""
    kept = "the record kept elsewhere"
    if num_rows is not None and num_rows >= len(digests):
        return [f"older than {kept}: {len(digests) - 1} rows instead of {num_rows}"]
    expected = digests if num_rows is None else [digests[num_rows]]
    if head is not None and head not in expected:
        return [f"older than {kept}, or of another run: that head is not in its chain"]
    return []


def read(path: str | Path) -> list[LedgerEntry]:
    """Returns the verified rows of the ledger at `path`, also while another process writes to it.

    Raises:
        LedgerError: missing or damaged.
    """
    return _verified(Path(path))[1]


def heads(path: str | Path) -> list[str]:
    """Returns the head of the ledger at `path` after every number of rows, from 0 on.

    Raises:
        LedgerError: missing or damaged.
    """
    genesis, entries = _verified(Path(path))
    return [genesis, *(entry.digest for entry in entries)]


def _verified(path: Path) -> tuple[str, list[LedgerEntry]]:
    genesis, entries, problems = _read_file(path)
    if problems:
        raise LedgerError(f"{path}: {'; '.join(problems)}; restore it from a copy")
    return genesis, entries


def read_id(path: str | Path) -> str:
    """Returns the id that the chain of the ledger at `path` starts from.

    Raises:
        LedgerError: missing or not a ledger.
    """
    path = Path(path)
    if not path.is_file():
        raise LedgerError(f"{path}: there is no ledger")
    with _explained(path), closing(_read_only(path)) as connection:
        row = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    if row is None:
        raise LedgerError(f"{path}: is not a ledger; it has no id")
    return str(row[0])


def _read_file(path: Path) -> tuple[str, list[LedgerEntry], list[str]]:
    """Returns what `_read` does, over a connection that cannot write."""
    if not path.is_file():
        return "", [], [f"there is no ledger at {path}"]
    try:
        with closing(_read_only(path)) as connection:
            return _read(connection)
    except sqlite3.Error as error:
        return "", [], [f"cannot be read as a ledger ({error})"]


def _read(connection: sqlite3.Connection) -> tuple[str, list[LedgerEntry], list[str]]:
    """Returns the genesis digest, the rows, and what is wrong with them."""
    try:
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        rows = connection.execute(_SELECT).fetchall()
    except sqlite3.Error as error:
        return "", [], [f"not a ledger ({error})"]
    if meta.get("schema") != str(SCHEMA_VERSION) or "run_id" not in meta:
        shown = meta.get("schema", "none")
        return "", [], [f"schema version {shown}: only {SCHEMA_VERSION} can be read"]
    genesis = _digest(["genesis", SCHEMA_VERSION, meta["run_id"]])
    entries = [
        LedgerEntry(seq=seq, round=round, event=event, previous=previous, digest=digest)
        for seq, round, event, previous, digest in rows
    ]
    return genesis, entries, list(_chain_problems(genesis, entries))


def _chain_problems(genesis: str, entries: Sequence[LedgerEntry]) -> Iterator[str]:
    """Yields the first break of the chain: what follows it means nothing any more."""
    previous = genesis
    for seq, entry in enumerate(entries, start=1):
        if entry.seq != seq:
            yield f"row {seq} is missing"
            return
        if entry != _entry(seq, entry.round, entry.event, previous):
            yield f"row {seq} was changed, moved or belongs to another chain"
            return
        try:
            _event(entry.event)
        except PrivacyError as error:
            yield f"row {seq} cannot be understood ({error})"
            return
        previous = entry.digest


@functools.lru_cache(maxsize=256)
def _event(text: str) -> PrivacyEvent:
    """Returns the event of a row; few of them differ."""
    return PrivacyEvent.from_json(text)


def _entry(seq: int, round: int, event: str, previous: str) -> LedgerEntry:
    digest = _digest([seq, round, event, previous])
    return LedgerEntry(seq=seq, round=round, event=event, previous=previous, digest=digest)


def _digest(values: list[Any]) -> str:
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_only(path: Path) -> sqlite3.Connection:
    """Returns a connection that cannot write, after undoing what a killed process left half."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode not in _UNFINISHED:
            connection.close()
            raise
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as writer:
            writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection


def _write_empty(path: Path, run_id: str) -> None:
    """Makes a ledger without rows; a kill leaves either all of it or nothing at `path`."""
    if path.with_name(path.name + "-wal").exists():
        raise LedgerError(f"{path}: was removed, its -wal file is still there; restore both")
    temporary = path.with_name(path.name + ".new")
    for rest in (temporary, temporary.with_name(temporary.name + "-journal")):
        rest.unlink(missing_ok=True)
    with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=FULL")
        with _transaction(connection):
            for statement in _TABLES:
                connection.execute(statement)
            meta = {"schema": str(SCHEMA_VERSION), "run_id": run_id}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
    os.chmod(temporary, 0o644)
    os.rename(temporary, path)
    sync_folder(path.parent)


def _connect(path: Path) -> sqlite3.Connection:
    """Returns a connection in which every commit is synced to disk before it returns."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=10)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(
            f"{path}: cannot be read or written ({error}); check disk space, rights and the file"
        ) from error


def _lock_path(path: Path) -> Path:
    # Not the database itself: closing another descriptor of it would drop SQLite's own locks.
    return path.with_name(path.name + ".lock")


@contextmanager
def _locked(path: Path, wait_seconds: float = 0.0) -> Iterator[int]:
    """Yields the descriptor of the held lock, which stays held unless the body raises.

    Raises:
        LedgerError: somebody holds it for longer than that, or the folder is not there.
    """
    lock = _acquire(path, wait_seconds)
    try:
        yield lock
    except BaseException:
        _unlock(path, lock)
        raise


def _acquire(path: Path, wait_seconds: float) -> int:
    name = _lock_path(path)
    deadline = time.monotonic() + wait_seconds
    while True:
        with _explained(path):
            lock = os.open(name, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us may have unlinked the file that we had opened meanwhile.
            if os.path.samestat(os.fstat(lock), os.stat(name)):
                return lock
            os.close(lock)
        except FileNotFoundError:
            os.close(lock)
        except BlockingIOError:
            os.close(lock)
            if time.monotonic() >= deadline:
                raise LedgerError(
                    f"{path}: held by another process; wait until it ends, or end it"
                ) from None
            time.sleep(_POLL_SECONDS)


def _unlock(path: Path, lock: int) -> None:
    _lock_path(path).unlink(missing_ok=True)
    os.close(lock)


def sync_folder(folder: Path) -> None:
    """Makes a new file's name durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
