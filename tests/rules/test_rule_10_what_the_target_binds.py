"""Rule 10: CENTRAL binds the OBSERVER, LOCAL and record level the SERVER."""

import math

import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.errors import SettingsError
from fl_app.mechanisms.central_gaussian import CentralGaussian
from fl_app.overrides import compose
from fl_app.privacy import Placement

HUNDRED = ["federation.population=100", "privacy.target_delta=1e-5"]


def plan(*overrides: str) -> PrivacyPlan:
    return make_plan(compose([*HUNDRED, *overrides]), 14)


def rows(made: PrivacyPlan) -> dict[str, float | None]:
    return {row.name: row.epsilon for row in made.guarantees(made.num_rounds)}


def test_central_noise_binds_the_observer_and_promises_nothing_against_the_server() -> None:
    made = plan("mechanism=central_gaussian", "cohort=poisson", "privacy.target_epsilon=3")
    assert made.epsilon_of == "CLIENT against OBSERVER"
    stated = rows(made)
    assert stated["CLIENT against SERVER"] is None
    assert stated["CLIENT against OBSERVER"] == pytest.approx(3, rel=0.01)
    assert stated["CLIENT against OBSERVER"] <= 3


@pytest.mark.parametrize("cohort", ["all", "poisson"])
def test_local_noise_binds_the_server_without_amplification(cohort: str) -> None:
    made = plan("mechanism=local_gaussian", f"cohort={cohort}", "privacy.target_epsilon=3")
    assert made.epsilon_of == "CLIENT against SERVER"
    # 30 un-sampled Gaussians are one of z / sqrt(30): the plain library must say 3 of it.
    z = made.mechanism_noise_multiplier
    assert z is not None
    exact = from_gaussian_mechanism(z / math.sqrt(30), value_discretization_interval=1e-4)
    assert exact.get_epsilon_for_delta(1e-5) == pytest.approx(3, rel=0.01)
    stated = rows(made)
    assert stated["CLIENT against SERVER"] == pytest.approx(3, rel=0.01)
    # The observer's row is un-amplified at one honest contributor: not smaller.
    assert stated["CLIENT against OBSERVER"] >= stated["CLIENT against SERVER"]


def test_record_level_binds_the_server() -> None:
    made = plan("training=dp_sgd", "privacy.target_epsilon=3", "cohort=poisson")
    assert made.epsilon_of == "RECORD against SERVER"
    stated = rows(made)
    assert stated["RECORD against SERVER"] == pytest.approx(3, rel=0.01)
    assert stated["RECORD against OBSERVER"] == stated["RECORD against SERVER"]


def test_two_units_state_two_guarantees_and_bind_one() -> None:
    made = plan(
        "mechanism=central_gaussian", "training=dp_sgd", "training.noise_multiplier=1",
        "privacy.privacy_unit=client", "privacy.target_epsilon=3",
    )  # fmt: skip
    assert made.epsilon_of == "CLIENT against OBSERVER"
    assert set(rows(made)) == {
        "CLIENT against OBSERVER", "CLIENT against SERVER",
        "RECORD against SERVER", "RECORD against OBSERVER",
    }  # fmt: skip
    assert len(made.events) == 2


def test_distributed_noise_is_refused_as_long_as_nothing_hides_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CentralGaussian, "placement", Placement.DISTRIBUTED)
    with pytest.raises(SettingsError, match="noise shares"):
        plan("mechanism=central_gaussian", "privacy.target_epsilon=3")


def test_a_target_without_anything_private_is_refused() -> None:
    with pytest.raises(SettingsError, match="nothing adds noise"):
        plan("training=sgd", "mechanism=none", "privacy.target_epsilon=3")
    open_run = plan("training=sgd", "mechanism=none", "privacy.target_epsilon=null")
    assert [row.private for row in open_run.guarantees(3)] == [False]


def test_the_comparison_notices_noise_that_is_a_tenth_too_small() -> None:
    made = plan("mechanism=local_gaussian", "privacy.target_epsilon=3")
    z = made.mechanism_noise_multiplier
    assert z is not None
    wrong = from_gaussian_mechanism(0.9 * z / math.sqrt(30), value_discretization_interval=1e-4)
    assert wrong.get_epsilon_for_delta(1e-5) > 3.2
