"""S34, S36, S40: settings arrive, no network is needed, paths are meant as written."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import PUBLIC_FILES, UNLIMITED, charged_rounds, watched_run

from fl_app import client_round
from fl_app.errors import SettingsError
from fl_app.overrides import compose
from fl_app.run import run_one, run_sweep
from fl_app.stages import PrivatizedUpdate

REPO = Path(__file__).resolve().parents[2]
NO_HUB = "http://127.0.0.1:9"


def dpfl(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "DPFL_DATA_ROOT"}
    return subprocess.run(
        [sys.executable, "-m", "fl_app.cli", *arguments],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(REPO), "HF_ENDPOINT": NO_HUB, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_s34_what_a_client_uses_is_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, used = client_round.run_client, []

    def watched(client: int, settings: Any, order: Any, *rest: Any) -> PrivatizedUpdate:
        training = settings.training
        used.append(
            (order.noise_multiplier, order.clipping_norm, training.learning_rate,
             training.local_epochs)
        )  # fmt: skip
        return genuine(client, settings, order, *rest)

    monkeypatch.setattr(client_round, "run_client", watched)
    run = watched_run(
        tmp_path / "run", "mechanism=central_gaussian", *UNLIMITED,
        "mechanism.noise_multiplier=0.77", "mechanism.clipping_norm=0.33",
        "training.learning_rate=0.011", "training.local_epochs=2",
    )  # fmt: skip
    saved = yaml.safe_load((run.folder / "config.yaml").read_text())
    mechanism, training = saved["mechanism"], saved["training"]
    assert set(used) == {(0.77, 0.33, 0.011, 2)}
    assert (mechanism["noise_multiplier"], mechanism["clipping_norm"]) == (0.77, 0.33)
    assert (training["learning_rate"], training["local_epochs"]) == (0.011, 2)


def test_s34_a_calibrated_multiplier_is_saved_as_it_was_used(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "run", "run.num_rounds=1")
    from fl_app import wire

    sent = {wire.read_train(m).order.training_noise_multiplier for m in run.grid.train_messages()}
    saved = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert sent == {saved["training"]["noise_multiplier"]}


@pytest.mark.parametrize("typo", ["sigmaa=2", "mechanism.sigmaa=2", "training.sigmaa=2"])
def test_s34_misspelled_keys_are_errors(typo: str) -> None:
    with pytest.raises(SettingsError, match=f"{typo}: unknown key"):
        compose(["mechanism=central_gaussian", typo])


def test_s36_the_default_example_runs_without_network_and_caches(tmp_path: Path) -> None:
    done = dpfl(
        "run", "run.num_rounds=1", "engine.num_workers=0", cwd=tmp_path,
        DPFL_HOME=str(tmp_path / "home"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "completed after 1 rounds" in done.stdout


def test_s36_a_hub_dataset_without_network_ends_soon_and_says_what_to_do(tmp_path: Path) -> None:
    start = time.monotonic()
    dpfl("run", "privacy.target_epsilon=0", cwd=tmp_path)  # what starting Python costs here and now
    begun = time.monotonic()
    done = dpfl("run", "dataset=mnist", cwd=tmp_path, DPFL_HOME=str(tmp_path / "home"))
    assert (time.monotonic() - begun) - (begun - start) < 10
    assert done.returncode not in (0, None)
    for part in ("dataset.hub_id=ylecun/mnist", "dataset.path", "DPFL_DATA_ROOT"):
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()


ONE_ROUND = ["run.num_rounds=1", "engine.num_workers=0"]


def test_s40_relative_paths_are_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_one([*ONE_ROUND, "run.output_dir=out/a"]) == 0
    assert charged_rounds(tmp_path / "out" / "a" / "ledger.sqlite") == [1]
    assert run_one(ONE_ROUND) == 0
    (chosen,) = (tmp_path / "outputs").rglob("ledger.sqlite")
    assert charged_rounds(chosen) == [1]


def test_s40_a_sweep_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_sweep(["-m", *ONE_ROUND, "run.output_dir=out/sweep", "run.seed=3,4"]) == 0
    for number in (0, 1):
        assert charged_rounds(tmp_path / "out" / "sweep" / str(number) / "ledger.sqlite") == [1]


def test_s40_a_sweep_without_a_folder_makes_one_run_directory_a_job_and_hides_seeds(
    tmp_path: Path,
) -> None:
    done = dpfl(
        "run", "-m", *ONE_ROUND, "run.seed=918273645,4", cwd=tmp_path,
        DPFL_HOME=str(tmp_path / "home"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ledgers = sorted((tmp_path / "multirun").rglob("ledger.sqlite"))
    assert [path.parent.name for path in ledgers] == ["0", "1"]
    assert {p.name for p in ledgers[0].parent.iterdir()} == PUBLIC_FILES | {"operator.jsonl"}
    telling = [
        path
        for path in (tmp_path / "multirun").rglob("*")
        if path.is_file() and b"918273645" in path.read_bytes()
    ]
    assert ledgers[0].parent / "operator.jsonl" in telling
    for path in telling:
        assert path.stat().st_mode & 0o077 == 0, path
