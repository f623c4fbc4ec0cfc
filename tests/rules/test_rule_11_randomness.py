"""Rule 11: everything but noise repeats from the seed; noise comes from the operating system."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import CENTRAL, LOCAL, UNLIMITED, Watched, federation, node, watched_run
from safetensors.numpy import load_file
from statistical.exact_intervals import is_uncorrelated

from fl_app import client_round, rng
from fl_app.errors import PrivacyError
from fl_app.overrides import compose
from fl_app.settings import Settings
from fl_app.stages import RoundOrder

P = 50_000
NOISE = [*UNLIMITED, "mechanism.noise_multiplier=1"]
RECORD = [*UNLIMITED, "training.noise_multiplier=1"]
POISSON = ["mechanism=central_gaussian", "cohort=poisson", "cohort.sampling_rate=0.5", *NOISE]


def cohorts(run: Watched) -> list[list[int]]:
    lines = [json.loads(x) for x in (run.folder / "operator.jsonl").read_text().splitlines()]
    return [x["cohort"] for x in lines if x["event"] == "round"]


def parameters(run: Watched) -> np.ndarray:
    saved = load_file(run.folder / "model.safetensors")
    return np.concatenate([saved[name].ravel() for name in sorted(saved)])


def test_the_same_seed_chooses_the_same_clients_and_other_noise(tmp_path: Path) -> None:
    runs = [
        watched_run(tmp_path / str(i), *POISSON, "run.seed=0", "run.num_rounds=6") for i in range(2)
    ]
    other = watched_run(tmp_path / "other", *POISSON, "run.seed=1", "run.num_rounds=6")
    assert cohorts(runs[0]) == cohorts(runs[1]) != cohorts(other)
    assert np.abs(parameters(runs[0]) - parameters(runs[1])).max() > 1e-3


def test_seeded_noise_repeats_and_stamps_everything_not_private(tmp_path: Path) -> None:
    runs = [
        watched_run(tmp_path / str(i), *POISSON, "run.seed=0", "run.seeded_noise=true")
        for i in range(2)
    ]
    np.testing.assert_array_equal(parameters(runs[0]), parameters(runs[1]))
    privacy = runs[0].results["privacy"]
    assert (privacy["private"], privacy["seeded_noise"]) == (False, True)
    for row in privacy["guarantees"]:
        assert row["epsilon"] is None
        assert any("NOT PRIVATE" in text for text in row["assumptions"])
    assert [row["epsilon"] for row in runs[0].results["history"]] == [None, None]
    assert "**NOT PRIVATE" in (runs[0].folder / "privacy_report.md").read_text()


@pytest.mark.parametrize("overrides", [CENTRAL, LOCAL], ids=["central", "local"])
def test_torchs_and_numpys_seeds_do_not_reach_the_noise(
    tmp_path: Path, overrides: list[str]
) -> None:
    sums = []
    for i in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        made = federation(
            tmp_path / str(i), *overrides, *NOISE, "run.num_rounds=1", "federation.population=1",
            num_parameters=P,
        )  # fmt: skip
        sums.append(made.run().released_sums[0])
    assert is_uncorrelated(*sums)
    assert not is_uncorrelated(sums[0], sums[1] + 0.1 * sums[0])


def run_client(
    settings: Settings, folder: Path, *, client: int = 0, round: int = 1, z: float = 1.0
) -> np.ndarray:
    own = node(folder=folder)
    data = client_round.worker_data(settings.to_wire(), own)
    model = client_round.worker_model(settings.to_wire(), own)
    order = RoundOrder(
        round=round, clipping_norm=None, noise_multiplier=None, training_noise_multiplier=z,
        nominal_rows=143,
    )  # fmt: skip
    global_P = np.zeros(650, np.float32)
    update = client_round.run_client(client, settings, order, model, global_P, data, own)
    return update.vector_P.astype(np.float64)


def test_record_level_noise_is_not_torchs(tmp_path: Path) -> None:
    """Same torch seed, same batches, no rows' gradient (z = 100 drowns it): independent updates.

    Pairs of (client, round), of 650 parameters each; |correlation| < 0.19 is accepted, 1e-6.
    """
    settings = compose([*RECORD])
    order = [(0, 1), (0, 1), (1, 1), (0, 2)]
    found = []
    for client, round in order:
        torch.manual_seed(0)
        found.append(run_client(settings, tmp_path, client=client, round=round, z=100.0))
    for i, first in enumerate(found):
        for second in found[i + 1 :]:
            assert is_uncorrelated(first, second)
    assert not is_uncorrelated(found[0], found[0] + found[1])


def test_seeded_noise_differs_by_client_and_round(tmp_path: Path) -> None:
    settings = compose([*RECORD, "run.seeded_noise=true"])
    first = run_client(settings, tmp_path)
    np.testing.assert_array_equal(first, run_client(settings, tmp_path))
    assert not np.array_equal(first, run_client(settings, tmp_path, client=1))
    assert not np.array_equal(first, run_client(settings, tmp_path, round=2))


def test_batches_of_a_simulation_repeat_and_of_a_deployed_node_do_not(tmp_path: Path) -> None:
    settings = compose([*UNLIMITED, "training.noise_multiplier=0", "training.batch_rate=0.2"])

    def update(simulated: bool) -> np.ndarray:
        own = node(folder=tmp_path, simulated=simulated)
        data = client_round.worker_data(settings.to_wire(), own)
        model = client_round.worker_model(settings.to_wire(), own)
        order = RoundOrder(
            round=1, clipping_norm=None, noise_multiplier=None, training_noise_multiplier=0.0,
            nominal_rows=143,
        )  # fmt: skip
        zero = np.zeros(650, np.float32)
        return client_round.run_client(0, settings, order, model, zero, data, own).vector_P

    np.testing.assert_array_equal(update(True), update(True))
    assert not np.array_equal(update(False), update(False))
    assert not np.array_equal(update(False), update(True))


def test_cohorts_of_a_deployment_do_not_follow_the_seed(tmp_path: Path) -> None:
    """20 clients at 0.5 over 10 rounds: equal by chance with probability 2 ** -200."""
    drawn = {}
    for simulated in (True, False):
        for i in range(2):
            made = federation(
                tmp_path / f"{simulated}{i}", *POISSON, "federation.population=20",
                "run.num_rounds=10", simulated=simulated,
            )  # fmt: skip
            drawn[simulated, i] = [trace.cohort for trace in made.run().traces]
    assert drawn[True, 0] == drawn[True, 1]
    assert drawn[False, 0] != drawn[False, 1]
    assert drawn[False, 0] != drawn[True, 0]


def test_a_missing_generator_of_the_operating_system_ends_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = federation(tmp_path, *CENTRAL, *NOISE, "run.num_rounds=1")

    def missing(size: int) -> bytes:
        raise NotImplementedError

    monkeypatch.setattr(os, "urandom", missing)
    with pytest.raises(PrivacyError, match="no random generator"):
        made.run()
    assert made.optimizer.means == []


def test_every_noise_of_a_run_has_a_source_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[bytes] = []
    genuine = os.urandom

    def watched(size: int) -> bytes:
        key = genuine(size)
        if size == 32:
            keys.append(key)
        return key

    monkeypatch.setattr(rng.os, "urandom", watched)
    watched_run(tmp_path / "run", *LOCAL, *NOISE, "federation.population=4")
    # 2 rounds x (4 clients x (record noise, client noise) + 1 server source), each key once.
    assert len(keys) >= 2 * (4 * 2 + 1)
    assert len(set(keys)) == len(keys)
