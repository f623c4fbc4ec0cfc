"""Simulation engine: Flower's Simulation Runtime (Ray) on this machine or a Ray cluster."""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

from fl_app import checks
from fl_app.errors import SettingsError
from fl_app.plugins import Engine, Hosts
from fl_app.settings import Settings

_ADDRESS = re.compile(r"auto|[^\s:/]+:[0-9]+")
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationEngine(Engine):
    """Runs the nodes as virtual SuperNodes.

    Attributes:
        num_cpus_per_client: cores of one Ray actor.
        num_gpus_per_client: share of a GPU of one Ray actor.
        ray_address: HOST:PORT of a Ray cluster, or auto: the one that ``RAY_ADDRESS`` names or that
            was started on this machine; None: Ray is started here, for this run only.
    """

    num_cpus_per_client: int
    num_gpus_per_client: float
    ray_address: str | None

    def __post_init__(self) -> None:
        checks.at_least("engine.num_cpus_per_client", self.num_cpus_per_client, 1)
        checks.non_negative("engine.num_gpus_per_client", self.num_gpus_per_client)
        if self.ray_address is not None and not _ADDRESS.fullmatch(self.ray_address):
            raise self._wrong_address("must be HOST:PORT, or auto", "set null to start Ray here")

    def hosts(self, settings: Settings) -> Hosts:
        """Returns one node per Ray actor unless ``federation.num_nodes`` says otherwise.

        The actors are those that this machine, or the cluster, has room for.
        """
        actors = self._room()
        nodes = settings.federation.num_nodes or actors
        return Hosts(nodes=nodes, workers=min(actors, nodes))

    def run(
        self, settings: Settings, serve: Callable[[Grid, Settings], object] | None = None
    ) -> int:
        """Runs all rounds; see `Engine.run`."""
        from fl_app.client_app import app as client_app

        num_nodes = self.hosts(settings).nodes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            run_simulation(
                server_app=_server_app(settings, serve),
                client_app=client_app,
                num_supernodes=num_nodes,
                backend_config={
                    "client_resources": {**self._client_resources()},
                    # Without an address Ray joins whatever cluster it finds on the machine.
                    "init_args": {"address": self.ray_address or "local"},
                },
            )
        return 0

    def _client_resources(self) -> dict[str, int | float]:
        return {"num_cpus": self.num_cpus_per_client, "num_gpus": self.num_gpus_per_client}

    def _room(self) -> int:
        """Returns how many actors this machine, or the cluster, has room for.

        Raises:
            SettingsError: there is no such cluster, or it has no room.
        """
        if self.ray_address is None:
            return max(1, (os.cpu_count() or 1) // self.num_cpus_per_client)
        try:
            if self.ray_address != "auto":  # Ray itself would wait for minutes
                host, _, port = self.ray_address.partition(":")
                socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            ray.init(address=self.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, OverflowError) as error:
            raise self._wrong_address(
                f"no Ray cluster answers there ({error})", "begin it with ray start --head"
            ) from error
        try:
            return pool_size_from_resources(self._client_resources())
        except ValueError as error:
            raise self._wrong_address(
                f"no machine of that cluster has {self.num_cpus_per_client} cores and "
                f"{self.num_gpus_per_client:g} GPUs",
                "lower engine.num_cpus_per_client or engine.num_gpus_per_client",
            ) from error
        finally:
            ray.shutdown()

    def _wrong_address(self, problem: str, remedy: str) -> SettingsError:
        return checks.fail("engine.ray_address", self.ray_address, problem, remedy)


def _server_app(settings: Settings, serve: Callable[[Grid, Settings], object] | None) -> ServerApp:
    from fl_app.server_run import run_server

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        (serve or run_server)(grid, settings)

    return app


PLUGIN = SimulationEngine
