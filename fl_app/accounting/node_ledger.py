"""The node's own durable ledger and budget (rule 13).

One file is one budget: that of the data with one `data-id`. It is an ordinary `Ledger` whose chain
starts from the data-id and whose rounds are the node's own count of requests: nothing that a server
sends names a row, so nothing it sends can make two requests look like one.

Beside it lies ``<file>.head``, the head and number of rows after the last charge, written before
the charge counts as made. A ledger that is older than its head file, or has lost it, is refused.
Not covered: somebody who sets both files back, or removes both; copies of the data under another
data-id or in the care of another ledger; and a program that was changed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_app.accounting.ledger import Ledger, rollback_problems, sync_folder
from fl_app.accounting.node_charge import record_epsilon
from fl_app.errors import BudgetError, LedgerError
from fl_app.privacy import PrivacyEvent, round_up

log = logging.getLogger("dpfl")

WAIT_SECONDS = 120.0
"""How long a process waits for others of the node that are charging the same ledger."""

_ID = "data:"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLedger:
    """The budget of one data set, shared by all processes of all runs that train on it.

    Guarantee: when `charge` returns, its events are on disk (fsync) and, if there is a budget, the
        RECORD epsilon of everything charged so far is within it. Charges of several processes come
        one after the other; none is lost or seen half.

    Attributes:
        path: the file; made by the first charge, its folder must be there.
        data_id: whose budget it is.
        max_epsilon: the budget at RECORD level; None: charges are recorded without limit.
        max_delta: the delta that goes with it.
    """

    path: Path
    data_id: str
    max_epsilon: float | None
    max_delta: float

    def charge(self, events: Sequence[PrivacyEvent]) -> None:
        """Charges one request; durable when it returns.

        Raises:
            BudgetError: it does not fit into what is left; nothing is charged.
            LedgerError: unreadable, not writable, rolled back, or another data-id's.
        """
        with self._open() as ledger:
            self._gate(ledger, events)
            entries = ledger.entries()
            request = entries[-1].round + 1 if entries else 1
            if not entries:
                self._write_head(ledger)  # from now on a ledger without it has lost it
            ledger.append_all(request, events)
            self._write_head(ledger)

    def check(self, events: Sequence[PrivacyEvent]) -> None:
        """Raises what `charge` would raise, but charges nothing."""
        with self._open() as ledger:
            self._gate(ledger, events)

    def _open(self) -> Ledger:
        """Returns the ledger, held against all other processes and found to be the newest."""
        ledger = Ledger.open(self.path, create_as=_ID + self.data_id, wait_seconds=WAIT_SECONDS)
        try:
            _check_newest(self.path, ledger)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def _write_head(self, ledger: Ledger) -> None:
        """Keeps head, number of rows and the budget that charges are held to, durable."""
        file = head_path(self.path)
        temporary = file.with_name(file.name + ".tmp")
        kept = {
            "head": ledger.head,
            "rows": ledger.num_rows,
            "max_epsilon": self.max_epsilon,
            "max_delta": self.max_delta,
        }
        try:
            with open(temporary, "w", encoding="utf-8") as out:
                json.dump(kept, out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, file)
            sync_folder(file.parent)
        except OSError as error:
            raise LedgerError(
                f"{file}: cannot be written ({error}); check disk space and rights"
            ) from error

    def _gate(self, ledger: Ledger, events: Sequence[PrivacyEvent]) -> None:
        if self.max_epsilon is None:
            return
        counts = ledger.counts()
        for event in events:
            counts[event] = counts.get(event, 0) + 1
        after = record_epsilon(counts, self.max_delta, at_most=self.max_epsilon)
        if after <= self.max_epsilon:
            return
        spent = record_epsilon(ledger.counts(), self.max_delta)
        log.warning(
            "data-id=%s: epsilon %s of max-epsilon=%g is spent at delta %g (RECORD, "
            "ADD_OR_REMOVE_ONE); this request would make it %s",
            self.data_id,
            _shown(spent),
            self.max_epsilon,
            self.max_delta,
            _shown(after),
        )
        raise BudgetError(
            f"max-epsilon={self.max_epsilon:g}: what is left of this node's own budget does not "
            "allow the request; ask other nodes, or for less, or let its owner raise max-epsilon"
        )


def data_id_of(run_id: str) -> str | None:
    """Returns the data-id of a node's ledger, None if the ledger is a run's."""
    return run_id.removeprefix(_ID) if run_id.startswith(_ID) else None


def head_problems(path: Path, heads: Sequence[str]) -> list[str]:
    """Returns what speaks against a node's ledger being as new as its head file says.

    Args:
        path: the ledger.
        heads: its heads, one per number of rows from 0.
    """
    file = head_path(path)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        head, num_rows = str(kept["head"]), int(kept["rows"])
    except FileNotFoundError:
        gone = f"{file.name} is missing: without it an older copy cannot be told from the newest"
        return [gone] if len(heads) > 1 else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{file.name} cannot be read ({error})"]
    return [f"{file.name}: {problem}" for problem in rollback_problems(heads, head, num_rows)]


def budget_of(path: Path) -> tuple[float | None, float | None]:
    """Returns max-epsilon and its delta at the last charge to the ledger at `path`; None: not kept.

    From the head file, which the node's owner can edit: nothing but what is shown depends on it.
    """
    try:
        kept = json.loads(head_path(path).read_text(encoding="utf-8"))
        return kept.get("max_epsilon"), kept.get("max_delta")
    except (OSError, ValueError, AttributeError):
        return None, None


def head_path(path: Path) -> Path:
    """Returns where the head of the node's ledger at `path` is kept."""
    return path.with_name(path.name + ".head")


def _check_newest(path: Path, ledger: Ledger) -> None:
    if problems := head_problems(path, ledger.heads()):
        raise LedgerError(
            f"{path}: {'; '.join(problems)}; the spent budget is unknown, so the node does not "
            f"train; restore the newest {path.name} together with its {head_path(path).name}"
        )


def _shown(epsilon: float) -> str:
    return round_up(epsilon, 3) if epsilon < float("inf") else "without bound"
