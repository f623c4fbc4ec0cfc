"""The README's table is what the committed measurements say, and they exceed what was logged."""

from __future__ import annotations

import copy
import json
import statistics

import pytest
from bench import accuracy_table
from bench.accuracy_table import QUICK, README, ROWS, SEEDS, Row, to_markdown

from fl_app.accounting.plan import make_plan
from fl_app.overrides import compose

DONE = json.loads(accuracy_table.OUT.read_text(encoding="utf-8"))
PRIVATE = [row for row in ROWS if row.overrides != ("experiment=tuned_no_dp",)]


def test_the_readme_shows_what_was_measured() -> None:
    text = README.read_text(encoding="utf-8")
    _, _, rest = text.partition(accuracy_table.BEGIN)
    assert rest.partition(accuracy_table.END)[0].strip() == to_markdown(DONE)


def test_every_measured_run_exceeds_the_logged_accuracy() -> None:
    logged = {row.name: row.logged for row in ROWS}
    for run in DONE:
        assert 100 * run["accuracy"] > (logged[run["row"]] or 0.0), run["row"]


def test_the_committed_rows_are_whole() -> None:
    quick = {row.name for row in ROWS if row.epsilon in QUICK}
    measured = {row.name: sorted(r["seed"] for r in DONE if r["row"] == row.name) for row in ROWS}
    assert quick <= {name for name, seeds in measured.items() if seeds}
    assert all(seeds in ([], sorted(SEEDS)) for seeds in measured.values())
    assert all(run["rounds"] == 100 for run in DONE)


def test_a_run_below_the_logged_accuracy_fails_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accuracy_table.main(["--print-only"]) == 0
    worse = copy.deepcopy(DONE)
    next(run for run in worse if run["row"] == "no DP")["accuracy"] = 0.9
    monkeypatch.setattr(accuracy_table.json, "loads", lambda _: worse)
    assert accuracy_table.main(["--print-only"]) == 1


@pytest.mark.parametrize("row", PRIVATE, ids=lambda row: row.name)
def test_a_row_spends_the_epsilon_that_it_claims(row: Row) -> None:
    plan = make_plan(compose(row.overrides), nominal_rows=600)
    (epsilon,) = {guarantee.epsilon for guarantee in plan.guarantees(100)}
    claimed = 0.75 if row.epsilon is None else row.epsilon
    assert epsilon == pytest.approx(claimed, rel=2e-3)
    for run in DONE:  # the committed runs had this noise
        if run["row"] == row.name:
            assert run["epsilon"] == pytest.approx(epsilon, rel=1e-3)


def test_a_line_holds_mean_and_range_of_the_seeds() -> None:
    run = {"row": "no DP", "seed": 1, "clipping_norm": None, "epsilon": None}
    runs = [run | {"accuracy": accuracy} for accuracy in (0.911, 0.925, 0.937)]
    mean = statistics.mean((91.1, 92.5, 93.7))
    line = f"| no DP | - | - | {mean:.1f} % (91.1 to 93.7) | 90.1 % |"
    assert to_markdown(runs).splitlines()[2:] == [line]
