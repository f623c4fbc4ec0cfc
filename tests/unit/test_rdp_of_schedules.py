"""RDP of many different sampled steps: integrated here, equal to Opacus, and quick."""

from __future__ import annotations

import time

import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy.integrate import quad
from scipy.stats import norm

from fl_app.accounting import rdp
from fl_app.accounting.plan import make_plan
from fl_app.overrides import compose
from fl_app.privacy import NoiseKind
from strategies.cohorts.poisson import PoissonCohort

ORDERS = np.asarray(DEFAULT_RDP_ORDERS)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.7])
@pytest.mark.parametrize("z", [0.1, 0.45, 1.0, 7.0, 300.0])
def test_an_integrated_step_is_that_of_opacus(z: float, rate: float) -> None:
    """dp-accounting is never below: where its series does not converge it has no number."""
    event = PoissonCohort(sampling_rate=rate).event(NoiseKind.GAUSSIAN, z, 100)
    known = ORDERS[ORDERS <= 256]  # above, a step counts as one without sampling
    quick, library = (rdp._step_rdp(event, q)[: known.size] for q in (True, False))
    opacus = np.asarray(
        opacus_rdp.compute_rdp(q=rate, noise_multiplier=z, steps=1, orders=known.tolist())
    )
    np.testing.assert_allclose(quick, opacus, rtol=1e-6, atol=1e-13)
    assert (quick <= library * (1 + 1e-8) + 1e-13).all()


@pytest.mark.parametrize(("z", "rate"), [(0.45, 0.7), (0.9, 0.1), (2.0, 0.01), (1.5, 0.5)])
def test_a_step_is_the_integral_also_where_the_library_knows_nothing(z: float, rate: float) -> None:
    curve = rdp._step_rdp(PoissonCohort(sampling_rate=rate).event(NoiseKind.GAUSSIAN, z, 100), True)
    for order in (1.1, 1.7, 3.3, 7.9):

        def integrand(x: float, order: float = order) -> float:
            ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / (2 * z * z))
            return float(np.exp(order * ratio + norm.logpdf(x, scale=z)))

        ends = (-12 * z, order + 12 * z)
        moment, _ = quad(integrand, *ends, points=(0, 1, order), epsabs=0, epsrel=1e-12, limit=500)
        found = curve[np.flatnonzero(np.isclose(ORDERS, order))[0]]
        assert found == pytest.approx(np.log(moment) / (order - 1), rel=1e-8, abs=1e-12)


def test_a_schedule_of_300_rounds_is_calibrated_in_seconds() -> None:
    """10 s is the promise; with the library's steps it took a minute."""
    schedule = ["mechanism=central_gaussian", "cohort=poisson", "mechanism.noise_schedule=0.998"]
    settings = compose([*schedule, "accountant=rdp", "run.num_rounds=300"])
    start = time.process_time()
    plan = make_plan(settings)
    assert time.process_time() - start < 10
    epsilon = plan.guarantees(300)[0].epsilon
    assert 8.0 * (1 - 1e-3) < epsilon <= 8.0
