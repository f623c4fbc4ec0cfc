"""One real private round of each dataset that a shipped model takes."""

import os
from pathlib import Path

import pytest
from helpers import operator_rounds, run_here

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
