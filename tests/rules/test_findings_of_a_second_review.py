"""What a second hostile review found, so that it stays found: rules 1, 8, 9, 12 and 13."""

from __future__ import annotations

import dataclasses

import pytest

from fl_app.client_round import check_order
from fl_app.errors import PrivacyError
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
    with pytest.raises(PrivacyError, match="federation.weighting=examples asked"):
        check_order(dataclasses.replace(RECORD_ORDER, weighting="examples"), settings)
