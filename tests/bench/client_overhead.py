"""What one more client costs a round in which it does nothing: it has no rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import Grid

from fl_app.engines.local import LocalGrid
from fl_app.models import num_parameters
from fl_app.overrides import compose
from fl_app.partitioners import split_of
from tests.bench._core import Benchmark, Line, Options
from tests.bench._rounds import joined, load, network, order_of, released, summed

NODES = 2
SETTINGS = (
    "dataset=synthetic",
    "dataset.num_train=1000",
    "dataset.num_test=10",
    # The last clients have nearly all rows, the first ones none.
    "partition=quantity",
    "partition.law=exponential",
    "partition.min_size=0",
    "federation.population=1000",
    "model=cnn",
    "mechanism=central_gaussian",
    "mechanism.noise_multiplier=1.0",
    "privacy.target_epsilon=null",
)


def overheads(grid: Grid, options: Options, num_clients: int) -> list[float]:
    """Returns seconds per client, several times: a round of all minus one of a client per node."""
    settings = compose(list(SETTINGS))
    data = load(settings)
    model = network(settings, data)
    assert num_parameters(model) == 21_840
    assert not any(len(rows) for rows in split_of(settings, data)[:num_clients])
    order = order_of(settings, nominal_rows=60)
    roster = joined(grid, settings)
    few = roster.num_nodes

    def seconds(clients: int) -> float:
        start = time.perf_counter()
        total = summed(grid, settings, model, order, range(clients), roster)
        assert not total.sum_P.any(), "clients without rows must not move the sum"
        released(total, settings, order)
        return time.perf_counter() - start

    seconds(few)
    rounds = [(seconds(few), seconds(num_clients)) for _ in range(options.repeats)]
    return [(long - short) / (num_clients - few) for short, long in rounds]


@dataclass(frozen=True, kw_only=True)
class Overhead(Benchmark):
    """Milliseconds per client.

    Attributes:
        target: milliseconds to stay below.
        measure: returns seconds per client.
    """

    target: float
    measure: Callable[[Options], list[float]]

    def lines(self, found: dict[str, Any]) -> list[Line]:
        each = found["milliseconds"]
        return [
            Line(
                work=self.title,
                ours=f"{statistics.median(each):.2f} ms a client",
                baseline="-",
                ratio=f"{min(each):.2f} to {max(each):.2f} ms",
                target=f"< {self.target:g} ms",
                met=statistics.median(each) < self.target,
            )
        ]

    def run(self, options: Options) -> dict[str, Any]:
        found = [1e3 * seconds for seconds in self.measure(options)]
        text = (
            f"{statistics.median(found):.2f} ms a client ({min(found):.2f} to {max(found):.2f}), "
            f"target < {self.target:g} ms"
        )
        return {"milliseconds": found, "target_milliseconds": self.target, "text": text}


def _local(options: Options) -> list[float]:
    with LocalGrid(NODES, 0 if options.tiny else NODES) as grid:
        return overheads(grid, options, 10 if options.tiny else 400)


BENCHMARK = Overhead(
    title="a client that does nothing, 21,840 parameters, local engine, 2 workers",
    target=1.0,
    measure=_local,
)
