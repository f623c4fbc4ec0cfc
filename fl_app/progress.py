"""The operator's screen: a live table on a terminal, one plain line per round elsewhere.

Realized counts appear here and in ``operator.jsonl`` only (rule 9).
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fl_app.privacy import Guarantee, round_up
from fl_app.stages import HistoryRow, RoundTrace

COLUMNS = ("round", "answered", "accuracy", "loss", "epsilon", "left", "seconds", "to go")


class Progress:
    """Shows rounds as they finish; use as a context manager.

    Args:
        num_rounds: rounds of the whole run.
        target_epsilon: the budget, None without one.
        first_round: rounds done before this process.
        stream: where to write; a terminal gets a live table.
    """

    def __init__(
        self,
        *,
        num_rounds: int,
        target_epsilon: float | None,
        first_round: int = 1,
        stream: TextIO | None = None,
    ) -> None:
        self._num_rounds = num_rounds
        self._target = target_epsilon
        self._first = first_round
        self._started = time.monotonic()
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._is_terminal = self._console.is_terminal
        # A live display taller than the screen would show its oldest rows only.
        self._rows: deque[Sequence[str]] = deque(maxlen=max(3, self._console.height - 6))
        self._live = Live(self._table(), console=self._console, auto_refresh=False)

    def __enter__(self) -> Progress:
        if self._is_terminal:
            self._live.start()
        else:
            self.say("  ".join(f"{c:>9}" for c in COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """Prints one text as it is and flushes it."""
        self._console.print(text, markup=False)
        self._console.file.flush()

    def show(self, row: HistoryRow, trace: RoundTrace) -> None:
        """Shows one finished round."""
        cells = self._cells(row, trace)
        if self._is_terminal:
            self._rows.append(cells)
            self._live.update(self._table(), refresh=True)
        else:
            self.say("  ".join(f"{c:>9}" for c in cells))

    def _table(self) -> Table:
        table = Table(*COLUMNS)
        for cells in self._rows:
            table.add_row(*cells)
        return table

    def _cells(self, row: HistoryRow, trace: RoundTrace) -> Sequence[str]:
        done = row.round - self._first + 1
        per_round = (time.monotonic() - self._started) / max(done, 1)
        left = None
        if self._target is not None and row.epsilon is not None:
            left = max(self._target - row.epsilon, 0.0)
        return (
            f"{row.round}/{self._num_rounds}",
            f"{len(trace.answered)}/{len(trace.cohort)}",
            "-" if row.accuracy is None else f"{100 * row.accuracy:.2f} %",
            "-" if row.loss is None else f"{row.loss:.4f}",
            "-" if row.epsilon is None else round_up(row.epsilon, 3),
            "-" if left is None else f"{left:.3f}",
            f"{trace.seconds:.2f}",
            f"{per_round * (self._num_rounds - row.round):.0f} s",
        )


def statement(guarantees: Sequence[Guarantee], bound: str | None) -> str:
    """Returns the privacy statement as lines, the bound row first, assumptions numbered below.

    Rule 1: every epsilon stands with its delta, unit, relation, view, accountant and assumptions.
    """
    rows = sorted(guarantees, key=lambda g: g.name != bound)
    numbers = {text: n for n, text in enumerate(_unique_assumptions(rows), start=1)}
    lines = []
    for g in rows:
        given = ", ".join(str(numbers[text]) for text in g.assumptions)
        if g.epsilon is None:
            lines.append(f"{g.name}: NOT PRIVATE, no finite epsilon, see {given}")
        else:
            lines.append(
                f"{g.name}: epsilon {g.shown_epsilon(3)} at delta {g.delta:.9g}, {g.relation}, "
                f"{g.accountant} accountant, assuming {given}"
            )
    return "\n".join(lines + [f"  [{n}] {text}" for text, n in numbers.items()])


def _unique_assumptions(rows: Sequence[Guarantee]) -> list[str]:
    return list(dict.fromkeys(text for row in rows for text in row.assumptions))
