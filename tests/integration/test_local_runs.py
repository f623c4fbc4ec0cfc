"""Whole runs on the local engine: repeatable, independent of the hosting, resumable."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import (
    REPO,
    assert_same_model,
    dpfl,
    model,
    operator_rounds,
    results,
    run_here,
)

from fl_app.accounting.ledger import Ledger
from fl_app.errors import LedgerError, SettingsError
from fl_app.run import run_one

CLIENT_LEVEL = ["mechanism=central_gaussian", "cohort=poisson", "cohort.sampling_rate=0.5"]
LOCAL_LEVEL = ["mechanism=local_gaussian", "cohort=fixed_size", "cohort.size=6"]


@pytest.mark.parametrize(
    "overrides", [[], CLIENT_LEVEL, LOCAL_LEVEL], ids=["record", "central", "local"]
)
def test_same_seed_gives_the_same_model_for_every_number_of_nodes(
    tmp_path: Path, overrides: list[str]
) -> None:
    for nodes in (1, 2, 10):
        run_here(tmp_path / str(nodes), f"federation.num_nodes={nodes}", *overrides)
    assert_same_model(tmp_path / "1", tmp_path / "2")
    assert_same_model(tmp_path / "1", tmp_path / "10")


def test_worker_processes_give_the_same_model_as_one_process(tmp_path: Path) -> None:
    run_here(tmp_path / "one", "federation.num_nodes=2")
    run_here(tmp_path / "two", "federation.num_nodes=2", "engine.num_workers=2")
    assert_same_model(tmp_path / "one", tmp_path / "two")


def test_other_seeds_and_unseeded_noise_give_other_models(tmp_path: Path) -> None:
    run_here(tmp_path / "a", "run.seed=1")
    run_here(tmp_path / "b", "run.seed=2")
    with pytest.raises(AssertionError):
        assert_same_model(tmp_path / "a", tmp_path / "b")
    for name in ("c", "d"):
        run_here(tmp_path / name, "run.seed=1", "run.seeded_noise=false")
    with pytest.raises(AssertionError):
        assert_same_model(tmp_path / "c", tmp_path / "d")


@pytest.mark.parametrize("overrides", [[], CLIENT_LEVEL], ids=["record", "central"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "sgd"])
def test_stopped_and_resumed_run_equals_the_straight_one(
    tmp_path: Path, overrides: list[str], optimizer: str
) -> None:
    common = [*overrides, f"server_optimizer={optimizer}", "federation.num_nodes=2"]
    straight = run_here(tmp_path / "straight", *common)
    stopped = run_here(tmp_path / "halves", *common, "run.stop_after=2")
    assert (stopped["status"], stopped["num_rounds_done"]) == ("stopped", 2)
    assert run_one([f"run.resume={tmp_path / 'halves'}", "engine.num_workers=0"]) == 0
    resumed = results(tmp_path / "halves")
    assert resumed["status"] == "completed"
    assert resumed["privacy"] == straight["privacy"]
    assert [r["round"] for r in resumed["history"]] == [1, 2, 3, 4]
    assert_same_model(tmp_path / "straight", tmp_path / "halves", tolerance=1e-6)


def test_private_run_resumes_with_the_same_epsilon(tmp_path: Path) -> None:
    straight = run_here(tmp_path / "straight", "run.seeded_noise=false")
    run_here(tmp_path / "halves", "run.seeded_noise=false", "run.stop_after=2")
    run_one([f"run.resume={tmp_path / 'halves'}"])
    resumed = results(tmp_path / "halves")
    assert [r["epsilon"] for r in resumed["history"]] == [r["epsilon"] for r in straight["history"]]
    assert resumed["ledger"]["rows"] == straight["ledger"]["rows"] == 4


def stopped_run(path: Path) -> Path:
    run_here(path, "run.seeded_noise=false", "run.stop_after=2")
    return path


def test_resume_without_the_ledger_is_refused(tmp_path: Path) -> None:
    path = stopped_run(tmp_path / "run")
    (path / "ledger.sqlite").unlink()
    with pytest.raises(LedgerError, match="there is no ledger"):
        run_one([f"run.resume={path}"])


def test_resume_with_an_older_ledger_is_refused(tmp_path: Path) -> None:
    path = stopped_run(tmp_path / "run")
    shutil.copy(path / "ledger.sqlite", tmp_path / "old.sqlite")
    run_one([f"run.resume={path}", "run.stop_after=3"])
    shutil.copy(tmp_path / "old.sqlite", path / "ledger.sqlite")
    with pytest.raises(LedgerError, match="older than the record"):
        run_one([f"run.resume={path}"])


def test_resume_keeps_the_settings(tmp_path: Path) -> None:
    path = stopped_run(tmp_path / "run")
    with pytest.raises(SettingsError, match="a resumed run keeps its settings"):
        run_one([f"run.resume={path}", "privacy.target_epsilon=80"])


def test_a_charge_without_a_release_counts_after_a_kill(tmp_path: Path) -> None:
    """The kill came between the charge and the checkpoint: one charge more, never one less."""
    path = stopped_run(tmp_path / "run")
    straight = run_here(tmp_path / "straight", "run.seeded_noise=false")
    with Ledger.open(path / "ledger.sqlite") as ledger:
        ledger.append(3, next(iter(ledger.counts())))
    run_one([f"run.resume={path}"])
    resumed = results(path)
    # The budget was calibrated for four rounds; five charges do not fit, so the run ends one
    # earlier.
    assert resumed["status"] == "budget_exhausted"
    assert resumed["num_rounds_done"] == 3
    assert resumed["ledger"]["rows"] == 4
    spent = resumed["privacy"]["guarantees"][0]["epsilon"]
    assert spent == pytest.approx(straight["privacy"]["guarantees"][0]["epsilon"])


def test_killed_run_resumes_with_the_epsilon_of_at_most_one_charge_more(tmp_path: Path) -> None:
    path = tmp_path / "run"
    overrides = ["run.num_rounds=60", "engine.num_workers=0", f"run.output_dir={path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fl_app.cli", "run", *overrides],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "5/60" in line:
            break
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(operator_rounds(path))
    assert run_one([f"run.resume={path}", f"run.stop_after={done + 2}"]) == 0
    after = results(path)
    assert after["num_rounds_done"] == done + 2
    assert done + 2 <= after["ledger"]["rows"] <= done + 3


def test_budget_ends_the_run_well(tmp_path: Path) -> None:
    finished = dpfl(
        "run", "training.noise_multiplier=1.0", "privacy.target_epsilon=4.0",
        "engine.num_workers=0", f"run.output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    values = results(tmp_path / "run")
    assert values["status"] == "budget_exhausted"
    assert 0 < values["num_rounds_done"] < 30
    assert values["privacy"]["guarantees"][0]["epsilon"] <= 4.0
    assert model(tmp_path / "run")
    assert "budget_exhausted" in finished.stdout


def test_same_output_directory_twice_is_refused(tmp_path: Path) -> None:
    run_here(tmp_path / "run")
    with pytest.raises(SettingsError, match="holds something already"):
        run_here(tmp_path / "run")
