"""Simulation engine: Flower's Simulation Runtime (Ray) on this machine or a Ray cluster."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fl_app import checks
from fl_app.plugins import Engine, Hosts
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

    def hosts(self, settings: Settings) -> Hosts:
        """Returns one node per Ray actor unless ``federation.num_nodes`` says otherwise.

        The actors are those that this machine's cores allow.
        """
        actors = max(1, (os.cpu_count() or 1) // self.num_cpus_per_client)
        nodes = settings.federation.num_nodes or actors
        return Hosts(nodes=nodes, workers=min(actors, nodes))

    def run(
        self, settings: Settings, serve: Callable[[Grid, Settings], object] | None = None
    ) -> int:
        """Runs all rounds; see `Engine.run`."""
        from fl_app.client_app import app as client_app

        resources: dict[str, Any] = {
            "num_cpus": self.num_cpus_per_client,
            "num_gpus": self.num_gpus_per_client,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            run_simulation(
                server_app=_server_app(settings, serve),
                client_app=client_app,
                num_supernodes=self.hosts(settings).nodes,
                backend_config={"client_resources": resources},
            )
        return 0


def _server_app(settings: Settings, serve: Callable[[Grid, Settings], object] | None) -> ServerApp:
    from fl_app.server_run import run_server

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        (serve or run_server)(grid, settings)

    return app


PLUGIN = SimulationEngine
