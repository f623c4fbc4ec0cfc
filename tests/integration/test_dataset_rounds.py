"""One real private round of each dataset that a shipped model takes."""

import csv
import os
from pathlib import Path

import pytest
from helpers import operator_rounds, results, run_here

from fl_app.run import run_one

ONE = ["run.num_rounds=1", "federation.num_nodes=2", "privacy.target_delta=1e-5"]
LOCAL = ["mechanism=local_gaussian", "cohort=fixed_size", "cohort.size=4"]
CASES = {
    "breast_cancer": ["dataset=breast_cancer", "model=linear", "partition=quantity"],
    "synthetic": ["dataset=synthetic", "model=cnn", "partition=shards"],
    "femnist": ["dataset=femnist", "model=linear", "partition=natural", "federation.population=95"],
}
NEEDS = {"femnist": "flwrlabs/femnist"}


@pytest.mark.parametrize("name", sorted(CASES))
def test_one_round_of(name: str, tmp_path: Path) -> None:
    root = Path(os.environ["DPFL_DATA_ROOT"])
    if name in NEEDS and not (root / NEEDS[name]).is_dir():
        pytest.skip(f"no copy of {NEEDS[name]} in $DPFL_DATA_ROOT")
    values = run_here(tmp_path, *ONE, *LOCAL, *CASES[name])
    assert values["status"] == "completed"
    (trace,) = operator_rounds(tmp_path)
    assert len(trace["answered"]) == 4
    assert trace["errors"] == []
    assert ("auc" in values["final"]) == (name == "breast_cancer")


def test_the_synthetic_data_can_be_learned(tmp_path: Path) -> None:
    plain = ["training=sgd", "privacy.target_epsilon=null", "run.num_rounds=3"]
    values = run_here(tmp_path, "dataset=synthetic", "partition=dirichlet", *plain)
    assert values["final"]["accuracy"] > 0.5


def test_every_evaluated_round_has_its_auc_before_and_after_a_stop(tmp_path: Path) -> None:
    medical = [*CASES["breast_cancer"], "run.evaluate_every=2", "run.stop_after=2"]
    first = run_here(tmp_path / "run", *medical, *LOCAL)
    assert run_one([f"run.resume={tmp_path / 'run'}"]) == 0
    history = results(tmp_path / "run")["history"]
    assert [row["auc"] is not None for row in history] == [False, True, False, True]
    assert history[1]["auc"] == first["history"][1]["auc"] == first["final"]["auc"]
    assert history[3]["auc"] == results(tmp_path / "run")["final"]["auc"]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["auc"] for row in table] == ["", str(history[1]["auc"]), "", str(history[3]["auc"])]
