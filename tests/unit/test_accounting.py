"""The accountants' contract: what they refuse, their edge cases, their silence and their speed."""

from __future__ import annotations

import itertools
import logging
import math
import time

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant, rdp_privacy_accountant

from fl_app import plugins
from fl_app.accounting import rdp as rdp_module
from fl_app.accounting.pld import Pld
from fl_app.accounting.rdp import Rdp
from fl_app.accounting.simple import Simple
from fl_app.errors import AccountingError, SettingsError
from fl_app.privacy import (
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)

PLD, RDP, SIMPLE = Pld(discretization=1e-4), Rdp(), Simple(formula="analytic")
CLASSIC = Simple(formula="classic")
BOTH = pytest.mark.parametrize("accountant", [PLD, RDP], ids=["pld", "rdp"])
ALL = pytest.mark.parametrize("accountant", [PLD, RDP, SIMPLE], ids=["pld", "rdp", "simple"])


def event(z: float = 1.0, **changes: object) -> PrivacyEvent:
    values: dict[str, object] = {
        "unit": PrivacyUnit.CLIENT,
        "view": View.OBSERVER,
        "relation": NeighboringRelation.ADD_OR_REMOVE_ONE,
        "noise": NoiseKind.GAUSSIAN,
        "noise_multiplier": z,
    }
    return PrivacyEvent(**(values | changes))


def poisson(z: float = 1.0, q: float = 0.1, **changes: object) -> PrivacyEvent:
    return event(z, sampling=Sampling.POISSON, sampling_rate=q, **changes)


FIXED = event(
    relation=NeighboringRelation.REPLACE_ONE,
    sampling=Sampling.FIXED_SIZE,
    sampling_rate=0.1,
    population=100,
    cohort_size=10,
)


@ALL
def test_no_events_cost_nothing(accountant):
    assert accountant.epsilon({}, 1e-5) == 0.0
    assert accountant.epsilon({event(): 0, event(0.0): 0}, 1e-5) == 0.0


@ALL
@pytest.mark.parametrize("without", [event(0.0), poisson(0.0)], ids=["unsampled", "poisson"])
def test_an_event_without_noise_has_no_guarantee(accountant, without):
    assert accountant.epsilon({without: 1}, 1e-5) == math.inf
    assert accountant.epsilon({poisson(): 5, without: 1}, 1e-5) == math.inf


@ALL
def test_steps_multiply_the_count(accountant):
    whole = accountant.epsilon({poisson(): 40}, 1e-5)
    assert accountant.epsilon({poisson(steps=8): 5}, 1e-5) == pytest.approx(whole, rel=1e-12)
    split = {poisson(steps=8): 3, poisson(steps=1): 16}
    assert accountant.epsilon(split, 1e-5) == pytest.approx(whole, rel=1e-12)


@BOTH
def test_different_events_compose(accountant):
    both = accountant.epsilon({poisson(1.0): 20, poisson(2.0): 20, event(8.0): 5}, 1e-5)
    parts = [{poisson(1.0): 20}, {poisson(2.0): 20}, {event(8.0): 5}]
    singles = [accountant.epsilon(part, 1e-5) for part in parts]
    assert max(singles) < both < sum(singles)


@BOTH
def test_unsampled_gaussians_compose_like_one_of_added_precision(accountant):
    both = accountant.epsilon({event(2.0): 3, event(1.0): 1}, 1e-5)
    one = accountant.epsilon({event((3 / 4 + 1) ** -0.5): 1}, 1e-5)
    assert both == pytest.approx(one, rel=1e-9)


@ALL
def test_replacing_a_unit_costs_what_half_the_noise_costs(accountant):
    replaced = accountant.epsilon({event(relation=NeighboringRelation.REPLACE_ONE): 10}, 1e-5)
    assert replaced == pytest.approx(accountant.epsilon({event(0.5): 10}, 1e-5), rel=1e-12)


@ALL
def test_zeroing_out_costs_what_leaving_out_costs(accountant):
    zeroed = accountant.epsilon({event(relation=NeighboringRelation.ZERO_OUT): 10}, 1e-5)
    assert zeroed == accountant.epsilon({event(): 10}, 1e-5)


@ALL
@pytest.mark.parametrize(
    "refused",
    [
        poisson(relation=NeighboringRelation.ZERO_OUT),
        poisson(relation=NeighboringRelation.REPLACE_ONE),
        poisson(noise=NoiseKind.LAPLACE, relation=NeighboringRelation.ZERO_OUT),
    ],
    ids=["poisson-zero-out", "poisson-replace", "laplace-poisson-zero-out"],
)
def test_what_cannot_be_bounded_is_refused(accountant, refused):
    assert accountant.refusal(refused) is not None
    with pytest.raises(AccountingError, match=f"accountant={accountant.kind}"):
        accountant.epsilon({refused: 1}, 1e-5)


@pytest.mark.parametrize("q", [1.0, 0.1])
def test_rdp_refuses_laplace_noise_and_names_the_ways_out(q):
    sampled = {"sampling": Sampling.POISSON, "sampling_rate": q} if q < 1 else {}
    laplace = event(noise=NoiseKind.LAPLACE, **sampled)
    assert PLD.refusal(laplace) is None
    reason = RDP.refusal(laplace)
    assert reason is not None
    assert "accountant=pld" in reason
    assert "accountant=simple" in reason


def test_pld_has_a_bound_for_laplace_noise_of_any_scale():
    for z in (1e-3, 1.4e-3, 1e-2, 1.0, 1e5):
        for changes in ({}, {"sampling": Sampling.POISSON, "sampling_rate": 0.5}):
            hardly = event(z, noise=NoiseKind.LAPLACE, **changes)
            epsilon = PLD.epsilon({hardly: 2}, 1e-5)
            assert 0 <= epsilon <= 2 / z * (1 + 1e-12)
            assert z > 0.01 or epsilon > 1 / z


def test_replacing_a_unit_costs_what_half_the_laplace_noise_costs():
    replaced = event(2.0, noise=NoiseKind.LAPLACE, relation=NeighboringRelation.REPLACE_ONE)
    half = event(1.0, noise=NoiseKind.LAPLACE)
    assert PLD.epsilon({replaced: 10}, 1e-5) == PLD.epsilon({half: 10}, 1e-5)
    assert PLD.epsilon({half: 10}, 1e-5) > PLD.epsilon(
        {event(2.0, noise=NoiseKind.LAPLACE): 10}, 1e-5
    )


def test_laplace_and_gaussian_steps_compose():
    laplace, plain = {event(10.0, noise=NoiseKind.LAPLACE): 50}, {event(5.0): 10}
    both = PLD.epsilon(laplace | plain, 1e-5)
    singles = [PLD.epsilon(part, 1e-5) for part in (laplace, plain)]
    assert max(singles) < both < sum(singles)


def test_fixed_size_is_for_rdp_and_pld_names_the_ways_out():
    assert RDP.refusal(FIXED) is None
    reason = PLD.refusal(FIXED)
    assert reason is not None
    assert "accountant=rdp" in reason
    assert "cohort.amplification=false" in reason


def test_fixed_size_under_another_relation_is_refused_by_rdp():
    wrong = event(sampling=Sampling.FIXED_SIZE, sampling_rate=0.1, population=100, cohort_size=10)
    assert RDP.refusal(wrong) is not None


def test_fixed_size_of_everybody_is_no_sampling():
    everybody = event(
        relation=NeighboringRelation.REPLACE_ONE,
        sampling=Sampling.FIXED_SIZE,
        population=10,
        cohort_size=10,
    )
    plain = event(relation=NeighboringRelation.REPLACE_ONE)
    assert RDP.epsilon({everybody: 7}, 1e-5) == RDP.epsilon({plain: 7}, 1e-5)


@ALL
def test_poisson_at_rate_one_is_no_sampling(accountant):
    everybody = event(sampling=Sampling.POISSON)
    assert accountant.epsilon({everybody: 7}, 1e-5) == accountant.epsilon({event(): 7}, 1e-5)


@ALL
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_delta_outside_zero_and_one_is_refused(accountant, delta):
    with pytest.raises(AccountingError, match="target_delta"):
        accountant.epsilon({event(): 1}, delta)


@ALL
def test_negative_counts_are_refused(accountant):
    with pytest.raises(AccountingError, match="count=-1"):
        accountant.epsilon({event(): -1}, 1e-5)


@ALL
@pytest.mark.parametrize(
    "other",
    [event(unit=PrivacyUnit.RECORD), event(relation=NeighboringRelation.REPLACE_ONE)],
    ids=["unit", "relation"],
)
def test_units_and_relations_do_not_mix(accountant, other):
    with pytest.raises(AccountingError, match="one unit and relation"):
        accountant.epsilon({event(): 1, other: 1}, 1e-5)


def test_pld_refuses_a_delta_below_its_arithmetic():
    with pytest.raises(AccountingError, match="accountant=rdp"):
        PLD.epsilon({event(): 1}, 1e-13)
    assert RDP.epsilon({event(): 1}, 1e-13) > 0


@pytest.mark.parametrize("bad", [0.0, -1e-4, math.inf, math.nan])
def test_the_grid_must_be_positive(bad):
    with pytest.raises(SettingsError, match=r"accountant\.discretization"):
        Pld(discretization=bad)


@pytest.mark.parametrize("z", [0.01, 0.05])
def test_pld_bounds_its_memory_where_hardly_any_noise_is_left(z):
    # On the usual grid these would be 1e8 points and more.
    for hardly in (event(z), poisson(z)):
        epsilon = PLD.epsilon({hardly: 1000}, 1e-5)
        assert 0.5 / z**2 < epsilon < math.inf


def test_pld_has_no_gap_where_the_exponential_underflows():
    # Exact epsilons 710 to 730: the library's own search answers inf for some of them.
    for z in (0.02973, 0.02965, 0.02955, 0.02945, 0.02930):
        assert 0.5 / z**2 < PLD.epsilon({event(z): 1}, 1e-5) < 800


@BOTH
def test_so_much_noise_that_nothing_can_be_told_costs_nothing_or_almost(accountant):
    assert 0.0 <= accountant.epsilon({poisson(1e4, 0.001): 10}, 1e-5) < 0.01


@pytest.mark.parametrize("round_off", [0.0, -1e-17])
def test_rdp_does_not_take_round_off_for_no_loss_at_all(round_off, monkeypatch):
    def lost(self, *args, **kwargs):
        self._rdp += round_off

    monkeypatch.setattr(rdp_privacy_accountant.RdpAccountant, "compose", lost)
    rdp_module._step_rdp.cache_clear()
    assert RDP.epsilon({poisson(1e4, 1e-6): 10**8}, 1e-6) > 0
    rdp_module._step_rdp.cache_clear()


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def absl_records():
    handler, logger = _Records(), logging.getLogger("absl")
    logger.addHandler(handler)
    rdp_module._step_rdp.cache_clear()
    yield handler.texts
    logger.removeHandler(handler)


NOISY = poisson(1.0, 0.5)
"""An event for which the library leaves out some fractional orders, with a warning each."""


def test_the_library_warns_about_single_orders_when_used_plainly(absl_records):
    sampled = dp_accounting.PoissonSampledDpEvent(
        NOISY.sampling_rate, dp_accounting.GaussianDpEvent(NOISY.noise_multiplier)
    )
    RdpAccountant().compose(sampled)
    assert any("failed to converge" in text for text in absl_records)


def test_warnings_about_single_orders_are_silenced(absl_records):
    RDP.epsilon({NOISY: 3}, 1e-5)
    assert absl_records == []


def test_other_warnings_pass_during_and_after(absl_records, monkeypatch):
    compose = RdpAccountant.compose

    def outspoken(self, *args, **kwargs):
        logging.getLogger("absl").warning("something else")
        return compose(self, *args, **kwargs)

    monkeypatch.setattr(rdp_privacy_accountant.RdpAccountant, "compose", outspoken)
    RDP.epsilon({NOISY: 3}, 1e-5)
    logging.getLogger("absl").warning("_compute_log_a_frac failed to converge: after the call")
    assert absl_records == [
        "something else",
        "_compute_log_a_frac failed to converge: after the call",
    ]


def test_one_round_more_costs_a_small_part_of_a_plain_evaluation():
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    started = time.perf_counter()
    plain = PLDAccountant()
    plain.compose(sampled, 100)
    plain.get_epsilon(1e-5)
    baseline = time.perf_counter() - started
    PLD.epsilon({poisson(): 100}, 1e-5)
    started = time.perf_counter()
    for count in range(101, 106):
        PLD.epsilon({poisson(): count}, 1e-5)
    ratio = baseline / ((time.perf_counter() - started) / 5)
    assert ratio > 5


@pytest.mark.parametrize("kind", ["pld", "rdp", "simple"])
def test_the_shipped_configuration_builds_the_accountant(kind):
    from fl_app.overrides import CONF_DIR

    yaml = pytest.importorskip("yaml")
    values = yaml.safe_load((CONF_DIR / "accountant" / f"{kind}.yaml").read_text())
    assert plugins.build("accountant", values).kind == kind


# Basic composition.


def test_simple_splits_delta_over_all_gaussian_steps_and_adds_the_epsilons():
    single = SIMPLE.epsilon({event(30.0): 1}, 1e-5 / 20)
    assert SIMPLE.epsilon({event(30.0): 20}, 1e-5) == pytest.approx(20 * single, rel=1e-12)
    assert SIMPLE.epsilon({event(30.0, steps=4): 5}, 1e-5) == pytest.approx(20 * single, rel=1e-12)
    first = SIMPLE.epsilon({event(30.0): 1}, 1e-5 / 4)
    other = SIMPLE.epsilon({event(9.0): 1}, 1e-5 / 4)
    mixed = SIMPLE.epsilon({event(30.0): 1, event(9.0): 3}, 1e-5)
    assert mixed == pytest.approx(first + 3 * other, rel=1e-12)


def test_simple_adds_laplace_epsilons_and_gives_them_no_share_of_delta():
    laplace = event(10.0, noise=NoiseKind.LAPLACE)
    assert SIMPLE.epsilon({laplace: 100}, 1e-5) == pytest.approx(10.0, rel=1e-12)
    gaussian = SIMPLE.epsilon({event(30.0): 20}, 1e-5)
    both = SIMPLE.epsilon({event(30.0): 20, laplace: 100}, 1e-5)
    assert both == pytest.approx(gaussian + 10.0, rel=1e-12)


def test_simple_takes_no_credit_for_sampling():
    assert SIMPLE.epsilon({poisson(30.0): 7}, 1e-5) == SIMPLE.epsilon({event(30.0): 7}, 1e-5)
    replaced = event(1.0, relation=NeighboringRelation.REPLACE_ONE)
    assert SIMPLE.epsilon({FIXED: 7}, 1e-5) == SIMPLE.epsilon({replaced: 7}, 1e-5)


@pytest.mark.parametrize("events", [{event(3.0): 50}, {poisson(1.0): 50}, {event(0.2): 3}], ids=str)
def test_simple_is_never_below_the_tight_bound(events):
    assert SIMPLE.epsilon(events, 1e-5) > PLD.epsilon(events, 1e-5)


def test_simple_needs_no_care_at_the_ends():
    assert SIMPLE.epsilon({event(1e5): 1}, 1e-2) == 0.0
    assert 4e3 < SIMPLE.epsilon({event(1e-2): 1}, 1e-300) < 1e4
    assert 0.5e6 < SIMPLE.epsilon({event(1e-3): 1}, 1e-5) < 0.6e6


def test_the_classic_formula_is_a_bound_below_epsilon_one_a_step_only():
    below, above = event(5.0), event(0.5)
    for some in (below, above):
        claim = math.sqrt(2 * math.log(1.25e5)) / some.noise_multiplier
        assert CLASSIC.epsilon({some: 1}, 1e-5) == pytest.approx(claim, rel=1e-12)
    assert CLASSIC.caveat({below: 1}, 1e-5) is None
    assert CLASSIC.epsilon({below: 1}, 1e-5) > SIMPLE.epsilon({below: 1}, 1e-5)
    assert "NOT a valid bound" in str(CLASSIC.caveat({above: 1}, 1e-5))
    # And it is right to say so: with little noise the claim lies below the exact curve.
    tiny = event(0.05)
    assert CLASSIC.epsilon({tiny: 1}, 1e-5) < 0.5 * SIMPLE.epsilon({tiny: 1}, 1e-5)


def test_the_classic_formula_is_marked_from_epsilon_one_on():
    exactly_one = math.sqrt(2 * math.log(1.25e5))
    assert CLASSIC.caveat({event(exactly_one * (1 - 1e-12)): 1}, 1e-5) is not None
    assert CLASSIC.caveat({event(exactly_one * (1 + 1e-12)): 1}, 1e-5) is None
    # A step's epsilon counts, at its share of delta: more steps, less delta for each.
    assert CLASSIC.caveat({event(exactly_one * 1.01): 10}, 1e-5) is not None
    assert CLASSIC.caveat({event(0.1, noise=NoiseKind.LAPLACE): 10}, 1e-5) is None
    assert SIMPLE.caveat({event(0.1): 10}, 1e-5) is None
    assert PLD.caveat({event(0.1): 10}, 1e-5) is None


def test_an_unknown_formula_is_refused():
    with pytest.raises(SettingsError, match=r"accountant\.formula=clasic: .*did you mean classic"):
        Simple(formula="clasic")


LAPLACE = {"noise": NoiseKind.LAPLACE}
MIXED = {
    "once after twice": [(poisson(0.9), 2), (poisson(1.8), 1)],
    "Laplace": [(poisson(2.0, 0.2, **LAPLACE), 3), (poisson(1.1), 1), (event(6.0, **LAPLACE), 2)],
    "with unsampled ones": [(poisson(0.8, 0.05), 4), (event(5.0), 3), (poisson(1.3), 1)],
    "all kinds of counts": [(poisson(z), n) for z, n in ((2, 5), (1.5, 1), (1, 4), (0.9, 1))],
}


@pytest.mark.parametrize("name", MIXED)
def test_pld_composes_steps_that_come_once_and_several_times_in_any_order(name):
    """As a schedule does whose levels repeat, and a run of one that was killed and goes on."""
    library = PLDAccountant(value_discretization_interval=1e-4)
    for step, count in MIXED[name]:
        one = (
            dp_accounting.LaplaceDpEvent(step.noise_multiplier)
            if step.noise is NoiseKind.LAPLACE
            else dp_accounting.GaussianDpEvent(step.noise_multiplier)
        )
        sampled = step.sampling is Sampling.POISSON
        one = dp_accounting.PoissonSampledDpEvent(step.sampling_rate, one) if sampled else one
        library.compose(one, count)
    expected = library.get_epsilon(1e-5)
    for order in itertools.permutations(MIXED[name]):
        found = PLD.epsilon(dict(order), 1e-5)
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-3)
        assert found >= expected * (1 - 1e-3)


def test_what_pld_cannot_compute_exactly_costs_no_more_than_without_sampling():
    huge, always = poisson(0.5, 0.9375), event(0.5)
    assert PLD.epsilon({huge: 343}, 0.0039) <= PLD.epsilon({always: 343}, 0.0039) * (1 + 1e-9)
