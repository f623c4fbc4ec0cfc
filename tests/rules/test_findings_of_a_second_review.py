"""What a second hostile review found, so that it stays found: rules 1, 8, 9, 12 and 13."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
from hydra.errors import ConfigCompositionException

from fl_app import overrides as overrides_module
from fl_app.accounting.plan import make_plan
from fl_app.client_round import check_order
from fl_app.errors import PrivacyError, SettingsError
from fl_app.overrides import compose
from fl_app.stages import RoundOrder

RECORD_ORDER = RoundOrder(
    round=1,
    clipping_norm=None,
    noise_multiplier=None,
    training_noise_multiplier=1.0,
    nominal_rows=100,
)


def test_a_node_refuses_an_order_that_asks_for_its_number_of_rows() -> None:
    """With example weights a reply's weight is the client's exact row count, un-noised."""
    settings = compose(["training.noise_multiplier=1", "privacy.target_epsilon=null"])
    check_order(RECORD_ORDER, settings)
    with pytest.raises(PrivacyError, match=r"federation\.weighting=examples asked"):
        check_order(dataclasses.replace(RECORD_ORDER, weighting="examples"), settings)


def test_a_large_epsilon_is_said_to_protect_hardly() -> None:
    central = ["mechanism=central_gaussian", "privacy.target_epsilon=null", "run.num_rounds=100"]
    weak = make_plan(compose([*central, "mechanism.noise_multiplier=1"]))
    (warning,) = [text for text in weak.warnings if "protects hardly" in text]
    assert warning.startswith("CLIENT against OBSERVER: epsilon ")
    fair = make_plan(compose([*central, "mechanism.noise_multiplier=10"]))
    assert not any("protects hardly" in text for text in fair.warnings)


def test_random_cohorts_that_are_often_too_small_for_a_release_are_warned_of() -> None:
    """10 of 100 on average, 8 needed: 0.2061 of the rounds (binomial, summed exactly here)."""
    tenth = Fraction(1, 10)
    exact = sum(math.comb(100, k) * tenth**k * (1 - tenth) ** (100 - k) for k in range(8))
    shares = ["mechanism=distributed_skellam", "federation.population=100"]
    cohort = compose([*shares, "cohort=poisson"]).cohort
    assert cohort.probability_below(8, 100) == pytest.approx(float(exact), rel=1e-9)
    for overrides, warned in (
        (["cohort=poisson"], True),
        (["cohort=poisson", "mechanism.min_survivors=2"], False),
        (["cohort=fixed_size"], False),
    ):
        texts = make_plan(compose([*shares, *overrides]), num_parameters=8).warnings
        assert any("a round asks fewer clients with probability 0.21" in t for t in texts) is warned


@pytest.mark.parametrize("noise", ["skellam", "discrete_gaussian"])
def test_integer_noise_at_record_level_is_refused_with_what_there_is(noise: str) -> None:
    with pytest.raises(SettingsError, match=r"training\.noise=.* must be one of gaussian, laplace"):
        compose([f"training.noise={noise}"])


def test_a_group_that_cannot_be_composed_is_an_error_and_no_endless_recursion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(overrides: list[str]) -> None:
        raise ConfigCompositionException("the yaml of this group is broken")

    monkeypatch.setattr(overrides_module, "_hydra_values", broken)
    with pytest.raises(SettingsError, match="the yaml of this group is broken"):
        compose(["dataset=digits"])
