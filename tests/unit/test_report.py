"""The public record: complete, free of infinities, and honest about what is not private."""

import io
import json
from dataclasses import replace
from pathlib import Path

from fl_app import report
from fl_app.privacy import Guarantee, NeighboringRelation, PrivacyUnit, View
from fl_app.progress import Progress, statement
from fl_app.stages import HistoryRow, RoundTrace

BOUND = Guarantee(
    unit=PrivacyUnit.CLIENT, view=View.OBSERVER, relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    epsilon=1.5, delta=1e-5, accountant="pld", assumptions=("one thing", "another"),
)  # fmt: skip
NONE = replace(BOUND, view=View.SERVER, epsilon=None, accountant="", assumptions=("no noise",))
ROW = HistoryRow(
    round=1, accuracy=0.5, loss=1.0, epsilon=1.5, cohort_expected=3.0, clipping_norm=1.0,
    noise_std_of_sum=2.0,
)  # fmt: skip
TRACE = RoundTrace(
    round=1, cohort=(1, 2, 5), answered=(1, 5), errors=(), violations=(), seconds=0.5,
    bytes_sent=1, bytes_received=1,
)  # fmt: skip


def make(**changes: object) -> report.RunReport:
    values: dict[str, object] = {
        "status": "completed", "num_rounds_done": 1, "num_rounds": 1,
        "final": {"accuracy": 0.5, "loss": 1.0}, "target_delta": 1e-5, "target_epsilon": 2.0,
        "evaluated_on": "test",
        "epsilon_of": BOUND.name, "guarantees": (BOUND, NONE), "warnings": ("mind this",),
        "history": [ROW], "ledger_head": "abc", "ledger_rows": 1, "seeded_noise": False,
        "summary": {"accountant": "pld"},
    }  # fmt: skip
    return report.RunReport(**(values | changes))  # type: ignore[arg-type]


def test_results_have_the_promised_fields() -> None:
    values = json.loads(make().to_json())
    assert set(values) >= {
        "status", "num_rounds_done", "final", "privacy", "history", "versions", "ledger",
    }  # fmt: skip
    bound, none = values["privacy"]["guarantees"]
    assert (bound["unit"], bound["view"], bound["relation"]) == (
        "CLIENT", "OBSERVER", "ADD_OR_REMOVE_ONE",
    )  # fmt: skip
    assert (bound["epsilon"], bound["delta"], bound["accountant"]) == (1.5, 1e-5, "pld")
    assert (none["epsilon"], none["private"]) == (None, False)
    assert values["privacy"]["private"] is True
    assert values["history"][0] == {
        "round": 1, "accuracy": 0.5, "loss": 1.0, "epsilon": 1.5, "cohort_expected": 3.0,
        "clipping_norm": 1.0, "noise_std_of_sum": 2.0,
    }  # fmt: skip
    assert values["ledger"] == {"head": "abc", "rows": 1}
    assert {"torch", "flwr", "opacus"} <= set(values["versions"])


def test_other_metrics_stand_under_their_own_names_in_every_row() -> None:
    rows = [ROW, replace(ROW, round=2, other_metrics={"auc": 0.75})]
    history = json.loads(make(history=rows).to_json())["history"]
    assert [row["auc"] for row in history] == [None, 0.75]
    assert list(history[0]) == list(history[1])


def test_the_report_says_on_which_rows_the_metrics_were_measured() -> None:
    line = "- metrics: accuracy 0.5000, loss 1.0000 on "
    assert line + "the public test rows\n" in make().to_markdown()
    assert line + "validation rows" in make(evaluated_on="validation").to_markdown()
    assert json.loads(make(evaluated_on="validation").to_json())["evaluated_on"] == "validation"


def test_report_states_rows_assumptions_and_what_is_not_covered() -> None:
    text = make().to_markdown()
    assert "| CLIENT | OBSERVER | 1.5000 | 1e-05 | ADD_OR_REMOVE_ONE | pld | yes |" in text
    assert "| CLIENT | SERVER | none (not private) |" in text
    for part in ("one thing", "another", "mind this", "What is not covered", "abc"):
        assert part in text
    assert "NOT PRIVATE:" not in text


def test_unprotected_runs_are_stamped() -> None:
    assert "**NOT PRIVATE" in make(guarantees=(NONE,)).to_markdown()
    assert "**NOT PRIVATE: noise was derived" in make(seeded_noise=True).to_markdown()
    assert json.loads(make(guarantees=(NONE,)).to_json())["privacy"]["private"] is False


def test_statement_gives_every_epsilon_with_all_that_belongs_to_it() -> None:
    lines = statement((NONE, BOUND), BOUND.name).splitlines()
    assert lines[0] == (
        "CLIENT against OBSERVER: epsilon 1.500 at delta 1e-05, ADD_OR_REMOVE_ONE, pld accountant, "
        "assuming 1, 2"
    )
    assert lines[1].startswith("CLIENT against SERVER: NOT PRIVATE")
    assert lines[2:] == ["  [1] one thing", "  [2] another", "  [3] no noise"]


def test_curves_are_a_png(tmp_path: Path) -> None:
    report.plot_curves([ROW, replace(ROW, round=2)], BOUND, tmp_path / "curves.png", "test")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    report.plot_curves([], None, tmp_path / "empty.png", "test")


def test_progress_prints_one_plain_line_per_round_off_a_terminal() -> None:
    stream = io.StringIO()
    with Progress(num_rounds=2, target_epsilon=2.0, stream=stream) as progress:
        progress.show(ROW, TRACE)
    header, line = stream.getvalue().splitlines()
    assert header.split()[:4] == ["round", "answered", "accuracy", "loss"]
    assert line.split()[:7] == ["1/2", "2/3", "50.00", "%", "1.0000", "1.500", "0.500"]


def test_progress_is_a_live_table_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress(num_rounds=2, target_epsilon=None, stream=stream) as progress:
        progress.show(ROW, TRACE)
    assert "┃" in stream.getvalue()
    assert "2/3" in stream.getvalue()
