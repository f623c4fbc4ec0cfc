"""The classic experiment's round against Flower's simulation with Opacus, as its example has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fl_app.client_round import client_partition
from fl_app.engines.local import LocalGrid
from fl_app.models import flat_parameters, num_parameters
from fl_app.training._batches import fetch
from tests.bench._core import FLOWER_OPACUS, Options, Ratio, Work
from tests.bench._flower_opacus_app import flower
from tests.bench._rounds import load, network, order_of, passes, relative_error, summed
from tests.bench._training import CPU
from tests.bench.classic_round import COHORT, POPULATION, SAME, WORKERS, noisy, without_noise


@contextmanager
def _work(options: Options) -> Iterator[Work]:
    private, exact = noisy(options), without_noise(options)
    data = load(private)
    model, exact_model, answer = (network(s, data) for s in (private, exact, exact))
    assert num_parameters(model) == 21_840
    rows = len(data.train.labels) // POPULATION
    clients = [client_partition(client, private, data) for client in range(COHORT)]
    batches = [fetch(client.table, client.rows, CPU) for client in clients]
    with LocalGrid(WORKERS, WORKERS) as grid, flower() as ask:

        def check() -> None:
            found, metrics = ask(exact_model.state_dict(), exact)
            answer.load_state_dict(found)
            assert len(metrics["client"]) == COHORT
            assert metrics["rows"] == [rows] * COHORT
            assert metrics["steps"] == [1] * COHORT
            order = order_of(exact, rows)
            expected_P = summed(grid, exact, exact_model, order, metrics["client"]).sum_P / COHORT
            error = relative_error(
                flat_parameters(answer) - flat_parameters(exact_model), expected_P
            )
            assert error <= SAME, f"differs from Flower's example by {error:.1e}"

        yield Work(
            ours=lambda: summed(grid, private, model, order_of(private, rows), range(COHORT)),
            baseline=lambda: ask(model.state_dict(), private),
            check=check,
            profile=lambda: passes(model, batches, WORKERS),
        )


BENCHMARK = Ratio(
    title="classic round: 20 of 100 clients of 600 rows, one full-batch DP step, cnn, local engine",
    baseline="Flower's simulation with Opacus, one SuperNode per client, 2 actors",
    target=0.1,
    threads=2,
    work=_work,
    product=FLOWER_OPACUS,
)
