"""Rule 5: sums are divided by public constants: q N, and batch rate x nominal rows."""

from pathlib import Path

import numpy as np
import pytest
from harness import CENTRAL, LOCAL, UNLIMITED, federation, node, spoil_client, watched_run

from fl_app import client_round
from fl_app.overrides import compose
from fl_app.stages import ClientPartition, RoundOrder

ONE = np.full(4, 0.25, np.float32)


@pytest.mark.parametrize(
    "mechanism", ["central_gaussian", "local_gaussian", "central_laplace", "local_laplace"]
)
@pytest.mark.parametrize(
    ("cohort", "constant"),
    [
        (["cohort=poisson", "cohort.sampling_rate=0.4"], 8.0),
        (["cohort=fixed_size", "cohort.size=5", "cohort.amplification=false"], 5.0),
        (["cohort=all"], 20.0),
    ],
    ids=["poisson", "fixed_size", "all"],
)
def test_the_mean_is_the_sum_over_the_expected_cohort_whoever_answered(
    tmp_path: Path, mechanism: str, cohort: list[str], constant: float
) -> None:
    made = federation(
        tmp_path, f"mechanism={mechanism}", *cohort, *UNLIMITED, "mechanism.noise_multiplier=0",
        "federation.population=20", "run.num_rounds=6",
        delta=lambda client, round: ONE, num_parameters=4,
    )  # fmt: skip
    made.grid.answers[3] = made.grid.answers[17] = lambda message, request: []
    made.run()
    answered = [len(trace.answered) for trace in made.traces]
    for number, mean in zip(answered, made.optimizer.means, strict=True):
        np.testing.assert_allclose(mean, number * ONE / constant, rtol=1e-6)
    if cohort[0] == "cohort=poisson":
        assert len(set(answered)) > 1  # else the realized number could not be told from q N


def test_every_client_is_told_the_same_public_row_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_client(monkeypatch, 0, "empty")
    run = watched_run(tmp_path / "run", *UNLIMITED, "training.noise_multiplier=1", num_nodes=10)
    from fl_app import wire

    told = {wire.read_train(m).order.nominal_rows for m in run.grid.train_messages()}
    assert told == {1437 // 10}


def test_record_level_update_is_not_divided_by_the_clients_row_count(tmp_path: Path) -> None:
    """Every row twice: twice the update (z = 0). A realized denominator would undo that."""
    settings = compose(
        [*UNLIMITED, "training.noise_multiplier=0", "training.batch_rate=1",
         "training.local_steps=1"]
    )  # fmt: skip
    own = node(folder=tmp_path)
    data = client_round.worker_data(settings.to_wire(), own)
    order = RoundOrder(
        round=1, clipping_norm=None, noise_multiplier=None, training_noise_multiplier=0.0,
        nominal_rows=143,
    )  # fmt: skip
    model = client_round.new_model(settings, data.spec)
    global_P = client_round.flat_parameters(model)
    genuine = client_round.client_partition(0, settings, data)
    updates = []
    for copies in (1, 2):
        rows = np.repeat(genuine.rows, copies)
        partition = ClientPartition(client=0, table=genuine.table, rows=rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_round, "client_partition", lambda *_, p=partition: p)
            updates.append(
                client_round.run_client(0, settings, order, model, global_P, data, own).vector_P
            )
    assert np.linalg.norm(updates[0]) > 1e-3
    np.testing.assert_allclose(updates[1], 2 * updates[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("overrides", [CENTRAL, LOCAL])
def test_the_public_divisor_is_in_the_public_record(tmp_path: Path, overrides: list[str]) -> None:
    run = watched_run(
        tmp_path / "run", *overrides, *UNLIMITED, "mechanism.noise_multiplier=1",
        "cohort=poisson", "cohort.sampling_rate=0.35",
    )  # fmt: skip
    assert [row["cohort_expected"] for row in run.results["history"]] == [3.5, 3.5]
