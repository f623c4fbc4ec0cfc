"""S13, S14, S16 to S18, S20: counted steps, where the noise is, what is stated."""

from pathlib import Path

import numpy as np
import pytest
from harness import CENTRAL, UNLIMITED, federation, watched_run

from fl_app import client_round, plugins
from fl_app.accounting.plan import make_plan
from fl_app.overrides import compose
from fl_app.settings import Settings
from fl_app.stages import ClientPartition, LoadedData
from fl_app.training._opacus import NoisySGD


def test_s13_forty_rows_at_rate_one_fortieth_take_forty_noisy_counted_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the batches is empty. 5 seeds through whole runs (50 seeds: the unit test)."""
    genuine, add_noise = client_round.client_partition, NoisySGD.add_noise
    sizes: list[int] = []

    def forty(client: int, settings: Settings, data: LoadedData) -> ClientPartition:
        whole = genuine(client, settings, data)
        return ClientPartition(client=client, table=whole.table, rows=whole.rows[:40])

    def counted(self: NoisySGD) -> None:
        sizes.append(self.num_rows)
        add_noise(self)

    monkeypatch.setattr(client_round, "client_partition", forty)
    monkeypatch.setattr(NoisySGD, "add_noise", counted)
    for seed in range(5):
        sizes.clear()
        run = watched_run(
            tmp_path / str(seed), *UNLIMITED, "training.noise_multiplier=1", f"run.seed={seed}",
            "training.batch_rate=0.025", "training.local_steps=40", "federation.population=1",
            "run.num_rounds=1", num_nodes=1,
        )  # fmt: skip
        assert len(sizes) == 40
        assert sizes.count(0) > 0
        (event,) = make_plan(run.settings, 1437).events
        assert (event.steps, event.sampling_rate, run.report.ledger_rows) == (40, 0.025, 1)


@pytest.mark.parametrize("learning_rate", [0.001, 10.0])
def test_s14_the_report_prints_the_std_of_sum_and_of_mean(
    tmp_path: Path, learning_rate: float
) -> None:
    """C 2, z 1.5, 10 clients: 3 on the sum, 0.30 on the mean, whatever the local learning rate."""
    run = watched_run(
        tmp_path / "run", *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=1.5",
        "mechanism.clipping_norm=2", f"training.learning_rate={learning_rate}", "run.num_rounds=1",
    )  # fmt: skip
    text = (run.folder / "privacy_report.md").read_text()
    assert "- noise std of sum: 3\n" in text
    assert "- noise std of mean: 0.3\n" in text
    assert run.results["history"][0]["noise_std_of_sum"] == 3.0


def test_s14_the_noise_on_the_mean_is_what_the_report_says(tmp_path: Path) -> None:
    """n = 100,000: 1.1 % accepted, false alarm 1e-6."""
    from statistical.exact_intervals import std_within

    made = federation(
        tmp_path, *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=1.5", "run.num_rounds=1",
        "mechanism.clipping_norm=2", num_parameters=100_000,
    ).run()  # fmt: skip
    assert std_within(made.optimizer.means[0], 0.30)
    assert not std_within(made.optimizer.means[0], 0.33)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "sgd"])
@pytest.mark.parametrize("change", ["zeroed", "reversed"])
def test_s16_a_client_moves_every_rounds_sum_by_at_most_its_bound(
    tmp_path: Path, optimizer: str, change: str
) -> None:
    """Three rounds with repeatable noise, with and without client 0: the noise cancels."""
    direction = np.array([3.0, -4.0, 0.0, 12.0], np.float32)
    factor = {"zeroed": 0.0, "reversed": -1.0}[change]

    def sums(folder: Path, of_client_0: float) -> list[np.ndarray]:
        def delta(client: int, round: int) -> np.ndarray:
            return direction * np.float32(of_client_0 if client == 0 else round + client)

        return federation(
            folder, *CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=1", "run.num_rounds=3",
            "mechanism.clipping_norm=0.5", f"server_optimizer={optimizer}", "run.seeded_noise=true",
            delta=delta, num_parameters=4,
        ).run().released_sums  # fmt: skip

    moved = [
        float(np.linalg.norm(a - b))
        for a, b in zip(sums(tmp_path / "a", 1.0), sums(tmp_path / "b", factor), strict=True)
    ]
    bound = 0.5 if change == "zeroed" else 1.0
    assert moved == pytest.approx([bound] * 3, rel=1e-5)


@pytest.mark.parametrize("section", ["mechanism", "training"])
def test_s17_clip_only_is_not_private(
    tmp_path: Path, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = CENTRAL if section == "mechanism" else []
    run = watched_run(
        tmp_path / "run", *overrides, *UNLIMITED, f"{section}.noise_multiplier=0",
        "run.num_rounds=1",
    )  # fmt: skip
    privacy = run.results["privacy"]
    assert privacy["private"] is False
    assert {row["epsilon"] for row in privacy["guarantees"]} == {None}
    assert {row["private"] for row in privacy["guarantees"]} == {False}
    assert run.results["history"][0]["epsilon"] is None
    assert "NOT PRIVATE" in capsys.readouterr().out
    assert "**NOT PRIVATE" in (run.folder / "privacy_report.md").read_text()


def test_s18_record_level_headline_is_one_client_however_many_there_are(tmp_path: Path) -> None:
    stated = []
    for population in (10, 20):
        run = watched_run(
            tmp_path / str(population), *UNLIMITED, "training.noise_multiplier=1.4",
            f"federation.population={population}", "run.num_rounds=1", "partition=iid",
        )  # fmt: skip
        (row, _) = run.results["privacy"]["guarantees"]
        assert any("worst client" in text for text in row["assumptions"])
        (everybody,) = run.results["privacy"]["each_client"]
        assert everybody == {
            "numbers": f"0-{population - 1}",
            "count": population,
            "rounds": 1,
            "epsilon": row["epsilon"],
        }
        assert (
            f"| 0-{population - 1} | {population} | 1 |"
            in (run.folder / "privacy_report.md").read_text()
        )
        stated.append(row["epsilon"])
    assert stated[0] == stated[1] > 0


def test_s20_only_a_mechanism_that_noises_shows_an_epsilon(tmp_path: Path) -> None:
    """Any plug-in without a law of noise: clipping or sparsifying alone is no privacy."""
    without = [
        kind
        for kind in plugins.kinds("mechanism")
        if plugins.load("mechanism", kind).noise_kind is None  # type: ignore[attr-defined]
    ]
    assert "none" in without
    for kind in without:
        run = watched_run(
            tmp_path / kind, f"mechanism={kind}", "training=sgd", *UNLIMITED, "run.num_rounds=1"
        )
        assert run.results["privacy"]["private"] is False
        assert run.report.ledger_rows == 0
        with pytest.raises(Exception, match="nothing adds noise"):
            compose([f"mechanism={kind}", "training=sgd", "privacy.target_epsilon=8"])
