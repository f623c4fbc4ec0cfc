"""Every client's row of the bound guarantee: how often it can be asked, and what that costs it.

Public: it follows from the schedule alone, whoever was asked and answered. Nothing is added up over
clients: their data are disjoint, so the headline is the worst row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fl_app.accounting import participation
from fl_app.privacy import PrivacyEvent, round_up

if TYPE_CHECKING:
    from fl_app.accounting.plan import PrivacyPlan
    from fl_app.plugins import ClientRange


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRow:
    """Clients that can be asked equally often.

    Attributes:
        numbers: which clients, e.g. ``0-3, 8``.
        count: how many they are.
        rounds: the most rounds in which each of them can have been asked.
        epsilon: the bound of the guarantee for each of them; None where it has none.
    """

    numbers: str
    count: int
    rounds: int
    epsilon: float | None

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self)


def client_table(
    plan: PrivacyPlan, counts: Mapping[PrivacyEvent, int], repeats: Mapping[PrivacyEvent, int]
) -> tuple[ClientRow, ...]:
    """Returns the rows of all clients, the most often asked first; none if nothing is private.

    Args:
        plan: the plan of the run.
        counts: charged rounds by event, as `Ledger.counts` gives them.
        repeats: how many of them charged a round again, as `Ledger.repeats` gives them.
    """
    event, stated = plan.bound_event, plan.epsilon_after(counts, repeats)
    if event is None:
        return ()
    grouped = participation.by_requests(
        counts, repeats, event, plan.schedules[event.unit], plan.cohort, plan.population
    )
    rows = []
    for rounds, (parts, composed) in grouped.items():
        bound = math.inf if stated is None else plan.accountant.epsilon(composed, plan.target_delta)
        rows.append(
            ClientRow(
                numbers=_numbers(parts),
                count=sum(part.last - part.first + 1 for part in parts),
                rounds=rounds,
                epsilon=bound if math.isfinite(bound) else None,
            )
        )
    return tuple(rows)


def table_lines(rows: Iterable[ClientRow]) -> list[str]:
    """Returns one line a row for people."""
    return [
        f"clients {row.numbers}: asked in at most {row.rounds} rounds, epsilon {_shown(row)} each"
        for row in rows
    ]


def table_markdown(rows: Iterable[ClientRow]) -> list[str]:
    """Returns the rows as a Markdown table."""
    lines = ["| clients | how many | rounds at most | epsilon of each |", "|---|---|---|---|"]
    return lines + [
        f"| {row.numbers} | {row.count} | {row.rounds} | {_shown(row)} |" for row in rows
    ]


def _shown(row: ClientRow) -> str:
    return "none (not private)" if row.epsilon is None else round_up(row.epsilon, 3)


def _numbers(parts: Sequence[ClientRange]) -> str:
    merged: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda part: part.first):
        if merged and merged[-1][1] + 1 == part.first:
            merged[-1] = (merged[-1][0], part.last)
        else:
            merged.append((part.first, part.last))
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in merged)
