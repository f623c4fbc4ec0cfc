"""What a node charges itself for one request, and what its charges add up to (rule 13).

A request asks the clients of one node to train once. Each asked client is charged:

- its client-level release, without any amplification: whom the server samples, and whether it
  samples at all, the node cannot verify;
- its record-level training, with the amplification of its own Poisson batches.

The node's budget is about one of its RECORDs, added or removed, whichever client holds it, and both
kinds of charge count against it:

- The training is a mechanism on the client's rows: its event as it is (ADD_OR_REMOVE_ONE).
- The client-level release is a clipped vector plus noise. Without the record the client may send
  any other vector within the norm C, so the vector moves by up to 2C and not by C: the noise counts
  at half its multiplier. (ZERO_OUT, where the whole client is replaced by nothing, moves it by C.
  The smaller number is that of the coarser relation, and no bound for a record.)
- A reply that is both is computed from the noised training and noised once more. Whoever sees it
  sees less than the pair, and the pair costs at most the composition of both, whatever the second
  noise depends on in the first. (Either charge alone would bound it, too; both are counted, so that
  the budget holds even if one of the two noises is lost.)

Every asked client is charged in full, not only the worst of them, so the sum also bounds what the
client-level releases tell about all rows of the node together (CLIENT under ZERO_OUT).
"""

from __future__ import annotations

import logging
import math
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fl_app import noise_schedule
from fl_app.accounting import participation
from fl_app.accounting.pld import Pld
from fl_app.accounting.rdp import Rdp
from fl_app.accounting.steps import sensitivity_multiplier
from fl_app.errors import AccountingError
from fl_app.privacy import (
    Guarantee,
    NeighboringRelation,
    NoiseKind,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)
from fl_app.settings import Settings, client_event
from fl_app.stages import LedgerEntry, RoundOrder

if TYPE_CHECKING:
    from fl_app.accounting.plan import PrivacyPlan
    from fl_app.plugins import Accountant

log = logging.getLogger("dpfl")

ACCOUNTANTS: tuple[Accountant, ...] = (Rdp(), Pld(discretization=1e-4))
"""A node's own accountants, the quick one first: each number is a bound, so the smaller one is."""

SMALLEST_DELTA = 1e-12
"""The smallest delta that both of them resolve."""

_NO_NOISE = PrivacyEvent(
    unit=PrivacyUnit.CLIENT,
    view=View.SERVER,
    relation=NeighboringRelation.ZERO_OUT,
    noise=NoiseKind.GAUSSIAN,
    noise_multiplier=0.0,
)

_GENUINE = "the node runs the genuine program, and its data are asked for through this ledger only"
_FULL = "every asked client of the node is charged in full, and its split into clients is given"
_CENTRAL = "assuming the server adds the noise of CENTRAL releases, which a node cannot verify"
_TWICE = "a record moves a clipped update by up to 2C: client-level noise counts at half its z"
_ONE_SHARE = "of integer noise the node's own share alone is counted, whatever others add"
_BATCHES = (
    "which rows are in a batch stays hidden: a deployed node draws them from its own entropy, a "
    "simulated one from run.seed, which the adversary then must not know"
)
_BARE = "a request had no client-level noise"
_UNBOUNDED = "a request had no noise, or no accountant bounds what was asked together"


def request_events(
    settings: Settings, order: RoundOrder, num_parameters: int
) -> list[PrivacyEvent]:
    """Returns what one asked client is charged for one request; at least one event.

    Guarantee: a function of public values only; what the noise is comes from `order`, which is what
        the client's noise is made from.
    """
    events = []
    if settings.client_level:
        events.append(client_event(settings, order.noise_multiplier or 0.0, num_parameters))
    if (record := settings.training.event(order.training_noise_multiplier or 0.0)) is not None:
        events.append(record)
    return node_events(events, seeded=settings.run.seeded_noise)


def node_events(round_events: Iterable[PrivacyEvent], *, seeded: bool) -> list[PrivacyEvent]:
    """Returns what a node charges where the run charges `round_events`.

    No client-level amplification. A part without noise releases nothing by itself as long as
    another part is noised; if none is, one event without noise says so.

    Args:
        round_events: one round's events of the run, at most one of each unit.
        seeded: the noise can be repeated: it is none.
    """
    noisy = [] if seeded else [event for event in round_events if event.noise_multiplier > 0]
    return [_un_amplified(event) for event in noisy] or [_NO_NOISE]


def _un_amplified(event: PrivacyEvent) -> PrivacyEvent:
    if event.unit is PrivacyUnit.RECORD:
        return event
    if event.shares is not None:
        # How many shares meet in a sum, and who sees it, the node cannot verify: its own it can.
        event = replace(event.one_share(), view=View.SERVER)
    return replace(
        event,
        relation=NeighboringRelation.ZERO_OUT,
        sampling=Sampling.NONE,
        sampling_rate=1.0,
        population=0,
        cohort_size=0,
    )


def as_record_event(event: PrivacyEvent) -> PrivacyEvent:
    """Returns the RECORD event (ADD_OR_REMOVE_ONE) that bounds a charged event.

    Guarantee: a client-level release is counted at sensitivity 2C, see above. Integer noise: two
        rounded vectors differ by up to twice the norm after rounding, and the bounds of
        `fl_app.accounting.integers` hold for every integer vector of that norm.

    Raises:
        AccountingError: noise whose bound does not scale with the sensitivity alone.
    """
    if event.unit is PrivacyUnit.RECORD:
        return event
    if event.shares is not None:
        return replace(
            event,
            unit=PrivacyUnit.RECORD,
            relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            shares=replace(event.shares, norm_squared=4 * event.shares.norm_squared),
        )
    if event.noise not in (NoiseKind.GAUSSIAN, NoiseKind.LAPLACE):
        raise AccountingError(f"a node cannot charge {event.noise} noise to a record")
    twice = replace(event, relation=NeighboringRelation.REPLACE_ONE)
    return replace(
        event,
        unit=PrivacyUnit.RECORD,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        noise_multiplier=sensitivity_multiplier(twice),
    )


def record_epsilon(counts: Mapping[PrivacyEvent, int], delta: float, at_most: float = 0.0) -> float:
    """Returns a bound on the RECORD epsilon of a node's charges; inf if there is none.

    Args:
        counts: the node's charges by event.
        delta: in (0, 1).
        at_most: a bound that is no larger will do: then the slow accountant is not asked.
    """
    smallest = math.inf
    for accountant in ACCOUNTANTS:
        smallest = min(smallest, _bound(accountant, PrivacyUnit.RECORD, counts, delta))
        if smallest <= at_most:
            break
    return smallest


def ledger_guarantees(entries: Sequence[LedgerEntry], delta: float) -> tuple[Guarantee, ...]:
    """Returns the statement of a node's ledger: for each unit one row of each accountant.

    A row without epsilon says why. The node's budget binds RECORD.

    Args:
        entries: the rows of the ledger; those of one request have its number as their round.
        delta: delta of every row.
    """
    events = [(entry.round, PrivacyEvent.from_json(entry.event)) for entry in entries]
    bare = {r for r, _ in events} - {r for r, e in events if e.unit is PrivacyUnit.CLIENT}
    counts = Counter(event for _, event in events)
    return tuple(
        _guarantee(unit, [accountant], counts, delta, client_level=not bare)
        for unit in (PrivacyUnit.CLIENT, PrivacyUnit.RECORD)
        for accountant in ACCOUNTANTS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCharge:
    """What a run charges the ledger of a node for one client that it hosts.

    Attributes:
        most_requests: rounds in which the sampler permits to ask one client.
        expected_requests: rounds in which it is asked on average, rounded up.
        most: the statement after the most requests, CLIENT and then RECORD.
        expected: the statement after the expected ones.
    """

    most_requests: int
    expected_requests: int
    most: tuple[Guarantee, ...]
    expected: tuple[Guarantee, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; no guarantee is ``"epsilon": null``."""
        return {
            "most_requests": self.most_requests,
            "expected_requests": self.expected_requests,
            "most": [asdict(row) | {"private": row.private} for row in self.most],
            "expected": [asdict(row) | {"private": row.private} for row in self.expected],
        }


def planned_charge(plan: PrivacyPlan) -> NodeCharge:
    """Returns what the whole run will charge a node for each client that it hosts."""
    events = node_events(plan.events, seeded=plan.seeded_noise)
    client_level = any(event.unit is PrivacyUnit.CLIENT for event in events)
    most = plan.cohort.max_participations(plan.num_rounds, plan.population)
    expected = math.ceil(plan.num_rounds * plan.expected_cohort / plan.population - 1e-9)

    def statement(counts: Mapping[PrivacyEvent, int]) -> tuple[Guarantee, ...]:
        return tuple(
            _guarantee(unit, ACCOUNTANTS, counts, plan.target_delta, client_level=client_level)
            for unit in (PrivacyUnit.CLIENT, PrivacyUnit.RECORD)
        )

    at_most: dict[PrivacyEvent, int] = {}
    on_average: dict[PrivacyEvent, int] = {}
    for event in events:
        schedule = plan.schedules[event.unit]
        planned = participation.in_rounds(event, schedule, plan.num_rounds)
        at_most |= participation.composed(
            planned, {}, event, schedule, plan.cohort, plan.population
        )
        # Which rounds these are is open: those with the least noise.
        lowest = sorted(noise_schedule.levels(schedule, plan.num_rounds))[:expected]
        on_average |= participation.in_rounds(event, tuple(lowest), expected)
    return NodeCharge(
        most_requests=most,
        expected_requests=expected,
        most=statement(at_most),
        expected=statement(on_average),
    )


def _guarantee(
    unit: PrivacyUnit,
    accountants: Sequence[Accountant],
    counts: Mapping[PrivacyEvent, int],
    delta: float,
    *,
    client_level: bool,
) -> Guarantee:
    """Returns the row of `unit`, by whichever of `accountants` gives the smallest bound.

    Args:
        unit: CLIENT (under ZERO_OUT) or RECORD.
        accountants: at least one.
        counts: the charges by event.
        delta: delta of the row.
        client_level: whether every request had a client-level release.
    """
    central = any(event.view is View.OBSERVER for event in counts)
    assumptions = [_GENUINE, _FULL, *([_CENTRAL] if central else [])]
    if unit is PrivacyUnit.RECORD and any(e.unit is PrivacyUnit.CLIENT for e in counts):
        assumptions.append(_TWICE)
    if any(event.shares is not None for event in counts):
        assumptions.append(_ONE_SHARE)
    if unit is PrivacyUnit.RECORD and any(e.sampling is Sampling.POISSON for e in counts):
        assumptions.append(_BATCHES)
    missing = unit is PrivacyUnit.CLIENT and not client_level
    bounds = {a.kind: math.inf if missing else _bound(a, unit, counts, delta) for a in accountants}
    accountant = min(bounds, key=bounds.__getitem__)
    finite = math.isfinite(bounds[accountant])
    reason = _BARE if missing else _UNBOUNDED
    zero_out, add_or_remove = NeighboringRelation.ZERO_OUT, NeighboringRelation.ADD_OR_REMOVE_ONE
    return Guarantee(
        unit=unit,
        view=View.OBSERVER if central else View.SERVER,
        relation=zero_out if unit is PrivacyUnit.CLIENT else add_or_remove,
        epsilon=bounds[accountant] if finite else None,
        delta=delta,
        accountant=accountant if finite else "",
        assumptions=tuple(assumptions) if finite else (reason,),
    )


def _bound(
    accountant: Accountant, unit: PrivacyUnit, counts: Mapping[PrivacyEvent, int], delta: float
) -> float:
    """Returns the accountant's bound for `unit`; inf if it has none."""
    composed: Counter[PrivacyEvent] = Counter()
    try:
        for event, count in counts.items():
            if unit is PrivacyUnit.RECORD:
                composed[as_record_event(event)] += count
            elif event.unit is PrivacyUnit.CLIENT:
                composed[event] += count
        return accountant.epsilon(composed, delta)
    except (AccountingError, ArithmeticError):
        return math.inf  # a number that cannot be computed bounds nothing
    except ValueError:
        log.warning("accountant=%s has no bound:\n%s", accountant.kind, traceback.format_exc())
        return math.inf
