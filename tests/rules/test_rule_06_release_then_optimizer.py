"""Rule 6: the server optimizer works on the release; the un-noised sum is dropped at once."""

from pathlib import Path

import numpy as np
import pytest
from harness import (
    CENTRAL,
    UNLIMITED,
    Federation,
    callers_outside,
    federation,
    holds_vector,
    reachable,
    watched_run,
)
from safetensors.numpy import load_file
from statistical.exact_intervals import std_within

from fl_app.stages import RoundTrace

P, Z = 50_000, 1.0
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])


def signal(client: int, round: int) -> np.ndarray:
    """Another update for every client and round, of norm 0.5: within C = 1, so sent as it is."""
    vector = np.random.default_rng([client, round]).normal(size=P)
    return (0.5 * vector / np.linalg.norm(vector)).astype(np.float32)


def un_noised(round: int, clients: range = range(6)) -> np.ndarray:
    return np.sum([signal(c, round).astype(np.float64) for c in clients], axis=0)


def six_clients(folder: Path, optimizer: str, num_nodes: int = 1) -> Federation:
    return federation(
        folder, *CENTRAL, *UNLIMITED, f"mechanism.noise_multiplier={Z}", "run.num_rounds=3",
        "federation.population=6", f"server_optimizer={optimizer}",
        delta=signal, num_parameters=P, num_nodes=num_nodes,
    )  # fmt: skip


@OPTIMIZERS
def test_the_optimizer_is_shown_the_noised_mean_and_nothing_else(
    tmp_path: Path, optimizer: str
) -> None:
    """n = 50,000; |std / (z C) - 1| < 0.016 is accepted, false alarm 1e-6."""
    made = six_clients(tmp_path, optimizer).run()
    for round, total in enumerate(made.released_sums, start=1):
        noise = total - un_noised(round)
        assert std_within(noise, Z)
        assert not std_within(0.9 * noise, Z)
    # State and model follow from the shown means alone: nothing un-noised went in beside them.
    inner, parameters_P = made.optimizer.inner, np.zeros(P)
    state = inner.start(P)
    for mean in made.optimizer.means:
        inner.step(parameters_P, mean, state)
    np.testing.assert_allclose(made.strategy.parameters_P, parameters_P, rtol=1e-12)
    assert state.keys() == made.strategy.optimizer_state.keys()
    for name, vector in state.items():
        np.testing.assert_allclose(made.strategy.optimizer_state[name], vector, rtol=1e-12)


@OPTIMIZERS
@pytest.mark.parametrize("num_nodes", [1, 6])
def test_no_un_noised_sum_can_be_reached_once_the_optimizer_runs(
    tmp_path: Path, optimizer: str, num_nodes: int
) -> None:
    """Searches the strategy, the grid and every calling frame, at the end of each round.

    With one node that node's reply is the un-noised sum; with six, all replies together are.
    """
    made = six_clients(tmp_path, optimizer, num_nodes)
    found: list[str] = []

    def search(strategy: object, trace: RoundTrace, metrics: object) -> None:
        total = un_noised(trace.round) if num_nodes == 1 else signal(0, trace.round)
        roots = [strategy, made.grid, *callers_outside(__file__)]
        found.extend(
            f"round {trace.round}: {type(thing).__name__}"
            for thing in reachable(roots)
            if holds_vector(thing, total)
        )

    made.strategy._on_round = search
    made.run()
    assert found == []


def test_the_search_finds_an_un_noised_sum_that_was_kept(tmp_path: Path) -> None:
    made = six_clients(tmp_path, "sgd").run()
    total = un_noised(3)
    for kept in (total, total.astype(np.float32), {"a": [total.astype(np.float32).tobytes()]}):
        made.strategy.kept = kept  # type: ignore[attr-defined]
        assert any(holds_vector(thing, total) for thing in reachable([made.strategy]))


@OPTIMIZERS
def test_files_hold_released_values_only(tmp_path: Path, optimizer: str) -> None:
    """One node: its replies are the un-noised sums (and the means that they would give)."""
    run = watched_run(
        tmp_path / "run", *CENTRAL, *UNLIMITED, f"mechanism.noise_multiplier={Z}",
        f"server_optimizer={optimizer}", num_nodes=1,
    )  # fmt: skip
    sums = [
        m.content.array_records["update"]["vector"].numpy().astype(np.float64)
        for m in run.grid.train_replies()
    ]
    assert len(sums) == 2
    tensors = load_file(run.folder / "checkpoint.safetensors") | load_file(
        run.folder / "model.safetensors"
    )
    names = {"sgd": set(), "momentum": {"velocity"}, "adam": {"first", "second"}}[optimizer]
    assert {n for n in tensors if n.startswith("optimizer.")} == {f"optimizer.{n}" for n in names}
    forbidden = [v for s in sums for v in (s, s / 10, sums[0] + sums[1])]
    for path in run.folder.iterdir():
        content = path.read_bytes()
        for vector in forbidden:
            assert not holds_vector(content, vector), path.name
    for tensor in tensors.values():
        for vector in forbidden:
            # Equal up to scale counts as kept: 650 parameters with noise have |correlation| < 0.95.
            if tensor.size == vector.size:
                assert abs(np.corrcoef(tensor.ravel(), vector)[0, 1]) < 0.95
