"""Rule 2: one global norm, zero stays zero, non-finite becomes zero at the client, before noise."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import (
    CENTRAL,
    LOCAL,
    UNLIMITED,
    Delta,
    federation,
    spoil_client,
    watched_run,
)
from torch import nn

from fl_app.models.linear import PLUGIN as LINEAR

C, P = 0.7, 64
MECHANISMS = {"central_gaussian": 2, "local_gaussian": 2, "central_laplace": 1, "local_laplace": 1}
"""The order of the norm that each clips."""
OPTIMIZERS = ("sgd", "momentum", "adam")


def hostile_deltas() -> dict[int, np.ndarray]:
    """Five clients: none, small, on the bound, huge in one element, near overflow everywhere."""
    random = np.random.default_rng(0)
    direction = random.normal(size=P)
    direction /= np.linalg.norm(direction)
    one = np.zeros(P)
    one[3] = 1e30
    shapes = [np.zeros(P), 0.3 * C * direction, C * direction, one, np.full(P, 3e38)]
    return {client: v.astype(np.float32) for client, v in enumerate(shapes)}


def delta_of(table: dict[int, np.ndarray]) -> Delta:
    return lambda client, round: table[client]


def un_noised_sum(
    folder: Path, mechanism: str, optimizer: str, table: dict[int, np.ndarray]
) -> np.ndarray:
    """The released sum of a whole round at z = 0 (the sum itself: nothing else differs)."""
    made = federation(
        folder, f"mechanism={mechanism}", f"server_optimizer={optimizer}", "cohort=all",
        "mechanism.noise_multiplier=0", f"mechanism.clipping_norm={C}", *UNLIMITED,
        "federation.population=5", "run.num_rounds=1",
        delta=delta_of(table), num_parameters=P,
    )  # fmt: skip
    made.run()
    made.ledger.close()
    return made.released_sums[0]


@pytest.mark.parametrize(
    ("mechanism", "optimizer"), list(itertools.product(MECHANISMS, OPTIMIZERS))
)
def test_zeroing_a_client_moves_the_sum_by_at_most_c_and_replacing_it_by_at_most_2c(
    tmp_path: Path, mechanism: str, optimizer: str
) -> None:
    table, number = hostile_deltas(), itertools.count()

    def total(changes: dict[int, np.ndarray]) -> np.ndarray:
        return un_noised_sum(tmp_path / str(next(number)), mechanism, optimizer, table | changes)

    whole, zero, order = total({}), np.zeros(P, np.float32), MECHANISMS[mechanism]
    zeroed = [np.linalg.norm(whole - total({c: zero}), order) for c in table]
    # The furthest that a client can go: to the other end of its own direction, and far beyond C.
    opposite = {c: np.clip(-1e30 * v.astype(np.float64), -3e38, 3e38) for c, v in table.items()}
    replaced = [
        np.linalg.norm(whole - total({c: v.astype(np.float32)}), order) for c, v in opposite.items()
    ]
    assert max(zeroed) <= C * (1 + 1e-5)
    assert max(replaced) <= 2 * C * (1 + 1e-5)
    # Clipping everything away would pass too: the bounds must be reached.
    assert max(zeroed) >= C * (1 - 1e-5)
    assert max(replaced) >= 2 * C * (1 - 1e-5)


def test_the_brute_force_search_notices_a_mechanism_that_does_not_clip(tmp_path: Path) -> None:
    table = hostile_deltas()
    sums = []
    for number, changes in enumerate(({}, {3: np.zeros(P, np.float32)})):
        made = federation(
            tmp_path / str(number), "mechanism=none", *UNLIMITED, "federation.population=5",
            "run.num_rounds=1", delta=delta_of(table | changes), num_parameters=P,
        )  # fmt: skip
        sums.append(made.run().released_sums[0])
    assert np.linalg.norm(sums[0] - sums[1]) > C


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mechanism", [*MECHANISMS, "none"])
def test_a_non_finite_update_becomes_zero_at_the_client(
    tmp_path: Path, mechanism: str, bad: float
) -> None:
    """One bad element of client 2: the sum is that of the others; the server saw no violation."""
    broken = np.full(P, 0.01, np.float32)
    table = {c: broken.copy() for c in range(5)}
    table[2][7] = bad
    noise = [] if mechanism == "none" else ["mechanism.noise_multiplier=0"]
    made = federation(
        tmp_path, f"mechanism={mechanism}", *noise, *UNLIMITED, "federation.population=5",
        "run.num_rounds=1", delta=delta_of(table), num_parameters=P,
    )  # fmt: skip
    made.run()
    assert made.traces[0].answered == (0, 1, 2, 3, 4)
    assert made.traces[0].violations == ()
    expected = made.settings.cohort.expected_size(5)
    shares = 5 if mechanism == "none" else expected
    np.testing.assert_allclose(made.optimizer.means[0], 4 * 0.01 / shares, rtol=1e-6)


def test_zero_before_noise_still_gets_the_whole_noise(tmp_path: Path) -> None:
    """LOCAL: the vector of a NaN client is noise of std z C like everybody's (n = 50,000)."""
    from statistical.exact_intervals import std_within

    size = 50_000
    made = federation(
        tmp_path, *LOCAL, "mechanism.noise_multiplier=2", f"mechanism.clipping_norm={C}",
        *UNLIMITED, "federation.population=1", "run.num_rounds=1",
        delta=lambda client, round: np.full(size, np.nan, np.float32), num_parameters=size,
    )  # fmt: skip
    noise = made.run().released_sums[0]
    assert std_within(noise, 2 * C)
    assert not std_within(noise, 2.2 * C)


class Odd(nn.Module):
    """A linear model with a 0-d scale and an integer counter that forward passes move."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.layer = nn.Linear(64, 10)
        self.counter = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(self.counter(x.flatten(1))) * self.scale
        return scores


class Counter(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_scalars_are_clipped_with_the_rest_and_integers_never_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LINEAR, "build", lambda self, spec: Odd())
    run = watched_run(
        tmp_path / "run", *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=0",
        "mechanism.clipping_norm=0.01", "training.learning_rate=0.5", "federation.population=4",
        "run.seed=7", num_nodes=4,
    )  # fmt: skip
    for reply in run.grid.train_replies():
        vector_P = reply.content.array_records["update"]["vector"].numpy()
        assert vector_P.shape == (651,)
        assert vector_P[0] != 0.0  # the 0-d tensor moved, within the one norm over everything
        assert np.linalg.norm(vector_P.astype(np.float64)) == pytest.approx(0.01, rel=1e-5)
    from safetensors.numpy import load_file

    saved = load_file(run.folder / "model.safetensors")
    # Evaluation on the server moves its own counter, from 0; no client's count gets there.
    assert saved["counter.calls"].dtype == np.int64
    assert saved["counter.calls"] <= 3


@pytest.mark.parametrize("how", ["nan", "inf", "huge", "empty"])
@pytest.mark.parametrize("overrides", [CENTRAL, LOCAL, []], ids=["central", "local", "record"])
def test_broken_data_of_one_client_leaves_a_finite_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], how: str
) -> None:
    spoil_client(monkeypatch, 1, how)
    z = "mechanism.noise_multiplier=1" if overrides else "training.noise_multiplier=1"
    run = watched_run(
        tmp_path / "run", *overrides, *UNLIMITED, z, "federation.population=3", num_nodes=3
    )
    assert run.report.status == "completed"
    assert np.isfinite(run.report.final["loss"])
    answers = [m.content.config_records["config"]["clients"] for m in run.grid.train_replies()]
    assert answers.count([1]) == 2
