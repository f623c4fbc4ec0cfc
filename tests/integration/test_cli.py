"""The dpfl command as people use it: exit codes, texts, files."""

import json
from pathlib import Path

import pytest
from helpers import dpfl, results, run_here

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
