"""S32, S33, S37: missing nodes, failing clients, late replies."""

import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from harness import (
    CENTRAL,
    LOCAL,
    UNLIMITED,
    FakeGrid,
    Federation,
    crashed,
    failing,
    federation,
    watched_run,
)

from fl_app import cli, client_round
from fl_app.errors import FederationError
from fl_app.overrides import compose
from fl_app.stages import ClientPartition
from fl_app.wire import TrainRequest
from strategies.roster import Roster

NOISE = [*UNLIMITED, "mechanism.noise_multiplier=1"]


class Waiting(FakeGrid):
    """Of P nodes only some are there; missing replies take the whole timeout, as in Flower."""

    present: Iterable[int] = ()

    def get_node_ids(self) -> Iterable[int]:
        return [part + 2 for part in self.present]


def gather(
    present: Iterable[int], num_nodes: int, *overrides: str, simulated: bool = False
) -> Roster:
    settings = compose([*CENTRAL, *NOISE, "federation.join_timeout=1.5", *overrides])
    grid = Waiting(settings, num_nodes, lambda client, round: np.zeros(8), simulated=simulated)
    grid.present = present
    roster = Roster(settings.federation, "{}")
    roster.gather(grid)
    return roster


def test_s32_a_node_that_never_answers_costs_no_time_but_its_own_clients() -> None:
    settings = compose([*CENTRAL, *NOISE, "federation.join_timeout=60"])
    grid = Waiting(settings, 3, lambda client, round: np.zeros(8), simulated=False)
    grid.present, grid.silent = range(3), {1}
    roster = Roster(settings.federation, "{}")
    start = time.monotonic()
    roster.gather(grid)
    for _ in range(3):
        roster.refresh(grid)
    assert time.monotonic() - start < 5
    assert sorted(c for group in roster.group(range(6)).values() for c in group) == [0, 2, 3, 5]


def test_s32_one_node_hosts_everybody() -> None:
    roster = gather([0], 1)
    assert list(roster.group(range(10)).values()) == [list(range(10))]


def test_s32_five_nodes_serve_a_cohort_of_ten_when_they_host_it() -> None:
    groups = gather(range(5), 5, "federation.min_nodes=5").group(range(10))
    assert sorted(c for group in groups.values() for c in group) == list(range(10))


@pytest.mark.parametrize("present", [[], [0, 2, 4]])
def test_s32_too_few_nodes_end_the_run_in_time_with_the_numbers(present: list[int]) -> None:
    start = time.monotonic()
    with pytest.raises(FederationError) as end:
        gather(present, 5, "federation.min_nodes=4")
    assert time.monotonic() - start < 4
    for part in ("federation.min_nodes=4", f"only {len(present)} joined", "join_timeout=1.5"):
        assert part in str(end.value)


def test_s32_the_shipped_wait_is_a_minute() -> None:
    assert compose([]).federation.join_timeout <= 60


@pytest.mark.parametrize("simulated", [True, False])
def test_s32_a_node_that_never_joins_does_not_hold_up_the_others(
    simulated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    start = time.monotonic()
    roster = gather([0, 1, 3, 4], 5, "federation.min_nodes=4", simulated=simulated)
    assert time.monotonic() - start < 4
    assert roster.num_nodes == 4
    assert 2 not in {c % 5 for group in roster.group(range(10)).values() for c in group}


def test_s33_one_failing_client_is_left_out_and_its_cause_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = federation(tmp_path, *CENTRAL, *NOISE, "run.num_rounds=3")
    made.grid.answers[4] = failing
    made.grid.answers[5] = crashed
    with caplog.at_level(logging.WARNING):
        made.run()
    assert (made.strategy.status, made.strategy.rounds_done) == ("completed", 3)
    assert {trace.absent for trace in made.traces} == {(4, 5)}
    lines = [r.getMessage() for r in caplog.records if "round 1" in r.getMessage()]
    assert sum("the disk is full" in line for line in lines) == 1
    assert sum("error code 8" in line for line in lines) == 1


def test_s33_one_failing_client_of_a_node_does_not_silence_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    genuine = client_round.client_partition

    def partition(client: int, *rest: Any) -> ClientPartition:
        if client == 3:
            raise RuntimeError("the disk is full")
        return genuine(client, *rest)

    monkeypatch.setattr(client_round, "client_partition", partition)
    run = watched_run(tmp_path / "run", *CENTRAL, *NOISE, num_nodes=2)
    answered = [m.content.config_records["config"]["clients"] for m in run.grid.train_replies()]
    assert answered == [[0, 2, 4, 6, 8], [1, 5, 7, 9]] * 2
    assert "the disk is full" in caplog.text


@pytest.mark.parametrize("num_rounds", [1, 2, 5])
@pytest.mark.parametrize("where", ["run_client", "check_node"])
def test_s33_all_clients_failing_ends_soon_with_an_error_and_the_cause_on_screen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    num_rounds: int,
    where: str,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(client_round, where, fails)
    start = time.monotonic()
    overrides = [*NOISE, *CENTRAL, f"run.num_rounds={num_rounds}", "engine.num_workers=0"]
    folder = f"run.output_dir={tmp_path / 'run'}"
    monkeypatch.setattr(sys, "argv", ["dpfl", "run", *overrides, folder])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert time.monotonic() - start < 30
    assert end.value.code not in (0, None)
    # Logs go to the screen too.
    assert "RuntimeError: the disk is full" in capsys.readouterr().err + caplog.text


def failing_federation(tmp_path: Path, *overrides: str) -> Federation:
    made = federation(
        tmp_path, "mechanism=central_gaussian", "cohort=poisson", "cohort.sampling_rate=0.05",
        *NOISE, "run.num_rounds=30", *overrides,
    )  # fmt: skip
    for part in range(10):
        made.grid.answers[part] = failing
    return made


def test_s33_empty_cohorts_between_do_not_hide_that_everybody_fails(tmp_path: Path) -> None:
    made = failing_federation(tmp_path, "cohort.amplification=false")
    with pytest.raises(FederationError, match="the disk is full"):
        made.run()
    asked = [trace for trace in made.traces if trace.cohort]
    assert len(asked) == 3  # the third failing round ended it, and is on record
    assert len(made.traces) > 2


def test_s33_an_amplified_run_is_not_cut_short_as_that_would_tell_who_was_sampled(
    tmp_path: Path,
) -> None:
    made = failing_federation(tmp_path)
    made.run()
    assert (made.strategy.status, made.strategy.rounds_done) == ("completed", 30)
    # The operator is told all the same: the run's command fails with this cause.
    assert not made.strategy.anybody_answered
    assert "the disk is full" in made.strategy.last_cause


@pytest.mark.parametrize("overrides", [CENTRAL, LOCAL], ids=["central", "local"])
def test_s37_a_late_reply_is_in_no_later_round(tmp_path: Path, overrides: list[str]) -> None:
    """Client 0 answers round r in round r + 1, twice, beside its timely answer of that round."""
    one_hot = np.eye(10, dtype=np.float32)
    made = federation(
        tmp_path, *overrides, *UNLIMITED, "mechanism.noise_multiplier=0", "run.num_rounds=3",
        delta=lambda client, round: one_hot[client] * np.float32(0.1 * round), num_parameters=10,
    )  # fmt: skip
    kept: list[Message] = []

    def slow(message: Message, request: TrainRequest) -> list[Message]:
        late = kept[-1:]
        kept.extend(made.grid.genuine(message, request))
        return [*late, *late, *(kept[-1:] if request.order.round == 3 else [])]

    made.grid.answers[0] = slow
    made.run()
    expected = [[0.0, *[0.1] * 9], [0.0, *[0.2] * 9], [0.3] * 10]
    np.testing.assert_allclose(np.stack(made.released_sums), expected, rtol=1e-5, atol=1e-7)
    assert [trace.absent for trace in made.traces] == [(0,), (0,), ()]
    assert any("came late" in text for text in made.traces[1].violations)


def test_s37_the_same_reply_twice_counts_once(tmp_path: Path) -> None:
    made = federation(
        tmp_path, *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=0", "run.num_rounds=1",
        delta=lambda client, round: np.full(4, 0.1, np.float32), num_parameters=4,
    )  # fmt: skip
    made.grid.answers[0] = lambda message, request: made.grid.genuine(message, request) * 2
    np.testing.assert_allclose(made.run().released_sums[0], 1.0, rtol=1e-6)


def test_s37_a_reply_for_somebody_elses_client_is_dropped(tmp_path: Path) -> None:
    made = federation(
        tmp_path, *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=0", "run.num_rounds=1",
        delta=lambda client, round: np.full(4, 0.1, np.float32), num_parameters=4,
    )  # fmt: skip

    def greedy(message: Message, request: TrainRequest) -> list[Message]:
        stolen = TrainRequest(
            settings=request.settings, order=request.order, clients=(0, 1), model=request.model
        )
        return made.grid.genuine(message, stolen)

    made.grid.answers[0] = greedy
    np.testing.assert_allclose(made.run().released_sums[0], 0.9, rtol=1e-6)
    assert "not asked for" in made.traces[0].violations[0]
