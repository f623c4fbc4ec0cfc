"""The Hydra entry: one run, or a multirun sweep in which every job is a run of its own."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fl_app import checks
from fl_app.errors import DpflError
from fl_app.overrides import CONF_DIR, check_sweep
from fl_app.server_run import load_settings, with_output_dir
from fl_app.settings import Settings


def run_one(overrides: Sequence[str]) -> int:
    """Runs once and returns the exit code.

    Raises:
        DpflError: the run cannot start, or has failed.
    """
    settings = load_settings(overrides, default_directory)
    return settings.engine.run(settings)


def default_directory() -> Path:
    """Returns a new path ``outputs/<date>/<time>`` below the caller's directory."""
    day, clock = time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S")
    return Path.cwd() / "outputs" / day / f"{clock}-{secrets.token_hex(2)}"


def run_sweep(arguments: Sequence[str]) -> int:
    """Runs a Hydra multirun; a failed job is reported and does not stop the others.

    Returns:
        0 if every job ended well, else 1.

    Raises:
        SettingsError: an unknown key or choice, before the first job.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    check_sweep(arguments)
    failures: list[str] = []

    def job(config: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        # Hydra notes all overrides of the sweep there, seeds too: for the operator only (rule 9).
        (Path(hydra_config.sweep.dir) / "multirun.yaml").chmod(0o600)
        number, folder = hydra_config.job.num, Path(hydra_config.runtime.output_dir)
        overrides = " ".join(hydra_config.overrides.task)
        print(f"#{number}: {overrides}", flush=True)
        values = OmegaConf.to_container(config, resolve=True)
        if not isinstance(values, dict):
            raise TypeError("the composed configuration is not a mapping")
        values.pop("experiment", None)
        try:
            settings = Settings.from_mapping({str(k): v for k, v in values.items()})
            if settings.run.resume is not None:
                raise checks.fail(
                    "run.resume",
                    settings.run.resume,
                    "a sweep starts new runs",
                    "resume without -m",
                )
            if settings.run.output_dir is not None:
                folder = Path(settings.run.output_dir).expanduser().absolute() / str(number)
            settings = with_output_dir(settings, folder)
            if settings.engine.run(settings):
                failures.append(overrides)
        except DpflError as error:
            failures.append(overrides)
            print(f"#{number} failed: {error}", file=sys.stderr, flush=True)

    # Hydra's own files would lie in the run directory and tell the seed.
    quiet = ["hydra.output_subdir=null", "hydra/job_logging=none"]
    old, sys.argv = sys.argv, ["dpfl", *arguments, *quiet]
    try:
        hydra.main(config_path=str(CONF_DIR), config_name="config", version_base=None)(job)()
    finally:
        sys.argv = old
    return 1 if failures else 0
