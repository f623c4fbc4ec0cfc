"""Settings: the checked, frozen form of the configuration, the same on server and nodes.

``conf/`` is composed by Hydra (`compose`), resolved to plain values, and built into `Settings`,
which checks every value and every combination before any work starts. Nodes get the plain values
in the round's message and build the same `Settings` from them.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fl_app import checks, noise_schedule, plugins
from fl_app.errors import PrivacyError, SettingsError
from fl_app.plugins import (
    Accountant,
    Cohort,
    CohortSize,
    Dataset,
    Engine,
    Mechanism,
    Model,
    Partitioner,
    Protection,
    Releaser,
    ServerOptimizer,
    Training,
)
from fl_app.privacy import NeighboringRelation, Placement, PrivacyEvent, PrivacyUnit, View


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """``run.*``: one execution.

    Attributes:
        seed: root of the data, initialization, cohort and batch streams (never of noise).
        num_rounds: T, the rounds of the whole run; calibration refers to it.
        output_dir: the run directory, absolute or relative to the caller's directory; None: chosen.
        resume: run directory to continue, None for a new run.
        stop_after: stop well after this many rounds in total, to be resumed later; None: never.
        device: auto, cpu, cuda or mps.
        seeded_noise: derive noise from `seed` too; repeatable and NOT PRIVATE.
        evaluate_every: rounds between evaluations (the last one always is).
        evaluate_on: test, the public test rows; or validation, rows kept out of training, for
            choices made before a run.
    """

    seed: int
    num_rounds: int
    output_dir: str | None
    resume: str | None
    stop_after: int | None
    device: str
    seeded_noise: bool
    evaluate_every: int
    evaluate_on: str

    def __post_init__(self) -> None:
        checks.at_least("run.seed", self.seed, 0)
        checks.at_least("run.num_rounds", self.num_rounds, 1)
        checks.at_least("run.evaluate_every", self.evaluate_every, 1)
        if self.stop_after is not None:
            checks.at_least("run.stop_after", self.stop_after, 1)
        checks.one_of("run.device", self.device, ("auto", "cpu", "cuda", "mps"))
        checks.one_of("run.evaluate_on", self.evaluate_on, ("test", "validation"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationSettings:
    """``federation.*``: who takes part and how long they are waited for.

    Attributes:
        population: N, the public registry of clients that sampling is over.
        num_nodes: nodes of the local and simulation engines (None: one per worker); see DESIGN:
            nodes host clients.
        min_nodes: start only when this many nodes have joined.
        join_timeout: seconds to wait for `min_nodes`.
        round_timeout: seconds to wait for replies in a round.
        on_missing: release (every round is released and charged) or skip (a round without any
            answer leaves the model as it is; costs the amplification by sampling).
        weighting: uniform, or examples (row counts; only without any privacy).
    """

    population: int
    num_nodes: int | None
    min_nodes: int
    join_timeout: float
    round_timeout: float
    on_missing: str
    weighting: str

    def __post_init__(self) -> None:
        checks.at_least("federation.population", self.population, 1)
        if self.num_nodes is not None:
            checks.at_least("federation.num_nodes", self.num_nodes, 1)
        checks.at_least("federation.min_nodes", self.min_nodes, 1)
        checks.positive("federation.join_timeout", self.join_timeout)
        checks.positive("federation.round_timeout", self.round_timeout)
        checks.one_of("federation.on_missing", self.on_missing, ("release", "skip"))
        checks.one_of("federation.weighting", self.weighting, ("uniform", "examples"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacySettings:
    """``privacy.*``: the budget.

    Attributes:
        privacy_unit: auto, record, client or none: the unit that `target_epsilon` binds.
        target_epsilon: budget of the whole run, None for no budget.
        target_delta: delta of every stated epsilon.
    """

    privacy_unit: str
    target_epsilon: float | None
    target_delta: float

    def __post_init__(self) -> None:
        checks.one_of(
            "privacy.privacy_unit", self.privacy_unit, ("auto", "record", "client", "none")
        )
        if self.target_epsilon is not None:
            checks.positive(
                "privacy.target_epsilon", self.target_epsilon, "set null for a run without a budget"
            )
        checks.open_unit("privacy.target_delta", self.target_delta, "well below 1 / population")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole configuration, one attribute per section of ``conf/config.yaml``.

    Raises:
        SettingsError: sections that do not go together (all of them in one text).
    """

    run: RunSettings
    federation: FederationSettings
    privacy: PrivacySettings
    dataset: Dataset
    partition: Partitioner
    model: Model
    training: Training
    mechanism: Mechanism
    cohort: Cohort
    accountant: Accountant
    server_optimizer: ServerOptimizer
    protection: Protection
    engine: Engine

    def __post_init__(self) -> None:
        self.cohort.check(self.federation.population)  # events need a possible cohort
        problems = _run_all(
            [
                self._check_unit,
                self._check_noise,
                self._check_schedules,
                self._check_releaser,
                self._check_weighting,
                self._check_accountant,
                self._check_nodes,
            ]
        )
        if problems:
            raise SettingsError("\n".join(problems))

    @property
    def client_level(self) -> bool:
        """True if the mechanism gives CLIENT privacy (it has a placement)."""
        return self.mechanism.placement is not None

    @property
    def bound_unit(self) -> PrivacyUnit | None:
        """The unit that ``privacy.target_epsilon`` binds; None if nothing is private."""
        if self.privacy.privacy_unit == "none":
            return None
        if self.privacy.privacy_unit != "auto":
            return PrivacyUnit(self.privacy.privacy_unit.upper())
        if self.client_level:
            return PrivacyUnit.CLIENT
        return PrivacyUnit.RECORD if self.training.private else None

    @property
    def releaser(self) -> Releaser:
        """Who turns the sum over a cohort into a release: the training, if its noise is missing."""
        return self.training.releaser or self.mechanism

    def noise_multiplier_of(self, unit: PrivacyUnit) -> float | None:
        """Returns the configured z of `unit` (None: to be calibrated)."""
        owner = self.mechanism if unit is PrivacyUnit.CLIENT else self.training
        value: float | None = getattr(owner, "noise_multiplier", None)
        return value

    def noise_multiplier_in(self, unit: PrivacyUnit, round: int) -> float | None:
        """Returns the z of `unit` in `round`: the configured one times the level of the round.

        Raises:
            PrivacyError: the run has no such round.
        """
        if not 1 <= round <= self.run.num_rounds:
            raise PrivacyError(f"round={round}: the run has rounds 1 to {self.run.num_rounds}")
        owner = self.mechanism if unit is PrivacyUnit.CLIENT else self.training
        scale = self.noise_multiplier_of(unit)
        return (
            None if scale is None else scale * noise_schedule.level(noise_schedule.of(owner), round)
        )

    def _check_unit(self) -> None:
        key, unit = "privacy.privacy_unit", self.privacy.privacy_unit
        if unit == "record" and not self.training.private:
            raise checks.fail(
                key,
                unit,
                f"needs a private training; training={self.training.kind} adds no noise",
                "choose training=dp_sgd",
            )
        if unit == "client" and not self.client_level:
            raise checks.fail(
                key,
                unit,
                f"needs a client-level mechanism; mechanism={self.mechanism.kind} adds no noise",
                "choose mechanism=central_gaussian or mechanism=local_gaussian",
            )
        if unit == "none" and (self.training.private or self.client_level):
            raise checks.fail(
                key,
                unit,
                "something private is chosen",
                "set auto, or choose training=sgd mechanism=none",
            )
        if unit == "auto" and self.bound_unit is None and self.privacy.target_epsilon is not None:
            raise checks.fail(
                "privacy.target_epsilon",
                self.privacy.target_epsilon,
                f"nothing adds noise (training={self.training.kind}, "
                f"mechanism={self.mechanism.kind})",
                "choose training=dp_sgd or mechanism=central_gaussian, "
                "or privacy.target_epsilon=null for a run that is not private",
            )

    def _check_noise(self) -> None:
        private = [
            (PrivacyUnit.CLIENT, "mechanism", self.client_level),
            (PrivacyUnit.RECORD, "training", self.training.private),
        ]
        for unit, section, active in private:
            if not active:
                continue
            z, target, key = self.noise_multiplier_of(unit), self.privacy.target_epsilon, section
            key += ".noise_multiplier"
            if z is None and unit is not self.bound_unit:
                raise checks.fail(
                    key,
                    z,
                    f"privacy.target_epsilon calibrates the {self.bound_unit} unit only",
                    f"give {key} a number (0 for no noise), "
                    f"or choose privacy.privacy_unit={unit.lower()}",
                )
            if z is None and target is None:
                raise checks.fail(
                    key,
                    z,
                    "one of it and privacy.target_epsilon must be a number",
                    "set one of them",
                )
            if z == 0 and unit is self.bound_unit and target is not None:
                raise checks.fail(
                    "privacy.target_epsilon",
                    target,
                    f"cannot hold without noise ({key}=0)",
                    f"set {key}=null to calibrate it, or privacy.target_epsilon=null",
                )

    def _check_schedules(self) -> None:
        for key, owner in (("mechanism", self.mechanism), ("training", self.training)):
            scale: float | None = getattr(owner, "noise_multiplier", None)
            schedule = noise_schedule.of(owner)
            noise_schedule.check_rounds(key, schedule, scale, self.run.num_rounds)

    def _check_releaser(self) -> None:
        if self.training.releaser is None or not self.client_level:
            return
        raise checks.fail(
            "mechanism",
            self.mechanism.kind,
            f"training={self.training.kind} leaves its noise to the server, which adds one noise "
            "to a sum",
            "choose mechanism=none, or training.placement=local",
        )

    def _check_weighting(self) -> None:
        private = self.client_level or self.training.private
        if self.federation.weighting == "examples" and private:
            raise checks.fail(
                "federation.weighting",
                "examples",
                "example counts are private data and change the sensitivity",
                "set federation.weighting=uniform",
            )

    def _check_accountant(self) -> None:
        for event in self.events():
            if reason := self.accountant.refusal(event):
                raise checks.fail("accountant", self.accountant.kind, reason)

    def _check_nodes(self) -> None:
        nodes = self.federation.num_nodes
        if nodes is not None and nodes < self.federation.min_nodes:
            raise checks.fail(
                "federation.min_nodes",
                self.federation.min_nodes,
                f"must be <= federation.num_nodes={nodes}",
            )

    def events(self, noise_multiplier: float = 1.0) -> list[PrivacyEvent]:
        """Returns the events of one round at `noise_multiplier`, one per private unit.

        Those of integer noise as if the model had one parameter: see `client_event`.
        """
        events = []
        if self.client_level and self.mechanism.noise_kind is not None:
            events.append(client_event(self, noise_multiplier, 1))
        if (event := self.training.event(noise_multiplier)) is not None:
            events.append(event)
        return events

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Settings:
        """Returns the settings of plain nested values, everything checked.

        Raises:
            SettingsError: with every problem found, one per line.
        """
        names = [f.name for f in fields(cls)]
        for key in values:
            if key not in names:
                raise _unknown(key, values[key], names)
        built: dict[str, Any] = {}
        problems: list[str] = []
        for name in names:
            try:
                built[name] = _build_section(name, values.get(name))
            except SettingsError as error:
                problems.append(str(error))
        if problems:
            raise SettingsError("\n".join(problems))
        return cls(**built)

    @property
    def cohort_size(self) -> CohortSize:
        """How many clients are asked in a round."""
        population = self.federation.population
        return CohortSize(
            expected=self.cohort.expected_size(population),
            largest=self.cohort.largest_size(population),
        )

    def to_mapping(self) -> dict[str, Any]:
        """Returns the plain nested values that `from_mapping` takes."""
        result: dict[str, Any] = {}
        for section in fields(self):
            part = getattr(self, section.name)
            kind = {"kind": part.kind} if section.name in plugins.PACKAGES else {}
            result[section.name] = kind | {
                f.name: _plain(getattr(part, f.name)) for f in fields(part)
            }
        return result

    def to_wire(self) -> str:
        """Returns the JSON that nodes build their settings from: all but the server's own paths."""
        return json.dumps(self._portable(), sort_keys=True)

    def to_public(self) -> dict[str, Any]:
        """Returns the values that may be published: no seed, as it tells who was sampled."""
        values = self._portable()
        del values["run"]["seed"]
        return values

    def fingerprint(self) -> str:
        """Returns a digest of what a resumed run must not change; public, so without the seed."""
        values = self.to_public()
        del values["engine"], values["run"]["device"]
        for key in ("num_nodes", "min_nodes", "join_timeout", "round_timeout"):
            del values["federation"][key]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def _portable(self) -> dict[str, Any]:
        values = self.to_mapping()
        for key in ("output_dir", "resume", "stop_after"):
            values["run"][key] = None
        return values


def client_event(
    settings: Settings, noise_multiplier: float, num_parameters: int | None = None
) -> PrivacyEvent:
    """Returns the CLIENT event of one round of mechanism and cohort (rules 9 and 10).

    Args:
        settings: the checked settings.
        noise_multiplier: z.
        num_parameters: P, which integer noise is accounted with; others do without it.

    Raises:
        SettingsError: there is no noise, P is missing, or the mechanism does not fit the cohort.
    """
    kind = settings.mechanism.noise_kind
    if kind is None:
        raise SettingsError(f"mechanism={settings.mechanism.kind} has no noise to account for")
    if settings.mechanism.placement is Placement.CENTRAL:
        return settings.cohort.event(
            kind,
            noise_multiplier,
            settings.federation.population,
            amplified=settings.federation.on_missing == "release",
        )
    view, shares = View.SERVER, None
    if settings.mechanism.placement is Placement.DISTRIBUTED:
        if num_parameters is None:
            raise SettingsError(
                f"mechanism={settings.mechanism.kind}: is accounted with the number of parameters"
            )
        mechanism: Mechanism = settings.mechanism.resolved(
            noise_multiplier, num_parameters, settings.cohort_size
        )
        shares = mechanism.shares(num_parameters)
        if not settings.protection.hides_from_server:
            view = View.OBSERVER  # the server sees more than the sum: see `PrivacyEvent.one_share`
    return PrivacyEvent(
        unit=PrivacyUnit.CLIENT,
        view=view,
        relation=NeighboringRelation.ZERO_OUT,
        noise=kind,
        noise_multiplier=noise_multiplier,
        shares=shares,
    )


def _build_section(name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise checks.fail(name, values, "must be a section", f"choose one, e.g. {name}=...")
    plain = {"run": RunSettings, "federation": FederationSettings, "privacy": PrivacySettings}
    if name in plain:
        return checks.build(plain[name], name, values)
    return plugins.build(name, values)


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _run_all(steps: Sequence[Callable[[], None]]) -> list[str]:
    problems = []
    for step in steps:
        try:
            step()
        except SettingsError as error:
            problems.append(str(error))
    return problems


def _unknown(key: str, value: Any, known: Sequence[str]) -> SettingsError:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
    return checks.fail(key, value, "unknown key", hint)
