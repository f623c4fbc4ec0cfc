"""S01 to S04: what whole runs charge, against the numbers of the scenario table."""

from pathlib import Path

import numpy as np
import pytest
from harness import UNLIMITED, Federation, federation, watched_run
from statistical.exact_intervals import count_within

from fl_app import client_round
from fl_app.privacy import Sampling
from fl_app.settings import Settings
from fl_app.stages import ClientPartition, LoadedData

CENTRAL = ["mechanism=central_gaussian", "mechanism.noise_multiplier=1", *UNLIMITED]
DELTA = "privacy.target_delta=1e-5"


def spent(made: Federation) -> float:
    epsilon = made.plan.epsilon_after(made.ledger.counts())
    assert epsilon is not None
    return epsilon


def test_s01_one_client_64_rows_epsilon_grows_over_rounds_and_never_starts_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = client_round.client_partition

    def first_64(client: int, settings: Settings, data: LoadedData) -> ClientPartition:
        whole = genuine(client, settings, data)
        return ClientPartition(client=client, table=whole.table, rows=whole.rows[:64])

    monkeypatch.setattr(client_round, "client_partition", first_64)
    run = watched_run(
        tmp_path / "run", *UNLIMITED, DELTA, "federation.population=1", "training.batch_rate=0.125",
        "training.local_steps=8", "training.noise_multiplier=1", "run.num_rounds=5",
        "accountant=rdp", num_nodes=1,
    )  # fmt: skip
    epsilons = [row["epsilon"] for row in run.results["history"]]
    assert epsilons[0] == pytest.approx(3.79, abs=0.005)
    assert np.all(np.diff(epsilons) > 0)
    assert epsilons[-1] == pytest.approx(6.59, abs=0.005)
    assert run.results["privacy"]["guarantees"][0]["epsilon"] == epsilons[-1]


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_s02_client_level_epsilon_is_the_same_for_every_number_of_local_epochs(
    tmp_path: Path, accountant: str
) -> None:
    found = [
        spent(
            federation(
                tmp_path / str(epochs), *CENTRAL, DELTA, "cohort=poisson", "run.num_rounds=100",
                f"training.local_epochs={epochs}", f"accountant={accountant}",
            ).run()
        )
        for epochs in (1, 3, 9)
    ]  # fmt: skip
    expected = {"rdp": 7.90, "pld": 7.05}[accountant]
    assert found == pytest.approx([expected] * 3, abs=0.0051)
    assert len(set(found)) == 1


def test_s03_no_minimum_of_clients_comes_between_the_rate_and_the_ledger(tmp_path: Path) -> None:
    """400 rounds of 10 clients at 0.1: binomial, 320 to 492 choices accepted, 1e-6."""
    made = federation(
        tmp_path, *CENTRAL, "cohort=poisson", "cohort.sampling_rate=0.1", "run.num_rounds=400",
        "federation.min_nodes=2",
    ).run()  # fmt: skip
    sizes = [len(trace.cohort) for trace in made.traces]
    assert count_within(sum(sizes), 4000, 0.1)
    assert count_within(sizes.count(0), 400, 0.9**10)
    assert count_within(sizes.count(1), 400, 10 * 0.1 * 0.9**9)
    assert not count_within(sum(max(size, 2) for size in sizes), 4000, 0.1)
    (event,) = made.ledger.counts()
    assert (event.sampling, event.sampling_rate) == (Sampling.POISSON, 0.1)


@pytest.mark.parametrize(
    ("cohort", "accountant", "epsilon"),
    [
        (["cohort=fixed_size"], "rdp", 83.9),
        (["cohort=fixed_size", "cohort.amplification=false"], "rdp", 294.9),
        (["cohort=fixed_size", "cohort.amplification=false"], "pld", 284.4),
        (
            ["cohort=fixed_size", "cohort.amplification=false",
             "cohort.neighboring_relation=zero_out"], "rdp", 96.1,
        ),
        (
            ["cohort=fixed_size", "cohort.amplification=false",
             "cohort.neighboring_relation=zero_out"], "pld", 91.8,
        ),
    ],
)  # fmt: skip
def test_s04_fixed_size_of_10_in_100(
    tmp_path: Path, cohort: list[str], accountant: str, epsilon: float
) -> None:
    made = federation(
        tmp_path, *CENTRAL, DELTA, *cohort, "cohort.size=10", "federation.population=100",
        "run.num_rounds=100", f"accountant={accountant}", num_nodes=4,
    ).run()  # fmt: skip
    assert {len(trace.cohort) for trace in made.traces} == {10}
    assert {len(set(trace.cohort)) for trace in made.traces} == {10}
    assert spent(made) == pytest.approx(epsilon, abs=0.051)
