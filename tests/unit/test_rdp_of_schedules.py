"""RDP of many different sampled steps: integrated here, equal to the library, and quick."""

from __future__ import annotations

import time

import numpy as np
import pytest

from fl_app.accounting import rdp
from fl_app.accounting.plan import make_plan
from fl_app.overrides import compose
from fl_app.privacy import NoiseKind
from strategies.cohorts.poisson import PoissonCohort


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.7])
@pytest.mark.parametrize("z", [0.1, 0.45, 1.0, 7.0, 300.0])
def test_an_integrated_step_is_the_librarys(z: float, rate: float) -> None:
    event = PoissonCohort(sampling_rate=rate).event(NoiseKind.GAUSSIAN, z, 100)
    library, quick = rdp._step_rdp(event), rdp._step_rdp(event, True)
    both = np.isfinite(library) & np.isfinite(quick)
    assert both.sum() > 100
    np.testing.assert_allclose(quick[both], library[both], rtol=1e-8, atol=1e-13)


def test_a_schedule_of_300_rounds_is_calibrated_in_seconds() -> None:
    """10 s is the promise; with the library's steps it took a minute."""
    schedule = ["mechanism=central_gaussian", "cohort=poisson", "mechanism.noise_schedule=0.998"]
    settings = compose([*schedule, "accountant=rdp", "run.num_rounds=300"])
    start = time.process_time()
    plan = make_plan(settings)
    assert time.process_time() - start < 10
    epsilon = plan.guarantees(300)[0].epsilon
    assert 8.0 * (1 - 1e-3) < epsilon <= 8.0
