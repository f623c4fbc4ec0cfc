"""The rows of the privacy statement: which unit, against whom, under which assumptions.

Rules 1, 9 and 10 of the design in words. Every phrase must be true of the run it is printed for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fl_app.privacy import (
    NeighboringRelation,
    NoiseShares,
    Placement,
    PrivacyEvent,
    PrivacyUnit,
    Sampling,
    View,
)
from fl_app.settings import Settings, client_event

NO_NOISE = "nothing adds noise"
SEEDED = "NOT PRIVATE: run.seeded_noise=true, whoever knows run.seed can take the noise off again"
REGISTRY = "the population is a fixed public registry of clients, offline ones included"
DISJOINT = (
    "clients' data are disjoint and their split is taken as given; the number is that of the worst "
    "client"
)
HONEST_SERVER = (
    "an honest server adds the noise once to every sum and drops the un-noised sum at once"
)
ONCE = "the server asks for the stated noise and clipping (nodes check) and once per charged round"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the statement before its epsilon is known.

    Attributes:
        unit: the protected unit.
        view: against whom.
        relation: the neighbouring relation.
        event: what each round charges for it, None where there is no guarantee.
        assumptions: what must hold, or why there is none.
        one_share: the adversary sees clients' shares of the noise one by one: a charged event costs
            what its `PrivacyEvent.one_share` costs.
    """

    unit: PrivacyUnit
    view: View
    relation: NeighboringRelation
    event: PrivacyEvent | None
    assumptions: tuple[str, ...]
    one_share: bool = False


def round_event(
    settings: Settings,
    unit: PrivacyUnit,
    noise_multiplier: float,
    num_parameters: int | None = None,
) -> PrivacyEvent | None:
    """Returns what one round charges for `unit`, None if it is not private."""
    if unit is PrivacyUnit.RECORD:
        return settings.training.event(noise_multiplier) if settings.training.private else None
    if not settings.client_level:
        return None
    event: PrivacyEvent = client_event(settings, noise_multiplier, num_parameters)
    return event


def statement_rows(
    settings: Settings,
    mechanism_z: float | None,
    training_z: float | None,
    *,
    simulated: bool,
    num_parameters: int | None = None,
) -> tuple[Row, ...]:
    """Returns the statement's rows; the one that the target binds comes first of its unit."""
    rows: list[Row] = []
    if mechanism_z is not None and (
        client := round_event(settings, PrivacyUnit.CLIENT, mechanism_z, num_parameters)
    ):
        if settings.mechanism.placement is Placement.CENTRAL:
            rows += _central_rows(settings, client, simulated)
        elif client.shares is not None:
            rows += _distributed_rows(settings, client, client.shares)
        else:
            rows += _local_rows(settings, client)
    if training_z is not None and (record := round_event(settings, PrivacyUnit.RECORD, training_z)):
        rows += _record_rows(settings, record, simulated)
    if not rows:
        relation = NeighboringRelation.ZERO_OUT
        rows += [_row(PrivacyUnit.CLIENT, View.OBSERVER, relation, None, NO_NOISE)]
    return tuple(rows)


def _row(
    unit: PrivacyUnit,
    view: View,
    relation: NeighboringRelation,
    event: PrivacyEvent | None,
    *assumptions: str,
) -> Row:
    return Row(unit=unit, view=view, relation=relation, event=event, assumptions=assumptions)


def _central_rows(settings: Settings, event: PrivacyEvent, simulated: bool) -> list[Row]:
    """Returns the rows of noise that the server adds: for the OBSERVER only."""
    assumptions = [
        REGISTRY,
        HONEST_SERVER,
        *_sampling_assumptions(event, simulated),
        *_schedule_assumptions(settings, event),
        *_relation_assumptions(event),
    ]
    assumptions += _adaptive_assumptions(settings)
    assumptions += _skip_assumptions(settings)
    unit, relation = PrivacyUnit.CLIENT, event.relation
    return [
        _row(unit, View.OBSERVER, relation, event, *assumptions, _floating_point(event)),
        _row(unit, View.SERVER, relation, None, "the server sees clipped updates without noise"),
    ]


def _skip_assumptions(settings: Settings) -> list[str]:
    if settings.federation.on_missing != "skip":
        return []
    return [
        "availability independent of data: federation.on_missing=skip shows which rounds had "
        "no answer"
    ]


def _sampling_assumptions(event: PrivacyEvent, simulated: bool) -> list[str]:
    if event.sampling is Sampling.NONE:
        return ["no credit is taken for the sampling of clients"]
    hidden = {
        Sampling.POISSON: "amplification by Poisson sampling: who took part in a round, and how "
        "many, stays hidden from the observer",
        Sampling.FIXED_SIZE: "amplification by fixed-size sampling: who took part in a round stays "
        "hidden from the observer",
    }[event.sampling]
    return [hidden, *_stream_assumptions(simulated, "cohorts")]


def _schedule_assumptions(settings: Settings, event: PrivacyEvent) -> list[str]:
    """Returns what an un-amplified count of fewer rounds than there are rests on."""
    num_rounds = settings.run.num_rounds
    most = settings.cohort.max_participations(num_rounds, settings.federation.population)
    scheduled = event.sampling is Sampling.NONE and most < num_rounds
    return [_asked(settings, "a client")] if scheduled else []


def _adaptive_assumptions(settings: Settings) -> list[str]:
    if not settings.mechanism.num_counts:
        return []
    return ["the clipping norm follows a noised count, which each release's charge includes"]


def _stream_assumptions(simulated: bool, what: str) -> list[str]:
    if not simulated:
        return []
    return [
        f"in this simulation {what} come from run.seed, which the adversary neither knows nor "
        "guesses (the first model comes from it too); a deployment draws them from the operating "
        "system"
    ]


def _relation_assumptions(event: PrivacyEvent) -> list[str]:
    if event.relation is not NeighboringRelation.REPLACE_ONE:
        return []
    return [
        "neighbours differ in one client that is replaced by another: the sum moves by up to 2C"
    ]


def _local_rows(settings: Settings, event: PrivacyEvent) -> list[Row]:
    """Returns the rows of noise that every client adds: the same for both views."""
    asked = _asked(settings, "a client")
    own = "every client runs this program and adds its noise before its update leaves"
    adaptive = _adaptive_assumptions(settings)
    fewest = (
        "un-amplified, at the fewest honest contributors: one (the noise shows how many there are)"
    )
    unit, relation, smooth = PrivacyUnit.CLIENT, event.relation, _floating_point(event)
    return [
        _row(unit, View.SERVER, relation, event, REGISTRY, own, asked, ONCE, *adaptive, smooth),
        _row(
            unit,
            View.OBSERVER,
            relation,
            event,
            REGISTRY,
            own,
            asked,
            ONCE,
            *adaptive,
            fewest,
            smooth,
        ),
    ]


def _distributed_rows(settings: Settings, event: PrivacyEvent, shares: NoiseShares) -> list[Row]:
    """Returns the rows of noise shares: sums of enough of them, and one share where it is seen."""
    colluders: int = getattr(settings.mechanism, "assumed_colluders", 0)
    enough = shares.num_shares + colluders
    common = (
        REGISTRY,
        "every client runs this program and adds its share of the noise before its update leaves",
        _asked(settings, "a client"),
        ONCE,
        "integer noise is exact but for a total variation of 2^-100 a number",
    )
    honest = (
        f"un-amplified, at the fewest honest contributors: {shares.num_shares} of at least "
        f"{enough} answers, at most {colluders} colluding (the noise shows how many there are)"
    )
    skipped = (
        f"availability independent of data: a round with fewer than {enough} answers is charged, "
        "is not released, and shows that"
    )
    unit, relation = PrivacyUnit.CLIENT, event.relation
    observer = _row(unit, View.OBSERVER, relation, event, *common, honest, skipped)
    if settings.protection.hides_from_server:
        hidden = (
            f"protection={settings.protection.kind} shows the server sums of at least {enough} "
            "updates only"
        )
        server = _row(unit, View.SERVER, relation, event, hidden, *common, honest, skipped)
        return [server, observer]
    alone = (
        f"of one share: protection={settings.protection.kind} shows the server each update with "
        "its own share of the noise only; secure aggregation would hide it"
    )
    server = _row(unit, View.SERVER, relation, event, alone, *common)
    return [observer, replace(server, one_share=True)]


def _record_rows(settings: Settings, event: PrivacyEvent, simulated: bool) -> list[Row]:
    """Returns the rows of record-level training: the same for both views by post-processing.

    Where the server adds the noise there is one for the OBSERVER only.
    """
    central = event.view is View.OBSERVER
    assumptions = [
        DISJOINT,
        "every client runs this program, and batch rate, local steps and nominal rows are public",
        *([HONEST_SERVER] if central else []),
        _asked(settings, "a record's client") + "; no credit is taken for the sampling of clients",
        ONCE,
    ]
    if event.sampling is not Sampling.NONE:
        assumptions.append(
            "amplification by Poisson batches: which rows are in a batch stays hidden"
        )
        assumptions += _stream_assumptions(simulated, "batches")
    unit, relation, smooth = PrivacyUnit.RECORD, event.relation, _floating_point(event)
    if central:
        bare = "the server sees each client's sum of clipped gradients without noise"
        assumptions += _skip_assumptions(settings)
        return [
            _row(unit, View.OBSERVER, relation, event, *assumptions, smooth),
            _row(unit, View.SERVER, relation, None, bare),
        ]
    after = "the released models are computed from what the server sees (post-processing)"
    return [
        _row(unit, View.SERVER, relation, event, *assumptions, smooth),
        _row(unit, View.OBSERVER, relation, event, after, *assumptions, smooth),
    ]


def _floating_point(event: PrivacyEvent) -> str:
    law = event.noise.capitalize()
    return f"floating-point noise is taken for the continuous {law} that it approximates"


def _asked(settings: Settings, who: str) -> str:
    num_rounds = settings.run.num_rounds
    most = settings.cohort.max_participations(num_rounds, settings.federation.population)
    text = f"{who} is charged for every round it can be asked in"
    if most == num_rounds:
        return text
    return f"{text}: {most} of {num_rounds}, as the server keeps to the public schedule"
