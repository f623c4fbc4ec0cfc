"""Rule 1: an epsilon is printed only with delta, unit, relation, view, accountant, assumptions."""

import re
from pathlib import Path

import pytest
from harness import Watched, federation, watched_run

from fl_app.accounting.plan import make_plan
from fl_app.overrides import compose
from fl_app.privacy import round_up

EPSILON = re.compile(r"epsilon\W{1,3}\d", re.IGNORECASE)
STATED = re.compile(
    r"^(RECORD|CLIENT) against (SERVER|OBSERVER): epsilon [\d.]+ at delta [\d.e-]+, "
    r"(ADD_OR_REMOVE_ONE|ZERO_OUT|REPLACE_ONE), (pld|rdp) accountant, assuming \d+(, \d+)*$"
)
RUNS = {
    "record": [],
    "central": ["mechanism=central_gaussian", "cohort=poisson", "cohort.sampling_rate=0.5"],
    "local": ["mechanism=local_gaussian", "accountant=rdp"],
    "not private": ["training=sgd", "privacy.target_epsilon=null"],
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watched_run(tmp_path_factory.mktemp("run") / "run", *RUNS[request.param])


def test_every_stated_guarantee_has_all_parts(run: Watched) -> None:
    rows = run.results["privacy"]["guarantees"]
    assert rows
    for row in rows:
        assert row["unit"] in ("RECORD", "CLIENT")
        assert row["view"] in ("SERVER", "OBSERVER")
        assert row["relation"] in ("ADD_OR_REMOVE_ONE", "ZERO_OUT", "REPLACE_ONE")
        assert 0 < row["delta"] < 1
        assert row["assumptions"]
        assert row["private"] is (row["epsilon"] is not None)
        assert bool(row["accountant"]) is row["private"]


def test_history_names_the_guarantee_that_its_epsilon_belongs_to(run: Watched) -> None:
    privacy = run.results["privacy"]
    spent = [row["epsilon"] for row in run.results["history"]]
    if privacy["epsilon_of"] is None:
        assert spent == [None, None]
        return
    (bound,) = [g for g in privacy["guarantees"] if g["name"] == privacy["epsilon_of"]]
    assert spent[0] < spent[1] == pytest.approx(bound["epsilon"])


def test_the_report_prints_every_epsilon_in_a_full_row(run: Watched) -> None:
    text = (run.folder / "privacy_report.md").read_text()
    for row in run.results["privacy"]["guarantees"]:
        shown = "none (not private)" if row["epsilon"] is None else round_up(row["epsilon"], 4)
        cells = [row["unit"], row["view"], shown, f"{row['delta']:g}", row["relation"]]
        assert "| " + " | ".join([*cells, row["accountant"] or "-"]) + " |" in text
        for assumption in row["assumptions"]:
            assert f"- {assumption}" in text
    for line in text.splitlines():
        assert not EPSILON.search(line) or "at delta" in line, line


@pytest.mark.parametrize("name", RUNS)
def test_the_terminal_prints_every_epsilon_in_a_full_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched_run(tmp_path / "run", *RUNS[name])
    lines = [line for line in capsys.readouterr().out.splitlines() if EPSILON.search(line)]
    assert bool(lines) is (name != "not private")
    for line in lines:
        assert STATED.match(line), line


def test_delta_that_allows_giving_one_client_away_is_warned_about() -> None:
    central = ["mechanism=central_gaussian", "mechanism.noise_multiplier=1"]
    for delta, warned in ((0.1, True), (0.099, False)):
        plan = make_plan(compose([*central, f"privacy.target_delta={delta}"]), 143)
        assert any("1 / federation.population" in w for w in plan.warnings) is warned


def test_sampling_is_over_the_whole_registry_offline_clients_included(tmp_path: Path) -> None:
    """40 rounds at rate 0.5: that no offline client is ever chosen has probability 2 ** -200."""
    made = federation(
        tmp_path, "mechanism=central_gaussian", "mechanism.noise_multiplier=1", "cohort=poisson",
        "cohort.sampling_rate=0.5", "privacy.target_epsilon=null", "run.num_rounds=40",
        "federation.join_timeout=0.1",
    )  # fmt: skip
    for part in range(5, 10):
        made.grid.silent.add(part)
    made.strategy._roster._nodes.clear()
    made.strategy._roster.refresh(made.grid)
    made.run()
    assert made.strategy._roster.num_nodes == 5
    chosen = {client for trace in made.traces for client in trace.cohort}
    assert chosen == set(range(10))
    assert {c for t in made.traces for c in t.answered} == set(range(5))
