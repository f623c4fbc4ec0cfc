"""Flower ServerApp: composes the settings from the run config and runs the server."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_app import checks
from fl_app.client_policy import home
from fl_app.errors import DpflError
from fl_app.overrides import split_run_config
from fl_app.server_run import load_settings, run_server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs one ``flwr run``.

    Raises:
        DpflError: the run cannot start, or failed; Flower shows it and marks the run as failed.
    """
    try:
        overrides = split_run_config(str(context.run_config.get("overrides", "")))
        _check_paths(overrides)
        run_server(grid, load_settings(overrides, default_directory))
    except DpflError as error:
        # Flower prints the whole chain of causes; our text says it all.
        raise error.with_traceback(None) from None


def _check_paths(overrides: Sequence[str]) -> None:
    """Refuses relative paths: the working directory here is the SuperLink's, not the caller's."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key in ("run.output_dir", "run.resume") and value != "null" and not os.path.isabs(value):
            raise checks.fail(
                key, value, "must be an absolute path under flwr run", "write it whole"
            )


def default_directory() -> Path:
    """Returns a new path below ``$DPFL_HOME/runs``."""
    return home() / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
