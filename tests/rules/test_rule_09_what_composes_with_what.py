"""Rule 9, exhaustively: every mechanism x sampler x accountant has the right number or is refused.

The numbers come from here: closed forms, Opacus' RDP, and privacy loss distributions that are
integrated on a grid of their own. Case: 100 clients, 10 a round, 100 rounds, delta 1e-5.
"""

from __future__ import annotations

import functools
import math
import re

import numpy as np
import pytest
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy.optimize import brentq
from scipy.stats import norm

from fl_app import plugins
from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.errors import SettingsError
from fl_app.overrides import compose
from fl_app.privacy import NoiseShares, PrivacyUnit, View

ROUNDS, DELTA, RATE, TURNS = 100, 1e-5, 0.1, 10
Z = {"gaussian": 1.0, "laplace": 5.0, "discrete_gaussian": 1.0, "skellam": 1.0}
CASE = [
    "privacy.target_epsilon=null", f"privacy.target_delta={DELTA}", f"run.num_rounds={ROUNDS}",
    "federation.population=100",
]  # fmt: skip
PLAIN = "cohort.amplification=false"
# Overrides, relation of CENTRAL noise, credit for sampling, rounds of one client, sensitivity / C.
SAMPLERS = {
    "poisson": (["cohort=poisson"], "ADD_OR_REMOVE_ONE", True, ROUNDS, 1),
    "poisson, plain": (["cohort=poisson", PLAIN], "ADD_OR_REMOVE_ONE", False, ROUNDS, 1),
    "fixed_size": (["cohort=fixed_size"], "REPLACE_ONE", True, ROUNDS, 2),
    "fixed_size, plain": (["cohort=fixed_size", PLAIN], "REPLACE_ONE", False, ROUNDS, 2),
    "fixed_size, zero": (
        ["cohort=fixed_size", PLAIN, "cohort.neighboring_relation=zero_out"],
        "ZERO_OUT", False, ROUNDS, 1,
    ),
    "round_robin": (["cohort=round_robin"], "ZERO_OUT", False, TURNS, 1),
    "all": (["cohort=all"], "ZERO_OUT", False, ROUNDS, 1),
}  # fmt: skip
MECHANISMS = [kind for kind in plugins.kinds("mechanism") if kind != "none"]
ACCOUNTANTS = plugins.kinds("accountant")


def gaussian_curve(mu: float, delta: float) -> float:
    """Epsilon of one Gaussian whose mean moves by mu stds (Balle and Wang 2018, theorem 8)."""

    def excess(epsilon: float) -> float:
        tail = norm.cdf(mu / 2 - epsilon / mu)
        return float(tail - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta)

    return float(brentq(excess, 0.0, 690.0))


def renyi_to_epsilon(divergence: np.ndarray, orders: np.ndarray) -> float:
    """Canonne, Kamath and Steinke 2020, proposition 12."""
    log_delta = math.log(DELTA)
    values = divergence + np.log1p(-1 / orders) - (log_delta + np.log(orders)) / (orders - 1)
    return float(values.min())


ORDERS = np.concatenate([1 + np.arange(1, 100) / 10, np.arange(12, 64), [128, 256, 512, 1024]])
"""What RDP is usually converted at: other orders give other, equally valid bounds."""


@functools.cache
def integrated(law: str, scale: float, rate: float, rounds: int) -> float:
    """Epsilon of the composition by integrating the privacy loss on a grid, both directions."""
    points, dx = np.linspace(-40 * scale, 40 * scale + 1, 2_000_001, retstep=True)

    def density(x: np.ndarray) -> np.ndarray:
        if law == "laplace":
            return np.exp(-np.abs(x) / scale) / (2 * scale)
        return norm.pdf(x, scale=scale)

    zero = density(points) + 1e-300
    mixed = (1 - rate) * zero + rate * (density(points - 1) + 1e-300)
    return max(_composed(a, b, dx, rounds) for a, b in ((mixed, zero), (zero, mixed)))


def _composed(p: np.ndarray, q: np.ndarray, dx: float, rounds: int) -> float:
    size = 1 << 19
    losses, weights = np.log(p / q), p * dx
    mean = float((losses * weights).sum())
    spread = math.sqrt(float(((losses - mean) ** 2 * weights).sum()))
    width = (rounds * abs(mean) + 14 * math.sqrt(rounds) * spread + 40) / (size / 2)
    cells = np.clip(losses / width, -size / 2, size / 2 - 1)
    below = np.floor(cells).astype(np.int64)
    share = cells - below  # split between two cells: the mean loss stays as it is
    masses = np.bincount(below % size, weights * (1 - share), size)
    masses += np.bincount((below + 1) % size, weights * share, size)
    total = np.fft.irfft(np.fft.rfft(masses) ** rounds, size).clip(0)
    grid = np.fft.fftfreq(size, 1 / size) * width

    def excess(epsilon: float) -> float:
        over = grid > epsilon
        return float((total[over] * -np.expm1(epsilon - grid[over])).sum() - DELTA)

    return float(brentq(excess, 0.0, 690.0)) if excess(0.0) > 0 else 0.0


def integers(kind: str, shares: NoiseShares, z: float, rounds: int) -> float:
    """The papers' bounds, from what one client can add (see docs/privacy.md)."""
    orders = np.arange(2.0, 512) if kind == "skellam" else ORDERS
    variance = (z * shares.scaled_norm) ** 2
    squared = float(shares.norm_squared)
    divergence = orders * squared / (2 * variance)
    if kind == "skellam":
        l1 = min(math.sqrt(shares.dimension * squared), squared)
        fine = ((2 * orders - 1) * squared + 6 * l1) / (4 * variance**2)
        divergence += np.minimum(fine, 3 * l1 / (2 * variance))
    return renyi_to_epsilon(rounds * divergence, orders)


def expected(accountant: str, law: str, sampler: str, central: bool, plan: PrivacyPlan) -> float:
    """The right epsilon of the row that the target binds; inf where only a refusal is right."""
    _, _, credit, rounds, sensitivity = SAMPLERS[sampler]
    if not central:
        credit, sensitivity = False, 1
    z = Z[law] / sensitivity
    if accountant == "simple":
        single = 1 / z if law == "laplace" else gaussian_curve(1 / z, DELTA / rounds)
        return rounds * single
    if accountant == "gdp":
        return gaussian_curve(math.sqrt(rounds) / z, DELTA)
    if accountant == "pld":
        return integrated(law, z, RATE if credit else 1.0, rounds)
    shares = plan.events[0].shares
    if shares is not None:
        return integers(law, shares, z, rounds)
    if credit and sampler == "fixed_size":
        return 83.937  # SCENARIOS: S04
    if credit:
        usual = ORDERS.tolist()
        curve = opacus_rdp.compute_rdp(q=RATE, noise_multiplier=z, steps=rounds, orders=usual)
        return renyi_to_epsilon(np.asarray(curve), ORDERS)
    return renyi_to_epsilon(rounds * ORDERS / (2 * z**2), ORDERS)


def taken(accountant: str, law: str, sampler: str, central: bool) -> bool:
    """The table at the end of DESIGN.md section 2, and what it says below the table."""
    credit = central and SAMPLERS[sampler][2]
    if law in ("discrete_gaussian", "skellam"):
        return accountant == "rdp"
    if accountant == "simple":
        return True
    if accountant == "pld":
        return not (credit and sampler == "fixed_size")
    return law == "gaussian" and (accountant == "rdp" or not credit)


def plan_of(mechanism: str, sampler: str, accountant: str) -> PrivacyPlan:
    law = plugins.load("mechanism", mechanism).noise_kind.value  # type: ignore[attr-defined]
    settings = compose(
        [f"mechanism={mechanism}", f"mechanism.noise_multiplier={Z[law]}", *CASE,
         *SAMPLERS[sampler][0], f"accountant={accountant}"]
    )  # fmt: skip
    return make_plan(settings, num_parameters=650)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_combination_has_the_right_number_or_is_refused_with_one_that_works(
    mechanism: str, sampler: str, accountant: str
) -> None:
    central = mechanism.startswith("central")
    law = plugins.load("mechanism", mechanism).noise_kind.value  # type: ignore[attr-defined]
    if not taken(accountant, law, sampler, central):
        with pytest.raises(SettingsError) as refusal:
            plan_of(mechanism, sampler, accountant)
        named = re.findall(r"accountant=(\w+)", str(refusal.value))[1:]
        works = [a for a in named if taken(a, law, sampler, central)]
        assert works or PLAIN in str(refusal.value)
        assert all(a in works for a in named), "an alternative is named that is refused, too"
        return
    plan = plan_of(mechanism, sampler, accountant)
    first = plan.guarantees(ROUNDS)[0]
    assert first.unit is PrivacyUnit.CLIENT
    assert first.relation == (SAMPLERS[sampler][1] if central else "ZERO_OUT")
    # With protection=none the server sees single shares: the target binds the OBSERVER there.
    assert first.view is (View.SERVER if mechanism.startswith("local") else View.OBSERVER)
    right = expected(accountant, law, sampler, central, plan)
    assert first.epsilon == pytest.approx(right, rel=2e-3)
    assert first.epsilon >= right * (1 - 1e-3)


def test_the_integration_finds_what_is_known() -> None:
    """A control of the numbers above, and that a wrong one would be seen."""
    assert integrated("gaussian", 1.0, 1.0, 100) == pytest.approx(91.8, abs=0.05)
    assert integrated("gaussian", 1.0, 0.1, 100) == pytest.approx(7.05, abs=0.005)
    assert integrated("laplace", 10.0, 1.0, 100) == pytest.approx(4.22, abs=0.005)
    assert integrated("gaussian", 1.0, 0.1, 100) < 0.99 * integrated("gaussian", 1.0, 0.102, 100)
