"""What ``dpfl ledger show`` prints: the rows of a ledger and, of a node's, what they add up to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fl_app import checks
from fl_app.accounting.ledger import read, read_id
from fl_app.accounting.node_charge import SMALLEST_DELTA, ledger_guarantees
from fl_app.accounting.node_ledger import budget_of, data_id_of
from fl_app.privacy import Guarantee, PrivacyUnit
from fl_app.progress import statement
from fl_app.stages import LedgerEntry

_DELTA = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """JSON values, and the same as text."""

    values: dict[str, Any]
    text: str


def ledger_view(
    path: Path, *, delta: float | None = None, max_epsilon: float | None = None
) -> LedgerView:
    """Returns the verified rows of the ledger at `path`; of a node's also its statement.

    Args:
        path: the ledger, which other processes may be writing to.
        delta: of the statement (nodes' ledgers only); None: that of the node's budget, or 1e-5.
        max_epsilon: the node's budget at `delta`, to say what is left of it; None: the one that the
            last charge was held to, if it was to one and `delta` is not another.

    Raises:
        LedgerError: missing or damaged.
        SettingsError: a delta or budget out of range.
    """
    entries = read(path)
    data_id = data_id_of(read_id(path))
    rows = [
        {"seq": e.seq, "round": e.round, "event": json.loads(e.event), "digest": e.digest}
        for e in entries
    ]
    head = entries[-1].digest if entries else None
    values: dict[str, Any] = {"rows": rows, "head": head}
    lines = [_line(row, "round" if data_id is None else "request") for row in rows]
    lines.append(f"{len(rows)} releases, head {head}")
    if data_id is not None:
        kept_epsilon, kept_delta = budget_of(path)
        if delta is None:
            delta = kept_delta or _DELTA
        if max_epsilon is None and delta == kept_delta:
            max_epsilon = kept_epsilon
        node = _node_view(data_id, entries, delta, max_epsilon)
        values |= node.values
        lines.append(node.text)
    return LedgerView(values=values, text="\n".join(lines))


def _node_view(
    data_id: str, entries: Sequence[LedgerEntry], delta: float, max_epsilon: float | None
) -> LedgerView:
    if checks.open_unit("--delta", delta) < SMALLEST_DELTA:
        raise checks.fail("--delta", delta, f"must be at least {SMALLEST_DELTA}")
    guarantees = ledger_guarantees(entries, delta)
    left = None if max_epsilon is None else _left(guarantees, max_epsilon)
    num_requests = len({entry.round for entry in entries})
    values = {
        "data_id": data_id,
        "num_requests": num_requests,
        "num_releases": len(entries),
        "guarantees": [asdict(row) | {"private": row.private} for row in guarantees],
        "max_epsilon": max_epsilon,
        "left": left,
    }
    text = (
        f"data-id {data_id}: {len(entries)} releases in {num_requests} requests\n"
        f"{statement(guarantees, None)}"
    )
    if left is None:
        text += (
            "\nno budget is known at this delta; name one with --max-epsilon to see what is left"
        )
    else:
        text += f"\nleft of max-epsilon {max_epsilon:g} (RECORD): {left:.3f}"
    return LedgerView(values=values, text=text)


def _left(guarantees: Sequence[Guarantee], max_epsilon: float) -> float:
    """Returns the budget minus the smallest RECORD bound, rounded down; 0 without a bound."""
    checks.positive("--max-epsilon", max_epsilon)
    bounds = [g.epsilon for g in guarantees if g.unit is PrivacyUnit.RECORD and g.private]
    spent = min((bound for bound in bounds if bound is not None), default=max_epsilon)
    return max(0.0, int((max_epsilon - spent) * 1000) / 1000)


def _line(row: dict[str, Any], counted: str) -> str:
    event = row["event"]
    return (
        f"{row['seq']:>6}  {counted} {row['round']:>5}  {event['unit']} seen by {event['view']}  "
        f"{event['noise']} z={event['noise_multiplier']:g}  {event['sampling']} "
        f"q={event['sampling_rate']:g}  {event['steps']} step(s)  {row['digest'][:16]}"
    )
