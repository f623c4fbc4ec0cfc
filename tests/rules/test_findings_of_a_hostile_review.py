"""What a hostile review found once, so that it stays found: rules 1, 7, 8, 9, 11 and 12."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import federation, watched_run
from torch import nn

from fl_app import client_round, rng
from fl_app.accounting.rdp import Rdp
from fl_app.client_policy import LOCAL_SIMULATION, Node
from fl_app.client_round import check_order, public_cause
from fl_app.errors import AccountingError, DataError, LedgerError, PrivacyError, SettingsError
from fl_app.overrides import compose, split_run_config
from fl_app.privacy import NeighboringRelation, NoiseKind, round_up
from fl_app.run import run_one
from fl_app.stages import RoundOrder
from fl_app.training._opacus import NoisySGD
from strategies.cohorts.poisson import PoissonCohort

POISSON = ["mechanism=central_gaussian", "mechanism.noise_multiplier=1", "cohort=poisson",
           "cohort.sampling_rate=0.5", "privacy.target_epsilon=null"]  # fmt: skip


def test_a_round_made_again_draws_another_cohort(tmp_path: Path) -> None:
    """The second charge of a round counts as an independent sample, so it has to be one."""
    made = federation(tmp_path, *POISSON, "run.num_rounds=1", "federation.population=40")
    first = made.strategy._draw_cohort(1, 0).tolist()
    assert first == made.strategy._draw_cohort(1, 0).tolist()
    made.ledger.append_all(1, made.strategy.plan.events)  # charged, then killed
    made.run()
    assert list(made.traces[0].cohort) == made.strategy._draw_cohort(1, 1).tolist() != first
    assert {r.order.attempt for r in made.grid.requests} == {1}


def test_batches_of_a_round_made_again_are_new() -> None:
    node = Node.from_config({"partition-id": 0, "num-partitions": 1, LOCAL_SIMULATION: True})
    order = RoundOrder(
        round=1, clipping_norm=None, noise_multiplier=None, training_noise_multiplier=1.0,
        nominal_rows=10,
    )  # fmt: skip
    again = dataclasses.replace(order, attempt=1)
    draws = [client_round._batch_stream(0, o, 0, node).random(3).tolist() for o in (order, again)]
    assert draws[0] != draws[1]


def test_a_client_whose_rows_cannot_be_trained_on_replies_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_app.training.sgd import Sgd

    genuine = Sgd.train

    def fails_on_rows(self: Sgd, model: nn.Module, partition: object, job: object) -> object:
        if partition.client == 3 and len(partition.rows):  # type: ignore[attr-defined]
            raise ValueError("a row that cannot be trained on")
        return genuine(self, model, partition, job)  # type: ignore[arg-type]

    monkeypatch.setattr(Sgd, "train", fails_on_rows)
    run = watched_run(tmp_path / "run", "mechanism=local_gaussian", "mechanism.noise_multiplier=1",
                      "privacy.target_epsilon=null")  # fmt: skip
    assert run.results["status"] == "completed"
    replies = run.grid.train_replies()
    assert all(not m.content["config"]["error"] for m in replies)
    asked = sorted(c for m in replies for c in m.content["config"]["clients"])
    assert asked == sorted(list(range(10)) * 2)


@pytest.mark.parametrize("z", [1e-160, 1e-155, 1e-152])
def test_rdp_never_states_a_bound_that_the_library_could_not_compute(z: float) -> None:
    event = PoissonCohort(sampling_rate=0.1).event(NoiseKind.GAUSSIAN, z, 100)
    refused = False
    try:
        epsilon = Rdp().epsilon({event: 1}, 1e-5)
    except AccountingError:
        refused = True
    assert refused or epsilon > 1e6


@pytest.mark.parametrize("z", ["1e-160", "1e-4", "1e7"])
@pytest.mark.parametrize("mechanism", ["none", "central_gaussian"])
def test_noise_multipliers_outside_the_accountants_range_are_refused(
    z: str, mechanism: str
) -> None:
    section = "training" if mechanism == "none" else "mechanism"
    with pytest.raises(SettingsError, match=rf"{section}\.noise_multiplier"):
        compose([f"mechanism={mechanism}", f"{section}.noise_multiplier={z}"])


@pytest.mark.parametrize(
    "text",
    [
        r"'dataset.hub_id=$\{oc.env:HOME\}'",
        "dataset.hub_id=$HOME",
        r"'run.seed=\$\{oc.env:HOME\}'",
        "dataset=../../../../tmp/evil",
        "dataset=../engine/local",
        "experiment=/tmp/evil",
    ],
)
def test_run_config_cannot_interpolate_or_reach_outside_conf(text: str) -> None:
    with pytest.raises(SettingsError, match="overrides="):
        split_run_config(text)


def test_a_node_refuses_an_order_with_less_noise_or_another_norm() -> None:
    settings = compose(["mechanism=local_gaussian", "mechanism.noise_multiplier=50",
                        "privacy.target_epsilon=null"])  # fmt: skip
    order = RoundOrder(
        round=1, clipping_norm=1.0, noise_multiplier=50.0, training_noise_multiplier=None,
        nominal_rows=10,
    )  # fmt: skip
    check_order(order, settings)
    for change in ({"noise_multiplier": 0.0}, {"clipping_norm": 1e5}, {"noise_multiplier": None}):
        with pytest.raises(PrivacyError, match="the settings say"):
            check_order(dataclasses.replace(order, **change), settings)


@pytest.mark.parametrize(
    "change", [("0.0001", "0.00001"), ("clipping_norm: 0.35", "clipping_norm: 3.5")]
)
def test_a_changed_config_is_refused_on_resume(tmp_path: Path, change: tuple[str, str]) -> None:
    path = tmp_path / "run"
    base = ["run.num_rounds=3", "engine.num_workers=0", "run.stop_after=1"]
    run_one([*base, f"run.output_dir={path}"])
    config = path / "config.yaml"
    text = config.read_text()
    assert change[0] in text
    config.write_text(text.replace(change[0], change[1], 1))
    with pytest.raises(LedgerError, match="other settings"):
        run_one([f"run.resume={path}"])
    config.write_text(text)
    assert run_one([f"run.resume={path}"]) == 0


def test_ledger_and_checkpoint_rolled_back_together_are_refused(tmp_path: Path) -> None:
    path, old = tmp_path / "run", tmp_path / "old"
    run_one(["run.num_rounds=5", "engine.num_workers=0", "run.stop_after=2",
             f"run.output_dir={path}"])  # fmt: skip
    shutil.copytree(path, old)
    run_one([f"run.resume={path}", "run.stop_after=4"])
    for name in ("ledger.sqlite", "checkpoint.safetensors"):
        shutil.copy(old / name, path / name)
    with pytest.raises(LedgerError, match="older"):
        run_one([f"run.resume={path}"])
    shutil.copy(old / "results.json", path / "results.json")  # the operator's log remembers
    with pytest.raises(LedgerError, match=r"operator\.jsonl"):
        run_one([f"run.resume={path}"])


def test_a_deployed_node_tells_nothing_about_its_data() -> None:
    deployed = Node.from_config({"partition-id": 0, "num-partitions": 1})
    for error in (
        SettingsError("must be <= 30 rows"),
        DataError("row 7 is broken"),
        ValueError("x"),
    ):
        assert public_cause(error, deployed) == f"{type(error).__name__} (see the node's log)"
    assert public_cause(PrivacyError("refused"), deployed) == "refused"


def test_cohorts_are_seeded_only_where_the_server_itself_is_simulated(tmp_path: Path) -> None:
    made = federation(tmp_path, *POISSON, "run.num_rounds=1")
    made.run()
    assert made.strategy._roster.simulated
    made.grid.simulated = False  # type: ignore[assignment]  # a grid that is no simulation
    made.strategy._roster.refresh(made.grid)
    assert not made.strategy._roster.simulated


@pytest.mark.parametrize("size", [40_000, 3_000_000])
def test_clipped_per_sample_gradients_stay_within_c_for_many_parameters(size: int) -> None:
    parameter = nn.Parameter(torch.zeros(size))
    optimizer = NoisySGD(
        torch.optim.SGD([parameter], lr=1.0), noise_multiplier=0.0, clipping_norm=0.35,
        denominator=1.0, noise=rng.noise_source("test", seed=0),
    )  # fmt: skip
    parameter.grad_sample = torch.full((1, size), 0.37)  # type: ignore[attr-defined]
    optimizer.num_rows = 1
    optimizer.step()
    norm = np.linalg.norm(parameter.detach().numpy().astype(np.float64))
    assert 0.35 * (1 - 1e-5) < norm <= 0.35


def test_skipping_rounds_is_bounded_for_zeroed_clients_only() -> None:
    event = PoissonCohort(sampling_rate=0.1).event(NoiseKind.GAUSSIAN, 1.0, 100, amplified=False)
    assert event.relation is NeighboringRelation.ZERO_OUT


def test_printed_bounds_are_rounded_up() -> None:
    assert round_up(0.0004, 3) == "0.001"
    assert round_up(7.99941, 3) == "8.000"
    assert round_up(1.5, 3) == "1.500"
