"""What client-level DP adds to a round: clipping and noise against the same round without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fl_app.engines.local import LocalGrid
from fl_app.settings import Settings
from fl_app.stages import DoubleVector
from tests.bench._core import Options, Ratio, Work
from tests.bench._rounds import load, network, order_of, relative_error, released, summed
from tests.bench.client_level import central, cohort, settings


@contextmanager
def _work(options: Options) -> Iterator[Work]:
    private, plain = central(options, 1.0, 1.0), settings(options, "mechanism=none")
    data, clients = load(private), cohort(options)
    model = network(private, data)
    with LocalGrid(1, 0) as grid:

        def round(chosen: Settings) -> DoubleVector:
            order = order_of(chosen, nominal_rows=60)
            return released(summed(grid, chosen, model, order, clients), chosen, order)

        def check() -> None:
            error = relative_error(round(central(options, 1e6, 0.0)), round(plain))
            assert error <= 1e-12, f"differs without clipping and noise by {error:.1e}"

        yield Work(ours=lambda: round(private), baseline=lambda: round(plain), check=check)


BENCHMARK = Ratio(
    title="client-level round: what clipping and noise add, one process",
    baseline="the same without DP",
    target=1.05,
    threads=1,
    work=_work,
)
