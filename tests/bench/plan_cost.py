"""What ``dpfl plan --cost`` predicts against what the run then measures."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fl_app.cost import estimate
from fl_app.rehearsal import peak_memory, peak_memory_of_others
from fl_app.server_run import load_settings, run_server
from fl_app.settings import Settings
from tests.bench._core import Benchmark, Line, Options

RUNS: Mapping[str, list[str]] = {
    "digits, the main job": ["run.num_rounds=20"],
    "digits, the main job in Flower's simulation": ["run.num_rounds=20", "engine=simulation"],
    "mnist, cnn, record level, 10 clients": [
        "dataset=mnist",
        "model=cnn",
        "run.num_rounds=5",
        "training.batch_rate=0.05",
        "training.noise_multiplier=1.0",
        "privacy.target_epsilon=null",
    ],
    "mnist, cnn, client level, cohort 100 of 1,000": [
        "dataset=mnist",
        "model=cnn",
        "mechanism=central_gaussian",
        "cohort=fixed_size",
        "cohort.size=100",
        "accountant=rdp",
        "mechanism.noise_multiplier=1.0",
        "privacy.target_epsilon=null",
        "federation.population=1000",
        "training.batch_size=20",
        "run.num_rounds=6",
        "run.evaluate_every=3",
    ],
}
TINY = {"digits, server and node in one": ["run.num_rounds=3", "engine.num_workers=0"]}
KEYS = ("seconds_per_round", "seconds_total", "server_memory_bytes", "worker_memory_bytes")


@dataclass(frozen=True, kw_only=True)
class PlanCost(Benchmark):
    """Predicted over measured: seconds and peak memory.

    Attributes:
        target: how far from 1 the ratios of a round's seconds and of memory should be at most.
    """

    target: float

    def lines(self, found: dict[str, Any]) -> list[Line]:
        key = "seconds_per_round"
        return [
            Line(
                work=f"dpfl plan --cost, seconds of a round: {name}",
                ours=f"{run['predicted'][key]:.3g} s predicted",
                baseline=f"{run['measured'][key]:.3g} s measured",
                ratio=f"{run['ratios'][key]:.2f}",
                target=f"{1 - self.target:g} to {1 + self.target:g}",
                met=abs(run["ratios"][key] - 1) <= self.target,
            )
            for name, run in found["runs"].items()
        ]

    def run(self, options: Options) -> dict[str, Any]:
        found, lines = {}, []
        for name, overrides in (TINY if options.tiny else RUNS).items():
            predicted, measured = estimate(overrides).to_json(), _measured(overrides)
            for key in ("bytes_sent_per_round", "bytes_received_per_round"):
                assert predicted[key] == measured[key], key
            ratios = {
                key: predicted[key] / measured[key]
                for key in KEYS
                if measured[key] is not None and measured[key] > 0
            }
            found[name] = {"predicted": predicted, "measured": measured, "ratios": ratios}
            shown = ", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())
            lines.append(f"{name}: {shown} ({measured['seconds_per_round']:.3g} s a round)")
        title = f"predicted / measured, target 1 +- {self.target:g} of a round and of memory"
        return {"runs": found, "target": self.target, "text": "\n  ".join([title, *lines])}


def _measured(overrides: list[str]) -> dict[str, Any]:
    """Returns what a whole run in a new process takes, under the names of the plan."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, overrides, time.time()).result()


class _Watched:
    """A grid that notes when each round asks its nodes."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.simulated = True
        self.asked: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        self.asked.append(time.time())
        return self._grid.send_and_receive(messages, timeout=timeout)


def _run(overrides: list[str], started: float) -> dict[str, Any]:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a run shows
    found: dict[str, Any] = {}

    def serve(grid: Grid, settings: Settings) -> None:
        watched: Any = _Watched(grid)
        run_server(watched, settings)
        # The first rounds load what the later ones find there.
        rounds = [b - a for a, b in pairwise(watched.asked[1:])]
        found["seconds_of_rounds"] = rounds
        found["seconds_per_round"] = statistics.mean(rounds)
        found["server_memory_bytes"] = peak_memory("self")
        found["worker_memory_bytes"] = peak_memory_of_others()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        settings = load_settings([*overrides, f"run.output_dir={path}"], lambda: path)
        settings.engine.run(settings, serve)
        found["seconds_total"] = time.time() - started
        log = (path / "operator.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(log[-1])
    return found | {f"bytes_{way}_per_round": last[f"bytes_{way}"] for way in ("sent", "received")}


BENCHMARK = PlanCost(title="dpfl plan --cost against the run itself", target=0.3)
