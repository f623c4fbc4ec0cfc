"""One run on the server, from checked settings to the report; the same for all engines."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from torch import nn

from fl_app import checks, report, wire
from fl_app.accounting.client_table import client_table, table_lines
from fl_app.accounting.ledger import Ledger
from fl_app.accounting.node_charge import NodeCharge, planned_charge
from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.client_policy import home
from fl_app.client_round import device, new_model
from fl_app.errors import FederationError, LedgerError, SettingsError
from fl_app.models import flat_parameters, layer_sizes, num_parameters, set_flat_parameters
from fl_app.overrides import compose_mapping
from fl_app.partitioners import histogram
from fl_app.progress import Progress, statement
from fl_app.run_directory import (
    CONFIG,
    CURVES,
    METRICS,
    REPORT,
    RESULTS,
    Checkpoint,
    RunDirectory,
    check_new,
)
from fl_app.settings import Settings
from fl_app.stages import DoubleVector, HistoryRow, IndexVector, LoadedData, RoundTrace, Table
from fl_app.training.evaluate import evaluate
from strategies.dp_fedavg import DPFedAvg
from strategies.roster import Roster

if TYPE_CHECKING:
    from fl_app.report import RunReport

log = logging.getLogger("dpfl")

RESUME_MAY_CHANGE = (
    "run.resume",
    "run.stop_after",
    "run.device",
    "engine",
    "federation.num_nodes",
    "federation.min_nodes",
    "federation.join_timeout",
    "federation.round_timeout",
)


def nominal_rows(settings: Settings, data: LoadedData) -> int:
    """Returns the public row count of one client: ``training.nominal_rows``, or an equal share.

    Raises:
        SettingsError: it is needed, not given, and there is nothing to share.
    """
    configured = getattr(settings.training, "nominal_rows", None)
    if configured is not None:
        return int(configured)
    if settings.partition.by == "node" and settings.training.private:
        raise checks.fail(
            "training.nominal_rows",
            None,
            f"partition={settings.partition.kind} does not tell how many rows a client has",
            "set a public number, e.g. the rows of a typical site",
        )
    return max(1, len(data.train.labels) // settings.federation.population)


def evaluation_rows(settings: Settings, data: LoadedData) -> Table:
    """Returns the rows that ``run.evaluate_on`` names.

    Raises:
        SettingsError: the dataset sets no validation rows aside.
    """
    if settings.run.evaluate_on == "test":
        return data.test
    if data.validation is None or len(data.validation.labels) == 0:
        can = hasattr(settings.dataset, "validation_fraction")
        raise checks.fail(
            "run.evaluate_on",
            settings.run.evaluate_on,
            f"dataset={settings.dataset.kind} has no validation rows",
            f"set {'dataset.validation_fraction=0.1' if can else 'run.evaluate_on=test'}",
        )
    return data.validation


def load_settings(overrides: Sequence[str], default_dir: Callable[[], Path]) -> Settings:
    """Returns the checked settings that `overrides` describe, of a new run or a continued one.

    ``run.output_dir`` is filled in: the absolute path of the run directory.

    Args:
        overrides: Hydra overrides.
        default_dir: names the run directory if ``run.output_dir`` does not.

    Raises:
        SettingsError: something in the settings is refused.
    """
    values = compose_mapping(overrides)
    if values.get("run", {}).get("resume") is not None:
        return Settings.from_mapping(_resumed(values, overrides))
    settings = Settings.from_mapping(values)
    path = settings.run.output_dir
    output_dir = default_dir() if path is None else Path(path).expanduser().absolute()
    check_new(output_dir)
    return with_output_dir(settings, output_dir)


def with_output_dir(settings: Settings, path: Path) -> Settings:
    """Returns the settings with their run directory."""
    return dataclasses.replace(
        settings, run=dataclasses.replace(settings.run, output_dir=str(path))
    )


def _resumed(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a stopped run's saved values with the few changes that are allowed."""
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if not any(key == k or key.startswith(f"{k}.") for k in RESUME_MAY_CHANGE):
            raise checks.fail(
                key,
                override.partition("=")[2],
                "a resumed run keeps its settings",
                f"remove it; only {', '.join(RESUME_MAY_CHANGE)} may be given with run.resume",
            )
    path = Path(str(values["run"]["resume"])).expanduser().absolute()
    saved = RunDirectory(path).saved_settings()
    for override in overrides:
        section, _, key = override.lstrip("+~").partition("=")[0].partition(".")
        if section == "engine":
            saved[section] = values[section]
        else:
            saved[section][key] = values[section][key]
    changes = {
        "resume": str(path),
        "output_dir": str(path),
        "stop_after": values["run"]["stop_after"],
    }
    saved["run"] |= changes
    return saved


def run_server(grid: Grid, settings: Settings) -> RunReport:
    """Runs all rounds over `grid` and returns the report; everything is in the run directory, too.

    Args:
        grid: where the nodes are.
        settings: with ``run.output_dir`` filled in (`load_settings`).

    Raises:
        DpflError: the run cannot start, or every client fails.
    """
    data = settings.dataset.load(data_path=None, cache_dir=home() / "cache")
    evaluated = evaluation_rows(settings, data)
    model = new_model(settings, data.spec).to(device(settings.run.device))
    rows = nominal_rows(settings, data)
    size = num_parameters(model)
    settings = with_layers(settings, model)
    plan = make_plan(settings, rows, num_parameters=size)
    settings = with_noise(settings, plan)
    roster = Roster(settings.federation, settings.to_wire())
    roster.gather(grid)
    plan = make_plan(settings, rows, simulated=roster.simulated, num_parameters=size)
    with _ServerRun(settings, plan, model, evaluated) as run:
        return run.go(grid, roster, rows)


def with_layers(settings: Settings, model: nn.Module) -> Settings:
    """Returns the settings with the layers of `model` written in, where the mechanism needs them.

    Raises:
        SettingsError: lists by layer do not fit the model.
    """
    mechanism = settings.mechanism.with_layers(layer_sizes(model))
    return dataclasses.replace(settings, mechanism=mechanism)


def with_noise(settings: Settings, plan: PrivacyPlan) -> Settings:
    """Returns the settings with what the plan decided written in: noise multipliers above all."""
    values = settings.to_mapping()
    values["mechanism"] |= plan.mechanism_constants
    if plan.mechanism_noise_multiplier is not None:
        values["mechanism"]["noise_multiplier"] = plan.mechanism_noise_multiplier
    if plan.training_noise_multiplier is not None:
        values["training"]["noise_multiplier"] = plan.training_noise_multiplier
    return Settings.from_mapping(values)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """What ``dpfl plan`` shows: JSON values and the same as text."""

    values: dict[str, Any]
    text: str


def plan_of(
    overrides: Sequence[str], *, show_partition: bool = False, plot_to: Path | None = None
) -> PlanView:
    """Returns what a run of these overrides will cost; loads data and model, trains nothing.

    Args:
        overrides: Hydra overrides.
        show_partition: add the label histogram of each client; simulations only.
        plot_to: write a picture of that histogram, None: not.

    Raises:
        DpflError: the run could not start.
    """
    settings = Settings.from_mapping(compose_mapping(overrides))
    data = settings.dataset.load(data_path=None, cache_dir=home() / "cache")
    evaluation_rows(settings, data)
    rows = nominal_rows(settings, data)
    model = new_model(settings, data.spec)
    size = num_parameters(model)
    settings = with_layers(settings, model)
    plan = make_plan(settings, rows, num_parameters=size)
    charge = planned_charge(plan)
    table = client_table(plan, plan.charges(plan.affordable_rounds()), {})
    values = plan.to_json(size) | {
        "each_client": [row.to_json() for row in table],
        "num_parameters": size,
        "nominal_rows": rows,
        "node_charge": charge.to_json(),
    }
    facts = plan.summary() | {"parameters": str(size), "nominal rows of a client": str(rows)}
    if (ratio := plan.signal_to_noise(size)) is not None:
        facts["signal to noise (clipping norm / norm of the noise)"] = f"{ratio:.3g}"
    lines = [f"{label}: {value}" for label, value in facts.items()]
    lines += [_outlook(plan)]
    if table:
        lines += [f"{plan.epsilon_of} client by client, at delta {plan.target_delta:g}:"]
    lines += [*table_lines(table), _node_outlook(charge)]
    lines += [f"warning: {text}" for text in plan.warnings]
    if show_partition or plot_to is not None:
        counts = _simulated_histogram(settings, data)
        values["partition"] = counts.tolist()
        lines.append(histogram.to_text(counts))
        if plot_to is not None:
            histogram.plot(counts, plot_to)
    return PlanView(values=values, text="\n".join(lines))


def _outlook(plan: PrivacyPlan) -> str:
    """Returns the statement after the rounds that the budget allows, and how many those are."""
    affordable = plan.affordable_rounds()
    title = f"after all {plan.num_rounds} rounds:"
    if affordable < plan.num_rounds:
        title = (
            f"the budget ends the run after {affordable} of {plan.num_rounds} rounds "
            f"(epsilon {plan.target_epsilon:g} at delta {plan.target_delta:g}); by then:"
        )
    return f"{title}\n{statement(plan.guarantees(affordable), plan.epsilon_of)}"


def _node_outlook(charge: NodeCharge) -> str:
    """Returns what the whole run charges a node's own ledger, at most and as expected."""
    title = "a node's own ledger is charged, for each client that it hosts and that is asked in"
    most = f"{title} {charge.most_requests} rounds, the most possible:"
    text = f"{most}\n{statement(charge.most, None)}"
    if charge.expected_requests < charge.most_requests:
        expected = f"and if asked in {charge.expected_requests}, as expected:"
        text += f"\n{expected}\n{statement(charge.expected, None)}"
    return text


def _simulated_histogram(settings: Settings, data: LoadedData) -> IndexVector:
    if settings.engine.kind == "deployment":
        raise checks.fail(
            "--show-partition",
            settings.engine.kind,
            "is for simulations only: a deployed node does not tell its labels",
            "remove it, or choose engine=local",
        )
    return histogram.label_histogram(settings, data)


class _ServerRun:
    """The open files and the state of one run; closed in every case."""

    def __init__(
        self, settings: Settings, plan: PrivacyPlan, model: nn.Module, evaluated: Table
    ) -> None:
        self.settings, self.plan, self.model, self.evaluated = settings, plan, model, evaluated
        self.history: list[HistoryRow] = []
        self.stop_requested = threading.Event()
        path = Path(str(settings.run.output_dir))
        if settings.run.resume is None:
            self.directory = RunDirectory.create(path, settings.to_public(), settings.run.seed)
            run_id = f"{uuid.uuid4().hex}-{settings.fingerprint()}"
            self.ledger = Ledger.create(self.directory.ledger_path, run_id)
            self.checkpoint = self._first_checkpoint()
        else:
            self.directory = RunDirectory(path)
            self.checkpoint = self.directory.load_checkpoint()
            self.ledger = self.directory.open_ledger()
            self._check_unchanged()
            self.history = list(self.checkpoint.history)

    def _check_unchanged(self) -> None:
        """Refuses to go on under other settings than those that the ledger was begun with."""
        if self.ledger.run_id.endswith(f"-{self.settings.fingerprint()}"):
            return
        self.ledger.close()
        raise LedgerError(
            f"{self.directory.ledger_path}: was begun with other settings than {CONFIG} holds now, "
            f"so its charges would be misread; restore {CONFIG} or start a new run"
        )

    def __enter__(self) -> _ServerRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.close()

    def go(self, grid: Grid, roster: Roster, rows: int) -> RunReport:
        """Runs the rounds that are left and writes the report, also when the run fails."""
        settings, checkpoint = self.settings, self.checkpoint
        strategy = DPFedAvg(
            settings=settings,
            plan=self.plan,
            ledger=self.ledger,
            roster=roster,
            parameters_P=np.array(checkpoint.parameters_P),
            optimizer_state={k: np.array(v) for k, v in checkpoint.optimizer_state.items()},
            to_arrays=self._to_arrays,
            nominal_rows=rows,
            first_round=checkpoint.round + 1,
            clipping_norm=checkpoint.clipping_norm,
            on_round=self._on_round,
            should_stop=self.stop_requested.is_set,
        )
        self.progress = Progress(
            num_rounds=settings.run.num_rounds,
            target_epsilon=settings.privacy.target_epsilon,
            first_round=checkpoint.round + 1,
        )
        self._announce(roster)
        status = "failed"
        try:
            with self.progress, _stop_on_signal(self.stop_requested):
                strategy.start(
                    grid,
                    self._to_arrays(strategy.parameters_P),
                    settings.run.num_rounds,
                    settings.federation.round_timeout,
                    evaluate_fn=self._evaluate,
                )
            status = strategy.status
        finally:
            result = self._write_report(status)
        failed = strategy.last_cause and not strategy.nodes_exhausted
        if failed and not strategy.anybody_answered:
            # The public record shows the run as it was scheduled; only the operator learns this.
            raise FederationError(
                f"nobody answered in any round; the last cause:\n{strategy.last_cause}"
            )
        return result

    def _first_checkpoint(self) -> Checkpoint:
        parameters_P = flat_parameters(self.model).astype(np.float64)
        checkpoint = Checkpoint(
            round=0,
            parameters_P=parameters_P,
            optimizer_state=self.settings.server_optimizer.start(parameters_P.size),
            history=[],
            ledger_head=self.ledger.head,
            ledger_rows=self.ledger.num_rows,
        )
        self.directory.save_checkpoint(checkpoint)
        return checkpoint

    def _to_arrays(self, parameters_P: DoubleVector) -> ArrayRecord:
        set_flat_parameters(self.model, parameters_P)
        return wire.model_record(self.model.state_dict())

    def _evaluate(self, round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluates the released model, where it is due."""
        run = self.settings.run
        if round % run.evaluate_every and round not in (run.num_rounds, run.stop_after):
            return None
        return MetricRecord(dict(self._metrics()))

    def _metrics(self) -> dict[str, float]:
        return evaluate(self.model, self.evaluated, device(self.settings.run.device))

    def _on_round(
        self, strategy: DPFedAvg, trace: RoundTrace, metrics: MetricRecord | None
    ) -> None:
        order = strategy.last_order
        norm = None if order is None else order.clipping_norm
        row = self._history_row(trace.round, metrics, norm)
        self.history.append(row)
        self.directory.log_round(trace, len(self.plan.events))
        self.checkpoint = Checkpoint(
            round=trace.round,
            parameters_P=strategy.parameters_P.copy(),
            optimizer_state=strategy.optimizer_state,
            history=self.history,
            ledger_head=self.ledger.head,
            ledger_rows=self.ledger.num_rows,
            clipping_norm=strategy.clipping_norm,
        )
        self.directory.save_checkpoint(self.checkpoint)
        self._save_metrics()
        self.progress.show(row, trace)

    def _save_metrics(self) -> None:
        delta = self.settings.privacy.target_delta
        self.directory.save_metrics(self.history, self.plan.epsilon_of, delta)

    def _history_row(
        self, round: int, metrics: MetricRecord | None, client_norm: float | None
    ) -> HistoryRow:
        clipping_norm, std = self.plan.bound_noise(round, client_norm)
        measured = {} if metrics is None else {name: _scalar(metrics, name) for name in metrics}
        return HistoryRow(
            round=round,
            accuracy=measured.pop("accuracy", None),
            loss=measured.pop("loss", None),
            other_metrics=measured,
            epsilon=self.plan.epsilon_after(self.ledger.counts(), self.ledger.repeats()),
            cohort_expected=self.settings.cohort.expected_size(self.settings.federation.population),
            clipping_norm=clipping_norm,
            noise_std_of_sum=std,
        )

    def _announce(self, roster: Roster) -> None:
        settings, say = self.settings, self.progress.say
        say(
            f"{getattr(settings.dataset, 'hub_id', None) or settings.dataset.kind} x "
            f"{settings.model.kind}: {settings.federation.population} "
            f"clients on {roster.num_nodes} nodes, {settings.run.num_rounds} rounds, "
            f"training {settings.training.kind}, mechanism {settings.mechanism.kind}"
        )
        say(_outlook(self.plan))
        for warning in self.plan.warnings:
            say(f"warning: {warning}")

    def _write_report(self, status: str) -> RunReport:
        """Writes what the last checkpoint holds; a round that was cut short is not published."""
        set_flat_parameters(self.model, self.checkpoint.parameters_P)
        settings, counts = self.settings, self.ledger.counts()
        result = report.RunReport(
            status=status,
            num_rounds_done=self.checkpoint.round,
            num_rounds=settings.run.num_rounds,
            final=self._metrics(),
            evaluated_on=settings.run.evaluate_on,
            target_delta=settings.privacy.target_delta,
            target_epsilon=settings.privacy.target_epsilon,
            epsilon_of=self.plan.epsilon_of,
            guarantees=self.plan.guarantees_of(counts, self.ledger.repeats()),
            warnings=self.plan.warnings,
            history=self.history,
            ledger_head=self.ledger.head,
            ledger_rows=self.ledger.num_rows,
            seeded_noise=settings.run.seeded_noise,
            summary=self.plan.summary(),
            each_client=client_table(self.plan, counts, self.ledger.repeats()),
        )
        self.directory.save_model(self.model.state_dict())
        self._save_metrics()
        self.directory.save_text(REPORT, result.to_markdown())
        self.directory.save_text(RESULTS, result.to_json())
        bound = next((g for g in result.guarantees if g.name == result.epsilon_of), None)
        path = self.directory.path / CURVES
        report.plot_curves(self.history, bound, path, result.evaluated_on)
        self._conclude(result)
        return result

    def _conclude(self, result: RunReport) -> None:
        say = self.progress.say
        accuracy = result.final.get("accuracy", float("nan"))
        area = f", AUC {result.final['auc']:.4f}" if "auc" in result.final else ""
        say(
            f"{result.status} after {result.num_rounds_done} rounds, "
            f"{result.evaluated_on} accuracy {100 * accuracy:.2f} %{area}"
        )
        say(statement(result.guarantees, result.epsilon_of))
        say(f"run directory: {self.directory.path}  (see {RESULTS}, {METRICS}, {REPORT})")


class _stop_on_signal:  # noqa: N801  (reads as a with-statement verb)
    """Turns SIGINT and SIGTERM into a request to stop after the round in progress."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event
        self._old: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()
        log.warning("stopping after this round; once more stops at once (run.resume continues)")


def _scalar(metrics: MetricRecord, name: str) -> float:
    value = metrics[name]
    if isinstance(value, list):
        raise SettingsError(f"metric {name}: must be one number")
    return float(value)
