"""``dpfl plan --cost``: bytes as a run then counts them, and a rehearsal that leaves nothing."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import dpfl, operator_rounds, run_here

from fl_app import cost
from fl_app.errors import FederationError, SettingsError
from fl_app.rehearsal import Findings, NodeTime, Script

# 2 s for a message, 0.5 s a client, 0.01 s a row.
TIMES = [
    NodeTime(clients=c, rows=r, seconds=2 + 0.5 * c + 0.01 * r)
    for c, r in [(1, 10), (1, 200), (5, 600), (9, 90)]
]
FINDINGS = Findings(
    startup=7.0, server=0.25, evaluation=4.0, finish=3.0,
    first=NodeTime(clients=1, rows=100, seconds=5.5), nodes=tuple(TIMES),
    server_memory=800 << 20, worker_memory=700 << 20,
)  # fmt: skip
CLIENTS = ["federation.population=100", "partition=iid", "privacy.target_delta=1e-5"]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[Script]:
    """Replaces the rehearsal, which takes seconds, by fixed findings."""
    seen: list[Script] = []

    def rehearse(script: Script) -> Findings:
        seen.append(script)
        return FINDINGS

    monkeypatch.setattr(cost, "rehearse", rehearse)
    return seen


@pytest.mark.parametrize("nodes", [1, 2, 10])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.placement=central", "training.local_steps=1"],
        ["mechanism=central_gaussian"],
        ["mechanism=central_gaussian", "mechanism.target_quantile=0.5"],
        ["mechanism=local_laplace"],
        ["mechanism=distributed_discrete_gaussian", "mechanism.bits=16"],
        ["mechanism=distributed_skellam", "mechanism.bits=16"],
        ["training=sgd", "federation.weighting=examples", "privacy.target_epsilon=null"],
    ],
    ids=lambda words: words[0] if words else "record",
)
def test_bytes_are_those_that_a_run_counts(
    tmp_path: Path, scripts: list[Script], nodes: int, overrides: list[str]
) -> None:
    """Ten clients on one, two and ten nodes: replies for several clients differ from one's."""
    words = [*overrides, f"federation.num_nodes={nodes}", "run.num_rounds=2"]
    traffic = cost.estimate(words).traffic
    run_here(tmp_path / "run", *words)
    counted = {(r["bytes_sent"], r["bytes_received"]) for r in operator_rounds(tmp_path / "run")}
    assert counted == {(traffic.sent, traffic.received)}


@pytest.mark.parametrize(
    "cohort",
    [
        ["cohort=poisson", "cohort.sampling_rate=0.5"],
        ["cohort=fixed_size", "cohort.size=50", "accountant=rdp"],
        ["cohort=round_robin", "cohort.fraction=0.5"],
    ],
    ids=lambda words: words[0],
)
def test_bytes_of_the_expected_cohort(
    tmp_path: Path, scripts: list[Script], cohort: list[str]
) -> None:
    words = [
        "mechanism=central_gaussian", *cohort, *CLIENTS, "federation.num_nodes=2",
        "run.num_rounds=2", "mechanism.noise_multiplier=1.0", "privacy.target_epsilon=null",
    ]  # fmt: skip
    traffic = cost.estimate(words).traffic
    run_here(tmp_path / "run", *words)
    for counted in operator_rounds(tmp_path / "run"):
        assert (counted["bytes_sent"], counted["bytes_received"]) == (
            traffic.sent,
            traffic.received,
        )


def test_bytes_and_seconds_grow_with_the_cohort_and_not_with_the_population(
    scripts: list[Script],
) -> None:
    def found(population: int, size: int) -> cost.Cost:
        return cost.estimate(
            [
                "mechanism=central_gaussian", "cohort=fixed_size", f"cohort.size={size}",
                "accountant=rdp", "partition=iid", f"federation.population={population}",
                "federation.num_nodes=50", "engine.num_workers=2", "run.num_rounds=5",
                "mechanism.noise_multiplier=1.0", "privacy.target_epsilon=null",
            ],
            rows_per_client=20,
        )  # fmt: skip

    costs = [found(1_000, size) for size in (1, 10, 100, 500)]
    for smaller, larger in itertools.pairwise(costs):
        assert smaller.traffic.sent < larger.traffic.sent
        assert smaller.traffic.received < larger.traffic.received
        assert smaller.seconds_per_round < larger.seconds_per_round
    many = found(1_000_000, 500)
    assert many.traffic.received == pytest.approx(costs[-1].traffic.received, rel=1e-3)
    assert many.seconds_per_round == pytest.approx(costs[-1].seconds_per_round, rel=0.05)


def test_seconds_add_up_from_messages_clients_rows_server_and_evaluations(
    scripts: list[Script],
) -> None:
    """10 clients of 100 rows, 5 nodes, 2 workers: three messages in a row for one of them."""
    words = [
        "dataset=synthetic", "dataset.num_train=1000", "dataset.num_test=10", "partition=iid",
        "federation.num_nodes=5", "engine.num_workers=2", "run.num_rounds=10",
        "run.evaluate_every=4",
    ]  # fmt: skip
    found = cost.estimate(words)
    node = 2 + 2 * 0.5 + 200 * 0.01
    assert found.node_seconds == pytest.approx(3 * node)
    assert found.num_evaluations == 3  # rounds 4, 8 and the last
    assert found.seconds_per_round == pytest.approx(3 * node + 0.25 + 3 / 10 * 4.0)
    assert found.seconds_startup == pytest.approx(7.0 + 5.5 - (2 + 0.5 + 100 * 0.01))
    total = found.seconds_startup + 10 * found.seconds_per_round + 3.0
    assert found.to_json()["seconds_total"] == pytest.approx(total)
    stopped = cost.estimate([*words, "run.stop_after=6"])
    assert (stopped.num_rounds, stopped.num_evaluations) == (6, 2)


def test_the_slowest_node_counts_and_rows_are_those_of_the_partition(
    scripts: list[Script],
) -> None:
    words = ["partition=dirichlet", "federation.num_nodes=2", "engine.num_workers=2"]
    even = cost.estimate([*words, "partition=iid"])
    skewed = cost.estimate([*words, "partition.alpha=0.1"])
    assert even.rows_per_client == pytest.approx(skewed.rows_per_client)
    assert skewed.node_seconds > even.node_seconds
    small, typical, large = (
        scripts[-1].cast[0].small, scripts[-1].cast[0].typical[0], scripts[-1].cast[0].large
    )  # fmt: skip
    assert small.rows < typical.rows < large.rows


def test_equal_clients_are_told_apart_from_nothing_and_still_predicted() -> None:
    times = [NodeTime(clients=c, rows=60 * c, seconds=0.1 + 0.3 * c) for c in (1, 2, 8)]
    model = cost.NodeModel.fitted(times)
    assert model.seconds(100, 6_000) == pytest.approx(0.1 + 0.3 * 100)
    assert min(model.message, model.client, model.row) >= 0


def test_only_the_rounds_that_the_budget_allows_are_paid_for(scripts: list[Script]) -> None:
    words = ["training.noise_multiplier=1.4", "run.num_rounds=30"]
    ample = cost.estimate([*words, "privacy.target_epsilon=50"])
    tight = cost.estimate([*words, "privacy.target_epsilon=4"])
    assert ample.num_rounds == 30
    assert 1 <= tight.num_rounds < 20
    assert tight.seconds_total < ample.seconds_total
    with pytest.raises(SettingsError, match="does not allow a single round"):
        cost.estimate([*words, "privacy.target_epsilon=0.01"])


@pytest.mark.parametrize(
    ("words", "rows", "message"),
    [
        (["run.resume=/some/run"], None, "the cost of a part of a run cannot be told"),
        ([], 0, "--rows-per-client=0: must be"),
        (["federation.num_nodes=3"], 1_000, "the dataset has rows for 1 such clients"),
        (["federation.population=100000"], None, "must not exceed the number of training rows"),
    ],
)
def test_what_cannot_be_told_is_refused(
    scripts: list[Script], words: list[str], rows: int | None, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        cost.estimate(words, rows_per_client=rows)
    assert not scripts


def test_a_rehearsal_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # workers' socket names are limited
        done = dpfl(
            "plan", "--cost", "--json", "run.num_rounds=3", "engine.num_workers=1",
            cwd=tmp_path, TMPDIR=short,
        )  # fmt: skip
        assert not [path for path in Path(short).iterdir() if path.name.startswith("tmp")]
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)["cost"]
    assert not list(tmp_path.iterdir())
    for key in (
        "seconds_total", "seconds_startup", "seconds_per_round", "seconds_of_nodes_per_round",
        "seconds_of_server_per_round", "seconds_per_evaluation", "seconds_finish",
    ):  # fmt: skip
        assert np.isfinite(values[key])
        assert values[key] > 0
    assert values["seconds_total"] > 3 * values["seconds_per_round"]
    for key in ("server_memory_bytes", "worker_memory_bytes"):
        assert 100 << 20 < values[key] < 4 << 30
    assert (values["num_nodes"], values["num_workers"], values["clients_per_round"]) == (1, 1, 10)
    assert "memory of a GPU" in values["not_included"]


def test_a_run_that_cannot_train_is_refused_by_its_rehearsal() -> None:
    """A rehearsal asks the run's own nodes, so their refusals show in it."""
    words = ["engine.num_workers=0", "partition=own", "dataset=digits", "training.nominal_rows=100"]
    with pytest.raises((FederationError, SettingsError)):
        cost.estimate(words)
