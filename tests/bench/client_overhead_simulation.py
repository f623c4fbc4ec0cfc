"""The same in Flower's simulation, whose two nodes host the clients."""

from __future__ import annotations

import time
import warnings

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fl_app.client_app import app as client_app
from fl_app.engines.local import LocalGrid
from tests.bench._core import Options
from tests.bench.client_overhead import NODES, Overhead, overheads


def _simulation(options: Options) -> list[float]:
    if options.tiny:  # the runtime takes long to start, and integration tests start it
        with LocalGrid(NODES, 0) as grid:
            return overheads(grid, options, 10)
    found: list[float] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < NODES:
            time.sleep(0.1)
        found.extend(overheads(grid, options, 400))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run_simulation(server_app, client_app, num_supernodes=NODES)
    assert found, "the simulation ended early"
    return found


BENCHMARK = Overhead(
    title="a client that does nothing, 21,840 parameters, Flower's simulation, 2 nodes",
    target=5.0,
    measure=_simulation,
)
