"""The run directory: what a run leaves on disk, and how a stopped run is taken up again.

``results.json metrics.csv config.yaml ledger.sqlite model.safetensors checkpoint.safetensors
privacy_report.md curves.png`` are public; ``operator.jsonl`` (mode 0600) tells who was sampled and
the seed, and is the operator's only.
"""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file as save_torch

from fl_app import checks
from fl_app.accounting.ledger import Ledger, heads, read, read_id, verify
from fl_app.accounting.node_ledger import data_id_of, head_problems
from fl_app.errors import LedgerError, SettingsError
from fl_app.report import PRIVACY_REPORT, history_columns, history_values
from fl_app.stages import DoubleVector, HistoryRow, RoundTrace

RESULTS = "results.json"
METRICS = "metrics.csv"
CONFIG = "config.yaml"
LEDGER = "ledger.sqlite"
MODEL = "model.safetensors"
CHECKPOINT = "checkpoint.safetensors"
REPORT = PRIVACY_REPORT
CURVES = "curves.png"
OPERATOR = "operator.jsonl"

_PARAMETERS = "parameters"
_OPTIMIZER = "optimizer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a run needs to go on after round `round`. Released values and public facts only.

    Attributes:
        round: rounds done.
        parameters_P: [P] float64 global parameters.
        optimizer_state: the server optimizer's vectors.
        history: the public record so far.
        ledger_head: digest of the ledger's last row at that time.
        ledger_rows: number of its rows at that time.
        clipping_norm: client-level C of the next round, None without client-level privacy.
    """

    round: int
    parameters_P: DoubleVector
    optimizer_state: Mapping[str, DoubleVector]
    history: Sequence[HistoryRow]
    ledger_head: str
    ledger_rows: int
    clipping_norm: float | None = None


class RunDirectory:
    """Paths and writers of one run directory; files appear whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], seed: int) -> RunDirectory:
        """Returns a new run directory with its configuration and the operator's file.

        Raises:
            SettingsError: there is something in `path` already.
        """
        check_new(path)
        path.mkdir(parents=True, exist_ok=True)
        directory = cls(path)
        directory._write(CONFIG, to_yaml(config).encode())
        directory.log_operator({"event": "start", "seed": seed})
        return directory

    @property
    def ledger_path(self) -> Path:
        """Path of the ledger."""
        return self.path / LEDGER

    def log_operator(self, record: Mapping[str, Any]) -> None:
        """Appends one line to the operator's file, which nobody else may read."""
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **record}) + "\n"
        descriptor = os.open(self.path / OPERATOR, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(line)

    def log_round(self, trace: RoundTrace, num_charges: int) -> None:
        """Appends what really happened in a round, and its number of charges, for the operator."""
        record = {"event": "round", **asdict(trace), "absent": trace.absent}
        self.log_operator(record | {"charges": num_charges})

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Writes the checkpoint; the one before stays until the new one is complete."""
        tensors = {_PARAMETERS: checkpoint.parameters_P} | {
            _OPTIMIZER + name: vector for name, vector in checkpoint.optimizer_state.items()
        }
        metadata = {
            "round": str(checkpoint.round),
            "ledger_head": checkpoint.ledger_head,
            "ledger_rows": str(checkpoint.ledger_rows),
            "clipping_norm": json.dumps(checkpoint.clipping_norm),
            "history": json.dumps([asdict(row) for row in checkpoint.history]),
        }
        temporary = self.path / (CHECKPOINT + ".tmp")
        save_numpy(tensors, temporary, metadata=metadata)
        _publish(temporary, self.path / CHECKPOINT)

    def load_checkpoint(self) -> Checkpoint:
        """Returns the last complete checkpoint.

        Raises:
            SettingsError: there is none, or it cannot be read.
        """
        path = self.path / CHECKPOINT
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Checkpoint(
                round=int(metadata["round"]),
                parameters_P=tensors[_PARAMETERS].astype(np.float64),
                optimizer_state={
                    name.removeprefix(_OPTIMIZER): vector.astype(np.float64)
                    for name, vector in tensors.items()
                    if name.startswith(_OPTIMIZER)
                },
                history=[HistoryRow(**row) for row in json.loads(metadata["history"])],
                ledger_head=metadata["ledger_head"],
                ledger_rows=int(metadata["ledger_rows"]),
                clipping_norm=json.loads(metadata["clipping_norm"]),
            )
        except Exception as error:  # safetensors raises several kinds of its own
            raise checks.fail(
                "run.resume", self.path, f"has no readable checkpoint ({error})", "start a new run"
            ) from error

    def open_ledger(self) -> Ledger:
        """Returns the run's ledger for appending.

        Raises:
            LedgerError: missing, damaged, or older than checkpoint, results or log (rule 7).
        """
        if problems := verify_ledger(self.ledger_path):
            raise LedgerError(
                f"{self.ledger_path}: {'; '.join(problems)}; without the complete ledger the spent "
                "budget is unknown, so the run is not continued; "
                "restore the file or start a new run"
            )
        return Ledger.open(self.ledger_path)

    def save_model(self, state: Mapping[str, torch.Tensor]) -> None:
        """Writes the released model under its plain parameter names."""
        temporary = self.path / (MODEL + ".tmp")
        save_torch({k: v.detach().cpu().contiguous() for k, v in state.items()}, temporary)
        _publish(temporary, self.path / MODEL)

    def save_metrics(
        self, history: Sequence[HistoryRow], epsilon_of: str | None, delta: float
    ) -> None:
        """Writes the public record as a table, one line a round, each epsilon with what it is."""
        rows = [[*values.values(), delta, epsilon_of] for values in history_values(history)]
        with io.StringIO(newline="") as text:
            csv.writer(text, lineterminator="\n").writerows(
                [[*history_columns(history), "delta", "epsilon_of"], *rows]
            )
            self.save_text(METRICS, text.getvalue())

    def save_text(self, name: str, text: str) -> None:
        """Writes a text file."""
        self._write(name, text.encode())

    def saved_settings(self) -> dict[str, Any]:
        """Returns the plain values of the run's settings, with the seed from the operator's file.

        Raises:
            SettingsError: not a run directory, or the operator's file is missing.
        """
        import yaml

        try:
            values = yaml.safe_load((self.path / CONFIG).read_text(encoding="utf-8"))
            with open(self.path / OPERATOR, encoding="utf-8") as file:
                start = json.loads(file.readline())
            values["run"]["seed"] = start["seed"]
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise checks.fail(
                "run.resume",
                self.path,
                f"needs {CONFIG} and {OPERATOR} of a run ({error})",
                "name the directory of an earlier run",
            ) from error
        if not isinstance(values, dict):
            raise SettingsError(f"{self.path / CONFIG}: is not a mapping")
        return values

    def _rounds_without_charge(self, num_rows: int) -> list[str]:
        """Returns the problem that the operator's file logs more rounds than the ledger charged."""
        lines = (self.path / OPERATOR).read_text(encoding="utf-8").splitlines()
        charges = sum(json.loads(line).get("charges", 0) for line in lines)
        return [f"{OPERATOR}: older: {num_rows} rows, {charges} charges"] * (charges > num_rows)

    def _write(self, name: str, content: bytes) -> None:
        temporary = self.path / (name + ".tmp")
        temporary.write_bytes(content)
        _publish(temporary, self.path / name)


def verify_ledger(path: Path) -> list[str]:
    """Returns what is wrong with a ledger, also against what is kept beside it.

    A node's ledger has a head file there; a run's has results, checkpoint and operator's log.
    """
    problems = verify(path)
    if not problems and data_id_of(read_id(path)) is not None:
        return head_problems(path, heads(path))
    folder = RunDirectory(path.parent)
    if not problems and (folder.path / CHECKPOINT).exists():
        checkpoint = folder.load_checkpoint()
        problems += _against(path, CHECKPOINT, checkpoint.ledger_head, checkpoint.ledger_rows)
    if not problems and (folder.path / RESULTS).exists():
        kept = json.loads((folder.path / RESULTS).read_text(encoding="utf-8"))["ledger"]
        problems += _against(path, RESULTS, kept["head"], kept["rows"])
    if not problems and (folder.path / OPERATOR).exists():
        problems += folder._rounds_without_charge(len(read(path)))
    return problems


def _against(path: Path, source: str, head: str, num_rows: int) -> list[str]:
    return [f"{source}: {p}" for p in verify(path, head=head, num_rows=num_rows)]


def check_new(path: Path) -> None:
    """Raises SettingsError if a run cannot be put into `path`."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise checks.fail(
            "run.output_dir",
            path,
            "holds something already",
            "choose a new directory, or run.resume=<run directory> to continue",
        )


def to_yaml(values: Mapping[str, Any]) -> str:
    """Returns plain nested values as YAML with floats that every YAML reader reads as floats."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
        text = repr(value)
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e", 1)
        return dumper.represent_scalar("tag:yaml.org,2002:float", text)

    Dumper.add_representer(float, represent)
    return yaml.dump(dict(values), Dumper=Dumper, sort_keys=False)


def _publish(temporary: Path, final: Path) -> None:
    """Makes `temporary` durable and readable and moves it into place."""
    os.chmod(temporary, 0o644)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
