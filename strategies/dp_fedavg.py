"""DP-FedAvg (McMahan et al. 2018, arXiv:1710.06963) as a Flower strategy.

One round, in this order and no other:

1. gate: would this round's charge still be within the budget?
2. charge: the events are durable in the ledger before anybody is asked (rules 7 and 8);
3. ask: a cohort is drawn over the whole population, one message per hosting node;
4. sum: protected updates of this round only, weight 1;
5. release: the mechanism (or record-level training under placement central) adds its noise to
   the sum and divides by a public constant;
6. step: the server optimizer sees the release and nothing else (rule 6).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fl_app import rng, wire
from fl_app.accounting.ledger import Ledger
from fl_app.accounting.plan import PrivacyPlan
from fl_app.errors import FederationError, PrivacyError, ProtocolError
from fl_app.privacy import PrivacyUnit, Sampling
from fl_app.settings import Settings
from fl_app.stages import (
    CohortSum,
    DoubleVector,
    IndexVector,
    ProtectedUpdate,
    RoundOrder,
    RoundTrace,
)
from strategies.adaptive_clipping import next_clipping_norm
from strategies.roster import Roster

log = logging.getLogger("dpfl")

MAX_FAILED_ROUNDS = 3
"""Rounds in a row (or all of a shorter run) of errors from everybody asked: the run has failed."""

ToArrays = Callable[[DoubleVector], ArrayRecord]
OnRound = Callable[["DPFedAvg", RoundTrace, MetricRecord | None], None]


@dataclass(slots=True)
class _Round:
    """The bookkeeping of the round in progress; never leaves this module."""

    order: RoundOrder
    cohort: IndexVector
    asked: dict[int, list[int]]
    started: float
    bytes_sent: int = 0
    errors: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    bytes_received: int = 0


class DPFedAvg(Strategy):
    """Runs private rounds until they are done or the budget is spent.

    Guarantee: after every round the ledger holds at least the events of all releases made, and the
    global model is a function of released values only.

    Args:
        settings: the checked settings.
        plan: calibrated noise and the events of one round.
        ledger: open for appending.
        roster: the nodes.
        parameters_P: [P] float64 global parameters; updated in place.
        optimizer_state: state of the server optimizer, from its `start` or a checkpoint.
        to_arrays: makes the float32 array record of the global model from its parameters.
        nominal_rows: public row count of a client.
        first_round: the round to begin with (1, or after the checkpoint).
        clipping_norm: client-level C to begin with; None: that of the settings.
        on_round: called after every finished round; saves and shows.
        should_stop: asked before every round; True ends the run well, to be resumed.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        plan: PrivacyPlan,
        ledger: Ledger,
        roster: Roster,
        parameters_P: DoubleVector,
        optimizer_state: dict[str, DoubleVector],
        to_arrays: ToArrays,
        nominal_rows: int,
        first_round: int = 1,
        clipping_norm: float | None = None,
        on_round: OnRound | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings = settings
        self.plan = plan
        self.ledger = ledger
        self.parameters_P = parameters_P
        self.optimizer_state = optimizer_state
        configured = getattr(settings.mechanism, "clipping_norm", None)
        self.clipping_norm: float | None = configured if clipping_norm is None else clipping_norm
        self.last_order: RoundOrder | None = None
        self.status = "completed"
        self.rounds_done = first_round - 1
        self._roster = roster
        self._to_arrays = to_arrays
        self._nominal_rows = nominal_rows
        self._on_round = on_round
        self._should_stop = should_stop
        self._settings_json = settings.to_wire()
        self._wire_size = settings.mechanism.wire_size(parameters_P.size)
        self._expected_cohort = settings.cohort.expected_size(settings.federation.population)
        self._current: _Round | None = None
        self._failed_rounds = 0
        self._logged: set[str] = set()
        self._exhausted_nodes: set[int] = set()
        self.anybody_answered = False
        self.last_cause = ""

    def summary(self) -> None:
        """Logs what this strategy does."""
        log.info(
            "DP-FedAvg: mechanism %s, training %s, cohort %s of %d clients on %d nodes",
            self.settings.mechanism.kind,
            self.settings.training.kind,
            self.settings.cohort.kind,
            self.settings.federation.population,
            self._roster.num_nodes,
        )

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Runs the rounds that are left; ``status`` and ``rounds_done`` say how it ended.

        Raises:
            FederationError: every asked client failed, several rounds in a row.
        """
        self.summary()
        arrays, config, result = initial_arrays, train_config or ConfigRecord(), Result()
        for round in range(self.rounds_done + 1, num_rounds + 1):
            if not self._within_budget(round):
                self.status = "budget_exhausted"
                break
            if self._must_stop(round):
                self.status = "stopped"
                break
            messages = list(self.configure_train(round, arrays, config, grid))
            # The replies get no name: under CENTRAL they are the un-noised sum (rule 6).
            new_arrays, _ = self.aggregate_train(
                round, grid.send_and_receive(messages, timeout=timeout) if messages else []
            )
            arrays = arrays if new_arrays is None else new_arrays
            metrics = evaluate_fn(round, arrays) if evaluate_fn else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[round] = metrics
            self._finish_round(metrics)
            if self.nodes_exhausted:
                self.status = "budget_exhausted"
                break
        result.arrays = arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Charges the round, draws the cohort and returns one message per hosting node.

        Raises:
            PrivacyError: the budget does not allow this round.
        """
        if not self._within_budget(server_round):
            raise PrivacyError(f"round {server_round}: the privacy budget does not allow it")
        attempt = self._charges_of(server_round)
        # Before the cohort is drawn or asked: a kill from here on costs a charge, never a free
        # release.
        self.ledger.append_all(server_round, self.plan.events_of(server_round))
        self._roster.refresh(grid)
        cohort = self._draw_cohort(server_round, attempt)
        current = _Round(
            order=self._order(server_round, attempt),
            cohort=cohort,
            asked=self._roster.group(cohort.tolist()),
            started=time.monotonic(),
        )
        self._current = current
        messages = [
            wire.train_message(node, arrays, self._settings_json, current.order, clients)
            for node, clients in current.asked.items()
        ]
        current.bytes_sent = sum(wire.num_bytes(m) for m in messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sums, releases and steps; returns the new global model and no client metrics."""
        current = self._in_progress(server_round)
        updates = [u for reply in replies if (u := self._accept(current, reply)) is not None]
        updates.sort(key=lambda u: u.clients)  # one order of summation, whoever was faster
        total = self._combine(current, updates)
        skip = self.settings.federation.on_missing == "skip" and total.num_answered == 0
        if not skip and self._can_release(total):
            self._release_and_step(current, total)
        del total, updates  # before the new model is written out: it may be large
        return self._to_arrays(self.parameters_P), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Returns no messages: evaluation runs on the server's public test set (rule 12)."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Returns None: clients report no metrics."""
        return None

    @property
    def nodes_exhausted(self) -> bool:
        """True if every node has refused for its own budget, and the run may show that.

        An amplified run goes on to its end, with noise alone: when its nodes' budgets ended would
        tell the OBSERVER who had been sampled.
        """
        nodes = self._roster.node_ids
        return bool(nodes) and nodes <= self._exhausted_nodes and not self._amplified()

    def _within_budget(self, round: int) -> bool:
        ledger = self.ledger
        return self.plan.within_budget(
            ledger.counts(), ledger.repeats(), round=round, again=ledger.has_round(round)
        )

    def _charges_of(self, round: int) -> int:
        """Returns how often `round` was charged before: a round made again needs a new cohort."""
        return self.ledger.rows_of(round) // max(1, len(self.plan.events))

    def _order(self, round: int, attempt: int) -> RoundOrder:
        return RoundOrder(
            round=round,
            clipping_norm=self.clipping_norm,
            noise_multiplier=self.plan.noise_multiplier(PrivacyUnit.CLIENT, round),
            training_noise_multiplier=self.plan.noise_multiplier(PrivacyUnit.RECORD, round),
            nominal_rows=self._nominal_rows,
            weighting=self.settings.federation.weighting,
            attempt=attempt,
        )

    def _draw_cohort(self, round: int, attempt: int) -> IndexVector:
        """Draws over the whole registry, offline clients included; unpredictable in deployment."""
        if self._roster.simulated:
            stream = rng.stream(self.settings.run.seed, "cohort", round, attempt)
        else:
            stream = np.random.default_rng(secrets.randbits(256))
        return self.settings.cohort.sample(self.settings.federation.population, round, stream)

    def _accept(self, current: _Round, reply: Message) -> ProtectedUpdate | None:
        """Returns the update in a reply if it is what was asked for, else notes why not."""
        try:
            update = wire.read_train_reply(reply)
            if isinstance(update, wire.NodeFailure):
                self._note_refusal(current, reply, update)
                return None
            self._check(current, reply.metadata.src_node_id, update)
        except ProtocolError as error:
            current.violations.append(str(error))
            return None
        current.answered.extend(update.clients)
        self._exhausted_nodes.discard(reply.metadata.src_node_id)
        current.bytes_received += wire.num_bytes(reply)
        return update

    def _note_refusal(self, current: _Round, reply: Message, failure: wire.NodeFailure) -> None:
        """Counts the node's clients as absent and keeps the cause for the operator."""
        node = reply.metadata.src_node_id
        current.errors.append(failure.text)
        if failure.code == wire.BUDGET_EXHAUSTED and node in current.asked:
            self._exhausted_nodes.add(node)

    def _check(self, current: _Round, node: int, update: ProtectedUpdate) -> None:
        asked = set(current.asked.get(node, ())) - set(current.answered)
        if update.round != current.order.round:
            raise ProtocolError(f"node {node}: reply of round {update.round} came late")
        if not update.clients or not set(update.clients) <= asked:
            raise ProtocolError(f"node {node}: replied for clients that it was not asked for")
        if len(set(update.clients)) != len(update.clients):
            raise ProtocolError(f"node {node}: counts a client twice")
        if update.vector_P.shape != (self._wire_size,):
            raise ProtocolError(f"node {node}: the update has the wrong size")
        if update.modulus != self.settings.mechanism.modulus:
            raise ProtocolError(f"node {node}: the update has the wrong modulus")
        uniform = self.settings.federation.weighting == "uniform"
        if not (np.isfinite(update.weight) and update.weight >= 0):
            raise ProtocolError(f"node {node}: the weight is not a finite number >= 0")
        if uniform and update.weight != len(update.clients):
            raise ProtocolError(f"node {node}: the weight is not its number of clients")

    def _combine(self, current: _Round, updates: Sequence[ProtectedUpdate]) -> CohortSum:
        """Returns the sum; clients whose update is not finite have not answered, but violated."""
        total = self.settings.protection.combine(updates, self._wire_size, current.order.round)
        dropped = set(total.dropped)
        for node, clients in current.asked.items():
            if dropped.intersection(clients):
                current.violations.append(f"node {node}: the update is not finite")
        current.answered = [client for client in current.answered if client not in dropped]
        return total

    def _can_release(self, total: CohortSum) -> bool:
        """Returns whether the mechanism's noise is in the sum; else the round was charged in vain.

        Only the operator's log says so; the OBSERVER sees a model that did not move.
        """
        if self.settings.mechanism.can_release(total.num_answered):
            return True
        log.warning(
            "round %d: only %d answers, not released (mechanism.min_survivors)",
            total.round,
            total.num_answered,
        )
        return False

    def _release_and_step(self, current: _Round, total: CohortSum) -> None:
        """Noise first, then the optimizer; `total` is overwritten by the release (rule 6)."""
        round = current.order.round
        seed = self.settings.run.seed if self.settings.run.seeded_noise else None
        noise = rng.noise_source("central-noise", round, seed=seed)
        release = self.settings.releaser.release(total, current.order, self._expected_cohort, noise)
        mean_P = release.mean_P[: self.parameters_P.size]  # what a mechanism padded is dropped
        self.settings.server_optimizer.step(self.parameters_P, mean_P, self.optimizer_state)
        # For the next round only: this one's noise and clients had the C that was sent (rule 4).
        if self.clipping_norm is not None:
            self.clipping_norm = next_clipping_norm(
                self.settings.mechanism, self.clipping_norm, release
            )

    def _note_failures(self, current: _Round) -> None:
        """Logs each new cause once, and ends a run in which nobody works any more.

        Raises:
            FederationError: in several rounds in a row every reply was an error or a violation.
        """
        causes = current.errors + current.violations
        for cause in sorted(set(causes) - self._logged):
            log.warning("round %d: %s", current.order.round, cause)
        self._logged |= set(causes)
        if not current.asked:  # an empty cohort says nothing about the clients
            return
        failed = bool(causes) and not current.answered
        self._failed_rounds = self._failed_rounds + 1 if failed else 0
        self.last_cause = causes[-1] if failed else self.last_cause
        self.anybody_answered |= bool(current.answered)
        # Ending early would tell the OBSERVER who was sampled, so an amplified run goes on.
        if self._amplified() or self.nodes_exhausted:
            return
        if self._failed_rounds >= min(MAX_FAILED_ROUNDS, self.settings.run.num_rounds):
            raise FederationError(
                f"{self._failed_rounds} rounds in a row every asked client failed; "
                f"the last cause:\n{causes[-1]}"
            )

    def _amplified(self) -> bool:
        events = [event for event in self.plan.events if event.unit is PrivacyUnit.CLIENT]
        return any(event.sampling is not Sampling.NONE for event in events)

    def _finish_round(self, metrics: MetricRecord | None) -> None:
        current = self._current
        if current is None:
            raise FederationError("a round was finished that never began")
        self._current = None
        self.rounds_done = current.order.round
        self.last_order = current.order
        trace = RoundTrace(
            round=current.order.round,
            cohort=tuple(current.cohort.tolist()),
            answered=tuple(sorted(current.answered)),
            errors=tuple(current.errors),
            violations=tuple(current.violations),
            seconds=time.monotonic() - current.started,
            bytes_sent=current.bytes_sent,
            bytes_received=current.bytes_received,
        )
        if self._on_round is not None:
            self._on_round(self, trace, metrics)
        self._note_failures(current)

    def _in_progress(self, round: int) -> _Round:
        if self._current is None or self._current.order.round != round:
            raise FederationError(
                f"round {round}: configure_train must come before aggregate_train"
            )
        return self._current

    def _must_stop(self, round: int) -> bool:
        stop_after = self.settings.run.stop_after
        return self._should_stop() or (stop_after is not None and round > stop_after)
