"""The same app under Flower's own runtime: simulation engine, bundle, `flwr run`."""

import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from helpers import REPO, assert_same_model, dpfl, results, run_here

MAX_BUNDLE_BYTES = 1_000_000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def flower(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the flwr command of this virtual environment."""
    scripts = Path(sys.executable).parent
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(scripts / "flwr"), *arguments],
        cwd=cwd,
        env={**os.environ, "PATH": path, **env},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def app_copy(tmp_path: Path) -> Path:
    """The app's sources as a user has them, without the tests' own leftovers."""
    target = tmp_path / "dpfl-app"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPO, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in listed:
        if (REPO / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((REPO / name).read_bytes())
    return target


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    app = app_copy(tmp_path)
    built = flower("build", cwd=app, env={"FLWR_HOME": str(tmp_path / "flwr-home")})
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = app.glob("*.fab")
    return path


def test_bundle_holds_code_and_conf_only_and_is_small(bundle: Path) -> None:
    assert bundle.stat().st_size < MAX_BUNDLE_BYTES
    names = [n for n in zipfile.ZipFile(bundle).namelist() if not n.startswith(".info/")]
    assert {"fl_app/server_app.py", "strategies/dp_fedavg.py", "conf/config.yaml"} <= set(names)
    for name in names:
        top, suffix = name.split("/")[0], Path(name).suffix
        allowed = {"fl_app": ".py", "strategies": ".py", "conf": ".yaml"}
        assert name in ("pyproject.toml", "LICENSE", "README.md") or allowed[top] == suffix, name


def test_s35_one_round_runs_from_the_unpacked_bundle_alone(bundle: Path, tmp_path: Path) -> None:
    home = tmp_path / "elsewhere"
    zipfile.ZipFile(bundle).extractall(home)
    code = (
        "import fl_app, sys; from fl_app.run import run_one;"
        f"assert fl_app.__file__.startswith({str(home)!r}), fl_app.__file__;"
        "sys.exit(run_one(['run.num_rounds=1', 'engine.num_workers=0', 'run.output_dir=out']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=home, env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert results(home / "out")["num_rounds_done"] == 1


def test_simulation_engine_gives_the_same_model_as_local(tmp_path: Path) -> None:
    overrides = ["run.num_rounds=3", "run.seeded_noise=true", "federation.num_nodes=2"]
    done = dpfl("run", "engine=simulation", *overrides, f"run.output_dir={tmp_path / 'sim'}")
    assert done.returncode == 0, done.stderr
    run_here(tmp_path / "local", "engine.num_workers=0", *overrides, small=False)
    assert_same_model(tmp_path / "sim", tmp_path / "local")
    assert results(tmp_path / "sim")["privacy"] == results(tmp_path / "local")["privacy"]


def test_flwr_run_does_the_main_job(tmp_path: Path) -> None:
    flwr_home, dpfl_home = tmp_path / "flwr-home", tmp_path / "dpfl-home"
    env = {
        "FLWR_HOME": str(flwr_home),
        "DPFL_HOME": str(dpfl_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
    }
    try:
        done = flower(
            "run", ".", "--stream", "--run-config",
            'overrides="run.num_rounds=3 mechanism=central_gaussian cohort=poisson '
            'cohort.sampling_rate=0.5"',
            cwd=app_copy(tmp_path), env=env,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert "completed after 3 rounds" in output, output
        (run,) = (dpfl_home / "runs").iterdir()
        assert f"run directory: {run}" in output
        values = results(run)
        assert (values["status"], values["num_rounds_done"]) == ("completed", 3)
        assert values["privacy"]["epsilon_of"] == "CLIENT against OBSERVER"

        failed = flower(
            "run", ".", "--stream", "--run-config", 'overrides="privacy.target_epsilon=0"',
            cwd=tmp_path / "dpfl-app", env=env,
        )  # fmt: skip
        assert "privacy.target_epsilon=0.0: must be a finite number > 0" in failed.stdout
        assert len(list((dpfl_home / "runs").iterdir())) == 1
    finally:
        end_superlinks(flwr_home)


def end_superlinks(flwr_home: Path) -> None:
    """Ends the processes that `flwr run` started for this test, found by their FLWR_HOME."""
    marker = f"FLWR_HOME={flwr_home}".encode()
    for attempt in (signal.SIGTERM, signal.SIGKILL):
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if marker in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), attempt)
            except (OSError, ProcessLookupError):
                continue
        time.sleep(1)
