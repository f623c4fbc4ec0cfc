"""Whole runs of the distributed integer mechanisms on the embedded dataset."""

from pathlib import Path

import numpy as np
import pytest
from harness import watched_run
from safetensors.numpy import load_file

from fl_app.server_run import plan_of

KINDS = ["distributed_discrete_gaussian", "distributed_skellam"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_rounds_with_the_local_engine(kind: str, tmp_path: Path) -> None:
    run = watched_run(tmp_path / "run", f"mechanism={kind}", "mechanism.bits=16")
    results = run.results
    assert results["status"] == "completed"
    assert results["num_rounds_done"] == 2
    assert results["privacy"]["epsilon_of"] == "CLIENT against OBSERVER"
    epsilons = {g["view"]: g["epsilon"] for g in results["privacy"]["guarantees"]}
    assert 7.9 < epsilons["OBSERVER"] <= 8.0 < epsilons["SERVER"]
    assert {g["accountant"] for g in results["privacy"]["guarantees"]} == {"rdp"}
    assert results["ledger"]["rows"] == 2
    report = (tmp_path / "run" / "privacy_report.md").read_text()
    assert "of one share: protection=none" in report
    for reply in run.grid.train_replies():
        array = reply.content.array_records["update"]["vector"].numpy()
        assert (array.dtype, array.shape) == (np.int64, (1024,))  # 650 parameters


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_model_on_any_number_of_nodes(
    kind: str, tmp_path: Path
) -> None:
    seeded = [f"mechanism={kind}", "run.seeded_noise=true"]
    models = []
    for num_nodes in (1, 3):
        folder = tmp_path / str(num_nodes)
        watched_run(folder, *seeded, num_nodes=num_nodes)
        models.append(load_file(folder / "model.safetensors"))
    for name, tensor in models[0].items():
        np.testing.assert_allclose(tensor, models[1][name], rtol=1e-6, atol=1e-7)


def test_it_learns_as_well_as_central_noise_of_the_same_size(tmp_path: Path) -> None:
    common = [
        "mechanism.noise_multiplier=0.05", "privacy.target_epsilon=null", "run.num_rounds=5",
        "server_optimizer=sgd",
    ]  # fmt: skip
    accuracy = {}
    for kind in ("central_gaussian", *KINDS):
        run = watched_run(tmp_path / kind, f"mechanism={kind}", *common)
        accuracy[kind] = run.results["final"]["accuracy"]
    for kind in KINDS:
        assert accuracy[kind] == pytest.approx(accuracy["central_gaussian"], abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_says_what_the_integers_are(kind: str) -> None:
    shown = plan_of([f"mechanism={kind}"])
    for phrase in (
        "client-level noise multiplier", "integers: 1024 of 20 bits, scale",
        "fewest honest survivors: 8", "integers that wrap around in a round",
        "clipping norm after rounding", "CLIENT against OBSERVER: epsilon 8.000",
        "CLIENT against SERVER: epsilon",
    ):  # fmt: skip
        assert phrase in shown.text
    assert shown.values["mechanism_constants"]["min_survivors"] == 8
    assert shown.values["mechanism_constants"]["scale"] > 0
