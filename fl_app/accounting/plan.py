"""What a run will cost and what it has cost: calibrated noise, the statement, the budget gate.

The plan turns `Settings` into the events that every round charges, and charged events into the rows
of the privacy statement (rules 1, 8, 9 and 10 of the design). The ledger counts rounds; the plan
knows how many of them one client can have been asked in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from fl_app import checks, noise_schedule
from fl_app.accounting import participation, rdp
from fl_app.accounting.calibration import calibrate
from fl_app.accounting.statement import NO_NOISE, SEEDED, Row, round_event, statement_rows
from fl_app.noise_schedule import NoiseSchedule
from fl_app.plugins import Accountant, Cohort, Mechanism
from fl_app.privacy import Guarantee, NoiseKind, Placement, PrivacyEvent, PrivacyUnit, View
from fl_app.settings import Settings

VALIDATION = (
    "run.evaluate_on=validation: accuracy and loss are exact on rows of the training clients that "
    "are kept out of training, and no guarantee covers those rows; do not publish such a run if "
    "they are private"
)
_WEAK = 20.0
_RARE = 0.01
_Repeats = frozenset[tuple[PrivacyEvent, int]]
_NO_REPEATS: Mapping[PrivacyEvent, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan:
    """The privacy of one run: what each round charges, what that adds up to, what is allowed.

    Guarantee: `within_budget` is True only if the charge of one more round keeps the epsilon of the
        bound guarantee within the target, by a valid upper bound on it (or by the claim of an
        accountant whose `caveat` takes the epsilon out of every row).

    Attributes:
        accountant: the run's own accountant.
        cohort: the sampler, for the most rounds that one client can be asked in.
        target_epsilon: the budget, None without one.
        target_delta: delta of every row.
        num_rounds: the rounds of the whole run.
        mechanism_noise_multiplier: client-level z, None without client-level privacy; with a noise
            schedule the scale: the round's is that times its level.
        training_noise_multiplier: record-level z, None without record-level privacy; likewise.
        schedules: the noise schedule of each private unit.
        events: what a round of level 1 is charged, one per private unit (`events_of`: a round).
        rows: the statement; the first row of the bound unit is the one that the target binds.
        bound_unit: the unit that the target binds, None if nothing is private.
        seeded_noise: True: no row has an epsilon.
        population: N.
        expected_cohort: the public constant that a sum over a cohort is divided by.
        mechanism_clipping_norm: client-level C, None without.
        training_clipping_norm: record-level C, None without.
        expected_batch: what a noised gradient sum is divided by: batch rate x nominal rows, times
            the expected cohort where the server adds the noise. None without record-level privacy.
        mechanism: the client-level mechanism, every value filled in.
        units_noised_by_layer: the units whose noise differs from layer to layer: their z C is what
            all layers together cost as much as.
        mechanism_constants: values of the mechanism that the plan filled in, by key.
        mechanism_facts: what the mechanism says about itself, by label.
        warnings: what the reader should know before trusting a row.
    """

    accountant: Accountant
    cohort: Cohort
    target_epsilon: float | None
    target_delta: float
    num_rounds: int
    mechanism_noise_multiplier: float | None
    training_noise_multiplier: float | None
    schedules: Mapping[PrivacyUnit, NoiseSchedule]
    events: tuple[PrivacyEvent, ...]
    rows: tuple[Row, ...]
    bound_unit: PrivacyUnit | None
    seeded_noise: bool
    population: int
    expected_cohort: float
    mechanism_clipping_norm: float | None
    training_clipping_norm: float | None
    expected_batch: float | None
    mechanism: Mechanism
    units_noised_by_layer: frozenset[PrivacyUnit]
    mechanism_constants: Mapping[str, float]
    mechanism_facts: Mapping[str, str]
    warnings: tuple[str, ...]
    _affordable: dict[_Repeats, int] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @property
    def bound_event(self) -> PrivacyEvent | None:
        """The event (at level 1) whose composition the target binds, None if nothing is private."""
        row = self._bound_row
        return None if row is None else row.event

    @property
    def epsilon_of(self) -> str | None:
        """Name of the guarantee that the target binds, e.g. ``RECORD against SERVER``."""
        row = self._bound_row
        return None if row is None else f"{row.unit} against {row.view}"

    def events_of(self, round: int) -> tuple[PrivacyEvent, ...]:
        """Returns what `round` is charged, one per private unit."""
        return tuple(participation.in_round(e, self.schedules[e.unit], round) for e in self.events)

    def noise_multiplier(self, unit: PrivacyUnit, round: int) -> float | None:
        """Returns the z of `unit` in `round`, None if it is not private."""
        client = unit is PrivacyUnit.CLIENT
        scale = self.mechanism_noise_multiplier if client else self.training_noise_multiplier
        return None if scale is None else scale * noise_schedule.level(self.schedules[unit], round)

    def charges(self, num_rounds: int) -> dict[PrivacyEvent, int]:
        """Returns how often rounds 1 to `num_rounds` charge each event."""
        return {
            event: count
            for scale in self.events
            for event, count in self._planned(scale, num_rounds).items()
        }

    def guarantees(self, num_rounds: int) -> tuple[Guarantee, ...]:
        """Returns the statement after rounds 1 to `num_rounds`."""
        return self.guarantees_of(self.charges(num_rounds))

    def guarantees_of(
        self,
        counts: Mapping[PrivacyEvent, int],
        repeats: Mapping[PrivacyEvent, int] = _NO_REPEATS,
    ) -> tuple[Guarantee, ...]:
        """Returns the statement after the charged rounds that a ledger counts.

        Args:
            counts: charged rounds by event, as `Ledger.counts` gives them.
            repeats: how many of them charged a round again, as `Ledger.repeats` gives them.
        """
        return tuple(self._guarantee(row, counts, repeats) for row in self.rows)

    def epsilon_after(
        self,
        counts: Mapping[PrivacyEvent, int],
        repeats: Mapping[PrivacyEvent, int] = _NO_REPEATS,
    ) -> float | None:
        """Returns the spent epsilon of the bound guarantee; None if there is no guarantee.

        Args:
            counts: charged rounds by event, as `Ledger.counts` gives them.
            repeats: how many of them charged a round again, as `Ledger.repeats` gives them.
        """
        row = self._bound_row
        return None if row is None else self._guarantee(row, counts, repeats).epsilon

    def within_budget(
        self,
        counts: Mapping[PrivacyEvent, int],
        repeats: Mapping[PrivacyEvent, int] = _NO_REPEATS,
        *,
        round: int | None = None,
        again: bool = False,
    ) -> bool:
        """Returns whether one more round stays within the target; True without a target.

        Cheap bounds may accept: the planned epsilon while no more is charged than the whole run, or
        the affordable part of it, and RDP. Only the run's own accountant refuses.

        Args:
            counts: the rounds charged so far by event, as `Ledger.counts` gives them.
            repeats: how many of them charged a round again, as `Ledger.repeats` gives them.
            round: the round to come; None: the next one after those charged.
            again: True if the round to come has been charged before.
        """
        event = self.bound_event
        if self.target_epsilon is None or event is None:
            return True
        if round is None:
            charged = [n - repeats.get(e, 0) for e, n in counts.items() if e.unit is event.unit]
            round = sum(charged) + (0 if again else 1)
        coming = participation.in_round(event, self.schedules[event.unit], round)
        after = {**counts, coming: counts.get(coming, 0) + 1}
        if again:
            repeats = {**repeats, coming: repeats.get(coming, 0) + 1}
        if self._as_planned(after, repeats, event):
            return True
        composed = self._composed(after, event, repeats)
        own = {e: n for e, n in repeats.items() if n and e.unit is event.unit}
        affordable = self._composed_again(event, self.affordable_rounds(own), own)
        return (
            _contains(affordable, composed)
            or self._rdp_accepts(composed)
            or self._epsilon(self.accountant, composed) <= self.target_epsilon
        )

    def affordable_rounds(self, repeats: Mapping[PrivacyEvent, int] = _NO_REPEATS) -> int:
        """Returns how many of the planned rounds the target allows; all without a target.

        Searched for once: a tight accountant takes too long to be asked before every round.

        Args:
            repeats: rounds of the bound unit that are charged again besides, by event.
        """
        key = frozenset(repeats.items())
        if key not in self._affordable:
            self._affordable[key] = self._count_affordable_rounds(repeats)
        return self._affordable[key]

    def _count_affordable_rounds(self, repeats: Mapping[PrivacyEvent, int]) -> int:
        event, target = self.bound_event, self.target_epsilon
        if event is None or target is None:
            return self.num_rounds

        def fits(num_rounds: int) -> bool:
            composed = self._composed_again(event, num_rounds, repeats)
            return self._epsilon(self.accountant, composed) <= target

        if fits(self.num_rounds):
            return self.num_rounds
        low, high = 0, self.num_rounds
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def bound_noise(
        self, round: int = 1, client_norm: float | None = None
    ) -> tuple[float | None, float]:
        """Returns C of the bound unit and the noise std on the sum that C bounds (0: none).

        CLIENT: of the sum over a cohort of the expected size; RECORD: of one step's gradient sum.

        Args:
            round: from 1.
            client_norm: client-level C of that round; None: the configured one.
        """
        if self.bound_unit is PrivacyUnit.CLIENT:
            norm = self.mechanism_clipping_norm if client_norm is None else client_norm
            return norm, self._std_of_sum(round, norm) or 0.0
        norm, z = self.training_clipping_norm, self.noise_multiplier(PrivacyUnit.RECORD, round)
        std = self._std_per_scale(PrivacyUnit.RECORD)
        return norm, 0.0 if norm is None or z is None else norm * z * std

    @property
    def noise_std_of_sum(self) -> float | None:
        """Std of the client-level noise on the sum over a cohort of the expected size, in round 1.

        LOCAL: sqrt(cohort) independent noises of z C. DISTRIBUTED: cohort shares, of which the
        fewest honest have z C. None without client-level privacy.
        """
        return self._std_of_sum(1, self.mechanism_clipping_norm)

    def _std_of_sum(self, round: int, norm: float | None) -> float | None:
        z = self.noise_multiplier(PrivacyUnit.CLIENT, round)
        if norm is None or z is None:
            return None
        std = self.mechanism.update_multiplier(z) * norm * self._std_per_scale(PrivacyUnit.CLIENT)
        if self.mechanism.placement is Placement.CENTRAL:
            return std
        shares = [event.shares.num_shares for event in self.events if event.shares is not None]
        return std * math.sqrt(self.expected_cohort / (shares[0] if shares else 1))

    @property
    def noise_std_of_mean(self) -> float | None:
        """The same after dividing by the expected cohort: what the model feels."""
        std = self.noise_std_of_sum
        return None if std is None else std / self.expected_cohort

    def signal_to_noise(self, num_parameters: int) -> float | None:
        """Returns C over the norm of the noise on the mean (client level), or None without noise.

        1: the noise is as long as the longest mean update. Record level: of one step of one client,
        or of the cohort where the server adds the noise.
        The norm is the one that C bounds: L2, or L1 for Laplace noise, whose expected L1 norm is
        scale x P. None, too, where the noise differs from layer to layer.
        """
        unit, norm, std = PrivacyUnit.CLIENT, self.mechanism_clipping_norm, self.noise_std_of_mean
        if std is None and self.training_clipping_norm is not None:
            unit, norm, std = (
                PrivacyUnit.RECORD,
                self.training_clipping_norm,
                self._step_noise_std(),
            )
        if norm is None or not std or unit in self.units_noised_by_layer:
            return None
        if self._noise_kind(unit) is NoiseKind.LAPLACE:
            return norm / (std / NoiseKind.LAPLACE.std_per_scale * num_parameters)
        return norm / (std * math.sqrt(num_parameters))

    def summary(self) -> dict[str, str]:
        """Returns the public facts of the plan for people, by label."""
        facts = {
            "accountant": self.accountant.kind,
            "clients in the registry": str(self.population),
        }
        if (std := self.noise_std_of_sum) is not None:
            facts["client-level noise multiplier"] = self._shown_multiplier(PrivacyUnit.CLIENT)
            facts["client-level clipping norm"] = f"{self.mechanism_clipping_norm:g}"
            facts["client-level noise"] = self._law(PrivacyUnit.CLIENT)
            facts |= self._adaptive_facts()
            facts["noise std of sum"] = f"{std:.6g}"
            facts["noise std of mean"] = f"{self.noise_std_of_mean:.6g}"
            facts["expected cohort"] = f"{self.expected_cohort:g}"
            facts.update(self.mechanism_facts)
        if self.training_noise_multiplier is not None:
            facts["record-level noise multiplier"] = self._shown_multiplier(PrivacyUnit.RECORD)
            facts["record-level clipping norm"] = f"{self.training_clipping_norm:g}"
            facts["record-level noise"] = self._law(PrivacyUnit.RECORD)
        stated = self.epsilon_of is not None and not self.seeded_noise
        if self.target_epsilon is not None and stated:
            facts["budget"] = (
                f"epsilon {self.target_epsilon:g} at delta {self.target_delta:g} over "
                f"{self.num_rounds} rounds, {self.epsilon_of}"
            )
        return facts

    def to_json(self, num_parameters: int | None = None) -> dict[str, Any]:
        """Returns the plan as JSON values: no infinities; no guarantee is ``"epsilon": null``.

        Args:
            num_parameters: P; with it the signal to noise is given too.
        """
        rows = self.guarantees(self.num_rounds)
        ratio = None if num_parameters is None else self.signal_to_noise(num_parameters)
        return {
            "private": any(row.private for row in rows),
            "target_epsilon": self.target_epsilon,
            "target_delta": self.target_delta,
            "epsilon_of": self.epsilon_of,
            "accountant": self.accountant.kind,
            "num_rounds": self.num_rounds,
            "population": self.population,
            "expected_cohort": self.expected_cohort,
            "mechanism_noise_multiplier": self.mechanism_noise_multiplier,
            "training_noise_multiplier": self.training_noise_multiplier,
            "mechanism_constants": dict(self.mechanism_constants),
            "mechanism_facts": dict(self.mechanism_facts),
            "round_noise_multipliers": {
                unit.value: [self.noise_multiplier(unit, r) for r in range(1, self.num_rounds + 1)]
                for unit, schedule in self.schedules.items()
                if schedule != noise_schedule.CONSTANT
            },
            "noise_std_of_sum": self.noise_std_of_sum,
            "noise_std_of_mean": self.noise_std_of_mean,
            "signal_to_noise": ratio,
            "seeded_noise": self.seeded_noise,
            "guarantees": [asdict(row) | {"private": row.private} for row in rows],
            "warnings": list(self.warnings),
        }

    @property
    def _bound_row(self) -> Row | None:
        if self.bound_unit is None:
            return None
        candidates = (r for r in self.rows if r.unit is self.bound_unit and r.event is not None)
        return next(candidates, None)

    def _as_planned(
        self,
        counts: Mapping[PrivacyEvent, int],
        repeats: Mapping[PrivacyEvent, int],
        event: PrivacyEvent,
    ) -> bool:
        """Returns True if the whole run is within the target and `counts` is no more than a part.

        A part by rounds: then every client has some of the rounds that it has in the whole run. Or
        by what is composed, where a kill has made a round charge again.
        """
        target = math.inf if self.target_epsilon is None else self.target_epsilon
        planned = self._planned(event, self.num_rounds)
        charged = {e: count for e, count in counts.items() if e.unit is event.unit}
        first_only = not any(repeats.get(e) for e in charged)
        whole = self._composed(planned, event, _NO_REPEATS)
        if not (first_only and _contains(planned, charged)) and not _contains(
            whole, self._composed(counts, event, repeats)
        ):
            return False
        return self._epsilon(self.accountant, whole) <= target

    def _rdp_accepts(self, composed: Mapping[PrivacyEvent, int]) -> bool:
        """Returns True if RDP, which costs little, already shows that `composed` is allowed."""
        if not self.accountant.rdp_may_accept or self.target_epsilon is None:
            return False
        loose = rdp.Rdp()
        bounded = all(loose.refusal(e) is None for e in composed)
        return bounded and self._epsilon(loose, composed) <= self.target_epsilon

    def _guarantee(
        self, row: Row, counts: Mapping[PrivacyEvent, int], repeats: Mapping[PrivacyEvent, int]
    ) -> Guarantee:
        epsilon, assumptions = math.inf, row.assumptions
        if self.seeded_noise:
            assumptions = (SEEDED,)
        elif row.event is not None:
            composed = self._composed(counts, row.event, repeats)
            if row.one_share:
                composed = {event.one_share(): count for event, count in composed.items()}
            epsilon = self._epsilon(self.accountant, composed)
            if row.event.noise_multiplier == 0:
                assumptions = (NO_NOISE,)
            elif caveat := self.accountant.caveat(composed, self.target_delta):
                epsilon, assumptions = math.inf, (caveat,)
        finite = math.isfinite(epsilon)
        return Guarantee(
            unit=row.unit,
            view=row.view,
            relation=row.relation,
            epsilon=epsilon if finite else None,
            delta=self.target_delta,
            accountant=self.accountant.kind if finite else "",
            assumptions=assumptions,
        )

    def _composed(
        self,
        counts: Mapping[PrivacyEvent, int],
        event: PrivacyEvent,
        repeats: Mapping[PrivacyEvent, int],
    ) -> dict[PrivacyEvent, int]:
        """Returns how often each charged event of `event`'s unit is composed for one unit."""
        return participation.composed(
            counts, repeats, event, self.schedules[event.unit], self.cohort, self.population
        )

    def _composed_again(
        self, event: PrivacyEvent, num_rounds: int, repeats: Mapping[PrivacyEvent, int]
    ) -> dict[PrivacyEvent, int]:
        """Returns what is composed of the first rounds of the plan, each charged once more besides.

        That is, as often as `repeats` (of the event's unit) says.
        """
        counts = Counter(self._planned(event, num_rounds))
        counts.update(repeats)
        return self._composed(counts, event, repeats)

    def _planned(self, event: PrivacyEvent, num_rounds: int) -> Mapping[PrivacyEvent, int]:
        """Returns how often rounds 1 to `num_rounds` charge each event of `event`'s unit."""
        return participation.in_rounds(event, self.schedules[event.unit], num_rounds)

    def _epsilon(self, accountant: Accountant, composed: Mapping[PrivacyEvent, int]) -> float:
        return accountant.epsilon(composed, self.target_delta)

    def _noise_kind(self, unit: PrivacyUnit) -> NoiseKind:
        kinds = [event.noise for event in self.events if event.unit is unit]
        return kinds[0] if kinds else NoiseKind.GAUSSIAN

    def _std_per_scale(self, unit: PrivacyUnit) -> float:
        """Returns the std of `unit`'s noise of scale 1."""
        return self._noise_kind(unit).std_per_scale

    def _adaptive_facts(self) -> dict[str, str]:
        z = self.noise_multiplier(PrivacyUnit.CLIENT, 1)
        if not self.mechanism.num_counts or z is None:
            return {}
        std: float = getattr(self.mechanism, "count_noise_std", 0.0)
        return {
            "adaptive clipping": (
                f"towards the {getattr(self.mechanism, 'target_quantile', None):g} quantile of the "
                f"updates' norms; noise {std:.6g} on the count, "
                f"multiplier {self.mechanism.update_multiplier(z):.6g} left for the updates"
            )
        }

    def _shown_multiplier(self, unit: PrivacyUnit) -> str:
        """Returns z of `unit` in words; with a schedule those of the first and the last round."""
        first, last = (self.noise_multiplier(unit, r) for r in (1, self.num_rounds))
        if len(set(noise_schedule.levels(self.schedules[unit], self.num_rounds))) == 1:
            return f"{first:.6g}"
        return f"{first:.6g} in round 1, {last:.6g} in the last"

    def _law(self, unit: PrivacyUnit) -> str:
        """Returns what `unit`'s noise is and what its multiplier means."""
        kind = self._noise_kind(unit)
        whole = "" if kind is NoiseKind.GAUSSIAN else " of whole numbers, the fewest honest shares'"
        law = f"{kind}{whole}, std = multiplier x L2 clipping norm"
        if kind is NoiseKind.LAPLACE:
            law = "laplace, scale = multiplier x L1 clipping norm"
        if unit in self.units_noised_by_layer:
            law += "; spread over the layers, whose different noises together cost as much"
        views = {event.view for event in self.events if event.unit is unit}
        if unit is PrivacyUnit.RECORD and View.OBSERVER in views:
            law += "; added once by the server to the sum over the cohort"
        return law

    def _step_noise_std(self) -> float | None:
        """Std of the record-level noise on one step's mean gradient."""
        if not self.expected_batch or self.training_noise_multiplier is None:
            return None
        return (
            self.training_noise_multiplier
            * (self.training_clipping_norm or 0.0)
            * self._std_per_scale(PrivacyUnit.RECORD)
            / (self.expected_batch)
        )


def make_plan(
    settings: Settings,
    nominal_rows: int | None = None,
    *,
    simulated: bool = True,
    num_parameters: int | None = None,
) -> PrivacyPlan:
    """Returns the plan of a run; calibrates the bound unit's noise if its multiplier is null.

    Args:
        settings: the checked settings.
        nominal_rows: public row count of one client (record level), if it is known.
        simulated: False if every node draws its batches, and the server its cohorts, from the
            operating system; True states the assumption that simulations need.
        num_parameters: P of the model; needed for integer noise only.

    Raises:
        AccountingError: the target cannot be reached.
        SettingsError: integer noise that P is not known for, or that does not fit its integers.
    """
    owners = {PrivacyUnit.CLIENT: settings.mechanism, PrivacyUnit.RECORD: settings.training}
    schedules = {unit: noise_schedule.of(owner) for unit, owner in owners.items()}
    mechanism_z, training_z = (
        _noise_multiplier(settings, unit, schedules[unit], num_parameters) for unit in owners
    )
    mechanism, facts = _mechanism_of_run(settings, mechanism_z, num_parameters)
    rows = statement_rows(
        settings, mechanism_z, training_z, simulated=simulated, num_parameters=num_parameters
    )
    population = settings.federation.population
    batch_rate = getattr(settings.training, "batch_rate", None)
    summed = 1.0 if settings.training.releaser is None else settings.cohort_size.expected
    known = batch_rate is not None and nominal_rows is not None and training_z is not None
    plan = PrivacyPlan(
        accountant=settings.accountant,
        cohort=settings.cohort,
        target_epsilon=settings.privacy.target_epsilon,
        target_delta=settings.privacy.target_delta,
        num_rounds=settings.run.num_rounds,
        mechanism_noise_multiplier=mechanism_z,
        training_noise_multiplier=training_z,
        schedules=schedules,
        events=tuple(dict.fromkeys(row.event for row in rows if row.event is not None)),
        rows=rows,
        bound_unit=settings.bound_unit,
        seeded_noise=settings.run.seeded_noise,
        population=population,
        expected_cohort=settings.cohort.expected_size(population),
        mechanism_clipping_norm=_clipping_norm(settings.mechanism, mechanism_z),
        training_clipping_norm=_clipping_norm(settings.training, training_z),
        expected_batch=batch_rate * nominal_rows * summed if known else None,  # type: ignore[operator]
        mechanism=mechanism,
        units_noised_by_layer=frozenset(
            unit for unit, owner in owners.items() if getattr(owner, "layer_noise", None)
        ),
        mechanism_constants=_filled_in(settings.mechanism, mechanism),
        mechanism_facts=facts,
        warnings=(
            *_warnings(settings, nominal_rows, mechanism_z, training_z),
            *_caveats(settings, rows, schedules),
            *_small_cohorts(settings, mechanism),
        ),
    )
    warned = replace(plan, warnings=(*plan.warnings, *_weak_rows(plan)))
    warned._affordable.update(plan._affordable)  # searched for above; warnings do not change it
    return warned


def _weak_rows(plan: PrivacyPlan) -> list[str]:
    """Returns a warning for each row whose epsilon says little to a reader of the field.

    Ponomareva et al. 2023 (arXiv:2303.00654, section 5.2) read an epsilon of at most 1 as strong
    protection, of at most 10 as reasonable, and above as weak or none.
    """
    found = []
    for row in plan.guarantees(plan.affordable_rounds()):
        if row.epsilon is not None and row.epsilon > _WEAK:
            found.append(
                f"{row.name}: epsilon {row.shown_epsilon(3)} at delta {row.delta:g} protects "
                "hardly: the field reads 1 as strong, up to 10 as reasonable, more as weak; raise "
                "the noise multiplier, or lower privacy.target_epsilon or run.num_rounds"
            )
    return found


def _small_cohorts(settings: Settings, mechanism: Mechanism) -> list[str]:
    """Returns a warning if noticeably many rounds ask fewer clients than a release needs."""
    needed: int | None = getattr(mechanism, "min_survivors", None)
    if needed is None:
        return []
    chance = settings.cohort.probability_below(needed, settings.federation.population)
    if chance < _RARE:
        return []
    return [
        f"mechanism.min_survivors={needed}: a round asks fewer clients with probability "
        f"{chance:.2g}, about {chance * settings.run.num_rounds:.3g} of {settings.run.num_rounds} "
        "rounds even if everybody answers; such a round is charged and not released; lower "
        "mechanism.min_survivors, raise cohort.sampling_rate, or choose cohort=fixed_size"
    ]


def _mechanism_of_run(
    settings: Settings, noise_multiplier: float | None, num_parameters: int | None
) -> tuple[Mechanism, dict[str, str]]:
    """Returns the mechanism as the run will have it, every value filled in, and its facts.

    Raises:
        SettingsError: a value that was given does not work.
    """
    if noise_multiplier is None:
        return settings.mechanism, {}
    schedule = noise_schedule.of(settings.mechanism)
    largest = noise_multiplier * max(noise_schedule.levels(schedule, settings.run.num_rounds))
    run = (largest, num_parameters or 0, settings.cohort_size)
    mechanism: Mechanism = settings.mechanism.resolved(*run)
    mechanism.check_run(*run)
    return mechanism, dict(mechanism.facts(*run))


def _filled_in(configured: Any, resolved: Any) -> dict[str, float]:
    values = {f.name: getattr(resolved, f.name) for f in fields(resolved)}
    return {key: value for key, value in values.items() if getattr(configured, key) != value}


def _caveats(
    settings: Settings, rows: tuple[Row, ...], schedules: Mapping[PrivacyUnit, NoiseSchedule]
) -> list[str]:
    """Returns why the accountant's numbers for the whole run are no bounds, if they are not."""
    found: dict[str, None] = {}
    for event in dict.fromkeys(row.event for row in rows if row.event is not None):
        composed = _whole_run(settings, event, schedules[event.unit])
        if caveat := settings.accountant.caveat(composed, settings.privacy.target_delta):
            found[caveat] = None
    return list(found)


def _noise_multiplier(
    settings: Settings, unit: PrivacyUnit, schedule: NoiseSchedule, num_parameters: int | None
) -> float | None:
    """Returns z of `unit`: configured, calibrated over the whole run, or None if not private.

    With a schedule the scale: the target holds for all rounds at their own noise together.
    """
    if round_event(settings, unit, 1.0, num_parameters) is None:
        return None
    configured = settings.noise_multiplier_of(unit)
    target = settings.privacy.target_epsilon
    if configured is not None or target is None:
        return configured
    lowest = min(noise_schedule.levels(schedule, settings.run.num_rounds))

    def whole_run(scale: float) -> Mapping[PrivacyEvent, int]:
        # Less noise than any accountant takes, in whatever round, is as good as none.
        enough = scale * lowest >= checks.NOISE_MULTIPLIERS[0]
        event = round_event(settings, unit, scale if enough else 0.0, num_parameters)
        return {} if event is None else _whole_run(settings, event, schedule)

    z = calibrate(settings.accountant, whole_run, target, settings.privacy.target_delta)
    section = "mechanism" if unit is PrivacyUnit.CLIENT else "training"
    noise_schedule.check_rounds(section, schedule, z, settings.run.num_rounds)
    return z


def _whole_run(
    settings: Settings, event: PrivacyEvent, schedule: NoiseSchedule
) -> dict[PrivacyEvent, int]:
    """Returns how often each event is composed for one unit in the whole run."""
    num_rounds, population = settings.run.num_rounds, settings.federation.population
    planned = participation.in_rounds(event, schedule, num_rounds)
    return participation.composed(
        planned, _NO_REPEATS, event, schedule, settings.cohort, population
    )


def _contains(whole: Mapping[PrivacyEvent, int], part: Mapping[PrivacyEvent, int]) -> bool:
    return all(count <= whole.get(event, 0) for event, count in part.items())


def _clipping_norm(owner: object, noise_multiplier: float | None) -> float | None:
    """Returns the clipping norm of a mechanism or training, None if it is not private."""
    norm: float | None = getattr(owner, "clipping_norm", None)
    return None if noise_multiplier is None else norm


def _warnings(
    settings: Settings,
    nominal_rows: int | None,
    mechanism_z: float | None,
    training_z: float | None,
) -> tuple[str, ...]:
    """Returns what makes a row weaker than it looks."""
    delta, population = settings.privacy.target_delta, settings.federation.population
    found = []
    if settings.run.evaluate_on == "validation":
        found.append(VALIDATION)
    expected = settings.cohort.expected_size(population)
    if expected < 3 and expected < population:
        found.append(
            f"the expected cohort is {expected:g} of {population} clients: a round may ask nobody "
            "and is charged all the same; raise the sampling rate or federation.population"
        )
    if settings.run.seeded_noise:
        found.append(SEEDED)
    sizes = [
        (PrivacyUnit.CLIENT, mechanism_z, population, "federation.population"),
        (PrivacyUnit.RECORD, training_z, nominal_rows, "nominal rows of a client"),
    ]
    for unit, z, size, name in sizes:
        if z and size is not None and delta >= 1 / size:
            found.append(
                f"privacy.target_delta={delta:g} is not below 1 / {name} (1/{size}): at unit "
                f"{unit} that allows publishing one of them whole; lower it"
            )
        if z == 0:
            found.append(f"the {unit} noise multiplier is 0: {NO_NOISE} at that unit, NOT PRIVATE")
    return tuple(found)
