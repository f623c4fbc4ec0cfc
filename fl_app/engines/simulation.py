"""Simulation engine: Flower's Simulation Runtime (Ray) on this machine or a Ray cluster."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fl_app import checks
from fl_app.plugins import Engine
from fl_app.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationEngine(Engine):
    """Runs the nodes as virtual SuperNodes.

    Attributes:
        num_cpus_per_client: cores of one Ray actor.
        num_gpus_per_client: share of a GPU of one Ray actor.
    """

    num_cpus_per_client: int
    num_gpus_per_client: float

    def __post_init__(self) -> None:
        checks.at_least("engine.num_cpus_per_client", self.num_cpus_per_client, 1)
        checks.non_negative("engine.num_gpus_per_client", self.num_gpus_per_client)

    def run(self, settings: Settings) -> int:
        """Runs all rounds; see `Engine.run`."""
        from fl_app.client_app import app as client_app

        num_nodes = settings.federation.num_nodes or max(
            1, (os.cpu_count() or 1) // self.num_cpus_per_client
        )
        resources: dict[str, Any] = {
            "num_cpus": self.num_cpus_per_client,
            "num_gpus": self.num_gpus_per_client,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            run_simulation(
                server_app=_server_app(settings),
                client_app=client_app,
                num_supernodes=num_nodes,
                backend_config={"client_resources": resources},
            )
        return 0


def _server_app(settings: Settings) -> ServerApp:
    from fl_app.server_run import run_server

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run_server(grid, settings)

    return app


PLUGIN = SimulationEngine
