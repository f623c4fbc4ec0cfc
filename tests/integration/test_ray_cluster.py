"""The simulation engine on a Ray cluster: two nodes here, each like a machine with its own home."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import assert_same_model, dpfl, results, run_here
from ray.cluster_utils import Cluster

from fl_app.engines.simulation import SimulationEngine
from fl_app.errors import SettingsError

CORES = os.cpu_count() or 1


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    return [tmp_path / "head", tmp_path / "second"]


@pytest.fixture
def address(homes: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster whose nodes say that they have all cores of this machine."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as short:  # socket names are limited
        # Ray also notes there which cluster runs on this machine: other programs must not join it.
        monkeypatch.setenv("RAY_TMPDIR", short)
        monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
        monkeypatch.setenv("RAY_worker_niceness", "0")  # or actors give way to every other program
        cluster = Cluster()
        try:
            for home in homes:
                cluster.add_node(
                    num_cpus=CORES,
                    include_dashboard=False,
                    env_vars={"DPFL_HOME": str(home)},
                )
            yield cluster.address
        finally:
            cluster.shutdown()


def test_a_cluster_of_two_nodes_gives_the_same_model_as_local(
    address: str, homes: list[Path], tmp_path: Path
) -> None:
    overrides = ["run.num_rounds=3", "run.seeded_noise=true", "federation.min_nodes=2"]
    done = dpfl(
        "run", "engine=simulation", f"engine.ray_address={address}", *overrides,
        f"engine.num_cpus_per_client={CORES}", "federation.join_timeout=200",
        f"run.output_dir={tmp_path / 'ray'}", DPFL_HOME=str(tmp_path / "driver"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # As many nodes as the cluster has room for: this machine alone would have room for one.
    assert "10 clients on 2 nodes" in done.stdout
    for home in homes:
        assert list((home / "cache").glob("digits-*")), "no client was trained on this node"
    run_here(
        tmp_path / "local", "engine.num_workers=0", "federation.num_nodes=2", *overrides,
        small=False,
    )  # fmt: skip
    assert_same_model(tmp_path / "ray", tmp_path / "local")
    assert results(tmp_path / "ray")["privacy"] == results(tmp_path / "local")["privacy"]

    greedy = SimulationEngine(
        num_cpus_per_client=CORES + 1, num_gpus_per_client=0.0, ray_address=address
    )
    with pytest.raises(SettingsError, match=r"no machine of that cluster has \d+ cores"):
        greedy._room()
