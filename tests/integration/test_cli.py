"""The dpfl command as people use it: exit codes, texts, files."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import dpfl, results, run_here

from fl_app.accounting.node_charge import node_events
from fl_app.accounting.node_ledger import NodeLedger
from fl_app.server_run import plan_of

QUICK = ["run.num_rounds=2", "engine.num_workers=0"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["privacy.target_epsilon=0"], "privacy.target_epsilon=0.0: must be a finite number > 0"),
        (["sigmaa=2"], "sigmaa=2: unknown key"),
        (["dataset=mnist", "dataset.path=/not/there"], "dataset.path=/not/there"),
        (["federation.population=2000"], "federation.population=2000"),
    ],
)
def test_refusals_exit_with_2_and_leave_nothing(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    done = dpfl("run", *overrides, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_s36_hub_dataset_offline_says_how_to_point_at_local_data(tmp_path: Path) -> None:
    done = dpfl(
        "run", "dataset=mnist", cwd=tmp_path,
        HF_HUB_OFFLINE="1", DPFL_DATA_ROOT="", HF_HOME=str(tmp_path / "hf"),
        DPFL_HOME=str(tmp_path / "home"),
    )  # fmt: skip
    assert done.returncode == 2
    for part in ("ylecun/mnist", "DPFL_DATA_ROOT", "dataset.path"):
        assert part in done.stderr


def test_plan_shows_the_cost_without_training(tmp_path: Path) -> None:
    done = dpfl("plan", "--json", cwd=tmp_path)
    values = json.loads(done.stdout)
    assert values["epsilon_of"] == "RECORD against SERVER"
    assert values["training_noise_multiplier"] == pytest.approx(1.406, abs=2e-3)
    assert values["guarantees"][0]["epsilon"] == pytest.approx(8.0, abs=0.01)
    assert values["num_parameters"] == 650
    text = dpfl("plan", "mechanism=central_gaussian", cwd=tmp_path).stdout
    assert "CLIENT against SERVER: NOT PRIVATE" in text
    assert list(tmp_path.iterdir()) == []


def test_ledger_show_and_verify(tmp_path: Path) -> None:
    run_here(tmp_path / "run", "run.num_rounds=2")
    shown = dpfl("ledger", "show", str(tmp_path / "run"), "--json")
    assert len(json.loads(shown.stdout)["rows"]) == 2
    assert "2 releases" in dpfl("ledger", "show", str(tmp_path / "run" / "ledger.sqlite")).stdout
    assert dpfl("ledger", "verify", str(tmp_path / "run")).returncode == 0
    import sqlite3

    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as database:
        database.execute("DELETE FROM releases WHERE seq = 2")
    cut = dpfl("ledger", "verify", str(tmp_path / "run"), "--json")
    assert cut.returncode == 1
    assert "older" in json.loads(cut.stdout)["problems"][0]
    assert dpfl("ledger", "show", str(tmp_path / "nothing")).returncode == 2


def test_plan_shows_what_a_node_will_be_charged() -> None:
    """10 of 100 rounds at z 1.386 cost a node 11.8; the sampled 4.0 is the observer's number."""
    overrides = [
        "mechanism=central_gaussian", "cohort=poisson", "cohort.sampling_rate=0.1",
        "federation.population=100", "run.num_rounds=100", "privacy.target_epsilon=4",
        "privacy.target_delta=1e-5",
    ]  # fmt: skip
    shown = plan_of(overrides)
    charge = json.loads(json.dumps(shown.values, allow_nan=False))["node_charge"]
    assert (charge["most_requests"], charge["expected_requests"]) == (100, 10)
    client, record = charge["expected"]
    assert (client["unit"], client["relation"], client["delta"]) == ("CLIENT", "ZERO_OUT", 1e-5)
    assert client["epsilon"] == pytest.approx(11.77, abs=0.01)
    assert (record["unit"], record["relation"]) == ("RECORD", "ADD_OR_REMOVE_ONE")
    assert record["epsilon"] == pytest.approx(29.17, abs=0.02)
    assert charge["most"][0]["epsilon"] == pytest.approx(56.0, abs=0.1)
    assert "asked in 100 rounds, the most possible:" in shown.text
    assert "CLIENT against OBSERVER: epsilon 11.773 at delta 1e-05, ZERO_OUT" in shown.text


def test_ledger_show_and_verify_of_a_node(tmp_path: Path) -> None:
    path = tmp_path / "ward.sqlite"
    ledger = NodeLedger(path=path, data_id="ward-7", max_epsilon=None, max_delta=1e-5)
    (event,) = node_events([], seeded=False)
    for _ in range(10):
        ledger.charge([replace(event, noise_multiplier=1.386)])
    shown = dpfl("ledger", "show", str(path), "--json", "--max-epsilon", "40")
    values = json.loads(shown.stdout)
    assert (values["data_id"], values["num_requests"], len(values["rows"])) == ("ward-7", 10, 10)
    assert values["num_releases"] == 10
    assert {row["delta"] for row in values["guarantees"]} == {1e-5}
    found = {(row["unit"], row["accountant"]): row["epsilon"] for row in values["guarantees"]}
    assert found["CLIENT", "pld"] == pytest.approx(11.77, abs=0.01)
    assert found["RECORD", "pld"] == pytest.approx(29.17, abs=0.02)
    assert found["RECORD", "rdp"] > found["RECORD", "pld"]
    assert found.keys() == set(itertools.product(("CLIENT", "RECORD"), ("rdp", "pld")))
    assert values["left"] == pytest.approx(40 - 29.17, abs=0.02)
    path.with_name("ward.sqlite.head").unlink()
    gone = dpfl("ledger", "verify", str(path), "--json")
    assert gone.returncode == 1
    assert "ward.sqlite.head is missing" in json.loads(gone.stdout)["problems"][0]


def test_s40_relative_output_and_multirun_land_where_the_user_stands(tmp_path: Path) -> None:
    done = dpfl("run", *QUICK, "run.output_dir=here/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "here" / "run")["num_rounds_done"] == 2
    done = dpfl(
        "run", "-m", *QUICK, "privacy.target_epsilon=2,4", "run.output_dir=sweep", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    epsilons = [
        results(tmp_path / "sweep" / str(i))["privacy"]["guarantees"][0]["epsilon"] for i in (0, 1)
    ]
    assert epsilons == pytest.approx([2, 4], abs=0.01)


def test_a_failed_job_of_a_sweep_is_reported_and_does_not_stop_the_others(tmp_path: Path) -> None:
    done = dpfl(
        "run", "-m", *QUICK, "federation.population=5000,5", "run.output_dir=sweep", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "federation.population=5000" in done.stderr
    assert results(tmp_path / "sweep" / "1")["status"] == "completed"
