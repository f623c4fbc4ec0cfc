"""Rule 8: every scheduled round is released and charged; the budget ends a run well."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from harness import CENTRAL, LOCAL, UNLIMITED, dead, federation, parameters_record, watched_run
from statistical.exact_intervals import std_within

from fl_app.accounting.ledger import Ledger
from fl_app.accounting.plan import make_plan
from fl_app.errors import PrivacyError
from fl_app.overrides import compose
from fl_app.run import run_one
from fl_app.wire import TrainRequest

P = 20_000
NOISE = [*UNLIMITED, "mechanism.noise_multiplier=1"]


def test_an_empty_cohort_gives_noise_alone_and_is_charged(tmp_path: Path) -> None:
    """q = 0.02 of 10 clients: 82 % of the rounds are empty. n = 20,000; 2.4 % accepted, 1e-6."""
    made = federation(
        tmp_path, "mechanism=central_gaussian", "cohort=poisson", "cohort.sampling_rate=0.02",
        *NOISE, "run.num_rounds=12", num_parameters=P,
    ).run()  # fmt: skip
    empty = [t.round for t in made.traces if not t.cohort]
    assert 0 < len(empty) < 12
    assert made.durable_rounds() == list(range(1, 13))
    assert len(made.released_sums) == 12
    for total in made.released_sums:
        assert std_within(total, 1.0)


@pytest.mark.parametrize("overrides", [CENTRAL, LOCAL], ids=["central", "local"])
def test_no_reply_at_all_is_charged(tmp_path: Path, overrides: list[str]) -> None:
    made = federation(tmp_path, *overrides, *NOISE, "run.num_rounds=4", num_parameters=P)
    for part in range(10):
        made.grid.answers[part] = dead
    made.run()
    assert made.durable_rounds() == [1, 2, 3, 4]
    assert made.strategy.status == "completed"
    for total in made.released_sums:
        if overrides is CENTRAL:
            assert std_within(total, 1.0)
        else:
            assert not total.any()


def test_skipping_rounds_costs_the_amplified_row(tmp_path: Path) -> None:
    poisson = ["mechanism=central_gaussian", "cohort=poisson", "cohort.sampling_rate=0.1", *NOISE]
    released, skipped = (
        make_plan(compose([*poisson, f"federation.on_missing={how}"]))
        for how in ("release", "skip")
    )
    amplified, plain = released.guarantees(30)[0], skipped.guarantees(30)[0]
    assert plain.epsilon > 5 * amplified.epsilon
    assert any("availability independent of data" in a for a in plain.assumptions)
    assert not any("amplification" in a for a in plain.assumptions)
    made = federation(tmp_path, *poisson, "federation.on_missing=skip", "run.num_rounds=3")
    for part in range(10):
        made.grid.answers[part] = dead
    made.run()
    assert made.optimizer.means == []
    assert made.durable_rounds() == [1, 2, 3]  # skipped, and charged all the same


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    "overrides",
    [
        [
            *CENTRAL[:1],
            "cohort=poisson",
            "cohort.sampling_rate=0.3",
            "mechanism.noise_multiplier=1",
        ],
        [*LOCAL, "mechanism.noise_multiplier=2"],
    ],
    ids=["central", "local"],
)
def test_the_run_ends_before_its_own_accountant_would_exceed_the_target(
    tmp_path: Path, accountant: str, overrides: list[str]
) -> None:
    made = federation(
        tmp_path, *overrides, f"accountant={accountant}", "privacy.target_epsilon=6",
        "privacy.target_delta=1e-5", "run.num_rounds=60",
    ).run()  # fmt: skip
    assert made.strategy.status == "budget_exhausted"
    done = made.strategy.rounds_done
    (event,) = made.plan.events
    spent = [made.settings.accountant.epsilon({event: n}, 1e-5) for n in (done, done + 1)]
    assert spent[0] <= 6 < spent[1]
    assert made.durable_rounds() == list(range(1, done + 1))
    assert len(made.optimizer.means) == done  # nothing was released without its charge


def test_rdp_stops_earlier_than_pld_and_never_decides_for_it(tmp_path: Path) -> None:
    done = {}
    for accountant in ("pld", "rdp"):
        made = federation(
            tmp_path / accountant, *LOCAL, f"accountant={accountant}", "run.num_rounds=60",
            "mechanism.noise_multiplier=2", "privacy.target_epsilon=6",
        )  # fmt: skip
        done[accountant] = made.run().strategy.rounds_done
    assert 0 < done["rdp"] < done["pld"] < 60


def test_the_charge_itself_is_gated(tmp_path: Path) -> None:
    """Also who calls `configure_train` without `start` cannot overspend."""
    made = federation(
        tmp_path, *CENTRAL, "mechanism.noise_multiplier=2", "privacy.target_epsilon=2.5"
    )
    configure, config = made.strategy.configure_train, ConfigRecord()
    arrays = parameters_record(made.strategy.parameters_P)
    (event,) = made.plan.events
    pld = made.settings.accountant
    allowed = sum(pld.epsilon({event: n}, 1e-4) <= 2.5 for n in range(1, 9))
    assert 0 < allowed < 8
    for round in range(1, allowed + 1):
        configure(round, arrays, config, made.grid)
    with pytest.raises(PrivacyError, match="budget"):
        configure(allowed + 1, arrays, config, made.grid)
    assert made.durable_rounds() == list(range(1, allowed + 1))


def test_budget_exhausted_is_a_good_end_with_a_saved_model(tmp_path: Path) -> None:
    overrides = [
        *CENTRAL, "mechanism.noise_multiplier=3", "privacy.target_epsilon=4",
        "engine.num_workers=0", f"run.output_dir={tmp_path / 'run'}", "federation.num_nodes=1",
    ]  # fmt: skip
    assert run_one(overrides) == 0
    values = json.loads((tmp_path / "run" / "results.json").read_text())
    assert values["status"] == "budget_exhausted"
    assert values["num_rounds_done"] == values["ledger"]["rows"] == len(values["history"]) > 0
    assert values["privacy"]["guarantees"][0]["epsilon"] <= 4
    assert (tmp_path / "run" / "model.safetensors").stat().st_size > 0


def test_late_and_dropped_replies_of_local_noise_are_charged_when_asked(tmp_path: Path) -> None:
    made = federation(tmp_path, *LOCAL, *NOISE, "run.num_rounds=2")
    late: list[Message] = []

    def one_round_late(message: Message, request: TrainRequest) -> list[Message]:
        late.extend(made.grid.genuine(message, request))
        return late[-2:-1]

    made.grid.answers[0] = one_round_late
    made.run()
    assert [0 in trace.answered for trace in made.traces] == [False, False]
    assert made.durable_rounds() == [1, 2]
    spent = made.plan.guarantees_of(made.ledger.counts())[0].epsilon
    (event,) = made.plan.events
    assert spent == pytest.approx(made.settings.accountant.epsilon({event: 2}, 1e-4))


def test_record_level_is_charged_for_every_round_whoever_answers(tmp_path: Path) -> None:
    run = watched_run(
        tmp_path / "run", *UNLIMITED, "training.noise_multiplier=1", "cohort=poisson",
        "cohort.sampling_rate=0.2", "run.num_rounds=3",
    )  # fmt: skip
    with Ledger.open(run.folder / "ledger.sqlite") as ledger:
        ((event, count),) = ledger.counts().items()
    assert (event.steps, count) == (4, 3)


def test_spent_epsilon_grows_every_round_from_the_first(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "run", *CENTRAL, *NOISE, "run.num_rounds=3")
    spent = [row["epsilon"] for row in run.results["history"]]
    (event,) = make_plan(run.settings).events
    accountant = run.settings.accountant
    assert spent == pytest.approx([accountant.epsilon({event: n}, 1e-4) for n in (1, 2, 3)])
    assert np.all(np.diff(spent) > 0)
    assert math.isfinite(spent[-1])
