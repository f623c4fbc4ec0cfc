"""Integer noise: bounds against exact Renyi divergences, the papers' formulas and the Gaussian."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.special import logsumexp

from fl_app import plugins
from fl_app.accounting.integers import concentrated_loss, integer_noise_rdp, ratio_range
from fl_app.errors import AccountingError, PrivacyError
from fl_app.mechanisms._rounding import rounded_norm_squared
from fl_app.plugins import Accountant
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    NoiseShares,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)

DELTA = 1e-5
ORDERS = (1.25, 1.5, 2.0, 2.5, 3.0, 7.0, 20.0)
LAWS = [NoiseKind.DISCRETE_GAUSSIAN, NoiseKind.SKELLAM]


def accountant(kind: str) -> Accountant:
    values = {"pld": {"discretization": 1e-4}, "simple": {"formula": "analytic"}}
    made: Accountant = plugins.build("accountant", {"kind": kind} | values.get(kind, {}))
    return made


def event(
    kind: NoiseKind,
    z: float,
    norm: float,
    dimension: int = 1,
    num_shares: int = 1,
    norm_squared: int | None = None,
) -> PrivacyEvent:
    return PrivacyEvent(
        unit=PrivacyUnit.CLIENT,
        view=View.SERVER,
        relation=NeighboringRelation.ZERO_OUT,
        noise=kind,
        noise_multiplier=z,
        shares=NoiseShares(
            dimension=dimension,
            scaled_norm=norm,
            norm_squared=math.ceil(norm**2) if norm_squared is None else norm_squared,
            num_shares=num_shares,
        ),
    )


# The exact divergence, by summation in logarithms.


def log_law(kind: NoiseKind, variance: float, largest: int) -> np.ndarray:
    """Log probabilities of -largest .. largest, up to a constant that `divergence` takes out."""
    if kind is NoiseKind.DISCRETE_GAUSSIAN:
        return -(np.arange(-largest, largest + 1.0) ** 2) / (2 * variance)
    # I_x / I_(x-1) by the continued fraction of the Bessel function's recurrence.
    ratio, logs = 0.0, np.zeros(largest + 1)
    for x in range(largest + 200, 0, -1):
        ratio = 1 / (2 * x / variance + ratio)
        if x <= largest:
            logs[x] = math.log(ratio)
    half = np.cumsum(logs)
    return np.concatenate([half[:0:-1], half])


def log_sum_law(kind: NoiseKind, share_variance: float, num_shares: int, reach: int) -> np.ndarray:
    """Log law of a sum of shares at -reach .. reach; the shares themselves are cut off beyond."""
    share = log_law(kind, share_variance, 2 * reach)
    total = share
    values = np.arange(-2 * reach, 2 * reach + 1)
    for _ in range(num_shares - 1):
        total = np.array(
            [
                logsumexp(
                    total[max(0, x) : min(len(values), x + len(values))]
                    + share[::-1][max(0, -x) : min(len(values), len(values) - x)]
                )
                for x in values
            ]
        )
    return total[reach:-reach]


def divergence(log_p: np.ndarray, shift: int, order: float) -> float:
    """Renyi divergence of the law moved by `shift` from the law."""
    p, q = log_p[: log_p.size - shift], log_p[shift:]
    return float(logsumexp(order * p + (1 - order) * q) - logsumexp(log_p)) / (order - 1)


@pytest.mark.parametrize("variance", [0.2, 1.0, 4.0, 30.0, 400.0])
@pytest.mark.parametrize("shift", [1, 2, 5])
def test_skellam_bound_is_never_below_the_exact_divergence(variance: float, shift: int) -> None:
    reach = int(60 + 40 * variance**0.5 + 60 * shift)
    exact = [divergence(log_law(NoiseKind.SKELLAM, variance, reach), shift, a) for a in ORDERS]
    made = event(NoiseKind.SKELLAM, variance**0.5 / shift, float(shift))
    bound = integer_noise_rdp(made, np.array(ORDERS))
    assert (exact <= bound * (1 + 1e-9)).all()
    if variance >= 400:  # and near it for whole orders
        assert exact[2] == pytest.approx(bound[2], rel=0.02)
        assert exact[5] == pytest.approx(bound[5], rel=0.02)


def test_skellam_bound_needs_its_l1_term() -> None:
    # Negative control of the test above: the Gaussian's divergence alone is too small.
    exact = divergence(log_law(NoiseKind.SKELLAM, 1.0, 300), 1, 1.25)
    assert exact > 1.01 * 1.25 / (2 * 1.0)


@pytest.mark.parametrize("share_variance", [0.16, 0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 6])
@pytest.mark.parametrize("shift", [1, 3])
def test_sums_of_discrete_gaussians_are_within_the_bound(
    share_variance: float, num_shares: int, shift: int
) -> None:
    variance = share_variance * num_shares
    reach = int(10 + 8 * variance**0.5 + 8 * shift)
    law = log_sum_law(NoiseKind.DISCRETE_GAUSSIAN, share_variance, num_shares, reach)
    orders = [a for a in ORDERS if a <= 7]
    exact = np.array([divergence(law, shift, a) for a in orders])
    made = event(
        NoiseKind.DISCRETE_GAUSSIAN, variance**0.5 / shift, float(shift), num_shares=num_shares
    )
    bound = integer_noise_rdp(made, np.array(orders))
    assert (exact <= bound * (1 + 1e-9)).all()
    if share_variance >= 1 and num_shares >= 2 and variance >= 4:
        np.testing.assert_allclose(exact, bound, rtol=0.01)


@pytest.mark.parametrize("share_variance", [0.16, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("num_shares", [2, 3, 6])
def test_the_ratio_of_the_laws_varies_no_more_than_stated(
    share_variance: float, num_shares: int
) -> None:
    variance = share_variance * num_shares
    reach = int(8 + 5 * variance**0.5)
    law = log_sum_law(NoiseKind.DISCRETE_GAUSSIAN, share_variance, num_shares, reach)
    gaussian = log_law(NoiseKind.DISCRETE_GAUSSIAN, variance, reach)
    seen = float(np.ptp(law - gaussian))
    assert seen <= ratio_range(share_variance, num_shares) * (1 + 1e-9) + 1e-13
    # Two shares: near it. And below what the paper allows.
    if num_shares == 2:
        assert seen == pytest.approx(ratio_range(share_variance, 2), rel=0.03)
    assert ratio_range(share_variance, num_shares) < papers_tau(share_variance, num_shares)


def test_noise_that_is_hardly_there_has_no_bound() -> None:
    assert ratio_range(0.01, 2) == math.inf
    made = event(NoiseKind.DISCRETE_GAUSSIAN, 0.1, 1.0, num_shares=2)
    assert accountant("rdp").epsilon({made: 1}, DELTA) == math.inf


# The papers' formulas, written down independently.


def papers_tau(share_variance: float, num_shares: int) -> float:
    """Kairouz, Liu and Steinke 2021, arXiv:2102.06387, theorem 1."""
    terms = [-2 * math.pi**2 * share_variance * k / (k + 1) for k in range(1, num_shares)]
    return 10 * sum(math.exp(t) for t in terms)


def papers_loss(shares: NoiseShares, variance: float) -> float:
    """The same: min of sqrt(D^2 / V + 2 D1 tau / sqrt(V) + tau^2 d) and D / sqrt(V) + tau sqrt(d).

    D^2 is the squared norm after rounding, D1 its L1 norm, V the variance of the sum.
    """
    tau, d = papers_tau(variance / shares.num_shares, shares.num_shares), shares.dimension
    scaled = shares.norm_squared / variance
    second = scaled + 2 * shares.l1_norm * tau / math.sqrt(variance) + tau**2 * d
    return min(math.sqrt(second), math.sqrt(scaled) + tau * math.sqrt(d))


@pytest.mark.parametrize("share_std", [0.5, 0.8, 1.2, 2.0, 10.0])
@pytest.mark.parametrize(("num_shares", "dimension"), [(2, 64), (100, 1024), (1000, 2**20)])
def test_the_loss_is_the_papers_or_less(share_std: float, num_shares: int, dimension: int) -> None:
    variance = num_shares * share_std**2
    norm = math.sqrt(variance)
    shares = NoiseShares(
        dimension=dimension,
        scaled_norm=norm,
        norm_squared=rounded_norm_squared(norm, dimension),
        num_shares=num_shares,
    )
    ours, theirs = concentrated_loss(shares, variance), papers_loss(shares, variance)
    assert math.sqrt(shares.norm_squared / variance) <= ours <= theirs
    if share_std >= 2:
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(
    ("norm", "dimension"), [(1.0, 1), (10.0, 1024), (3.5, 2**16), (1000.0, 4096)]
)
def test_the_norm_after_rounding_is_the_papers(norm: float, dimension: int) -> None:
    # With beta = exp(-1/2): sqrt(2 log(1 / beta)) = 1.
    first = norm**2 + dimension / 4 + norm + math.sqrt(dimension) / 2
    assert rounded_norm_squared(norm, dimension) == math.floor(
        min(first, (norm + math.sqrt(dimension)) ** 2)
    )


# Whole epsilons.


def gaussian_epsilon(z: float, num_rounds: int) -> float:
    made = RdpAccountant().compose(GaussianDpEvent(z), num_rounds)
    return float(made.get_epsilon(DELTA))


@pytest.mark.parametrize("z", [1.0, 3.0, 8.0])
def test_fine_integers_cost_what_the_gaussian_costs(z: float) -> None:
    shares = {"dimension": 1024, "num_shares": 8}
    fine = [event(kind, z, 1e5, norm_squared=10**10, **shares) for kind in LAWS]
    rdp = accountant("rdp")
    exact = gaussian_epsilon(z, 10)
    discrete, skellam = (rdp.epsilon({made: 10}, DELTA) for made in fine)
    assert discrete == pytest.approx(exact, rel=1e-9)
    # The theorem is for whole orders: a little above, less so the higher the best order.
    assert exact < skellam < exact * (1.05 if z == 1 else 1.01)


@pytest.mark.parametrize("kind", LAWS)
def test_coarse_integers_cost_more_by_the_growth_of_the_norm(kind: NoiseKind) -> None:
    rdp, dimension = accountant("rdp"), 1024
    epsilons = []
    for norm in (4.0, 16.0, 64.0, 1024.0):
        squared = rounded_norm_squared(norm, dimension)
        made = event(kind, 4.0, norm, dimension, 8, squared)
        epsilons.append(rdp.epsilon({made: 10}, DELTA))
        # A Gaussian under the same inflated norm is a lower limit (and the discrete one's value
        # as long as a share's std is 2).
        inflated = gaussian_epsilon(4.0 * norm / math.sqrt(squared), 10)
        assert epsilons[-1] >= inflated * (1 - 1e-9)
        assert epsilons[-1] <= inflated * 1.06
    assert epsilons == sorted(epsilons, reverse=True)
    assert epsilons[-1] == pytest.approx(gaussian_epsilon(4.0, 10), rel=0.01)


@pytest.mark.parametrize("kind", LAWS)
def test_one_share_costs_what_its_own_noise_costs(kind: NoiseKind) -> None:
    made = event(kind, 4.0, 1000.0, 64, 16)
    alone = event(kind, 1.0, 1000.0, 64, 1)
    assert made.one_share() == alone
    assert accountant("rdp").epsilon({alone: 3}, DELTA) == pytest.approx(
        gaussian_epsilon(1.0, 3), rel=0.05
    )


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("name", ["pld", "simple"])
def test_other_accountants_refuse_integer_noise_and_name_rdp(kind: NoiseKind, name: str) -> None:
    with pytest.raises(AccountingError, match=f"cannot bound {kind} noise; set accountant=rdp"):
        accountant(name).epsilon({event(kind, 1.0, 10.0): 1}, DELTA)


@pytest.mark.parametrize("kind", LAWS)
def test_epsilon_falls_with_noise_and_rises_with_rounds(kind: NoiseKind) -> None:
    rdp = accountant("rdp")
    by_z = [rdp.epsilon({event(kind, z, 50.0, 256, 4): 5}, DELTA) for z in (0.5, 1, 2, 4, 8)]
    assert all(a > b for a, b in itertools.pairwise(by_z))
    by_rounds = [rdp.epsilon({event(kind, 2.0, 50.0, 256, 4): n}, DELTA) for n in (1, 2, 5, 50)]
    assert all(a < b for a, b in itertools.pairwise(by_rounds))


# Events.


def test_events_with_shares_are_written_and_read_and_others_stay_as_they_were() -> None:
    made = event(NoiseKind.SKELLAM, 1.5, 10.0, 64, 3)
    assert PrivacyEvent.from_json(made.to_json()) == made
    assert '"shares":{"dimension":64' in made.to_json()
    plain = PrivacyEvent(
        unit=PrivacyUnit.CLIENT,
        view=View.SERVER,
        relation=NeighboringRelation.ZERO_OUT,
        noise=NoiseKind.GAUSSIAN,
        noise_multiplier=1.5,
    )
    assert plain.to_json() == (
        '{"cohort_size":0,"noise":"gaussian","noise_multiplier":1.5,"population":0,'
        '"relation":"ZERO_OUT","sampling":"none","sampling_rate":1.0,"steps":1,"unit":"CLIENT",'
        '"view":"SERVER"}'
    )


@pytest.mark.parametrize(
    "change",
    [
        {"shares": None},
        {"noise": NoiseKind.GAUSSIAN},
        {"relation": NeighboringRelation.REPLACE_ONE},
        {"sampling": Sampling.POISSON, "sampling_rate": 0.1},
    ],
)
def test_events_that_no_bound_is_for_are_refused(change: dict[str, object]) -> None:
    from dataclasses import replace

    with pytest.raises(PrivacyError, match="noise="):
        replace(event(NoiseKind.SKELLAM, 1.0, 10.0), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["dimension", "scaled_norm", "norm_squared", "num_shares"])
def test_shares_of_nothing_are_refused(key: str) -> None:
    values = {"dimension": 1, "scaled_norm": 1.0, "norm_squared": 1, "num_shares": 1} | {key: 0}
    with pytest.raises(PrivacyError, match="> 0"):
        NoiseShares(**values)  # type: ignore[arg-type]
