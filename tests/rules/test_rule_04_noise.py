"""Rule 4: noise belongs to the C that was sent; its size does not follow who answered.

n = P = 100,000: |std / expected - 1| < 0.011 is accepted; false alarms: 1e-6 a check.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from harness import CENTRAL, LOCAL, UNLIMITED, Federation, crashed, dead, failing, federation
from statistical.exact_intervals import is_normal, is_uncorrelated, mean_within, std_within

from fl_app.privacy import PrivacyEvent
from fl_app.stages import RoundOrder

P, Z, C = 100_000, 1.5, 2.0
EIGHT = ["federation.population=8", "cohort=all", *UNLIMITED]
NOISE = [f"mechanism.noise_multiplier={Z}", f"mechanism.clipping_norm={C}"]


def eight_clients(folder: Path, *overrides: str, num_dead: int = 0) -> Federation:
    made = federation(folder, *overrides, *EIGHT, *NOISE, "run.num_rounds=1", num_parameters=P)
    # If all of them reported errors the run would end as failed; silence of all is no error.
    ways = (dead,) if num_dead == 8 else (dead, failing, crashed)
    for part in range(num_dead):
        made.grid.answers[part] = ways[part % len(ways)]
    return made


@pytest.mark.parametrize("num_dead", [0, 3, 8])
def test_central_std_of_the_sum_is_exactly_z_c(tmp_path: Path, num_dead: int) -> None:
    made = eight_clients(tmp_path, *CENTRAL, num_dead=num_dead).run()
    assert len(made.traces[0].answered) == 8 - num_dead
    (noise,) = made.released_sums
    assert mean_within(noise, Z * C)
    assert std_within(noise, Z * C)
    assert is_normal(noise, Z * C)
    # Negative controls: a tenth more, and noise scaled by the five of eight that answered.
    assert not std_within(noise * 1.1, Z * C)
    assert not std_within(noise * (5 / 8) ** 0.5, Z * C)


@pytest.mark.parametrize("num_dead", [0, 3, 7])
def test_local_std_of_the_sum_is_z_c_for_each_that_answered(tmp_path: Path, num_dead: int) -> None:
    made = eight_clients(tmp_path, *LOCAL, num_dead=num_dead).run()
    (noise,) = made.released_sums
    answered = 8 - num_dead
    assert std_within(noise, Z * C * answered**0.5)
    assert not std_within(noise, Z * C * (answered + 1) ** 0.5)
    assert is_normal(noise, Z * C * answered**0.5)


def test_local_noise_is_in_the_update_before_it_leaves(tmp_path: Path) -> None:
    made = eight_clients(tmp_path, *LOCAL)
    made.run()
    vectors = [made.grid.update(c, made.grid.requests[0]).vector_P for c in (0, 1)]
    for vector_P in vectors:
        assert std_within(vector_P, Z * C)
    assert is_uncorrelated(*vectors)


def test_central_clients_add_no_noise_and_the_local_server_none(tmp_path: Path) -> None:
    central = eight_clients(tmp_path / "central", *CENTRAL)
    central.run()
    assert not central.grid.update(0, central.grid.requests[0]).vector_P.any()
    local = eight_clients(tmp_path / "local", *LOCAL, num_dead=8)
    assert not local.run().released_sums[0].any()


def test_noise_follows_the_clipping_norm_that_was_sent_in_the_same_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C is 1, 4, 0.5, 2 in rounds 1 to 4, as adaptive clipping would have it."""
    norms = {1: 1.0, 2: 4.0, 3: 0.5, 4: 2.0}
    made = federation(
        tmp_path, *CENTRAL, *EIGHT, *NOISE, "run.num_rounds=4", num_parameters=P,
        delta=lambda client, round: np.full(P, 1.0 / 8, np.float32),
    )  # fmt: skip
    plain = made.strategy._order

    def adaptive(round: int, attempt: int) -> RoundOrder:
        return dataclasses.replace(plain(round, attempt), clipping_norm=norms[round])

    monkeypatch.setattr(made.strategy, "_order", adaptive)
    made.run()
    for round, total in enumerate(made.released_sums, start=1):
        sent = {r.order.clipping_norm for r in made.grid.requests if r.order.round == round}
        assert sent == {norms[round]}
        # Eight equal updates, each clipped to C: their sum has the norm 8 C.
        signal = 8 * norms[round] / P**0.5
        assert std_within(total, Z * norms[round], mean=signal)
        assert not std_within(total, Z * norms[round % 4 + 1], mean=signal)


@pytest.mark.parametrize("mechanism", ["central_gaussian", "local_gaussian"])
def test_a_schedules_noise_is_added_ordered_and_charged_in_its_own_round(
    tmp_path: Path, mechanism: str
) -> None:
    levels = [3.0, 1.0, 0.4]
    made = federation(
        tmp_path, f"mechanism={mechanism}", *EIGHT, *NOISE, "run.num_rounds=3",
        "mechanism.noise_schedule=[3,1,0.4]", num_parameters=P,
    ).run()  # fmt: skip
    answers = 8**0.5 if mechanism == "local_gaussian" else 1.0
    for round, (noise, level) in enumerate(zip(made.released_sums, levels, strict=True), start=1):
        assert std_within(noise, level * Z * C * answers)
        assert not std_within(noise, Z * C * answers) or level == 1
        sent = {r.order.noise_multiplier for r in made.grid.requests if r.order.round == round}
        assert sent == {level * Z}
        assert made.plan.bound_noise(round)[1] == pytest.approx(level * Z * C * answers)
    charged = [PrivacyEvent.from_json(entry.event) for entry in made.ledger.entries()]
    assert [event.noise_multiplier for event in charged] == [level * Z for level in levels]


def test_a_record_level_schedule_is_ordered_and_charged_in_its_own_round(tmp_path: Path) -> None:
    made = federation(
        tmp_path, "training=dp_sgd", "mechanism=none", *EIGHT, "training.noise_multiplier=2",
        "training.noise_schedule=0.5", "run.num_rounds=3",
    ).run()  # fmt: skip
    sent = {(r.order.round, r.order.training_noise_multiplier) for r in made.grid.requests}
    assert sent == {(1, 2.0), (2, 1.0), (3, 0.5)}
    charged = [PrivacyEvent.from_json(entry.event) for entry in made.ledger.entries()]
    assert [event.noise_multiplier for event in charged] == [2.0, 1.0, 0.5]


def test_rounds_have_independent_noise(tmp_path: Path) -> None:
    made = federation(tmp_path, *CENTRAL, *EIGHT, *NOISE, "run.num_rounds=2", num_parameters=P)
    first, second = made.run().released_sums
    assert is_uncorrelated(first, second)
    assert not is_uncorrelated(first, second + 0.1 * first)
