"""Rule 10: CENTRAL binds the OBSERVER, LOCAL and record level the SERVER."""

import math

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant

from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.errors import SettingsError
from fl_app.overrides import compose
from fl_app.privacy import View
from fl_app.protection.none import NoProtection

HUNDRED = ["federation.population=100", "privacy.target_delta=1e-5"]


def plan(*overrides: str) -> PrivacyPlan:
    return make_plan(compose([*HUNDRED, *overrides]), 14, num_parameters=650)


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


DISTRIBUTED = ["mechanism=distributed_discrete_gaussian", "mechanism=distributed_skellam"]


@pytest.mark.parametrize("mechanism", DISTRIBUTED)
def test_distributed_noise_binds_the_observer_where_the_server_sees_single_shares(
    mechanism: str,
) -> None:
    made = plan(mechanism, "privacy.target_epsilon=3")
    assert made.epsilon_of == "CLIENT against OBSERVER"
    stated = rows(made)
    assert stated["CLIENT against OBSERVER"] == pytest.approx(3, rel=0.01)
    # The 30 rounds of a share are those of a Gaussian of z / sqrt(80): 80 of 100 must answer.
    z = made.mechanism_noise_multiplier
    assert z is not None
    share = RdpAccountant().compose(GaussianDpEvent(z / math.sqrt(80)), 30).get_epsilon(1e-5)
    one = stated["CLIENT against SERVER"]
    assert one is not None
    assert share * (1 - 1e-9) <= one <= share * 1.35
    (server,) = [g for g in made.guarantees(30) if g.view is View.SERVER]
    assert any("one share" in text for text in server.assumptions)
    (event,) = made.events  # and the ledger does not say that the sum is all the server sees
    assert event.view is View.OBSERVER


@pytest.mark.parametrize("mechanism", DISTRIBUTED)
def test_distributed_noise_binds_the_server_where_a_protection_hides_the_shares(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoProtection, "hides_from_server", True)
    made = plan(mechanism, "privacy.target_epsilon=3", "cohort=poisson")
    assert made.epsilon_of == "CLIENT against SERVER"
    stated = rows(made)
    # No credit for sampling, and the same number for both views: sums of the fewest honest.
    assert stated["CLIENT against SERVER"] == stated["CLIENT against OBSERVER"]
    assert [event.view for event in made.events] == [View.SERVER]
    z = made.mechanism_noise_multiplier
    assert z is not None
    gaussian = RdpAccountant().compose(GaussianDpEvent(z), 30).get_epsilon(1e-5)
    assert gaussian <= 3.0001
    assert gaussian == pytest.approx(3, rel=0.05)


def test_colluders_cost_noise() -> None:
    base = [DISTRIBUTED[0], "mechanism.noise_multiplier=4", "privacy.target_epsilon=null"]
    honest, colluding = plan(*base), plan(*base, "mechanism.assumed_colluders=40")
    # The same z for the fewest honest; each share is larger, as half as many are counted on.
    assert rows(honest)["CLIENT against OBSERVER"] == pytest.approx(
        rows(colluding)["CLIENT against OBSERVER"], rel=1e-3
    )
    assert colluding.noise_std_of_sum == pytest.approx(
        (honest.noise_std_of_sum or 0.0) * math.sqrt(2)
    )
    assert [g.epsilon for g in honest.guarantees(30)] != [
        g.epsilon for g in colluding.guarantees(30)
    ]


def test_integer_noise_is_refused_by_other_accountants() -> None:
    for accountant in ("pld", "simple"):
        with pytest.raises(SettingsError, match="set accountant=rdp"):
            plan(DISTRIBUTED[0], "privacy.target_epsilon=3", f"accountant={accountant}")


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
