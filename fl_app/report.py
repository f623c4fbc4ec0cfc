"""What a finished run says: results.json, the privacy report and the curves."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from fl_app.accounting.client_table import ClientRow, table_markdown
from fl_app.privacy import Guarantee
from fl_app.stages import HistoryRow

PRIVACY_REPORT = "privacy_report.md"
PACKAGES = ("dpfl", "flwr", "torch", "opacus", "dp-accounting", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The public outcome of a run.

    Attributes:
        status: completed, stopped, budget_exhausted or failed.
        num_rounds_done: rounds that are in the model.
        num_rounds: rounds that were planned.
        final: metrics of the last model.
        evaluated_on: the rows of all metrics: test or validation.
        target_delta: delta of every epsilon.
        target_epsilon: the budget, None without one.
        epsilon_of: name of the guarantee that the budget binds, None without one.
        guarantees: every row of the privacy statement.
        warnings: what the reader should know before trusting a row.
        history: one row per round.
        ledger_head: digest of the ledger's last row.
        ledger_rows: number of its rows.
        seeded_noise: True stamps everything NOT PRIVATE.
        summary: public facts for the report's first lines, by label.
        each_client: the bound guarantee client by client.
    """

    status: str
    num_rounds_done: int
    num_rounds: int
    final: Mapping[str, float]
    evaluated_on: str
    target_delta: float
    target_epsilon: float | None
    epsilon_of: str | None
    guarantees: Sequence[Guarantee]
    warnings: Sequence[str]
    history: Sequence[HistoryRow]
    ledger_head: str
    ledger_rows: int
    seeded_noise: bool
    summary: Mapping[str, str]
    each_client: Sequence[ClientRow] = ()

    @property
    def private(self) -> bool:
        """True if at least one row has a finite epsilon."""
        return any(g.private for g in self.guarantees)

    def to_json(self) -> str:
        """Returns ``results.json``: no infinities, no realized counts, no timings."""
        values = {
            "status": self.status,
            "num_rounds_done": self.num_rounds_done,
            "final": dict(self.final),
            "evaluated_on": self.evaluated_on,
            "privacy": {
                "private": self.private,
                "target_epsilon": self.target_epsilon,
                "target_delta": self.target_delta,
                "epsilon_of": self.epsilon_of,
                "seeded_noise": self.seeded_noise,
                "guarantees": [guarantee_values(g) for g in self.guarantees],
                "each_client": [row.to_json() for row in self.each_client],
                "warnings": list(self.warnings),
            },
            "history": history_values(self.history),
            "versions": versions(),
            "ledger": {"head": self.ledger_head, "rows": self.ledger_rows},
        }
        return json.dumps(values, indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Returns ``privacy_report.md``, written for a privacy officer."""
        lines = ["# Privacy report", ""]
        if self.seeded_noise:
            lines += ["**NOT PRIVATE: noise was derived from a seed (run.seeded_noise=true).**", ""]
        elif not self.private:
            lines += ["**NOT PRIVATE: no guarantee with a finite epsilon was given.**", ""]
        lines += [f"- {label}: {value}" for label, value in self.summary.items()]
        lines += [f"- rounds released: {self.num_rounds_done} of {self.num_rounds} ({self.status})"]
        lines += [f"- metrics: {self._metrics_text()}"]
        lines += [f"- ledger: {self.ledger_rows} releases charged, head `{self.ledger_head}`", ""]
        lines += ["## What was spent", "", *guarantee_table(self.guarantees, self.epsilon_of), ""]
        if self.each_client:
            lines += [f"### {self.epsilon_of} at delta {self.target_delta:g}: every client", ""]
            lines += [*table_markdown(self.each_client), ""]
        for guarantee in self.guarantees:
            lines += [f"### {guarantee.name}: assumptions", ""]
            lines += [f"- {text}" for text in guarantee.assumptions] + [""]
        if self.warnings:
            lines += ["## Warnings", "", *[f"- {text}" for text in self.warnings], ""]
        lines += ["## What is not covered", "", *[f"- {text}" for text in NOT_COVERED], ""]
        return "\n".join(lines)

    def _metrics_text(self) -> str:
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.final.items())
        return f"{values} on {ROWS[self.evaluated_on]}"


ROWS = {
    "test": "the public test rows",
    "validation": "validation rows: kept out of training, for choices made before a run",
}
"""What ``run.evaluate_on`` names."""
NOT_COVERED = (
    "the existence of the clients in the population and the public settings (rates, sizes, norms)",
    "what anyone learns who is neither SERVER nor OBSERVER as defined: a node that sees its own "
    "data, an operator who reads operator.jsonl, whoever breaks into a node",
    "a node or server that does not run this program",
    "attacks on the floating-point representation of continuous noise, and timing",
    "message contents on the way, unless the deployment uses TLS",
)


def history_columns(history: Sequence[HistoryRow]) -> list[str]:
    """Returns the keys of `history_values`: those of a row, then its other metrics by name."""
    own = [f.name for f in fields(HistoryRow) if f.name != "other_metrics"]
    return own + sorted({name for row in history for name in row.other_metrics})


def history_values(history: Sequence[HistoryRow]) -> list[dict[str, Any]]:
    """Returns the public record as JSON values, with the same keys in every row."""
    columns = history_columns(history)
    rows = [asdict(row) | dict(row.other_metrics) for row in history]
    return [{column: values.get(column) for column in columns} for values in rows]


def guarantee_values(guarantee: Guarantee) -> dict[str, Any]:
    """Returns one guarantee as JSON values; none is ``"epsilon": null, "private": false``."""
    return asdict(guarantee) | {"private": guarantee.private, "name": guarantee.name}


def guarantee_table(guarantees: Sequence[Guarantee], bound: str | None) -> list[str]:
    """Returns the rows of the privacy statement as a Markdown table."""
    lines = [
        "| unit | against | epsilon | delta | relation | accountant | bound by target |",
        "|---|---|---|---|---|---|---|",
    ]
    for g in guarantees:
        epsilon = "none (not private)" if g.epsilon is None else g.shown_epsilon(4)
        mark = "yes" if g.name == bound else ""
        cells = (g.unit, g.view, epsilon, f"{g.delta:g}", g.relation, g.accountant or "-", mark)
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return lines


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def plot_curves(
    history: Sequence[HistoryRow], bound: Guarantee | None, path: Path, evaluated_on: str
) -> None:
    """Draws accuracy and the spent epsilon of the bound guarantee over rounds into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    accuracy = [(r.round, 100 * r.accuracy) for r in history if r.accuracy is not None]
    if accuracy:
        left.plot(*zip(*accuracy, strict=True), color="tab:blue", label=f"{evaluated_on} accuracy")
    left.set(xlabel="round", ylabel=f"{evaluated_on} accuracy (%)")
    left.grid(alpha=0.3)
    spent = [(r.round, r.epsilon) for r in history if r.epsilon is not None]
    if spent and bound is not None:
        right = left.twinx()
        right.plot(*zip(*spent, strict=True), color="tab:red", linestyle="--", label="epsilon")
        right.set_ylabel("epsilon spent")
        left.set_title(
            f"{bound.name}, delta {bound.delta:g}, {bound.relation}, {bound.accountant} accountant;"
            f"\nassumptions in {PRIVACY_REPORT}",
            fontsize="small",
        )
        right.set_ylim(bottom=0)
        figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=120)
